"""`moe-serve serve`: all ranks of this machine and the front end, from start-up display to Ctrl-C. Torch-free.

The parent only supervises. It receives the ranks' progress from the front end (as supervisor, see server/rank_link.py),
notices first when a process ends, reports it to the front end, and shuts everything down in order: no new calls, then
the ranks, then whatever is left. The ranks decide whether they go on without a lost one; the front end passes their
decision on, and the parent prints it. If they do not, the front end outlives the ranks and names the lost rank on
/ready.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import msgspec
import zmq

from moe_serve.child_process import describe_exit
from moe_serve.config import ServeConfig, ServerConfig
from moe_serve.engine.messages import Fatal, Hello, Members, Progress, Ready, decode_to_front_end, encode
from moe_serve.launcher.display import StartDisplay
from moe_serve.launcher.local import WORKER, Child, Death, LocalRanks, child_environment
from moe_serve.launcher.preflight import has_tokenizer
from moe_serve.links.folder import OwnFolder
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from moe_serve.server.ports import open_port
from moe_serve.server.rank_link import SUPERVISOR

_POLL_MS = 50
_END_GRACE_S = 4.0  # for the front end and the ranks to end in order
_LOSS_GRACE_S = 3.0  # for the ranks that are left when one is lost
_EXIT_SEEN_S = 0.3  # peers may miss a process this long before its parent knows how it ended
_OWN_REPORT_S = 1.0  # a rank that exits by itself has reported why; wait so long for that report


class _Ended(Exception):
    """Ends `watch` with an exit code."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def serve_on_this_machine(config: ServeConfig, display: StartDisplay, worker: str = WORKER) -> int:
    """Serves until Ctrl-C or SIGTERM. Returns the exit code: 0 = as asked, 1 = lost a process, 2 = a wrong setting.

    Raises LaunchError before anything is started, when a port is taken.
    """
    listener = open_port(config.server.host, config.server.port)
    with listener, OwnFolder() as folder:
        config = with_port(config, listener.getsockname()[1])
        ranks = LocalRanks(config, display.line, folder, module=worker)
        system = _System(config, display, ranks, Link(folder=folder))
        with _signals_stop(system):
            try:
                ranks.start()
                system.start_front_end(listener.fileno())
                listener.close()  # the front end holds it now
                system.watch()
            except _Ended as ended:
                return ended.code
            finally:
                system.end()
    return 0


def with_port(config: ServeConfig, http_port: int) -> ServeConfig:
    """Returns the configuration with the real port in place of 0."""
    return config.model_copy(update={"server": config.server.model_copy(update={"port": http_port})})


@dataclass(frozen=True)
class _Masked:
    """A rank that the others serve without. serving: which ranks go on, in words"""

    since_s: float
    reason: str
    serving: str


