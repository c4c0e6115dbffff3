"""Slots for the states of requests, of models whose layers keep one beside the KV cache, without touching a tensor.

A running request has a slot of its own, which its steps change in place. A *snapshot* is a copy of a state behind the
last token of a block, under the block's prefix-cache key: a request that begins with the same tokens goes on from it,
and so does a preempted one. The cached keys and values of a prefix are of use only as far as there is a snapshot.
Snapshots are kept behind every SNAPSHOT_TOKENS tokens, where a second request has begun like another up to some token,
and behind the last whole block of each prompt; chunks end at these places, but for the last one. The snapshot that was
used longest ago makes room for the next.

A chunk with drafts keeps a copy of the state behind each of its rows, and the request goes on with that behind the last
row that counts: its slot and those of the copies change places.

A step that ends in the middle, because a rank was lost, leaves states of which nobody knows how far they are: from
`begin` to `complete` a state counts as spoiled, and its request starts again from a snapshot, or from its first token.
"""

from collections import OrderedDict
from collections.abc import Iterable

from moe_serve.attention_dp.request import Request

SNAPSHOT_TOKENS = 512  # rounded up to whole blocks


class StateSlots:
    """The first max_running + num_drafts slots are for running requests and drafts of a step, the num_snapshots behind
    them for snapshots.

    num_drafts: that a step may have beside max_running requests; fewer requests leave it their slots, too
    interval:   tokens from one snapshot of a long sequence to the next, a multiple of the block size
    """

    def __init__(self, max_running: int, num_drafts: int, num_snapshots: int, interval: int):
        self.num_slots = max_running + num_drafts + num_snapshots
        self.num_snapshots = num_snapshots
        self.interval = interval
        self._first_snapshot = max_running + num_drafts
        self._free = list(range(self._first_snapshot))[::-1]
        self._free_snapshots = list(range(self._first_snapshot, self.num_slots))[::-1]
        self._drafting: dict[Request, list[int]] = {}  # what is left of draft_slots, the next one last
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # snapshots by key, the one used longest ago first
        self.only_here: set[bytes] = set()  # those of these keys that are not known to be in a tier, too
        self._num_readers: dict[int, int] = {}  # requests whose next step reads a snapshot's slot
        self._dropped: set[int] = set()  # slots of dropped snapshots that are still to be read
        self._filled: set[int] = set()  # slots of snapshots that are being taken from elsewhere

    @property
    def num_free(self) -> int:
        """Returns how many drafts the next step may have: slots that no running request has."""
        return len(self._free)

    def num_covered(self, keys: list[bytes], num_blocks: int) -> int:
        """Returns behind how many of the first num_blocks blocks, which have these keys, the last snapshot is."""
        while num_blocks and keys[num_blocks - 1] not in self._slot_of:
            num_blocks -= 1
        return num_blocks

    def find(self, key: bytes) -> int | None:
        """Returns the slot of the snapshot with this key; None: there is none."""
        return self._slot_of.get(key)

    def begin_filling(self) -> int:
        """Returns a slot into which a snapshot is copied from elsewhere; -1: there is none."""
        slot = self._take()
        if slot >= 0:
            self._filled.add(slot)
        return slot

    def is_slot_coming(self, request: Request) -> bool:
        """Returns whether a slot comes free without this request: others fill all, or their next steps read or write
        them. Those that read one themselves wait for what is being filled alone, so that no two wait for one another.
        """
        return bool(self._filled) or (self.num_snapshots > 0 and request.state_from < self._first_snapshot)

    def end_filling(self, slot: int, key: bytes | None) -> None:
        """Keeps the snapshot that is now in a slot of `begin_filling`. key: None: it has not come whole"""
        self._filled.remove(slot)
        if key is None or key in self._slot_of:
            self._free_snapshots.append(slot)
        else:
            self._add(key, slot)

    def admit(self, request: Request) -> None:
        """Gives a request that starts its own slot. The caller has seen that fewer than max_running have one."""
        request.state_slot = self._free.pop()
        request.state_from = -1

    def read_from(self, request: Request, key: bytes | None, num_tokens: int) -> None:
        """Has a request go on behind num_tokens tokens, from the snapshot with this key; None: from zeros."""
        self._end_reading(request)
        if key is not None:
            slot = self._slot_of[key]
            self._slot_of.move_to_end(key)
            self._num_readers[slot] = self._num_readers.get(slot, 0) + 1
            request.state_from = slot
        request.num_in_state = num_tokens

    def begin_drafts(self, request: Request, num_drafts: int) -> None:
        """Gives the next chunk of a request, which has so many drafts, a slot for the state behind each of its rows."""
        copies = [self._free.pop() for _ in range(num_drafts)]
        request.draft_slots = [*copies, request.state_slot]
        self._drafting[request] = request.draft_slots[::-1]

    def end_drafts(self) -> None:
        """Takes back slots of the step before: behind rows that did not count, or have not run."""
        for request in list(self._drafting):
            self._end_drafts(request)

    def _end_drafts(self, request: Request) -> None:
        if self._drafting.pop(request, None) is not None:
            self._free += [slot for slot in request.draft_slots if slot != request.state_slot]
            request.draft_slots = []

    def plan(self, request: Request, position: int, key: bytes | None) -> None:
        """Has the next chunk of a request keep a snapshot behind `position` tokens, if there is a slot for it.

        key: of the block that ends there; None: none is to be kept
        """
        if key in self._slot_of and key is not None:
            self._slot_of.move_to_end(key)
            key = None
        if key is not None and request.snapshot_slot < 0:
            request.snapshot_slot = self._take()
        if key is None:
            self._forget_plan(request)
        request.snapshot_at = -1 if request.snapshot_slot < 0 else position

    def begin(self, requests: Iterable[Request]) -> None:
        """A step goes on with the states of these requests."""
        for request in requests:
            request.num_in_state = -1

    def complete(self, request: Request, key: bytes | None, decodes: bool) -> None:
        """The chunk of a request has run, or with drafts its next row counts.

        key: of the block behind which it has kept a snapshot; None: it has kept none, or that is not to be used
        decodes: the chunk was one of the output, whose snapshots replace each other
        """
        self._end_reading(request)
        if request in self._drafting:
            request.state_slot = self._drafting[request].pop()
        request.state_from, request.num_in_state = request.state_slot, request.num_computed
        if key is not None and key not in self._slot_of:
            self._add(key, request.snapshot_slot)
            request.snapshot_slot = -1
            if decodes:
                self.drop([] if request.output_snapshot is None else [request.output_snapshot])
                request.output_snapshot = key
        self._forget_plan(request)

    def release(self, request: Request) -> None:
        """Takes a request's slot back."""
        if request.state_slot >= 0:
            self._end_reading(request)
            self._forget_plan(request)
            self._end_drafts(request)
            self._free.append(request.state_slot)
            request.state_slot = -1
            request.output_snapshot = None

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forgets snapshots: their blocks are gone, or their values cannot be trusted."""
        for key in keys:
            slot = self._remove(key)
            if slot is not None:
                (self._dropped.add if slot in self._num_readers else self._free_snapshots.append)(slot)

    def clear(self) -> None:
        """Forgets all snapshots."""
        self.drop(list(self._slot_of))

    def check(self, running: Iterable[Request]) -> None:
        """Asserts that every slot is free or has one purpose. For tests."""
        running = list(running)
        readers: dict[int, int] = {}
        for request in running:
            if request.state_from >= self._first_snapshot:
                readers[request.state_from] = readers.get(request.state_from, 0) + 1
        assert readers == self._num_readers, f"{readers} read snapshots, counted are {self._num_readers}"
        own = [request.state_slot for request in running if not request.draft_slots]
        own += [slot for request in self._drafting for slot in request.draft_slots]
        assert sorted(own + self._free) == list(range(self._first_snapshot)), f"{own} are used, {self._free} free"
        planned = [request.snapshot_slot for request in running if request.snapshot_slot >= 0]
        kept = [*self._slot_of.values(), *self._dropped, *self._filled, *planned, *self._free_snapshots]
        assert sorted(kept) == list(range(self._first_snapshot, self.num_slots)), f"snapshots are in {kept}"
        assert self.only_here <= self._slot_of.keys(), "snapshots that are gone wait for a tier"
        assert self._dropped <= set(readers), "slots that nobody reads are not free"

    def _take(self) -> int:
        """Returns a slot for another snapshot, in the place of one that nobody reads; -1: there is none."""
        if self._free_snapshots:
            return self._free_snapshots.pop()
        oldest = next((key for key, slot in self._slot_of.items() if slot not in self._num_readers), None)
        slot = None if oldest is None else self._remove(oldest)
        return -1 if slot is None else slot

    def _add(self, key: bytes, slot: int) -> None:
        self._slot_of[key] = slot
        self.only_here.add(key)

    def _remove(self, key: bytes) -> int | None:
        self.only_here.discard(key)
        return self._slot_of.pop(key, None)

    def _end_reading(self, request: Request) -> None:
        slot = request.state_from
        if slot >= self._first_snapshot:
            self._num_readers[slot] -= 1
            if not self._num_readers[slot]:
                del self._num_readers[slot]
                if slot in self._dropped:
                    self._dropped.remove(slot)
                    self._free_snapshots.append(slot)
        request.state_from = -1

    def _forget_plan(self, request: Request) -> None:
        if request.snapshot_slot >= 0:
            self._free_snapshots.append(request.snapshot_slot)
        request.snapshot_slot = request.snapshot_at = -1
