"""The options of every plan, shared by `moe-serve plan` and `moe-serve replay`: what it keeps to, where it starts."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import moe_serve.launcher.cli.balancer_options as opt
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology

if TYPE_CHECKING:
    from moe_serve.eplb.load import LoadTrace
    from moe_serve.eplb.placement import Placement
    from moe_serve.eplb.policies.policy import PlanRules

# Which limits a policy keeps to; those that are not here plan anew.
LIMITS_OF = {
    "incremental": ("max_moves", "max_moves_total", "max_moves_per_rank", "min_gain"),
    "series": ("max_moves", "max_moves_total", "max_moves_per_rank", "min_gain"),
    "milp": ("max_moves", "max_moves_per_rank"),
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What every plan keeps to."""

    groups: Annotated[int | None, typer.Option(min=1, help="Expert groups of the router (DeepSeek-V3: 8).")] = None
    off_home: opt.OffHome = 1.0
    max_moves: Annotated[
        int | None,
        typer.Option(min=0, help="Slots per layer a plan may move (incremental, series, milp).", show_default=False),
    ] = None
    max_moves_total: Annotated[
        int | None,
        typer.Option(min=0, help="Slots of all layers together a plan may move, where they gain most (incremental, "
                     "series).", show_default=False),
    ] = None  # fmt: skip
    max_moves_per_rank: Annotated[
        int | None,
        typer.Option(min=0, help="Experts that one rank may receive in a layer (incremental, series, milp).",
                     show_default=False),
    ] = None  # fmt: skip
    min_gain: Annotated[
        float | None,
        typer.Option(min=0, help="A move evens its layer by at least this share of the mean rank load (incremental, "
                     "series).", show_default="0.0003"),
    ] = None  # fmt: skip
    current: Annotated[
        Path | None, typer.Option(help="Placement in use at the start.", show_default="experts in order")
    ] = None
    seed: opt.Seed = 0

    def check_limits(self, policy: str) -> None:
        """Raises ConfigError where a limit is given that one plan of the policy does not keep to."""
        from moe_serve.eplb.policies.make import POLICIES

        if policy not in POLICIES:
            return  # `make_policy` names those that there are
        kept = LIMITS_OF.get(policy, ())
        given = [name for name in LIMITS_OF["incremental"] if getattr(self, name) is not None]
        wrong = _words(name for name in given if name not in kept)
        if wrong and not kept:
            raise ConfigError(f"policy {policy} plans anew, and {wrong} would have no effect; use -p incremental")
        if wrong:
            raise ConfigError(f"policy {policy} does not know these limits; drop {wrong}, or use -p incremental")
        counted = _words(name for name in given if name != "min_gain")
        if counted and self.current is None:
            raise ConfigError(
                f"{counted} counts moves from a placement in use; give it with --current, or drop {counted}"
            )

    def rules(self) -> "PlanRules":
        """Returns the fields that every request shares."""
        from moe_serve.eplb.policies.policy import PlanRules

        return PlanRules(
            num_groups=self.groups,
            off_home=self.off_home,
            max_moves=self.max_moves,
            max_total_moves=self.max_moves_total,
            max_rank_moves=self.max_moves_per_rank,
            min_gain=self.min_gain,
            seed=self.seed,
        )

    def read_current(self, topology: Topology, load: "LoadTrace") -> "Placement | None":
        """Returns the placement of --current, checked against the trace and the cluster."""
        if self.current is None:
            return None
        from moe_serve.eplb.files.placements import read_placement
        from moe_serve.eplb.planner import plan_counts

        return read_placement(
            self.current, topology.num_ranks, load.num_logical, load.moe_layer_ids, plan_counts=plan_counts
        )


def _words(names: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)
