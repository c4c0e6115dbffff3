"""Reads published.yaml, and asks the cost model and `moe-serve simulate` what they say of its figures.

`python -m tests.eplb.published` prints the tables of docs/cost-model.md.
"""

import json
import math
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import typer
import yaml
from typer.testing import CliRunner

from moe_serve.eplb.cost.model import CostModel, expected_places
from moe_serve.eplb.cost.profile_files import HardwareProfile, load_engine, load_hardware, load_model_profile
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.replay.costs import ProfileCosts, Serving
from moe_serve.eplb.replay.synthetic import GROUP_SIGMA, SyntheticLoad, popularity, synthetic_trace
from moe_serve.launcher.cli.app import add_balancer_commands
from moe_serve.topology import Topology

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


V3, H800 = load_model_profile("DeepSeek-V3"), load_hardware("H800")


def figures(kind: str, use: str) -> list[dict[str, Any]]:
    """Returns the figures of one list of the table: kind "serving", "low_latency", ..., use as the table says."""
    return [figure for figure in TABLE[kind] if figure["use"] == use]


def arguments(figure: dict[str, Any]) -> list[str]:
    """Returns the options of `moe-serve simulate` for the conditions of a serving figure."""
    given = ["model", "hardware", "engine", "nodes", "ranks_per_node", "slots", "phase", "tokens_per_rank", "context",
             "overlap", "utilisation", "cache_hit", "drafts", "acceptance", "answer", "attention_tp"]  # fmt: skip
    out = ["simulate", "--json", "--jobs", "1", "--policy", "greedy", "--windows", "3", "--window", "1"]
    for name in given:
        if name in figure:
            out += [f"--{name.replace('_', '-')}", str(figure[name])]
    if figure.get("balanced"):
        return [*out, "--load", "uniform"]
    random_tokens = figure.get("prompts") == "random tokens"
    sigma = log_popularity_sigma(random_tokens)
    if load_model_profile(figure["model"]).num_groups == 1:  # as uneven, but neighbours have nothing in common
        family = "lognormal"
    else:
        family, sigma = "group", math.sqrt(sigma**2 - GROUP_SIGMA**2)
    spread = 0 if random_tokens else TABLE["load"]["spread"]
    return [*out, "--load", family, "--skew", f"{sigma:.3f}", "--rho", "1", "--request-spread", str(spread)]


def log_popularity_sigma(random_tokens: bool) -> float:
    """Returns the standard deviation of the log popularity of experts, groups included; of text, or of random tokens.

    A lognormal of deviation s has the Gini coefficient 2 F(s / sqrt 2) - 1, with F of the normal distribution.
    """
    sigma = math.hypot(TABLE["load"]["skew"], GROUP_SIGMA)
    if not random_tokens:
        return sigma
    normal, known = NormalDist(), TABLE["load"]["gini"]
    gini = (2 * normal.cdf(sigma / math.sqrt(2)) - 1) * sum(known["random_tokens"]) / 2 / known["text"]
    return math.sqrt(2) * normal.inv_cdf((1 + gini) / 2)


def rate(figure: dict[str, Any]) -> float:
    """Returns the tokens/s that `moe-serve simulate` prints for a figure, of a node or GPU as the figure has it.

    Published runs move no experts, so the pauses of moves, which the command counts, are taken out again.
    """
    served = "perfect" if figure.get("balanced") else "greedy" if figure.get("eplb", True) else "do nothing"
    row = _rows(arguments(figure))[served]
    steps_s = row["step_s"] * row["windows"] / figure.get("utilisation", 1)
    per_rank = row["tokens_per_s"] * (steps_s + row["stall_s"]) / steps_s / row["ranks"]
    return float(per_rank * (1 if figure.get("per") == "GPU" else 8))


def overlap_gain(tokens_per_rank: int) -> float:
    """Returns what `moe-serve simulate` gains by two-batch overlap at the conditions of sglang-decode."""
    two, one = (
        {**_serving("sglang-decode"), "tokens_per_rank": tokens_per_rank, "overlap": name}
        for name in ("two-batch", "none")
    )
    return rate(two) / rate(one) - 1


