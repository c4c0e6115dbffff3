"""Chooses the next token of each sequence from its logits.

Random choice is a pure function of (seed, output index, token id): philox4x32-10 gives each token its own uniform
number, which becomes Gumbel noise and is added to the filtered logits; the largest sum wins, ties go to the lowest id.
No generator keeps a state, so a token does not depend on the batch, the rank, a preemption or a restart. (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.)
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.attention_dp.request import Request, SamplingParams

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


@torch.inference_mode()
def sample(logits: Tensor, requests: Sequence[Request], eos_token_ids: Sequence[int]) -> list[int | None]:
    """Returns one token id for each row, or None where the largest logit is not a finite number.

    logits:   [num_rows, vocab] float32, row i belongs to requests[i]; rows of requests that may not stop yet are masked
              in place
    requests: the output so far gives each row its output index
    """
    if logits.shape[0] == 0:
        return []
    best_ids = logits.argmax(dim=-1)  # of equal logits the first; NaN is larger than any number
    best = logits.gather(1, best_ids[:, None]).squeeze(1)
    rows = zip(requests, best_ids.tolist(), best.tolist(), strict=True)
    return [
        _sample_one(logits, row, best_id, request, eos_token_ids) if math.isfinite(value) else None
        for row, (request, best_id, value) in enumerate(rows)
    ]


def has_finite_best(logits: Tensor) -> list[bool]:
    """Returns for each row of logits [num_rows, vocab] whether a token could be chosen from it."""
    if logits.shape[0] == 0:
        return []
    sound: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    return sound


def _sample_one(logits: Tensor, row: int, best_id: int, request: Request, eos_token_ids: Sequence[int]) -> int:
    """Returns the token id of one row of logits, which is masked in place. best_id: of its largest logit"""
    params = request.params
    if len(request.output_ids) < params.min_new_tokens:
        banned = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
        logits[row, [token_id for token_id in banned if token_id < logits.shape[1]]] = -torch.inf
        best_id = int(logits[row].argmax())
    if params.temperature == 0:
        return best_id
    values = logits[row].to(device="cpu", dtype=torch.float64).numpy()
    return sample_row(values, params, request.seed, len(request.output_ids))


def sample_row(logits: NDArray[np.float64], params: SamplingParams, seed: int, output_index: int) -> int:
    """Returns the token id drawn from one row of logits, [vocab] float64, at a temperature above 0."""
    ids = candidates(logits, params)
    noise = gumbel(seed, output_index, ids)
    return int(ids[np.argmax(_scaled(logits[ids], params.temperature) + noise)])


def candidates(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64]:
    """Returns the ids that remain after top_k and then top_p, ascending; equal logits are ranked by id.

    top_p keeps the fewest tokens whose probability, among those that top_k left, adds up to at least top_p.
    """
    vocab = logits.shape[0]
    top_k = vocab if params.top_k < 0 else min(params.top_k, vocab)
    if top_k == vocab and params.top_p >= 1.0:
        return np.arange(vocab)
    # ~(a < b) and not a >= b: a row of NaN keeps all its ids.
    likely = np.flatnonzero(~(logits < np.partition(logits, -top_k)[-top_k]))  # sorting a whole vocabulary takes 12 ms
    order = likely[np.argsort(-logits[likely], kind="stable")][:top_k]
    if params.top_p < 1.0:
        weights = np.exp(_scaled(logits[order], params.temperature))
        before = np.cumsum(weights) - weights  # of all likelier tokens
        order = order[before < params.top_p * weights.sum()]
    return np.sort(order)


def _scaled(logits: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Returns the logits below their maximum, over the temperature: at most 0, however small the temperature is."""
    top = logits.max()
    if not np.isfinite(top):
        return np.zeros_like(logits)  # every token is banned, or the row is not finite: all are alike
    with np.errstate(over="ignore"):  # far below the maximum is -inf
        below: NDArray[np.float64] = (logits - top) / temperature
    return below


def gumbel(seed: int, output_index: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns one Gumbel(0, 1) number for each token id, [len(token_ids)] float64."""
    words = philox(
        (token_ids.astype(np.uint64), np.full(token_ids.shape, output_index, dtype=np.uint64)),
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )
    bits = (words[0] >> np.uint64(5)) * np.uint64(2**26) + (words[1] >> np.uint64(6))
    uniform = (bits.astype(np.float64) + 0.5) / 2.0**53  # in (0, 1), never an end
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def philox(
    counter: tuple[NDArray[np.uint64], NDArray[np.uint64]], key: tuple[int, int]
) -> tuple[NDArray[np.uint64], ...]:
    """Returns the four 32-bit words of philox4x32-10, each an array of uint64 below 2**32.

    counter: the first two counter words; the other two are zero
    """
    c0, c1 = counter[0] & _LOW, counter[1] & _LOW
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3
