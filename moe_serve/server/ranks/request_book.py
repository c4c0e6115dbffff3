"""The open requests of a front end: which rank serves each, and how it moves to another one when that rank is lost.

A request is a value, and its output so far is known here. So a lost rank costs its requests only time: they are
submitted to other ranks, with the output so far and the next attempt number. Events of earlier attempts are dropped.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from moe_serve.attention_dp.request import Handover
from moe_serve.attention_dp.request_router import PageSharing, RequestRouter, RoutedPrompt, why_local
from moe_serve.config import ServeConfig, ServerConfig
from moe_serve.engine.output.incremental_decoder import Decoder
from moe_serve.engine.protocol.messages import Abort, Expect, Message, Status, Tokens
from moe_serve.errors import QueueFullError
from moe_serve.log import get_logger
from moe_serve.server.ranks.rank_table import RankTable, Regrouped
from moe_serve.server.requests.admission import Admission, DrainRate, Load, Queue, WaitingLines
from moe_serve.server.requests.open_request import Changes, OpenRequest, OwnTimeoutError, RequestSpec, UnavailableError
from moe_serve.server.requests.request_stats import RequestLog, RequestStats

log = get_logger(__name__)

EndListener = Callable[[OpenRequest], None]
MAX_LOSSES = 3  # ranks that may end while they serve one request, without a token in between


class GroupRequests(Protocol):
    """The requests of the ranks of one role, as their group sees them. Ranks are numbered within the group."""

    def __len__(self) -> int: ...

    def let_end(self) -> None:
        """The ranks are to end: their open requests may, for a while, and no others come."""

    def fail_all(self, reason: str) -> None:
        """The ranks are lost, and do not come back."""

    def wait_for_launch(self, lost_rank: int | None) -> None:
        """The ranks are lost, and are started again. lost_rank: that caused it; None: not known"""

    def begin_launch(self, block_size: int, masked: Collection[int], sharing: PageSharing | None = None) -> int:
        """All ranks are new and serve; returns how many requests are submitted again. block_size: in tokens

        sharing: as in RequestRouter
        """

    def resubmit(self, rank: int) -> None:
        """A rank has dropped its requests."""

    def suspect(self, rank: int) -> None:
        """A rank is presumed lost."""

    def regroup(self, change: Regrouped) -> int:
        """Other ranks take part now; returns how many requests moved."""

    def take(self, message: Tokens) -> None:
        """Hands tokens to their requests."""

    def take_status(self, status: Status) -> None:
        """Takes a rank's report of its load."""


