"""The ranks as the HTTP server and `LLM` use them: ready or not, submit, abort, end.

Every accepted request ends, with tokens or with an error. All ranks attach to one socket, whose messages are handled as
they arrive. One task looks for silent ranks, another for requests that have taken too long.

A launcher that watches the processes may attach to the same socket, as *supervisor*. It is the first to report that the
launch is over (`Fatal`), or that a rank has died without which the others may go on (`Exited`). A front end that starts
beside running ranks may hear this before any rank has attached: it believes the launcher, and draws no conclusions
about ranks that it does not know yet.

A lost rank ends the launch, unless the ranks have said at their start that they can go on without one. Then the front
end waits for their report: with `Members` they go on, and the requests of the lost rank move to others; with `Fatal`
they cannot.
"""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from moe_serve.config import ServeConfig, model_dir
from moe_serve.engine.output.incremental_decoder import Decoder
from moe_serve.engine.protocol.messages import (
    ALIVE_PERIOD_S,
    NEXT_STEP,
    SUPERVISOR,
    Alive,
    Answer,
    Apart,
    BalanceReport,
    Draining,
    Exited,
    Fatal,
    FlushCache,
    ForFrontEnds,
    Goodbye,
    Hello,
    Members,
    Message,
    ModelLimits,
    Profile,
    Progress,
    Pulse,
    Ready,
    Refused,
    Shutdown,
    Status,
    ToFrontEnd,
    Tokens,
    Voided,
    Wake,
    decode_to_front_end,
)
from moe_serve.errors import RequestError, name_ranks
from moe_serve.links.link import Link
from moe_serve.log import RareWarnings, get_logger
from moe_serve.process_facts import core_seconds
from moe_serve.server.ranks.balance import BalanceBook
from moe_serve.server.ranks.calls import ApiServers, Command, CommandBook
from moe_serve.server.ranks.rank_table import Liveness, RankTable, RankView
from moe_serve.server.ranks.request_book import GroupRequests, PrefillLaunch, PrefillRequests, RequestBook, RestartWait
from moe_serve.server.ranks.router_socket import RouterSocket
from moe_serve.server.requests.open_request import Changes, Notifier, OpenRequest, RequestSpec, UnavailableError
from moe_serve.server.workers.grammar_check import GrammarCheck

log = get_logger(__name__)
Observer = Callable[[ToFrontEnd], None]

_MAX_SUPERVISORS = 4
_DEADLINE_LOOK_S = 0.05  # between two searches for requests that have taken too long
_LOOK_S = 0.02  # between two checks whether the last request has ended
_WRITE_S = 60.0  # for what a rank does to carry out a command, such as writing a dump
_UNNAMED_LOSS_S = 0.5  # how long a report that cannot name the lost rank waits for one that can
_GOODBYE_S = 3.0  # how long the ranks may take to end


