"""One logger for the package: to stderr, each line with its time and its rank.

Results go to stdout, everything else here. Workers set their rank once, at start.
"""

import logging
import os
import sys

_FORMAT = "%(asctime)s %(levelname).1s {who}%(message)s"


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a module, below the package's logger."""
    return logging.getLogger(name if name.startswith("moe_serve") else f"moe_serve.{name}")


def configure_logging(level: str | None = None, who: str = "") -> None:
    """Sends the package's log lines to stderr. level: a logging name (default: $MOE_SERVE_LOG or INFO)."""
    logger = logging.getLogger("moe_serve")
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(who=f"[{who}] " if who else ""), "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel((level or os.environ.get("MOE_SERVE_LOG", "INFO")).upper())
    logger.propagate = False
