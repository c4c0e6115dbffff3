"""Draws one token for each row of logits. What the compiled kernel (kernels/cpu/sampling.py) computes, in torch.

A token is a pure function of its own row: logits, parameters, seed and output index. Gumbel noise is added to the
logits over the temperature, and the largest sum wins; equal sums go to the lowest id. This twin and the kernel give
the same tokens, since every sum of theirs is exact or rounded alike (kernels/gumbel.py).
"""

import struct
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.kernels.gumbel import gumbel, natural_log, token_weights
from moe_serve.kernels.likeliest import likeliest
from moe_serve.kernels.logit_changes import LogitChanges, change_logits

# How one row's token is chosen; the kernel reads this as a C struct.
# temperature: 0 = the largest logit; top_k: -1 = all; top_p, min_p: 1.0 and 0.0 = all
SAMPLING_ROW = np.dtype(
    [
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("top_k", "i8"),
        ("seed", "i8"),
        ("output_index", "i8"),
    ]
)
pack_sampling_row = struct.Struct("=dddqqq").pack  # the bytes of one, in a tenth of numpy's time
NOT_FINITE = -1  # instead of a token: the largest logit is not a finite number
NONE_LEFT = -2  # instead of a token: the row's changes leave none
# Logits that are worked on at a time: tensors of 32 MiB on GPUs, tensors that fit into a cache on CPUs.
_CUDA_ELEMENTS, _CPU_ELEMENTS = 2**22, 2**18
_CPU_NOISE_ELEMENTS = 2**16
_LOG_ERROR = 1e-9  # far above that of torch.log, far below the usual distance of the two largest sums


@dataclass(frozen=True)
class SamplingRows:
    """How the tokens of a batch are chosen.

    rows:    [num_rows] SAMPLING_ROW
    changes: of each row's logits; may be set anew between two calls; empty: of no row
    """

    rows: NDArray[np.void]
    changes: list[LogitChanges | None] = field(default_factory=list)


