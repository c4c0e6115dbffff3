"""Commands whose options are the fields of a dataclass; those of the balancer say errors in a line and show a bar."""

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from moe_serve.errors import MoeServeError

Options = TypeVar("Options")
_LINE_EVERY_S = 10.0  # where there is no bar


def option(*names: str, default: object = None, **more: Any) -> Any:
    """Returns a field that is an option of its own. more: as of typer.Option"""
    return field(default=default, metadata={"typer": typer.Option(*names, **more), "names": names})


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Returns a decorator for a command that takes one dataclass: typer sees its fields as parameters."""
    hints = get_type_hints(options, include_extras=True)
    for each in fields(options):  # type: ignore[arg-type]
        if "typer" in each.metadata:
            hints[each.name] = Annotated[hints[each.name], each.metadata["typer"]]
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in fields(options)  # type: ignore[arg-type]
    ]

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(options(**values))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = hints
        return run

    return decorate


def balancer_command(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Returns a decorator for a command that takes one dataclass: typer sees its fields as parameters.

    An error of ours becomes one line on stderr and exit code 2.
    """

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @takes(options)
        @functools.wraps(command)
        def run(given: Options) -> None:
            try:
                command(given)
            except MoeServeError as problem:
                typer.echo(f"error: {problem}", err=True)
                raise typer.Exit(2) from None
            except BrokenPipeError:  # the reader of a pipe has closed it
                sys.stderr.close()
                raise typer.Exit(0) from None
            except OSError as problem:  # a file that may not be read, a folder that is not there, a full disk
                typer.echo(f"error: {problem.filename or 'a file'}: {problem.strerror or problem}", err=True)
                raise typer.Exit(2) from None

        return run

    return decorate


@contextmanager
def progress_bar(words: str) -> Iterator[Callable[[float, float | None], None]]:
    """Yields a function (done, total or None) that moves a bar on stderr; without a terminal, it writes some lines."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(words)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(words: str) -> Callable[[float, float | None], None]:
    """Returns what a bar's function is in a pipe: work that takes long says how far it is."""
    next_s = time.monotonic() + _LINE_EVERY_S

    def show(done: float, total: float | None) -> None:
        nonlocal next_s
        if total and time.monotonic() >= next_s:
            next_s = time.monotonic() + _LINE_EVERY_S
            typer.echo(f"{words}: {100 * done / total:.0f} %", err=True)

    return show


def api_key_of_environment() -> str | None:
    """Returns the key with which our tools call a server: the first that a variable holds.

    Not an option, since other users may read a command line.
    """
    keys = [key for name in ("MOE_SERVE_API_KEY", "OPENAI_API_KEY") for key in os.environ.get(name, "").split()]
    return keys[0] if keys else None
