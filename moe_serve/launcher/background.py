"""Ranks as child processes, and the bridge to them in a thread, for callers without an event loop: `LLM`.

The ranks end with this process, on SIGTERM after the calls that run.
"""

import asyncio
import atexit
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import Members, Progress, Ready, ToFrontEnd
from moe_serve.launcher.display import StartDisplay
from moe_serve.launcher.local import Death, LocalRanks, Replacements, Restarts, left_out
from moe_serve.links.folder import OwnFolder
from moe_serve.links.link import Link
from moe_serve.log import get_logger
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.open_request import UnavailableError

log = get_logger(__name__)
T = TypeVar("T")
_WATCH_S = 0.1  # how often the processes are checked
_EXIT_REPORT_S = 1.0  # a rank that exits by itself has told the bridge why; its exit code says less
_END_GRACE_S = 3.0
_LOSS_GRACE_S = 3.0  # for the ranks that are left when one is lost


class BackgroundRanks:
    """Running ranks, and the bridge to them.

    bridge: to be used in its own event loop, where `call` runs a coroutine
    """

    def __init__(self, config: ServeConfig, tokenizer: Tokenizer | None, progress: bool):
        """Starts the ranks and waits until they are ready. Raises a MoeServeError when they do not start."""
        config = config.model_copy(update={"server": config.server.model_copy(update={"api_workers": 1})})
        self._folder = OwnFolder()
        self.bridge = Bridge(config, tokenizer, self._observe, Link(folder=self._folder.path))
        self.ranks: LocalRanks | None = None
        self._watch: asyncio.Task[None] | None = None
        self._restarts = Restarts(config.launcher)
        self._replacements = Replacements(config, self._restarts)
        self._has_started = False  # ranks that are lost earlier are not restarted
        self._ready_launch = 0  # the newest launch that was ready
        self._display = StartDisplay(config.parallel.num_ranks) if progress else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="moe_serve bridge", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._closed = False
        try:
            self.call(self._start(config))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the ranks. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self.call(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._folder.remove()

    def give_up(self, reason: str) -> None:
        """Ends the open requests with an error, and takes no more. From any thread."""
        self._loop.call_soon_threadsafe(self.bridge.drain, reason)

    def call(self, work: Awaitable[T]) -> T:
        """Returns the result of work, run in the bridge's thread; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(_as_coroutine(work), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _start(self, config: ServeConfig) -> None:
        await self.bridge.start()
        # Started from this thread: the kernel takes the thread, not the process, for the parent that must stay alive.
        self.ranks = LocalRanks(config, self._line, self._folder.path)
        if self._display is not None:
            self._display.__enter__()
        try:
            self.ranks.start()
            self._watch = asyncio.create_task(self._watch_ranks(self.ranks))
            await self.bridge.wait_until_ready()
            self._has_started = True
        finally:
            if self._display is not None:
                self._display.stop()

    async def _watch_ranks(self, ranks: LocalRanks) -> None:
        """Reports ranks that end; replaces them, or restarts all, as often as `launcher` says."""
        at_start: str | None = None  # a loss of this launch; the bridge may not have met it yet
        while True:
            await asyncio.sleep(_WATCH_S)
            for death in ranks.deaths():
                if not death.was_killed:
                    await asyncio.sleep(_EXIT_REPORT_S)
                last_words = f"; its last words: {death.last_lines[-1]}" if death.last_lines else ""
                reason = f"{death}{last_words}"
                at_start = at_start or reason
                self.bridge.report_loss(reason, death.rank)
                failed_start = self._replacements.ended(death, time.monotonic())
                if failed_start is not None and not self._replacements.others_wait:
                    log.warning("%s", failed_start)
            for rank, why in self._replacements.late(time.monotonic()).items():
                log.warning("%s; its process is killed", why)
                await asyncio.to_thread(ranks.finish, rank)
            for death in self._replacements.due(time.monotonic()):
                await self._replace(death, ranks)
            failed = self._replacements.failed(time.monotonic())
            if failed is not None and self.bridge.workers.loss is None:
                self.bridge.report_loss(failed)
            had_served, workers = self._ready_launch == ranks.launch_id, self.bridge.workers
            loss = workers.loss if workers.launch_id == ranks.launch_id else None
            loss = loss or (None if had_served else at_start)
            if loss is None or not self._has_started:
                continue
            if not self._restarts.note_loss(loss, had_served and failed is None):
                self.bridge.give_up(f"{loss}; {' '.join(self._restarts.report())}")
                return
            await asyncio.to_thread(ranks.end, 0.0 if failed is not None else _LOSS_GRACE_S)
            await asyncio.sleep(self._restarts.pause_s)
            self._replacements, at_start = Replacements(ranks.config, self._restarts), None
            ranks.start()

    async def _replace(self, death: Death, ranks: LocalRanks) -> None:
        """Starts a replacement beside the other ranks; where none may be started, they serve on without it, or end."""
        if self._replacements.may_replace(death):
            await asyncio.to_thread(ranks.finish, death.rank)
            ranks.replace(death.rank)
            self._replacements.started(death.rank, time.monotonic())
        elif self._replacements.others_wait:
            self.bridge.report_loss(str(death))
        else:
            log.warning("%s", left_out(f"rank {death.rank}", death.code))

    async def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self.bridge.close()
        if self.ranks is not None:
            await asyncio.to_thread(self.ranks.end, _END_GRACE_S)

    def _observe(self, message: ToFrontEnd) -> None:
        if isinstance(message, Members):
            self._replacements.regrouped(message)
        if isinstance(message, Ready):
            self._ready_launch = message.launch_id
        if self._display is None:
            return
        match message:
            case Progress():
                self._display.phase(message.rank, message.phase, message.fraction)
            case Ready():
                self._display.phase(message.rank, "ready", 1.0)

    def _line(self, who: str, line: str) -> None:
        if self._display is not None:
            self._display.line(who, line)


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work  # run_coroutine_threadsafe() refuses the awaitable of anext()


class OrderlyEnd:
    """Handles SIGTERM where this process has no handler of its own; only the main thread can set one.

    Between calls the process exits at once, by SystemExit, so that `with` blocks and handlers of exit run. During calls
    it exits when the caller has had their results, and calls again or ends. A second SIGTERM kills it.

    give_up:    ends the calls with an error; called so long after the signal that they may take
    deadline_s: how long that is
    """

    def __init__(self, give_up: Callable[[], None], deadline_s: float):
        self._give_up = give_up
        self._deadline_s = deadline_s
        self._num_running = 0
        self._timer: threading.Timer | None = None
        self.is_asked = False
        is_main = threading.current_thread() is threading.main_thread()
        self._has_handler = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._has_handler:
            signal.signal(signal.SIGTERM, self._ask)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Delays a signal until the block ends. After one, raises SystemExit, in other threads UnavailableError."""
        if self.is_asked:
            if threading.current_thread() is threading.main_thread():
                raise SystemExit(0)
            raise UnavailableError("this process was asked to end (SIGTERM)")
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def close(self) -> None:
        """Leaves SIGTERM as it was found."""
        if self._timer is not None:
            self._timer.cancel()
        is_main = threading.current_thread() is threading.main_thread()
        if self._has_handler and is_main and signal.getsignal(signal.SIGTERM) == self._ask:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._num_running:
            raise SystemExit(0)
        self._timer = threading.Timer(self._deadline_s, self._give_up)
        self._timer.daemon = True
        self._timer.start()
