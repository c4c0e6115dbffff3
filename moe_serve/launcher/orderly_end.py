"""SIGTERM of a process that uses an `LLM`: what it has called finishes, then it exits with 0. Torch-free."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from moe_serve.server.requests.open_request import UnavailableError


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
        """While this is entered, a signal waits. Raises SystemExit after one, in other threads UnavailableError."""
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
