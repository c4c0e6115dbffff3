"""The settings of a user, and the check that an engine's extension point is still the one an adapter was written for.

Settings are environment variables, since engines start their own worker processes.
"""

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_serve.errors import ConfigError

POLICY = "MOE_SERVE_EPLB"
START = "MOE_SERVE_EPLB_PLACEMENT"
RANK_MOVES = "MOE_SERVE_EPLB_MAX_MOVES_PER_RANK"
MIN_GAIN = "MOE_SERVE_EPLB_MIN_GAIN"
RECORD = "MOE_SERVE_EPLB_RECORD"
WINDOW = "MOE_SERVE_EPLB_WINDOW"
# Every rank of an engine plans for itself and must arrive at the same plan, so policies that stop by the clock are out.
POLICIES = ("incremental", "refined", "greedy")


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of a user.

    policy:         one of POLICIES
    start:          placement file that planning starts from, or None
    max_rank_moves: experts that one rank may receive in a layer of a rebalance; None: as `default_rank_moves` says
    min_gain:       share of a layer's time that a plan must save for each expert that the busiest rank receives
    record:         .jsonl trace that the load is written to, or None
    window_steps:   steps of the load that an engine hands over, where it does not say them
    """

    policy: str
    start: Path | None = None
    max_rank_moves: int | None = None
    min_gain: float = 0.01
    record: Path | None = None
    window_steps: int = 1000  # vLLM's window_size


def read_settings(environ: Mapping[str, str] = os.environ) -> AdapterSettings | None:
    """Returns what the environment asks for; None = nothing, the engine keeps its own planner.

    Raises ConfigError for a policy that is not known, for another setting without a policy, and for a limit of moves
    that is no whole number or that the policy would ignore.
    """
    policy = environ.get(POLICY, "")
    start, most, gain, record, window = (
        environ.get(name, "") for name in (START, RANK_MOVES, MIN_GAIN, RECORD, WINDOW)
    )
    if not policy:
        for name in (START, RANK_MOVES, MIN_GAIN, RECORD, WINDOW):
            if environ.get(name):
                raise ConfigError(f"{name} is set but {POLICY} is not; set {POLICY}=incremental too, or unset {name}")
        return None
    if policy not in POLICIES:
        raise ConfigError(f"{POLICY} is {policy!r}; use one of {', '.join(POLICIES)}, or unset it")
    for name, value in ((RANK_MOVES, most), (WINDOW, window)):
        if value and not (value.isascii() and value.isdigit() and int(value) >= 1):
            raise ConfigError(f"{name} is {value!r}; give a whole number of at least 1, or unset it")
    if record and not record.endswith(".jsonl"):
        raise ConfigError(f"{RECORD} is {record!r}; give a file that ends in .jsonl, or unset it")
    if most and policy != "incremental":
        raise ConfigError(f"policy {policy} plans anew and ignores {RANK_MOVES}; set {POLICY}=incremental, or unset it")
    default = AdapterSettings(policy)
    return AdapterSettings(
        policy,
        Path(start) if start else None,
        int(most) if most else None,
        _share(gain) if gain else default.min_gain,
        Path(record) if record else None,
        int(window) if window else default.window_steps,
    )


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise ConfigError(f"{MIN_GAIN} is {text!r}; give a share from 0 to below 1, such as 0.01, or unset it")
    return share


def check_parameters(theirs: Callable[..., Any], ours: Callable[..., Any], engine: str) -> None:
    """Raises ConfigError where a function of an engine has other parameters than ours that takes its place.

    engine: name and version that ours was written for
    """
    found, known = (tuple(inspect.signature(function).parameters) for function in (theirs, ours))
    if found != known:
        raise ConfigError(
            f"{theirs.__qualname__} takes {', '.join(found)}; the adapter knows {', '.join(known)} ({engine}). "
            "Unset MOE_SERVE_EPLB, or install a version of the engine or of moe_serve that fits"
        )
