"""How the experts of a migration round travel from rank to rank: in pieces, a few in each turn, without waiting.

A piece is a part of one tensor of a slot, as bytes. All stores have equal shapes, so both ranks cut an expert into the
same pieces. The source rank sums the bytes as it reads them, the destination rank as they lie in its own staging slot,
and both compare. Between them stands a carrier, chosen by where the ranks are (expert_carrier.py):

    NoCarrier           one rank: nothing travels
    ShmCarrier          CPU ranks of one host, through shared memory (expert_carrier_shm.py)
    CollectiveCarrier   torch.distributed: gloo on CPUs, NCCL on GPUs (expert_carrier_collective.py)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_serve.ep.checksum import Checksum


class OutgoingExpert:
    """An expert that this rank sends: its pieces, summed as they are read."""

    def __init__(self, dst_rank: int, pieces: Sequence[Tensor]):
        self.dst_rank = dst_rank
        self.pieces = pieces
        self.restart()

    def restart(self) -> None:
        """Begins again with the first piece."""
        self.num_read = 0
        self._sum = Checksum()

    @property
    def is_read(self) -> bool:
        return self.num_read == len(self.pieces)

    def read_into(self, buffer: Tensor) -> int:
        """Copies the next piece into the first bytes of a buffer; returns how many."""
        piece = self.pieces[self.num_read]
        self._sum.add(piece)
        buffer[: len(piece)].copy_(piece)
        self.num_read += 1
        return len(piece)

    def checksum(self) -> Tensor:
        """Returns [2] int64, of all pieces."""
        return self._sum.value()


class IncomingExpert:
    """An expert that this rank receives into a staging slot: its pieces, summed as they lie there.

    index: which of the experts that the source rank sends in this round, in the order of the round
    """

    def __init__(self, layer_row: int, src_rank: int, index: int, pieces: Sequence[Tensor]):
        self.layer_row = layer_row
        self.src_rank = src_rank
        self.index = index
        self.pieces = pieces
        self.num_written = 0
        self._sum = Checksum()
        self._verdict: _ReadBack | None = None

    @property
    def is_written(self) -> bool:
        return self.num_written == len(self.pieces)

    @property
    def next_piece(self) -> Tensor:
        """The part of the staging slot that the next piece is to be copied into."""
        return self.pieces[self.num_written]

    def accept(self) -> None:
        """Sums the next piece, which lies in its place."""
        self._sum.add(self.next_piece)
        self.num_written += 1

    def compare(self, checksum: Tensor) -> None:
        """Compares the staged bytes with what the source rank has summed, [2] int64. All pieces are written."""
        self._verdict = _ReadBack((self._sum.value() == checksum).all())

    def is_right(self) -> bool | None:
        """Returns whether the staged bytes are those of the source rank; None: not known yet."""
        return None if self._verdict is None else self._verdict.poll()


@dataclass(frozen=True)
class Transfers:
    """What a round sends and receives, as one rank sees it.

    round_id:   of the round with all its moves: another round has another one, even if it has the same version
    num_pieces: of each expert, on any rank; 0 = no expert travels in this round, between any ranks
    outgoing, incoming: of this rank, in the order of the round
    """

    round_id: int
    num_pieces: int
    outgoing: Sequence[OutgoingExpert]
    incoming: Sequence[IncomingExpert]


class ExpertCarrier(Protocol):
    """Carries the experts of one round at a time. Every rank that takes part starts and ends the same rounds in order.

    piece_bytes: the most bytes of a piece, equal on all ranks
    """

    piece_bytes: int

    def start(self, transfers: Transfers) -> None:
        """Begins a round; copies nothing."""

    def carry(self, max_bytes: int) -> int:
        """Sends, receives and sums pieces until these are max_bytes, or nothing can go on now; returns their bytes.

        Never waits. Raises LostConnectionError where a rank went away.
        """

    def end(self) -> None:
        """Ends the round, complete or not: no staging slot is written any more and no expert read."""

    def close(self) -> None:
        """Gives buffers back. All ranks call it, after their last round."""


class NoCarrier:
    """The carrier of one rank, which has nobody to receive from."""

    piece_bytes = 1

    def start(self, transfers: Transfers) -> None:
        assert transfers.num_pieces == 0, "experts of one rank do not travel"

    def carry(self, max_bytes: int) -> int:
        return 0

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


def pieces_of(expert: Mapping[str, Tensor], piece_bytes: int) -> list[Tensor]:
    """Returns the bytes of a slot, as `ExpertStore.slot` gives it, in order: views of [at most piece_bytes] uint8."""
    tensors = [tensor.view(-1).view(torch.uint8) for tensor in expert.values()]
    return [data[start : start + piece_bytes] for data in tensors for start in range(0, len(data), piece_bytes)]


class _ReadBack:
    """A flag on its way from the device to the host."""

    def __init__(self, flag: Tensor):
        """flag: [] bool"""
        self._event: torch.cuda.Event | None = None
        self._host = flag
        if flag.is_cuda:
            self._host = torch.empty_like(flag, device="cpu", pin_memory=True)
            self._host.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def poll(self) -> bool | None:
        """Returns the flag, None while it is on its way."""
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            return None
        return bool(self._host)
