"""The front end's conversation with the ranks: who attaches, what they report, who is silent, when a launch ends.

Messages are handled as they arrive on the socket that all ranks attach to. One task looks for silent ranks.

The launcher may attach too, as *supervisor* (`Hello` with rank -1). It hears what happens while the ranks start, and
reports what it sees first: that the launch is over (`Fatal`), or that a rank has died which the others may go on
without (`Exited`). A front end may be started beside running ranks, and hear that before any rank has attached to it:
it takes the launcher's word, and concludes nothing from what it does not know yet.

A lost rank ends the launch, unless the ranks have said at their start that they can go on without one. Then the front
end waits for their report: `Members` when they go on, and the requests of the lost rank move to others; `Fatal` when
they cannot. Torch-free.
"""

import asyncio
import secrets
import time

import msgspec

from moe_serve.config import ServeConfig
from moe_serve.engine.output.incremental_decoder import Decoder
from moe_serve.engine.protocol.messages import (
    ALIVE_PERIOD_S,
    Alive,
    Answer,
    BalanceReport,
    Draining,
    Exited,
    Fatal,
    ForFrontEnds,
    Goodbye,
    Hello,
    Members,
    Message,
    Progress,
    Pulse,
    Ready,
    Refused,
    Shutdown,
    Status,
    ToFrontEnd,
    Tokens,
    decode_to_front_end,
)
from moe_serve.links.link import Link, find_link
from moe_serve.log import RareWarnings, get_logger
from moe_serve.server.ranks.balance import BalanceBook
from moe_serve.server.ranks.commands import CommandBook
from moe_serve.server.ranks.launch_end import RankDrain, RestartWait, Silence
from moe_serve.server.ranks.news import News
from moe_serve.server.ranks.rank_table import RankTable, RankView
from moe_serve.server.ranks.request_book import RequestBook
from moe_serve.server.ranks.router_socket import RouterSocket
from moe_serve.server.ranks.siblings import Siblings
from moe_serve.server.ranks.supervisors import SUPERVISOR, Observer, Supervisors

log = get_logger(__name__)

_UNNAMED_LOSS_S = 0.5  # how long a report that cannot name the lost rank waits for one that can
_GOODBYE_S = 3.0  # how long the ranks may take to end


