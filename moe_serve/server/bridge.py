"""The front end's side of the conversation with the ranks: routes requests to them and brings their tokens back.

Messages are taken as they arrive on the socket that all ranks attach to; one task shows every second that the front end
lives and looks for ranks that went silent. Every request that was taken ends: with tokens, or with an error.

Besides the ranks, the launcher may attach as *supervisor* (`Hello` with rank -1). It hears of everything that happens
while the ranks start, and may report the death of a rank (`Fatal`), which it sees first.

A lost rank ends the epoch, unless all ranks have said at their start that they can go on without one. Then the front
end waits for their word: `Members` when they go on, and the requests of the lost rank move to others; `Fatal` when they
cannot. Torch-free.
"""

import asyncio
import contextlib
import hmac
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from moe_serve.config import ServeConfig
from moe_serve.engine.incremental_decoder import Decoder
from moe_serve.engine.messages import (
    ALIVE_PERIOD_S,
    Alive,
    Fatal,
    Goodbye,
    Hello,
    Members,
    Message,
    ModelLimits,
    Progress,
    Ready,
    Shutdown,
    Status,
    ToFrontEnd,
    Tokens,
    decode_to_front_end,
)
from moe_serve.errors import QueueFullError, RequestError
from moe_serve.log import get_logger
from moe_serve.server.open_request import Changes, OpenRequest, RequestSpec, UnavailableError
from moe_serve.server.request_book import RequestBook
from moe_serve.server.router_socket import RouterSocket
from moe_serve.server.workers import RankView, WorkerTable

log = get_logger(__name__)

SUPERVISOR = -1  # the rank in the launcher's Hello
_UNNAMED_LOSS_S = 0.5  # how long a report that cannot name the lost rank waits for one that can
_GOODBYE_S = 3.0  # how long the ranks get to end
_REGROUP_GRACE_S = 2.0

Observer = Callable[[ToFrontEnd], None]


