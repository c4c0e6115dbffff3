"""Fits the cost model to step times that an engine has measured: its factor, the load, and the overlap.

Steps are grouped by phase and size; a group counts with its median, so that single slow steps do little. How uneven the
load is, how much requests differ in the experts they choose, and whether half-batches overlap, a log does not say. So
each combination of some values is tried: for each, the factor of the engine is the median of measured / modelled, and
the one that errs least is taken. Each group is predicted once by the fit to all others. The confidence is a bootstrap
over the groups, which finds the best combination anew in each resample. A load shows only where the busiest rank sets
the pace, and a spread of requests only in steps with prompts, so several may fit alike: the report says which.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray
from rich.table import Table

from moe_serve.eplb.cost.batches import shares_of_batch
from moe_serve.eplb.cost.kernels import Batch
from moe_serve.eplb.files.step_times import StepTime
from moe_serve.eplb.load import LoadTrace, Phase
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.replay.costs import Overlap, ProfileCosts
from moe_serve.eplb.replay.report import as_seconds, printed, text_console
from moe_serve.eplb.replay.synthetic import SyntheticLoad, popularity
from moe_serve.errors import ConfigError, TraceError

Floats = NDArray[np.float64]
SKEWS = (0.0, 0.3, 0.6, 0.9, 1.2)
SPREADS = (0.0, 4.0, 16.0, 64.0)
OVERLAPS: tuple[Overlap, ...] = ("none", "two-batch", "auto")
RECORDED = "recorded"  # family of a load that a trace holds
LEAST_GROUPS = 3
SIZES_PER_DOUBLING = 4  # groups of steps by their tokens
ALIKE = 0.01  # mean errors this close say nothing about which is right
RESAMPLES = 1000
DRAWS = 3  # of each synthetic load: which experts are popular matters, too


@dataclass(frozen=True)
class Group:
    """Steps of about one size.

    step_s:       their median
    context:      of a decoding request in the cache, and of a prompt; a mixed step has both, taken to be as long
    decode_share: of the tokens, in a mixed step
    """

    phase: Phase
    tokens: int
    context: float
    step_s: float
    num_steps: int
    decode_share: float = 0.0


@dataclass(frozen=True)
class Guess:
    """What the steps may have had. family, skew: of a synthetic load, or RECORDED;  spread: of its requests"""

    family: str
    skew: float
    spread: float
    overlap: Overlap

    def words(self) -> str:
        """Returns it in a few words."""
        load = "the recorded load" if self.family == RECORDED else f"a {self.family} load of skew {self.skew:g}"
        return f"{load}, request spread {self.spread:g}, overlap {self.overlap}"

    def options(self) -> str:
        """Returns the options of `moe-serve simulate` that say it."""
        load = "--trace FILE" if self.family == RECORDED else f"--load {self.family} --skew {self.skew:g}"
        return f"{load} --request-spread {self.spread:g} --overlap {self.overlap}"


@dataclass(frozen=True)
class Fit:
    """What fits best.

    factor, low, high: of the whole step over its modelled parts, and what holds it in 90 % of the resamples
    best:      the guess that errs least;  alike: others that err as little, with their factors
    skews, spreads: what holds these in 90 % of the resamples, half-way to the next values tried
    sure:      share of the resamples in which family and overlap are those of the best guess
    predicted: seconds of each group by the fit to all others
    """

    groups: tuple[Group, ...]
    factor: float
    low: float
    high: float
    best: Guess
    skews: tuple[float, float]
    spreads: tuple[float, float]
    sure: float
    alike: tuple[tuple[Guess, float], ...]
    predicted: tuple[float, ...]

    @property
    def errors(self) -> Floats:
        """Predicted / measured - 1 of each group, by the fit to all others."""
        return np.asarray(np.array(self.predicted) / np.array([group.step_s for group in self.groups]) - 1)


def grouped(steps: Sequence[StepTime], context: float) -> tuple[Group, ...]:
    """Returns the steps by phase and size. context: of steps that do not say it"""
    found: dict[tuple[Phase, int, int], list[StepTime]] = {}
    for step in steps:
        size = round(SIZES_PER_DOUBLING * np.log2(step.tokens))
        found.setdefault((step.phase, size, round(np.log2(max(step.decoding, 1)))), []).append(step)
    groups = []
    for (phase, *_), same in sorted(found.items()):
        held = [context if step.context is None else step.context for step in same]
        shares = [step.decoding / step.tokens for step in same]
        numbers = ([step.tokens for step in same], held, [step.step_s for step in same], shares)
        tokens, length, seconds, share = (float(np.median(values)) for values in numbers)
        groups.append(Group(phase, round(tokens), length, seconds, len(same), share))
    return tuple(groups)


def fit(
    steps: Sequence[StepTime],
    costs: ProfileCosts,
    num_slots: int,
    rho: float,
    trace: LoadTrace | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Fit:
    """Returns the fit. costs: of the model and the machine, of an engine whose factor is 1

    rho:      of the windows of synthetic loads, between that of a plan and the next one
    trace:    a recorded load, instead of synthetic ones
    progress: called with (loads done, loads)
    Raises ConfigError for steps of fewer than LEAST_GROUPS sizes, TraceError for a trace with an empty half.
    """
    groups = grouped(steps, costs.serving.context)
    if len(groups) < LEAST_GROUPS:
        raise ConfigError(
            f"the steps are of {len(groups)} sizes, and a fit needs {LEAST_GROUPS}; record steps of more batch sizes"
        )
    spreads = SPREADS if any(group.phase != "decode" for group in groups) else (0.0,)
    loads = list(_recorded(trace, costs) if trace is not None else _synthetic(costs, rho))
    guesses = [Guess(load.family, load.skew, *other) for load in loads for other in product(spreads, OVERLAPS)]
    rows: list[list[list[float]]] = []
    for done, load in enumerate(loads):
        placement = _planned(load.before, costs, num_slots)
        for spread in spreads:
            rows.append([step_seconds(group, costs, placement, load.served, spread) for group in groups])
        if progress is not None:
            progress(done + 1, len(loads))
    modelled = np.array(rows).transpose(0, 2, 1).reshape(len(guesses), len(groups))
    ratios = np.log(np.array([group.step_s for group in groups]) / modelled)
    best, factor = _best(ratios)
    errors = np.abs(ratios - np.median(ratios, axis=1, keepdims=True)).mean(axis=1)
    draws = np.random.default_rng(0).integers(len(groups), size=(RESAMPLES, len(groups)))
    chosen, factors = zip(*(_best(ratios[:, draw]) for draw in draws), strict=True)
    drawn = [guesses[i] for i in chosen]
    same = [(guess.family, guess.overlap) == (guesses[best].family, guesses[best].overlap) for guess in drawn]
    predicted = []
    for index in range(len(groups)):
        one, without = _best(np.delete(ratios, index, axis=1))
        predicted.append(float(np.exp(without) * modelled[one, index]))
    alike: dict[Guess, float] = {}
    for i in np.argsort(errors):
        if errors[i] <= errors[best] + ALIKE and guesses[i] != guesses[best]:
            alike.setdefault(guesses[i], float(np.exp(np.median(ratios[i]))))
    low, high = np.quantile(factors, (0.05, 0.95))
    return Fit(
        groups,
        factor=float(np.exp(factor)),
        low=float(np.exp(low)),
        high=float(np.exp(high)),
        best=guesses[best],
        skews=_between([guess.skew for guess in drawn], sorted({guess.skew for guess in guesses})),
        spreads=_between([guess.spread for guess in drawn], spreads),
        sure=float(np.mean(same)),
        alike=tuple(alike.items()),
        predicted=tuple(predicted),
    )


def _between(values: Sequence[float], tried: Sequence[float]) -> tuple[float, float]:
    """Returns what holds 90 % of values that are among the tried ones: half-way to those that are outside."""
    low, high = (tried.index(float(v)) for v in np.quantile(values, (0.05, 0.95), method="inverted_cdf"))
    below, above = tried[max(low - 1, 0)], tried[min(high + 1, len(tried) - 1)]
    return (below + tried[low]) / 2, (tried[high] + above) / 2


def _best(ratios: Floats) -> tuple[int, float]:
    """Returns the row that varies least around its median, and that median: ratios [guesses, groups], logarithms."""
    medians = np.median(ratios, axis=1)
    best = int(np.abs(ratios - medians[:, None]).mean(axis=1).argmin())
    return best, float(medians[best])


class Load(NamedTuple):
    """A load that the steps may have had. before, served: shares [L, E] of the window of a plan, and of the next one"""

    family: str
    skew: float
    before: Floats
    served: Floats


def _synthetic(costs: ProfileCosts, rho: float) -> Iterable[Load]:
    """Yields the loads that a model of this kind may have: those of its router's groups too, where it has any."""
    model = costs.model.model
    for family in ("lognormal", "group") if model.num_groups > 1 else ("lognormal",):
        for skew, seed in product(SKEWS, range(DRAWS)):
            before, served = popularity(
                SyntheticLoad(
                    family,
                    num_windows=2,
                    num_layers=model.num_moe_layers,
                    num_logical=model.num_logical,
                    topk=model.topk,
                    num_groups=model.num_groups,
                    skew=skew,
                    rho=rho,
                    seed=seed,
                )
            )
            yield Load(family, skew, before, served)


