"""The limit of open descriptors of this process, and how many connections it allows. Torch-free."""

import resource

from moe_serve.log import get_logger

_RESERVE = 128  # for everything that is not a client: ranks, logs, files, the event loop
_UNLIMITED = resource.RLIM_INFINITY

log = get_logger(__name__)


def connections_allowed(wanted: int) -> int:
    """Returns how many of the wanted connections the limit of descriptors allows, after raising it as far as needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = soft_limit(wanted, soft, hard)
    if target != soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
        except OSError:
            pass  # a sandbox forbids it: the soft limit counts
    allowed = wanted if soft == _UNLIMITED else max(1, min(wanted, soft - _RESERVE))
    if allowed < wanted:
        log.warning(
            "server.max_connections is %d but the limit of descriptors allows %d; raise the hard limit (ulimit -Hn)",
            wanted,
            allowed,
        )
    return allowed


def soft_limit(wanted: int, soft: int, hard: int) -> int:
    """Returns the soft limit to set for the wanted connections: never a lower one, and none above the hard limit."""
    needed = wanted + _RESERVE
    if soft == _UNLIMITED or soft >= needed:
        return soft
    return needed if hard == _UNLIMITED else min(needed, hard)
