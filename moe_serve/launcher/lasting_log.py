"""A stream for lines that are not worth an end: the disk may be full, the reader of a pipe gone, a terminal stopped.

Whoever waits for a terminal that is stopped (Ctrl-S) reads nobody's pipes meanwhile. So ranks and the front end would
stand still, too, once their pipes are full.
"""

import io
import os
import select
from typing import TextIO

_PIECE_CHARS = select.PIPE_BUF // 4  # of UTF-8: what a pipe takes without waiting, once it takes anything
_PATIENCE_S = 1.0  # how long a line waits for a reader who takes nothing


class LastingLog(io.TextIOBase):
    """A stream that goes on where the one below fails or waits, and says there how much was lost once that works again.

    stream: a file, a pipe or a terminal; one without a descriptor never waits
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._poll: select.poll | None = select.poll()
        try:
            self._poll.register(stream.fileno(), select.POLLOUT)
        except OSError:
            self._poll = None
        self._num_lost = 0  # texts, of a line each
        self._why = ""

    def write(self, text: str) -> int:
        try:
            if self._num_lost:
                self._put(f"{self._num_lost} lines before this one could not be written ({self._why})\n")
                self._num_lost = 0
            for start in range(0, len(text), _PIECE_CHARS):
                self._put(text[start : start + _PIECE_CHARS])
        except OSError as error:
            self._num_lost, self._why = self._num_lost + 1, error.strerror or str(error)
        return len(text)

    def _put(self, text: str) -> None:
        """Writes a piece. Raises OSError where that fails, or nobody reads it; nobody is waited for twice."""
        if self._poll is not None and not self._poll.poll(0 if self._num_lost else 1000 * _PATIENCE_S):
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