class Bridge:
    """The ranks, seen from the front end.

    tokenizer: None = ids in, ids out
    observer:  called with what the ranks say while they start and end (Hello, Progress, Ready, Fatal, Goodbye)
    token:     the secret that ranks must show; None: $MOE_SERVE_TOKEN
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Decoder | None,
        observer: Observer | None = None,
        token: str | None = None,
    ):
        num_ranks = config.parallel.num_ranks
        self.config = config
        self.tokenizer = tokenizer
        self.workers = WorkerTable(num_ranks)
        self.is_draining = False
        self.capacity = config.engine.max_running_requests * num_ranks + config.engine.max_queued_requests
        self._observer = observer
        self._token = os.environ.get("MOE_SERVE_TOKEN", "") if token is None else token
        self._book = RequestBook(config, tokenizer, self._send_to_rank)
        self._supervisors: set[bytes] = set()
        self._touch: asyncio.Task[None] | None = None
        self._socket: RouterSocket | None = None
        self._started_s = 0.0
        # A rank speaks between steps, and a step may last until its own deadline.
        self._silence_s = max(config.server.worker_deadline_s, config.engine.step_deadline_s)
        # Those that are left see the loss when they next wait for it, at the end of a step at the latest, and agree
        # within two deadlines.
        self._regroup_s = 3 * config.engine.step_deadline_s + _REGROUP_GRACE_S
        self._news = asyncio.Event()  # set whenever a rank attaches, gets ready, ends or is lost

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Binds the address that ranks attach to. Raises LaunchError when it is taken."""
        self._socket = RouterSocket(self.config.server.worker_host, self.config.server.worker_port, self._receive)
        self._started_s = time.monotonic()
        self._touch = asyncio.create_task(self._keep_in_touch())

    @property
    def worker_port(self) -> int:
        """The port that ranks attach to, also where the configuration says 0."""
        assert self._socket is not None, "start() first"
        return self._socket.port

    def drain(self, reason: str = "the server is ending") -> None:
        """Takes no more requests, and ends the open ones with an error."""
        self.is_draining = True
        self._book.fail_all(reason)
        self._news.set()

    async def close(self) -> None:
        """Ends the ranks and closes the socket; returns within a few seconds whatever the ranks do."""
        if self._socket is None or self._touch is None:
            return
        self.drain()
        for view in self.workers:
            self._send(view.identity, Shutdown())
        deadline_s = time.monotonic() + _GOODBYE_S
        # A rank that is still starting does not listen; whoever started it ends it.
        while self.workers.loss is None and any(view.serves for view in self.workers):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not await self._wait_for_news(left_s):
                break
        self._touch.cancel()
        await asyncio.gather(self._touch, return_exceptions=True)
        self._socket.close()
        self._socket = None

    async def wait_until_ready(self) -> ModelLimits:
        """Returns what requests must respect, once all ranks take them.

        Raises UnavailableError when a rank is lost first, or the ranks do not come within server.attach_deadline_s.
        """
        while (problem := self.problem()) is not None:
            if self.workers.loss is not None or self.is_draining:
                raise UnavailableError(problem)
            await self._wait_for_news(1.0)
        return self.limits

    @property
    def limits(self) -> ModelLimits:
        """What a request must respect. Raises UnavailableError while that is not known."""
        limits = self.workers.limits
        if limits is None:
            raise UnavailableError(self.problem() or "the ranks are starting")
        return limits

    def problem(self) -> str | None:
        """Returns why no request can be served now, naming the rank where one is to blame; None if all is well."""
        if self.is_draining:
            return "the server is ending"
        if self.workers.loss is not None:
            return self.workers.loss
        if not self.workers.is_ready:
            return f"starting: {self.workers.missing()}"
        return None

    def lose_rank(self, rank: int, reason: str) -> None:
        """A rank is gone, says whoever watches the processes and sees it first."""
        self._lose(rank, reason)

    @property
    def num_open(self) -> int:
        return len(self._book)

    @property
    def counters(self) -> dict[str, int]:
        """What has become of the requests since the start."""
        return self._book.counters

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, specs: Sequence[RequestSpec], changes: Changes) -> list[OpenRequest]:
        """Sends requests to their ranks, all or none.

        Raises UnavailableError when no request can be served now, QueueFullError when there is no room for all of them,
        and RequestError when there never can be.
        """
        problem = self.problem()
        if problem is not None:
            raise UnavailableError(problem)
        if len(specs) > self.capacity:
            raise RequestError(
                f"the call asks for {len(specs)} outputs but at most {self.capacity} requests are held at a time "
                "(engine.max_running_requests x ranks + engine.max_queued_requests); send fewer at once",
                field="sampling_params.n",
            )
        if self.num_open + len(specs) > self.capacity:
            self.counters["num_refused"] += len(specs)
            raise QueueFullError(
                f"{self.num_open} requests are open and {len(specs)} more do not fit into {self.capacity} "
                "(engine.max_running_requests x ranks + engine.max_queued_requests); come back later"
            )
        num_ranks = self.workers.num_ranks
        for spec in specs:
            if spec.rank is not None and not 0 <= spec.rank < num_ranks:
                raise RequestError(
                    f"routed_dp_rank is {spec.rank}, expected 0 to {num_ranks - 1}", field="routed_dp_rank"
                )
            if spec.rank in self.workers.out:
                raise UnavailableError(
                    f"routed_dp_rank is {spec.rank}, which takes no part now ({self.workers.out[spec.rank]}); leave "
                    "routed_dp_rank away, or come back later"
                )
        prefix, eos_token_ids = f"{self._started_s:.6f}", self.limits.eos_token_ids
        return [self._book.open(prefix, spec, eos_token_ids, changes) for spec in specs]

    def abort(self, request: OpenRequest) -> None:
        """Frees a request that nobody waits for any more."""
        self._book.abort(request)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _receive(self, identity: bytes, data: bytes) -> None:
        try:
            message = decode_to_front_end(data)
        except msgspec.DecodeError as error:
            log.warning("dropped a message that is not one of ours: %s", error)
            return
        try:
            self._take(identity, message)
        except (
            Exception
        ):  # the outermost frame of the event loop: open requests must end and not hang on a mistake of ours
            log.exception("the front end failed on a %s message", type(message).__name__)
            self._end_epoch("the front end failed on a message of a rank; see its log", None)

    def _take(self, identity: bytes, message: ToFrontEnd) -> None:
        if isinstance(message, Hello):
            self._attach(identity, message)
            return
        if identity in self._supervisors:
            if isinstance(message, Fatal) and message.epoch >= self.workers.epoch:
                self._lose(message.lost_rank, message.message)
            return
        view = self.workers.by_identity(identity)
        if view is None or message.epoch != self.workers.epoch:
            return  # a stranger, or the last words of an epoch that is over
        view.heard_s = time.monotonic()
        match message:
            case Tokens():
                self._book.take(message)
                return
            case Status():
                view.status = message
                self._book.take_status(message)
                return
            case Members():
                self._regroup(message)
                return
            case Progress():
                self.workers.progress(view, message)
            case Ready():
                self.workers.ready(view, message)
                if self.workers.is_ready:
                    self._book.begin_epoch(self.limits.block_size)
            case Fatal():
                self._take_fatal(view, message)
                return
            case Goodbye():
                view.ended = True
                if not self.is_draining and view.out is None:
                    self._end_epoch(f"rank {view.rank} was told to end; start the ranks again", view.rank)
        self._tell(message)

    def _attach(self, identity: bytes, hello: Hello) -> None:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            log.warning("refused rank %d from %s: its MOE_SERVE_TOKEN is another one", hello.rank, hello.host)
            return
        if hello.rank == SUPERVISOR:
            self._supervisors.add(identity)
            for view in self.workers:  # those that came first
                for message in self.workers.story(view):
                    self._send(identity, message)
            return
        epoch = self.workers.epoch
        refusal = self.workers.attach(identity, hello, time.monotonic())
        if refusal is not None:
            log.warning("refused a rank: %s", refusal)
            self._send(identity, Shutdown())
            return
        if self.workers.epoch != epoch:
            self._book.fail_all(f"the ranks started anew (epoch {self.workers.epoch}); send the request again")
        self._send(identity, Alive())
        self._tell(hello)

    def _take_fatal(self, view: RankView, message: Fatal) -> None:
        if view.out is not None:
            log.warning("rank %d, which was out, has ended: %s", view.rank, message.message)
        elif message.lost_rank == view.rank:
            self._lose(view.rank, f"rank {view.rank} on {view.host} failed: {message.message}")
        elif message.lost_rank >= 0:
            reason = f"rank {message.lost_rank} is lost, says rank {view.rank}: {message.message}"
            self._end_epoch(reason, message.lost_rank)
        else:
            # Somebody is about to say which rank it is: another peer, or the launcher.
            self._end_epoch(f"a rank is lost, says rank {view.rank}: {message.message}", None, wait_s=_UNNAMED_LOSS_S)
        view.ended = True

    def _lose(self, rank: int, reason: str) -> None:
        """A rank is gone. Where the others may go on without it, they are about to say whether they do."""
        if not self.workers.can_spare(rank):
            self._end_epoch(reason, rank)
            return
        self.workers.suspect(rank, reason, time.monotonic())
        self._book.suspect(rank)
        self._news.set()

    def _regroup(self, message: Members) -> None:
        """Moves requests from ranks that are out, and serves by those that are back."""
        change = self.workers.regroup(message)
        num_moved = self._book.regroup(change)
        if (change.masked or change.rejoined) and not self._supervisors:  # who watches the ranks says it better
            serving = ", ".join(map(str, message.members))
            back = ", ".join(map(str, change.rejoined))
            reason = f"rank {back} is back" if back else message.reason
            log.warning("%s; serving: %s; requests that moved: %d", reason, serving, num_moved)
        if change.masked or change.rejoined:
            self._tell(message)

    def _end_epoch(self, reason: str, lost_rank: int | None, wait_s: float = 0.0) -> None:
        """Ends the epoch: no more requests are taken, and after wait_s the open ones end with an error."""
        first = self.workers.loss is None
        self.workers.end_epoch(reason, lost_rank)
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self._fail_lost, self.workers.epoch)
        elif first or self.num_open:
            self._fail_lost(self.workers.epoch)
        self._news.set()

    def _fail_lost(self, epoch: int) -> None:
        reason, lost_rank = self.workers.loss, self.workers.lost_rank
        if epoch != self.workers.epoch or reason is None:
            return  # the ranks have started anew
        if not self.is_draining:
            log.error("%s", reason)
        self._book.fail_all(reason)
        blamed = SUPERVISOR if lost_rank is None else lost_rank
        self._tell(Fatal(blamed, epoch, reason, blamed))

    def _tell(self, message: ToFrontEnd) -> None:
        """Hands what happens while the ranks start and end to whoever shows it."""
        self._news.set()
        if self._observer is not None:
            self._observer(message)
        for identity in self._supervisors:
            self._send(identity, message)

    def _send_to_rank(self, rank: int, message: Message) -> None:
        view = next((view for view in self.workers if view.rank == rank), None)
        if view is not None:
            self._send(view.identity, message)

    def _send(self, identity: bytes, message: Message) -> None:
        if self._socket is not None:
            self._socket.send(identity, message)

    async def _wait_for_news(self, timeout_s: float) -> bool:
        """Returns whether something happened to a rank within the timeout."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)
            return True
        return False

    # --- deadlines ----------------------------------------------------------------------------------------------------

    async def _keep_in_touch(self) -> None:
        server = self.config.server
        last_s = time.monotonic()
        while True:
            for view in self.workers:
                self._send(view.identity, Alive())
            await asyncio.sleep(ALIVE_PERIOD_S)
            now_s = time.monotonic()
            stalled, last_s = now_s - last_s > self._silence_s / 2, now_s
            if stalled or self.is_draining or self.workers.loss is not None:
                continue  # after a pause of ours (a stopped process, a laptop's sleep) the ranks get a chance to speak
            self._look_for_silence(now_s)
            if not self.workers.is_ready and now_s - self._started_s > server.attach_deadline_s:
                self._end_epoch(
                    f"the ranks were not ready within server.attach_deadline_s = {server.attach_deadline_s:g} s "
                    f"({self.workers.missing()}); start the missing ranks, or allow more time",
                    None,
                )

    def _look_for_silence(self, now_s: float) -> None:
        """Ends the epoch for a rank that is not heard, and for one that others should have said to go on without."""
        limit_s, what = self._silence_s, "the larger of server.worker_deadline_s and engine.step_deadline_s"
        if self.workers.goes_on:
            limit_s, what = limit_s + self._regroup_s, f"{what}, and time for the others to go on without it"
        suspect = self.workers.long_suspected(now_s, self._regroup_s)
        silent = self.workers.silent_rank(now_s, limit_s)
        if suspect is not None and suspect.suspicion is not None:
            why = f"{suspect.suspicion[1]}; the others did not say within {self._regroup_s:g} s whether they go on"
            self._end_epoch(why, suspect.rank)
        elif silent is not None:
            self._end_epoch(
                f"rank {silent.rank} on {silent.host} was not heard for {now_s - silent.heard_s:.0f} s (at most "
                f"{limit_s:g}: {what}); it hangs, or its host is gone",
                silent.rank,
            )

    def describe(self) -> dict[str, Any]:
        """Returns the state of the ranks and of the queue, for /server_info."""
        return {
            "state": self.problem() or "ready",
            "epoch": self.workers.epoch,
            "requests": {"open": self.num_open, "capacity": self.capacity, **self.counters},
            "ranks_out": {str(rank): reason for rank, reason in self.workers.out.items()},
            "ranks": self.workers.describe(time.monotonic()),
        }
