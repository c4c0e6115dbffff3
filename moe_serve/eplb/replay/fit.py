"""Fits the cost model to step times that an engine has measured: its factor, the skew of the load, and the overlap.

Steps are grouped by phase and size; a group counts with its median, so that single slow steps do little. For each skew
and overlap tried, the factor of the engine is the median of measured / modelled; the pair that errs least is taken. The
confidence is a bootstrap over the groups, and each group is predicted once by the fit to all others. A skew shows only
where the busiest rank sets the pace, so several may fit alike: the report says which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from rich.table import Table

from moe_serve.eplb.cost.kernels import Phase
from moe_serve.eplb.files.step_times import StepTime
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.replay.costs import Overlap, ProfileCosts
from moe_serve.eplb.replay.report import as_seconds, printed, text_console
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.errors import ConfigError

Floats = NDArray[np.float64]
SKEWS = (0.0, 0.3, 0.6, 0.9, 1.2)
OVERLAPS: tuple[Overlap, ...] = ("none", "two-batch", "auto")
LEAST_GROUPS = 3
SIZES_PER_DOUBLING = 4  # groups of steps by their tokens
ALIKE = 0.01  # mean errors this close say nothing about which is right
RESAMPLES = 1000


@dataclass(frozen=True)
class Group:
    """Steps of about one size. step_s: their median"""

    phase: Phase
    tokens: int
    context: float
    step_s: float
    num_steps: int


@dataclass(frozen=True)
class Fit:
    """What fits best.

    factor, low, high: of the whole step over its modelled parts, and what holds it in 90 % of the resamples
    alike:     (skew, overlap, factor) of the others that err as little
    predicted: seconds of each group by the fit to all others
    """

    groups: tuple[Group, ...]
    factor: float
    low: float
    high: float
    skew: float
    overlap: Overlap
    alike: tuple[tuple[float, Overlap, float], ...]
    predicted: tuple[float, ...]

    @property
    def errors(self) -> Floats:
        """Predicted / measured - 1 of each group, by the fit to all others."""
        return np.asarray(np.array(self.predicted) / np.array([group.step_s for group in self.groups]) - 1)


def grouped(steps: Sequence[StepTime], context: float) -> tuple[Group, ...]:
    """Returns the steps by phase and size. context: of steps that do not say it"""
    found: dict[tuple[Phase, int], list[StepTime]] = {}
    for step in steps:
        found.setdefault((step.phase, round(SIZES_PER_DOUBLING * np.log2(step.tokens))), []).append(step)
    groups = []
    for (phase, _), same in sorted(found.items()):
        held = [context if step.context is None else step.context for step in same]
        middle = [float(np.median(values)) for values in ([step.tokens for step in same], held)]
        seconds = float(np.median([step.step_s for step in same]))
        groups.append(Group(phase, round(middle[0]), middle[1], seconds, len(same)))
    return tuple(groups)


def fit(
    steps: Sequence[StepTime],
    costs: ProfileCosts,
    num_slots: int,
    rho: float,
    progress: Callable[[int, int], None] | None = None,
) -> Fit:
    """Returns the fit. costs: of the model and the machine, of an engine whose factor is 1;  rho: of the load's windows

    progress: called with (groups done, groups). Raises ConfigError for steps of fewer than LEAST_GROUPS sizes.
    """
    groups = grouped(steps, costs.serving.context)
    if len(groups) < LEAST_GROUPS:
        raise ConfigError(
            f"the steps are of {len(groups)} sizes, and a fit needs {LEAST_GROUPS}; record steps of more batch sizes"
        )
    pairs = [(skew, overlap) for skew in SKEWS for overlap in OVERLAPS]
    modelled = np.empty((len(pairs), len(groups)))
    for index, group in enumerate(groups):
        for skew_index, skew in enumerate(SKEWS):
            times = _seconds(group, costs, num_slots, skew, rho)
            modelled[skew_index * len(OVERLAPS) : (skew_index + 1) * len(OVERLAPS), index] = times
        if progress is not None:
            progress(index + 1, len(groups))
    ratios = np.log(np.array([group.step_s for group in groups]) / modelled)
    best, factor = _best(ratios)
    errors = np.abs(ratios - np.median(ratios, axis=1, keepdims=True)).mean(axis=1)
    draws = np.random.default_rng(0).integers(len(groups), size=(RESAMPLES, len(groups)))
    low, high = np.quantile([_best(ratios[:, draw])[1] for draw in draws], [0.05, 0.95])
    predicted = []
    for index in range(len(groups)):
        chosen, without = _best(np.delete(ratios, index, axis=1))
        predicted.append(float(np.exp(without) * modelled[chosen, index]))
    alike = [i for i in range(len(pairs)) if i != best and errors[i] <= errors[best] + ALIKE]
    skew, overlap = pairs[best]
    return Fit(
        groups,
        factor=float(np.exp(factor)),
        low=float(np.exp(low)),
        high=float(np.exp(high)),
        skew=skew,
        overlap=overlap,
        alike=tuple((*pairs[i], float(np.exp(np.median(ratios[i])))) for i in alike),
        predicted=tuple(predicted),
    )


def _best(ratios: Floats) -> tuple[int, float]:
    """Returns the row that varies least around its median, and that median: ratios [pairs, groups], logarithms."""
    medians = np.median(ratios, axis=1)
    best = int(np.abs(ratios - medians[:, None]).mean(axis=1).argmin())
    return best, float(medians[best])


def _seconds(group: Group, costs: ProfileCosts, num_slots: int, skew: float, rho: float) -> list[float]:
    """Returns the modelled time of a step by each of OVERLAPS, as served by a plan made from the window before."""
    model, topology = costs.model.model, costs.model.topology
    load = SyntheticLoad(
        num_windows=2,
        num_layers=model.num_moe_layers,
        num_logical=model.num_logical,
        topk=model.topk,
        num_groups=max(model.num_groups, 1),
        skew=skew,
        rho=rho,
        tokens_per_step=group.tokens * topology.num_ranks,
        steps_per_window=1,
        phase=group.phase,
    )
    before, served = synthetic_trace(load)
    placement = make_policy("greedy").plan(PlanRequest(before.tokens, topology, num_slots)).placement
    out = []
    for overlap in OVERLAPS:
        serving = replace(costs.serving, phase=group.phase, context=group.context, overlap=overlap, cache_hit=0.0)
        each = replace(costs, serving=serving)
        tokens = float(group.tokens * topology.num_ranks)
        out.append(each.step_seconds(served.tokens.astype(np.float64), placement, num_slots, tokens, group.phase))
    return out


def to_yaml(found: Fit, name: str, source: str) -> str:
    """Returns the profile of the engine that was measured, for --engine. source: where its steps are from"""
    num_steps = sum(group.num_steps for group in found.groups)
    words = (
        f"fitted on {num_steps} steps of {source}: {found.low:.3f} to {found.high:.3f} in 90 % of the resamples, with "
        f"--overlap {found.overlap} and --skew {found.skew:g}"
    )
    profile = {"name": name, "step_factor": {"value": round(found.factor, 4), "source": words}}
    return yaml.safe_dump(profile, sort_keys=False, allow_unicode=True, width=1000)


def to_json(found: Fit) -> dict[str, Any]:
    """Returns the fit as plain JSON types."""
    return {
        "format": "moe_serve.fit",
        "step_factor": found.factor,
        "step_factor_90": [found.low, found.high],
        "skew": found.skew,
        "overlap": found.overlap,
        "alike": [{"skew": skew, "overlap": overlap, "step_factor": f} for skew, overlap, f in found.alike],
        "groups": [
            {**vars(group), "predicted_s": predicted, "error": error}
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
        f"{RESAMPLES:,} resamples of the sizes), with a load of skew {found.skew:g} and overlap {found.overlap}.",
        soft_wrap=True,
    )
    off = np.abs(found.errors)
    console.print(f"A size that was left out is predicted within {off.max():.0%}, {off.mean():.0%} on average.")
    if found.alike:
        others = "; ".join(f"skew {skew:g}, {overlap}: {factor:.3f}" for skew, overlap, factor in found.alike[:5])
        console.print(
            f"These steps cannot tell it from {len(found.alike)} other pairs of skew and overlap ({others}), so give "
            "recorded loads (--trace) where you can.",
            soft_wrap=True,
        )
    if engine_file is not None:
        console.print(f"Type: --engine {engine_file} --skew {found.skew:g} --overlap {found.overlap}", soft_wrap=True)
    return printed(console)
