"""Draws one token for each row of logits by the compiled kernel, in one call and without sorting a vocabulary."""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.sampling import SAMPLING_ROW, SamplingRows


class RowSampler:
    """sample_rows of the same rows, step after step: the memory that a call needs and its addresses stay."""

    def __init__(self, sampling: SamplingRows):
        """sampling: kept; what is written to its arrays counts from the next call on"""
        assert sampling.rows.dtype == SAMPLING_ROW, "records as in sampling.c"
        self._sampling = sampling
        self._tokens = np.empty(len(sampling.rows), np.int64)
        arrays = (sampling.rows, sampling.banned_starts, sampling.banned_ids, self._tokens)
        self._addresses = tuple(map(_address, arrays))
        self._logits: Tensor | None = None
        self._logit_facts = (0, 0, 0, 0)

    def __call__(self, logits: Tensor) -> list[int]:
        """Returns the token id of each row, as sample_rows does."""
        if logits is not self._logits:
            self._logits, self._logit_facts = logits, self._facts_of(logits)
        cpu_library().call.sample_rows(*self._logit_facts, *self._addresses)
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def _facts_of(self, logits: Tensor) -> tuple[int, int, int, int]:
        num_rows, vocab = logits.shape
        assert num_rows == len(self._tokens), f"{num_rows} rows of logits for {len(self._tokens)} tokens"
        assert logits.dtype == torch.float32, f"logits of {logits.dtype}"
        assert logits.stride(1) == 1 or vocab == 1, "a row of logits is contiguous"
        return logits.data_ptr(), logits.stride(0), vocab, num_rows


def sample_rows(logits: Tensor, sampling: SamplingRows) -> list[int]:
    """Returns what sample_rows_reference of kernels/sampling.py returns, token for token.

    logits: [num_rows, vocab] float32 on CPU, of any row stride; banned tokens are masked in place
    """
    return RowSampler(sampling)(logits)


def _address(array: NDArray[Any]) -> int:
    """Returns the address of a writable array's memory, in a third of the time that array.ctypes takes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else 0