class RankGroup:
    """The ranks of one launch, seen from a front end: keeps their table up to date, and tells `requests` what happens.

    requests: those that these ranks serve
    observer: called with what the ranks report while they start and end (Hello, Progress, Ready, Fatal, Goodbye)
    """

    _while_apart = "no request is served here"

    def __init__(self, config: ServeConfig, requests: GroupRequests, observer: Observer | None, link: Link):
        self.config = config
        # A rank carries a command out between two steps, and writes a file at most.
        self._command_deadline_s = config.engine.step_deadline_s + _WRITE_S
        self.workers = RankTable(config.parallel.num_ranks)
        self.balance = BalanceBook(config.eplb.mode)
        self._requests = requests
        self._voids: dict[int, Voided] = {}  # what ranks say of the void step, the last of each
        self._commands = CommandBook(self.send_to_rank, secrets.randbits(52))
        self._link = link
        self._supervisors = Supervisors(observer, self._send)
        self._liveness = Liveness(config)
        self._restart = RestartWait(self.workers, requests, config.server.restart_deadline_s)
        self._drained: tuple[int | None, str] = None, ""  # the last launch that was asked to end, and why
        self._changed = Condition()  # a rank has attached, got ready, ended or was lost
        self._is_finishing = False  # no new requests are accepted
        self._is_draining = False  # and ranks are expected to end
        self._started_s = 0.0
        self._group: Members | Apart | None = None  # what launchers were told last of who takes part
        self._said: tuple[int, str] | None = None  # the last loss in the log: its launch, and why
        self._warnings = RareWarnings(log)
        self._socket: RouterSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Binds the address that ranks attach to. Raises LaunchError when it is taken."""
        self._socket = RouterSocket(self._link, self._receive)
        self._started_s = self.workers.began_s = time.monotonic()
        self._tasks = [asyncio.create_task(self._keep_in_touch())]

    @property
    def link(self) -> Link:
        """How ranks attach; over TCP with the real port, also where the configuration says 0."""
        assert self._socket is not None, "start() first"
        return self._socket.link

    async def finish(self, deadline_s: float) -> int:
        """Takes no more requests, and waits for the open ones. Returns how many are still open at the deadline."""
        self._is_finishing = True
        return await self._let_end(deadline_s)

    async def _let_end(self, deadline_s: float) -> int:
        """Waits for the open requests; returns how many are left at the deadline. Ends a pause, which holds some."""
        self._requests.let_end()
        ends_s = time.monotonic() + deadline_s
        while len(self._requests) and time.monotonic() < ends_s:
            await asyncio.sleep(_LOOK_S)
        return len(self._requests)

    def drain(self, reason: str = "the server is ending") -> None:
        """Takes no more requests, and ends the open ones with an error; ranks may end from now on."""
        self._is_draining = True
        self._fail_all(reason)
        self._changed.notify_all()

    async def close(self) -> None:
        """Ends the ranks and closes the socket; returns within a few seconds whatever the ranks do."""
        self.drain()
        if self._socket is not None:
            await self._end_launch_in_order()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _end_launch_in_order(self) -> None:
        self._end_ranks()
        deadline_s = time.monotonic() + _GOODBYE_S
        # A rank that is still starting does not listen; the process that started it ends it.
        while self.workers.loss is None and any(view.serves for view in self.workers):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not await self._changed.wait(left_s):
                break

    async def wait_until_ready(self) -> ModelLimits:
        """Returns what requests must respect, once all ranks take them.

        Raises UnavailableError when a rank is lost first, or the ranks do not come within server.attach_deadline_s.
        """
        while (problem := self.problem()) is not None:
            if self.workers.loss is not None or self._is_draining:
                raise UnavailableError(self.workers.loss or problem)
            await self._changed.wait(1.0)
        return self.limits

    @property
    def limits(self) -> ModelLimits:
        """What a request must respect. Raises UnavailableError while that is not known."""
        limits = self.workers.limits
        if limits is None:
            raise UnavailableError(self.problem() or "the ranks are starting")
        return limits

    def problem(self) -> str | None:
        """Returns why no request can be served now, with the rank to blame if there is one; None if all is well."""
        if self._is_draining or self._is_finishing:
            return "the server is ending"
        if self._awaits_restart:
            return f"the ranks are being started again: {self.workers.loss}"
        if self.workers.loss is not None:
            return self.workers.loss
        if self.workers.apart is not None:
            return self.workers.apart
        if (asked := self._asked_to_end()) is not None:
            return asked
        if not self.workers.is_ready:
            return f"starting: {self.workers.missing()}"
        return None

    @property
    def is_restarting(self) -> bool:
        """Whether the ranks are starting, for the first time or again."""
        starts = self.workers.loss is None and not self.workers.is_ready and not self._is_draining
        return starts or self._awaits_restart

    async def wait_for_restart(self) -> None:
        """Waits while the ranks start again, for callers that prefer waiting to an UnavailableError."""
        while self.is_restarting:
            await self._changed.wait(0.2)

    def give_up(self, reason: str) -> None:
        """Ends the open requests with an error, since nobody starts the lost ranks again."""
        self._restart.give_up()
        self._fail_requests(reason)

    async def command(self, command: Command) -> Answer:
        """Sends a command to all ranks that take part, and returns the leader's answer. Fills in its call_id.

        Raises UnavailableError when the ranks cannot take it or do not answer, QueueFullError when too many are open.
        """
        return await self._commands.call(command, self._serving(), self._command_deadline_s)

    async def profile(self, command: Profile) -> list[Answer]:
        """Tells the ranks that take part to start or end a profile, and returns the answer of each.

        Raises as `command` does.
        """
        return await self._commands.call_each(command, self._serving(), self._command_deadline_s)

    async def flush(self) -> list[Answer]:
        """Empties the prefix caches of the ranks that take part, and the tiers below; raises as `command` does."""
        return await self._commands.call_each(FlushCache(0), self._serving(), self._command_deadline_s)

    def _serving(self) -> list[int]:
        """Returns the ranks that take part. Raises UnavailableError if none can serve now."""
        problem = self.problem()
        if problem is not None:
            raise UnavailableError(problem)
        return [view.rank for view in self.workers if view.serves]

    # --- ranks that attach, end and are lost -------------------------------------------------------------------------

    def report_loss(self, reason: str, rank: int = SUPERVISOR) -> None:
        """Takes a report from a caller that watches the processes: a rank is gone (SUPERVISOR: all are started again).

        If the others can go on without it, they will say so.
        """
        if rank == SUPERVISOR or not self.workers.can_spare(rank):
            self._end_launch(reason, None if rank == SUPERVISOR else rank)
        else:
            self._suspect(reason, rank)

    def _suspect(self, reason: str, rank: int) -> None:
        self.workers.suspect(rank, reason, time.monotonic())
        self._requests.suspect(rank)
        self._changed.notify_all()
        for view in self.workers:  # the others may sleep, and would notice at their next heartbeat
            self._send(view.identity, Wake(self.workers.launch_id, NEXT_STEP))

    def _asked_to_end(self) -> str | None:
        """Returns why the ranks of this launch were asked to end; None if they were not."""
        launch_id, reason = self._drained
        return reason if launch_id == self.workers.launch_id else None

    def _drain_ranks(self, view: RankView) -> None:
        """Ends all ranks, since one was asked to: once the open requests have ended, or at the deadline."""
        if self._asked_to_end() is not None:
            return
        deadline_s = self.config.server.drain_deadline_s
        reason = f"rank {view.rank} on {view.host} was asked to end, so all ranks end"
        self._drained = self.workers.launch_id, reason
        log.warning("%s; %d open requests have %g s to end", reason, len(self._requests), deadline_s)
        self._tasks.append(asyncio.create_task(self._end_drained(self.workers.launch_id, reason, deadline_s)))

    async def _end_drained(self, launch_id: int, reason: str, deadline_s: float) -> None:
        num_left = await self._let_end(deadline_s)
        if launch_id == self.workers.launch_id and self.workers.loss is None:
            if num_left:
                late = f"the request was open after server.drain_deadline_s = {deadline_s:g} s"
                self._fail_all(f"{reason}; {late}")
            self._end_ranks()

    def _end_ranks(self) -> None:
        for view in self.workers:
            self._send(view.identity, Shutdown())

    # --- messages -----------------------------------------------------------------------------------------------------

    def _receive(self, identity: bytes, data: bytes) -> None:
        try:
            message = decode_to_front_end(data)
        except msgspec.DecodeError as error:
            self._warnings.warn(f"{identity!r}", "dropped a message that is not one of ours: %s", error)
            return
        try:
            self._take(identity, message)
        except Exception:  # the outermost frame: open requests must end, not hang on a mistake of ours
            log.exception("the front end failed on a %s message", type(message).__name__)
            self._end_launch("the front end failed on a message of a rank; see its log", None)

    def _take(self, identity: bytes, message: ToFrontEnd) -> None:
        """Handles a message of a rank or a supervisor; drops those of past launches."""
        if isinstance(message, Hello):
            self._attach(identity, message)
            return
        if identity in self._supervisors:
            self._take_of_launcher(message)
            return
        if isinstance(message, Pulse):
            self.workers.pulse(message, time.monotonic())
            return
        view = self.workers.by_identity(identity)
        if isinstance(message, ForFrontEnds):
            if view is not None:
                self._take_of_front_end(message, view.rank)
            return
        if view is None or message.launch_id != self.workers.launch_id:
            return
        view.heard_s = time.monotonic()
        match message:
            case Tokens():
                self._requests.take(message)
            case Status():
                view.status = message
                self._requests.take_status(message)
            case Voided():
                self._voids[message.rank] = message
            case Members():
                self._regroup(message)
                self._explain_void(message.members)
            case Apart():
                self._set_apart(message)
            case Answer():
                self._commands.take(message)
            case BalanceReport() if view.mask_reason is None:  # a masked rank leads no more
                self.balance.take(message, time.time())
            case Fatal():
                self._take_fatal(view, message)
            case Progress():
                self.workers.progress(view, message)
                self._tell(message)
            case Ready():
                self.workers.ready(view, message)
                self._restart.serve()
                self._rank_is_ready(view.rank)
                self._tell(message)
            case Draining() if view.mask_reason is None:
                self._drain_ranks(view)
            case Goodbye():
                view.ended = True
                if not self._is_draining and view.mask_reason is None:
                    why = self._asked_to_end() or f"rank {view.rank} was told to end"
                    self._end_launch(f"{why}; start the ranks again", view.rank)
                self._tell(message)

    def _set_apart(self, message: Apart) -> None:
        """Notes that the ranks which are left have dropped their requests, and serve none until they regroup."""
        if self.workers.set_apart(message):
            log.warning("%s; %s until then", message.reason, self._while_apart)
            self._group = message
            self._tell(message)

    def _take_of_front_end(self, message: ForFrontEnds, rank: int) -> None:
        """Takes what another front end says; `Bridge` does. rank: it has passed that on"""

    def _rank_is_ready(self, rank: int) -> None:
        """Notes that a rank takes requests."""

    def _look_at_ranks(self, now_s: float) -> None:
        """Looks for signs of life of each rank, once a second; `PrefillGroup` does."""

    def _take_of_launcher(self, message: ToFrontEnd) -> None:
        """Takes a report of the launcher, possibly about a launch that is not known here yet."""
        match message:
            case Exited() if self.workers.has_process(message):
                self._suspect(message.reason, message.rank)
            case Fatal() if message.launch_id == self.workers.launch_id:
                self._end_launch(message.message, None if message.lost_rank == SUPERVISOR else message.lost_rank)
            case Fatal():
                self.workers.never_begin(message.launch_id)

    def _attach(self, identity: bytes, hello: Hello) -> None:
        if hello.rank == SUPERVISOR:
            story: list[Message] = [each for view in self.workers for each in self.workers.story(view)]
            self._supervisors.attach(identity, [*story, *filter(None, [self._group])])
            return
        now_s = time.monotonic()
        self._liveness.discount_own(self.workers, now_s)
        if self.workers.find_replaced_by(hello, now_s):
            self._end_launch("the ranks are gone without a word, and others have been started", None)
        arrival = self.workers.attach(identity, hello, now_s)
        if arrival.refusal is not None:
            self._warnings.warn("refused", "refused a rank: %s", arrival.refusal)
            self._send(identity, Refused(arrival.refusal))
        if arrival.refusal is not None or arrival.waits:
            return
        self._send(identity, Alive())
        if arrival.was_cut:
            log.warning("rank %d attached again after its connection was cut", hello.rank)
            self._requests.resubmit(hello.rank)
            self._commands.lose([hello.rank])
        self._tell(hello)

    def _take_fatal(self, view: RankView, message: Fatal) -> None:
        if view.mask_reason is not None:
            log.warning("rank %d, which was masked, has ended: %s", view.rank, message.message)
        elif message.lost_rank == view.rank:
            self.report_loss(f"rank {view.rank} on {view.host} failed: {message.message}", view.rank)
        elif message.lost_rank >= 0:
            lost = f"rank {message.lost_rank} on {self.workers.host_of(message.lost_rank)}"
            reason = f"rank {view.rank} on {view.host} reports that {lost} is lost: {message.message}"
            self._end_launch(reason, message.lost_rank)
        else:  # another peer or the launcher is about to report which rank it is
            reason = f"rank {view.rank} on {view.host} reports that a rank is lost: {message.message}"
            self._end_launch(reason, None, wait_s=_UNNAMED_LOSS_S)
        view.ended = True

    def _regroup(self, message: Members) -> None:
        """Moves the requests of masked ranks, and routes to ranks that have rejoined."""
        was_apart = self.workers.apart is not None
        change = self.workers.regroup(message)
        num_moved = self._requests.regroup(change)
        self._restart.serve()
        self._commands.lose(change.masked)
        if not (change.masked or change.rejoined or (was_apart and self.workers.apart is None)):
            return
        if not len(self._supervisors):  # a supervisor logs it itself
            serving = ", ".join(map(str, message.members))
            rejoined = ", ".join(map(str, change.rejoined))
            reason = f"rank {rejoined} has rejoined" if rejoined else message.reason
            log.warning("%s; serving: %s; requests moved: %d", reason, serving, num_moved)
        self._group = message
        self._tell(message)

    def _explain_void(self, members: list[int]) -> None:
        """Logs why a step was void, once all ranks that go on have said what they know of it."""
        if self._voids.keys() >= set(members):
            reports, self._voids = self._voids, {}
            if (sentence := why_void(reports.values(), self.workers.host_of)) is not None:
                log.warning("%s", sentence)

    def _end_launch(self, reason: str, lost_rank: int | None, wait_s: float = 0.0) -> None:
        """Ends the launch: no requests are taken. After wait_s the open ones end, or wait for the next launch."""
        is_news = self.workers.end_launch(reason, lost_rank)
        self._restart.begin()  # at once: the next launch may begin before this loss is settled
        if wait_s > 0:
            if is_news:
                asyncio.get_running_loop().call_later(wait_s, self._settle_loss, self.workers.launch_id)
        elif is_news or (len(self._requests) and not self._awaits_restart):
            self._settle_loss(self.workers.launch_id)
        self._changed.notify_all()

    def _settle_loss(self, launch_id: int) -> None:
        reason, lost_rank = self.workers.loss, self.workers.lost_rank
        if launch_id != self.workers.launch_id or reason is None:
            return  # the ranks were restarted
        if not self._is_draining and self._said != (launch_id, reason):
            log.error("%s", reason)
            self._explain_void([])
        self._said = launch_id, reason
        self._commands.fail_all(reason)
        if self._awaits_restart:
            self._restart.lose(lost_rank)
        else:
            self._fail_requests(reason)
        blamed = SUPERVISOR if lost_rank is None else lost_rank
        self._tell(Fatal(blamed, launch_id, reason, blamed))

    @property
    def _awaits_restart(self) -> bool:
        """Whether requests wait for ranks that are being started again."""
        return self._restart.is_open and not self._is_draining

    def _fail_all(self, reason: str) -> None:
        self._fail_requests(reason)
        self._commands.fail_all(reason)

    def _fail_requests(self, reason: str) -> None:
        self._requests.fail_all(reason)

    def _tell(self, message: ToFrontEnd) -> None:
        """Passes on what happens while the ranks start and end."""
        self._changed.notify_all()
        self._supervisors.tell(message)

    def send_to_rank(self, rank: int, message: Message) -> None:
        """Sends without waiting."""
        for view in self.workers:
            if view.rank == rank:
                self._send(view.identity, message)

    def _send(self, identity: bytes, message: Message) -> None:
        if self._socket is not None:
            self._socket.send(identity, message)

    # --- deadlines ----------------------------------------------------------------------------------------------------

    async def _keep_in_touch(self) -> None:
        while True:
            if self._socket is not None:
                self._socket.keep_alive([view.identity for view in self.workers], Alive())
            await asyncio.sleep(ALIVE_PERIOD_S)
            now_s = time.monotonic()
            self._liveness.discount_own(self.workers, now_s)
            if (why := self._restart.overdue(now_s)) is not None:
                self._fail_all(why)
            if self._is_draining or self.workers.loss is not None:
                continue
            if (lost := self._liveness.look(self.workers, now_s)) is not None:
                self._end_launch(*lost)
            self._look_at_ranks(now_s)
            if (why := self._liveness.late_start(self.workers, now_s)) is not None:
                self._end_launch(why, None)

    def describe_group(self) -> dict[str, Any]:
        """Returns the state of these ranks, for /server_info."""
        return {
            "state": self.problem() or "ready",
            "launch_id": f"{self.workers.launch_id:x}",
            "ranks_out": {str(rank): reason for rank, reason in self.workers.masked.items()},
            "ranks": self.workers.describe(time.monotonic()),
        }


class Bridge(RankGroup):
    """The ranks that decode, which usually do all, with the book of requests; and beside them prefill ranks, maybe.

    tokenizer: None = ids in, ids out
    observer:  called with what the ranks report while they start and end (Hello, Progress, Ready, Fatal, Goodbye)
    link:      how ranks attach
    prefill:   the ranks that compute prompts alone; None: there are none
    """

    def __init__(self, config: ServeConfig, tokenizer: Decoder | None, observer: Observer | None, link: Link):
        self.notifier = Notifier()
        self.book = RequestBook(config, tokenizer, self._send_to_one)
        self.grammars = GrammarCheck(None if tokenizer is None else str(model_dir(config.model)))
        super().__init__(config, self.book, observer, link)
        self.prefill: PrefillGroup | None = None
        if config.parallel.num_prefill_ranks:
            first = config.parallel.num_ranks
            requests, prefill_link = PrefillRequests(self.book, first), link.of_prefill()
            self.prefill = PrefillGroup(config.of_role("prefill"), requests, prefill_link, self._compare_roles)
        self.api_servers = ApiServers(
            link.worker,
            config.num_front_ends,
            config.server.api_workers,
            self.send_to_rank,
            lambda: [view.rank for view in self.workers if view.serves],
            self.book,
        )

    async def start(self) -> None:
        await super().start()
        self._tasks.append(asyncio.create_task(self._keep_deadlines()))
        if self.prefill is not None:
            await self.prefill.start()

    async def close(self) -> None:
        self.drain()
        await self.grammars.close()
        if self.prefill is not None:
            await asyncio.gather(super().close(), self.prefill.close())
        else:
            await super().close()

    async def flush_cache(self) -> list[Answer]:
        """Empties the prefix caches of the ranks of both roles that take part; returns the answers of decode ranks.

        Raises RequestError while requests are open, and UnavailableError and QueueFullError as `command` does.
        """
        if len(self.book):
            raise RequestError(f"{len(self.book)} requests are open; flush the cache when they have ended")
        groups: list[RankGroup] = [self]
        if self.prefill is not None and self.prefill.problem() is None:
            groups.append(self.prefill)
        answers = await asyncio.gather(*(group.flush() for group in groups))
        self.book.forget_prompts()
        return answers[0]

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, specs: Sequence[RequestSpec], changes: Changes) -> list[OpenRequest]:
        """Sends requests to their ranks, all or none.

        Raises UnavailableError when no request can be served now, QueueFullError when not all of them fit,
        and RequestError when there never can be.
        """
        problem = self.problem()
        if problem is not None:
            raise UnavailableError(problem)
        if len(specs) > self.book.capacity:
            raise RequestError(
                f"the call asks for {len(specs)} outputs but at most {self.book.capacity} requests are held at a time "
                "(engine.max_running_requests x ranks + engine.max_queued_requests); send fewer at once",
                field="sampling_params.n",
            )
        refusal = self.book.refusal(len(specs), sum(spec.num_tokens for spec in specs))
        if refusal is not None:
            self.book.counters["num_refused"] += len(specs)
            raise refusal
        num_ranks = self.workers.num_ranks
        counts = Counter(spec.rid for spec in specs if spec.rid is not None)
        twice = next((rid for rid, count in counts.items() if count > 1 or self.book.has_client_id(rid)), None)
        if twice is not None:
            raise RequestError(f"rid is {twice!r:.80}, which an open request has; choose another", field="rid")
        for spec in specs:
            if spec.rank is not None and not 0 <= spec.rank < num_ranks:
                raise RequestError(
                    f"routed_dp_rank is {spec.rank}, expected 0 to {num_ranks - 1}", field="routed_dp_rank"
                )
            if spec.rank in self.workers.masked:
                raise UnavailableError(
                    f"routed_dp_rank is {spec.rank}, which is masked now ({self.workers.masked[spec.rank]}); leave "
                    "routed_dp_rank out, or try again later"
                )
        return [self._open(spec, changes) for spec in specs]

    def ask_rank(self, spec: RequestSpec, changes: Changes) -> OpenRequest:
        """Sends a request of the server itself to the rank in its spec, however many requests are open."""
        return self._open(spec, changes, at_once=True)

    def _open(self, spec: RequestSpec, changes: Changes, at_once: bool = False) -> OpenRequest:
        prefix = f"{self.api_servers.number}:{self._started_s:.6f}"
        return self.book.open(prefix, spec, self.limits.eos_token_ids, changes, at_once)

    def problem(self) -> str | None:
        problem = super().problem()
        return problem if problem is None else self._named(problem)

    def _fail_requests(self, reason: str) -> None:
        self.book.fail_all(self._named(reason))

    def _named(self, reason: str) -> str:
        """Returns why nothing is served, with the decode ranks that are missing, where prefill ranks could be meant."""
        none_serve = self.workers.loss is not None or self.workers.apart is not None
        serving = set() if none_serve else {view.rank for view in self.workers if view.serves}
        missing = [f"decode rank {rank}" for rank in range(self.workers.num_ranks) if rank not in serving]
        if self.prefill is None or not missing or self._is_draining or self._is_finishing:
            return reason
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: {reason}"

    def describe(self) -> dict[str, Any]:
        """Returns the state of the ranks and of the queue, for /server_info."""
        return self.describe_group() | {
            "front_end": {"number": self.api_servers.number, "of": self.api_servers.num},
            "requests": {
                "open": len(self.book),
                "waiting": self.book.num_waiting,
                "waiting_tokens": self.book.waiting_tokens,
                "capacity": self.book.capacity,
                **self.book.counters,
            },
            "prefill": None if self.prefill is None else self.prefill.describe_group() | {"routes": self.book.routes},
        }

    # --- ranks of both roles ------------------------------------------------------------------------------------------

    def _send_to_one(self, rank: int, message: Message) -> None:
        """rank: as the book numbers them"""
        first = self.workers.num_ranks
        if self.prefill is not None and rank >= first:
            self.prefill.send_to_rank(rank - first, message)
        else:
            self.send_to_rank(rank, message)

    def _take_of_front_end(self, message: ForFrontEnds, rank: int) -> None:
        self.api_servers.take(message, rank)

    def _rank_is_ready(self, rank: int) -> None:
        self.api_servers.tell_again(rank)
        self._compare_roles()

    def _compare_roles(self) -> None:
        """Lets prefill ranks have requests once they are known to compute the same as those that decode."""
        if self.prefill is None:
            return
        own, theirs = self.workers.computes, self.prefill.workers.computes
        if not own or not theirs:
            return
        is_same = own == theirs  # else their launcher ends them, and says in what they differ
        num_pages = int(self.prefill.workers.info.get("handover_pages", 0)) // self.config.num_front_ends
        state_pages = int(self.prefill.workers.info.get("handover_state_pages", 0))
        launch = PrefillLaunch(self.prefill.workers.launch_id, num_pages, state_pages) if is_same else None
        self.prefill.is_alike = is_same
        self.book.trust_prefill(launch)

    async def _keep_deadlines(self) -> None:
        while True:
            await asyncio.sleep(_DEADLINE_LOOK_S)
            self.book.end_overdue(time.monotonic())


class PrefillGroup(RankGroup):
    """The ranks that compute prompts with their first token. on_ready: called when one of them takes requests

    is_alike: whether they compute the same as the decode ranks, as far as is known
    """

    _while_apart = "decode ranks compute all prompts"

    def __init__(self, config: ServeConfig, requests: PrefillRequests, link: Link, on_ready: Callable[[], None]):
        super().__init__(config, requests, None, link)
        self._on_ready = on_ready
        self._of_prefill = requests
        self.is_alike = True
        self._silent: set[int] = set()
        self._are_here = link.folder is not None
        self._core_s: dict[int, float] = {}  # by process, at the last look: the time of a core that it has used

    def _rank_is_ready(self, rank: int) -> None:
        self._on_ready()

    def _set_apart(self, message: Apart) -> None:
        super()._set_apart(message)
        if self.workers.apart is not None:
            self._requests.wait_for_launch(None)

    def _regroup(self, message: Members) -> None:
        was_apart = self.workers.apart is not None
        super()._regroup(message)
        for view in self.workers if was_apart and self.workers.apart is None else ():
            if view.serves:
                self._of_prefill.hear_again(view.rank)

    def describe_group(self) -> dict[str, Any]:
        found = super().describe_group()
        if not self.is_alike and found["state"] == "ready":
            found["state"] = "they compute other values than the decode ranks, so they get no requests"
        return found

    def _look_at_ranks(self, now_s: float) -> None:
        """Leaves ranks that show no sign of life, before it is known whether they are lost.

        One that computes is not silent: a long chunk on a core that others use too may keep it from saying so. Of one
        on another host that is not known.
        """
        serving = {view.rank: view for view in self.workers if view.serves and view.mask_reason is None}
        limit_s = self.config.engine.suspect_after_s
        for rank, view in serving.items():
            before_s = self._core_s.get(view.pid, 0.0)
            computes = (core_s := core_seconds(view.pid) if self._are_here else 0.0) > before_s
            self._core_s[view.pid] = core_s
            is_silent = view.pulse_s is not None and now_s - view.pulse_s > limit_s and not computes
            if is_silent and rank not in self._silent:
                log.warning("prefill rank %d was silent for %g s; decode ranks compute its prompts", rank, limit_s)
                self._of_prefill.leave_silent(rank)
            elif not is_silent and rank in self._silent:
                self._of_prefill.hear_again(rank)
            (self._silent.add if is_silent else self._silent.discard)(rank)
        self._silent &= set(serving)
        pids = {view.pid for view in serving.values()}
        self._core_s = {pid: core_s for pid, core_s in self._core_s.items() if pid in pids}


class Supervisors:
    """Passes reports on to the launchers that watch the ranks through this front end, and to an observer.

    send: sends a message to a socket
    """

    def __init__(self, observer: Observer | None, send: Callable[[bytes, Message], None]):
        self._observer = observer
        self._send = send
        self._identities: dict[bytes, None] = {}  # by age

    def __contains__(self, identity: object) -> bool:
        return identity in self._identities

    def __len__(self) -> int:
        return len(self._identities)

    def attach(self, identity: bytes, story: Iterable[Message]) -> None:
        """Adds one, and sends it the reports so far. Drops the oldest if there are too many."""
        self._identities.pop(identity, None)
        while len(self._identities) >= _MAX_SUPERVISORS:  # the oldest is gone, most likely
            self._identities.pop(next(iter(self._identities)))
        self._identities[identity] = None
        for message in story:
            self._send(identity, message)

    def tell(self, message: ToFrontEnd) -> None:
        """Passes on what happens while the ranks start and end."""
        if self._observer is not None:
            self._observer(message)
        for identity in self._identities:
            self._send(identity, message)


class Condition:
    """Wakes all waiters when something has changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        """Wakes them."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Returns whether anything changed within the timeout."""
        self._event.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)
            return True
        return False


