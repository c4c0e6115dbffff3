"""The check that an engine's extension point is still the one that its adapter was written for."""

import inspect
from collections.abc import Callable
from typing import Any

from moe_serve.errors import ConfigError


def check_parameters(theirs: Callable[..., Any], ours: Callable[..., Any], engine: str) -> None:
    """Raises ConfigError where a function of an engine has other parameters than ours that takes its place.

    engine: name and version that ours was written for
    """
    found, known = (tuple(inspect.signature(function).parameters) for function in (theirs, ours))
    if found != known:
        raise ConfigError(
            f"{theirs.__qualname__} takes {', '.join(found)}; the adapter knows {', '.join(known)} ({engine}). "
            "Unset MOE_SERVE_EPLB, or install a version of the engine or of moe_serve that fits"
        )