class RequestBook:
    """All open requests, their ranks, and counters. Prefill ranks are numbered behind the decode ranks here.

    Requests wait here until a rank has capacity; here they can be ordered, dropped, or sent to another rank.

    send:     sends a message to a rank, without waiting
    capacity: the most requests that may be open
    is_held:  whether requests are kept from the ranks
    """

    def __init__(self, config: ServeConfig, tokenizer: Decoder | None, send: Callable[[int, Message], None]):
        self.counters = {
            "num_requests": 0, "num_finished": 0, "num_aborted": 0, "num_failed": 0, "num_refused": 0, "num_moved": 0,
            "num_resubmitted": 0,
        }  # fmt: skip
        self.num_events: Counter[int] = Counter()  # by rank
        self._config = config
        self._tokenizer = tokenizer
        self._send = send
        self._open: dict[str, OpenRequest] = {}
        engine, server = config.engine, config.server
        self.capacity = engine.max_running_requests * config.parallel.num_ranks + engine.max_queued_requests
        self._admission = Admission(self.capacity, server.max_waiting_tokens, server.queue_deadline_s)
        self._drain_rate = DrainRate()
        self._by_client_id: dict[str, OpenRequest] = {}  # those that have an id of their client
        self._numbers = itertools.count()
        self.is_held = False
        self._lines = WaitingLines(config.server.priority_head_start_s)
        self._capacity = RankCapacity(config)
        self.stats = RequestStats()
        self.at_end: list[EndListener] = [RequestLog().write] if config.server.log_requests else []

    def __len__(self) -> int:
        return len(self._open)

    def refusal(self, num_requests: int = 1, num_tokens: int = 1) -> QueueFullError | None:
        """Returns the refusal of a call of this size; None if it may wait."""
        load = Load(len(self), self.waiting_tokens)
        return self._admission.refusal(load, self._drain_rate.per_s(time.monotonic()), num_requests, num_tokens)

    @property
    def queue(self) -> Queue:
        """The requests that wait for a rank. Its share is of requests or of tokens, whichever is larger."""
        share = max(
            self.num_waiting / self._config.engine.max_queued_requests,
            self.waiting_tokens / self._config.server.max_waiting_tokens,
        )
        return Queue(share, self.waiting_tokens, self._drain_rate.per_s(time.monotonic()))

    @property
    def routes(self) -> Mapping[str, int]:
        """How many requests began on a prefill rank ("prefill"), or on a decode rank, by reason."""
        return self._capacity.routes

    @property
    def sources(self) -> Mapping[str, int]:
        """Where the pages of prompts were when they were sent first, and how many there were, as Source says."""
        return self._capacity.sources

    def num_at_prefill(self) -> int:
        """Returns how many requests prefill ranks have."""
        return sum(self._capacity.is_prefill(request.rank) for request in self._open.values())

    def begin_prefill(self, block_size: int, masked: Collection[int], sharing: PageSharing | None = None) -> None:
        """Sends prompts to prefill ranks that are all new. block_size: of their caches;  masked: lost ranks

        sharing: as in RequestRouter
        """
        self.leave_prefill(None)
        self._capacity.begin_prefill(block_size, masked, sharing)

    def leave_prefill(self, lost_rank: int | None) -> None:
        """Sends nothing more to prefill ranks; decode ranks serve their requests. lost_rank: the cause, as above"""
        self._capacity.lose_prefill()
        for request in list(self._open.values()):
            if request.rank is None or not self._capacity.is_prefill(request.rank):
                continue
            if request.rank != lost_rank or self._count_loss(request, lost_rank):
                self._give_back(request, request.rank)
        self.send_waiting()

    def leave_silent(self, rank: int) -> None:
        """Sends nothing to a prefill rank that is silent, until `hear_again`; decode ranks serve its requests."""
        self._capacity.lose([rank])
        for request in list(self._open.values()):
            if request.rank == rank:
                request.end_handover("late")
                self._give_back(request, rank)
        self.send_waiting()

    def hear_again(self, rank: int) -> None:
        """Sends to a prefill rank again that was silent."""
        self._capacity.regain([rank])

    def trust_prefill(self, launch: "PrefillLaunch | None") -> None:
        """Takes how prefill ranks hand pages over; None: it is not known that they compute the same as decode ranks,
        so they get no request."""
        self._capacity.prefill_launch = launch

    def let_end(self) -> None:
        """Lets the open requests end, those of a pause too."""
        self.go_on()

    def begin_launch(self, block_size: int, masked: Collection[int], sharing: PageSharing | None = None) -> int:
        """Starts with an empty router, since all ranks are new; returns how many requests are submitted again.

        block_size: of the ranks' caches, in tokens;  sharing: as in RequestRouter
        """
        self.take_back()
        self._capacity.begin_launch(block_size, masked, sharing)
        self.send_waiting()
        num_again = sum(request.attempt > 0 for request in self._open.values())
        self.counters["num_resubmitted"] += num_again
        return num_again

    def wait_for_launch(self, lost_rank: int | None) -> None:
        """Makes all requests wait for ranks that are started again. Fails those that may have caused too many losses.

        lost_rank: the rank that caused it; None: not known, so any request may be the cause
        """
        self._capacity.lose(self._capacity.ranks)
        for request in list(self._open.values()):
            if request.rank is not None and lost_rank in (None, request.rank):
                self._count_loss(request, request.rank)
        self.take_back()

    def resubmit(self, rank: int) -> None:
        """Submits the requests of a rank to it again, after messages were lost and the rank has dropped them."""
        for request in self._open.values():
            if request.rank == rank:
                self._submit_again(request, rank)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a rank."""
        return len(self._lines)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the requests that wait for a rank: of their prompts and longest outputs."""
        return self._lines.num_tokens

    def open(
        self,
        prefix: str,
        spec: RequestSpec,
        eos_token_ids: Sequence[int],
        changes: Changes,
        at_once: bool = False,
    ) -> OpenRequest:
        """Takes a new request, which waits for a rank with room. prefix: makes its id unique among front ends

        at_once: send it to the rank in its spec, with room or without
        """
        request_id = f"{prefix}-{next(self._numbers)}"
        request = OpenRequest(request_id, spec, self._tokenizer, eos_token_ids, changes)
        self._open[request_id] = request
        if spec.rid is not None:
            self._by_client_id[spec.rid] = request
        self.counters["num_requests"] += 1
        if at_once:
            self._start(request)
        else:
            self._queue(request)
            self.send_waiting()
        return request

    def has_client_id(self, rid: str | None) -> bool:
        """Returns whether an open request has this id of its client."""
        return rid in self._by_client_id

    def with_client_id(self, rid: str | None) -> list[OpenRequest]:
        """Returns the open requests with this id of their client: one, or the prompts of a call, or their samples.

        rid: None: all
        """
        if rid is None:
            return list(self._open.values())
        return [request for each, request in self._by_client_id.items() if each == rid or _is_part(each, rid)]

    def hold(self) -> None:
        """Takes all requests from their ranks, and sends none until `go_on`."""
        self.is_held = True
        self.take_back()

    def go_on(self) -> None:
        """Sends requests to ranks again."""
        self.is_held = False
        self.send_waiting()

    def cut_short_all(self, rid: str | None) -> None:
        """Ends the open requests with this id of their client, with their output so far. rid: None = all"""
        for request in self.with_client_id(rid):
            self.cut_short(request, "the request was aborted")

    def cut_short(self, request: OpenRequest, why: str) -> None:
        """Ends a request with its output so far, or with an error if it has none."""
        self.counters["num_aborted"] += 1
        if request.rank is not None:
            self._send(request.rank, Abort(request.request_id))
        own_s = request.spec.timeout_s
        if request.num_output:
            request.cut_short(why)
        elif own_s is not None and time.monotonic() - request.submitted_s > own_s:
            late = OwnTimeoutError(f"{why}, and no token had come out yet; give it more", field="timeout")
            request.fail(late, was_cut_short=True)
        else:
            failure = UnavailableError(f"{why}, and no token had come out yet; send it again later")
            request.fail(failure, was_cut_short=True)
        self._forget(request)

    def end_overdue(self, now_s: float) -> None:
        """Cuts short requests that have run or waited for too long. now_s: time.monotonic()"""
        for request in list(self._open.values()):
            if (why := why_overdue(request, self._config.server, self.is_held, now_s)) is not None:
                self.cut_short(request, why)

    def send_waiting(self) -> None:
        """Sends requests to ranks, in the order of their line, until all ranks are full or none waits."""
        while not self.is_held and (request_id := self._lines.pop(self._capacity.has_room)) is not None:
            self._start(self._open[request_id])

    def take_back(self) -> None:
        """Takes all requests from their ranks. They wait again in their old order, with their output so far."""
        for request in self._open.values():
            if request.rank is not None:
                self._send(request.rank, Abort(request.request_id))
                self._leave(request)
                self._queue(request)

    def abort(self, request: OpenRequest) -> None:
        """Ends a request whose reader has left."""
        if request.request_id in self._open:
            self.counters["num_aborted"] += 1
            if request.rank is not None:
                self._send(request.rank, Abort(request.request_id))
            self._forget(request)

    def take(self, message: Tokens) -> None:
        """Hands tokens to their requests; drops those of requests that the rank no longer serves."""
        self.num_events[message.rank] += len(message.events)
        now_s = time.monotonic()
        for event in message.events:
            request = self._open.get(event.request_id)
            if request is None or request.rank != message.rank or event.attempt != request.attempt:
                continue
            if request.lacks_tokens_before(event):
                self._submit_again(request, message.rank)
                continue
            is_handed_over = self._capacity.is_prefill(message.rank) and request.is_handed_over(event)
            if is_handed_over:
                request.end_handover("")
                event = msgspec.structs.replace(event, finish=None)
            if not request.has_started and event.token_ids:
                request.has_started = True
                self._capacity.started(message.rank, event.request_id)
            num_before = request.num_output
            request.apply(event)
            if request.num_output > num_before:
                self.stats.count_tokens(request, request.num_output - num_before, now_s)
                self.stats.count_handover(request, now_s)
            if is_handed_over:
                request.handed_over_s, request.resumed_s = now_s, None
            if request.is_done:
                self.counters["num_failed" if request.failure else "num_finished"] += 1
                if event.finish is None:  # a stop string, which ranks do not know
                    self._send(message.rank, Abort(request.request_id))
                self._forget(request)
            elif is_handed_over:
                self._leave(request)
                self._queue(request)
                self.send_waiting()

    def forget_prompts(self) -> None:
        """Forgets which prompts each rank may have in its cache."""
        self._capacity.forget_prompts()

    def take_status(self, status: Status) -> None:
        self._capacity.update(status)

    def fail_all(self, reason: str) -> None:
        """Ends all requests with an error."""
        self._lines.clear()  # first, so that none is sent in the place of one that ends
        for request in list(self._open.values()):
            self._fail(request, reason)

    def suspect(self, rank: int) -> None:
        """Sends nothing new to a rank. Its requests stay there until it is known to be masked."""
        self._capacity.lose([rank])

    def regroup(self, change: Regrouped) -> int:
        """Moves the requests of masked ranks to others; returns how many moved.

        A request fails if more than MAX_LOSSES ranks end while they serve it, since it may be the cause. A late rank is
        not counted, and a new token shows that the request is not the cause.
        """
        self._capacity.lose(change.masked)
        self._capacity.regain(change.rejoined)
        num_moved = 0
        for request in list(self._open.values()):
            lost = request.rank
            if lost is None or lost not in change.masked:
                continue
            self._send(lost, Abort(request.request_id))  # a late rank still holds it
            if self._capacity.is_prefill(lost) and lost not in change.ended:
                request.end_handover("late")
            if lost not in change.ended or self._count_loss(request, lost):
                self._leave(request)
                self._start(request, may_choose=False)
                num_moved += 1
        self.counters["num_moved"] += num_moved
        self.send_waiting()
        return num_moved

    def _count_loss(self, request: OpenRequest, rank: int) -> bool:
        """Counts that a rank has ended with this request. Fails it after too many; returns whether it goes on."""
        num_losses = request.count_loss()
        if num_losses > MAX_LOSSES:
            who = f"{num_losses} ranks were lost while they served this request, the last one was rank {rank}"
            self._fail(request, f"{who}; it is not tried again")
        return num_losses <= MAX_LOSSES

    def _queue(self, request: OpenRequest) -> None:
        spec = request.spec
        self._lines.push(spec.rank, request.request_id, request.submitted_s, spec.priority, spec.num_tokens)

    def _start(self, request: OpenRequest, may_choose: bool = True) -> None:
        """Sends a request to a rank. may_choose: the one that its caller named, if that serves"""
        self._submit(request, self._capacity.send(request, may_choose))

    def _submit_again(self, request: OpenRequest, rank: int) -> None:
        request.leave_rank()
        self.counters["num_resubmitted"] += 1
        self._submit(request, rank)

    def _submit(self, request: OpenRequest, rank: int) -> None:
        request.go_to(rank)
        is_prefill = self._capacity.is_prefill(rank)
        self._unexpect(request, rank)
        if not is_prefill:
            if request.handed_over_s is not None and request.resumed_s is None:
                request.resumed_s = time.monotonic()
            if request.went_elsewhere(self._capacity.host_of(rank)):
                request.end_handover("elsewhere")
            self._send(rank, request.submit_message())
            return
        spec = request.spec
        request.handover = self._capacity.handover_of(rank, request.attempt)
        expects = self._capacity.expect(request) if spec.params.max_new_tokens > request.num_output + 1 else None
        request.hand_over_to = None if expects is None else self._capacity.host_of(expects)
        self._send(rank, request.submit_message(prefill=True))
        if expects is not None:
            self._send(expects, Expect(request.request_id, spec.prompt_ids, spec.salt, request.handover))

    def _unexpect(self, request: OpenRequest, rank: int | None) -> None:
        """Tells the decode rank that expects a request that it does not come, unless it is sent there now."""
        if (expects := self._capacity.unexpect(request.request_id, rank)) is not None:
            self._send(expects, Abort(request.request_id))

    def _give_back(self, request: OpenRequest, rank: int) -> None:
        """Takes a request from its rank, for another one."""
        self._send(rank, Abort(request.request_id))
        self._leave(request)
        self._queue(request)

    def _leave(self, request: OpenRequest) -> None:
        if request.rank is not None:
            self._capacity.free(request.rank, request.request_id)
        request.leave_rank()

    def _fail(self, request: OpenRequest, reason: str) -> None:
        request.fail(UnavailableError(reason))
        self.counters["num_failed"] += 1
        self._forget(request)

    def _forget(self, request: OpenRequest) -> None:
        del self._open[request.request_id]
        now_s = time.monotonic()
        self._drain_rate.count(request.spec.num_tokens, now_s)
        self.stats.count_end(request, now_s)
        for tell in self.at_end:
            tell(request)
        self._by_client_id.pop(request.spec.rid or "", None)
        self._capacity.forget_pages(request.request_id)
        self._unexpect(request, None)
        if request.rank is None:
            self._lines.remove(request.spec.rank, request.request_id)
            return
        self._capacity.free(request.rank, request.request_id)
        self.send_waiting()


