"""Renders reports for a terminal into a string. Text is shown as it is written: paths may hold brackets and colons."""

import io

from rich.console import Console


def text_console(width: int, color: bool) -> Console:
    """Returns a console that keeps what is printed, for `printed`. width: characters a line"""
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
    )


def printed(console: Console) -> str:
    """Returns what was printed to a `text_console`, without blanks at the ends of lines."""
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
