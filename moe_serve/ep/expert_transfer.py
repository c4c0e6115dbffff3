"""Moves the experts of a migration round from rank to rank: in pieces, a few at a time, without waiting.

A piece is a part of one tensor of a slot, as bytes. The stores of a layer have equal shapes on all ranks, so both cut
an expert into the same pieces. The source rank sums the bytes as it reads them, the destination rank as they lie in its
own staging slot, and both compare. Between them stands a carrier, chosen by where the ranks are (`make_carrier` in
weight_mover.py):

    NoCarrier           one rank: nothing travels
    ShmCarrier          CPU ranks of one host, through shared memory (expert_carrier_shm.py)
    CollectiveCarrier   torch.distributed: gloo on CPUs, NCCL on GPUs (expert_carrier_collective.py)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

COLUMNS = 512  # words of a row: rows of 4 KiB, so that the sums of rows are 1 / 512 of the bytes
ROW_BYTES = 8 * COLUMNS
_WORD = 1 << 64
# Of splitmix64, which maps words one to one and lets every bit reach every other.
_STRIDE, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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
    """The experts that one rank sends and receives in a round.

    round_id:   of the round with all its moves: another round has another one, even if it has the same version
    num_pieces: of the expert with the most, in any layer; 0 = no expert travels in this round, between any ranks
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


class Checksum:
    """A checksum of an expert's bytes, added up piece by piece where the bytes are, on CPU or GPU.

    Both sides cut an expert into the same pieces. The bytes of each piece are read as rows of 64-bit words. The
    sums of every row and, over all pieces, of every column are kept: two passes of plain additions, as fast as memory.
    In the end the sums are mixed with their positions and added up, to one number for columns and one for
    rows. A changed byte changes a row and a column for certain. Two words that change places change rows or columns,
    also where they differ in one bit. It guards against errors and torn copies, not against an attacker.
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._columns: Tensor | None = None
        self._num_bytes = 0

    def add(self, piece: Tensor) -> None:
        """piece: [num_bytes] uint8, contiguous, at least one byte"""
        words = _as_words(piece)
        self._rows.append(words.sum(1))
        columns = words.sum(0)
        self._columns = columns if self._columns is None else self._columns.add_(columns)
        self._num_bytes += piece.numel()

    def value(self) -> Tensor:
        """Returns [2] int64 on the device of the bytes."""
        assert self._columns is not None, "no bytes were added"
        size = torch.full((1,), self._num_bytes, device=self._columns.device)  # zeros at the end count too
        mixed = _mixed(torch.cat([self._columns, *self._rows, size]))
        return torch.stack([mixed[:COLUMNS].sum(), mixed[COLUMNS:].sum()])


def _as_words(piece: Tensor) -> Tensor:
    """Returns the bytes of a piece as [rows, COLUMNS] int64, zeros behind them; a copy only where they do not fit."""
    num_bytes = piece.numel()
    if num_bytes % ROW_BYTES or piece.storage_offset() % 8:
        padded = piece.new_zeros(-(-num_bytes // ROW_BYTES) * ROW_BYTES)
        padded[:num_bytes] = piece
        piece = padded
    return piece.view(torch.int64).view(-1, COLUMNS)


def _mixed(sums: Tensor) -> Tensor:
    """Returns sums [n] int64, each mixed with its position by splitmix64; int64 wraps around."""
    position = torch.arange(1, len(sums) + 1, device=sums.device)
    x = sums + position * _signed(_STRIDE)
    x = _xor_shift(x, 30) * _signed(_FIRST)
    x = _xor_shift(x, 27) * _signed(_SECOND)
    return _xor_shift(x, 31)


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    return x ^ (x >> bits & (1 << 64 - bits) - 1)  # the mask undoes the sign that int64 shifts in


def _signed(word: int) -> int:
    """Returns the int64 that has the bits of a number modulo 2^64."""
    return (word + _WORD // 2) % _WORD - _WORD // 2
