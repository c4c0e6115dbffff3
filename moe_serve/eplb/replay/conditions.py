"""Describes what a replay was run on, and what its empty columns need."""

import numpy as np

from moe_serve.eplb.load import LoadTrace
from moe_serve.eplb.policies.policy import PlanRules
from moe_serve.eplb.replay.result import PolicyResult
from moe_serve.eplb.replay.settings import ReplaySettings


def conditions(trace: LoadTrace, settings: ReplaySettings, num_windows: int) -> dict[str, str]:
    """Returns what was replayed, in words, in the order to print."""
    topology = settings.topology
    words = {
        "trace": trace.source or "in memory",
        "model": f"{len(trace.moe_layer_ids)} MoE layers x {trace.num_logical} experts"
        + (f", top {trace.topk}" if trace.topk else ""),
        "cluster": f"{topology.num_ranks} ranks on {topology.num_nodes} node{'s' * (topology.num_nodes > 1)}, "
        f"{settings.num_slots} slots ({settings.num_slots // topology.num_ranks} a rank, "
        f"{settings.num_slots - trace.num_logical} redundant)",
        "windows": f"{num_windows}, scored from the {_ordinal(settings.history + 1)} on",
        "plans": f"from the last {settings.history} window{'s' * (settings.history > 1)}, every "
        + (f"{settings.interval} windows" if settings.interval > 1 else "window"),
    }
    if settings.rules.off_home < 1:
        words["hierarchy"] = f"at most {settings.rules.off_home:.0%} of the load outside its home node"
    limits = _limits(settings.rules)
    if limits:
        words["moves"] = limits
    if settings.split != "window":
        chosen = settings.split == "exact" and any(settings.even_steps.phases)
        words["split"] = f"{settings.split}, every step" + (", even where the server chose so" if chosen else "")
    return words


def _limits(rules: PlanRules) -> str:
    """Returns the limits of moves in words; policies that plan anew do not keep to them."""
    limits = (
        (rules.max_moves, "at most {} a layer"),
        (rules.max_total_moves, "at most {} in all layers"),
        (rules.max_rank_moves, "at most {} to a rank of a layer"),
        (rules.min_gain, "each for at least {:g} of the mean rank load"),
    )
    return ", ".join(words.format(value) for value, words in limits if value is not None)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


def missing(floor: PolicyResult, settings: ReplaySettings) -> dict[str, str]:
    """Returns what each empty column needs."""
    out: dict[str, str] = {}
    if not np.isfinite(floor.off_node).all():
        out["off-node"] = "tokens by source rank (by_source) in the trace"
    if not np.isfinite(floor.activated).all():
        out["active experts"] = "single steps, or activations, in the trace"
    if settings.costs is None:
        out["bytes"] = out["stall"] = out["step time"] = out["tokens/s"] = "--model and --hardware"
    elif not np.isfinite(floor.step_s).any():
        out["step time"] = out["tokens/s"] = "windows with steps in the trace"
    return out