@torch.inference_mode()
def sample_rows_reference(logits: Tensor, sampling: SamplingRows) -> list[int]:
    """Returns the token id of each row, or NOT_FINITE or NONE_LEFT.

    logits: [num_rows, vocab] float32; changed in place

    top_k keeps the largest logits, equal ones by id. Of these, top_p keeps the fewest whose probability among them adds
    up to top_p. Of these, min_p keeps those whose probability is at least min_p times the largest one's.
    """
    if logits.shape[0] == 0:
        return []
    sound = some_left = logits.amax(dim=1).isfinite()  # NaN if any is
    if any(sampling.changes):
        of_sound = [each if ok else None for each, ok in zip(sampling.changes, sound.tolist(), strict=True)]
        change_logits(logits, of_sound)
        some_left = logits.amax(dim=1).isfinite()
    if (sampling.rows["temperature"] > 0).all():
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)  # all are drawn below
    else:
        tokens = logits.argmax(dim=1)  # of equal logits the first
    at_once = max(1, (_CUDA_ELEMENTS if logits.is_cuda else _CPU_ELEMENTS) // logits.shape[1])
    for chosen in _groups(sampling.rows, logits.shape[1], at_once):
        at = torch.from_numpy(chosen).to(logits.device)
        masked = logits[at].masked_fill(~some_left[at, None], 0.0)
        tokens[at] = _draw(masked, _Parameters(sampling.rows[chosen], logits))
    tokens = torch.where(some_left, tokens, NONE_LEFT)
    found: list[int] = torch.where(sound, tokens, NOT_FINITE).tolist()
    return found


def _groups(rows: NDArray[np.void], vocab: int, at_once: int) -> list[NDArray[np.int64]]:
    """Returns the indices of the rows that draw, those together that filter alike, `at_once` at most."""
    limited = (rows["top_k"] > 0) & (rows["top_k"] < vocab)
    kinds = np.where(limited, 2, rows["top_p"] < 1.0)
    draws = rows["temperature"] > 0
    members = [np.flatnonzero(draws & (kinds == kind)) for kind in range(3)]
    return [group[i : i + at_once] for group in members for i in range(0, len(group), at_once)]


class _Parameters:
    """The parameters of some rows as columns [num_rows, 1] on the device of the logits."""

    def __init__(self, rows: NDArray[np.void], logits: Tensor):
        with np.errstate(over="ignore", divide="ignore"):
            inverse = np.minimum(1.0 / rows["temperature"], np.finfo(np.float64).max)
        numbers = torch.from_numpy(np.stack([inverse, rows["top_p"], rows["min_p"]]))
        integers = torch.from_numpy(np.stack([rows["top_k"], rows["seed"], rows["output_index"]]))
        self.inverse_temperature, self.top_p, self.min_p = numbers.to(logits.device)[:, :, None]
        self.top_k, self.seed, self.output_index = integers.to(logits.device)[:, :, None]
        vocab = logits.shape[1]
        self.top_k = torch.where(self.top_k < 0, vocab, self.top_k)
        self.max_top_k = vocab if (rows["top_k"] < 0).any() else min(vocab, int(rows["top_k"].max()))
        self.has_min_p = bool((rows["min_p"] > 0).any())
        self.filters = self.max_top_k < vocab or bool((rows["top_p"] < 1.0).any())


def _draw(logits: Tensor, parameters: _Parameters) -> Tensor:
    """Returns the token ids, [num_rows] int64, of rows with finite maxima and temperatures above 0."""
    top = logits.amax(dim=1, keepdim=True).to(torch.float64)
    if parameters.filters:
        values, ids = likeliest(logits, parameters.max_top_k)
    else:
        values, ids = logits, torch.arange(logits.shape[1], device=logits.device)[None]
    scaled = (values.to(torch.float64) - top) * parameters.inverse_temperature
    if parameters.filters:
        remains = _in_top_k_and_top_p(scaled, parameters)
        count = int(remains.sum(dim=1).max())  # the likeliest ones stand first
        scaled, ids = scaled.masked_fill(~remains, -torch.inf)[:, :count], ids[:, :count]
    if parameters.has_min_p:
        log_min_p = torch.where(parameters.min_p > 0, natural_log(parameters.min_p), -torch.inf)
        scaled = scaled.masked_fill(scaled < log_min_p, -torch.inf)
    return _largest_sum(scaled, ids, parameters)


def _largest_sum(scaled: Tensor, ids: Tensor, parameters: _Parameters) -> Tensor:
    """Returns the id of the largest sum of scaled logit and noise, of equal sums the lowest id.

    scaled: [num_rows, num_ids];  ids: the same, or [1, num_ids] of all rows
    """
    seed, index = parameters.seed, parameters.output_index
    width = ids.shape[1] if ids.is_cuda else max(1, _CPU_NOISE_ELEMENTS // scaled.shape[0])
    starts = range(0, ids.shape[1], width)
    noise = [gumbel(seed, index, ids[:, start : start + width], torch.log) for start in starts]
    ids, near = ids.expand_as(scaled), scaled + torch.cat(noise, dim=1)
    count = int((near >= near.amax(dim=1, keepdim=True) - _LOG_ERROR).count_nonzero(dim=1).max())
    if count == 1:  # as a rule
        return ids.gather(1, near.argmax(dim=1, keepdim=True))[:, 0]
    at = near.topk(count, dim=1).indices
    sums = scaled.gather(1, at) + gumbel(seed, index, ids.gather(1, at))
    lost = sums < sums.amax(dim=1, keepdim=True)
    return ids.gather(1, at).masked_fill(lost, torch.iinfo(torch.int64).max).amin(dim=1)


def _in_top_k_and_top_p(scaled: Tensor, parameters: _Parameters) -> Tensor:
    """Returns which tokens top_k and then top_p keep, of tokens in the order of `likeliest`."""
    in_top_k = torch.arange(scaled.shape[1], device=scaled.device)[None] < parameters.top_k
    weights = token_weights(scaled).masked_fill(~in_top_k, 0)
    upto = weights.cumsum(dim=1)
    total = upto[:, -1:]
    limit = (total.to(torch.float64) * parameters.top_p).ceil().to(torch.int64).minimum(total)
    in_top_p = (upto - weights < limit) | (parameters.top_p >= 1.0)
    return torch.logical_and(in_top_k, in_top_p)