def why_overdue(request: OpenRequest, server: ServerConfig, is_held: bool, now_s: float) -> str | None:
    """Returns why a request must be cut short; None while it may go on. is_held: a pause keeps it from its rank"""
    age_s = now_s - request.submitted_s
    limits_s = [each for each in (request.spec.timeout_s, server.request_deadline_s) if each is not None]
    if limits_s and age_s > min(limits_s):
        return f"the request took longer than {min(limits_s):g} s"
    most_s = server.queue_deadline_s
    is_new = request.rank is None and not request.num_output and not is_held
    if most_s is not None and is_new and age_s > most_s:
        return f"the request waited longer than server.queue_deadline_s = {most_s:g} s"
    return None


def _is_part(rid: str, of: str) -> bool:
    """Returns whether an id belongs to a prompt or sample of a call: the call's id, then one or two of -NUMBER."""
    whole, _, number = rid.rpartition("-")
    if not number.isdecimal():
        return False
    call, _, prompt = whole.rpartition("-")
    return whole == of or (call == of and prompt.isdecimal())


_AHEAD = 2  # the fewest requests at a rank beyond those it runs; they start without a round trip


def ranks_to_choose_from(num_requests: Mapping[int, int], slots: int, most: int) -> list[int]:
    """Returns the ranks that a request may go to: those with a free slot, or else those with room.

    So no prefix or session draws a request to a rank where it must wait while another rank could run it at once.

    num_requests: by rank, that it has now;  slots: requests that a rank runs;  most: requests that it may have
    """
    with_slot = [rank for rank, number in num_requests.items() if number < slots]
    return with_slot or [rank for rank, number in num_requests.items() if number < most]


