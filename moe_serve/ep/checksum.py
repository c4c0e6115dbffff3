"""A checksum of an expert's bytes, added up piece by piece where the bytes are, on CPU or GPU.

The bytes of each piece are read as rows of 64-bit words. What is kept is the sum of every row and, over all pieces, the
sum of every column: two passes of plain additions, as fast as memory. In the end the sums are mixed with their
positions and added up, to one number for columns and one for rows. A changed byte changes a row and a column for
certain. Two words that change places change rows or columns, also where they differ in one bit. It guards against
errors and torn copies, not against an attacker.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

COLUMNS = 512  # words of a row: rows of 4 KiB, so that the sums of rows are 1 / 512 of the bytes
ROW_BYTES = 8 * COLUMNS
_WORD = 1 << 64
# Of splitmix64, which maps words one to one and lets every bit reach every other.
_STRIDE, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Checksum:
    """The sums of an expert's bytes as far as they were added. Both sides cut an expert into the same pieces."""

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


def checksum_reference(pieces: Iterable[bytes]) -> tuple[int, int]:
    """Returns the checksum of an expert that is cut into these pieces, in plain Python."""
    rows, columns, num_bytes = [], [0] * COLUMNS, 0
    for piece in pieces:
        num_bytes += len(piece)
        for start in range(0, len(piece), ROW_BYTES):
            row = piece[start : start + ROW_BYTES].ljust(ROW_BYTES, b"\0")
            words = [int.from_bytes(row[i : i + 8], "little") for i in range(0, ROW_BYTES, 8)]
            rows.append(sum(words))
            columns = [before + word for before, word in zip(columns, words, strict=True)]

    def mixed(sums: list[int], first: int) -> int:
        total = 0
        for position, value in enumerate(sums, first):
            x = (value + position * _STRIDE) % _WORD
            x = (x ^ x >> 30) * _FIRST % _WORD
            x = (x ^ x >> 27) * _SECOND % _WORD
            total += x ^ x >> 31
        return _signed(total)

    return mixed(columns, 1), mixed([*rows, num_bytes], 1 + COLUMNS)


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
