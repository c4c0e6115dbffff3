"""What one batch asks of the experts, where a trace has the sums of windows: batches differ more than windows do.

Tokens of one request choose alike, so the load of a batch of few requests is farther from even than a multinomial draw
from the load of its window. Each request has its own shares of the experts; `spread` is their variance over the square
of their mean, and a batch of n requests with m tokens each has shares of variance spread / n x (m - 1) / m: one token
of a request is one draw from the mean, whatever its own shares. So prompts differ, and steps of a decode window do not.
The tokens are drawn by those shares. A plan sees windows and serves batches, so what batches add stays with every plan;
only replicas of an expert lower it.

Shape words: S = steps, L = layers, E = experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import LoadRecord, LoadTrace

Floats = NDArray[np.float64]
_STREAM = 4711  # of random numbers, apart from those of loads and of policies
_WINDOW_PASSES = 32  # that are compared with each other
_LEAST_PASSES = 8
_MOST_WINDOWS = 64
_RESAMPLES = 1000


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


def within_capacity(by_rank: Floats, factor: float, moves: bool) -> Floats:
    """Returns what experts serve [L, E] of one batch where each takes at most `factor` times the mean of a rank's rows.

    by_rank: [L, R, E] tokens of each expert, by the rank that computes their gate
    moves:   the rest goes to the experts that have room, in proportion to it, where the server takes the next-best ones
             of each token; False: it is dropped
    The limit is that of kernels/capacity.py, so all but where choices move to is as there.
    """
    sums = by_rank.sum(axis=2, keepdims=True)
    most = np.maximum(np.ceil(factor * sums / by_rank.shape[2]), 1)
    served: Floats = np.minimum(by_rank, most)
    if moves:
        room = most - served
        over = sums - served.sum(axis=2, keepdims=True)
        served = served + room * over / np.maximum(room.sum(axis=2, keepdims=True), 1)
    result: Floats = served.sum(axis=1)
    return result


@dataclass(frozen=True)
class RequestSpread:
    """How much requests differ in the experts they choose, by single passes of prompts.

    spread, low, high: by all passes, and what holds it in 90 % of the resamples of them
    measured:  busiest rank over the mean one, in every other pass, on ranks that are level for the passes between
    drawn:     the same of batches drawn around the passes between, with the spread of those;  by_chance: without
    tokens_per_request: that was assumed of prompts; the spread is by it
    """

    spread: float
    low: float
    high: float
    num_passes: int
    measured: float
    drawn: float
    by_chance: float
    tokens_per_request: float

    def words(self) -> str:
        """Returns one line for reports."""
        return (
            f"requests of {self.tokens_per_request:,.0f} tokens (--context) differ by a spread of {self.spread:.3g} "
            f"({self.low:.3g} to {self.high:.3g} in 90 % of the resamples of {self.num_passes} passes); on ranks that "
            f"are level for half of them the busiest has {self.measured:.2f} of the mean in the others, "
            f"{self.drawn:.2f} if drawn with it, {self.by_chance:.2f} by chance alone"
        )


def find_spread(
    trace: LoadTrace, topk: int, tokens_per_request: float, num_ranks: int, phases: tuple[str, ...] = ("prefill",)
) -> RequestSpread | None:
    """Returns the spread of requests in a trace that holds single passes of these phases.

    None for fewer than 8 passes, and for prompts of one token, which show none.

    tokens_per_request: of one request in a pass: the length of prompts, which passes do not say

    Passes are compared with their neighbours only, so that a load which changes over time is no spread. A large one of
    few requests comes out too small, as shares are drawn and then made to sum to 1.
    """
    if tokens_per_request <= 1:
        return None
    rng = np.random.default_rng(_STREAM)
    # Of every other pass: its excess over chance, and that of a spread of 1.
    terms: tuple[list[Floats], list[Floats]] = ([], [])
    # Shares by the first half of a window, and rows [S, L] of the passes of its second one.
    windows: list[tuple[Floats, Floats]] = []
    measured: list[float] = []
    num_passes = 0
    for steps in _windows_of_passes(trace, phases):
        num_passes += len(steps)
        for half, kept in enumerate(terms):
            kept.append(_moments(steps[half::2], topk, tokens_per_request))
        sums = steps[0::2].sum(axis=0)
        shares = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
        windows.append((shares, steps[1::2].sum(axis=2)))
        measured.append(float(excess_of_ranks(steps[1::2], shares, num_ranks).mean()))
    if not windows:
        return None
    first, second = (np.concatenate(kept) for kept in terms)
    every = np.concatenate([first, second])
    resamples = every[rng.integers(len(every), size=(_RESAMPLES, len(every)))].sum(axis=1)
    low, high = np.quantile(np.maximum(resamples[:, 0], 0) / resamples[:, 1], (0.05, 0.95))
    drawn, by_chance = (
        float(np.mean([drawn_imbalance(*each, spread, topk, tokens_per_request, num_ranks, rng) for each in windows]))
        for spread in (_spread_of(first), 0.0)
    )
    return RequestSpread(
        _spread_of(every),
        float(low),
        float(high),
        num_passes,
        measured=float(np.mean(measured)),
        drawn=drawn,
        by_chance=by_chance,
        tokens_per_request=tokens_per_request,
    )


def _windows_of_passes(trace: LoadTrace, phases: tuple[str, ...]) -> Iterator[Floats]:
    """Yields [S, L, E] of neighbouring passes with tokens, an even number, of up to _MOST_WINDOWS windows."""
    passes: list[NDArray[np.int64]] = []
    num_windows = 0
    for record in trace:
        if record.phase in phases and (record.per_step is not None or record.num_steps == 1):
            steps = record.tokens[None] if record.per_step is None else record.per_step
            passes += [step for step in steps if step.any()]
        while len(passes) >= _WINDOW_PASSES:
            yield np.array(passes[:_WINDOW_PASSES], dtype=np.float64)
            del passes[:_WINDOW_PASSES]
            num_windows += 1
            if num_windows == _MOST_WINDOWS:
                return
    if not num_windows and len(passes) >= _LEAST_PASSES:
        yield np.array(passes[: len(passes) // 2 * 2], dtype=np.float64)


def _moments(steps: Floats, topk: int, tokens_per_request: float) -> Floats:
    """Returns of each step [S, L, E] how far it is from the mean of all beyond chance, and how far a spread of 1 is."""
    sums = steps.sum(axis=2, keepdims=True)  # [S, L, 1]
    shares = steps.sum(axis=0) / np.maximum(sums.sum(axis=0), 1)  # [L, E]
    freedom = (len(steps) - 1) / len(steps)  # the mean is of the same steps
    found = (steps - sums * shares) ** 2
    # A token goes to an expert at most once: it is a draw of 0 or 1 with the chance topk x share.
    by_chance = sums * shares * np.maximum(1 - topk * shares, 0)
    each = (sums * shares) ** 2 * np.minimum((tokens_per_request - 1) * topk / np.maximum(sums, 1), 1)
    parts = (found - freedom * by_chance, freedom * each)
    return np.stack([part.sum(axis=(1, 2)) for part in parts], axis=1)


def _spread_of(moments: Floats) -> float:
    excess, each = moments.sum(axis=0)
    return float(max(excess, 0.0) / each)


def drawn_imbalance(
    shares: Floats,
    rows: Floats,
    spread: float,
    topk: int,
    tokens_per_request: float,
    num_ranks: int,
    rng: np.random.Generator,
) -> float:
    """Returns the busiest over the mean rank, as above, in passes with these rows [S, L] drawn around shares [L, E]."""
    out = []
    for sums in rows:
        tokens = float(sums.max()) / topk
        own = shares_of_batch(shares, spread, tokens / tokens_per_request, tokens, rng)
        drawn = rng.multinomial(sums.astype(np.int64), own).astype(np.float64)
        out.append(excess_of_ranks(drawn[None], shares, num_ranks).mean())
    return float(np.mean(out))


def excess_of_ranks(steps: Floats, shares: Floats, num_ranks: int) -> Floats:
    """Returns max / mean over ranks that are level for shares [L, E]: tokens [S, L, E] -> [S, L].

    Experts are dealt out to the ranks by their shares, forth and back.
    """
    num_experts = shares.shape[1]
    turn, at = np.divmod(np.arange(num_experts), num_ranks)
    dealt = np.where(turn % 2 == 0, at, num_ranks - 1 - at)
    rank_of = np.empty(shares.shape, dtype=np.int64)
    np.put_along_axis(rank_of, np.argsort(-shares, axis=1, kind="stable"), dealt[None], axis=1)
    held = rank_of[:, :, None] == np.arange(num_ranks)
    ranks = np.einsum("sle,ler->slr", steps, held)
    return np.asarray(ranks.max(axis=2) / np.maximum(ranks.mean(axis=2), 1e-12))


def expected_experts(num_logical: int, topk: int, rows: float) -> float:
    """Returns how many experts of a layer some rows choose on average, where each chooses topk evenly, by itself.

    Rows of one request choose alike, so theirs are fewer (MoESD, arXiv 2505.19645, has the formula).
    """
    return float(num_logical * (1 - (1 - topk / num_logical) ** rows))
