"""Log probabilities: the torch twin against a softmax in float64, the compiled kernel against the twin, bit for bit."""

import platform

import numpy as np
import pytest
import torch

from moe_serve.c_library import load_c_library
from moe_serve.kernels.cpu import logprobs as compiled
from moe_serve.kernels.cpu.library import FLAGS, SOURCE, CpuLibrary
from moe_serve.kernels.cpu.logprobs import row_logprobs
from moe_serve.kernels.sampling import RowLogprobs, WantedLogprobs, row_logprobs_reference
from tests.kernels.cpu.test_sampling import LOGITS, VOCABS
from tests.tolerance import LOGPROB


def wanted_of(ids: list[list[int]], num_top: list[int]) -> WantedLogprobs:
    starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    flat = np.array([token for row in ids for token in row], np.int64)
    return WantedLogprobs(starts, flat, np.array(num_top, np.int64))


def drawn(numbers: np.random.Generator, num_rows: int, vocab: int) -> WantedLogprobs:
    ids = [numbers.integers(vocab, size=1 + numbers.integers(3)).tolist() for _ in range(num_rows)]
    return wanted_of(ids, [min(vocab, int(numbers.choice([0, 1, 5, 20]))) for _ in range(num_rows)])


def same(a: RowLogprobs, b: RowLogprobs, wanted: WantedLogprobs) -> bool:
    """Whether the numbers that mean something have the same bits."""
    sound = a.ranks > 0
    parts = [np.repeat(sound, np.diff(wanted.id_starts)), np.repeat(sound, wanted.num_top)]
    pairs = [(a.logprobs, b.logprobs, 0), (a.top_ids, b.top_ids, 1), (a.top_logprobs, b.top_logprobs, 1)]
    return np.array_equal(a.ranks, b.ranks) and all(x[parts[i]].tobytes() == y[parts[i]].tobytes() for x, y, i in pairs)


@pytest.mark.parametrize("form", LOGITS)
def test_the_kernel_gives_the_bits_of_the_twin(form, library):
    numbers, random = np.random.default_rng(len(form)), torch.Generator().manual_seed(len(form))
    for vocab in VOCABS:
        for num_rows in (0, 1, 9):
            logits = LOGITS[form](torch.randn(num_rows, vocab, generator=random), random)
            wanted, before = drawn(numbers, num_rows, vocab), logits.clone()
            library.set_threads(1 + num_rows % 2)
            twin = row_logprobs_reference(logits, wanted)
            assert same(row_logprobs(logits, wanted), twin, wanted), vocab
            assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7)), "nothing given is changed"


def test_they_are_those_of_a_softmax_in_float64_and_top_ones_are_in_order():
    logits = (
        torch.randn(7, 3001, generator=torch.Generator().manual_seed(0))
        * torch.tensor([0.01, 1, 3, 9, 1, 1, 40])[:, None]
    )
    logits[4] = (2 * logits[4]).round()
    logits[5] = 0.25
    ids = [[row * 400, row, 3000] for row in range(7)]
    found = row_logprobs_reference(logits, wanted_of(ids, [20] * 7))
    truth = logits.double().log_softmax(dim=1)
    np.testing.assert_allclose(found.logprobs, truth.gather(1, torch.tensor(ids)).flatten(), rtol=LOGPROB, atol=LOGPROB)
    for row in range(7):
        order = sorted(range(3001), key=lambda token: (-logits[row, token].item(), token))
        assert found.top_ids[row * 20 : row * 20 + 20].tolist() == order[:20]
        assert found.ranks[row] == order.index(ids[row][0]) + 1
        np.testing.assert_allclose(
            found.top_logprobs[row * 20 : row * 20 + 20], truth[row, order[:20]], rtol=LOGPROB, atol=LOGPROB
        )


def test_a_row_depends_on_itself_alone(library):
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(1))
    wanted = wanted_of([[7, 4999]] * 40, [5] * 40)
    together = row_logprobs(logits, wanted)
    library.set_threads(2)
    for row in (0, 3, 39):
        one = wanted_of([[7, 4999]], [5])
        alone = row_logprobs(logits[row : row + 1], one)
        assert alone.logprobs.tobytes() == together.logprobs[2 * row : 2 * row + 2].tobytes()
        assert alone.top_logprobs.tobytes() == together.top_logprobs[5 * row : 5 * row + 5].tobytes()
        assert row_logprobs_reference(logits[row : row + 1], one).logprobs.tobytes() == alone.logprobs.tobytes()


def test_rows_that_are_not_finite_have_rank_0_and_others_go_on():
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    logits[0, 5], logits[2] = torch.nan, -torch.inf
    wanted = wanted_of([[1], [2], [3]], [2, 2, 2])
    for found in (row_logprobs(logits, wanted), row_logprobs_reference(logits, wanted)):
        assert (found.ranks > 0).tolist() == [False, True, False]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for other x86 processors")
@pytest.mark.parametrize("processor", ["haswell", "x86-64-v2"])
def test_narrower_vectors_give_the_same_bits(processor, library, monkeypatch):
    if processor == "haswell" and library.vectors not in ("avx512", "avx2"):
        pytest.skip("this machine has no AVX2")
    numbers = np.random.default_rng(3)
    logits = 3 * torch.randn(20, 4097, generator=torch.Generator().manual_seed(3))
    wanted = drawn(numbers, 20, 4097)
    wide = row_logprobs(logits, wanted)
    call, compiler = load_c_library(
        SOURCE.with_name("logprobs.c"), {"row_logprobs": 11}, (f"-march={processor}", *FLAGS)
    )
    monkeypatch.setattr(compiled, "cpu_library", lambda: CpuLibrary(call, compiler, "narrow"))
    assert same(row_logprobs(logits, wanted), wide, wanted)
