"""Sparse attention in the compiled kernels: the keys, and what becomes of them, of the plain form."""

import itertools

import pytest
import torch
from torch import Tensor

from moe_serve.kernels import indexed_attention as plain
from moe_serve.kernels.cpu.attention import AttendRows
from moe_serve.kernels.cpu.operations import recorded_once
from moe_serve.kernels.forms import AttendShape
from moe_serve.kernels.indexed_attention import IndexerShape
from tests.tolerance import FLOAT32, relative_error

# attention, indexer
SHAPES = {
    "tiny": (AttendShape(1, 4, 24, 0.2, latent=16), IndexerShape(16, 24, 17)),
    "one": (AttendShape(1, 1, 3, 0.5, latent=2), IndexerShape(1, 1, 1)),
    "odd": (AttendShape(1, 3, 85, 0.1, latent=70), IndexerShape(5, 37, 64)),
    "deepseek": (AttendShape(1, 16, 576, 0.05, latent=512), IndexerShape(8, 128, 100)),
}
BLOCK = 8
CHUNKS = [(0, 150), (40, 41), (0, 1), (15, 20), (199, 200)]  # (first position, end) of each sequence


def random_step(name: str, chunks: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Returns queries of the chunks, and caches that hold keys of five sequences of 200 tokens."""
    attention, indexer = SHAPES[name]
    draw = torch.Generator().manual_seed(3)
    num_blocks = len(CHUNKS) * 25
    caches = {"cache": (num_blocks * BLOCK, 1, attention.width), "index_cache": (num_blocks * BLOCK, 1, indexer.width)}
    queries = {
        "q": (len(CHUNKS), 200, 1, attention.group, attention.width),
        "index_q": (len(CHUNKS), 200, indexer.heads, indexer.width),
        "weights": (len(CHUNKS), 200, indexer.heads),
    }
    made = {key: torch.randn(shape, generator=draw) for key, shape in (caches | queries).items()}
    made["tables"] = torch.randperm(num_blocks, generator=draw).view(len(CHUNKS), 25).int()
    for key in queries:
        made[key] = torch.cat([made[key][0, :0], *(made[key][seq, a:b] for seq, (a, b) in enumerate(chunks))])
    made["positions"] = torch.cat([torch.arange(0), *(torch.arange(first, end) for first, end in chunks)])
    lengths = torch.tensor([0, *(end - first for first, end in chunks)])
    made["starts"] = lengths.cumsum(0).int()
    return made


def run(name: str, made: dict[str, Tensor]) -> Tensor:
    attention, indexer = SHAPES[name]
    rows = AttendRows([attention], made["positions"], made["starts"], made["tables"], BLOCK)
    index = made["index_q"], made["weights"], made["index_cache"]
    return recorded_once(
        len(made["q"]), lambda do: do.attend_chosen(made["q"], made["cache"], attention, index, indexer), rows.address
    )


def expected(name: str, made: dict[str, Tensor]) -> Tensor:
    attention, indexer = SHAPES[name]
    out = []
    for seq, (start, end) in enumerate(itertools.pairwise(made["starts"].tolist())):
        slots = (made["tables"][seq, :, None] * BLOCK + torch.arange(BLOCK)).flatten()
        for row in range(start, end):
            seen = slots[: made["positions"][row] + 1]
            index = made["index_q"][row], made["weights"][row], made["index_cache"][seen, 0]
            chosen = plain.chosen_keys(*index, indexer.topk)
            rows = made["cache"][seen[chosen], 0]
            out.append(plain.attend_row(made["q"][row, 0], rows, attention.scale)[:, : attention.value_width])
    return torch.stack(out)[:, None]


@pytest.mark.parametrize("name", SHAPES)
def test_attends_the_keys_of_the_plain_form(name, library):
    made = random_step(name, CHUNKS)
    for threads in (1, 2):
        library.set_threads(threads)
        assert relative_error(run(name, made), expected(name, made)) < FLOAT32


def test_of_equal_scores_the_earlier_keys_are_chosen_and_of_nan_the_last(library):
    made = random_step("tiny", CHUNKS)
    made["index_cache"] = made["index_cache"].round().clamp(-1, 1)
    made["index_q"], made["weights"] = made["index_q"].round().clamp(-1, 1), made["weights"].sign()
    assert relative_error(run("tiny", made), expected("tiny", made)) < FLOAT32
    made["weights"][:] = 0
    assert relative_error(run("tiny", made), expected("tiny", made)) < FLOAT32
    made = random_step("tiny", CHUNKS)
    made["index_cache"][::3] = float("nan")
    assert relative_error(run("tiny", made), expected("tiny", made)) < FLOAT32


def test_a_rows_bits_do_not_depend_on_the_batch_chunks_threads_or_register_width(library, avx2, use):
    for name in SHAPES:
        whole = run(name, random_step(name, CHUNKS))
        last = run(name, random_step(name, [(first if seq else 149, end) for seq, (first, end) in enumerate(CHUNKS)]))
        library.set_threads(2)
        threaded = run(name, random_step(name, CHUNKS))
        library.set_threads(1)
        use(avx2)
        narrow = run(name, random_step(name, CHUNKS))
        use(library)
        assert torch.equal(last, whole[149:])
        assert torch.equal(threaded, whole)
        assert torch.equal(narrow, whole)


def test_rows_that_are_none_have_no_result(library):
    made = random_step("tiny", [])
    assert run("tiny", made | {"tables": made["tables"][:0]}).shape == (0, 1, 4, 16)


@pytest.mark.parametrize("heads, width, rotated", [(3, 24, 8), (1, 6, 6), (64, 128, 64)])
def test_index_keys_are_rotated_and_cached_as_by_torch(heads, width, rotated, library):
    for num_rows, threads in itertools.product((0, 1, 200), (1, 2)):
        library.set_threads(threads)
        q, k = torch.randn(num_rows, heads, width), torch.randn(num_rows, width)
        angles = torch.randn(num_rows, rotated // 2)
        turns = torch.complex(angles.cos(), angles.sin())
        slots = torch.randperm(num_rows + 4)[:num_rows]
        slots[1::3] = -1
        cache = torch.zeros(num_rows + 5, 1, width)
        wanted, wanted_cache = q.clone(), cache.clone()
        plain.index_write(wanted, k.clone(), turns, slots, wanted_cache)
        inputs = q, k, turns, slots, cache
        recorded_once(num_rows, lambda do, inputs=inputs: do.index_write(*inputs))
        wanted_cache[-1] = 0  # torch writes padding there
        assert relative_error(q, wanted) < FLOAT32
        assert relative_error(cache, wanted_cache) < FLOAT32
