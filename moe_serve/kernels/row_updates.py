"""Rows changed in place: multiplied by a factor or by a sigmoid, brought within limits. Each row by itself."""

from torch import Tensor


def scale_(x: Tensor, factor: float) -> None:
    """Multiplies x [rows, width], which may be a slice of wider rows."""
    x.mul_(factor)


def multiply_rows(x: Tensor, factors: Tensor) -> Tensor:
    """Returns x with row i multiplied by factors[i]. x: [rows, width];  factors: [rows, 1] float32"""
    return x * factors.to(x.dtype)


def multiply_rows_(x: Tensor, factors: Tensor) -> None:
    """The same in place, of float32 products. x may be a slice of wider rows"""
    x.copy_(x * factors)


def clip_(x: Tensor, limit: float) -> None:
    """Brings the elements of x [rows, width] to between -limit and limit; NaN stays."""
    x.clamp_(-limit, limit)


def multiply_by_sigmoid_(x: Tensor, logits: Tensor) -> Tensor:
    """Multiplies row i of x [rows, width] by sigmoid(logits[i]); returns x. logits: [rows, 1], of x's dtype

    The logits are read with a stride: over adjacent ones the CPU loop would take several at once and the last ones one
    by one, with other instructions, so that a row's bits would depend on its place in the batch.
    """
    return x.mul_(logits.expand(-1, 2).contiguous()[:, :1].sigmoid())
