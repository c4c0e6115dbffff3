"""Log probabilities of tokens, by row of logits. What the compiled kernel (kernels/cpu/logprobs.py) computes, in torch.

A token's log probability is its logit minus the largest one, minus ln of the sum of exp over the vocabulary, in
float64 and rounded to float32. The sum is one of integers (`sampling.token_weights`), so it is exact in any order: a
row's numbers depend on that row only, and this twin and the kernel give the same bits. They are within 1e-6 of those
of a softmax in float64.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.kernels.sampling import likeliest, natural_log, token_weights

_CUDA_ELEMENTS, _CPU_ELEMENTS = 2**22, 2**18  # logits that are worked on at a time


@dataclass(frozen=True)
class WantedLogprobs:
    """Which log probabilities of each row are wanted.

    id_starts: [num_rows + 1] int64, row i wants those of ids[id_starts[i] : id_starts[i + 1]], one at least
    ids:       int64, each below the size of the vocabulary; the first of each row is the token whose rank is wanted
    num_top:   [num_rows] int64, and those of so many likeliest tokens, at most the vocabulary
    """

    id_starts: NDArray[np.int64]
    ids: NDArray[np.int64]
    num_top: NDArray[np.int64]

    @property
    def top_starts(self) -> NDArray[np.int64]:
        """[num_rows + 1] int64, where the likeliest tokens of each row begin in the answer."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.num_top, dtype=np.int64)])


class RowLogprobs(NamedTuple):
    """The log probabilities of some rows.

    ranks:        [num_rows] int64, 1 for the likeliest token; of equal ones the lowest id comes first; 0 where the
                  row's largest logit is not finite: its other numbers mean nothing
    logprobs:     [len(ids)] float32
    top_ids:      [sum of num_top] int64, likeliest first, equal ones by id
    top_logprobs: the same shape, float32
    """

    ranks: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]


@torch.inference_mode()
def row_logprobs_reference(logits: Tensor, wanted: WantedLogprobs) -> RowLogprobs:
    """Returns the log probabilities that are wanted of each row. logits: [num_rows, vocab] float32, kept as they are"""
    num_rows, vocab = logits.shape
    top_starts = wanted.top_starts
    out = RowLogprobs(
        np.zeros(num_rows, np.int64),
        np.zeros(len(wanted.ids), np.float32),
        np.zeros(top_starts[-1], np.int64),
        np.zeros(top_starts[-1], np.float32),
    )
    at_once = max(1, (_CUDA_ELEMENTS if logits.is_cuda else _CPU_ELEMENTS) // vocab)
    for first in range(0, num_rows, at_once):
        _score(logits, slice(first, min(first + at_once, num_rows)), wanted, top_starts, out)
    return out


def _score(
    logits: Tensor, part: slice, wanted: WantedLogprobs, top_starts: NDArray[np.int64], out: RowLogprobs
) -> None:
    """Writes the numbers of some of the rows."""
    rows = logits[part]
    starts = wanted.id_starts[part.start : part.stop + 1]
    ids = torch.from_numpy(wanted.ids[starts[0] : starts[-1]]).to(rows.device)
    row_of_id = torch.from_numpy(np.repeat(np.arange(len(rows)), np.diff(starts))).to(rows.device)
    top = rows.amax(dim=1)
    sound = top.isfinite()
    rows, top = rows.masked_fill(~sound[:, None], 0.0), top.masked_fill(~sound, 0.0).to(torch.float64)
    total = token_weights(rows.to(torch.float64) - top[:, None]).sum(dim=1)
    log_total = natural_log(total.to(torch.float64) * 2.0**-40)

    def logprobs(values: Tensor, of_row: Tensor) -> NDArray[np.float32]:
        found = ((values.to(torch.float64) - top[of_row]) - log_total[of_row]).float().cpu()
        return found.numpy().astype(np.float32)

    out.logprobs[starts[0] : starts[-1]] = logprobs(rows[row_of_id, ids], row_of_id)
    firsts = ids[torch.from_numpy(starts[:-1] - starts[0]).to(rows.device)][:, None]
    own = rows.gather(1, firsts)
    ids_before = torch.arange(rows.shape[1], device=rows.device)[None] < firsts
    ranks = 1 + (rows > own).sum(dim=1) + ((rows == own) & ids_before).sum(dim=1)
    out.ranks[part] = ranks.masked_fill(~sound, 0).cpu().numpy()
    counts = wanted.num_top[part]
    if not counts.any():
        return
    values, order = likeliest(rows, int(counts.max()))
    row_of_top = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(rows.device)
    places = torch.from_numpy(np.concatenate([np.arange(count) for count in counts])).to(rows.device)
    at = slice(top_starts[part.start], top_starts[part.stop])
    out.top_ids[at] = order[row_of_top, places].cpu().numpy()
    out.top_logprobs[at] = logprobs(values[row_of_top, places], row_of_top)
