"""Chooses what a rank runs in each step: continuous batching over a paged cache, without ever touching a tensor.

One step is propose() -> (the ranks agree) -> commit() -> (the model runs) -> complete() for every committed chunk.
Running requests are always older than waiting ones: admission is strictly first come first served, and a preempted
request (the youngest, when blocks run out) returns to the front of the queue. From that follows that nobody starves:
the oldest request can take a block from any other, and add() refuses what would not fit even alone.
Nothing is ever rolled back: a proposal that is not run leaves its blocks with its requests, for the next proposal.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_serve.attention_dp.block_pool import BlockPool
from moe_serve.attention_dp.prefix_cache import PrefixCache, next_key, root_key
from moe_serve.attention_dp.request import Request, check_length
from moe_serve.errors import ConfigError, RequestError


class ScheduledChunk(NamedTuple):
    """Tokens start..start+length of one request (known tokens, then drafts) that are computed in one step."""

    request: Request
    start: int  # = request.num_computed
    length: int
    samples: bool  # the chunk reaches the last known token: its row, and each draft's row, yields a token


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rank would run in the next step. Decodes: one known token (and drafts); prefills: everything else."""

    decodes: tuple[ScheduledChunk, ...] = ()
    prefills: tuple[ScheduledChunk, ...] = ()
    preempted: tuple[str, ...] = ()  # ids of requests that lost their blocks to this proposal
    num_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start; they only grow."""

    num_admitted: int = 0  # first admissions
    num_preempted: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_prompt_tokens: int = 0  # of those, supplied by the prefix cache
    num_recomputed_tokens: int = 0  # computed before, lost to preemption, and not found in the prefix cache again


class Scheduler:
    """The requests of one rank."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_running: int,
        max_batch_tokens: int,
        max_model_len: int,
        prefix_cache: bool = True,
        model_key: bytes = b"",
    ):
        if max_running > max_batch_tokens:
            raise ConfigError(
                f"engine.max_running_requests is {max_running} but a step takes at most engine.max_batch_tokens = "
                f"{max_batch_tokens} tokens, one for each; raise max_batch_tokens or lower max_running_requests"
            )
        self.block_size = block_size
        self.max_running = max_running
        self.max_batch_tokens = max_batch_tokens
        self.max_model_len = max_model_len
        self._model_key = model_key
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache() if prefix_cache else None
        self._running: dict[str, Request] = {}  # in order of arrival, like the next
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._num_arrivals = 0
        self._refused_at: tuple[Request, int] | None = None  # head of the queue that did not fit, free blocks then
        self._stats = SchedulerStats()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Returns how many blocks no request holds; they may hold reusable prefixes."""
        return self._pool.num_free

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        """Returns a copy of the counters."""
        return replace(self._stats)

    def get(self, request_id: str) -> Request | None:
        """Returns the request, running or waiting; None once it is finished or aborted."""
        return self._running.get(request_id) or self._waiting.get(request_id)

    @property
    def pending_tokens(self) -> tuple[int, int]:
        """Returns (known tokens not in the cache yet, tokens that may still be produced) over all requests."""
        uncomputed = to_produce = 0
        for requests in (self._running, self._waiting):
            for request in requests.values():
                uncomputed += request.num_known - request.num_computed
                to_produce += request.params.max_new_tokens - len(request.output_ids)
        return uncomputed, to_produce

    def add(self, request: Request) -> None:
        """Queues a request, which may bring output ids of an earlier attempt.

        Raises RequestError when it can never run: parameters out of range, no prompt, too long for the model or for the
        whole cache, nothing left to produce, or an id that is in use.
        """
        request.params.validate()
        if request.request_id in self._running or request.request_id in self._waiting:
            raise RequestError(
                f"request id {request.request_id!r} is in use by a request that is not finished; choose another",
                field="rid",
            )
        check_length(
            len(request.prompt_ids), len(request.output_ids), request.params.max_new_tokens,
            self.max_model_len, self._pool.num_blocks * self.block_size,
        )  # fmt: skip
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        request.num_cached_prompt = 0
        request.was_preempted = False
        request.block_keys = []
        self._forget_progress(request)
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        """Forgets a request and frees its blocks, at any moment; returns False when there is none.

        Its chunk leaves a proposal that is not committed yet. The results of a step that is running are ignored.
        """
        request = self._waiting.pop(request_id, None)
        if request is None:
            request = self._running.pop(request_id, None)
            if request is None:
                return False
            self._free(request)
        return True

    def finish(self, request_id: str) -> None:
        """Frees a request that has all its tokens. Its full blocks stay reusable by prefix until they are evicted."""
        self.abort(request_id)

    def propose(self) -> Proposal:
        """Returns what to run next and reserves its blocks. Costs O(running + admitted).

        Decodes first, then prefills that are under way, then admissions, each in order of arrival. Preempts only when a
        decode finds no block. A prefill without blocks waits: only the youngest can lack some, because admission stops
        at the first request whose prompt does not fit the step, so all others go on and end.
        """
        order = list(self._running.values())
        decodes, prefilling, preempted = self._propose_decodes(order)
        budget = self.max_batch_tokens - sum([chunk.length for chunk in decodes])
        prefills: list[ScheduledChunk] = []
        for request in prefilling:
            length = min(request.num_known - request.num_computed, budget, self._room(request))
            if length == 0:
                break
            prefills.append(self._extend(request, length))
            budget -= length
        self._admit(budget, prefills)
        num_tokens = sum([chunk.length for chunk in decodes]) + sum([chunk.length for chunk in prefills])
        return Proposal(tuple(decodes), tuple(prefills), tuple(preempted), num_tokens)

    def commit(self, proposal: Proposal, hold_prefill: bool = False) -> tuple[ScheduledChunk, ...]:
        """Returns the chunks to run, decodes first: those of the newest proposal, without requests aborted since.

        hold_prefill: run the decodes only. Held prefills keep their blocks and are proposed again.
        """
        chunks = proposal.decodes if hold_prefill else proposal.decodes + proposal.prefills
        running = self._running
        return tuple([chunk for chunk in chunks if running.get(chunk.request.request_id) is chunk.request])

    def complete(self, chunk: ScheduledChunk, token_ids: Sequence[int] = ()) -> None:
        """Records that a committed chunk has run: its KV is in the cache, and these tokens were sampled from it.

        token_ids: of a chunk that samples, the accepted drafts and then one new token: 1 .. 1 + number of drafts.
                   No token at all is legal too: the last row is then computed again.
        """
        request = chunk.request
        if self._running.get(request.request_id) is not request:
            return  # aborted while the step ran
        assert chunk.start == request.num_computed, (
            f"a chunk of {request.request_id} was completed twice or out of order"
        )
        if chunk.samples:
            num_known = request.num_known
            assert num_known + len(token_ids) <= chunk.start + chunk.length + 1, "more tokens than rows that sample"
            request.num_computed = num_known + len(token_ids) - 1  # rejected drafts are overwritten later
            request.output_ids += token_ids
            if request.draft_ids:
                request.draft_ids.clear()
        else:
            assert not token_ids, "tokens were sampled from a chunk that ends before the last known token"
            request.num_computed += chunk.length
        if request.num_computed >= (request.num_published + 1) * self.block_size:
            self._publish(request)

    def flush_prefix_cache(self) -> None:
        """Makes sure that nothing computed so far is reused by a request admitted later."""
        if self._cache is not None:
            self._cache.clear()
            for request in self._running.values():
                request.shares_blocks = False

    def check(self) -> None:
        """Asserts the block accounting, the order of requests, and that no block to be written is shared. For tests."""
        running, waiting = list(self._running.values()), list(self._waiting.values())
        self._pool.check(request.block_ids for request in running)
        arrivals = [request.arrival for request in running + waiting]
        assert arrivals == sorted(arrivals), f"requests are out of order: {arrivals}"
        assert len(running) <= self.max_running
        for request in waiting:
            assert not request.block_ids
            assert request.num_computed == 0
        for request in running:
            assert request.num_computed < request.num_known
            assert len(request.block_ids) * self.block_size >= request.num_computed
            for block in request.block_ids[request.num_computed // self.block_size :]:
                assert self._pool.num_references(block) == 1, f"block {block} is shared but not computed"
                assert self._cache is None or block not in self._cache, f"block {block} is published but not computed"
        if self._cache is not None:
            self._cache.check()

    def _propose_decodes(self, order: list[Request]) -> tuple[list[ScheduledChunk], list[Request], list[str]]:
        """Returns (decode chunks, requests that still prefill, ids preempted); drops the preempted from `order`."""
        decodes: list[ScheduledChunk] = []
        prefilling: list[Request] = []
        preempted: list[str] = []
        block_size = self.block_size
        spare = self.max_batch_tokens - len(order)  # for drafts: every running request has one token of the budget
        index = 0
        while index < len(order):
            request = order[index]
            index += 1
            start = request.num_computed
            num_outputs = len(request.output_ids)
            if not num_outputs or len(request.prompt_ids) + num_outputs - start != 1:
                prefilling.append(request)
                continue
            if start == len(request.block_ids) * block_size:
                # The youngest first, so victims have no chunk yet. The last one is the request itself: it then is the
                # youngest, so nobody shares the block it has written last, and that one becomes free.
                while self._pool.num_free == 0:
                    preempted.append(self._preempt(order.pop()))
                if index > len(order):
                    break
                request.block_ids += self._allocate(1)
            if request.draft_ids:
                spare -= self._reserve_drafts(request, spare)
            decodes.append(ScheduledChunk(request, start, 1 + len(request.draft_ids), True))
        return decodes, prefilling, preempted

    def _reserve_drafts(self, request: Request, spare: int) -> int:
        """Cuts the drafts to the budget, the request's limit and the free blocks; returns how many are left."""
        still_wanted = request.params.max_new_tokens - len(request.output_ids) - 1
        kept = max(0, min(len(request.draft_ids), spare, still_wanted, self._room(request) - 1))
        del request.draft_ids[kept:]
        self._reserve(request, request.num_computed + 1 + kept)
        return kept

    def _admit(self, budget: int, prefills: list[ScheduledChunk]) -> None:
        """Starts waiting requests in order while budget and blocks last, and appends their first chunks."""
        while budget > 0 and self._waiting and len(self._running) < self.max_running:
            request = next(iter(self._waiting.values()))
            if self._running and self._refused_at is not None:
                refused, num_free = self._refused_at
                if refused is request and self._pool.num_free <= num_free:
                    return  # nothing was freed since: do not look its prefix up in every step
            shared = [] if self._cache is None else self._cache.match(self._reusable_keys(request))
            start = len(shared) * self.block_size
            length = min(request.num_known - start, budget)
            # A preempted request comes back only when all of it fits and every running request has one block to grow
            # into; otherwise it would be preempted again at once.
            end = request.num_known if request.was_preempted else start + length
            needed = self._num_blocks(end) - len(shared) + (len(self._running) if request.was_preempted else 0)
            if self._running and needed > self._pool.num_free - self._pool.num_free_among(shared):
                self._refused_at = (request, self._pool.num_free)
                return
            self._refused_at = None
            del self._waiting[request.request_id]
            self._running[request.request_id] = request
            self._pool.share(shared)
            request.block_ids += shared
            request.num_computed = start
            request.num_published = len(shared)
            self._count_admission(request)
            prefills.append(self._extend(request, length))
            budget -= length

    def _reusable_keys(self, request: Request) -> list[bytes]:
        """Returns the keys of the blocks that end before the last known token.

        That token's row is needed, and computing it writes its block, which must not be a shared one.
        """
        return request.block_keys[: (request.num_known - 1) // self.block_size]

    def _count_admission(self, request: Request) -> None:
        stats = self._stats
        if request.was_preempted:
            stats.num_recomputed_tokens += max(0, request.num_lost - request.num_computed)
            return
        request.num_cached_prompt = min(request.num_computed, len(request.prompt_ids))
        stats.num_admitted += 1
        stats.num_prompt_tokens += len(request.prompt_ids)
        stats.num_cached_prompt_tokens += request.num_cached_prompt

    def _extend(self, request: Request, length: int) -> ScheduledChunk:
        """Returns the request's next prefill chunk, blocks reserved; the caller has checked that they are free."""
        start = request.num_computed
        request.draft_ids = []  # drafts ride on decodes only
        self._reserve(request, start + length)
        return ScheduledChunk(request, start, length, start + length == request.num_known)

    def _room(self, request: Request) -> int:
        """Returns how many more tokens of the request the cache could take now."""
        return (len(request.block_ids) + self._pool.num_free) * self.block_size - request.num_computed

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _reserve(self, request: Request, end: int) -> None:
        missing = self._num_blocks(end) - len(request.block_ids)
        if missing > 0:
            request.block_ids += self._allocate(missing)

    def _allocate(self, count: int) -> list[int]:
        blocks = self._pool.allocate(count)
        if self._cache is not None:
            self._cache.forget(blocks)
        return blocks

    def _preempt(self, request: Request) -> str:
        """Takes a running request's blocks away and puts it at the front of the queue."""
        del self._running[request.request_id]
        request.was_preempted = True
        request.num_lost = request.num_computed
        self._stats.num_preempted += 1
        self._free(request)
        self._forget_progress(request)
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        return request.request_id

    def _free(self, request: Request) -> None:
        # The tail first: it is evicted first, and a prefix without its tail is still useful.
        for block in reversed(request.block_ids):
            self._pool.release(block, keep=self._cache is not None and block in self._cache)
        request.block_ids = []

    def _forget_progress(self, request: Request) -> None:
        """Makes a request that holds no blocks ready to be admitted."""
        request.block_ids = []
        request.num_computed = request.num_published = 0
        request.draft_ids = []
        request.shares_blocks = True
        self._extend_keys(request, request.num_known // self.block_size)

    def _extend_keys(self, request: Request, num_keys: int) -> None:
        if self._cache is None:
            return
        keys, size = request.block_keys, self.block_size
        for index in range(len(keys), num_keys):
            previous = keys[-1] if keys else root_key(self._model_key, request.salt, size)
            keys.append(next_key(previous, request.token_ids(index * size, (index + 1) * size)))

    def _publish(self, request: Request) -> None:
        """Offers the blocks that became full to the prefix cache."""
        num_full = request.num_computed // self.block_size
        if self._cache is not None and request.shares_blocks:
            self._extend_keys(request, num_full)
            for index in range(request.num_published, num_full):
                self._cache.publish(request.block_keys[index], request.block_ids[index])
        request.num_published = num_full