class _System:
    def __init__(self, config: ServeConfig, display: StartDisplay, ranks: LocalRanks, link: Link):
        self.config = config
        self.display = display
        self.ranks = ranks
        self.stop_signals = 0
        self.wants_drain = False  # the first signal was SIGTERM
        self._drain_until_s = 0.0
        self._link = link
        self._front_end: Child | None = None
        self._ready: set[int] = set()
        self._is_ready = False
        self._fatal: str | None = None  # why the epoch ended, as the front end reports it
        self._blamed: int = SUPERVISOR  # the rank that ended it; SUPERVISOR: not known
        self._deaths: list[Death] = []  # of ranks that the others do not serve without
        self._masked: set[int] = set()
        self._unprinted: dict[int, _Masked] = {}
        self._may_go_on = True  # whether every rank goes on without a lost one where it can
        self._lost_at_s: float | None = None  # when the loss was first noticed
        self._is_reported = False
        self._sockets = LinkSockets(link)
        self._socket = self._sockets.connected(zmq.DEALER, link.front_end, linger_ms=200)

    def start_front_end(self, http_fd: int) -> None:
        """Starts the front end with the listening socket, and attaches to it as supervisor."""
        arguments = ["--http-fd", str(http_fd), "--config", str(self.ranks.config_file)]
        self._front_end = Child(
            "front end",
            "moe_serve.launcher.frontend",
            arguments,
            child_environment(self.ranks.folder),
            self.display.line,
            pass_fds=[http_fd],
        )
        hello = Hello(SUPERVISOR, self.config.parallel.num_ranks, 0, os.getpid(), os.uname().nodename)
        self._socket.send(encode(hello))

    def watch(self) -> None:
        """Prints and forwards what happens, until _Ended is raised."""
        while True:
            if self.stop_signals and not self._drains():
                self.display.stop()
                self.display.note("ending …")
                raise _Ended(1 if self._is_reported else 0)
            if self._socket.poll(_POLL_MS):
                self._listen()
            if not (self._drain_until_s and any(child.code == 0 for child in self.ranks.children)):
                self._look_for_losses()  # a rank that ends with 0 at the end of a drain is none
            assert self._front_end is not None
            code = self._front_end.code
            if code is not None and not self.stop_signals:
                self.display.note(f"the front end {describe_exit(code)}", style="red")
                raise _Ended(2 if code == 2 else 1)

    def _drains(self) -> bool:
        """Returns whether to go on until open requests have ended: after one SIGTERM, within the deadline."""
        if not self.wants_drain or self.stop_signals > 1 or not self._is_ready or self._is_reported:
            return False
        if self._front_end is None or self._front_end.code is not None:
            return False
        deadline_s = self.config.server.drain_deadline_s
        if not self._drain_until_s:
            self._drain_until_s = time.monotonic() + deadline_s + _END_GRACE_S
            self._front_end.signal(signal.SIGTERM)
            self.display.note(f"open requests have {deadline_s:g} s to end; a second signal ends them now")
        return time.monotonic() < self._drain_until_s

    def _listen(self) -> None:
        while self._socket.poll(0):
            try:
                message = decode_to_front_end(self._socket.recv())
            except msgspec.DecodeError:
                continue  # Alive and Shutdown are for ranks
            match message:
                case Progress():
                    self.display.phase(message.rank, message.phase, message.fraction)
                case Ready():
                    self.display.phase(message.rank, "ready", 1.0)
                    self._may_go_on &= message.info.get("on_lost_rank") == "mask"
                    self._rank_is_ready(message.rank)
                case Members():
                    self._regroup(message)
                case Fatal():
                    self._fatal, self._blamed = message.message, message.lost_rank

    def _rank_is_ready(self, rank: int) -> None:
        self._ready.add(rank)
        if len(self._ready) == self.config.parallel.num_ranks and not self._is_ready:
            self._is_ready = True
            self.display.stop()
            address = _url(self.config.server)
            self.display.note(f"ready after {self.display.elapsed_s:.1f} s: {address}", style="green")
            prompt = '{"text": "def "}' if has_tokenizer(self.config) else '{"input_ids": [5, 6, 7]}'
            self.display.note(f"  try: curl {address}/generate -H 'content-type: application/json' -d '{prompt}'")

    def _regroup(self, message: Members) -> None:
        """Notes which ranks are masked, and prints which rejoin."""
        members = ", ".join(map(str, message.members))
        serving = f"ranks {members} serve" if len(message.members) > 1 else f"rank {members} serves"
        for rank in range(self.config.parallel.num_ranks):
            if rank in self._masked and rank in message.members:
                self._print_masked(at_once=True)
                self._masked.remove(rank)
                self.display.note(f"rank {rank} rejoined; {serving}", style="green")
            elif rank not in self._masked and rank not in message.members:
                self._masked.add(rank)
                self._unprinted[rank] = _Masked(time.monotonic(), message.reason, serving)

    def _print_masked(self, at_once: bool = False) -> None:
        """Prints which ranks are masked, and how they ended; peers may notice a loss before this process does."""
        for rank, masked in list(self._unprinted.items()):
            ends = [str(death) for death in self._deaths if death.rank == rank]
            if not ends and time.monotonic() - masked.since_s < _EXIT_SEEN_S and not at_once:
                continue
            del self._unprinted[rank]
            self._deaths = [death for death in self._deaths if death.rank != rank]
            reason = ends[0] if ends else f"rank {rank} is masked ({masked.reason})"
            self.display.note(f"{reason}; {masked.serving} on with its requests", style="yellow")

    def _notice_deaths(self) -> None:
        for death in self.ranks.deaths():
            if death.rank in self._masked and death.rank not in self._unprinted:
                self.display.note(f"{death}; it was masked already", style="yellow")
                continue
            self._deaths.append(death)
            if self._is_ready and self._may_go_on:  # the answer is Members or Fatal, within the ranks' deadlines
                self._socket.send(encode(Fatal(SUPERVISOR, 0, str(death), death.rank)))
        self._print_masked()

    def _look_for_losses(self) -> None:
        """Reports a lost rank once, then ends the other ranks; before the system was ready, ends the whole system."""
        self._notice_deaths()
        if self._is_ready and self._may_go_on and self._fatal is None:
            return
        if self._is_reported or not (self._deaths or self._fatal):
            return
        now_s = time.monotonic()
        if self._lost_at_s is None:
            self._lost_at_s = now_s
        # Ranks that end because of a lost one may be gone before it does, so the blamed rank comes first.
        cause = min(
            self._deaths,
            key=lambda death: (not death.was_killed, death.rank != self._blamed, death.code != 2),
            default=None,
        )
        blamed_still_there = cause is not None and self._blamed not in (SUPERVISOR, cause.rank)
        half_known = cause is None or self._fatal is None or blamed_still_there
        if half_known and not (cause and cause.was_killed) and now_s - self._lost_at_s < _OWN_REPORT_S:
            return  # the rest is still to come: the rank's own report, or how it ended
        if self._fatal is None and cause is not None:
            self._socket.send(encode(Fatal(SUPERVISOR, 0, str(cause), cause.rank)))
        self._is_reported = True
        self.display.stop()
        self._report(cause)
        if not self._is_ready:
            raise _Ended(2 if cause is not None and cause.code == 2 else 1)
        self.ranks.end(_LOSS_GRACE_S)
        self.display.note("no rank is left; /ready says why until you press Ctrl-C", style="red")

    def _report(self, cause: Death | None) -> None:
        reported = self._fatal if cause is None or self._fatal != str(cause) else None
        self.display.note(": ".join(str(part) for part in (cause, reported) if part is not None), style="red")
        if cause is not None and (cause.was_killed or reported is None):
            for line in cause.last_lines:
                self.display.note(f"  {line}")

    def end(self) -> None:
        """Ends every process; after a second signal, without waiting."""
        front_end = self._front_end
        if front_end is not None:
            front_end.signal(signal.SIGINT)  # at once: what may be drained has been
        if not self._is_ready or front_end is None or front_end.code is not None:
            for child in self.ranks.children:  # no front end asks them to end, or they do not listen yet
                child.signal(signal.SIGTERM)
        children = [*self.ranks.children, *filter(None, [front_end])]
        deadline_s = time.monotonic() + _END_GRACE_S
        while time.monotonic() < deadline_s and self.stop_signals < 2:
            if all(child.code is not None for child in children):
                break
            time.sleep(_POLL_MS / 1000)
        if front_end is not None:
            front_end.finish()
        self.ranks.end(grace_s=0.0)
        self._sockets.close()


@contextmanager
def _signals_stop(system: _System) -> Iterator[None]:
    """Counts SIGINT, SIGTERM and SIGHUP, so that none raises in the middle of something."""

    def count(number: int, frame: FrameType | None) -> None:
        system.wants_drain |= number == signal.SIGTERM and not system.stop_signals
        system.stop_signals += 1

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, count) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _url(server: ServerConfig) -> str:
    host, scheme = server.host, "http" if server.ssl_certfile is None else "https"
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{shown}:{server.port}"
