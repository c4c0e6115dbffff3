"""One logger for the package: to stderr, each line with its time and its rank, as text or as one JSON object.

Results go to stdout, everything else here. Workers set their rank once, at start. What others write into a message
cannot forge a line of the log, nor fill it. A line that is written while a client's call is served names the call.
"""

import contextlib
import io
import json
import logging
import os
import re
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TextIO

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)
_MAX_SOURCES = 256  # whose warnings are counted one by one
_RARELY_S = 60.0  # between two of one source

# The X-Request-Id of the client's call that this task serves. A context variable, since a line of the log may be
# written anywhere below the call, and no two tasks share one.
call_id: ContextVar[str | None] = ContextVar("call_id", default=None)


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a module, below the package's logger."""
    return logging.getLogger(name if name.startswith("moe_serve") else f"moe_serve.{name}")


def configure_logging(level: str | None = None, who: str = "", form: str = "text") -> None:
    """Sends the package's log lines to stderr.

    level: a logging name (default: $MOE_SERVE_LOG or INFO);  form: "text" or "json"
    """
    logger = logging.getLogger("moe_serve")
    logger.handlers.clear()
    formatter = _JsonLine(who) if form == "json" else _TextLine(who)
    stream = LastingLog(sys.stderr, lambda text: _formatted(text, formatter, logging.WARNING))
    handler = _CountingHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.setLevel((level or os.environ.get("MOE_SERVE_LOG", "INFO")).upper())
    logger.propagate = False


def json_line(text: str, who: str, level: int = logging.INFO) -> str:
    """Returns a line of a process as one of JSON, as those of its log are."""
    return _formatted(text, _JsonLine(who), level)


def num_logged() -> dict[str, int]:
    """Returns how many warnings and errors this process has logged, by level; none before configure_logging."""
    counts = Counter(warning=0, error=0)
    for handler in logging.getLogger("moe_serve").handlers:
        if isinstance(handler, _CountingHandler):
            counts += handler.counts
    return {level: counts[level] for level in ("warning", "error")}


def log_fields(logger: logging.Logger, message: str, fields: Mapping[str, object]) -> None:
    """Logs a line of named values: `message name=value …`, or members of the JSON object."""
    logger.info(message, extra={"fields": fields})


def one_line(text: str) -> str:
    """Returns a text with its control characters written out, such as `\\x0a` for a line feed."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _formatted(text: str, formatter: logging.Formatter, level: int) -> str:
    fields = {"levelno": level, "levelname": logging.getLevelName(level), "msg": text}
    return formatter.format(logging.makeLogRecord(fields))


class _CountingHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Counts the warnings and errors that it writes."""

    def __init__(self, stream: object):
        super().__init__(stream)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.counts["error" if record.levelno >= logging.ERROR else "warning"] += 1
        super().emit(record)


class _TextLine(logging.Formatter):
    """A message is one line, whatever the texts in it; only our own tracebacks, which come after it, have more."""

    def __init__(self, who: str):
        who = f"[{who}] ".replace("%", "%%") if who else ""
        super().__init__(f"%(asctime)s %(levelname).1s {who}%(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        named = dict(getattr(record, "fields", ()))
        if (call := call_id.get()) is not None and "x_request_id" not in named:
            named["x_request_id"] = call
        record.message = one_line(" ".join([record.message, *(f"{key}={_shown(named[key])}" for key in named)]))
        return super().formatMessage(record)


class _JsonLine(logging.Formatter):
    """A line is one JSON object in ASCII, tracebacks included."""

    def __init__(self, who: str):
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": round(record.created, 6), "level": record.levelname.lower()}
        line |= {"process": self._who} if self._who else {}
        line["message"] = record.getMessage()
        line |= {} if (call := call_id.get()) is None else {"x_request_id": call}
        line |= dict(getattr(record, "fields", ()))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _shown(value: object) -> str:
    """A value such that the line can be read back: quoted, where it has spaces, quotes or anything unusual."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


@dataclass
class _Told:
    at_s: float
    num_left_out: int = 0


class RareWarnings:
    """Warns at most once a minute about each source, and says how often it did not: a flood cannot fill the log.

    Threads may share it.
    """

    def __init__(self, logger: logging.Logger):
        self._logger = logger
        self._told: dict[str, _Told] = {}
        self._lock = threading.Lock()

    def warn(self, source: str, message: str, *args: object) -> None:
        """Logs a warning unless this source had one a short while ago. source: whom or what it is about"""
        now_s = time.monotonic()
        with self._lock:
            if source not in self._told and len(self._told) >= _MAX_SOURCES:
                source = "others"
            told = self._told.get(source)
            if told is not None and now_s - told.at_s < _RARELY_S:
                told.num_left_out += 1
                return
            self._told[source] = _Told(now_s)
        also = f" ({told.num_left_out} more since the last such line)" if told and told.num_left_out else ""
        self._logger.warning(message + "%s", *args, also)


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
