"""Whatever happens to the bytes of an expert on their way, its checksum is another one."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_serve.ep.expert_transfer import COLUMNS, ROW_BYTES, Checksum

WORD = 1 << 64
# Of splitmix64, which maps words one to one and lets every bit reach every other.
STRIDE, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def checksum(pieces: list[Tensor]) -> tuple[int, ...]:
    total = Checksum()
    for piece in pieces:
        total.add(piece)
    return tuple(total.value().tolist())


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
            x = (value + position * STRIDE) % WORD
            x = (x ^ x >> 30) * FIRST % WORD
            x = (x ^ x >> 27) * SECOND % WORD
            total += x ^ x >> 31
        return (total + WORD // 2) % WORD - WORD // 2

    return mixed(columns, 1), mixed([*rows, num_bytes], 1 + COLUMNS)


def random_bytes(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


SIZES = [1, 7, 8, 9, 1000, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 8, 3 * ROW_BYTES + 5]


@pytest.mark.parametrize("size", SIZES)
def test_the_sums_are_those_of_plain_python(size: int) -> None:
    data = random_bytes(size)
    assert checksum([data]) == checksum_reference([bytes(data.tolist())])
    cut = [data[: size // 2], data[size // 2 :]] if size > 1 else [data]  # the second piece begins at any byte
    assert checksum(cut) == checksum_reference([bytes(piece.tolist()) for piece in cut])


@pytest.mark.parametrize("size", SIZES)
def test_a_changed_byte_is_found(size: int) -> None:
    data = random_bytes(size)
    right = checksum([data])
    for at in {0, size // 3, size // 2, size - 1}:
        for bit in (1, 16, 128):
            wrong = data.clone()
            wrong[at] ^= bit
            assert checksum([wrong]) != right


@settings(max_examples=100, deadline=None)
@given(first=st.integers(0, 1279), second=st.integers(0, 1279), bit=st.integers(0, 63))
def test_words_that_change_places_are_found_even_where_they_differ_in_one_bit(
    first: int, second: int, bit: int
) -> None:
    words = torch.zeros(1280, dtype=torch.int64)
    words[first] = -(2**63) if bit == 63 else 1 << bit
    swapped = words.clone()
    swapped[[first, second]] = words[[second, first]]
    same = checksum([words.view(torch.uint8)]) == checksum([swapped.view(torch.uint8)])
    assert same == (first == second)


def test_pieces_that_change_places_are_found() -> None:
    data = random_bytes(2 * ROW_BYTES)
    one, other = data.view(2, -1)
    assert checksum([one, other]) != checksum([other, one])
    assert checksum([one, one]) != checksum([one, other])


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_tail_that_is_missing_is_found_even_where_it_is_zero(size: int) -> None:
    data = random_bytes(size)
    data[-1] = 0
    assert checksum([data]) != checksum([data[:-1]])
    assert checksum([data]) != checksum([torch.cat([data, data.new_zeros(1)])])


def test_bytes_of_any_tensor_are_summed_as_they_lie_in_memory() -> None:
    weights = torch.randn(33, 7)
    raw = weights.to(torch.float8_e4m3fn).view(-1).view(torch.uint8)
    assert checksum([raw]) == checksum_reference([raw.numpy().tobytes()])
