"""Attention over the paged cache: right on every shape, and a row's bits are its own."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu.attention import AttendRows
from tests.kernels.cpu.paged import CASES, SHAPES, sequences
from tests.tolerance import FLOAT32, relative_error

CHUNKS = [(0, 0, 1), (1, 62, 63), (2, 63, 64), (3, 64, 65), (4, 199, 200), (5, 0, 70), (6, 60, 190), (7, 126, 129)]
LENGTHS = [end for _, _, end in CHUNKS]


@pytest.mark.parametrize("name", CASES)
def test_decodes_and_chunks_in_one_batch_match_plain_attention(name, library):
    for block_size, threads in ((1, 1), (7, 2), (16, 1), (64, 2)):
        library.set_threads(threads)
        cached = sequences(CASES[name], LENGTHS, block_size)
        for got, chunk in zip(cached.attend(CHUNKS), CHUNKS, strict=True):
            assert relative_error(got, cached.reference(*chunk)) < FLOAT32, (block_size, chunk)


def test_a_step_without_rows_works():
    assert sequences(CASES["gqa"], [1], 16).attend([]) == []
    (nothing,) = sequences(CASES["gqa"], [1], 16).attend([(0, 1, 1)])
    assert nothing.shape == (0, 2, 4, 64)


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_in_chunks_of_any_cut_has_the_bits_of_token_by_token(name, library):
    cached = sequences(CASES[name], [200], 16)
    alone = torch.cat([cached.attend([(0, position, position + 1)])[0] for position in range(200)])
    draw = random.Random(1)
    cuts = [[0, 200], [0, 1, 200], [0, 64, 128, 200], [0, 63, 127, 129, 200]]
    cuts += [[0, *sorted(draw.sample(range(1, 200), count)), 200] for count in (1, 2, 5, 9)]
    for cut, threads in itertools.product(cuts, (1, 2)):
        library.set_threads(threads)
        whole = torch.cat([cached.attend([(0, first, end)])[0] for first, end in itertools.pairwise(cut)])
        assert torch.equal(whole, alone), (cut, threads)


@pytest.mark.parametrize("name", CASES)
def test_neighbours_and_threads_change_no_bit(name, library):
    cached = sequences(CASES[name], LENGTHS, 16)
    alone = [cached.attend([chunk])[0] for chunk in CHUNKS]
    for threads, order in itertools.product((1, 2, 3), (CHUNKS, CHUNKS[::-1], CHUNKS[2:5])):
        library.set_threads(threads)
        for got, chunk in zip(cached.attend(order), order, strict=True):
            assert torch.equal(got, alone[CHUNKS.index(chunk)]), (threads, chunk)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_stay_with_the_rows_that_see_them(name, value, library):
    library.set_threads(2)
    cached = sequences(CASES[name], LENGTHS, 7)  # blocks of no one are NaN, and so are the ends of blocks
    clean = cached.attend(CHUNKS)
    assert all(torch.isfinite(rows).all() for rows in clean)
    cached.cache[cached.slots(6)[97:]] = value  # the chunk of positions 60 .. 189 meets it at its 38th row
    dirty = cached.attend(CHUNKS)
    for seq, (got, wanted) in enumerate(zip(dirty, clean, strict=True)):
        if seq != 6:
            assert torch.equal(got, wanted), seq
    assert torch.equal(dirty[6][:37], clean[6][:37])
    assert not torch.isfinite(dirty[6][37:]).any()


@pytest.mark.parametrize("name", [name for name in CASES if "window" in name])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_keys_before_the_window_are_never_met(name, value, library):
    window = CASES[name][1]
    cached = sequences(CASES[name], [200], 16)
    clean = cached.attend([(0, 0, 200)])[0]
    cached.cache[cached.slots(0)[:100]] = value
    assert torch.equal(cached.attend([(0, 99 + window, 200)])[0], clean[99 + window :])
    assert not torch.isfinite(cached.attend([(0, 98 + window, 200)])[0][0]).any()


def test_a_sink_takes_its_share_and_minus_infinity_takes_none(library):
    cached = sequences(CASES["wide group, sinks"], [70], 16)
    half = cached.attend([(0, 0, 1)])[0]
    cached.sinks[:] = -float("inf")
    whole = cached.attend([(0, 0, 1)])[0]
    assert torch.equal(whole, sequences(CASES["wide group"], [70], 16).attend([(0, 0, 1)])[0])
    assert (half.abs() < whole.abs()).all()
    cached.sinks[:] = 1e4
    assert (cached.attend([(0, 0, 70)])[0].abs() < 1e-30).all()


def test_rows_outside_of_the_block_tables_are_refused():
    shape, tables = SHAPES["gqa"], torch.zeros(1, 2, dtype=torch.int32)

    def rows(positions: list[int], starts: list[int]) -> AttendRows:
        return AttendRows([shape], torch.tensor(positions), torch.tensor(starts, dtype=torch.int32), tables, 16)

    rows([31], [0, 1])
    for positions, starts in [([32], [0, 1]), ([-1], [0, 1]), ([3], [0, 2]), ([3], [0, 0]), ([3, 4], [1, 2])]:
        with pytest.raises(IndexError, match="block tables"):
            rows(positions, starts)


@pytest.mark.parametrize("name", CASES)
def test_avx2_and_avx512_give_the_same_bits(name, library, avx2, use):
    cached = sequences(CASES[name], LENGTHS, 16)
    wide = cached.attend(CHUNKS)
    use(avx2)
    for ours, theirs in zip(wide, cached.attend(CHUNKS), strict=True):
        assert torch.equal(ours, theirs)


def test_scores_that_grow_or_overflow_are_softened_as_torch_does():
    cached = sequences(CASES["one head of odd width"], [130], 16)
    cached.cache[cached.slots(0)] *= torch.linspace(0.1, 60, 130)[:, None, None]  # every tile has a new maximum
    got: Tensor = cached.attend([(0, 0, 130)])[0]
    assert relative_error(got, cached.reference(0, 0, 130)) < 10 * FLOAT32
