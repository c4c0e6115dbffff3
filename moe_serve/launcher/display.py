"""Shows a system as it starts: one line for each rank, and the ranks' own output above. To stderr.

On a terminal the lines are updated in place; elsewhere (a file, a container's log) each new phase is one plain line, or
one JSON object, as the lines of the ranks are then.
Lines that cannot be written are lost, and nothing else (LastingLog in log.py).
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moe_serve.log import LastingLog, json_line

_WHO = "launcher"
_LEVELS = {"yellow": logging.WARNING, "red": logging.ERROR}  # of lines in these colours


class StartDisplay:
    """Shows the phase of each rank until the system is ready. A context manager; threads may call its methods."""

    def __init__(self, num_ranks: int, reword: Callable[[str], str] = str, form: str = "text"):
        """reword: is given each line before it is printed;  form: "text" or "json", as server.log_format"""
        self._reword = reword
        self._is_json = form == "json"
        self._log = LastingLog(
            sys.stderr, partial(json_line, who=_WHO, level=logging.WARNING) if self._is_json else str
        )
        self._console = Console(file=cast(TextIO, self._log), highlight=False)
        self._phases = ["importing torch"] * num_ranks
        self._fractions = [0.0] * num_ranks
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._is_json:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.end()

    @property
    def num_ranks(self) -> int:
        """How many ranks it shows."""
        return len(self._phases)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def stop(self) -> None:
        """Removes the live lines; output of the ranks is still printed by `line`."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, rank: int, phase: str, fraction: float) -> None:
        """Shows what a rank is doing, and how much of it is done (0 to 1)."""
        with self._lock:
            is_new = self._phases[rank] != phase
            self._phases[rank], self._fractions[rank] = phase, fraction
        if is_new and self._live is None:
            self.note(f"rank {rank}: {phase} ({self.elapsed_s:.1f} s)")

    def line(self, who: str, line: str) -> None:
        """Prints one line of a process's output, with its name where the line has none; one of JSON is left whole."""
        is_json = line.startswith("{") and f'"process": "{who}"' in line
        if self._is_json and not is_json:
            self._print(json_line(self._reword(line), who))
            return
        prefix = "" if is_json or f"[{who}]" in line else f"[{who}] "
        self._print(prefix + self._reword(line))

    def note(self, text: str, style: str = "") -> None:
        """Prints one line of this process."""
        self.heading(self._reword(text), style)

    def heading(self, text: str, style: str = "") -> None:
        """Prints some lines of this process as they are."""
        if self._is_json:
            self._print(json_line(text, _WHO, _LEVELS.get(style, logging.INFO)))
        else:
            self._print(text, style)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _render(self) -> RenderableType:
        """Returns one row for each rank: its phase and how much of it is done."""
        table = Table.grid(padding=(0, 2))
        for rank, (phase, fraction) in enumerate(zip(self._phases, self._fractions, strict=True)):
            bar = ProgressBar(total=1.0, completed=fraction, width=24) if 0 < fraction < 1 else Text("")
            style = "green" if phase == "ready" else ""
            table.add_row(Text(f"rank {rank}", style="bold"), Text(phase, style=style), bar)
        table.add_row(Text(f"{self.elapsed_s:.0f} s", style="dim"))
        return table
