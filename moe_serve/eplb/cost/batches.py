"""What one batch asks of the experts, where a trace has the sums of windows: batches differ more than windows do.

Tokens of one request choose alike, so the load of a batch of few requests is farther from even than a multinomial draw
from the load of its window. Each request has its own shares of the experts; `spread` is their variance over the square
of their mean, and a batch of n requests with m tokens each has shares of variance spread / n x (m - 1) / m: one token
of a request is one draw from the mean, whatever its own shares. So prompts differ, and steps of a decode window do not.
The tokens are drawn by those shares. A plan sees windows and serves batches, so what batches add stays with every plan;
only replicas of an expert lower it.

Shape words: S = steps, L = layers, E = experts.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import LoadRecord

Floats = NDArray[np.float64]
_STREAM = 4711  # of random numbers, apart from those of loads and of policies


def shares_of_batch(
    shares: Floats, spread: float, num_requests: float, num_tokens: float, rng: np.random.Generator
) -> Floats:
    """Returns the shares [L, E] of one batch, drawn around those of its window; rows sum to 1. num_tokens: of all"""
    num_requests = max(num_requests, 1.0)
    variance = spread / num_requests * (1 - min(num_requests / num_tokens, 1.0)) if num_tokens else 0.0
    if variance <= 0:
        return shares
    shape = 1 / variance
    drawn = shares * rng.gamma(shape, 1 / shape, shares.shape)
    sums = drawn.sum(axis=1, keepdims=True)
    return np.where(sums > 0, drawn / np.maximum(sums, np.finfo(np.float64).tiny), shares)


def tokens_of_batch(record: LoadRecord, spread: float, num_requests: float, num_tokens: float) -> tuple[Floats, bool]:
    """Returns the tokens of each expert [L, E] in one step of a window, and whether they are its means.

    Where the record has single steps, each layer takes those of another step: the sum over layers, as in the time of
    a step, is then a mean over steps. Otherwise each layer has a batch drawn with `spread`, the same one for the same
    window at any time. The means are returned where there is neither, and of windows of one step.
    """
    if record.per_step is not None:
        busy = np.flatnonzero(record.per_step.any(axis=(1, 2)))
        if len(busy):
            layers = np.arange(record.num_layers)
            return record.per_step[busy[layers * len(busy) // record.num_layers], layers].astype(np.float64), False
    mean = record.tokens / max(record.busy_steps, 1)
    if spread <= 0 or record.busy_steps <= 1:
        return mean, True
    rng = np.random.default_rng([_STREAM, record.first_step])
    sums = mean.sum(axis=1)
    shares = mean / np.maximum(sums, 1.0)[:, None]
    shares[sums == 0] = 1 / record.num_logical
    rest = spread * (1 - 1 / record.busy_steps)  # the mean of the steps has varied by the other part
    shares = shares_of_batch(shares, rest, num_requests, num_tokens, rng)
    drawn = rng.multinomial(np.rint(sums).astype(np.int64), shares)
    return drawn.astype(np.float64), False


def within_capacity(tokens: Floats, factor: float, num_ranks: int, moves: bool) -> Floats:
    """Returns what experts serve of tokens [L, E] of one batch where each takes at most `factor` times the mean.

    The limit is that of kernels/capacity.py: of the rows of one rank, where each has an equal part of every expert's.
    moves: the rest goes to the experts that have room, in proportion to it, where the server takes the next-best ones
           of each token; False: it is dropped
    """
    mean = tokens.mean(axis=1, keepdims=True)
    most = num_ranks * np.maximum(np.ceil(factor * mean / num_ranks), 1)
    served: Floats = np.minimum(tokens, most)
    if moves:
        room = most - served
        over = (tokens - served).sum(axis=1, keepdims=True)
        served = served + room * over / np.maximum(room.sum(axis=1, keepdims=True), 1)
    return served


def fit_spread(per_step: NDArray[np.int64], topk: int, tokens_per_request: float) -> float:
    """Returns the spread of requests, by moments, from the tokens of single steps [S, L, E]; at least 0.

    tokens_per_request: of one request in a step: the length of prompts where they begin
    Raises ValueError for fewer than two steps with tokens, and for one token of a request, which does not show it.
    """
    steps = per_step[per_step.any(axis=(1, 2))].astype(np.float64)
    if len(steps) < 2 or tokens_per_request <= 1:
        raise ValueError("a spread needs two steps with tokens, of requests with more than one token in a step")
    sums = steps.sum(axis=2, keepdims=True)  # [S, L, 1]
    shares = steps.sum(axis=0) / np.maximum(sums.sum(axis=0), 1)  # [L, E]
    freedom = (len(steps) - 1) / len(steps)  # the mean is of the same steps
    found = ((steps - sums * shares) ** 2).sum()
    # A token goes to an expert at most once: it is a draw of 0 or 1 with the chance topk x share.
    by_chance = freedom * (sums * shares * np.maximum(1 - topk * shares, 0)).sum()
    each = freedom * ((sums * shares) ** 2 * ((tokens_per_request - 1) * topk / np.maximum(sums, 1))).sum()
    return float(max(found - by_chance, 0.0) / each)


def expected_experts(num_logical: int, topk: int, rows: float) -> float:
    """Returns how many experts of a layer some rows choose on average, where each chooses topk evenly, by itself.

    Rows of one request choose alike, so theirs are fewer (MoESD, arXiv 2505.19645, has the formula).
    """
    return float(num_logical * (1 - (1 - topk / num_logical) ** rows))
