"""What a client gets from a connection. Torch-free."""

from dataclasses import dataclass
from typing import Self

from moe_serve.config import ServerConfig


@dataclass(frozen=True)
class ConnectionLimits:
    """What a client gets: seconds for each phase, bytes for headers."""

    header_deadline_s: float
    body_deadline_s: float
    idle_deadline_s: float
    send_deadline_s: float
    max_header_bytes: int

    @classmethod
    def of(cls, server: ServerConfig) -> Self:
        """Returns the limits of a configuration."""
        return cls(
            header_deadline_s=server.header_deadline_s,
            body_deadline_s=server.body_deadline_s,
            idle_deadline_s=server.idle_deadline_s,
            send_deadline_s=server.send_deadline_s,
            max_header_bytes=int(server.max_header_kib * 2**10),
        )
