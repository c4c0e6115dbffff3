"""Chooses the next token of each sequence from its logits: one call for all rows of a step.

No generator keeps a state, so a token does not depend on the batch, the rank, a preemption or a restart
(kernels/sampling.py says how it is drawn).
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from moe_serve.attention_dp.request import Request
from moe_serve.kernels.cpu.sampling import sample_rows
from moe_serve.kernels.sampling import SAMPLING_ROW, SamplingRows, pack_sampling_row, sample_rows_reference

_NO_IDS = np.zeros(0, np.int64)


def sample(
    logits: Tensor, requests: Sequence[Request], eos_token_ids: Sequence[int], compiled: bool = False
) -> list[int | None]:
    """Returns one token id for each row, or None where the largest logit is not a finite number.

    logits:   [num_rows, vocab] float32, row i belongs to requests[i]; rows of requests that may not stop yet are masked
              in place
    requests: the output so far gives each row its output index
    compiled: by the compiled kernel, which needs logits on CPU; the tokens are the same
    """
    rows = _sampling_rows(requests, eos_token_ids, logits.shape[1])
    tokens = sample_rows(logits, rows) if compiled else sample_rows_reference(logits, rows)
    return [None if token < 0 else token for token in tokens]


def has_finite_best(logits: Tensor) -> list[bool]:
    """Returns for each row of logits [num_rows, vocab] whether a token could be chosen from it."""
    if logits.shape[0] == 0:
        return []
    sound: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    return sound


def _sampling_rows(requests: Sequence[Request], eos_token_ids: Sequence[int], vocab: int) -> SamplingRows:
    packed = [
        pack_sampling_row(p.temperature, p.top_p, p.min_p, p.top_k, request.seed, len(request.output_ids))
        for request in requests
        for p in [request.params]
    ]
    rows = np.frombuffer(bytearray().join(packed), SAMPLING_ROW)
    if all(len(request.output_ids) >= request.params.min_new_tokens for request in requests):
        return SamplingRows(rows, np.zeros(len(requests) + 1, np.int64), _NO_IDS)
    banned = [_banned_ids(request, eos_token_ids, vocab) for request in requests]
    starts = np.cumsum([0, *map(len, banned)], dtype=np.int64)
    return SamplingRows(rows, starts, np.array([token_id for ids in banned for token_id in ids], np.int64))


def _banned_ids(request: Request, eos_token_ids: Sequence[int], vocab: int) -> list[int]:
    """Returns the ids that would end a request that may not end yet."""
    params = request.params
    if len(request.output_ids) >= params.min_new_tokens:
        return []
    ending = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
    return [token_id for token_id in ending if token_id < vocab]
