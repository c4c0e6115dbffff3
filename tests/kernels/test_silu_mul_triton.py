"""SwiGLU in Triton, of rows that are in memory."""

import pytest
import torch

from moe_serve.kernels.activation import clamped_swiglu_reference, silu_mul_reference
from moe_serve.kernels.forms import Activation
from tests.kernels.conftest import RunCheck
from tests.kernels.data import randn, relative_error


def check_silu_mul(device: str, rows: int, width: int) -> None:
    from moe_serve.kernels.triton.silu_mul import silu_mul_triton

    gate_up = randn(device, rows, 2 * width) * 3
    expected = silu_mul_reference(gate_up.cpu())
    assert relative_error(silu_mul_triton(gate_up), expected) < 4e-3

    logits = randn(device, rows, 1, seed=5)
    expected = silu_mul_reference(gate_up.float().cpu()) * logits.float().cpu().sigmoid()
    assert relative_error(silu_mul_triton(gate_up, logits=logits), expected) < 4e-3
    clamped = Activation("clamped_swiglu", 1.702, 0.7)
    expected = clamped_swiglu_reference(gate_up.cpu(), clamped)
    assert relative_error(silu_mul_triton(gate_up, activation=clamped), expected) < 4e-3
    gate_up[:, ::7] = torch.nan
    assert torch.equal(
        silu_mul_triton(gate_up, activation=clamped).isnan().cpu(),
        clamped_swiglu_reference(gate_up.cpu(), clamped).isnan(),
    )


@pytest.mark.parametrize("rows, width", [(0, 64), (1, 128), (5, 200)])
def test_silu_mul_matches_the_reference(on_device: RunCheck, rows: int, width: int) -> None:
    on_device(check_silu_mul, rows, width)
