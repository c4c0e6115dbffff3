"""`moe-serve serve`: all ranks of this machine and the front end, from start-up display to Ctrl-C.

The parent only supervises. It receives the ranks' progress from the front end (as supervisor, see
server/ranks/bridge.py), notices first when a process ends, reports it to the front end, and shuts everything down in
order: no new calls, then the ranks, then whatever is left. A rank that was killed is replaced beside the others. Where
that fails, and where the ranks cannot go on at all, it restarts all of them, and the front end submits the open
requests to the new ones; after too many losses it ends with a report.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from moe_serve.config import ServeConfig, ServerConfig, served_name
from moe_serve.engine.protocol.messages import Message
from moe_serve.launcher.display import StartDisplay
from moe_serve.launcher.front_ends import FrontEnds
from moe_serve.launcher.launch_watch import LaunchWatch, Loss
from moe_serve.launcher.local import WORKER, LocalRanks
from moe_serve.launcher.preflight import has_tokenizer
from moe_serve.launcher.restarts import Restarts, in_a_while
from moe_serve.links.folder import OwnFolder
from moe_serve.links.link import Link
from moe_serve.server.edge.ports import open_port

_POLL_MS = 50
_END_GRACE_S = 4.0  # for the front end and the ranks to end in order
_LOSS_GRACE_S = 3.0  # for the ranks that are left when one is lost


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
                system.start_front_ends(listener.fileno())
                if config.server.api_workers == 1:
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


class _System:
    def __init__(self, config: ServeConfig, display: StartDisplay, ranks: LocalRanks, link: Link):
        self.config = config
        self.display = display
        self.ranks = ranks
        self.stop_signals = 0
        self.wants_drain = False  # the first signal was SIGTERM
        self._drain_until_s = 0.0
        self._link = link
        self._front_ends: FrontEnds | None = None
        self._restarts = Restarts(config.launcher)
        self._starts_at_s: float | None = None  # when all ranks, which have ended, are started again
        self._was_ready = False
        self.begin_launch()

    def begin_launch(self) -> None:
        """Begins to watch ranks that are about to start."""
        self._launch = LaunchWatch(self.config, self.display, self.ranks, self._restarts, self._tell)
        self._launched_s, self._is_announced = time.monotonic(), False

    def start_front_ends(self, http_fd: int) -> None:
        """Starts the front ends with the listening socket, and attaches to them as supervisor."""
        note = partial(self.display.note, style="red")
        config_file, on_line = self.ranks.config_file, self.display.line
        self._front_ends = FrontEnds(self.config, self._link, config_file, http_fd, on_line, note)
        self._front_ends.start()

    def watch(self) -> None:
        """Prints and forwards reports, and restarts lost ranks, until _Ended is raised."""
        while True:
            if self.stop_signals and not self._drains():
                self.display.stop()
                self.display.note("ending …")
                raise _Ended(0)
            assert self._front_ends is not None
            for message in self._front_ends.receive(_POLL_MS):
                self._launch.take(message)
            if self._launch.is_ready and not self._is_announced and self._front_ends.serve(self.ranks.launch_id):
                self._announce()
            if self._starts_at_s is not None:
                self._start_when_due(self._starts_at_s)
            elif not (self._drain_until_s and any(child.code == 0 for child in self.ranks.children)):
                loss = self._launch.find_loss()  # a rank that ends with 0 at the end of a drain is none
                if loss is not None:
                    self._start_again(loss)
                else:
                    self._launch.replace_lost_ranks()
            code = None if self.stop_signals else self._front_ends.watch()
            if code is not None:
                raise _Ended(code)

    def _drains(self) -> bool:
        """Returns whether to go on until open requests have ended: after one SIGTERM, within the deadline.

        Also while lost ranks are started again: the requests wait for them.
        """
        if not self.wants_drain or self.stop_signals > 1 or not (self._launch.is_ready or self._was_ready):
            return False
        if self._front_ends is None or self._front_ends.have_ended:
            return False
        deadline_s = self.config.server.drain_deadline_s
        if not self._drain_until_s:
            self._drain_until_s = time.monotonic() + deadline_s + _END_GRACE_S
            self._front_ends.signal(signal.SIGTERM)
            self.display.note(f"open requests have {deadline_s:g} s to end; a second signal ends them now")
        return time.monotonic() < self._drain_until_s

    def _announce(self) -> None:
        self._is_announced = True
        self.display.stop()
        if self._was_ready:
            self.display.note(f"ready again after {time.monotonic() - self._launched_s:.1f} s", style="green")
            return
        self._was_ready = True
        address = _url(self.config.server)
        self.display.note(f"ready after {self.display.elapsed_s:.1f} s: {address}", style="green")
        prompt = '{"text": "def "}' if has_tokenizer(self.config) else '{"input_ids": [5, 6, 7]}'
        self.display.note(
            f"  OpenAI clients: base_url {address}/v1, model {served_name(self.config.model)}\n"
            f"  SGLang's clients: {address}/generate\n"
            f"  watch: {address}/dashboard, /metrics, /server_info (all settings)\n"
            f"  try: curl {address}/generate -H 'content-type: application/json' -d '{prompt}'"
        )

    def _tell(self, message: Message) -> None:
        if self._front_ends is not None:
            self._front_ends.tell(message)

    def _start_again(self, loss: Loss) -> None:
        """Prints why the ranks are lost, ends them, and restarts them when their pause is over.

        Raises _Ended where a restart cannot help, or comes too often.
        """
        self.display.stop()
        self.display.note(str(loss), style="red")
        for line in loss.last_lines:
            self.display.note(f"  {line}")
        if not self._was_ready or loss.is_setting or (self.stop_signals and not self._drains()):
            raise _Ended(2 if loss.is_setting else 1)
        if not self._restarts.note_loss(str(loss), loss.had_served):
            for line in self._restarts.report():
                self.display.note(line, style="red")
            raise _Ended(1)
        self.ranks.end(0.0 if loss.others_run else _LOSS_GRACE_S)
        if not self.stop_signals or self._drains():
            pause_s = self._restarts.pause_s
            self._starts_at_s = time.monotonic() + pause_s
            again = f"the ranks are started again{in_a_while(pause_s)} ({self._restarts.describe()})"
            self.display.note(again, style="yellow")
            self._start_when_due(self._starts_at_s)

    def _start_when_due(self, starts_at_s: float) -> None:
        if time.monotonic() >= starts_at_s:
            self._starts_at_s = None
            self.ranks.start()
            self.begin_launch()

    def end(self) -> None:
        """Ends every process; after a second signal, without waiting."""
        front_ends = self._front_ends
        if front_ends is not None:
            front_ends.signal(signal.SIGINT)  # at once: what may be drained has been
        if not self._launch.is_ready or front_ends is None or front_ends.have_ended:
            for child in self.ranks.children:  # no front end asks them to end, or they do not listen yet
                child.signal(signal.SIGINT if self._launch.is_ready else signal.SIGTERM)
        children = [*self.ranks.children, *(front_ends.children if front_ends is not None else ())]
        deadline_s = time.monotonic() + _END_GRACE_S
        while time.monotonic() < deadline_s and self.stop_signals < 2:
            if all(child.code is not None for child in children):
                break
            for death in self.ranks.deaths():
                if death.code != 0:  # the front end need not wait for this one's goodbye
                    self._launch.tell_exit(death)
            time.sleep(_POLL_MS / 1000)
        if front_ends is not None:
            front_ends.close()
        self.ranks.end(grace_s=0.0)


@contextmanager
def _signals_stop(system: _System) -> Iterator[None]:
    """Counts SIGINT, SIGTERM and SIGHUP instead of letting them raise in the middle of something."""

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