def why_void(reports: Iterable[Voided], host_of: Callable[[int], str]) -> str | None:
    """Returns which ranks waited in which call for which others; None where none waited."""
    told = {report.rank: report for report in reports}
    waiting = {rank: report for rank, report in told.items() if report.missing}
    if not waiting:
        return None
    last = max(waiting.values(), key=lambda report: (report.step, report.layer, report.sequence))
    layer = "" if last.layer < 0 else f", layer {last.layer}"
    where = f"step {last.step}{layer}, {last.phase}{f' {last.sequence}' if last.sequence >= 0 else ''}"
    missed = {rank for report in waiting.values() for rank in report.missing}
    silent = missed - waiting.keys()
    blamed = silent or missed
    waiters = [rank for rank, report in waiting.items() if blamed & set(report.missing)]
    text = f"{where}: {name_ranks(waiters, host_of)} waited for {name_ranks(blamed, host_of)}"
    if silent:
        look_at = f"{'its' if len(silent) == 1 else 'their'} last lines"
        unheard = sorted({host_of(rank) for rank in silent} - {host_of(rank) for rank in told})
        if unheard:
            return (
                f"{text}, of which nothing was heard: look at {look_at}, and at the network to {' and '.join(unheard)}"
            )
        return f"{text}, which waited for nobody: look at {look_at}"
    apart = all(host_of(rank) != host_of(missing) for rank, report in waiting.items() for missing in report.missing)
    if apart:
        return f"{text}, all of them for ranks of other hosts: look at the network between these"
    return f"{text}, so they wait for each other: look at what each logged of this step"
