"""The step loop of one rank: take requests, agree on a step with the other ranks, run it, send the tokens.

One thread. A request is touched between steps only; from commit to the last combine an exception ends the epoch,
because the other ranks wait in the collectives of this step. One exception: where a `Recovery` is given, a lost peer
voids the step, and those that are left run it again. The loop ends when any rank asks for it, on all ranks at once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.scheduler import ScheduledChunk, Scheduler
from moe_serve.engine.exchange import Exchange
from moe_serve.engine.mailbox import Inbound, Mailbox
from moe_serve.engine.messages import ALIVE_PERIOD_S, Abort, Members, Shutdown, Submit, TokenEvent, Tokens, Wake
from moe_serve.engine.recovery import Recovery
from moe_serve.engine.sampler import has_finite_best, sample
from moe_serve.engine.served_model import ServedModel
from moe_serve.engine.status import EngineCounters, make_status
from moe_serve.engine.step import RankState, StepPlan, StepSettings, plan_step
from moe_serve.errors import PeerError, RequestError
from moe_serve.log import get_logger

log = get_logger(__name__)
_OUTSIDE_POLL_S = 0.002  # how often a rank that was left out looks whether it is taken back


@dataclass(frozen=True)
class EngineSettings:
    """Times of the loop, in seconds. front_end_deadline_s: the engine ends when no front end was heard for so long."""

    heartbeat_s: float = 1.0
    front_end_deadline_s: float = 30.0


@dataclass
class Engine:
    """One rank's requests, model and place among the ranks. Everything it works with is handed in."""

    rank: int
    epoch: int
    served: ServedModel
    scheduler: Scheduler
    exchange: Exchange
    mailbox: Mailbox
    step_settings: StepSettings
    settings: EngineSettings = field(default_factory=EngineSettings)
    counters: EngineCounters = field(default_factory=EngineCounters)
    recovery: Recovery | None = None  # None: a lost rank ends the epoch
    step: int = 0
    lost_front_end: bool = False  # why this rank asked for the end
    _requests: dict[str, Request] = field(default_factory=dict)
    _held_steps: int = 0
    _has_regrouped: bool = False
    _has_come_back: bool = False
    _wants_stop: bool = False
    _spoke_s: float = 0.0
    _started_s: float = 0.0

    @property
    def stopping(self) -> bool:
        return self._wants_stop

    def request_stop(self) -> None:
        """Asks all ranks to end at the next step. Safe to call from a signal handler."""
        self._wants_stop = True

    def run(self) -> None:
        """Runs steps until the ranks agree to stop.

        Raises PeerError when a lost rank cannot be spared, and whatever the model raises: either ends the epoch.
        """
        self._started_s = time.monotonic()
        while True:
            self._receive(self.mailbox.poll(0.0))
            self._keep_in_touch()
            try:
                plan = self.run_step()
            except PeerError as error:
                if not self._recover(error):
                    return
                continue
            if plan.stop:
                return
            if plan.sleep:
                self._sleep()

    def run_step(self) -> StepPlan:
        """Runs one step with all ranks, and returns its plan. Raises PeerError when one is lost: the step is void."""
        recovery = self.recovery
        proposal = self.scheduler.propose()
        num_prefill_tokens = sum(chunk.length for chunk in proposal.prefills)
        state = RankState(
            epoch=self.epoch,
            step=self.step,
            decode_tokens=proposal.num_tokens - num_prefill_tokens,
            prefill_tokens=num_prefill_tokens,
            held_steps=self._held_steps,
            has_work=int(self.scheduler.has_work),
            wants_stop=int(self._wants_stop),
            placement_version=self.served.placement.version,
            regrouped=int(self._has_regrouped),
            masked=recovery.masked if recovery else 0,
            wanting_back=recovery.wanting_back if recovery else 0,
        )
        rows = self.exchange.gather(state.to_row(), self.step)
        ranks = recovery.members if recovery else range(len(rows))
        plan = plan_step([RankState.from_row(rows[rank]) for rank in ranks], self.step_settings, ranks)
        self._has_regrouped = False
        self.step = plan.step
        self.counters.num_steps += 1
        self._wants_stop |= plan.stop  # also when the rank that asked for it is lost before the end
        if self._has_come_back:
            self.served.come_back(self.step - 1)  # the others closed theirs with the step that took this rank back
            self._has_come_back = False
        self.served.confirm_windows()
        if plan.regrouped or plan.take_back:
            self.served.close_window(self.step)
        if plan.take_back:
            self.served.confirm_windows()  # who could not close it does not regroup, so that nobody comes back now
            self._regroup(f"rank {', '.join(map(str, plan.take_back))} came back", plan.take_back)
        if plan.runs_forward:
            self._forward(self.scheduler.commit(proposal, plan.hold_prefill), plan)
        self.step += 1
        self._held_steps = self._held_steps + 1 if plan.hold_prefill and num_prefill_tokens else 0
        if plan.close_window:
            self.served.close_window(self.step)
        if plan.stop:
            self.served.confirm_windows()
        return plan

    def _forward(self, chunks: Sequence[ScheduledChunk], plan: StepPlan) -> None:
        self.served.begin_step(plan.max_tokens)
        logits = self.served.forward(ForwardBatch.build(chunks, *self.served.batch_form), plan.num_chunks, plan.overlap)
        sampling = [chunk for chunk in chunks if chunk.samples]
        others = [chunk for chunk in chunks if not chunk.samples]
        requests = [chunk.request for chunk in sampling]
        token_ids = sample(logits[: len(sampling)], requests, self.served.limits.eos_token_ids)
        events: list[TokenEvent] = []
        for chunk, token_id in zip(sampling, token_ids, strict=True):
            if token_id is None:
                events.append(self._fail(chunk.request))
            else:
                self.scheduler.complete(chunk, token_id)
                events.append(self._event(chunk.request, token_id))
        for chunk, is_finite in zip(others, has_finite_best(logits[len(sampling) :]), strict=True):
            if is_finite:
                self.scheduler.complete(chunk)
            else:
                events.append(self._fail(chunk.request))
        self.counters.count_forward(chunks, sum(len(event.token_ids) for event in events), plan.overlap)
        if events:
            self.mailbox.send(Tokens(self.rank, self.epoch, events))

    def _recover(self, error: PeerError) -> bool:
        """Goes on after a lost peer; returns False when this rank was the lost one and was told to end meanwhile.

        Raises the error when a new group does not help, or PeerError when it cannot serve.
        """
        recovery = self.recovery
        if recovery is None or not recovery.helps:
            raise error
        self.counters.num_voided_steps += 1
        if not recovery.is_left_out:
            try:
                self._regroup(str(error))
            except PeerError:
                if not recovery.is_left_out:
                    raise
        return not recovery.is_left_out or self._come_back(recovery)

    def _regroup(self, reason: str, joining: Sequence[int] = ()) -> None:
        assert self.recovery is not None, "a group that changes has a recovery"
        self.recovery.regroup(joining)
        self._begin_group(self.recovery, reason)

    def _begin_group(self, recovery: Recovery, reason: str) -> None:
        self._has_regrouped = True
        log.debug(
            "%s: ranks %s go on from step %d", reason, recovery.members, self.step
        )  # whoever watches says it once
        ended = [rank for rank in self.exchange.dead_peers() if rank not in recovery.members]
        times_left_out = self.counters.num_times_left_out
        news = Members(self.rank, self.epoch, recovery.group_epoch, recovery.members, reason, times_left_out, ended)
        self.mailbox.send(news)

    def _come_back(self, recovery: Recovery) -> bool:
        """Waits outside until the others take this rank back; returns False when it was told to end."""
        log.warning(
            "this rank came too late in step %d and was left out: it drops its %d requests and waits to be taken back",
            self.step,
            len(self._requests),
        )
        self.counters.num_times_left_out += 1
        for request_id in self._requests:
            self.scheduler.abort(request_id)
        self._requests.clear()
        recovery.ask_back()
        while not self._wants_stop:
            # What was sent to this rank before the front end knew is with others by now.
            self._wants_stop |= any(isinstance(message, Shutdown) for message in self.mailbox.poll(_OUTSIDE_POLL_S))
            self._keep_in_touch()
            if recovery.taken_back():
                self._has_come_back = True
                self._begin_group(recovery, f"rank {self.rank} came back")
                return True
        return False

    def _event(self, request: Request, token_id: int) -> TokenEvent:
        """Returns what to tell of a new token, and frees the request where it was the last."""
        finish, matched_id = self._finish(request, token_id)
        if finish is not None:
            self.scheduler.finish(request.request_id)
            del self._requests[request.request_id]
            self.counters.num_finished += 1
        return TokenEvent(
            request_id=request.request_id,
            attempt=request.attempt,
            index=len(request.output_ids) - 1,
            token_ids=[token_id],
            finish=finish,
            matched_id=matched_id,
            num_cached_prompt=request.num_cached_prompt,
        )

    def _fail(self, request: Request) -> TokenEvent:
        """Ends a request whose logits are not finite, and returns what to tell of it. The others go on."""
        self.scheduler.discard(request.request_id)
        del self._requests[request.request_id]
        self.counters.num_failed += 1
        log.error("request %s ends: its logits are not finite", request.request_id)
        return TokenEvent(
            request_id=request.request_id,
            attempt=request.attempt,
            index=len(request.output_ids),
            token_ids=[],
            finish="error",
            message=f"the logits of this request are NaN or infinite at output token {len(request.output_ids)}, so no "
            "token can be chosen; other requests go on. Check the checkpoint for weights that are not finite; where "
            "experts are quantised or bfloat16 overflows, set model.expert_weights: dense or model.dtype: float32",
        )

    def _finish(self, request: Request, token_id: int) -> tuple[str | None, int | None]:
        """Returns why a request ends with this token, and the id that ended it; (None, None) while it goes on."""
        params, limits = request.params, self.served.limits
        num_output = len(request.output_ids)
        is_stop = token_id in params.stop_token_ids or (token_id in limits.eos_token_ids and not params.ignore_eos)
        if is_stop and num_output > params.min_new_tokens:
            return "stop", token_id
        if num_output >= params.max_new_tokens or request.num_known >= limits.max_model_len:
            return "length", None
        return None, None

    def _receive(self, messages: Sequence[Inbound]) -> bool:
        """Acts on messages; returns whether one of them is a wake for the exchange that comes next."""
        woken = False
        for message in messages:
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    if self._requests.pop(message.request_id, None) is not None:
                        self.scheduler.abort(message.request_id)
                        self.counters.num_aborted += 1
                case Shutdown():
                    self._wants_stop = True
                case Wake():
                    woken |= message.epoch == self.epoch and message.step == self.step
        return woken

    def _submit(self, message: Submit) -> None:
        earlier = self._requests.get(message.request_id)
        if earlier is not None:
            if earlier.attempt >= message.attempt:
                return  # a repeated or late message
            self.scheduler.abort(message.request_id)
            del self._requests[message.request_id]
        request = message.to_request()
        try:
            self.scheduler.add(request)
        except RequestError as error:
            event = TokenEvent(
                request_id=message.request_id,
                attempt=message.attempt,
                index=len(message.output_ids),
                token_ids=[],
                finish="error",
                message=str(error),
                field=error.field,
            )
            self.mailbox.send(Tokens(self.rank, self.epoch, [event]))
            return
        self._requests[message.request_id] = request

    def _sleep(self) -> None:
        """Waits for work. All ranks sleep after the same step; whoever wakes first wakes the others.

        A rank wakes by its first request, by a wake that names the next exchange, and by its heartbeat, so that a rank
        that died in its sleep is missed within a heartbeat and a deadline.
        """
        self.counters.num_sleeps += 1
        wake = Wake(self.epoch, self.step)
        heartbeat_at_s = time.monotonic() + self.settings.heartbeat_s
        while not (self.scheduler.has_work or self._wants_stop):
            left_s = heartbeat_at_s - time.monotonic()
            if left_s <= 0:
                break
            if self._receive(self.mailbox.poll(left_s)):
                return
        self.mailbox.wake_peers(wake)

    def _keep_in_touch(self) -> None:
        """Says once a second that this rank lives, and asks for the end when the front end is gone."""
        now_s = time.monotonic()
        if now_s - self._spoke_s < ALIVE_PERIOD_S * 0.9:
            return
        self._spoke_s = now_s
        served = self.served
        status = make_status(
            self.rank, self.epoch, self.step, self.scheduler, self.counters, served.waited_s, served.split_outcomes
        )
        self.mailbox.send(status)
        silent_s = min(self.mailbox.front_end_silent_s(), now_s - self._started_s)
        if silent_s > self.settings.front_end_deadline_s and not self._wants_stop:
            log.error(
                "no front end was heard for %.0f s; the engine ends. Start `moe-serve frontend` with the ranks' own "
                "configuration, where they reach it at server.worker_host:worker_port",
                silent_s,
            )
            self._wants_stop = self.lost_front_end = True
