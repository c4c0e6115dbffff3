"""Chooses the next token of each sequence from its logits: one call for all rows of a step.

No generator keeps a state, so a token does not depend on the batch, the rank, a preemption or a restart
(kernels/sampling.py says how it is drawn).
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.attention_dp.request import Request
from moe_serve.kernels.cpu.sampling import RowSampler
from moe_serve.kernels.sampling import SAMPLING_ROW, SamplingRows, pack_sampling_row, sample_rows_reference

_NO_IDS = np.zeros(0, np.int64)


class Sampler:
    """Chooses tokens. Decode steps follow each other with the same requests, so their parameters are written once."""

    def __init__(self, eos_token_ids: Sequence[int], compiled: bool = False):
        """compiled: by the compiled kernel, which needs logits on CPU; the tokens are the same"""
        self._eos_token_ids = eos_token_ids
        self._compiled = compiled
        self._keep([], 0)

    def __call__(self, logits: Tensor, requests: list[Request]) -> list[int | None]:
        """Returns one token id for each row, or None where the largest logit is not a finite number.

        logits:   [num_rows, vocab] float32, row i belongs to requests[i]; rows of requests that may not stop yet are
                  masked in place
        requests: the output so far gives each row its output index
        """
        if self._all_may_end and requests == self._requests:  # the same objects
            self._output_indices[:] = [len(request.output_ids) for request in requests]
        else:
            self._keep(requests, logits.shape[1])
        return [None if token < 0 else token for token in self._choose(logits)]

    def _keep(self, requests: list[Request], vocab: int) -> None:
        """Writes the parameters of these requests. Once all of them may end, only their output indices change."""
        self._requests = requests
        self._all_may_end = all(len(request.output_ids) >= request.params.min_new_tokens for request in requests)
        sampling = SamplingRows(_rows(requests), *self._banned(requests, vocab))
        self._output_indices = sampling.rows["output_index"]
        self._choose: Callable[[Tensor], list[int]] = (
            RowSampler(sampling) if self._compiled else partial(sample_rows_reference, sampling=sampling)
        )

    def _banned(self, requests: Sequence[Request], vocab: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns banned_starts and banned_ids of SamplingRows."""
        if self._all_may_end:
            return np.zeros(len(requests) + 1, np.int64), _NO_IDS
        banned = [self._banned_ids(request, vocab) for request in requests]
        starts = np.cumsum([0, *map(len, banned)], dtype=np.int64)
        return starts, np.array([token_id for ids in banned for token_id in ids], np.int64)

    def _banned_ids(self, request: Request, vocab: int) -> list[int]:
        """Returns the ids that would end a request that may not end yet."""
        params = request.params
        if len(request.output_ids) >= params.min_new_tokens:
            return []
        ending = [*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]
        return [token_id for token_id in ending if token_id < vocab]


def has_finite_best(logits: Tensor) -> list[bool]:
    """Returns for each row of logits [num_rows, vocab] whether a token could be chosen from it."""
    if logits.shape[0] == 0:
        return []
    sound: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    return sound


def _rows(requests: Sequence[Request]) -> NDArray[np.void]:
    """Returns how the next token of each request is drawn, [num_requests] SAMPLING_ROW."""
    packed = [
        pack_sampling_row(p.temperature, p.top_p, p.min_p, p.top_k, request.seed, len(request.output_ids))
        for request in requests
        for p in [request.params]
    ]
    return np.frombuffer(bytearray().join(packed), SAMPLING_ROW)
