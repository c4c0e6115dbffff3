"""Carries experts among CPU ranks through shared memory; every rank writes its own segment only.

    destination rank   writes a ticket in its segment: the round that it wants experts of, numbered anew each time
    source rank        sees the ticket, copies pieces into its send buffer, writes for which ticket and how many
    destination rank   copies them into its private staging slots

So a rank that was stopped in the middle of a copy, and goes on long after the others left it out, writes where nobody
trusts it: what it has published is for a ticket that nobody holds any more. A ticket is never used twice, although the
version of a cancelled round is.

Data are written before the word that announces them, and x86-64 makes stores visible in program order and loads in
theirs (dispatch/shm/transport.py). A source rank may turn to another round at any moment: it takes the ticket away
before it overwrites a byte, and the destination rank looks at the ticket again after each copy.

A segment: one cache line with the rank's own ticket, one for each expert that it sends, and the bytes of these.

Each host has a segment for each rank of another host too. What a rank writes into its own one goes over the link to
that of the host that reads it, in the same order: a frame of the link raises its flag, the word written last, after its
data. A piece waits until all that was sent there before is on its way. So rows queue behind one piece at most, however
slow the network is, and not behind all that the kernel would take.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.hosts.link import Space
from moe_serve.dispatch.shm.memory import SegmentUse, ShmMemory, open_regions, share_regions
from moe_serve.dispatch.shm.region import LINE_BYTES, Int64Array
from moe_serve.ep.expert_transfer import IncomingExpert, OutgoingExpert, Transfers

USE = SegmentUse(
    "send buffers for moving experts", lambda free_bytes: "lower eplb.staging_slots or set eplb.mode: static"
)
PIECE_BYTES = 1 << 16  # the least that a turn moves: some 50 us, most of which the calls take in smaller ones
_LINE_WORDS = LINE_BYTES // 8
_TICKET, _ROUND, _LAST = 0, 1, 2  # words of the first line: what this rank waits for; no ticket = 0; its last ticket
_FOR, _PUBLISHED, _CHECKSUM = 0, 1, 2  # words of a line of the send buffer: ticket, number of pieces, two of the sum


class ShmCarrier:
    """ExpertCarrier over the segments of all ranks."""

    def __init__(self, memory: ShmMemory, slot_bytes: int, staging_slots: int, piece_bytes: int = PIECE_BYTES):
        """memory: with regions of `region_bytes`"""
        self.piece_bytes = piece_bytes
        self._rank, self._num_ranks = memory.rank, memory.num_ranks
        self._link = None if memory.space is None else memory.space.link
        self._segments = [_Segment(memory.region(r), slot_bytes, staging_slots) for r in range(memory.num_ranks)]
        self._mirrors: dict[int, _Mirror] = {}  # by host
        if memory.space is not None:
            self._mirrors = {host: _Mirror(memory.space, self._rank, host) for host in memory.space.link.others}
        self._own = self._segments[self._rank]
        self._round_id = 0
        self._ticket = max(self._rank + 1, self._own.last_ticket)  # a process that died may have had this segment
        self._own.show_ticket(0, 0, self._mirrors.values())
        self._sends: list[_Send] = []
        self._receives: list[_Receive] = []

    def start(self, transfers: Transfers) -> None:
        self._round_id = transfers.round_id
        self._ticket += self._num_ranks  # no other rank has this number, and this one will not have it again
        self._sends = [
            _Send(
                expert,
                self._own.line(i),
                self._own.data[i],
                self._segments[expert.dst_rank],
                self._mirror_of(expert.dst_rank),
            )
            for i, expert in enumerate(transfers.outgoing)
        ]
        self._receives = [_Receive(expert, self._segments[expert.src_rank]) for expert in transfers.incoming]
        if self._receives:
            self._own.show_ticket(self._ticket, transfers.round_id, self._mirrors.values())

    def _mirror_of(self, rank: int) -> "_Mirror | None":
        """Returns the copy of the own segment that a rank reads; None where it reads the segment itself."""
        return None if self._link is None else self._mirrors.get(self._link.hosts.of_rank[rank])

    def carry(self, max_bytes: int) -> int:
        handled = 0
        while handled < max_bytes:
            before = handled
            if self._link is not None:
                self._link.poll()
            for receive in self._receives:
                if handled < max_bytes:
                    handled += receive.take_piece(self._ticket)
            for send in self._sends:
                if handled < max_bytes:
                    handled += send.put_piece(self._round_id)
            if handled == before:
                break
        return handled

    def end(self) -> None:
        self._own.show_ticket(0, 0, self._mirrors.values())
        self._sends, self._receives = [], []

    def close(self) -> None:
        self.end()


@dataclass(frozen=True)
class _Mirror:
    """The copy of this rank's segment on another host. rank: this one"""

    space: Space
    rank: int
    host: int

    @property
    def takes_more(self) -> bool:
        """Whether all that was sent there before has left this host."""
        return not self.space.queued(self.host)

    def write(self, data: Tensor | Int64Array | None, word: Int64Array) -> None:
        """Writes bytes of the segment, then a word of it, as they are now."""
        base = self.space.regions[self.rank].data_ptr()
        flag_at: int = word.__array_interface__["data"][0]
        at, size = 0, 0
        if data is not None:
            at = data.data_ptr() if isinstance(data, Tensor) else data.__array_interface__["data"][0]
            size = data.nbytes
        offset = at - base if size else 0
        self.space.write(self.host, 1 << self.rank, offset, at, size, flag_at - base, int(word[0]))


