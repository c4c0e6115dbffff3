"""Synthetic loads: popularity of experts over time, and token counts drawn from it.

A family says how popular each expert of each layer is in each window (a row of weights that sums to 1); counts are then
drawn for real: tokens by a multinomial, batches with at least one token by a binomial. Equal arguments give equal
traces; a trace can be iterated again and starts anew. Benchmarks rely on these families as they are: a change to a
family changes every number measured on it.

Shape words: L = layers, E = experts, G = groups, D = domains.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.batches import shares_of_batch
from moe_serve.eplb.load import MAX_EXACT, LoadRecord, LoadTrace
from moe_serve.errors import ConfigError

Floats = NDArray[np.float64]
Family = Literal["uniform", "zipf", "lognormal", "group", "hot", "tiny", "bursts", "jumps", "swing"]
FAMILIES: tuple[str, ...] = get_args(Family)
GROUP_SIGMA = 0.5  # of the log popularity that experts of a router group share
MAX_SKEW = 20  # weights stay finite, and the heaviest expert has all of the load long before


@dataclass(frozen=True)
class SyntheticLoad:
    """A load to draw. Checked when built; raises ConfigError.

    family:      uniform    all experts alike
                 zipf       popularity ~ 1 / place^skew, places shuffled per layer; steady
                 lognormal  popularity ~ exp(skew x AR(1)); drifts with correlation `rho` between windows
                 group      lognormal, plus 0.5 x an AR(1) that the experts of a router group share
                 hot        lognormal, and one expert per layer has `skew` of the load, another every `period` windows
                 tiny       half a token per expert and window on average
                 bursts     `num_domains` lognormal profiles; traffic is mostly one of them and changes at random,
                            every `period` windows on average; `profiles` replaces them by measured ones
                 jumps      lognormal, where every `period` windows on average a layer is drawn anew
                 swing      two profiles in turn, `period` windows each: what was learned is wrong after every turn
    skew:        see family, 0 to 20 (hot: to 1); None: 0.8 zipf, 0.3 hot, 0.6 others (calibrated on DeepSeek-R1: sigma
                 0.6 to 1.2)
    rho:         correlation of log popularity between neighbouring windows
    num_layers, num_logical, topk, num_groups: of the model
    tokens_per_step: tokens of all ranks in one step
    steps_per_window, num_windows: length
    num_sources: ranks the tokens come from, evenly; 0: sources not recorded
    profiles:    [D, L, E] measured popularity for bursts (any positive scale)
    request_spread, requests_per_step: how much requests differ in the experts they choose (`cost/batches.py`), and how
                 many a step has: prompts are new ones in each step, decoding requests stay for all of a window
    """

    family: str = "lognormal"
    num_windows: int = 50
    num_layers: int = 58
    num_logical: int = 256
    topk: int = 8
    num_groups: int = 8
    skew: float | None = None
    rho: float = 0.98
    period: int = 10
    num_domains: int = 4
    tokens_per_step: int = 16384
    steps_per_window: int = 100
    num_sources: int = 0
    phase: str = "decode"
    seed: int = 0
    profiles: Floats | None = field(default=None, compare=False)
    request_spread: float = 0.0
    requests_per_step: float = 1.0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"load {self.family!r} is not known; use one of {', '.join(FAMILIES)}")
        for name in ("num_windows", "num_layers", "num_logical", "topk", "num_groups", "period", "num_domains",
                     "tokens_per_step", "steps_per_window"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")
        if self.topk > self.num_logical:
            raise ConfigError(f"topk is {self.topk} but there are {self.num_logical} experts; lower topk")
        if self.tokens_per_step * self.topk * self.steps_per_window > MAX_EXACT:
            raise ConfigError(
                f"{self.tokens_per_step:,} tokens a step, {self.topk} experts each, in windows of "
                f"{self.steps_per_window:,} steps are more than 2^53; draw fewer"
            )
        most = 1 if self.family == "hot" else MAX_SKEW
        if not 0 <= self.sigma <= most:
            raise ConfigError(f"skew is {self.sigma:g}; give a number from 0 to {most} for load {self.family!r}")
        if not 0 <= self.rho <= 1:
            raise ConfigError(f"rho is {self.rho}; give a correlation between 0 and 1")
        if self.family == "group" and self.num_logical % self.num_groups:
            raise ConfigError(f"num_groups is {self.num_groups} but {self.num_logical} experts must divide into groups")
        if self.profiles is not None and self.profiles.shape[1:] != (self.num_layers, self.num_logical):
            raise ConfigError(
                f"profiles has shape {list(self.profiles.shape)}; expected [domains, {self.num_layers}, "
                f"{self.num_logical}]"
            )
        if self.profiles is not None and not (self.profiles.sum(axis=2) > 0).all():
            raise ConfigError("a layer of a profile has no load; leave records without load out of the domains")

    @property
    def sigma(self) -> float:
        """The skew in use."""
        return self.skew if self.skew is not None else {"zipf": 0.8, "hot": 0.3}.get(self.family, 0.6)

    def words(self) -> str:
        """Returns one line for reports that names everything needed to draw it again."""
        drift = f", rho {self.rho:g}" if self.family not in ("uniform", "zipf", "tiny") else ""
        period = f", period {self.period}" if self.family in ("hot", "bursts", "jumps", "swing") else ""
        requests = f"{self.requests_per_step:g} requests a step"
        spread = f", request spread {self.request_spread:g} over {requests}" if self.request_spread else ""
        return (
            f"synthetic {self.family} (skew {self.sigma:g}{drift}{period}, seed {self.seed}): {self.num_layers} layers "
            f"x {self.num_logical} experts, top {self.topk}, {self.tokens_per_step} tokens a step{spread}"
        )


def synthetic_trace(load: SyntheticLoad) -> LoadTrace:
    """Returns the trace of a synthetic load; nothing is drawn before it is iterated."""

    def open_records() -> Iterator[LoadRecord]:
        # Its own stream, so that another number of tokens or steps leaves the popularity as it was.
        rng = np.random.default_rng([load.seed, 1000 + FAMILIES.index(load.family)])
        for window, weights in enumerate(popularity(load)):
            yield window_counts(weights, load, rng, window * load.steps_per_window)

    return LoadTrace(
        open_records,
        load.num_logical,
        tuple(range(load.num_layers)),
        load.topk,
        source=load.words(),
        num_records=load.num_windows,
    )


def popularity(load: SyntheticLoad) -> Iterator[Floats]:
    """Yields [L, E] float64 for each window; rows sum to 1."""
    rng = np.random.default_rng([load.seed, FAMILIES.index(load.family)])
    shape = (load.num_layers, load.num_logical)
    walks: dict[str, Callable[[np.random.Generator, SyntheticLoad], Iterator[Floats]]] = {
        "lognormal": _lognormal,
        "group": _group,
        "hot": _hot,
        "bursts": _bursts,
        "jumps": _jumps,
        "swing": _swing,
    }
    if load.family in walks:
        for weights in walks[load.family](rng, load):
            yield weights / weights.sum(axis=1, keepdims=True)
        return
    if load.family == "zipf":
        places = np.arange(1, load.num_logical + 1, dtype=np.float64) ** -load.sigma
        weights = rng.permuted(np.tile(places, (load.num_layers, 1)), axis=1)
    else:
        weights = np.ones(shape)
    for _ in range(load.num_windows):
        yield weights / weights.sum(axis=1, keepdims=True)


def window_counts(weights: Floats, load: SyntheticLoad, rng: np.random.Generator, first_step: int) -> LoadRecord:
    """Returns the counts of one window drawn from its popularity [L, E]."""
    if load.request_spread:
        seen = load.requests_per_step * (load.steps_per_window if load.phase != "decode" else 1)
        computed = load.tokens_per_step * load.steps_per_window
        weights = shares_of_batch(weights, load.request_spread, seen, computed, rng)
    shares = load.tokens_per_step * load.topk
    num_tokens = load.num_logical // 2 if load.family == "tiny" else shares * load.steps_per_window
    if load.num_sources:
        each = np.full(load.num_sources, 1 / load.num_sources)
        by_rank = rng.multinomial(num_tokens, each)
        by_source = np.stack([rng.multinomial(n, weights) for n in by_rank], axis=1)  # [L, sources, E]
        tokens = by_source.sum(axis=1)
    else:
        by_source, tokens = None, rng.multinomial(num_tokens, weights)
    chosen = np.minimum(weights * load.topk, 1.0)  # chance that one token goes to the expert
    some = -np.expm1(load.tokens_per_step * np.log1p(-np.minimum(chosen, 1 - 1e-12)))
    active = np.clip(rng.binomial(load.steps_per_window, some), tokens > 0, tokens)
    return LoadRecord(
        first_step,
        load.steps_per_window,
        load.phase,
        tokens,
        by_source=by_source,
        activations=np.minimum(active, load.steps_per_window),
    )


def _walk(rng: np.random.Generator, shape: tuple[int, ...], rho: float) -> Iterator[Floats]:
    """A stationary AR(1) of standard normals, for ever."""
    state = rng.standard_normal(shape)
    while True:
        yield state
        state = rho * state + np.sqrt(1 - rho**2) * rng.standard_normal(shape)


def _lognormal(rng: np.random.Generator, load: SyntheticLoad) -> Iterator[Floats]:
    walk = _walk(rng, (load.num_layers, load.num_logical), load.rho)
    for _ in range(load.num_windows):
        yield np.exp(load.sigma * next(walk))


def _group(rng: np.random.Generator, load: SyntheticLoad) -> Iterator[Floats]:
    experts = _walk(rng, (load.num_layers, load.num_logical), load.rho)
    groups = _walk(rng, (load.num_layers, load.num_groups), load.rho)
    for _ in range(load.num_windows):
        shared = np.repeat(next(groups), load.num_logical // load.num_groups, axis=1)
        yield np.exp(load.sigma * next(experts) + GROUP_SIGMA * shared)


def _hot(rng: np.random.Generator, load: SyntheticLoad) -> Iterator[Floats]:
    walk = _walk(rng, (load.num_layers, load.num_logical), load.rho)
    rows = np.arange(load.num_layers)
    hot = rng.integers(load.num_logical, size=load.num_layers)
    for window in range(load.num_windows):
        if window and window % load.period == 0:
            hot = rng.integers(load.num_logical, size=load.num_layers)
        weights = np.exp(0.6 * next(walk))
        weights[rows, hot] = 0
        weights *= (1 - load.sigma) / weights.sum(axis=1, keepdims=True)
        weights[rows, hot] = load.sigma
        yield weights


def _bursts(rng: np.random.Generator, load: SyntheticLoad) -> Iterator[Floats]:
    if load.profiles is not None:
        profiles = np.maximum(load.profiles / load.profiles.sum(axis=2, keepdims=True), 1e-9)
    else:
        profiles = np.exp(load.sigma * rng.standard_normal((load.num_domains, load.num_layers, load.num_logical)))
        profiles /= profiles.sum(axis=2, keepdims=True)
    domain = int(rng.integers(len(profiles)))
    mix = np.full(len(profiles), 1 / len(profiles))
    for _ in range(load.num_windows):
        if rng.random() < 1 / load.period:
            domain = int(rng.integers(len(profiles)))
        wanted = np.full(len(profiles), 0.2 / len(profiles))
        wanted[domain] += 0.8
        mix = 0.5 * mix + 0.5 * wanted  # running requests of the old domain end within a few windows
        yield np.tensordot(mix, profiles, axes=1)


def _jumps(rng: np.random.Generator, load: SyntheticLoad) -> Iterator[Floats]:
    shape = (load.num_layers, load.num_logical)
    state = rng.standard_normal(shape)
    for _ in range(load.num_windows):
        yield np.exp(load.sigma * state)
        state = load.rho * state + np.sqrt(1 - load.rho**2) * rng.standard_normal(shape)
        anew = rng.random(load.num_layers) < 1 / load.period
        state[anew] = rng.standard_normal((int(anew.sum()), load.num_logical))


def _swing(rng: np.random.Generator, load: SyntheticLoad) -> Iterator[Floats]:
    profiles = np.exp(load.sigma * rng.standard_normal((2, load.num_layers, load.num_logical)))
    for window in range(load.num_windows):
        yield profiles[window // load.period % 2].copy()
