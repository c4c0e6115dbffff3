"""Moves experts while the engine serves: each rank's part, between steps.

    leader      its balancer decides on a round (balancer.py), so it has a message              RankState.has_message
    all ranks   hear it in the next step, before the forward                           MovePlan.message_from
    all ranks   carry their part of it after each step, a little at a time             ep/weight_mover.py
    all ranks   show that their experts are staged and checked                         RankState.staged
    all ranks   serve with the round from the same step on                             MovePlan.activate
    or          end it without effect, because one of them cancels it                 RankState.fault, MovePlan.cancel

The leader is the lowest rank that takes part. Only the step plan decides what happens in a step, so that all ranks do
the same. A plan that is voided afterwards keeps its activation. A new group ends the running round, and its leader
begins with the experts that are left.

The leader also reports the load to the front end. A mistake of the balancer ends the balancing, not the serving.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec

from moe_serve.config import ServeConfig
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.balancing.balancer import Balancer, BalanceReports
from moe_serve.engine.balancing.split_choice import SplitChoice
from moe_serve.engine.model.served_model import ServedModel
from moe_serve.engine.protocol.messages import Answer, BalanceReport, Message, Rebalance, SetPlacement
from moe_serve.engine.recovery.recovery import Rank, Recovery
from moe_serve.engine.step.broadcast import broadcast
from moe_serve.engine.step.plan import MOVE_FAULTS, PHASES, MoveCancelled, StepPlan
from moe_serve.ep.weight_mover import Mover, MoveSettings, NamedExperts, WeightMover, make_carrier
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.migration.moves import MigrationRound, SlotMove
from moe_serve.eplb.planner_process import PlannerProcess
from moe_serve.eplb.rebalance.events import StartRound
from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts, planned_time
from moe_serve.errors import PlacementError
from moe_serve.log import get_logger

log = get_logger(__name__)
T = TypeVar("T")
_FAULT_NUMBERS = {"checksum": 1, "late": 2, "unreadable": 3}  # 1 + index into MOVE_FAULTS
assert len(_FAULT_NUMBERS) == len(MOVE_FAULTS)
_STATIC = "eplb.mode is static, so experts stay where they are; start the server with eplb.mode: dynamic"


@dataclass(frozen=True)
class _Running:
    """The round that all ranks carry. started_s: time at which this rank heard of it"""

    version: int
    round: MigrationRound
    started_s: float


class Balancing:
    """One rank's part in deciding where experts live and in moving them.

    mode:          eplb.mode; static: the leader only reports the load; off: nobody leads
    mover:         None where experts never move (mode static, off)
    make_balancer: returns the balancer of mode dynamic from a step on, for the placement in use; called where this
                   rank begins to lead
    split_choice:  whether the exact split pays; asked on the leader
    send:          sends a message to the front end;  on_event: writes (name, step, **fields) to the trace
    balancer:      of the leader in mode dynamic, until its first mistake;  alarm: that mistake, "" before it
    """

    def __init__(
        self,
        rank: int,
        launch_id: int,
        served: ServedModel,
        recovery: Recovery,
        mode: Literal["off", "static", "dynamic"],
        mover: Mover | None,
        split_choice: SplitChoice,
        make_balancer: Callable[[int, BalanceReports], Balancer],
        send: Callable[[Message], None],
        on_event: Callable[..., None],
    ):
        self._rank, self._launch_id = rank, launch_id
        self._served, self._recovery, self.mover = served, recovery, mover
        self._mode: Literal["off", "static", "dynamic"] = mode
        self.split_choice = split_choice
        self.make_balancer = make_balancer
        self._send, self._on_event = send, on_event
        self._reports: BalanceReports | None = None  # where this rank leads
        self.balancer: Balancer | None = None
        self.alarm = ""
        self._is_lowest = False  # of the ranks that take part
        self._to_tell: StartRound | None = None  # the round that this rank has announced for this step
        self._running: _Running | None = None
        self._even_phases = -1  # as the trace knows them; -1: it knows nothing yet
        self._lead(0)

    # --- this rank's state before a step ------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self._reports is not None

    @property
    def has_work(self) -> bool:
        """Whether steps must go on although no request runs."""
        return self._running is not None or bool(self._ask(lambda balancer: balancer.has_work))

    def announce(self) -> int:
        """Returns 1 where this rank will broadcast a round in the coming step, and keeps that round for it.

        Nothing is announced to a new group: the leader first has to hear who is left (`begin_step`).
        """
        self._to_tell = None
        if self._running is None and not self._recovery.regrouped:
            self._to_tell = self._ask(lambda balancer: balancer.next_round())
        return int(self._to_tell is not None)

    @property
    def staged(self) -> int:
        return 0 if self.mover is None else self.mover.staged

    @property
    def fault(self) -> tuple[int, int]:
        """The fault for which this rank cancels the running round, and the row of the layer, as in RankState."""
        fault = None if self.mover is None else self.mover.fault
        return (0, 0) if fault is None else (_FAULT_NUMBERS[fault.reason], fault.layer_row)

    @property
    def even_phases(self) -> int:
        return self.split_choice.even_phases

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Carries out the plan's part about experts, before the forward. Collective where it names a broadcast root.

        Raises PeerError when a peer is missing.
        """
        moves = plan.moves
        if self._is_lowest and self._even_phases != self.split_choice.even_phases:
            self._note_split(plan.step)
        if self._activates(moves.activate):
            self._activate(plan.step)
        if plan.regrouped:
            self._end_round()
        elif moves.cancel is not None:
            self._cancel(plan.step, moves.cancel)
        if moves.placement_from is not None:
            self._tell_placement(moves.placement_from)
        self._recovery.reload_lost_experts(plan)
        if plan.regrouped:
            self.split_choice.placement_changed()
            self._even_phases = -1
            self._lead(plan.step)
            self._ask(lambda balancer: balancer.group_changed(plan.step, self._served.placement))
        if moves.message_from is not None:
            self._hear_round(moves.message_from)

    def end_step(self, plan: StepPlan, step_s: float) -> None:
        """Carries a part of the running round, and lets the leader think. step_s: of this step, 0 without a forward"""
        if self.mover is not None:
            self.mover.advance(step_s if plan.runs_forward else 0.0)
        if self._is_lowest and plan.runs_forward:
            self.split_choice.observe(plan, step_s)
        self._ask(lambda balancer: balancer.poll(plan.step + 1))
        report = self._report(plan.step + 1)
        if report is not None:
            self._send(msgspec.structs.replace(report, splits=self.split_choice.describe()))

    def window_closed(self, record: LoadRecord) -> None:
        """Takes a final load record, on the leader."""
        if self._reports is not None:
            self._reports.window_closed(record, self._served.placement)
        self._ask(lambda balancer: balancer.window_closed(record, record.first_step + record.num_steps))

    def close(self) -> None:
        """Ends the planner of a leader, and the connections over which experts are carried."""
        if self.balancer is not None:
            self.balancer.close()
        if self.mover is not None:
            self.mover.close()

    def _lead(self, step: int) -> None:
        """Begins or ends to lead, depending on the members of the group."""
        # While experts lack there is nothing to balance.
        self._is_lowest = leads = self._recovery.members[0] == self._rank and not self._recovery.waits
        if leads and self._reports is None and self._mode != "off":
            self._reports, self.alarm = BalanceReports(self._rank, self._launch_id, self._mode), ""
            if self._mode == "dynamic":
                self.balancer = self.make_balancer(step, self._reports)
        elif not leads and self._reports is not None:
            if self.balancer is not None:
                self.balancer.close()
            self._reports = self.balancer = None

    def _ask(self, act: Callable[[Balancer], T]) -> T | None:
        """Returns the balancer's answer; None without a balancer. Its first error ends it, and raises an alarm."""
        balancer = self.balancer
        if balancer is None:
            return None
        try:
            return act(balancer)
        except Exception as error:  # the balancer is not worth a served token
            log.exception("the balancer has failed; serving goes on without it")
            self.balancer = None
            self.alarm = f"the balancer has failed ({type(error).__name__}: {error})"
            if self._reports is not None:
                self._reports.has_news = True
            balancer.close()
            return None

    def _report(self, step: int) -> BalanceReport | None:
        """Returns the leader's report to the front end after a step; None: nothing is new."""
        report = self._ask(lambda balancer: balancer.report(step))
        if self.balancer is None and self._reports is not None:  # mode static, or the balancer has failed
            state = "off" if self.alarm else "watching"
            return self._reports.make(step, state, self._served.placement, alarm=self.alarm)
        return report

    def _activates(self, version: int) -> bool:
        """Returns whether this rank activates the round of a plan. Ranks that did so in a voided step do not repeat it,
        and a rank that has rejoined gets the placement by broadcast."""
        return version > self._served.placement.version and not self._recovery.needs_placement

    def _hear_round(self, source: int) -> None:
        start = self._to_tell if source == self._rank else None
        data = None
        if start is not None:
            data = msgspec.msgpack.encode((start.version, [astuple(move) for move in start.round.moves]))
        arrived = broadcast(self._served.all_to_all, source, data, self._served.device)
        version, moves = msgspec.msgpack.decode(arrived, type=tuple[int, list[tuple[int, int, int, int, int]]])
        self._running = _Running(version, MigrationRound(tuple(SlotMove(*move) for move in moves)), time.monotonic())
        self._active_mover.start(self._running.round, version)
        if start is not None:
            self._ask(lambda balancer: balancer.round_sent(start.version))

    def _note_split(self, step: int) -> None:
        """Writes to the trace the phases whose batches are split evenly from this step on.

        With the split by time, also what it balances.
        """
        self._even_phases = phases = self.split_choice.even_phases
        expert_time = self._served.replica_map.time
        self._on_event(
            "split_changed",
            step,
            phases=[name for number, name in enumerate(PHASES) if phases >> number & 1],
            **({} if expert_time is None else asdict(expert_time)),
        )

    def _activate(self, step: int) -> None:
        running, began_s = self._running, time.monotonic()
        assert running is not None, "all ranks have staged a round that this one has not heard of"
        with self._served.changing:
            self._active_mover.activate(running.version)
            self._recovery.activate_round(running.round)
        self.split_choice.placement_changed()
        self._running = None
        now_s = time.monotonic()
        slot_bytes = 0 if self._served.names_experts else self._served.decoder.experts[0].slot_bytes
        num_bytes = running.round.num_transfers * slot_bytes
        move_s, pause_s = now_s - running.started_s, now_s - began_s
        self._ask(lambda balancer: balancer.activated(step, running.version, num_bytes, move_s, pause_s))

    def _cancel(self, step: int, why: MoveCancelled) -> None:
        version = self._running.version if self._running is not None else 0
        self._end_round()
        layer = self._served.placement.moe_layer_ids[why.layer]
        reason = f"rank {why.rank} gives up round {version} at step {step}, layer {layer}: {why.reason}"
        if self.leads:
            log.error("%s; serving goes on with placement %d", reason, self._served.placement.version)
        self._ask(lambda balancer: balancer.cancelled(step, reason))

    def _end_round(self) -> None:
        if self.mover is not None:
            self.mover.cancel()
        self._running = None

    def _tell_placement(self, source: int) -> None:
        data = self._recovery.placement_bytes() if source == self._rank else None
        self._recovery.take_placement(broadcast(self._served.all_to_all, source, data, self._served.device))

    @property
    def _active_mover(self) -> Mover:
        assert self.mover is not None, "a leader that moves nothing has announced a round"
        return self.mover

    # --- commands of the front end ------------------------------------------------------------------------------------

    def command(self, message: Rebalance | SetPlacement, step: int) -> None:
        """Carries out a command on the leader, which answers; other ranks ignore it."""
        if not self.leads:
            return

        def act(balancer: Balancer) -> tuple[bool, str]:
            try:
                match message:
                    case Rebalance():
                        return True, balancer.rebalance_now(step)
                    case SetPlacement():
                        return True, balancer.set_placement(step, message.physical_to_logical)
            except PlacementError as refusal:
                return False, str(refusal)

        answered = self._ask(act)
        if answered is not None:
            ok, text = answered
        elif self.alarm:
            ok, text = False, f"{self.alarm}; restart the server to balance again"
        else:
            ok, text = False, _STATIC
        self._send(Answer(self._rank, self._launch_id, message.call_id, ok, text))


