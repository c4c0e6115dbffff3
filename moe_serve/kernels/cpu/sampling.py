"""Draws one token for each row of logits by the compiled kernel, in one call and without sorting a vocabulary."""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.sampling import SAMPLING_ROW, SamplingRows


def sample_rows(logits: Tensor, sampling: SamplingRows) -> list[int]:
    """Returns what sample_rows_reference of kernels/sampling.py returns, token for token.

    logits: [num_rows, vocab] float32 on CPU, of any row stride; banned tokens are masked in place
    """
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32, f"logits of {logits.dtype}"
    assert logits.stride(1) == 1 or vocab == 1, "a row of logits is contiguous"
    assert sampling.rows.dtype == SAMPLING_ROW, "records as in sampling.c"
    tokens = np.empty(num_rows, np.int64)
    facts = (sampling.rows, sampling.banned_starts, sampling.banned_ids, tokens)
    cpu_library().call.sample_rows(logits.data_ptr(), logits.stride(0), vocab, num_rows, *map(_address, facts))
    found: list[int] = tokens.tolist()
    return found


def _address(array: NDArray[Any]) -> int:
    """Returns the address of a writable array's memory, in a third of the time that array.ctypes takes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else 0
