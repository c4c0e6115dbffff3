"""The settings of a user, and the check that an engine's extension point is still the one an adapter was written for.

Settings are environment variables, since engines start their own worker processes.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_serve.errors import ConfigError

POLICY = "MOE_SERVE_EPLB"
START = "MOE_SERVE_EPLB_PLACEMENT"
RANK_MOVES = "MOE_SERVE_EPLB_MAX_MOVES_PER_RANK"
# Every rank of an engine plans for itself and must arrive at the same plan, so policies that stop by the clock are out.
POLICIES = ("incremental", "refined", "greedy")


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of a user.

    policy:         one of POLICIES
    start:          placement file that planning starts from, or None
    max_rank_moves: experts that one rank may receive in a layer of a rebalance, or None
    """

    policy: str
    start: Path | None = None
    max_rank_moves: int | None = None


def read_settings(environ: Mapping[str, str] = os.environ) -> AdapterSettings | None:
    """Returns what the environment asks for; None = nothing, the engine keeps its own planner.

    Raises ConfigError for a policy that is not known, for another setting without a policy, and for a limit of moves
    that is no whole number or that the policy would ignore.
    """
    policy, start, most = (environ.get(name, "") for name in (POLICY, START, RANK_MOVES))
    if not policy:
        for name, value in ((START, start), (RANK_MOVES, most)):
            if value:
                raise ConfigError(f"{name} is set but {POLICY} is not; set {POLICY}=incremental too, or unset {name}")
        return None
    if policy not in POLICIES:
        raise ConfigError(f"{POLICY} is {policy!r}; use one of {', '.join(POLICIES)}, or unset it")
    if most and not (most.isascii() and most.isdigit() and int(most) >= 1):
        raise ConfigError(f"{RANK_MOVES} is {most!r}; give a whole number of at least 1, or unset it")
    if most and policy != "incremental":
        raise ConfigError(f"policy {policy} plans anew and ignores {RANK_MOVES}; set {POLICY}=incremental, or unset it")
    return AdapterSettings(policy, Path(start) if start else None, int(most) if most else None)


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
