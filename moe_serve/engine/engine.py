"""The step loop of one rank: receive requests, agree on a step with the other ranks, run it, send the tokens.

One thread. Requests are touched between steps only; from commit to the last combine an exception ends the launch,
because the other ranks wait in the collectives of this step. One exception: where a lost rank can be masked, its loss
voids the step, and the remaining ranks run it again. The loop ends when any rank asks for it, on all ranks at once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.attention_dp.batch import BatchBuilder
from moe_serve.attention_dp.scheduler import Proposal, ScheduledChunk, Scheduler
from moe_serve.config import ServeConfig
from moe_serve.engine.balancing.balancing import Balancing
from moe_serve.engine.balancing.record_control import RecordControl
from moe_serve.engine.model.prediction import TokenPredictor
from moe_serve.engine.model.served_model import ServedModel
from moe_serve.engine.output.routed_experts import in_messages
from moe_serve.engine.output.sampler import Sampler
from moe_serve.engine.profiler import Profiler
from moe_serve.engine.protocol.mailbox import Disconnected, Inbound, Mailbox, Reconnected
from moe_serve.engine.protocol.messages import (
    ALIVE_PERIOD_S,
    NEXT_STEP,
    Abort,
    Answer,
    Draining,
    Expect,
    FlushCache,
    ForFrontEnds,
    Profile,
    Rebalance,
    RecordCommand,
    Refused,
    SetPlacement,
    Shutdown,
    Submit,
    TokenEvent,
    Tokens,
    Voided,
    Wake,
)
from moe_serve.engine.recovery.recovery import Recovery
from moe_serve.engine.requests import OpenRequests, StepEvents
from moe_serve.engine.status import EngineCounters, StepTimes, make_status, totals_of
from moe_serve.engine.step.exchange import Exchange
from moe_serve.engine.step.plan import RankState, StepPlan, StepSettings, plan_step
from moe_serve.engine.watchdog import Watchdog
from moe_serve.ep.peer_experts import ExpertServer
from moe_serve.errors import PeerError, name_ranks
from moe_serve.kernels.part_clock import OTHER
from moe_serve.log import get_logger

log = get_logger(__name__)
_WAITING_POLL_S = 0.005  # between two exchanges of ranks that wait for a lost one
_PAGES_POLL_S = 0.001  # between two steps that nobody has work for, of a rank whose prefills wait for pages of a tier
_EARLY_POLL_S = 0.002  # between two looks for pages that prefill ranks compute, of a rank that sleeps
_GRAMMAR_POLL_S = 0.002  # between two looks for a compiled grammar, of a rank that sleeps
_MASKED_POLL_S = 0.002  # how often a masked rank checks whether the others regroup with it


@dataclass
class Engine:
    """One rank's step loop over its requests and its model. All collaborators are passed in.

    lost_front_end: this rank has asked for the end, because it heard no front end
    refusal:        the reason for which the front end refused this rank, which has then asked for the end
    """

    rank: int
    launch_id: int
    served: ServedModel
    scheduler: Scheduler
    batches: BatchBuilder
    sampler: Sampler
    requests: OpenRequests
    events: StepEvents
    exchange: Exchange
    mailbox: Mailbox
    recovery: Recovery
    records: RecordControl
    balancing: Balancing
    expert_server: ExpertServer | None
    counters: EngineCounters
    times: StepTimes
    profiler: Profiler
    watchdog: Watchdog
    step_settings: StepSettings
    config: ServeConfig
    predictor: TokenPredictor | None = None
    step: int = 0
    lost_front_end: bool = False
    refusal: str | None = None
    _held_steps: int = 0
    _wants_stop: bool = False
    _is_called: bool = False  # the next sleep is left out: a peer may be lost, or back
    _drain_until_s: float | None = None
    _spoke_s: float = 0.0
    _started_s: float = 0.0

    @property
    def stopping(self) -> bool:
        return self._wants_stop

    @property
    def has_work(self) -> bool:
        """Whether steps must go on: for requests, for experts that are to move, or while a lost rank is waited for."""
        return self.scheduler.has_work or self.balancing.has_work or self.recovery.waits

    def request_stop(self) -> None:
        """Asks all ranks to end at the next step. Safe to call from a signal handler."""
        self._wants_stop = True

    @property
    def draining(self) -> bool:
        return self._drain_until_s is not None

    def request_drain(self) -> None:
        """Asks the front end to end the ranks when open requests have ended. Safe to call from a signal handler."""
        # The front end hears of it within a period, and has its own deadline then.
        self._drain_until_s = time.monotonic() + self.config.server.drain_deadline_s + ALIVE_PERIOD_S

    def run(self) -> None:
        """Runs steps until the ranks agree to stop.

        Raises PeerError when the ranks cannot go on without a lost one, and any error of the model: the launch is over.
        """
        self._started_s = time.monotonic()
        if not self.recovery.begin(self._wait_masked):
            return
        while True:
            self._receive(self.mailbox.poll(_WAITING_POLL_S if self.recovery.waits else 0.0))
            self._schedule_compiled()
            self._keep_in_touch()
            try:
                plan = self.run_step()
            except PeerError as error:
                self.watchdog.enter("the recovery", self.step)
                self._tell_void(error)
                if not self.recovery.recover(error, self._wait_masked):
                    return
                continue
            if plan.stop:
                return
            if plan.sleep:
                self._sleep()
            elif self.scheduler.awaits_pages and not plan.runs_forward:
                time.sleep(_PAGES_POLL_S)

    def _tell_void(self, error: PeerError) -> None:
        """Logs whom this rank waited for when its step ended, and tells the front end, which hears all ranks."""
        membership = self.served.membership
        others = [rank for rank in self.recovery.members if rank != self.rank]
        # A call of torch.distributed does not tell which rank it misses; the front end sees which one reports nothing.
        missing = [error.rank] if error.rank >= 0 else others
        if membership is not None:
            missing, *wait = membership.last_wait
            missing = missing if wait == [error.phase, error.step] else []
        missing = [rank for rank in missing if rank in others]
        received = [rank for rank in others if missing and rank not in missing]
        layer = -1 if error.layer_row is None else self.served.placement.moe_layer_ids[error.layer_row]
        at = "" if layer < 0 else f", layer {layer}"
        waits = "waited for nobody"
        if missing:
            has = ", ".join(map(str, received)) or "none"
            lacks = name_ranks(missing, lambda rank: "") if membership is None else membership.named(*missing)
            waits = f"waited for {lacks}; of other ranks, it has the parts of: {has}"
            if membership is None and error.rank < 0:
                waits = f"waited for {lacks}, of which it does not know who is missing"
        call = error.phase if error.step < 0 else f"{error.phase} {error.step}"
        log.warning("step %d%s, %s: %s; void: %s", self.step, at, call, waits, error)
        where = (self.step, layer, error.phase, error.step)
        self.mailbox.send(Voided(self.rank, self.launch_id, *where, missing, received, str(error)))

    def run_step(self) -> StepPlan:
        """Runs one step with all ranks, and returns its plan. Raises PeerError when one is lost: the step is void."""
        proposed_ns = time.perf_counter_ns()
        proposal = Proposal() if self.recovery.waits else self.scheduler.propose()
        self.watchdog.enter("the exchange", self.step)
        began_ns = self.times.begin()
        plan = self._exchange(proposal)
        agreed_ns = self.served.clock.turn(OTHER)
        self.watchdog.enter("the forward", self.step)
        self.recovery.begin_step(plan)
        self.balancing.begin_step(plan)
        started_s, num_tokens, layer_s = time.perf_counter(), 0, 0.0
        if plan.runs_forward:
            self.requests.begin(() if plan.hold_prefill else proposal.prefills)
            num_tokens, layer_s = self._forward(self.scheduler.commit(proposal, plan.hold_prefill), plan)
        step_s = time.perf_counter() - started_s
        self.watchdog.enter("the end", self.step)
        self.step += 1
        self.records.end_step(plan)
        self.served.windows.end_step(plan, step_s)
        self.balancing.end_step(plan, step_s)
        self._note_speed(proposal, plan, step_s)
        ended_ns = self.times.end(plan.phase)
        speculator = self.scheduler.speculator
        if speculator is not None:
            num_decodes = len(proposal.decodes) if plan.phase == "decode" else 0
            speculator.ended(num_decodes, num_tokens, (time.perf_counter_ns() - proposed_ns) / 1e9, layer_s)
        if self.profiler.is_on:
            self.profiler.add(plan, (began_ns, agreed_ns, ended_ns), proposal, sum(self.served.waited_s))
        self.watchdog.leave()
        return plan

    def close(self) -> None:
        """Ends the threads and connections of this rank. All ranks call it, after `run`."""
        if self.expert_server is not None:
            self.expert_server.close()
        if self.scheduler.blocks.tiers is not None:
            self.scheduler.blocks.tiers.close()
        if self.scheduler.blocks.sender is not None:
            self.scheduler.blocks.sender.close()
        self.balancing.close()
        self.records.close()
        self.served.all_to_all.close()
        self.exchange.close()

    def _exchange(self, proposal: Proposal) -> StepPlan:
        """Returns the plan that all ranks compute from the proposals of all."""
        recovery, balancing = self.recovery, self.balancing
        fault, fault_layer = balancing.fault
        prefill_tokens = sum(chunk.length for chunk in proposal.prefills)
        recorder = self.records.to_show()
        state = RankState(
            launch_id=self.launch_id,
            step=self.step,
            decode_tokens=proposal.num_tokens - prefill_tokens,
            prefill_tokens=prefill_tokens,
            held_steps=self._held_steps,
            has_work=int(self.has_work),
            wants_stop=int(self._wants_stop),
            placement_version=self.served.placement.version,
            regrouped=recovery.regrouped,
            masked=recovery.masked,
            asking_to_rejoin=recovery.asking_to_rejoin,
            record_command=recorder.command,
            record_time_us=recorder.time_us,
            recorder=recorder.state,
            has_message=balancing.announce(),
            needs_placement=recovery.needs_placement,
            staged=balancing.staged,
            fault=fault,
            fault_layer=fault_layer,
            even_phases=balancing.even_phases,
            predictions=0 if self.predictor is None else self.predictor.num_runs(proposal),
        )
        states, ranks = self.exchange.gather(state, self.step), recovery.members
        plan = plan_step([states[rank] for rank in ranks], self.step_settings, ranks)
        self.step = plan.step  # when a group begins, the highest step of its ranks
        self.counters.num_steps += 1
        self._held_steps = self._held_steps + 1 if plan.hold_prefill and prefill_tokens else 0
        self._wants_stop |= plan.stop  # kept in case the rank that asked is lost before the end
        return plan

    def _forward(self, chunks: Sequence[ScheduledChunk], plan: StepPlan) -> tuple[int, float]:
        """Runs the model and sends what comes out; returns how many tokens, and seconds of the layer that predicts."""
        served = self.served
        served.begin_step(plan.max_tokens, plan.split_evenly)
        batch = self.batches.build(chunks)
        logits = served.forward(batch, plan.num_chunks, plan.overlap)
        events = self.events.of(chunks, batch, logits, self.sampler)
        num_tokens = sum([len(event.token_ids) for event in events])
        self.counters.count_forward(chunks, num_tokens, plan.overlap)
        if chunks and plan.phase == "decode":
            num_drafts = sum([chunk.length for chunk in chunks]) - len(chunks)
            self.counters.count_decodes(len(chunks), num_drafts, num_tokens, served.num_experts)
        self._send(events)
        if self.predictor is None or not plan.num_predictions:
            return num_tokens, 0.0
        own_s = self.predictor.speculator.own_s
        began_s = own_s()
        self.predictor.run(chunks, batch, plan)  # tokens are on their way; a peer that is lost now voids drafts alone
        return num_tokens, max(0.0, own_s() - began_s)

    def _note_speed(self, proposal: Proposal, plan: StepPlan, step_s: float) -> None:
        """Tells the tiers below the KV cache what it takes to compute a page, from a step with much of a prompt."""
        blocks = self.scheduler.blocks
        if blocks.tiers is None or not plan.runs_forward or plan.hold_prefill:
            return
        num_tokens = proposal.num_tokens - len(proposal.decodes)
        if num_tokens >= blocks.block_size:
            blocks.tiers.computing_s = step_s * blocks.block_size / num_tokens

    def _send(self, events: list[TokenEvent]) -> None:
        if events:
            for part in in_messages(events):
                self.mailbox.send(Tokens(self.rank, self.launch_id, part))

    def _receive(self, messages: Sequence[Inbound]) -> bool:
        """Acts on messages; returns whether one of them is a wake for the next exchange."""
        woken = False
        for message in messages:
            match message:
                case Submit():
                    refusal = self.requests.submit(message)
                    self._send([] if refusal is None else [refusal])
                case Abort():
                    self.requests.abort(message.request_id)
                case Expect():
                    self.requests.expect(message)
                case RecordCommand():
                    self.records.ask(message)
                case Rebalance() | SetPlacement():
                    self.balancing.command(message, self.step)
                case FlushCache():
                    answer = Answer(self.rank, self.launch_id, message.call_id, *self.requests.flush_cache())
                    self.mailbox.send(answer)
                case Profile():
                    self.mailbox.send(self.profiler.command(message))
                case ForFrontEnds():
                    self.mailbox.send(message)
                case Shutdown():
                    self._wants_stop = True
                case Refused():
                    self._wants_stop, self.refusal = True, message.reason
                case Disconnected(front_end):
                    self.requests.drop_all_of(front_end)
                case Reconnected(front_end):
                    which = "" if front_end is None else f" {front_end}"
                    log.warning("the connection to front end%s was cut and is there again", which)
                    self.requests.drop_all_of(front_end)
                case Wake():
                    woken |= message.launch_id == self.launch_id and message.step == self.step
                    self._is_called |= message.launch_id == self.launch_id and message.step == NEXT_STEP
        return woken

    def _schedule_compiled(self) -> None:
        if self.requests.awaits_grammar:
            self._send(self.requests.schedule_compiled())

    def _sleep(self) -> None:
        """Waits for work. All ranks sleep after the same step; the first to wake up wakes the others.

        A rank wakes up for a request, for a wake, which names the next exchange or comes with the loss or return of a
        rank, and at its heartbeat: where nobody tells of it, the death of a sleeping rank is noticed within a heartbeat
        and a deadline.
        """
        self.counters.num_sleeps += 1
        wake = Wake(self.launch_id, self.step)
        heartbeat_at_s = time.monotonic() + self.config.engine.heartbeat_s
        while not (self.has_work or self.records.has_work or self._wants_stop or self._is_called):
            left_s = heartbeat_at_s - time.monotonic()
            if left_s <= 0:
                break
            if self.requests.awaits_grammar:
                left_s = min(left_s, _GRAMMAR_POLL_S)
            if self.scheduler.blocks.expected:
                left_s = min(left_s, _EARLY_POLL_S)
                self.scheduler.blocks.take_early(beside_decodes=False)
            if self._receive(self.mailbox.poll(left_s)):
                return
            self._schedule_compiled()
        self._is_called = False
        self.mailbox.wake_peers(wake)

    def _keep_in_touch(self) -> None:
        """Reports to the front end once a second, and asks for the end when the front end is gone."""
        now_s = time.monotonic()
        if now_s - self._spoke_s < ALIVE_PERIOD_S * 0.9:
            return
        self._spoke_s = now_s
        served = self.served
        totals = totals_of(self.counters, self.recovery, self.scheduler, served.split_outcomes, served.changed_choices)
        own = self.rank, self.launch_id, self.step
        self.mailbox.send(make_status(*own, self.scheduler, totals, served.waited_s, self.times))
        if self._drain_until_s is not None:
            self.mailbox.send(Draining(self.rank, self.launch_id))
            self._wants_stop |= now_s > self._drain_until_s
        silent_s = min(self.mailbox.front_end_silent_s(), now_s - self._started_s)
        if silent_s > self.config.server.worker_deadline_s and not self._wants_stop:
            log.error(
                "no front end was heard for %.0f s; the engine ends. Start `moe-serve frontend` with the ranks' own "
                "configuration and token, where they reach it at server.worker_host:worker_port",
                silent_s,
            )
            self._wants_stop = self.lost_front_end = True

    def _wait_masked(self) -> bool:
        """Waits a moment while this rank is masked; returns False when it should end.

        Drops requests: those sent before the front end knew of the mask have moved to other ranks by now.
        """
        self.watchdog.leave()
        self.records.forget()
        self._wants_stop |= any(
            isinstance(message, Shutdown | Refused) for message in self.mailbox.poll(_MASKED_POLL_S)
        )
        self._keep_in_touch()
        self._wants_stop |= self.draining  # it has no requests
        return not self._wants_stop
