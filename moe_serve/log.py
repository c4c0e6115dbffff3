"""One logger for the package: to stderr, each line with its time and its rank.

Results go to stdout, everything else here. Workers set their rank once, at start. What others write into a message
cannot forge a line of the log, nor fill it.
"""

import logging
import os
import re
import sys
import time
from dataclasses import dataclass

_FORMAT = "%(asctime)s %(levelname).1s {who}%(message)s"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MAX_SOURCES = 256  # whose warnings are counted one by one


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a module, below the package's logger."""
    return logging.getLogger(name if name.startswith("moe_serve") else f"moe_serve.{name}")


def configure_logging(level: str | None = None, who: str = "") -> None:
    """Sends the package's log lines to stderr. level: a logging name (default: $MOE_SERVE_LOG or INFO)."""
    logger = logging.getLogger("moe_serve")
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(_FORMAT.format(who=f"[{who}] " if who else ""), "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel((level or os.environ.get("MOE_SERVE_LOG", "INFO")).upper())
    logger.propagate = False


def one_line(text: str) -> str:
    """Returns a text with its control characters written out, such as `\\x0a` for a line feed."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _OneLine(logging.Formatter):
    """A message is one line, whatever the texts in it; only our own tracebacks, which come after it, have more."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)


@dataclass
class _Told:
    at_s: float
    num_left_out: int = 0


class RareWarnings:
    """Warns at most once a minute about each source, and says how often it did not: a flood cannot fill the log."""

    def __init__(self, logger: logging.Logger, period_s: float = 60.0):
        self._logger = logger
        self._period_s = period_s
        self._told: dict[str, _Told] = {}

    def warn(self, source: str, message: str, *args: object) -> None:
        """Logs a warning unless this source had one a short while ago. source: whom or what it is about"""
        now_s = time.monotonic()
        if source not in self._told and len(self._told) >= _MAX_SOURCES:
            source = "others"
        told = self._told.get(source)
        if told is not None and now_s - told.at_s < self._period_s:
            told.num_left_out += 1
            return
        also = f" ({told.num_left_out} more since the last such line)" if told and told.num_left_out else ""
        self._told[source] = _Told(now_s)
        self._logger.warning(message + "%s", *args, also)
