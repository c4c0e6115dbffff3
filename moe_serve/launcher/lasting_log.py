"""A stream for lines that are not worth an end: the disk may be full, or the reader of a pipe gone."""

import io
import os
from typing import TextIO


class LastingLog(io.TextIOBase):
    """A stream that goes on where the one below fails, and says there how much was lost once that works again."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._num_lost = 0  # texts, of a line each
        self._why = ""

    def write(self, text: str) -> int:
        try:
            if self._num_lost:
                self._stream.write(f"{self._num_lost} lines before this one could not be written ({self._why})\n")
                self._stream.flush()
                self._num_lost = 0
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._num_lost, self._why = self._num_lost + 1, error.strerror or str(error)
        return len(text)

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
