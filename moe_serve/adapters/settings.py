"""What a user of another engine sets: environment variables, since engines start their own worker processes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_serve.errors import ConfigError

POLICY = "MOE_SERVE_EPLB"
START = "MOE_SERVE_EPLB_PLACEMENT"
# Every rank of an engine plans for itself and must arrive at the same plan, so policies that stop by the clock are out.
POLICIES = ("incremental", "refined", "greedy")


@dataclass(frozen=True)
class AdapterSettings:
    """policy: one of POLICIES;  start: placement file that planning starts from, or None"""

    policy: str
    start: Path | None = None


def read_settings(environ: Mapping[str, str] = os.environ) -> AdapterSettings | None:
    """Returns what the environment asks for; None = nothing, the engine keeps its own planner.

    Raises ConfigError for a policy that is not known, or a placement file without a policy.
    """
    policy, start = environ.get(POLICY, ""), environ.get(START, "")
    if not policy:
        if start:
            raise ConfigError(f"{START} is set but {POLICY} is not; set {POLICY}=incremental too, or unset {START}")
        return None
    if policy not in POLICIES:
        raise ConfigError(f"{POLICY} is {policy!r}; use one of {', '.join(POLICIES)}, or unset it")
    return AdapterSettings(policy, Path(start) if start else None)
