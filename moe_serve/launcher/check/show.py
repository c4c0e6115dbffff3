"""Prints the report of `moe-serve check` to stdout: the verdict, then tables."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from moe_serve.config import ServeConfig
from moe_serve.launcher.check.examine import examine
from moe_serve.launcher.check.report import Report, bytes_in_words

_FILE_WIDTH = 400  # a file has no width, and wrapped cells are hard to search


def print_check(config: ServeConfig) -> int:
    """Examines a configuration and prints the report; returns the exit code: 0, or 1 when it cannot run here."""
    report = examine(config)
    # No markup and no emoji: paths, model names and messages may hold brackets and colons.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    for problem in report.problems:
        console.print(f"cannot run: {problem}", style="red", soft_wrap=True)
    if not report.problems:
        console.print("this configuration can run here", style="green")
    for title, rows in _tables(report):
        table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
    return 1 if report.problems else 0


def _tables(report: Report) -> Iterable[tuple[str, list[tuple[str, str, str]]]]:
    """Yields the title and the rows of each table."""
    yield "model", [(line.name, line.value, line.why) for line in report.model]
    if report.memory:
        rows = [(memory.name, bytes_in_words(memory.num_bytes), memory.why) for memory in report.memory]
        yield "memory of one rank", [*rows, ("together", bytes_in_words(report.memory_bytes), "")]
    yield "choices", [(line.name, line.value, line.why) for line in report.choices]
    yield "this machine", [(line.name, line.value, line.why) for line in report.machine]
