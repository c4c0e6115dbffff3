"""The compiled sampler against its torch twin: the same tokens, whatever the rows."""

import platform

import numpy as np
import pytest
import torch

from moe_serve.c_library import load_c_library
from moe_serve.kernels.cpu import sampling as compiled
from moe_serve.kernels.cpu.library import FLAGS, SOURCE, CpuLibrary
from moe_serve.kernels.cpu.sampling import sample_rows
from moe_serve.kernels.sampling import EDIT, LogitChanges, SamplingRows, sample_rows_reference
from tests.kernels.sampling_rows import banned, rows_of

CHOICES = {
    "temperature": (0, 1, 1, 0.7, 0.01, 5e-324, 1e-300, 1e308, 1e30, 3.0, 1e-5),
    "top_p": (1, 1, 0.95, 0.5, 0.1, 5e-324, 0.9999999, 1 - 2**-53),
    "min_p": (0, 0, 0, 0.05, 0.5, 1, 1e-20, 5e-324),
    "top_k": (-1, -1, 1, 2, 16, 31, 50, 1000),
}
EDITS = {
    "bias": (0, 0, 1.5, -100, 100, 1e-3),
    "repetition": (1, 1, 1.3, 0.7, 100, 0.01),
    "frequency": (0, 0, 0.1, -2, 3000),
    "presence": (0, 0, 1.1, -0.3),
}
VOCABS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 4097)
LOGITS = {
    "of a normal distribution": lambda x, random: x,
    "rounded, so that many are equal": lambda x, random: x.round(),
    "all equal": lambda x, random: x * 0 + 1.5,
    "zeros of both signs": lambda x, random: x.sign() * 0.0,
    "half of them -inf": lambda x, random: x.masked_fill(torch.rand(x.shape, generator=random) < 0.5, -torch.inf),
    "a few NaN": lambda x, random: x.masked_fill(torch.rand(x.shape, generator=random) < 0.01, torch.nan),
    "a few inf": lambda x, random: x.masked_fill(torch.rand(x.shape, generator=random) < 0.01, torch.inf),
    "near the largest float": lambda x, random: x * 5e37,
    "denormal": lambda x, random: x * 1e-42,
    "close to each other": lambda x, random: 100 + x * 1e-5,
    "far from each other": lambda x, random: x * 1e4,
}


def draw_rows(numbers: np.random.Generator, num_rows: int, vocab: int) -> SamplingRows:
    each = [
        {name: numbers.choice(values) for name, values in CHOICES.items()}
        | {"seed": numbers.integers(2**63 - 1), "output_index": numbers.integers(5000)}
        for _ in range(num_rows)
    ]
    return rows_of(each, [draw_changes(numbers, vocab) for _ in range(num_rows)])


