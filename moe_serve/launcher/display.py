"""Shows a system as it starts: one line for each rank, and the ranks' own output above. To stderr.

On a terminal the lines are updated in place; elsewhere (a file, a container's log) each new phase is one plain line.
Lines that cannot be written are lost, and nothing else (lasting_log.py).
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moe_serve.lasting_log import LastingLog


class StartDisplay:
    """Shows the phase of each rank until the system is ready. A context manager; threads may call its methods."""

    def __init__(self, num_ranks: int, console: Console | None = None, reword: Callable[[str], str] = str):
        """reword: is given each line before it is printed"""
        self._reword = reword
        self._log = LastingLog(sys.stderr)
        self.console = console or Console(file=cast(TextIO, self._log), highlight=False)
        self._phases = ["starting Python"] * num_ranks
        self._fractions = [0.0] * num_ranks
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.end()

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
        has_name = f"[{who}]" in line or (line.startswith("{") and f'"process": "{who}"' in line)
        prefix = "" if has_name else f"[{who}] "
        self.console.print(Text(prefix + self._reword(line)), soft_wrap=True)

    def note(self, text: str, style: str = "") -> None:
        """Prints one line of this process."""
        self.console.print(Text(self._reword(text), style=style), soft_wrap=True)

    def _render(self) -> RenderableType:
        return phase_table(self._phases, self._fractions, self.elapsed_s)


def phase_table(phases: Sequence[str], fractions: Sequence[float], elapsed_s: float) -> Table:
    """Returns one row for each rank: its phase and how much of it is done."""
    table = Table.grid(padding=(0, 2))
    for rank, (phase, fraction) in enumerate(zip(phases, fractions, strict=True)):
        bar = ProgressBar(total=1.0, completed=fraction, width=24) if 0 < fraction < 1 else Text("")
        table.add_row(Text(f"rank {rank}", style="bold"), Text(phase, style="green" if phase == "ready" else ""), bar)
    table.add_row(Text(f"{elapsed_s:.0f} s", style="dim"))
    return table
