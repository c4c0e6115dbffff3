"""Chooses the work of a rank in each step: continuous batching over a paged cache, without touching a tensor.

One step is propose() -> (the ranks agree) -> commit() -> (the model runs) -> complete() for every committed chunk.
Running requests are always older than waiting ones: admission is strictly first come, first served, and a preempted
request (the youngest, when blocks run out) returns to the front of the queue. So no request starves: the oldest one can
take a block from any other, and add() refuses a request that would not fit alone.
Prefills run side by side, all their blocks reserved: `share_budget` says how they share a step.
Nothing is rolled back: the blocks of a proposal that did not run stay with its requests, for the next proposal.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from moe_serve.attention_dp.request import Request, check_length
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.speculation import Speculator
from moe_serve.errors import ConfigError, RequestError


class ScheduledChunk(NamedTuple):
    """Tokens start..start+length of one request, which are computed in one step: known ones, then drafts.

    samples: the known ones end with the last, so its row yields a token, and so does that of each draft
    drafts:  tokens that may come next. What is computed from them counts as far as they are those that are drawn
    """

    request: Request
    start: int  # = request.num_computed
    length: int
    samples: bool
    drafts: tuple[int, ...] = ()

    @property
    def num_known(self) -> int:
        """Returns how many of its tokens are known."""
        return self.length - len(self.drafts)


# In two thirds of the time that ScheduledChunk(...) takes; there is one for each running request in each step.
_chunk: Callable[[tuple[Request, int, int, bool, tuple[int, ...]]], ScheduledChunk] = partial(
    tuple.__new__, ScheduledChunk
)


class Proposal(NamedTuple):
    """The chunks that a rank would run in the next step.

    Decodes: the one token sampled last, and drafts behind it; prefills: all others
    """

    decodes: tuple[ScheduledChunk, ...] = ()
    prefills: tuple[ScheduledChunk, ...] = ()
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
        blocks: RequestBlocks,
        max_running: int,
        max_batch_tokens: int,
        max_model_len: int,
        speculator: Speculator | None = None,
    ):
        if max_running > max_batch_tokens:
            raise ConfigError(
                f"engine.max_running_requests is {max_running} but a step takes at most engine.max_batch_tokens = "
                f"{max_batch_tokens} tokens, one for each; raise max_batch_tokens or lower max_running_requests"
            )
        self.blocks = blocks
        self.max_running = max_running
        self.max_batch_tokens = max_batch_tokens
        self.max_model_len = max_model_len
        self.speculator = speculator
        self._running: dict[str, Request] = {}  # in order of arrival, like the next
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._num_arrivals = 0
        self._left_since_proposal = False  # whether a request has left `running`, maybe with a chunk
        self._refused_at: tuple[Request, int] | None = None  # head of the queue that did not fit, free blocks then
        self._stats = SchedulerStats()
        self.awaits_pages = False  # whether a prefill was left out of the newest proposal, until its pages have come up

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        """Returns a copy of the counters."""
        return replace(self._stats)

    @property
    def pending_tokens(self) -> int:
        """Returns how many known tokens are not in the cache yet, over all requests."""
        requests = (*self._running.values(), *self._waiting.values())
        return sum([request.num_known - request.num_computed for request in requests])

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
            self.max_model_len, self.blocks.num_blocks * self.blocks.block_size,
        )  # fmt: skip
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        request.num_cached_prompt = 0
        request.was_preempted = False
        request.block_keys = []
        self.blocks.begin(request)
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        """Forgets a request and frees its blocks, at any moment; returns False when there is none. One that was only
        expected is none.

        Its chunk leaves a proposal that is not committed yet. The results of a step that is running are ignored.
        """
        self.blocks.end_expected(request_id)
        request = self._waiting.pop(request_id, None)
        if request is None:
            request = self._running.pop(request_id, None)
            if request is None:
                return False
            self._left_since_proposal = True
            self.blocks.release(request)
        if self.speculator is not None:
            self.speculator.end(request)
        return True

    def is_running(self, request: Request) -> bool:
        """Returns whether a request was admitted, and has neither ended nor lost its blocks since."""
        return self._running.get(request.request_id) is request

    def finish(self, request_id: str) -> None:
        """Frees a request that has all its tokens. Its full blocks stay reusable by prefix until they are evicted."""
        self.abort(request_id)

    def discard(self, request_id: str) -> None:
        """Frees a running request whose values are not finite. No later request reuses its blocks by prefix."""
        self.blocks.withdraw(self._running[request_id])
        self.abort(request_id)

    def propose(self) -> Proposal:
        """Returns the chunks to run next and reserves their blocks. Costs O(running + admitted).

        Decodes come first, one token each; only they preempt. The rest of the budget is shared among prefills, those
        admitted now included. A prefill holds the blocks of all its known tokens, so none waits for another's. Drafts
        have what is left of the budget, and of free blocks.
        """
        order = list(self._running.values())
        self._left_since_proposal = False
        self.blocks.begin_step()
        if self.blocks.states is not None:
            self._preempt_spoiled(order)
        decodes, prefilling = self._propose_decodes(order)
        if not self._waiting:  # for blocks, maybe
            self.blocks.take_early(beside_decodes=bool(decodes))
        self._admit(prefilling)
        num_prefilling = len(prefilling)
        prefilling = [request for request in prefilling if not self._bring(request, beside_decodes=bool(decodes))]
        self.awaits_pages = len(prefilling) < num_prefilling
        num_left = [request.num_known - request.num_computed for request in prefilling]
        keys = [self.blocks.next_key(request) for request in prefilling]
        most = num_left
        if self.blocks.states is not None:
            self.blocks.note_branches(prefilling)
            most = [
                min(left, self.blocks.num_until_snapshot(request))
                for request, left in zip(prefilling, num_left, strict=True)
            ]
        shares = share_budget(most, keys, self.max_batch_tokens - len(decodes))
        prefills = [
            ScheduledChunk(request, request.num_computed, share, share == left)
            for request, share, left in zip(prefilling, shares, num_left, strict=True)
            if share
        ]
        if self.blocks.states is not None:
            for chunk in decodes:
                self.blocks.plan_snapshot(chunk.request, chunk.start + 1)
            for index, (request, start, length, *_) in enumerate(prefills):
                end = self.blocks.plan_snapshot(request, start + length)
                if end < start + length:
                    prefills[index] = ScheduledChunk(request, start, end - start, samples=False)
        num_tokens = len(decodes) + sum([chunk.length for chunk in prefills])
        if self.speculator is not None and decodes and self.speculator.gate.is_due:
            num_rows = most_yielding_rows(self.max_running) - len(decodes) - len(prefills)
            num_rows = min(num_rows, self.max_batch_tokens - num_tokens)
            if self.blocks.states is not None:
                num_rows = min(num_rows, self.blocks.states.num_free)
            num_tokens += self._add_drafts(self.speculator, decodes, num_rows)
        return Proposal(tuple(decodes), tuple(prefills), num_tokens)

    def commit(self, proposal: Proposal, hold_prefill: bool = False) -> tuple[ScheduledChunk, ...]:
        """Returns the chunks to run, decodes first: those of the newest proposal, without requests aborted since.

        hold_prefill: run the decodes only. Held prefills keep their blocks and are proposed again.
        """
        chunks = proposal.decodes if hold_prefill else proposal.decodes + proposal.prefills
        if self._left_since_proposal:
            running = self._running
            chunks = tuple([chunk for chunk in chunks if running.get(chunk.request.request_id) is chunk.request])
        if self.blocks.states is not None:
            self.blocks.states.begin([chunk.request for chunk in chunks])
        return chunks

    def complete(self, chunk: ScheduledChunk, token_id: int | None = None) -> None:
        """Records that a committed chunk has run: the KV of its known tokens is in the cache.

        token_id: sampled from the row of the last of these; None where the chunk does not sample
        """
        request, start, length, samples, drafts = chunk
        if self._running.get(request.request_id) is not request:
            return  # aborted while the step ran
        assert start == request.num_computed, f"a chunk of {request.request_id} was completed twice or out of order"
        assert samples == (token_id is not None), "a token is sampled from a chunk that ends with the last known"
        request.num_computed = start + length - len(drafts)
        if token_id is not None:
            request.output_ids.append(token_id)
        if request.num_computed // self.blocks.block_size > request.num_published:
            self.blocks.publish(request)
        if self.blocks.states is not None:
            self.blocks.end_chunk(request, decodes=length == 1 and samples)
        if samples and length - len(drafts) > 1:  # of a prompt, whose values are finite
            self.blocks.keep(request)
        if request.hand_over_from is not None:
            self.blocks.hand_over(request)

    def accept(self, request: Request, token_id: int) -> None:
        """Records that a draft was what was drawn: its KV is in the cache, and its row has yielded another token."""
        self.complete(_chunk((request, request.num_computed, 1, True, ())), token_id)

    def check(self) -> None:
        """Asserts the block accounting and the order of requests. For tests."""
        running, waiting = list(self._running.values()), list(self._waiting.values())
        self.blocks.check(running)
        arrivals = [request.arrival for request in running + waiting]
        assert arrivals == sorted(arrivals), f"requests are out of order: {arrivals}"
        assert len(running) <= self.max_running
        for request in waiting:
            assert not request.block_ids
            assert request.num_computed == 0
        for request in running:
            num_left = request.num_known - request.num_computed
            assert num_left > 0
            assert num_left == 1 or len(request.block_ids) * self.blocks.block_size >= request.num_known

    def _preempt_spoiled(self, order: list[Request]) -> None:
        """Preempts requests whose states a step has left in the middle, and the younger ones, which stay behind them;
        drops them from `order`. They may be admitted again at once."""
        while any(request.num_in_state != request.num_computed for request in order):
            self._preempt(order.pop())

    def _propose_decodes(self, order: list[Request]) -> tuple[list[ScheduledChunk], list[Request]]:
        """Returns (decode chunks, requests that still prefill); drops from `order` those that it preempts."""
        decodes: list[ScheduledChunk] = []
        prefilling: list[Request] = []
        blocks, block_size, has_reused = self.blocks, self.blocks.block_size, False
        for request in order:  # which loses requests at its end meanwhile
            start, output_ids = request.num_computed, request.output_ids
            if not output_ids or len(request.prompt_ids) + len(output_ids) - start != 1:
                prefilling.append(request)
                continue
            if start == len(request.block_ids) * block_size:
                blocks.make_room(1)
                # Prefills of equal prompts may hold blocks for what one of them has published; nothing is meanwhile.
                if blocks.num_free == 0 and not has_reused:
                    has_reused = True
                    for other in order:
                        self._reuse(other)
                # The youngest first, so that victims have no chunk yet. The last victim may be the request itself: it
                # is then the youngest, so its last block is not shared and becomes free.
                while blocks.num_free == 0:
                    self._preempt(order.pop())
                if not self.is_running(request):
                    break
                blocks.reserve(request, start + 1)
            decodes.append(_chunk((request, start, 1, True, ())))
        return decodes, prefilling

    def _add_drafts(self, speculator: Speculator, decodes: list[ScheduledChunk], num_rows: int) -> int:
        """Puts drafts behind the tokens of decodes, as far as their blocks are free; returns how many.

        Blocks that rejected drafts leave stay with the request, which needs them next. One free block for each running
        request is left alone, so that drafts preempt nobody.
        """
        blocks, block_size, num_added = self.blocks, self.blocks.block_size, 0
        if num_rows <= 0:
            return 0
        for index, drafts in enumerate(speculator.draft([chunk.request for chunk in decodes], num_rows)):
            if not drafts:
                continue
            request, start, *_ = decodes[index]
            num_left = request.params.max_new_tokens - len(request.output_ids)  # which end within the context
            room = (len(request.block_ids) + max(0, blocks.num_free - len(self._running))) * block_size - start - 1
            drafts = drafts[: max(0, min(num_left - 1, room))]
            drafts = drafts[: blocks.most_drafts(request)]
            blocks.reserve(request, start + 1 + len(drafts))
            if blocks.states is not None and drafts:
                blocks.states.begin_drafts(request, len(drafts))
            decodes[index] = _chunk((request, start, 1 + len(drafts), True, drafts))
            num_added += len(drafts)
        return num_added

    def _admit(self, prefilling: list[Request]) -> None:
        """Starts waiting requests in order, as long as all known tokens of the next one fit, and appends them."""
        blocks = self.blocks
        while self._waiting and len(self._running) < self.max_running:
            request = next(iter(self._waiting.values()))
            if self._running and self._refused_at is not None and not blocks.expected:
                refused, num_free = self._refused_at
                if refused is request and blocks.num_free <= num_free:
                    return  # nothing was freed since, so its prefix need not be looked up again
            prefix = blocks.find_prefix(request)
            # A preempted request is admitted again only when every running one has a block to grow into; otherwise it
            # would be preempted again at once.
            num_to_grow = len(self._running) if request.was_preempted else 0
            num_blocks = blocks.num_needed(request.num_known, prefix) + num_to_grow
            if num_blocks > blocks.num_free and blocks.expected:
                blocks.make_room(num_blocks)
                continue  # of this prefix some blocks may have been taken early, which are free now
            if self._running and num_blocks > blocks.num_free:
                self._refused_at = (request, blocks.num_free)
                return
            self._refused_at = None
            del self._waiting[request.request_id]
            self._running[request.request_id] = request
            blocks.share(request, prefix)
            num_early = blocks.end_expected(request.request_id) * blocks.block_size
            request.num_handed_over += min(num_early, request.num_computed)
            blocks.reserve(request, request.num_known)
            blocks.fetch(request)
            self._count_admission(request)
            prefilling.append(request)

    def _reuse(self, request: Request) -> None:
        """Takes blocks that others have published since a prefill was admitted, such as those of an equal prompt, and
        frees its own."""
        num_before = request.num_computed
        if self.blocks.reuse(request):
            self._count_found(request, num_before, request.num_computed - num_before)

    def _bring(self, request: Request, beside_decodes: bool) -> bool:
        """Takes blocks that others have published, and pages that have come up from a tier, or from a prefill rank;
        these do not count as cached. Returns whether the request should wait for more of these."""
        self._reuse(request)
        num_before, handed_before = request.num_computed, request.num_handed_over
        waits = self.blocks.bring(request, beside_decodes)
        num_handed_over = request.num_handed_over - handed_before
        self._count_found(request, num_before, request.num_computed - num_before - num_handed_over)
        return waits

    def _count_found(self, request: Request, num_before: int, num_found: int) -> None:
        if num_found > 0 and not request.was_preempted:
            num_prompt = len(request.prompt_ids)
            num_cached = min(num_before + num_found, num_prompt) - min(num_before, num_prompt)
            request.num_cached_prompt += num_cached
            self._stats.num_cached_prompt_tokens += num_cached

    def _count_admission(self, request: Request) -> None:
        stats = self._stats
        if request.was_preempted:
            stats.num_recomputed_tokens += max(0, request.num_lost - request.num_computed)
            return
        request.num_cached_prompt = min(request.num_computed, len(request.prompt_ids)) - request.num_handed_over
        stats.num_admitted += 1
        stats.num_prompt_tokens += len(request.prompt_ids)
        stats.num_cached_prompt_tokens += request.num_cached_prompt

    def _preempt(self, request: Request) -> None:
        """Frees the blocks of a running request and puts it at the front of the queue."""
        del self._running[request.request_id]
        request.was_preempted = True
        request.num_lost = request.num_computed
        self._stats.num_preempted += 1
        self.blocks.release(request)
        self.blocks.begin(request)
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)


def most_yielding_rows(max_running: int) -> int:
    """Returns how many rows of a step have logits at most: one of each chunk, and those of drafts."""
    return max(max_running, 16)


def share_budget(num_left: Sequence[int], block_keys: Sequence[bytes | None], budget: int) -> list[int]:
    """Returns how many tokens each prefill computes in a step; together the whole budget, where so many are left.

    The oldest prefill is sure of half of the budget; the rest goes to the others, those with the fewest tokens left
    first. So a prompt of n tokens has its first token after at most ceil(w / r) steps, from the one that admits it: w
    is n plus the tokens of prompts with fewer left than it has, r half of the smallest budget of these steps. The
    number and length of longer prompts do not matter. And the oldest of all takes at most twice the steps that it
    would take alone. Prompts that begin alike do not compute the same block side by side: one does, the others wait
    for its step and take the block over, which saves them more than they wait.

    num_left:   tokens that each prefill has left, at least 1, oldest first
    block_keys: prefix-cache key of the block that it computes next; None: nobody waits for it
    budget:     tokens, at least 1 where there is a prefill
    """
    if not num_left:
        return []
    shares = [0] * len(num_left)
    shares[0] = min(num_left[0], (budget + 1) // 2)
    budget -= shares[0]
    computed = {block_keys[0]}
    for index in sorted(range(1, len(num_left)), key=num_left.__getitem__):  # of equals the older one first
        if budget == 0:
            break
        key = block_keys[index]
        if key is not None and key in computed:
            continue
        computed.add(key)
        shares[index] = min(num_left[index], budget)
        budget -= shares[index]
    shares[0] += min(num_left[0] - shares[0], budget)
    return shares
