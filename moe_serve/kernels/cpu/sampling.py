"""Draws one token for each row of logits by the compiled kernel, in one call and without sorting a vocabulary."""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.sampling import EDIT, SAMPLING_ROW, LogitChanges, SamplingRows

_CHANGE_FACTS = 5  # numbers and addresses of one row's LogitChanges, in C
_NO_CHANGES = (0,) * _CHANGE_FACTS


class RowSampler:
    """sample_rows of the same rows, step after step: the memory that a call needs and its addresses stay."""

    def __init__(self, sampling: SamplingRows):
        """sampling: kept; what is written to its arrays, and its changes, count from the next call on"""
        assert sampling.rows.dtype == SAMPLING_ROW, "records as in sampling.c"
        self._sampling = sampling
        self._tokens = np.empty(len(sampling.rows), np.int64)
        self._changes = np.zeros((len(sampling.rows) if sampling.changes else 0, _CHANGE_FACTS), np.int64)
        self._addresses = tuple(map(_address, (sampling.rows, self._changes, self._tokens)))
        self._logits: Tensor | None = None
        self._logit_facts = (0, 0, 0, 0)

    def __call__(self, logits: Tensor) -> list[int]:
        """Returns the token id of each row, as sample_rows does."""
        if logits is not self._logits:
            self._logits, self._logit_facts = logits, self._facts_of(logits)
        if self._sampling.changes:
            self._changes[:] = [_facts_of_changes(changes, logits.shape[1]) for changes in self._sampling.changes]
        cpu_library().call.sample_rows(*self._logit_facts, *self._addresses)
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def _facts_of(self, logits: Tensor) -> tuple[int, int, int, int]:
        num_rows, vocab = logits.shape
        assert num_rows == len(self._tokens), f"{num_rows} rows of logits for {len(self._tokens)} tokens"
        assert logits.dtype == torch.float32, f"logits of {logits.dtype}"
        assert logits.stride(1) == 1 or vocab == 1, "a row of logits is contiguous"
        return logits.data_ptr(), logits.stride(0), vocab, num_rows


def _facts_of_changes(changes: LogitChanges | None, vocab: int) -> tuple[int, ...]:
    """Returns LogitChanges of logit_changes.h, for arrays that `changes` keeps."""
    if changes is None:
        return _NO_CHANGES
    edits, banned, mask = changes.edits, changes.banned, changes.mask
    assert edits.dtype == EDIT, "records as in logit_changes.h"
    assert mask is None or (mask.dtype == np.int32 and len(mask) * 32 >= vocab), "a bit for each token"
    return _address(edits), len(edits), _address(banned), len(banned), 0 if mask is None else _address(mask)


def sample_rows(logits: Tensor, sampling: SamplingRows) -> list[int]:
    """Returns what sample_rows_reference of kernels/sampling.py returns, token for token.

    logits: [num_rows, vocab] float32 on CPU, of any row stride; changed in place
    """
    return RowSampler(sampling)(logits)


def _address(array: NDArray[Any]) -> int:
    """Returns the address of a writable array's memory, in a third of the time that array.ctypes takes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else 0
