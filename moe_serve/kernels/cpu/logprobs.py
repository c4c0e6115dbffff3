"""Log probabilities of tokens by the compiled kernel: one pass over a row for the sum, one for its rank, one for the
likeliest tokens, without sorting a vocabulary."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.sampling import RowLogprobs, WantedLogprobs


def row_logprobs(logits: Tensor, wanted: WantedLogprobs) -> RowLogprobs:
    """Returns what row_logprobs_reference of kernels/sampling.py returns, bit for bit.

    logits: [num_rows, vocab] float32 on CPU, of any row stride
    """
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32, f"logits of {logits.dtype}"
    assert logits.stride(1) == 1 or vocab == 1, "a row of logits is contiguous"
    out = RowLogprobs.zeros(wanted)
    arrays: tuple[NDArray[Any], ...] = (wanted.id_starts, wanted.ids, wanted.top_starts, *out)
    addresses = [array.ctypes.data for array in arrays]
    cpu_library().call.row_logprobs(logits.data_ptr(), logits.stride(0), vocab, num_rows, *addresses)
    return out