class _Segment:
    """The segment of one rank. data: by expert that it sends, [slot_bytes] uint8"""

    def __init__(self, region: Tensor, slot_bytes: int, staging_slots: int):
        head = LINE_BYTES * (1 + staging_slots)
        self._words: Int64Array = region[:head].view(torch.int64).numpy()
        self.data = region[head : head + staging_slots * slot_bytes].view(staging_slots, slot_bytes)

    @property
    def last_ticket(self) -> int:
        """The highest ticket that was shown here, 0 = none."""
        return int(self._words[_LAST])

    def show_ticket(self, ticket: int, round_id: int, mirrors: Iterable[_Mirror] = ()) -> None:
        """Called by the owner. mirrors: on other hosts"""
        word = self._words[_TICKET:][:1]
        word[0] = 0
        for mirror in mirrors:
            mirror.write(None, word)
        self._words[_LAST] = max(ticket, self.last_ticket)
        self._words[_ROUND] = round_id
        word[0] = ticket
        for mirror in mirrors:
            mirror.write(self._words[_ROUND : _LAST + 1], word)

    def ticket(self, round_id: int) -> int:
        """Returns the ticket of the owner, 0 where it does not wait for this round."""
        before, wanted, after = (int(self._words[word]) for word in (_TICKET, _ROUND, _TICKET))
        return before if before == after and wanted == round_id else 0

    def line(self, index: int) -> Int64Array:
        """Returns the words about one of the experts that the owner sends, [8] int64."""
        return self._words[_LINE_WORDS * (1 + index) :][:_LINE_WORDS]


class _Send:
    """An expert on its way into this rank's send buffer."""

    def __init__(
        self, expert: OutgoingExpert, line: Int64Array, data: Tensor, destination: _Segment, mirror: _Mirror | None
    ):
        """mirror: where the destination is on another host"""
        self._expert = expert
        self._line = line
        self._data = data
        self._destination = destination
        self._mirror = mirror
        self._ticket = self._num_bytes = 0

    def put_piece(self, round_id: int) -> int:
        """Copies the next piece for who waits for it; returns its bytes, 0 where nothing is to be done now."""
        ticket = self._destination.ticket(round_id)
        if ticket != self._ticket:
            for word, value in ((_FOR, 0), (_PUBLISHED, 0), (_FOR, ticket)):
                self._line[word] = value
                if self._mirror is not None:
                    self._mirror.write(None, self._line[word:][:1])
            self._ticket, self._num_bytes = ticket, 0
            self._expert.restart()
        if not ticket or self._expert.is_read or not (self._mirror is None or self._mirror.takes_more):
            return 0
        piece = self._data[self._num_bytes :]
        num_bytes = self._expert.read_into(piece)
        self._num_bytes += num_bytes
        if self._expert.is_read:
            self._line[_CHECKSUM : _CHECKSUM + 2] = self._expert.checksum().numpy()
        self._line[_PUBLISHED] = self._expert.num_read
        if self._mirror is not None:
            if self._expert.is_read:
                self._mirror.write(self._line[_CHECKSUM : _CHECKSUM + 2], self._line[_FOR:][:1])
            self._mirror.write(piece[:num_bytes], self._line[_PUBLISHED:][:1])
        return num_bytes


class _Receive:
    """An expert on its way out of the send buffer of another rank."""

    def __init__(self, expert: IncomingExpert, source: _Segment):
        self._expert = expert
        self._line = source.line(expert.index)
        self._data = source.data[expert.index]
        self._num_bytes = 0

    def take_piece(self, ticket: int) -> int:
        """Copies the next piece if it is there; returns its bytes."""
        expert, line = self._expert, self._line
        if expert.is_written or line[_FOR] != ticket or line[_PUBLISHED] <= expert.num_written:
            return 0
        piece = expert.next_piece
        piece.copy_(self._data[self._num_bytes :][: len(piece)])
        checksum = torch.from_numpy(line[_CHECKSUM : _CHECKSUM + 2].copy())
        if line[_FOR] != ticket:
            return 0  # the source rank has turned to another round, and may have overwritten what was just copied
        self._num_bytes += len(piece)
        expert.accept()
        if expert.is_written:
            expert.compare(checksum)
        return len(piece)


def region_bytes(slot_bytes: int, staging_slots: int) -> int:
    """Returns the size of each rank's region."""
    return LINE_BYTES * (1 + staging_slots) + staging_slots * slot_bytes


def make_shm_carrier(group: EpGroup, slot_bytes: int, staging_slots: int) -> ShmCarrier:
    """Maps the segments of a group; a collective call, unless this rank joins later.

    Raises CapacityError when shared memory is too small.
    """
    num_bytes = region_bytes(slot_bytes, staging_slots)
    if group.files is not None and group.files.is_replacement:
        memory = open_regions(group.files, group.rank, group.num_ranks, num_bytes, USE, group.link)
    else:
        assert group.process_group is not None, "shared memory is mapped over a process group"
        memory = share_regions(group.process_group, num_bytes, USE, group.files, group.link)
    return ShmCarrier(memory, slot_bytes, staging_slots)
