"""Experts out of the memory of ranks that serve, for one that is started beside them or has missed moves.

    reader   asks a rank where experts are       its answer names all slots, and the ranks that take part
    reader   asks it for experts                 a thread sums each in its slot, and sends bytes and sum
    reader   lets them arrive in their slots, sums them there, and compares

The bytes are those of the slot, packed as they serve: nothing is read from a disk or packed again. Steps go on
meanwhile; where slots change while one is sent, the thread says so behind the bytes. It has the priority of steps: with
a lower one it could lose its core while it holds the interpreter's lock, which steps need.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.peer_streams import PeerStreams
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.expert_transfer import Checksum, IncomingExpert, pieces_of
from moe_serve.eplb.placement import Placement
from moe_serve.socket_bytes import receive, receive_into

PIECE_BYTES = 1 << 20
_ASK = struct.Struct("<I")  # how many experts follow; 0: where experts are
_EXPERT = struct.Struct("<II")  # row of the placement, expert
_SUM_BYTES = 16
_SIZE = struct.Struct("<I")
_HERE, _NOT_HERE = b"\1", b"\0"
_MOST_ASKED = 1 << 16
_IDLE_S = 60.0  # after which a reader that asks nothing is gone


class SlotChanges:
    """Tells readers whether slots change: entered before they do, left once the placement names their experts.

    count: odd while they change
    """

    count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *error: object) -> None:
        self.count += 1


class ExpertServer:
    """Gives other ranks what they ask for, until `close`.

    num_sent: experts
    """

    def __init__(
        self,
        streams: PeerStreams,
        rank: int,
        stores: Sequence[ExpertStore],
        changes: SlotChanges,
        serving: Callable[[], Placement],
        now: Callable[[], bytes],
        deadline_s: float,
    ):
        """
        stores:     by row of the placement
        changes:    of these slots, and of what `serving` says about them
        serving:    returns where experts are, as far as this rank's slots go
        now:        returns what a reader is told of where experts are
        deadline_s: a reader that takes nothing for so long is given up
        """
        self.num_sent = 0
        self._rank, self._stores, self._changes = rank, stores, changes
        self._serving, self._now, self._deadline_s = serving, now, deadline_s
        self._listening, self._streams, self._ends = streams, set[socket.socket](), False
        streams.listen(self._take)

    def _take(self, stream: socket.socket, source: int) -> None:
        """Serves a reader from a thread. source: as PeerStreams says"""
        self._streams.add(stream)
        if self._ends:
            stream.close()
            return
        threading.Thread(target=self._serve, args=(stream,), name="experts for another rank", daemon=True).start()

    def close(self) -> None:
        """Ends all streams, and takes no more."""
        self._ends = True
        self._listening.close()
        for stream in list(self._streams):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def _serve(self, stream: socket.socket) -> None:
        with stream, contextlib.suppress(OSError, ValueError):
            while True:
                stream.settimeout(_IDLE_S)
                (num,) = _ASK.unpack(receive(stream, _ASK.size))
                stream.settimeout(self._deadline_s)
                if not num:
                    said = self._now()
                    stream.sendall(_SIZE.pack(len(said)) + said)
                    continue
                if num > _MOST_ASKED:
                    raise ValueError(f"{num} experts at once")
                for row, expert in _EXPERT.iter_unpack(receive(stream, num * _EXPERT.size)):
                    self._send(stream, row, expert)
        self._streams.discard(stream)

    def _send(self, stream: socket.socket, row: int, expert: int) -> None:
        before, slot = self._changes.count, self._find(row, expert)
        if before % 2 or slot is None:
            stream.sendall(_NOT_HERE)
            return
        stream.sendall(_HERE)
        checksum = Checksum()
        for piece in pieces_of(slot, PIECE_BYTES):
            checksum.add(piece)  # which brings it into the cache
            stream.sendall(memoryview(piece.numpy().data))
        stream.sendall(_HERE if self._changes.count == before else _NOT_HERE)
        stream.sendall(memoryview(checksum.value().numpy().data))
        self.num_sent += 1

    def _find(self, row: int, expert: int) -> dict[str, Tensor] | None:
        """Returns the slot of this rank that holds an expert; None: none does."""
        placement = self._serving()
        if row >= placement.num_layers:
            return None
        first = self._rank * placement.slots_per_rank
        slots = np.flatnonzero(placement.physical_to_logical[row, first : first + placement.slots_per_rank] == expert)
        return self._stores[row].slot(int(slots[0])) if len(slots) else None


class PeerExperts:
    """Reads from ranks that serve. A rank that does not answer in time is not asked again. Use it in a `with`."""

    def __init__(self, streams: PeerStreams, deadline_s: float):
        """deadline_s: a rank from which no byte comes for so long is given up"""
        self._peers, self._deadline_s = streams, deadline_s
        self._streams: dict[int, socket.socket | None] = {}  # None: given up

    def __enter__(self) -> "PeerExperts":
        return self

    def __exit__(self, *args: object) -> None:
        for stream in self._streams.values():
            if stream is not None:
                stream.close()

    def is_near(self, rank: int) -> bool:
        """Returns whether a rank is on this host."""
        return self._peers.is_near(rank)

    def answers(self, rank: int) -> bool:
        """Returns whether a rank has not been given up."""
        return self._streams.get(rank, self) is not None

    def ask_placement(self, rank: int) -> bytes | None:
        """Returns what a rank says of where experts are; None where it does not answer."""
        try:
            stream = self._stream(rank)
            stream.sendall(_ASK.pack(0))
            (size,) = _SIZE.unpack(receive(stream, _SIZE.size))
            return receive(stream, size)
        except OSError:
            self._give_up(rank)
            return None

    def read(self, wanted: Mapping[int, Sequence[tuple[int, int, Mapping[str, Tensor]]]]) -> dict[int, list[bool]]:
        """Lets experts arrive, from all these ranks at once; returns by rank which of them did, unchanged.

        wanted: by rank, the row and number of each expert, and the slot that it is for, which is written in any case
        """
        for rank, experts in wanted.items():
            self._ask(rank, [each[:2] for each in experts])
        arrived: dict[int, list[bool]] = {rank: [] for rank in wanted}
        for rank, experts in wanted.items():
            try:
                stream = self._stream(rank)
                for row, _, slot in experts:
                    arrived[rank].append(_take(stream, row, slot))
            except OSError:
                self._give_up(rank)
            arrived[rank] += [False] * (len(experts) - len(arrived[rank]))
        return arrived

    def _ask(self, rank: int, experts: Sequence[tuple[int, int]]) -> None:
        try:
            words = b"".join(_EXPERT.pack(row, expert) for row, expert in experts)
            self._stream(rank).sendall(_ASK.pack(len(experts)) + words)
        except OSError:
            self._give_up(rank)

    def _stream(self, rank: int) -> socket.socket:
        if rank not in self._streams:
            stream = self._peers.dial(rank, self._deadline_s)
            stream.settimeout(self._deadline_s)
            self._streams[rank] = stream
        stream_or_none = self._streams[rank]
        if stream_or_none is None:
            raise OSError("given up")
        return stream_or_none

    def _give_up(self, rank: int) -> None:
        stream = self._streams.get(rank)
        if stream is not None:
            stream.close()
        self._streams[rank] = None


def _take(stream: socket.socket, row: int, slot: Mapping[str, Tensor]) -> bool:
    """Takes one expert in; returns whether it was there, and its bytes are those that were summed."""
    if receive(stream, 1) != _HERE:
        return False
    expert = IncomingExpert(row, -1, 0, pieces_of(slot, PIECE_BYTES))
    while not expert.is_written:
        receive_into(stream, memoryview(expert.next_piece.numpy().data))
        expert.accept()
    was_there = receive(stream, 1) == _HERE
    expert.compare(torch.frombuffer(bytearray(receive(stream, _SUM_BYTES)), dtype=torch.int64))
    return was_there and bool(expert.is_right())