def draw_changes(numbers: np.random.Generator, vocab: int) -> LogitChanges | None:
    """Each kind of change or none of it, of few tokens or of many."""
    kinds = numbers.integers(2, size=3)
    if not kinds.any():
        return None
    edits = np.zeros(numbers.integers(vocab + 1) if kinds[0] else 0, EDIT)
    edits["token"] = numbers.permutation(vocab)[: len(edits)]
    for name, values in EDITS.items():
        edits[name] = numbers.choice(values, len(edits))
    banned_ids = numbers.integers(vocab, size=numbers.integers(3) if kinds[1] else 0)
    mask = numbers.choice([0, -1, 0x5A5A00F1], -(-vocab // 32), p=[0.2, 0.6, 0.2]).astype(np.int32)
    return LogitChanges(edits, banned_ids, mask if kinds[2] else None)


def part_of(rows: SamplingRows, chosen: np.ndarray) -> SamplingRows:
    return SamplingRows(rows.rows[chosen], [rows.changes[i] for i in chosen])


@pytest.mark.parametrize("form", LOGITS)
def test_the_tokens_are_those_of_the_twin(form, library):
    numbers, random = np.random.default_rng(len(form)), torch.Generator().manual_seed(len(form))
    for vocab in VOCABS:
        for num_rows in (0, 1, 9):
            logits = LOGITS[form](torch.randn(num_rows, vocab, generator=random), random)
            rows = draw_rows(numbers, num_rows, vocab)
            library.set_threads(1 + num_rows % 2)
            changed, by_twin = logits.clone(), logits.clone()
            assert sample_rows(changed, rows) == sample_rows_reference(by_twin, rows), (vocab, rows.rows)
            np.testing.assert_array_equal(changed.numpy(), by_twin.numpy(), "changed in place, to the last bit")


def test_a_whole_vocabulary_gives_the_tokens_of_the_twin():
    logits = torch.randn(6, 151_936, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.01, 1, 3] * 2]).T
    each = [{}, {"top_p": 0.95}, {"top_p": 0.999}, {"top_k": 20_000}, {"min_p": 0.02}, {"top_k": 50, "top_p": 0.9}]
    rows = rows_of([{**parameters, "seed": 5} for parameters in each])
    assert sample_rows(logits.clone(), rows) == sample_rows_reference(logits.clone(), rows)


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (2 * x).round(), lambda x: x * 0], ids=["", "ties", "equal"])
@pytest.mark.parametrize("top_p", [0.75, 0.95])
def test_a_winner_of_the_whole_row_that_top_p_cuts_is_not_drawn(form, top_p):
    """The kernel draws before it cuts; of rows like these top_p keeps many winners and cuts many."""
    logits = form(torch.randn(300, 333, generator=torch.Generator().manual_seed(4)))
    each = [{"temperature": 0.7, "seed": seed} for seed in range(300)]
    cut = rows_of([{**parameters, "top_p": top_p} for parameters in each])
    wanted = sample_rows_reference(logits.clone(), cut)
    assert sample_rows(logits.clone(), cut) == wanted
    winners = sample_rows(logits.clone(), rows_of(each))
    assert 3 < sum(token != winner for token, winner in zip(wanted, winners, strict=True)) < 150


def test_a_token_depends_on_its_own_row_alone(library):
    numbers = np.random.default_rng(2)
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(2))
    rows = draw_rows(numbers, 64, 3000)
    together = sample_rows(logits.clone(), rows)
    for threads in (1, 2):
        library.set_threads(threads)
        for num_rows in (1, 3, 64):
            chosen = numbers.permutation(64)[:num_rows]
            alone = sample_rows(logits[torch.from_numpy(chosen)], part_of(rows, chosen))
            assert alone == [together[i] for i in chosen]


def test_rows_may_have_a_stride_and_banned_ones_are_masked_in_place():
    wide = torch.randn(3, 50)
    logits, before = wide[:, :33], wide.clone()
    rows = rows_of([{"temperature": 0}] * 3, [None, banned(4, 32), banned(0)])
    wanted = sample_rows_reference(before[:, :33].clone(), rows)
    assert sample_rows(logits, rows) == wanted
    before[1, [4, 32]] = before[2, 0] = -torch.inf
    assert torch.equal(wide, before)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for other x86 processors")
@pytest.mark.parametrize("processor", ["haswell", "x86-64-v2"])
def test_narrower_vectors_give_the_same_tokens(processor, library, monkeypatch):
    if processor == "haswell" and library.vectors not in ("avx512", "avx2"):
        pytest.skip("this machine has no AVX2")
    numbers = np.random.default_rng(3)
    logits = torch.randn(40, 4097, generator=torch.Generator().manual_seed(3))
    rows = draw_rows(numbers, 40, 4097)
    wanted = sample_rows(logits.clone(), rows)
    call, compiler = load_c_library(SOURCE.with_name("sampling.c"), {"sample_rows": 7}, (f"-march={processor}", *FLAGS))
    monkeypatch.setattr(compiled, "cpu_library", lambda: CpuLibrary(call, compiler, "narrow"))
    assert sample_rows(logits.clone(), rows) == wanted