class RankLink:
    """The ranks and what they report: keeps the table of workers and the book of requests up to date.

    is_draining: no new requests are accepted, and ranks are expected to end
    """

    def __init__(self, config: ServeConfig, tokenizer: Decoder | None, observer: Observer | None, link: Link | None):
        """See `Bridge`."""
        self.workers = RankTable(config.parallel.num_ranks)
        self.book = RequestBook(config, tokenizer, self._send_to_rank)
        self.restart = RestartWait(self.workers, self.book, config.server.restart_deadline_s)
        self.commands = CommandBook(self._send_to_rank, secrets.randbits(52))
        self.balance = BalanceBook(config.eplb.mode)
        self._server = config.server
        self._link = link or find_link(config.server)
        self.siblings = Siblings(self._link.worker, config.server.api_workers, self._send_to_rank, self.book)
        self.rank_drain = RankDrain(
            self.workers, self.book, config.server.drain_deadline_s, self._fail_all, self._end_ranks
        )
        self.is_draining = False
        self.started_s = 0.0
        self._said: tuple[int, str] | None = None  # the last loss in the log: its launch, and why
        self._warnings = RareWarnings(log)
        self._supervisors = Supervisors(observer, self._send)
        self._touch: asyncio.Task[None] | None = None
        self._socket: RouterSocket | None = None
        self._silence = Silence(config)
        self.news = News()  # whenever a rank attaches, gets ready, ends or is lost

    def open(self) -> None:
        """Binds the address that ranks attach to. Raises LaunchError when it is taken."""
        self._socket = RouterSocket(self._link, self._receive)
        self.started_s = self.workers.began_s = time.monotonic()
        self._touch = asyncio.create_task(self._keep_in_touch())

    @property
    def link(self) -> Link:
        """How ranks attach; over TCP with the real port, also where the configuration says 0."""
        assert self._socket is not None, "open() first"
        return self._socket.link

    def drain(self, reason: str) -> None:
        """Ends the open requests with an error; ranks may end from now on."""
        self.is_draining = True
        self._fail_all(reason)
        self.news.tell()

    async def close(self) -> None:
        """Ends the ranks and closes the socket; returns within a few seconds whatever the ranks do."""
        if self._socket is None or self._touch is None:
            return
        self._end_ranks()
        deadline_s = time.monotonic() + _GOODBYE_S
        # A rank that is still starting does not listen; the process that started it ends it.
        while self.workers.loss is None and any(view.serves for view in self.workers):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not await self.news.wait(left_s):
                break
        self.rank_drain.close()
        self._touch.cancel()
        await asyncio.gather(self._touch, return_exceptions=True)
        self._socket.close()
        self._socket = None

    def _end_ranks(self) -> None:
        for view in self.workers:
            self._send(view.identity, Shutdown())

    def report_loss(self, reason: str, rank: int) -> None:
        """A rank is gone (SUPERVISOR: all are started again). Where others may go on without it, they will say so."""
        if rank == SUPERVISOR or not self.workers.can_spare(rank):
            self._end_launch(reason, None if rank == SUPERVISOR else rank)
        else:
            self._suspect(reason, rank)

    def _suspect(self, reason: str, rank: int) -> None:
        self.workers.suspect(rank, reason, time.monotonic())
        self.book.suspect(rank)
        self.news.tell()

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
                self.siblings.take(message, view.rank)
            return
        if view is None or message.launch_id != self.workers.launch_id:
            return
        view.heard_s = time.monotonic()
        match message:
            case Tokens():
                self.book.take(message)
            case Status():
                view.status = message
                self.book.take_status(message)
            case Members():
                self._regroup(message)
            case Answer():
                self.commands.take(message)
            case BalanceReport() if view.mask_reason is None:  # a masked rank leads no more
                self.balance.take(message, time.time())
            case Fatal():
                self._take_fatal(view, message)
            case Progress():
                self.workers.progress(view, message)
                self._tell(message)
            case Ready():
                self.workers.ready(view, message)
                self.restart.serve()
                self.siblings.tell_again(view.rank)
                self._tell(message)
            case Draining() if view.mask_reason is None:
                self.rank_drain.begin(view)
            case Goodbye():
                view.ended = True
                if not self.is_draining and view.mask_reason is None:
                    why = self.rank_drain.reason or f"rank {view.rank} was told to end"
                    self._end_launch(f"{why}; start the ranks again", view.rank)
                self._tell(message)

    def _take_of_launcher(self, message: ToFrontEnd) -> None:
        """Takes the word of the launcher, which knows of all ranks, for a launch that may be news here."""
        match message:
            case Exited() if self.workers.has_process(message):
                self._suspect(message.reason, message.rank)
            case Fatal() if message.launch_id == self.workers.launch_id:
                self._end_launch(message.message, None if message.lost_rank == SUPERVISOR else message.lost_rank)
            case Fatal():
                self.workers.never_begin(message.launch_id)

    def _attach(self, identity: bytes, hello: Hello) -> None:
        if hello.rank == SUPERVISOR:
            self._supervisors.attach(identity, [each for view in self.workers for each in self.workers.story(view)])
            return
        now_s = time.monotonic()
        self._silence.discount_own(self.workers, now_s)
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
            self.book.resubmit(hello.rank)
            self.commands.lose([hello.rank])
        self._tell(hello)

    def _take_fatal(self, view: RankView, message: Fatal) -> None:
        if view.mask_reason is not None:
            log.warning("rank %d, which was masked, has ended: %s", view.rank, message.message)
        elif message.lost_rank == view.rank:
            self.report_loss(f"rank {view.rank} on {view.host} failed: {message.message}", view.rank)
        elif message.lost_rank >= 0:
            reason = f"rank {view.rank} reports that rank {message.lost_rank} is lost: {message.message}"
            self._end_launch(reason, message.lost_rank)
        else:  # another peer or the launcher is about to report which rank it is
            reason = f"rank {view.rank} reports that a rank is lost: {message.message}"
            self._end_launch(reason, None, wait_s=_UNNAMED_LOSS_S)
        view.ended = True

    def _regroup(self, message: Members) -> None:
        """Moves the requests of masked ranks, and routes to ranks that have rejoined."""
        change = self.workers.regroup(message)
        num_moved = self.book.regroup(change)
        self.restart.serve()
        self.commands.lose(change.masked)
        if not (change.masked or change.rejoined):
            return
        if not len(self._supervisors):  # a supervisor logs it itself
            serving = ", ".join(map(str, message.members))
            rejoined = ", ".join(map(str, change.rejoined))
            reason = f"rank {rejoined} has rejoined" if rejoined else message.reason
            log.warning("%s; serving: %s; requests moved: %d", reason, serving, num_moved)
        self._tell(message)

    def _end_launch(self, reason: str, lost_rank: int | None, wait_s: float = 0.0) -> None:
        """Ends the launch: no more requests are taken. After wait_s the open ones end, or wait for the next launch."""
        is_news = self.workers.end_launch(reason, lost_rank)
        if wait_s > 0:
            if is_news:
                asyncio.get_running_loop().call_later(wait_s, self._settle_loss, self.workers.launch_id)
        elif is_news or (len(self.book) and not self.is_restarting):
            self._settle_loss(self.workers.launch_id)
        self.news.tell()

    def _settle_loss(self, launch_id: int) -> None:
        reason, lost_rank = self.workers.loss, self.workers.lost_rank
        if launch_id != self.workers.launch_id or reason is None:
            return  # the ranks were restarted
        if not self.is_draining and self._said != (launch_id, reason):
            log.error("%s", reason)
        self._said = launch_id, reason
        self.commands.fail_all(reason)
        if self.is_restarting:
            self.restart.lose(lost_rank)
        else:
            self.book.fail_all(reason)
        blamed = SUPERVISOR if lost_rank is None else lost_rank
        self._tell(Fatal(blamed, launch_id, reason, blamed))

    @property
    def is_restarting(self) -> bool:
        """Whether requests wait for ranks that are being started again."""
        return self.restart.is_open and not self.is_draining

    def _fail_all(self, reason: str) -> None:
        self.book.fail_all(reason)
        self.commands.fail_all(reason)

    def _tell(self, message: ToFrontEnd) -> None:
        """Passes on what happens while the ranks start and end."""
        self.news.tell()
        self._supervisors.tell(message)

    def _send_to_rank(self, rank: int, message: Message) -> None:
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
            self._silence.discount_own(self.workers, now_s)
            if (why := self.restart.overdue(now_s)) is not None:
                self._fail_all(why)
            if self.is_draining or self.workers.loss is not None:
                continue
            if (lost := self._silence.look(self.workers, now_s)) is not None:
                self._end_launch(*lost)
            if (why := self._silence.late_start(self.workers, now_s)) is not None:
                self._end_launch(why, None)
