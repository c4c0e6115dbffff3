"""Checks of tensors before kernels take their addresses. For assertions: a violation is our own mistake."""

import torch
from torch import Tensor


def dense(tensor: Tensor, dtype: torch.dtype, *shape: int) -> bool:
    """Returns whether the tensor is contiguous, of this dtype, and of this shape if one is given."""
    return tensor.dtype == dtype and tensor.is_contiguous() and (not shape or tensor.shape == shape)


def rows(tensor: Tensor, width: int | None = None) -> bool:
    """Returns whether this is a float32 matrix of `width` columns whose rows have no gaps; between them are gaps."""
    _, columns = tensor.shape
    return (
        tensor.dtype == torch.float32
        and (width is None or columns == width)
        and (columns < 2 or tensor.stride(1) == 1 or not tensor.numel())
    )
