"""Reserves, shares, publishes and frees the cache blocks of each request, without touching a tensor.

BlockPool counts the references to each block and PrefixCache knows the tokens in it; RequestBlocks keeps both in step
with the block list of each request.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_serve.attention_dp.block_tables import BlockTables
from moe_serve.attention_dp.page_record import STATE_AT
from moe_serve.attention_dp.prefix_cache import PrefixCache, next_key, root_key
from moe_serve.attention_dp.request import Handover, Request
from moe_serve.attention_dp.state_slots import StateSlots

if TYPE_CHECKING:  # which have tensors
    from moe_serve.attention_dp.page_channel import PageReceiver, PageSender
    from moe_serve.attention_dp.pages import Fetch, PageTiers

_BYTES_UP = 32 << 20  # of pages that a request takes in one step
_BYTES_DOWN = 32 << 20  # of states that are copied to the tiers in one step; one state is, whatever it takes
_BYTES_BESIDE = 2 << 20  # the same beside requests that decode, which wait for it: about 0.5 ms
_STEPS_OF_STATE = 16  # in which a state comes, however large: models with large ones have long steps
# Of prompts that prefill ranks compute still: in one step beside requests that decode, and where nobody waits.
_BYTES_EARLY, _BYTES_EARLY_IDLE = 512 << 10, 4 << 20
_MAX_DAMAGED = 3  # takes in a row of early pages that were not right: half written, or damaged


class BlockPool:
    """Reference counts of blocks 0..num_blocks-1, and the order in which free blocks are allocated.

    A block is *free* when no request refers to it, as all are at first. A free block may still hold a useful prefix:
    the pool allocates such blocks last, the one released longest ago first (LRU). It never sees tokens, keys or
    tensors.
    """

    __slots__ = ("_free", "_num_references", "num_blocks")

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in the order of allocation

    @property
    def num_free(self) -> int:
        """Returns the number of blocks that no request refers to."""
        return len(self._free)

    def num_references(self, block: int) -> int:
        """Returns how many requests refer to the block."""
        return self._num_references[block]

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Returns how many of the blocks are free now, so that sharing them would use up free blocks."""
        return sum(self._num_references[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks that were free, each with one reference now. The caller has checked num_free."""
        free, references = self._free, self._num_references
        blocks = [free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each block, free or not."""
        for block in blocks:
            if self._num_references[block] == 0:
                del self._free[block]
            self._num_references[block] += 1

    def release(self, block: int, keep: bool) -> None:
        """Drops one reference. A block that becomes free is allocated again last (keep) or first."""
        assert self._num_references[block] > 0, f"block {block} is released but has no reference"
        self._num_references[block] -= 1
        if self._num_references[block] == 0:
            self._free[block] = None
            if not keep:
                self._free.move_to_end(block, last=False)

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Asserts that the counts match the block lists of all holders, and that exactly the other blocks are free."""
        expected = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                expected[block] += 1
        assert self._num_references == expected, f"references are {self._num_references}, held are {expected}"
        free = {block for block, count in enumerate(expected) if count == 0}
        assert set(self._free) == free, f"free are {sorted(self._free)}, expected {sorted(free)}"


def _pages_with_state(pages: "PageReceiver | PageTiers", most_bytes: int) -> int:
    """Returns how many pages of a prompt and its state are taken in one step, of about most_bytes."""
    return max(most_bytes // pages.page_bytes, -(-pages.num_state_pages // _STEPS_OF_STATE))


@dataclass
class _Coming:
    """A prompt that a prefill rank computes, whose pages are taken before its request comes here.

    request: with the prompt's keys, and the blocks that it has so far;  num_pages: of the prompt
    num_taken: pages that have come;  num_sent: of its prefill rank, when all that were there had been taken
    """

    request: Request
    handover: Handover
    num_pages: int
    num_taken: int = 0
    num_damaged: int = 0
    num_sent: int = -1


@dataclass
class _Arriving:
    """A state that comes from a prefill rank, or from a tier, behind the pages of blocks.

    slot: of the snapshot that it will be;  num_pages: of it that have come
    num_blocks: leading blocks of the request whose values are there; beyond its tokens they count once the state is
    """

    slot: int
    num_blocks: int
    num_pages: int = 0


class RequestBlocks:
    """The blocks of one rank's KV cache, and the requests that hold them.

    tables: their block tables;  tiers: pages outside the pool; None: there are none
    sender, receiver: of pages that prefill ranks hand over; None: this rank does not send, or take them
    states: of the requests; None: the model has no layers that keep one
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool = True,
        model_key: bytes = b"",
        tiers: "PageTiers | None" = None,
        sender: "PageSender | None" = None,
        receiver: "PageReceiver | None" = None,
        key_tokens: int = 0,
        states: StateSlots | None = None,
    ):
        """
        model_key:  as in prefix_cache.root_key
        key_tokens: behind a block's own, how many tokens its key covers: those on which what it caches depends
        """
        self.states = states
        self.tiers, self.sender, self.receiver = tiers, sender, receiver
        self._fetches: dict[str, Fetch] = {}  # by request
        self._coming: dict[str, _Coming] = {}  # by request, too
        self._arriving: dict[str, _Arriving] = {}
        self._num_left_down = _BYTES_DOWN  # of this step
        self.block_size = block_size
        self.tables = BlockTables(block_size)
        self._model_key = model_key
        self._key_tokens = key_tokens
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache() if prefix_cache else None

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Returns how many blocks no request holds; they may hold reusable prefixes."""
        return self._pool.num_free

    def begin_step(self) -> None:
        """Takes back what the step before has left of slots for drafts, and lets this one copy states to the tiers."""
        self._num_left_down = _BYTES_DOWN
        if self.states is not None:
            self.states.end_drafts()

    def begin(self, request: Request) -> None:
        """Makes a request that holds no blocks ready to be admitted."""
        request.num_computed = request.num_published = 0
        coming = self._coming.get(request.request_id)
        if coming is not None:
            known = coming.request
            if (known.prompt_ids, known.salt) == (request.prompt_ids, request.salt):
                request.block_keys = list(known.block_keys)
        self._extend_keys(request, (request.num_known - self._key_tokens) // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Returns the published blocks that hold the beginning of the request.

        They end before its last known token, and before the first one whose row tells a log probability: these rows
        must be computed, and that writes their blocks, which therefore must not be shared.
        """
        if self._cache is None:
            return []
        found = self._cache.match(request.block_keys[: request.num_reusable // self.block_size])
        if self.states is not None:
            request.branches_at = len(found) * self.block_size
            found = found[: self.states.num_covered(request.block_keys, len(found))]
        return found

    def num_needed(self, num_tokens: int, prefix: list[int]) -> int:
        """Returns how many free blocks it takes to hold num_tokens that begin with the blocks of `prefix`."""
        return self._num_blocks(num_tokens) - len(prefix) + self._pool.num_free_among(prefix)

    def share(self, request: Request, prefix: list[int]) -> None:
        """Gives a request its first blocks, which others have computed."""
        self._pool.share(prefix)
        self.tables.extend(request, prefix)
        request.num_computed = len(prefix) * self.block_size
        request.num_published = len(prefix)
        if self.states is not None:
            self.states.admit(request)
            self._go_on_from(request, len(prefix))

    def reuse(self, request: Request) -> bool:
        """Swaps the next blocks that a request would compute for published ones with the same tokens.

        Returns whether there were any. A prefill that has stopped inside a block keeps its own.
        """
        start, offset = divmod(request.num_computed, self.block_size)
        end = request.num_reusable // self.block_size
        keys = request.block_keys
        if self._cache is None or offset or start >= end or not self._cache.has_key(keys[start]):
            return False
        found = self._cache.match(keys[start:end])
        if self.states is not None:
            found = found[: max(0, self.states.num_covered(keys, start + len(found)) - start)]
            if not found:
                return False
        own = request.block_ids[start : start + len(found)]
        self._pool.share(found)
        for block in own:
            self._pool.release(block, keep=False)
        self.tables.replace(request, start, found)
        request.num_computed += len(found) * self.block_size
        request.num_published = start + len(found)
        if self.states is not None:
            self._go_on_from(request, start + len(found))
        return True

    # ---- pages that prefill ranks compute

    def expect(self, request: Request, handover: Handover) -> None:
        """Begins to take the pages of a prompt as a prefill rank computes them. Its request comes later, or never:
        `end_expected` ends it. Without a prefix cache nothing is taken early."""
        self.end_expected(request.request_id)
        if self._cache is None or self.receiver is None:
            return
        num_pages = max(0, len(request.prompt_ids) - self._key_tokens) // self.block_size
        self._extend_keys(request, num_pages)
        request.block_ids = self._cache.match(request.block_keys)
        self._pool.share(request.block_ids)
        self._coming[request.request_id] = _Coming(request, handover, num_pages)

    @property
    def expected(self) -> list[str]:
        """Returns the requests whose pages are taken early."""
        return list(self._coming)

    def take_early(self, beside_decodes: bool) -> None:
        """Takes pages that prefill ranks have sent since, into free blocks; a bounded number in each call."""
        receiver = self.receiver
        if receiver is None or not self._coming:
            return
        num_left = max(1, (_BYTES_EARLY if beside_decodes else _BYTES_EARLY_IDLE) // receiver.page_bytes)
        for coming in self._coming.values():
            num_sent = receiver.num_sent(coming.handover.rank)
            count = min(num_left, coming.num_pages - len(coming.request.block_ids), self._pool.num_free)
            if num_sent == coming.num_sent or count <= 0 or coming.num_damaged == _MAX_DAMAGED:
                continue
            num_found = self._take_early(receiver, coming, count)
            num_left -= num_found
            if num_found < count:
                coming.num_sent = num_sent

    def _take_early(self, receiver: "PageReceiver", coming: _Coming, count: int) -> int:
        """Takes up to `count` pages; returns how many were found."""
        request, first = coming.request, len(coming.request.block_ids)
        slots = receiver.find(request.request_id, coming.handover, first, count)
        if not slots:
            return 0
        blocks = self._allocate(len(slots))
        num_right = receiver.take_early(request, coming.handover, first, blocks, slots)
        coming.num_damaged = 0 if num_right else coming.num_damaged + 1
        for block in blocks[num_right:]:
            self._pool.release(block, keep=False)
        request.block_ids += blocks[:num_right]
        coming.num_taken += num_right
        if self._cache is not None:
            for index in range(first, first + num_right):
                self._cache.publish(request.block_keys[index], request.block_ids[index])
        return len(slots)

    def end_expected(self, request_id: str) -> int:
        """Takes no more pages early; returns how many have come. They stay reusable by prefix."""
        coming = self._coming.pop(request_id, None)
        if coming is None:
            return 0
        for block in reversed(coming.request.block_ids):
            self._pool.release(block, keep=self._cache is not None and block in self._cache)
        return coming.num_taken

    def make_room(self, num_blocks: int) -> None:
        """Lets go of blocks that were taken early, the newest prompt's first, until so many are free."""
        while self._coming and self._pool.num_free < num_blocks:
            self.end_expected(next(reversed(self._coming)))

    def fetch(self, request: Request) -> None:
        """Begins to bring up the pages that follow what an admitted request has found in the pool."""
        start, end = request.num_computed // self.block_size, request.num_reusable // self.block_size
        if request.handover is not None:
            return  # they are there: `bring` takes them
        if self.tiers is not None and start < end and request.num_computed % self.block_size == 0:
            self._fetches[request.request_id] = self.tiers.fetch(request.block_keys[start:end], request.pages_at)

    def bring(self, request: Request, beside_decodes: bool = False) -> bool:
        """Takes pages that have come up into the request's own blocks; returns whether it should wait for more.

        A bounded number in each call, so that the steps of others do not wait, those that decode above all.
        """
        most_bytes = _BYTES_BESIDE if beside_decodes else _BYTES_UP
        handover, fetch = request.handover, self._fetches.get(request.request_id)
        if handover is not None and self.receiver is not None:
            if self._take_over(request, self.receiver, handover, most_bytes):
                return True
        elif fetch is not None and self.tiers is not None and self._bring(request, fetch, self.tiers, most_bytes):
            return True
        request.handover = None
        self._end_fetch(request)
        self._end_arriving(request)
        return False

    def _bring(self, request: Request, fetch: "Fetch", tiers: "PageTiers", most_bytes: int) -> bool:
        """Takes pages from a tier; returns whether it should wait for more."""
        if self.states is not None:
            return self._bring_with_state(request, fetch, tiers, self.states, most_bytes)
        start, offset = divmod(request.num_computed, self.block_size)
        next_key = request.block_keys[start : start + 1]
        if offset or next_key != list(fetch.keys[fetch.num_taken : fetch.num_taken + 1]):
            return False  # a sibling has computed them meanwhile, or there are no more
        count = max(1, most_bytes // tiers.page_bytes)
        num_taken = tiers.take(fetch, request.block_ids[start : start + count])
        if num_taken:
            request.num_computed += num_taken * self.block_size
            self.publish(request)
        return tiers.is_coming(fetch)

    def _take_over(self, request: Request, receiver: "PageReceiver", handover: Handover, most_bytes: int) -> bool:
        """Takes pages that a prefill rank has computed for this request; returns whether there may be more."""
        if self.states is not None:
            return self._take_over_with_state(request, receiver, self.states, handover, most_bytes)
        start, offset = divmod(request.num_computed, self.block_size)
        end = request.num_reusable // self.block_size
        if offset or start >= end:
            return False
        self._extend_keys(request, end)
        count = min(end - start, max(1, most_bytes // receiver.page_bytes))
        count = receiver.num_there(request, handover, start, count)
        if not count:
            return True
        num_taken = receiver.take(request, handover, start, request.block_ids[start : start + count])
        if num_taken:
            request.num_computed += num_taken * self.block_size
            request.num_handed_over += num_taken * self.block_size
            self.publish(request)
        return num_taken == count and start + count < end

    def _take_over_with_state(
        self,
        request: Request,
        receiver: "PageReceiver",
        states: StateSlots,
        handover: Handover,
        most_bytes: int,
    ) -> bool:
        """Takes pages, and then the state behind them, without which they are of no use; returns whether there may be
        more. They become published blocks and a snapshot, from which the request goes on as behind any prefix."""
        start, offset = divmod(request.num_computed, self.block_size)
        end = self._blocks_before_state(request)
        if self._cache is None or offset or start >= end or request.num_reusable < end * self.block_size:
            return False
        arriving = self._arriving_of(request, states)
        if arriving is None:
            if states.is_slot_coming(request):
                return True
            receiver.counters["no_snapshot"] += 1
            return False
        arriving.num_blocks = max(arriving.num_blocks, start)
        num_left = _pages_with_state(receiver, most_bytes)
        while num_left and arriving.num_blocks < end:
            count = min(end - arriving.num_blocks, num_left)
            num_taken, num_there = self._take_blocks(request, receiver, handover, arriving.num_blocks, count)
            if num_taken < num_there or not num_there:
                return not num_there
            arriving.num_blocks += num_taken
            num_left -= num_taken
        if not num_left:
            return True
        count = min(num_left, receiver.num_state_pages - arriving.num_pages)
        count = receiver.num_there(request, handover, STATE_AT + arriving.num_pages, count)
        if not count:
            return True
        key = request.block_keys[end - 1]
        num_taken = receiver.take_state(request, handover, key, arriving.num_pages, count, arriving.slot)
        arriving.num_pages += num_taken
        if arriving.num_pages < receiver.num_state_pages:
            return num_taken == count
        self._go_on_behind(request, end)
        request.num_handed_over += request.num_computed - start * self.block_size
        return False

    def _take_blocks(
        self, request: Request, receiver: "PageReceiver", handover: Handover, first: int, count: int
    ) -> tuple[int, int]:
        """Fills up to `count` of a request's own blocks, `first` and those behind it: with what the cache has, where it
        has the first, or else with pages up to the next one that it has. Returns how many, and how many there were."""
        assert self._cache is not None
        keys = request.block_keys[first : first + count]
        if found := self._cache.match(keys):  # came early, or are of others
            for block, own in zip(found, request.block_ids[first:], strict=False):
                receiver.copy_block(block, own)
            return len(found), len(found)
        count = next((number for number, key in enumerate(keys) if self._cache.has_key(key)), count)
        num_there = receiver.num_there(request, handover, first, count)
        blocks = request.block_ids[first : first + num_there]
        return receiver.take(request, handover, first, blocks) if num_there else 0, num_there

    def _arriving_of(self, request: Request, states: StateSlots) -> _Arriving | None:
        """Returns the state that comes for a request, which has a slot from here on; None: there is none for it."""
        arriving = self._arriving.get(request.request_id)
        if arriving is None and (slot := states.begin_filling()) >= 0:
            arriving = _Arriving(slot, request.num_computed // self.block_size)
            self._arriving[request.request_id] = arriving
        return arriving

    def _bring_with_state(
        self, request: Request, fetch: "Fetch", tiers: "PageTiers", states: StateSlots, most_bytes: int
    ) -> bool:
        """Takes pages, and then the state behind them, from a tier; returns whether it should wait for more."""
        start, offset = divmod(request.num_computed, self.block_size)
        if fetch.pages:
            if offset or fetch.keys[0] != request.block_keys[start]:  # a sibling has computed some meanwhile
                return False
            arriving = self._arriving_of(request, states)
            if arriving is None:
                return False
            num_left = _pages_with_state(tiers, most_bytes)
            end = start + (fetch.num_blocks or 0)
            at = arriving.num_blocks
            num_taken = tiers.take(fetch, request.block_ids[at : min(end, at + num_left)])
            arriving.num_blocks += num_taken
            if arriving.num_blocks == end:
                num_left -= num_taken
                arriving.num_pages += tiers.take_state(fetch, arriving.slot, arriving.num_pages, num_left)
            if arriving.num_pages == tiers.num_state_pages:
                self._go_on_behind(request, end)
                return False
        return tiers.is_coming(fetch)

    def _go_on_behind(self, request: Request, end: int) -> None:
        """Publishes the blocks of a request up to `end`, which have come, and their state, and has it go on there."""
        assert self._cache is not None
        assert self.states is not None
        for index in range(request.num_computed // self.block_size, end):
            self._cache.publish(request.block_keys[index], request.block_ids[index])
        self.states.end_filling(self._arriving.pop(request.request_id).slot, request.block_keys[end - 1])
        self.reuse(request)

    def _end_arriving(self, request: Request) -> None:
        arriving = self._arriving.pop(request.request_id, None)
        if self.states is not None and arriving is not None:
            self.states.end_filling(arriving.slot, None)

    def _blocks_before_state(self, request: Request) -> int:
        """Returns behind which block of a prompt its state is handed over."""
        return (len(request.prompt_ids) - 1) // self.block_size

    def hand_over(self, request: Request) -> None:
        """Sends the pages of a request that are full now and were not sent, if a decode rank goes on with it, and the
        state behind the last whole block in front of its prompt's last token once it has passed there."""
        first, end = request.hand_over_from, request.num_computed // self.block_size
        if self.sender is None or first is None:
            return
        if first < end:
            self._extend_keys(request, end)
            self.sender.send(request, first, end)
            request.hand_over_from = end
        num_before = self._blocks_before_state(request)
        if self.states is None or not num_before or request.has_sent_state or end < num_before:
            return
        request.has_sent_state = True
        key = request.block_keys[num_before - 1]
        is_own = request.num_computed == num_before * self.block_size
        self.sender.send_state(request, key, request.state_slot if is_own else self.states.find(key))

    def _end_fetch(self, request: Request) -> None:
        fetch = self._fetches.pop(request.request_id, None)
        if self.tiers is not None and fetch is not None:
            self.tiers.drop(fetch)

    def next_key(self, request: Request) -> bytes | None:
        """Returns the prefix-cache key of the block that a prefill computes next; None where it will not be shared."""
        index = request.num_computed // self.block_size
        return request.block_keys[index] if index < len(request.block_keys) else None

    def reserve(self, request: Request, end: int) -> None:
        """Gives a request the blocks for its tokens up to `end`. The caller has checked that they are free."""
        missing = self._num_blocks(end) - len(request.block_ids)
        if missing > 0:
            self.tables.extend(request, self._allocate(missing))

    def _allocate(self, count: int) -> list[int]:
        """Returns blocks that were free, to be written now."""
        blocks = self._pool.allocate(count)
        if self._cache is not None:
            self._forget(blocks)
            if self.tiers is not None:
                self.tiers.written(blocks)
        return blocks

    def publish(self, request: Request) -> None:
        """Publishes the blocks that have become full to the prefix cache."""
        num_full = request.num_computed // self.block_size
        if num_full == request.num_published:
            return
        if self._cache is not None:
            self._extend_keys(request, num_full)
            for index in range(request.num_published, num_full):
                self._cache.publish(request.block_keys[index], request.block_ids[index])
        request.num_published = num_full

    def keep(self, request: Request) -> None:
        """Has the published blocks of a request copied to the tiers, where other ranks find them while it goes on."""
        if self.tiers is not None and self._cache is not None:
            for block in request.block_ids[: request.num_published]:
                if block in self._cache:
                    self.tiers.keep(self._cache.key_of(block), block)
            self._keep_states(self.tiers, request)

    def release(self, request: Request) -> None:
        """Frees the blocks of a request. Published ones stay reusable until they are allocated again."""
        # The tail is released, and so evicted, first: a prefix without its tail is still useful.
        for block in reversed(request.block_ids):
            self._pool.release(block, keep=self._cache is not None and block in self._cache)
        if self.tiers is not None and self._cache is not None:
            self._end_fetch(request)
            for block in request.block_ids:
                if block in self._cache and self._pool.num_references(block) == 0:
                    self.tiers.keep(self._cache.key_of(block), block)
            self._keep_states(self.tiers, request)
        self.tables.drop(request)
        if self.states is not None:
            self._end_arriving(request)
            self.states.release(request)

    def _keep_states(self, tiers: "PageTiers", request: Request) -> None:
        """Has snapshots behind published blocks of a request copied to the tiers, that of the longest prefix first, as
        many as the step may still copy. Those that are left out may go when another request with them ends."""
        if self.states is None:
            return
        for key in reversed(request.block_keys[: request.num_published]):
            if self._num_left_down <= 0 or not self.states.only_here:
                return
            if key in self.states.only_here and (slot := self.states.find(key)) is not None:
                num_copied = tiers.keep_state(key, slot)
                if num_copied is not None:
                    self.states.only_here.remove(key)
                    self._num_left_down -= num_copied

    def withdraw(self, request: Request) -> None:
        """Removes all blocks of a request from the prefix cache, so that no later request reuses them."""
        if self._cache is not None:
            self._forget(request.block_ids)

    def flush(self) -> int:
        """Empties the prefix cache and its tiers; returns how many blocks of the pool it held.

        Blocks that requests hold stay theirs.
        """
        if self.tiers is not None:
            self.tiers.flush()
        if self.states is not None:
            self.states.clear()
        return 0 if self._cache is None else self._cache.clear()

    def check(self, running: Iterable[Request]) -> None:
        """Asserts the block accounting, and that no block to be written is shared. For tests."""
        running = list(running)
        early = [coming.request.block_ids for coming in self._coming.values()]
        self._pool.check([*early, *(request.block_ids for request in running)])
        self.tables.check(running)
        if self.states is not None:
            self.states.check(running)
        for request in running:
            assert len(request.block_ids) * self.block_size >= request.num_computed
            for block in request.block_ids[request.num_computed // self.block_size :]:
                assert self._pool.num_references(block) == 1, f"block {block} is shared but not computed"
                assert self._cache is None or block not in self._cache, f"block {block} is published but not computed"
        if self._cache is not None:
            self._cache.check()

    def note_branches(self, prefilling: Iterable[Request]) -> None:
        """Has those of several prefills that compute the same blocks next keep a snapshot where they part.

        One computes, the others wait for it and go on from there.
        """
        groups: dict[bytes, list[Request]] = {}
        for request in prefilling:
            if (key := self.next_key(request)) is not None and request.num_computed % self.block_size == 0:
                groups.setdefault(key, []).append(request)
        for group in groups.values():
            first, last = (by(group, key=lambda request: request.block_keys) for by in (min, max))
            end = min(request.num_reusable for request in group) // self.block_size
            for index in range(first.num_computed // self.block_size, end if len(group) > 1 else 0):
                if first.block_keys[index] != last.block_keys[index]:
                    break
                for request in group:
                    request.branches_at = (index + 1) * self.block_size

    def num_until_snapshot(self, request: Request) -> int:
        """Returns after how many more tokens a chunk has to end, so that a snapshot of its state can be kept there."""
        assert self.states is not None
        if not self.states.num_snapshots:
            return request.num_known
        num_left = self.states.interval - request.num_computed % self.states.interval
        if request.branches_at > request.num_computed:
            num_left = min(num_left, request.branches_at - request.num_computed)
        return num_left

    def most_drafts(self, request: Request) -> int | None:
        """Returns how many drafts a decode may have in front of the next place of a snapshot; None: any number."""
        if self.states is None or not self.states.num_snapshots:
            return None
        return max(0, self.num_until_snapshot(request) - 2) if request.snapshot_slot < 0 else 0

    def plan_snapshot(self, request: Request, end: int) -> int:
        """Has the next chunk of a request, up to `end`, keep a snapshot of its state where one is wanted. Returns where
        the chunk ends.

        It is behind the last whole block that another request with the same known tokens could share; else at the end
        of the chunk, where that is one of a long sequence's places, or the request has begun like another up to there.
        Where there is no slot for the one that is handed over, the chunk ends there: `hand_over` sends the request's
        own state.
        """
        assert self.states is not None
        last = (request.num_known - 1) // self.block_size * self.block_size
        position = last if request.num_computed < last <= end else end
        key = None
        is_place = position in (last, request.branches_at) or position % self.states.interval == 0
        if self._cache is not None and is_place:
            self._extend_keys(request, position // self.block_size)
            key = request.block_keys[position // self.block_size - 1]
        self.states.plan(request, position, key)
        at = self._blocks_before_state(request) * self.block_size
        hands_over = request.hand_over_from is not None and request.num_computed < at < end
        return at if hands_over and request.snapshot_at != at else end

    def end_chunk(self, request: Request, decodes: bool) -> None:
        """The chunk of a request has run, and its full blocks are published: so is its snapshot."""
        assert self.states is not None
        key, index = None, request.snapshot_at // self.block_size - 1
        if request.snapshot_slot >= 0 and self._cache is not None and self._cache.has_key(request.block_keys[index]):
            key = request.block_keys[index]
        self.states.complete(request, key, decodes)

    def _go_on_from(self, request: Request, num_blocks: int) -> None:
        assert self.states is not None
        key = request.block_keys[num_blocks - 1] if num_blocks else None
        self.states.read_from(request, key, num_blocks * self.block_size)

    def _forget(self, blocks: Iterable[int]) -> None:
        """Drops the prefix-cache entries of blocks, and the snapshots behind them."""
        assert self._cache is not None
        if self.states is not None:
            self.states.drop([self._cache.key_of(block) for block in blocks if block in self._cache])
        self._cache.forget(blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _extend_keys(self, request: Request, num_keys: int) -> None:
        if self._cache is None and self.sender is None and self.receiver is None:
            return
        keys, size = request.block_keys, self.block_size
        for index in range(len(keys), num_keys):
            previous = keys[-1] if keys else root_key(self._model_key, request.salt, size)
            keys.append(next_key(previous, request.token_ids(index * size, (index + 1) * size + self._key_tokens)))
