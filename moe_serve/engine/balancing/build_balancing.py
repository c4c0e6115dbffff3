"""Puts together one rank's part in balancing, as `eplb.mode` says."""

from collections.abc import Callable
from typing import Any

from moe_serve.config import ServeConfig
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.balancing.balance_reports import BalanceReports
from moe_serve.engine.balancing.balancer import Balancer, Reporter, balancer_settings
from moe_serve.engine.balancing.balancing import Balancing
from moe_serve.engine.balancing.contained_leader import ContainedLeader
from moe_serve.engine.balancing.leader import Leader
from moe_serve.engine.balancing.split_choice import SplitChoice
from moe_serve.engine.recovery.recovery import Rank, Recovery
from moe_serve.engine.served_model import ServedModel
from moe_serve.ep.expert_carrier import make_carrier
from moe_serve.ep.weight_mover import MoveSettings, WeightMover
from moe_serve.eplb.planning.process import PlannerProcess
from moe_serve.eplb.rebalance.make import SystemFacts


def make_balancing(
    config: ServeConfig, own: Rank, group: EpGroup, served: ServedModel, recovery: Recovery
) -> Balancing:
    """Returns what a rank does about where experts live. Collective where they may move."""
    eplb, placement = config.eplb, served.placement

    def make_leader(step: int) -> Leader:
        return _make_leader(config, own, group, served, recovery, step)

    balancing = Balancing(
        rank=own.rank,
        launch_id=own.launch_id,
        served=served,
        recovery=recovery,
        mover=_make_mover(config, group, served) if eplb.mode == "dynamic" else None,
        split_choice=SplitChoice(eplb.split, has_replicas=placement.num_slots > placement.num_logical),
        make_leader=None if eplb.mode == "off" else make_leader,
        send=own.mailbox.send,
        on_event=_event_writer(served),
    )
    served.windows.listeners.append(balancing.window_closed)
    return balancing


def _make_mover(config: ServeConfig, group: EpGroup, served: ServedModel) -> WeightMover:
    eplb, stores = config.eplb, served.decoder.experts
    carrier = make_carrier(group, stores[0].slot_bytes, eplb.staging_slots)
    return WeightMover(
        stores, group.rank, carrier, MoveSettings(eplb.staging_slots, eplb.move_step_share, eplb.move_deadline_s)
    )


def _make_leader(
    config: ServeConfig, own: Rank, group: EpGroup, served: ServedModel, recovery: Recovery, step: int
) -> Leader:
    """Returns the leader's part, for the placement in use at this step."""
    reports = BalanceReports(own.rank, own.launch_id, config.eplb.mode)
    if config.eplb.mode == "static":
        return Reporter(served.placement, reports)
    facts = SystemFacts.of_model(
        hidden=served.spec.hidden,
        moe_intermediate=served.spec.moe_intermediate,
        bytes_per_expert=served.decoder.experts[0].slot_bytes,
        device=served.device.type,
        num_nodes=group.num_nodes,
        survives_loss=recovery.why_end is None,
    )
    balancer = Balancer(
        served.placement,
        balancer_settings(config.eplb),
        facts,
        PlannerProcess(config.eplb.policy, config.eplb.plan_deadline_s),
        reports,
        on_event=_event_writer(served),
        step=step,
    )
    return ContainedLeader(balancer, reports, lambda: served.placement)


def _event_writer(served: ServedModel) -> Callable[..., None]:
    return _unwritten if served.trace is None else served.trace.event


def _unwritten(name: str, step: int, **fields: Any) -> None:
    """Takes an event where no trace is written."""