def eplb_gain(gain: dict[str, Any], seed: int = 0) -> float:
    """Returns the time of a step with experts in order / with a plan, as `moe-serve simulate` prints them.

    seed: of the draw of the load; the numbers of the load were fitted on that of 0
    """
    figure = _serving(gain["id"])
    if "on_every_rank" in gain:
        return _gain_of_experts_on_every_rank(figure, gain["on_every_rank"], seed)
    planned = {**figure, "slots": figure["slots"] + gain.get("redundant", 0)}
    before, after = (_rows([*arguments(each), "--seed", str(seed)]) for each in (figure, planned))
    return float(before["do nothing"]["step_s"] / after["greedy"]["step_s"])


def _gain_of_experts_on_every_rank(figure: dict[str, Any], number: int, seed: int) -> float:
    """Returns the same of a prefill of random tokens where each rank holds the most popular experts.

    No policy of `simulate` plans so; the load and the prices are those of the command. The other experts, and as many
    replicas of them as fill the ranks, are where "greedy" puts them.
    """
    profile, hardware = load_model_profile(figure["model"]), load_hardware(figure["hardware"])
    topology = Topology(figure["nodes"], hardware.ranks_per_node)
    ranks, layers, tokens = topology.num_ranks, profile.num_moe_layers, figure["tokens_per_rank"] * topology.num_ranks
    serving = Serving("prefill", figure["context"], figure["overlap"])
    costs = ProfileCosts(CostModel(hardware, profile, topology, load_engine(figure["engine"])), serving)
    sizes = {"num_layers": layers, "num_logical": profile.num_logical, "topk": profile.topk, "tokens_per_step": tokens}
    load = SyntheticLoad(
        "lognormal", 2, skew=log_popularity_sigma(True), rho=1.0, steps_per_window=1, seed=seed, **sizes
    )
    before, served = (record.tokens for record in synthetic_trace(load))
    order = np.argsort(-before, axis=1)
    hot, rest = order[:, :number], order[:, number:]
    request = PlanRequest(np.take_along_axis(before, rest, axis=1), topology, profile.num_logical)
    table = make_policy("greedy").plan(request).placement.physical_to_logical
    others = np.take_along_axis(rest, table, axis=1).reshape(layers, ranks, -1)
    everywhere = np.concatenate([np.repeat(hot[:, None], ranks, axis=1), others], axis=2).reshape(layers, -1)
    placements = (
        Placement.trivial(layers, profile.num_logical, ranks),
        Placement(everywhere, profile.num_logical, ranks),
    )
    in_order, planned = (
        costs.step_seconds(served.astype(np.float64), each, each.num_slots, tokens, "prefill") for each in placements
    )
    return float(in_order / planned)


def imbalance(figure: dict[str, Any]) -> float:
    """Returns the busiest rank's load / the mean one - 1 with experts in order, by the assumed load."""
    load = SyntheticLoad("group", 1, 500, figure["experts"], num_groups=figure["groups"], skew=TABLE["load"]["skew"])
    by_rank = next(popularity(load)).reshape(500, figure["ranks"], -1).sum(axis=2)
    return float((by_rank.max(axis=1) * figure["ranks"]).mean() - 1)


def error(figure: dict[str, Any]) -> float:
    """Returns predicted tokens/s / published ones - 1."""
    return rate(figure) / figure["tokens_per_s"] - 1


