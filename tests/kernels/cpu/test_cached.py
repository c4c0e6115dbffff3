"""Keys and values in 8 bits: kernels write what plain torch does, and read what lies there."""

import itertools

import pytest
import torch

from moe_serve.kernels.cpu.operations import recorded_once
from moe_serve.kernels.quantised import CACHED_DTYPES, quantise_cached, widen_cached
from tests.kernels.cpu.paged import CASES, sequences
from tests.kernels.cpu.test_attention import CHUNKS, LENGTHS

DTYPES = pytest.mark.parametrize("dtype", CACHED_DTYPES, ids=str)


def written(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what the kernel caches for rows [n, heads, width], which it neither norms nor rotates."""
    num_rows, heads, width = rows.shape
    cache, scales = torch.zeros(num_rows, heads, width, dtype=dtype), torch.zeros(num_rows, heads, 1)
    turns = torch.zeros(num_rows, 0, dtype=torch.complex64)
    qkv = torch.cat((torch.zeros(num_rows, 1, width), rows), dim=1).flatten(1)
    slots = torch.arange(num_rows)
    recorded_once(
        num_rows,
        lambda do: do.rope_write(qkv, None, 1e-6, turns, slots, cache, 1, heads // 2, False, scales),
    )
    return cache, scales[..., 0]


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 16, 37, 64, 128])
def test_the_kernel_caches_the_bits_that_plain_torch_does(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(40, 2, width, generator=generator) * torch.logspace(-12, 12, 40)[:, None, None]
    rows[3] = 0
    rows[4] = 1e-38  # below the smallest scale
    rows[5] = torch.linspace(-1, 1, width)  # ties, and numbers below the normal ones of e4m3
    rows[6] = 3e38
    codes, scales = written(rows, dtype)
    wanted, wanted_scales = quantise_cached(rows, dtype)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)
    read, most = widen_cached(codes, scales[..., None]), CACHED_DTYPES[dtype]
    step = scales[..., None] / 2 if dtype == torch.int8 else torch.maximum(rows.abs() / 16, scales[..., None] / 1024)
    assert ((read - rows).abs() <= step * 1.0001 + 1e-30 / most).all()


@DTYPES
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_makes_its_head_so_and_no_other(dtype: torch.dtype, value: float) -> None:
    rows = torch.randn(3, 2, 20, generator=torch.Generator().manual_seed(0))
    clean = written(rows, dtype)
    rows[1, 1, 7] = value
    codes, scales = written(rows, dtype)
    assert torch.equal(scales.isnan(), quantise_cached(rows, dtype)[1].isnan())
    assert scales.isnan().nonzero().tolist() == [[1, 1]]
    assert widen_cached(codes, scales[..., None])[1, 1].isnan().all()
    scales[1, 1] = clean[1][1, 1]
    assert torch.equal(scales, clean[1])


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_attention_has_the_bits_of_a_cache_that_holds_what_is_read(name: str, dtype: torch.dtype, library) -> None:
    for block_size, threads in ((7, 2), (16, 1)):
        library.set_threads(threads)
        stored, read = sequences(CASES[name], LENGTHS, block_size).in_8_bits(dtype)
        for got, wanted in zip(stored.attend(CHUNKS), read.attend(CHUNKS), strict=True):
            assert got.isfinite().all()
            assert torch.equal(got, wanted), (block_size, threads)


@DTYPES
def test_chunks_threads_and_neighbours_change_no_bit(dtype: torch.dtype, library) -> None:
    for name in ("gqa, window 5 and sinks", "odd mla", "wide group"):
        stored, _ = sequences(CASES[name], [130, 5], 16).in_8_bits(dtype)
        alone = torch.cat([stored.attend([(0, position, position + 1)])[0] for position in range(130)])
        for cut, threads in itertools.product(([0, 130], [0, 1, 64, 130]), (1, 2)):
            library.set_threads(threads)
            parts = [stored.attend([(1, 4, 5), (0, first, end)])[1] for first, end in itertools.pairwise(cut)]
            assert torch.equal(torch.cat(parts), alone), (name, cut, threads)
