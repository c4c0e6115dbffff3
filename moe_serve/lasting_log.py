"""A stream for lines that are not worth an end: the disk may be full, the reader of a pipe gone, a terminal stopped.

Whoever waits for a terminal that is stopped (Ctrl-S) does nothing else meanwhile: a rank no steps, a front end no
requests, and the launcher reads no pipes of theirs. Imports nothing of the package.
"""

import contextlib
import io
import os
import select
from collections.abc import Callable
from typing import TextIO

_PIECE_CHARS = select.PIPE_BUF // 4  # of UTF-8: what a pipe takes without waiting, once it takes anything
_PATIENCE_S = 1.0  # how long a line waits for a reader who takes nothing


class LastingLog(io.TextIOBase):
    """A stream that goes on where the one below fails or waits, and says there how much was lost once that works again.

    stream: a file, a pipe or a terminal; one without a descriptor never waits
    form:   makes a line, without its end, of what is said there
    """

    def __init__(self, stream: TextIO, form: Callable[[str], str] = str):
        self._stream = stream
        self._form = form
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = stream.fileno()
        self._num_lost = 0  # texts, of a line each
        self._is_torn = False  # a part of the first one was written
        self._why = ""

    def write(self, text: str) -> int:
        start = 0
        try:
            if self._num_lost:
                lines = "line" if self._num_lost == 1 else "lines"
                said = f"{self._num_lost} {lines} before this one could not be written ({self._why})"
                self._put("\n" * self._is_torn + self._form(said) + "\n")
                self._num_lost, self._is_torn = 0, False
            for start in range(0, len(text), _PIECE_CHARS):
                self._put(text[start : start + _PIECE_CHARS])
        except OSError as error:
            self._num_lost, self._why = self._num_lost + 1, error.strerror or str(error)
            self._is_torn |= start > 0
        return len(text)

    def _put(self, text: str) -> None:
        """Writes a piece. Raises OSError where that fails, or nobody reads it; nobody is waited for twice."""
        if self._descriptor is not None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            if not poll.poll(0 if self._num_lost else 1000 * _PATIENCE_S):
                raise TimeoutError("nobody read them")
        self._stream.write(text)
        self._stream.flush()

    def end(self) -> None:
        """Drops what could not be written: Python would fail on it at its end, with an exit code of its own."""
        try:
            self._stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding
