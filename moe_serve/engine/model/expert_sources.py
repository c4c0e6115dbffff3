"""Where a rank gets experts from beside ranks that serve: out of their memory, or from the checkpoint.

Each part of what is read goes to the source that has taken the least time per byte so far. One that was not tried in
this read counts as the fastest, so all are timed as they are now: with this page cache, this link, this load beside. A
source that is not asked counts as a little faster with each part, so it is timed again in time: the first file that is
opened, or a moment of other load, decides nothing for good. A source may have only some of the experts, or go away in
the middle; the next one has the rest. The checkpoint has all.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from moe_serve.dispatch.peer_streams import PeerStreams
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.peer_experts import PeerExperts
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ModelError
from moe_serve.log import get_logger
from moe_serve.models.weights import ExpertReloader, ExpertToRead

PART_BYTES = 8 << 20  # asked for at once: enough to fill a link, and little to time a slow source with
_PASSED_OVER = 0.95  # one that takes twice as long is timed again after 14 parts, which costs 7 %
NEAR, FAR, CHECKPOINT = "the memory of ranks on this host", "the memory of ranks on other hosts", "the checkpoint"
log = get_logger(__name__)
Put = Callable[[Sequence[ExpertToRead]], list[ExpertToRead]]  # returns those that it could not write


@dataclass
class _Source:
    """per_byte_s: 0 = not tried;  num_experts: that it gave"""

    name: str
    put: Put
    per_byte_s: float = 0.0
    num_experts: int = field(default=0)


class ExpertSources:
    """Writes experts into slots of this rank, with the bits that they were loaded with at start.

    read_from: how many experts each source has given in the last read
    """

    def __init__(self, checkpoint: ExpertReloader, rank: int, streams: PeerStreams | None, deadline_s: float):
        """streams: with ranks that serve; None: there is the checkpoint alone

        deadline_s: a rank that sends nothing for so long is given up
        """
        self.checkpoint = checkpoint
        self.read_from: dict[str, int] = {}
        self._rank, self._streams, self._deadline_s = rank, streams, deadline_s

    def ask_placement(self, num_ranks: int) -> bytes | None:
        """Returns what a rank that serves says of where experts are, one of this host first; None: none answers."""
        if self._streams is None:
            return None
        others = [rank for rank in range(num_ranks) if rank != self._rank]
        with PeerExperts(self._streams, self._deadline_s) as peers:
            answers = (peers.ask_placement(rank) for rank in sorted(others, key=lambda rank: not peers.is_near(rank)))
            return next((answer for answer in answers if answer is not None), None)

    def read(
        self,
        experts: Sequence[ExpertToRead],
        stores: Sequence[ExpertStore],
        held: Placement | None = None,
        report: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        """Writes experts into slots. held: by the ranks that can be asked; None: nobody can;  report: takes the part
        that is done

        Raises ModelError, naming the file, for an expert that no rank gives and the checkpoint has no longer.
        """
        self.read_from = {}
        if not experts:
            return
        started_s, num_bytes = time.monotonic(), stores[0].slot_bytes
        todo = sorted(experts, key=lambda each: (each.layer_row, each.expert))
        step = max(1, PART_BYTES // num_bytes)
        with ExitStack() as opened:
            sources = self._open(stores, held, opened)
            for first in range(0, len(todo), step):
                report(first / len(todo))
                _read_part(todo[first : first + step], sources, num_bytes)
        self.read_from = {source.name: source.num_experts for source in sources if source.num_experts}
        parts = ", ".join(f"{num} out of {name}" for name, num in self.read_from.items())
        took_s = time.monotonic() - started_s
        mib = len(todo) * num_bytes / 2**20
        log.info("rank %d: %d experts (%.0f MiB) in %.2f s: %s", self._rank, len(todo), mib, took_s, parts)

    def _open(self, stores: Sequence[ExpertStore], held: Placement | None, opened: ExitStack) -> list[_Source]:
        """Returns the sources, in the order in which they are tried."""
        sources = []
        if held is not None and self._streams is not None:
            peers = opened.enter_context(PeerExperts(self._streams, self._deadline_s))
            is_near = [peers.is_near(rank) for rank in range(held.num_ranks)]
            for name, near in ((NEAR, True), (FAR, False)):
                ranks = {rank for rank in range(held.num_ranks) if is_near[rank] == near and rank != self._rank}
                sources.append(_Source(name, _Holders(peers, held, ranks, stores)))
        return [*sources, _Source(CHECKPOINT, self._from_checkpoint(stores, opened))]

    def _from_checkpoint(self, stores: Sequence[ExpertStore], opened: ExitStack) -> Put:
        read: Callable[[Sequence[ExpertToRead], Sequence[ExpertStore]], None] | None = None

        def put(experts: Sequence[ExpertToRead]) -> list[ExpertToRead]:
            nonlocal read
            if read is None:
                read = opened.enter_context(self.checkpoint.opened())
            read(experts, stores)
            return []

        return put


class _Holders:
    """The ranks of this host, or of others, that hold experts."""

    def __init__(self, peers: PeerExperts, held: Placement, ranks: set[int], stores: Sequence[ExpertStore]):
        self._peers, self._held, self._ranks, self._stores = peers, held, ranks, stores
        self._turn = 0  # replicas are asked for in turn

    def __call__(self, experts: Sequence[ExpertToRead]) -> list[ExpertToRead]:
        wanted: dict[int, list[ExpertToRead]] = {}
        for each in experts:
            slots = np.flatnonzero(self._held.physical_to_logical[each.layer_row] == each.expert)
            holders = sorted({int(slot) // self._held.slots_per_rank for slot in slots} & self._ranks)
            holders = [rank for rank in holders if self._peers.answers(rank)]
            if holders:
                self._turn += 1
                wanted.setdefault(holders[self._turn % len(holders)], []).append(each)
        arrived = self._peers.read(
            {
                rank: [(each.layer_row, each.expert, self._stores[each.layer_row].slot(each.slot)) for each in those]
                for rank, those in wanted.items()
            }
        )
        got = {
            each
            for rank, those in wanted.items()
            for each, is_there in zip(those, arrived[rank], strict=True)
            if is_there
        }
        return [each for each in experts if each not in got]


def _read_part(part: Sequence[ExpertToRead], sources: Sequence[_Source], slot_bytes: int) -> None:
    """Reads experts from the fastest source, those that it lacks from the next one, and times each."""
    left, error = list(part), None
    for source in sorted(sources, key=lambda source: source.per_byte_s):
        if not left:
            source.per_byte_s *= _PASSED_OVER
            continue
        before, began_s = len(left), time.perf_counter()
        try:
            left = source.put(left)
        except ModelError as refused:  # ranks may still have what cannot be read any more
            source.per_byte_s, error = float("inf"), refused
            continue
        took_s, num = time.perf_counter() - began_s, before - len(left)
        source.num_experts += num
        if num:
            per_byte_s = took_s / (num * slot_bytes)
            source.per_byte_s = (source.per_byte_s or per_byte_s) / 2 + per_byte_s / 2
    if left:
        assert error is not None, "the checkpoint has all experts"
        raise error
