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
from moe_serve.engine.output.logit_changes import RequestChanges, changes_logits
from moe_serve.kernels.cpu.sampling import RowSampler
from moe_serve.kernels.logit_changes import LogitChanges
from moe_serve.kernels.sampling import SAMPLING_ROW, SamplingRows, pack_sampling_row, sample_rows_reference


class Sampler:
    """Chooses tokens. Decode steps follow each other with the same requests, so their parameters are written once."""

    def __init__(self, eos_token_ids: Sequence[int], compiled: bool = False):
        """compiled: by the compiled kernel, which needs logits on CPU; the tokens are the same"""
        self._eos_token_ids = eos_token_ids
        self._compiled = compiled
        self._changes: dict[Request, RequestChanges] = {}
        self._keep([], 0)

    def __call__(self, logits: Tensor, requests: list[Request]) -> list[int]:
        """Returns one token id for each row; or NOT_FINITE or NONE_LEFT of kernels/sampling.py, why there is none.

        logits:   [num_rows, vocab] float32, row i belongs to requests[i]; changed in place as parameters say
        requests: the output so far gives each row its output index
        """
        if requests == self._requests:  # the same objects
            self._output_indices[:] = [len(request.output_ids) for request in requests]
        else:
            self._keep(requests, logits.shape[1])
        for row, changes in self._changing:
            self._row_changes[row] = changes.now()
        return self._choose(logits)

    def _keep(self, requests: list[Request], vocab: int) -> None:
        """Writes the parameters of these requests; from now on their output indices and changes change."""
        self._requests = requests
        self._changes = {
            request: self._changes.get(request) or RequestChanges(request, self._eos_token_ids, vocab)
            for request in requests
            if changes_logits(request)
        }
        self._changing = [(row, self._changes[each]) for row, each in enumerate(requests) if each in self._changes]
        self._row_changes: list[LogitChanges | None] = [None] * len(requests) if self._changing else []
        sampling = SamplingRows(_rows(requests), self._row_changes)
        self._output_indices = sampling.rows["output_index"]
        self._choose: Callable[[Tensor], list[int]] = (
            RowSampler(sampling) if self._compiled else partial(sample_rows_reference, sampling=sampling)
        )


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