def make_balancing(
    config: ServeConfig, own: Rank, group: EpGroup, served: ServedModel, recovery: Recovery
) -> Balancing:
    """Returns one rank's part in balancing, as `eplb.mode` says. Collective where experts may move."""
    eplb, stores = config.eplb, served.decoder.experts
    on_event = _unwritten if served.trace is None else served.trace.event
    mover: Mover | None = None
    if eplb.mode == "dynamic" and served.names_experts:
        mover = NamedExperts()
    elif eplb.mode == "dynamic":
        moves = MoveSettings(eplb.staging_slots, eplb.move_step_share, eplb.move_deadline_s)
        most_bytes = max(store.slot_bytes for store in stores)
        mover = WeightMover(stores, group.rank, make_carrier(group, most_bytes, eplb.staging_slots), moves)

    def make_balancer(step: int, reports: BalanceReports) -> Balancer:
        facts = SystemFacts.of_model(
            parameters=served.spec.expert_parameters,
            bytes_per_expert=stores[0].slot_bytes,
            device=served.device.type,
            num_nodes=group.num_nodes,
            survives_loss=recovery.why_end is None,
            split=served.replica_map.split_name,
        )
        now = served.placement
        shape = now.num_ranks, now.num_slots, now.num_logical
        facts = replace(facts, expert_time=planned_time(served.replica_map.time, *shape))
        speed = None if group.link is None else group.link.speed
        if speed is not None:
            facts = replace(facts, link_bytes_per_s=speed.bytes_per_s, link_delay_s=speed.delay_s)
        settings = msgspec.convert(eplb, BalancerSettings, from_attributes=True)
        planner = PlannerProcess(eplb.policy, eplb.plan_deadline_s)
        return Balancer(served.placement, settings, facts, planner, reports, on_event=on_event, step=step)

    balancing = Balancing(
        rank=own.rank,
        launch_id=own.launch_id,
        served=served,
        recovery=recovery,
        mode=eplb.mode,
        mover=mover,
        split_choice=SplitChoice(served.replica_map.split_name, served.replica_map.has_replicas),
        make_balancer=make_balancer,
        send=own.mailbox.send,
        on_event=on_event,
    )
    served.windows.listeners.append(balancing.window_closed)
    return balancing


def _unwritten(name: str, step: int, **fields: Any) -> None:
    """Takes an event where no trace is written."""
