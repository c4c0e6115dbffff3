"""The errors a user of moe_serve can meet.

A message has three parts: what is, what is needed, what to do. It names the setting, the rank and the numbers.
A command that ends with one of these prints one line and exits with 2; an HTTP request gets a 4xx with the text.
"""

from collections.abc import Callable, Iterable
from itertools import groupby

LARGE_PACKETS_LOST = (
    "small packets pass and large ones do not: some MTU on the way is too small; "
    "lower that of the interface (ip link set dev NAME mtu 1400), or let ICMP 'fragmentation needed' pass"
)


class MoeServeError(Exception):
    """Base of all errors that say what the user can do about them."""


class ConfigError(MoeServeError):
    """A setting, or a combination of settings, that cannot work."""


class LaunchError(MoeServeError):
    """Processes that cannot start or find each other: rank counts, ports, environment variables."""


class PortError(LaunchError):
    """A port of this machine that cannot be opened, mostly because another process uses it."""


class FolderError(LaunchError):
    """A folder of sockets that cannot be written to now, such as on a full disk: no setting is wrong."""


class ReplacedError(LaunchError):
    """A newer process is this rank; this one must end, without a word to the others."""


class ModelError(MoeServeError):
    """A model folder, architecture or checkpoint that cannot be served."""


class PlacementError(MoeServeError, ValueError):
    """An expert placement that is not legal, or does not fit the model and the ranks; a ValueError, too."""


class TraceError(MoeServeError, ValueError):
    """A load trace that cannot be read; names the file and the line or key. A ValueError, too."""


class CapacityError(MoeServeError):
    """A buffer or cache that is too small for what the configuration asks of it."""


class RequestError(MoeServeError):
    """A request that cannot be served. `field` names the part of the request to change."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field


class QueueFullError(MoeServeError):
    """Too many requests are waiting; the client should retry after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitError(QueueFullError):
    """A client that has used up what one client may ask for; it should retry after `retry_after_s`."""


class PeerError(MoeServeError):
    """A peer that did not arrive by the deadline, or ended. Its step is void: nothing is sampled from it.

    layer_row: MoE layer in which it was missed; None: in none
    """

    layer_row: int | None = None

    def __init__(self, message: str, rank: int, phase: str, step: int):
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.step = step


class LostConnectionError(PeerError):
    """A call among all ranks failed: a rank is gone or late, and the call cannot tell which. reason: in a few words"""

    def __init__(self, reason: str, phase: str):
        advice = "look at the last lines of the other ranks, and start the ranks again"
        super().__init__(f"a rank went away in {phase} ({reason}); {advice}", rank=-1, phase=phase, step=-1)
        self.reason = reason


def name_ranks(ranks: Iterable[int], host_of: Callable[[int], str]) -> str:
    """Returns ranks with their hosts, such as "ranks 0, 1 on a and rank 2 on b". host_of: of a rank; "": not named"""
    parts = []
    for host, group in groupby(sorted(ranks, key=lambda rank: (host_of(rank), rank)), key=host_of):
        here = list(group)
        on = f" on {host}" if host else ""
        parts.append(f"rank{'s' if len(here) > 1 else ''} {', '.join(map(str, here))}{on}")
    return " and ".join(parts)
