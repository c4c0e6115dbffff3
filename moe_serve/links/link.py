"""The way in which the front end and the ranks of one system find and trust each other.

On one host, started by `moe-serve serve` or `LLM`: ipc sockets in a folder that only its owner enters. Otherwise TCP,
where every socket asks for the token.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from moe_serve.config import ServerConfig
from moe_serve.errors import ConfigError
from moe_serve.links.folder import check_folder
from moe_serve.links.token import shared_token

SOCKETS = "MOE_SERVE_SOCKETS"  # the environment variable that names the folder


@dataclass(frozen=True)
class Link:
    """Sockets in a folder, or TCP.

    folder: of the ipc sockets; None: TCP, with the token and the front end's host and port
    port:   0 = any free one, for the front end
    worker: number of this front end, of several
    """

    folder: Path | None = None
    token: str = ""
    host: str = ""
    port: int = 0
    worker: int = 0

    @property
    def front_end(self) -> str:
        """The address that ranks attach to."""
        return self.front_end_at(self.worker)

    def front_end_at(self, worker: int) -> str:
        """Returns the address of one of several front ends. Over TCP there is one."""
        if self.folder is None:
            return f"tcp://{_in_url(self.host)}:{self.port}"
        return f"ipc://{self.folder}/front_end-{worker}" if worker else f"ipc://{self.folder}/front_end"

    def wakes_of(self, rank: int, own_host: str) -> str:
        """Returns the address where a rank takes wakes; over TCP, one of own_host with any free port."""
        return f"ipc://{self.folder}/wakes-{rank}" if self.folder else f"tcp://{_in_url(own_host)}:*"


def find_link(server: ServerConfig) -> Link:
    """Returns the link of this process: that of the launcher that started it, else TCP as configured.

    Raises LaunchError where the folder or the token cannot be trusted.
    """
    folder = os.environ.get(SOCKETS)
    if folder:
        check_folder(Path(folder))
        return Link(folder=Path(folder))
    host, port = server.worker_host, server.worker_port
    return Link(token=shared_token(server.token_file, host, port), host=host, port=port)


def check_front_ends(server: ServerConfig, link: Link) -> None:
    """Raises ConfigError for several front ends beside ranks that `moe-serve serve` has not started."""
    if server.api_workers > 1 and link.folder is None:
        raise ConfigError(
            f"server.api_workers is {server.api_workers} but only `moe-serve serve` starts several front ends; "
            "set server.api_workers: 1"
        )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