@dataclass(frozen=True)
class PrefillLaunch:
    """Prefill ranks that compute the same as the decode ranks. num_pages: for which each has memory, for this front end

    A page has the tokens of a block. It counts from the moment in which its prompt is sent until a decode rank has it.
    state_pages: that a prompt has beside those, of a model that keeps states
    """

    launch_id: int
    num_pages: int
    state_pages: int


class RankCapacity:
    """The number of requests at each rank, and the routers that choose among the ranks with room.

    A rank gets as many requests as it can run and a few more, so that it never idles between two of them. Front ends
    do not know each other's requests, so each of several counts with its share of a rank's slots.

    Whether a prefill rank computes a prompt is decided here alone, when a decode rank has room for its request.

    prefill_launch: the prefill ranks; None: they are not known to compute the same as decode ranks
    routes: where requests began, "prefill" or why not; {} without prefill ranks
    sources: where the pages of prompts were when they were sent first, as Source says
    """

    def __init__(self, config: ServeConfig):
        self._config = config
        self._num_sent: Counter[int] = Counter()  # requests that a rank has now
        running = config.engine.max_running_requests
        self._most_sent = running + max(_AHEAD, running // 8)
        self._slots = -(-running // config.num_front_ends)
        self._router = self._new_router(config.cache.block_size)
        self._first_prefill = config.parallel.num_ranks
        self._per_host = config.ranks_per_host
        self._prefill = self._new_router(config.cache.block_size, prefill=True)
        self.prefill_launch: PrefillLaunch | None = None
        self._prompt = RoutedPrompt([], "")
        self._pages: dict[str, tuple[int, int]] = {}  # by request: its prefill rank, and pages on their way from there
        self._expects: dict[str, int] = {}  # by request that a prefill rank has: the decode rank that takes its pages
        self.routes: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.lose_prefill()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that requests are sent to."""
        return self._router.ranks

    def begin_launch(self, block_size: int, masked: Collection[int], sharing: PageSharing | None = None) -> None:
        """Begins with new ranks without requests. block_size: of their caches, in tokens;  masked: lost ranks

        sharing: as in RequestRouter
        """
        self._router = self._new_router(block_size, sharing)
        self._expects.clear()
        self._num_sent.clear()
        self.lose(masked)

    def lose(self, ranks: Collection[int]) -> None:
        """Sends nothing more to these ranks."""
        for rank in ranks:
            self._router_of(rank).mark_lost(rank)
        for request_id in [each for each, rank in self._expects.items() if rank in ranks]:
            self.unexpect(request_id, None)

    def begin_prefill(self, block_size: int, masked: Collection[int], sharing: PageSharing | None = None) -> None:
        """Begins with new prefill ranks without requests; as begin_launch."""
        self._prefill = self._new_router(block_size, sharing, prefill=True)
        self.lose(masked)

    def lose_prefill(self) -> None:
        """Sends nothing more to prefill ranks."""
        self.lose(self._prefill.ranks)

    def is_prefill(self, rank: int | None) -> bool:
        """Returns whether this is a prefill rank."""
        return rank is not None and rank >= self._first_prefill

    def host_of(self, rank: int) -> int:
        """Returns the host of a decode rank, counted from 0."""
        return rank // self._per_host

    def _router_of(self, rank: int) -> RequestRouter:
        return self._prefill if self.is_prefill(rank) else self._router

    def regain(self, ranks: Collection[int]) -> None:
        """Sends to these ranks again."""
        for rank in ranks:
            self._router_of(rank).mark_back(rank)

    def has_room(self, rank: int | None) -> bool:
        """Returns whether a request may be sent to this rank. rank: None, or one that is lost: to any"""
        asked = (rank,) if rank in self._router.ranks else self._router.ranks
        return any(self._num_sent[each] < self._most_sent for each in asked)

    def send(self, request: OpenRequest, may_choose: bool) -> int:
        """Returns the rank for a request, and counts it there. may_choose: the one its caller named, if that serves"""
        spec = request.spec
        request.pages_at = None
        # The load of a rank that the caller chose shows in that rank's own reports.
        if may_choose and spec.rank is not None and spec.rank in self._router.ranks:
            rank = spec.rank
        elif request.num_output and self._expects.get(request.request_id) in self._with_room(self._router):
            rank = self._expects[request.request_id]  # which has its pages, and where it counts
            self._router.arrived(request.request_id)
        else:
            why, among = self._why_local(request)
            router = self._router if why else self._prefill
            num_left = spec.params.max_new_tokens - request.num_output
            rank = router.route(
                self._prompt_of(request),
                spec.session_id,
                request_id=request.request_id,
                max_new_tokens=num_left if why else 1,
                among=among,
                group=spec.group,
            )
            source = router.source_of(request.request_id)
            if source.holder is not None:
                request.pages_at = source.holder - (0 if why else self._first_prefill)
            if why is None and spec.params.max_new_tokens > 1:
                self._pages[request.request_id] = rank, self._num_pages(request)
            if not request.attempt:
                self.sources[source.where] += 1
                if self._config.parallel.num_prefill_ranks:
                    request.route = why or "prefill"
                    self.routes[request.route] += 1
        self._num_sent[rank] += 1
        return rank

    def expect(self, request: OpenRequest) -> int | None:
        """Returns the decode rank that a request will go to from its prefill rank, and counts its output there.

        None: there is none, or it is not known yet, since others will be free before
        """
        spec, among = request.spec, self._with_room(self._router)
        if not among:
            return None
        rank = self._router.route(
            self._prompt_of(request),
            spec.session_id,
            request_id=request.request_id,
            max_new_tokens=spec.params.max_new_tokens - request.num_output,
            among=among,
            group=spec.group,
            is_ahead=True,
        )
        self._expects[request.request_id] = rank
        return rank

    def unexpect(self, request_id: str, rank: int | None) -> int | None:
        """Notes where a request is sent; returns the decode rank that expects it in vain. None: there is none"""
        expects = self._expects.pop(request_id, None)
        if expects is None or expects == rank:
            return None
        if rank is None or self.is_prefill(rank):  # else the router counts it where it goes
            self._router.finished(request_id)
        return expects

    def _prompt_of(self, request: OpenRequest) -> RoutedPrompt:
        """Returns what a request has to prefill. The last one's is kept, with its hashes: the routers are asked for it
        up to three times in a row, and samples of a prompt come one after the other."""
        token_ids = [*request.spec.prompt_ids, *request.matcher.output_ids]
        if (token_ids, request.spec.salt) != (self._prompt.token_ids, self._prompt.salt):
            self._prompt = RoutedPrompt(token_ids, request.spec.salt)
        return self._prompt

    def _with_room(self, router: RequestRouter) -> list[int]:
        return ranks_to_choose_from({each: self._num_sent[each] for each in router.ranks}, self._slots, self._most_sent)

    def _with_pages(self, num_pages: int) -> list[int]:
        """Returns the prefill ranks with room for a request, and for so many pages on their way to decode ranks."""
        most = 0 if self.prefill_launch is None else self.prefill_launch.num_pages
        used: Counter[int] = Counter()
        for rank, number in self._pages.values():
            used[rank] += number
        return [rank for rank in self._with_room(self._prefill) if used[rank] + num_pages <= most]

    def _num_pages(self, request: OpenRequest) -> int:
        """Returns how many pages of a prompt a prefill rank hands over."""
        state_pages = 0 if self.prefill_launch is None else self.prefill_launch.state_pages
        return len(request.spec.prompt_ids) // self._router.block_size - request.hand_over_from + state_pages

    def handover_of(self, rank: int, attempt: int) -> Handover:
        """Returns where a prefill rank leaves pages of a request, which it has not come to the end of."""
        launch_id = 0 if self.prefill_launch is None else self.prefill_launch.launch_id
        return Handover(rank - self._first_prefill, launch_id, attempt, "peer_lost")

    def _why_local(self, request: OpenRequest) -> tuple[str | None, list[int]]:
        """Returns why no prefill rank gets a request, None: one does; and the ranks that have room for it."""
        local, spec = self._with_room(self._router), request.spec
        if request.num_output:
            with_pages = [rank for rank in local if request.hand_over_to == self.host_of(rank)]
            return "begun", with_pages or local
        if self.prefill_launch is None or not self._prefill.ranks or not self._router.ranks:
            return "no_prefill_rank", local
        if not self._with_room(self._prefill):
            return "prefill_full", local
        most_cached, least_cached = self._router.cached(self._prompt_of(request))
        request.hand_over_from = least_cached // self._router.block_size
        among = self._with_pages(self._num_pages(request) if spec.params.max_new_tokens > 1 else 0)
        if not among:
            return "pages_full", local
        why = why_local(
            len(spec.prompt_ids) - most_cached,
            self._config.parallel.prefill_from_tokens,
            self._prefill.prompt_wait,
            self._router.prompt_wait,
            min(self._num_sent[each] for each in self._router.ranks),
        )
        return why, local if why else among

    def free(self, rank: int, request_id: str) -> None:
        """Notes that a request has left its rank."""
        self._num_sent[rank] -= 1
        self._router_of(rank).finished(request_id)

    def started(self, rank: int, request_id: str) -> None:
        """Notes that the first token of a request has come from its rank."""
        if not self.is_prefill(rank):
            self.forget_pages(request_id)
        self._router_of(rank).started(request_id)

    def forget_pages(self, request_id: str) -> None:
        """Notes that no pages of a request are on their way any more."""
        self._pages.pop(request_id, None)

    def update(self, status: Status) -> None:
        """Takes a rank's report of its load."""
        self._router_of(status.rank).update(status.rank, status.pending_tokens, status.page_cost)

    def forget_prompts(self) -> None:
        """Forgets which prompts each rank may have in its cache."""
        self._router.forget_prompts()
        self._prefill.forget_prompts()

    def _new_router(self, block_size: int, sharing: PageSharing | None = None, prefill: bool = False) -> RequestRouter:
        parallel, load_gap = self._config.parallel, self._config.server.routing_load_gap
        first, number = (parallel.num_ranks, parallel.num_prefill_ranks) if prefill else (0, parallel.num_ranks)
        return RequestRouter(number, load_gap, block_size, first_rank=first, sharing=sharing)


class PrefillRequests:
    """What the book holds for prefill ranks. Where they fail, decode ranks serve: a request is a value.

    first: number of the first of them in the book
    """

    def __init__(self, book: RequestBook, first: int):
        self._book = book
        self._first = first

    def __len__(self) -> int:
        return self._book.num_at_prefill()

    def let_end(self) -> None:
        self._book.leave_prefill(None)

    def fail_all(self, reason: str) -> None:
        self._book.leave_prefill(None)

    def wait_for_launch(self, lost_rank: int | None) -> None:
        self._book.leave_prefill(None if lost_rank is None else self._first + lost_rank)

    def begin_launch(self, block_size: int, masked: Collection[int], sharing: PageSharing | None = None) -> int:
        self._book.begin_prefill(block_size, self._numbers(masked), sharing)
        return 0

    def resubmit(self, rank: int) -> None:
        self._book.resubmit(self._first + rank)

    def suspect(self, rank: int) -> None:
        self._book.suspect(self._first + rank)

    def regroup(self, change: Regrouped) -> int:
        own = (change.masked, change.rejoined, change.ended)
        return self._book.regroup(Regrouped(*(self._numbers(each) for each in own)))

    def take(self, message: Tokens) -> None:
        self._book.take(msgspec.structs.replace(message, rank=self._first + message.rank))

    def leave_silent(self, rank: int) -> None:
        """Moves the requests of a rank that shows no sign of life to decode ranks."""
        self._book.leave_silent(self._first + rank)

    def hear_again(self, rank: int) -> None:
        """Sends requests to a rank that was silent."""
        self._book.hear_again(self._first + rank)

    def take_status(self, status: Status) -> None:
        self._book.take_status(msgspec.structs.replace(status, rank=self._first + status.rank))

    def _numbers(self, ranks: Collection[int]) -> list[int]:
        return [self._first + rank for rank in ranks]


class RestartWait:
    """Keeps the requests of a lost launch for the next one, for a bounded time.

    The prompt, parameters, seed and output of each are known here, so it goes on afterwards with the same tokens.

    deadline_s: the longest wait, from the first loss until ranks serve again
    """

    def __init__(self, workers: RankTable, book: GroupRequests, deadline_s: float):
        self._workers = workers
        self._book = book
        self._deadline_s = deadline_s
        # Ids of launches: the last one that was ready, that was lost, and whose restart is no longer awaited.
        self._serving = self._lost = self._given_up = -1
        self._ends_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the launcher is expected to start the lost ranks again."""
        workers = self._workers
        return workers.loss is not None and workers.is_restarted and workers.launch_id != self._given_up

    def begin(self) -> None:
        """Begins to count the wait, where a launch is lost and the next one is expected."""
        if self.is_open:
            self._ends_s = self._ends_s or time.monotonic() + self._deadline_s

    def lose(self, lost_rank: int | None) -> None:
        """Lets the requests of a lost launch wait for its restart. lost_rank: the cause; None = not known"""
        if self._lost != self._workers.launch_id:
            self._lost = self._workers.launch_id
            self._book.wait_for_launch(lost_rank)

    def serve(self) -> None:
        """Submits the waiting requests as soon as ranks serve, once for each launch."""
        limits = self._workers.limits
        if not self._workers.is_ready or limits is None or self._serving == self._workers.launch_id:
            return
        self._serving, self._ends_s = self._workers.launch_id, None
        num_again = self._book.begin_launch(limits.block_size, self._workers.masked, self._workers.sharing)
        if num_again:
            log.warning("the ranks were started again; requests that go on: %d", num_again)

    def give_up(self) -> None:
        """Stops waiting: nobody starts the lost ranks again."""
        self._ends_s, self._given_up = None, self._workers.launch_id

    def overdue(self, now_s: float) -> str | None:
        """Returns, once, why requests no longer wait; None while they may."""
        if self._ends_s is None or now_s < self._ends_s:
            return None
        self.give_up()
        why = self._workers.loss or self._workers.missing()
        return f"the ranks were not started again within server.restart_deadline_s = {self._deadline_s:g} s ({why})"
