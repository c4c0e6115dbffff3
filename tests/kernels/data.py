"""Inputs and comparisons that kernel checks share."""

import torch
from torch import Tensor


def randn(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Returns random numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Returns ||got - expected|| / ||expected|| in float64. NaN gives NaN, which no limit passes; empty ones give 0."""
    if got.numel() == 0:
        assert got.shape == expected.shape
        return 0.0
    expected = expected.double().to(got.device)
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_equal_bits(got: Tensor, expected: Tensor) -> None:
    """Asserts equal shape, dtype and bits, so that NaN equals NaN and float8 can be compared."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if got.numel():
        assert torch.equal(got.contiguous().view(torch.uint8).cpu(), expected.contiguous().view(torch.uint8).cpu())


def dequantize_int8(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """q: [.., k] int8, scale: [..] float32 -> [.., k] float32"""
    return q.float() * scale[..., None]
