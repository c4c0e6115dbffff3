"""The choice of what is replayed, by name."""

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlacementPolicy
from moe_serve.eplb.rebalance.rebalancer import Rebalancer
from moe_serve.eplb.replay.gated_run import GatedRun
from moe_serve.eplb.replay.live_run import LIVE, LiveRun
from moe_serve.eplb.replay.run import PlannedRun, Run
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.errors import ConfigError

GATE = "gate:"


def make_run(policy: str | PlacementPolicy, start: Placement, settings: ReplaySettings) -> Run:
    """Returns the run of a policy.

    policy: a name of `make_policy`, "gate:<name>" behind the gate, "live" for what the server's own settings do, or a
            policy itself
    Raises ConfigError for an unknown name, a gated run of series or without `settings.gate_cost`, a live run without
    `settings.server`.
    """
    if not isinstance(policy, str):
        return PlannedRun(policy.name, policy, start, settings)
    if policy == LIVE:
        if settings.server is None:
            raise ConfigError("policy 'live' is what a server's own balancer does; name its file with --like-server")
        return LiveRun(start, settings.server, settings.latency_steps)
    chosen = make_policy(policy.removeprefix(GATE))
    if chosen.name == "series" and settings.history < 2:
        raise ConfigError("policy 'series' plans for several windows; give --history 2 or more")
    if not policy.startswith(GATE):
        return PlannedRun(chosen.name, chosen, start, settings)
    if chosen.name == "series":
        raise ConfigError(
            "policy 'series' plans for several windows, and the gate plans for one load; use series without the gate, "
            f"or {GATE}incremental"
        )
    if settings.gate_cost is None:
        raise ConfigError(
            f"policy {policy!r} weighs gains against costs, which needs predicted times; name --model and --hardware"
        )
    rebalancer = Rebalancer(start, settings.topology, settings.gate, settings.gate_cost)
    return GatedRun(f"{GATE}{chosen.name}", chosen, rebalancer, settings.latency_steps)