def _recorded(trace: LoadTrace, costs: ProfileCosts) -> Iterable[Load]:
    """Yields the load of a trace: planned from its first half, served in its second one."""
    trace = costs.of_model(trace)
    total = trace.num_records if trace.num_records is not None else sum(1 for _ in trace)
    halves = np.zeros((2, len(trace.moe_layer_ids), trace.num_logical))
    for index, record in enumerate(trace):
        halves[2 * index // total] += record.tokens
    if not halves.any(axis=(1, 2)).all():
        raise TraceError(f"a half of {trace.source or 'the trace'} has no tokens; a fit plans from one for the other")
    before, served = halves / np.maximum(halves.sum(axis=2, keepdims=True), 1.0)
    yield Load(RECORDED, 0.0, before, served)


def _planned(shares: Floats, costs: ProfileCosts, num_slots: int) -> Placement:
    tokens = np.rint(shares * 1e9).astype(np.int64)
    return make_policy("greedy").plan(PlanRequest(tokens, costs.model.topology, num_slots)).placement


def step_seconds(group: Group, costs: ProfileCosts, placement: Placement, shares: Floats, spread: float) -> list[float]:
    """Returns the modelled time of a step of a group by each of OVERLAPS, of a batch drawn from these shares [L, E]."""
    serving = costs.serving
    batch = Batch(
        group.phase,
        group.tokens,
        group.context,
        tokens_per_request=1 + serving.drafts if group.phase != "prefill" else 1,
        decode_share=group.decode_share,
        decode_context=group.context,
        attention_ranks=serving.attention_tp,
    )
    tokens = float(group.tokens * costs.model.topology.num_ranks)
    rng = np.random.default_rng(0)
    own = shares_of_batch(shares, spread, tokens / batch.tokens_of_request, tokens, rng)
    drawn = rng.multinomial(round(tokens) * costs.model.model.topk, own).astype(np.float64)
    out = []
    for overlap in OVERLAPS:
        priced = replace(costs, serving=replace(serving, overlap=overlap))
        out.append(priced.seconds_of(batch, drawn, placement, placement.num_slots, is_mean=False))
    return out


def to_yaml(found: Fit, name: str, source: str) -> str:
    """Returns the profile of the engine that was measured, for --engine. source: where its steps are from"""
    num_steps = sum(group.num_steps for group in found.groups)
    words = (
        f"fitted on {num_steps} steps of {source}: {found.low:.3f} to {found.high:.3f} in 90 % of the resamples, with "
        f"{found.best.words()}"
    )
    profile = {"name": name, "step_factor": {"value": round(found.factor, 4), "source": words}}
    return yaml.safe_dump(profile, sort_keys=False, allow_unicode=True, width=1000)


def to_json(found: Fit) -> dict[str, Any]:
    """Returns the fit as plain JSON types."""
    return {
        "format": "moe_serve.fit",
        "step_factor": found.factor,
        "step_factor_90": [found.low, found.high],
        **asdict(found.best),
        "skew_90": list(found.skews),
        "spread_90": list(found.spreads),
        "sure": found.sure,
        "alike": [{**asdict(guess), "step_factor": factor} for guess, factor in found.alike],
        "groups": [
            {**asdict(group), "predicted_s": predicted, "error": error}
            for group, predicted, error in zip(found.groups, found.predicted, found.errors.tolist(), strict=True)
        ],
    }


def to_table(found: Fit, engine_file: Path | None, color: bool = False) -> str:
    """Returns the fit for a terminal. engine_file: the profile that was written, if any"""
    console = text_console(120, color)
    table = Table(box=None)
    for column in ("phase", "tokens/rank", "context", "steps", "measured", "by the other sizes", "error"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for group, predicted, error in zip(found.groups, found.predicted, found.errors, strict=True):
        table.add_row(
            group.phase, f"{group.tokens:,}", f"{group.context:,.0f}", f"{group.num_steps:,}",
            as_seconds(group.step_s), as_seconds(predicted), f"{error:+.1%}",
        )  # fmt: skip
    console.print(table)
    console.print()
    console.print(
        f"The engine takes {found.factor:.3f} of the modelled kernels ({found.low:.3f} to {found.high:.3f} in 90 % of "
        f"{RESAMPLES:,} resamples of the sizes), with {found.best.words()}.",
        soft_wrap=True,
    )
    console.print("In 90 % of the resamples " + _load_words(found), soft_wrap=True)
    off = np.abs(found.errors)
    console.print(f"A size that was left out is predicted within {off.max():.0%}, {off.mean():.0%} on average.")
    if found.alike:
        others = "; ".join(f"{guess.words()}: {factor:.3f}" for guess, factor in found.alike[:3])
        advice = "" if found.best.family == RECORDED else ", so give recorded loads (--trace) where you can"
        console.print(f"These steps cannot tell it from {len(found.alike)} others ({others}){advice}.", soft_wrap=True)
    if engine_file is not None:
        console.print(f"Type: --engine {engine_file} {found.best.options()}", soft_wrap=True)
    return printed(console)


def _load_words(found: Fit) -> str:
    """Returns what the resamples say of the load."""
    parts = []
    if found.best.family != RECORDED:
        parts.append(f"the skew is {found.skews[0]:g} to {found.skews[1]:g}")
    if all(group.phase == "decode" for group in found.groups):
        parts.append("steps without prompts do not show the spread of requests")
    else:
        parts.append(f"the spread of requests is {found.spreads[0]:g} to {found.spreads[1]:g}")
    of = "the overlap" if found.best.family == RECORDED else "family and overlap"
    return "; ".join([*parts, f"{of} as said in {found.sure:.0%} of all"]) + "."
