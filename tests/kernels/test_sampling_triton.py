"""Sampling as one launch: the tokens of the plain form, whatever a row asks for."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from moe_serve.engine.output.sampler import sample_rows
from moe_serve.kernels.sampling import EDIT, LogitChanges, SamplingRows, sample_rows_reference
from tests.kernels.conftest import RunCheck
from tests.kernels.sampling_rows import banned, rows_of

KINDS: list[dict[str, float]] = [
    {}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 1}, {"top_p": 5e-324},
    {"temperature": 0.3, "top_k": 9, "top_p": 0.9}, {"temperature": 1.7, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 5e-324}, {"temperature": 1e-300, "top_p": 0.5},
    {"temperature": 1e308, "top_k": 30, "min_p": 1e-300},
]  # fmt: skip


def change_of(number: int, vocab: int) -> LogitChanges | None:
    """Returns changes of every kind, by turns."""
    rng = np.random.default_rng(number)
    edits = np.zeros(min(vocab, 5), EDIT)
    edits["token"] = rng.permutation(vocab)[: len(edits)]
    edits["bias"], edits["repetition"] = rng.normal(size=len(edits)), 1.3
    edits["frequency"], edits["presence"] = 0.1 * rng.integers(0, 3, len(edits)), 0.25
    mask = rng.integers(-(2**31), 2**31, -(-vocab // 32)).astype(np.int32)
    match number % 6:
        case 0:
            return LogitChanges(edits)
        case 1:
            return banned(*rng.integers(0, vocab, 3).tolist())
        case 2:
            return LogitChanges(edits, np.arange(vocab // 2), mask)
        case 3:
            return LogitChanges(mask=np.zeros_like(mask) if number % 4 == 3 else mask)
    return None


def rows_of_every_kind(vocab: int, num_rows: int) -> tuple[Tensor, SamplingRows]:
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)).mul(3)
    logits[::2] = logits[::2].round(decimals=1)  # some are equal
    logits[5 % num_rows, ::3] = -torch.inf
    if num_rows >= 24:
        logits[13], logits[14, vocab // 2], logits[15], logits[16, 0] = torch.nan, torch.inf, -torch.inf, torch.nan
        logits[17] = 0.0
        logits[17, ::2] *= -1
    each = [
        {**KINDS[i % len(KINDS)], "seed": (i * 2654435761 << 29) % 2**63, "output_index": i % 5 * 700_000_001}
        for i in range(num_rows)
    ]
    changes = [change_of(i // len(KINDS) + i, vocab) if i % 3 else None for i in range(num_rows)]
    return logits, rows_of(each, changes)


def check_tokens(device: str, vocab: int, num_rows: int) -> None:
    from moe_serve.kernels.triton.sampling import sample_rows_triton

    logits, rows = rows_of_every_kind(vocab, num_rows)
    by_kernel = logits.clone().to(device)
    assert sample_rows_triton(by_kernel, rows).tolist() == sample_rows_reference(logits.clone(), rows)
    unchanged = SamplingRows(rows.rows)  # no row has changes
    strided = torch.cat([logits, logits], dim=1).to(device)[:, :vocab]
    assert sample_rows_triton(strided, unchanged).tolist() == sample_rows_reference(logits.clone(), unchanged)


SLOW = [(7, 36), (40, 72), (2049, 24), (5000, 12)]


@pytest.mark.parametrize(
    "vocab, num_rows", [(1, 2), (40, 24), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_the_kernel_draws_the_tokens_of_the_plain_form(on_device: RunCheck, vocab: int, num_rows: int) -> None:
    on_device(check_tokens, vocab, num_rows)


def check_changes(device: str) -> None:
    """What the kernel leaves in memory are the logits that the plain form makes."""
    from moe_serve.kernels.sampling import change_logits
    from moe_serve.kernels.triton.sampling import sample_rows_triton

    logits = torch.randn(12, 700, generator=torch.Generator().manual_seed(3)).mul(3)
    changes = [change_of(i, 700) for i in range(12)]
    changed, wanted = logits.clone().to(device), logits.clone()
    sample_rows_triton(changed, rows_of([{"temperature": 0.0}] * 12, changes))
    change_logits(wanted, changes)
    assert torch.equal(changed.cpu(), wanted)


def test_the_kernel_changes_logits_as_the_plain_form_does(on_device: RunCheck) -> None:
    on_device(check_changes)


def check_no_rows(device: str) -> None:
    from moe_serve.kernels.triton.sampling import sample_rows_triton

    assert sample_rows_triton(torch.empty(0, 9, device=device), rows_of([])).tolist() == []


def test_no_rows_have_no_tokens(on_device: RunCheck) -> None:
    on_device(check_no_rows)


def check_rough_noise(device: str) -> None:
    from tests.kernels.noise_kernel import noise_kernel

    ends = [0, 1, 2, 2**20, 2**52, 2**53 - 2**47, 2**53 - 2**46, 2**53 - 2**20, 2**53 - 3, 2**53 - 2, 2**53 - 1]
    drawn = np.random.default_rng(0).integers(0, 2**53, 2038)
    bits = torch.from_numpy(np.concatenate([np.array(ends), drawn, 2**53 - 2 - (drawn >> 30)])[:4096]).to(device)
    bits = torch.cat([bits, bits[: 4096 - len(bits)]])
    rough, exact = torch.empty(4096, device=device), torch.empty(4096, dtype=torch.float64, device=device)
    noise_kernel[(1,)](bits, rough, exact, SIZE=4096, enable_fp_fusion=False)
    uniform = np.minimum((bits.cpu().numpy() + 0.5) / 2**53, 1 - 2**-53)
    assert (rough.double() - exact).abs().max() < 1e-4
    wanted = torch.tensor([-math.log(-math.log(each)) for each in uniform.tolist()], dtype=torch.float64)
    assert (exact.cpu() - wanted).abs().max() < 1e-9


def test_rough_noise_is_near_the_exact_one_up_to_both_ends(interpreter: RunCheck) -> None:
    interpreter(check_rough_noise)


def test_a_step_on_a_gpu_copies_once_launches_once_and_reads_nothing_but_tokens() -> None:
    pytest.importorskip("triton")
    from moe_serve.kernels.triton.sampling import sample_rows_triton
    from moe_serve.roofline.launches import fake_gpu, recorded

    _, rows = rows_of_every_kind(40, 72)
    with fake_gpu(), recorded(takes_copies=True) as recording:  # a read would raise
        logits = torch.empty(72, 40, device=torch.device("cuda", 0))
        tokens = sample_rows_triton(logits, rows)
        assert (tokens.is_cuda, tokens.shape) == (True, (72,))
        assert [launch.name for launch in recording.launches] == ["_to_copy", "sample_kernel"]
        with pytest.raises(DataDependentOutputException):
            sample_rows(logits, rows)  # which returns them