def kernel_errors(use: str, hardware: HardwareProfile = H800) -> dict[str, float]:
    """Returns predicted time / measured time - 1 of the figures of single kernels with this use."""
    out = {}
    for figure in figures("low_latency", use):
        costs, rows = _cluster(figure["ranks"], hardware), np.full(figure["ranks"], 128.0 * V3.topk)
        name = f"DeepEP low latency, EP{figure['ranks']}"
        out[f"{name}, dispatch"] = float(costs.dispatch(rows, "low_latency")) / float(figure["dispatch_s"]) - 1
        out[f"{name}, combine"] = float(costs.combine(rows, "low_latency")) / float(figure["combine_s"]) - 1
    for figure in figures("normal", use):
        costs, rows = _cluster(figure["ranks"], hardware), np.full(figure["ranks"], 4096.0 * V3.topk)
        # DeepEP counts the bytes of every copy that a rank sends to a node, its own included.
        sent = 4096 * expected_places(figure["ranks"] // 8, V3.num_logical, V3.topk, V3.num_groups, V3.topk_groups)
        name = f"DeepEP normal, EP{figure['ranks']}"
        for part, seconds, value_bytes in (
            ("dispatch", costs.dispatch(rows, "normal"), V3.dispatch_bytes),
            ("combine", costs.combine(rows, "normal"), V3.combine_bytes),
        ):
            out[f"{name}, {part}"] = float(figure[part]) * float(seconds) / (sent * V3.hidden * value_bytes) - 1
    for figure in figures("grouped_gemm", use):
        groups, rows_each, n, k = (figure[key] for key in ("groups", "rows", "n", "k"))
        seconds = _cluster(8, hardware).kernels.grouped_gemm(np.full(groups, float(rows_each)), n, k)
        name = f"DeepGEMM, {groups} x {rows_each} rows, n {n}"
        out[name] = float(seconds) * float(figure["flops"]) / (2.0 * groups * rows_each * n * k) - 1
    return out


def tables() -> str:
    """Returns the tables of docs/cost-model.md: of serving figures, overlap, EPLB, and kernels."""
    lines = ["| figure | conditions | published | simulate | error |", "|---|---|---|---|---|"]
    for use in ("fitted", "held out"):
        for figure in figures("serving", use):
            what = f"{figure['id']}" + (f" (fits {figure['fits']})" if use == "fitted" else "")
            unit = "/GPU" if figure.get("per") == "GPU" else "/node"
            lines.append(
                f"| {what} | {figure['words']} | {figure['tokens_per_s']:,}{unit} | {rate(figure):,.0f} | "
                f"{_percent(error(figure))} |"
            )
    lines += ["", "| tokens a GPU | published gain by overlap | simulate |", "|---|---|---|"]
    for figure in figures("overlap_gain", "held out"):
        tokens = figure["tokens_per_rank"]
        lines.append(f"| {tokens} | {_percent(figure['gain'])} | {_percent(overlap_gain(tokens))} |")
    lines += ["", "| gain by EPLB | published | simulate |", "|---|---|---|"]
    for figure in TABLE["eplb_gain"]:
        what = f"{figure['id']}" + (f" (fits {figure['fits']})" if figure["use"] == "fitted" else "")
        what += f", {figure['redundant']} redundant experts" if "redundant" in figure else ""
        what += f", the top {figure['on_every_rank']} on every rank" if "on_every_rank" in figure else ""
        lines.append(f"| {what} | {figure['gain']:.2f} | {eplb_gain(figure):.2f} |")
    lines += ["", "| busiest rank over the mean one − 1 | published | assumed load |", "|---|---|---|"]
    for figure in TABLE["imbalance"]:
        lines.append(f"| {figure['ranks']} ranks, experts in order | {figure['value']:.2f} | {imbalance(figure):.2f} |")
    lines += ["", "| kernel, held out | error of its time |", "|---|---|"]
    lines += [f"| {name} | {_percent(off)} |" for name, off in kernel_errors("held out").items()]
    return "\n".join(lines)


def _percent(value: float) -> str:
    return f"{round(100 * value) or 0:+d} %".replace("-", "−").replace("+0 ", "0 ")


def _cluster(num_ranks: int, hardware: HardwareProfile) -> CostModel:
    return CostModel(hardware, V3, Topology(max(1, num_ranks // 8), min(num_ranks, 8)))


def _serving(figure_id: str) -> dict[str, Any]:
    return next(figure for figure in TABLE["serving"] if figure["id"] == figure_id)


def _rows(given: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the lines of a simulation by policy."""
    return {row["policy"]: row for row in json.loads(_output(tuple(given)))["rows"]}


@lru_cache(maxsize=64)
def _output(given: tuple[str, ...]) -> str:
    app = typer.Typer()
    add_balancer_commands(app)
    result = CliRunner().invoke(app, list(given), env={"TERMINAL_WIDTH": "160", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    return result.stdout


if __name__ == "__main__":
    print(tables())
