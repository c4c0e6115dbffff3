"""The way in which the front end and the ranks of one system find and trust each other.

On one host, started by `moe-serve serve` or `LLM`: ipc sockets in a folder that only its owner enters. Otherwise TCP,
where every socket asks for the token. The ranks of a role that has one of several hosts have both: ipc with each other,
and prefill ranks TCP with the front end.
"""

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from moe_serve.config import ServeConfig, ServerConfig
from moe_serve.errors import ConfigError, LaunchError
from moe_serve.links.folder import check_folder

SOCKETS = "MOE_SERVE_SOCKETS"  # the environment variable that names the folder
FRONT_ENDS = "MOE_SERVE_FRONT_ENDS"  # and the one with the addresses of several front ends over TCP
FOR_PREFILL = "MOE_SERVE_FOR_PREFILL"  # where front ends take prefill ranks of other hosts


@dataclass(frozen=True)
class Link:
    """Sockets in a folder, or TCP, or some of both.

    folder:      of the ipc sockets; None: all are TCP, with the front end's host and port
    token:       of the sockets over TCP; "": there are none
    port:        0 = any free one, for the front end
    worker:      number of this front end, of several
    front_ends:  HOST:PORT of each front end over TCP; (): there is one, or they have ipc sockets
    for_prefill: HOST:PORT where each front end takes prefill ranks of other hosts; (): these have ipc sockets, too
    """

    folder: Path | None = None
    token: str = ""
    host: str = ""
    port: int = 0
    worker: int = 0
    front_ends: tuple[str, ...] = ()
    for_prefill: tuple[str, ...] = ()

    @property
    def front_end(self) -> str:
        """The address that ranks attach to."""
        return self.front_end_at(self.worker)

    def front_end_at(self, worker: int) -> str:
        """Returns the address of one of several front ends."""
        if self.folder is None or self.front_ends:
            return f"tcp://{self.front_ends[worker] if self.front_ends else host_and_port(self.host, self.port)}"
        return f"ipc://{self.folder}/front_end-{worker}" if worker else f"ipc://{self.folder}/front_end"

    def of_prefill(self) -> "Link":
        """Returns the link of the prefill ranks beside these. Raises ConfigError beside another launcher."""
        if self.for_prefill:
            return replace(self, folder=None, front_ends=self.for_prefill, for_prefill=())
        if self.folder is None:
            raise ConfigError(
                "parallel.num_prefill_ranks is above 0 but only `moe-serve serve` starts prefill ranks; leave it out "
                "beside torchrun, mpirun and LLM"
            )
        return replace(self, folder=self.folder / "prefill")

    def wakes_of(self, rank: int, own_host: str) -> str:
        """Returns the address where a rank takes wakes; over TCP, one of own_host with any free port."""
        return f"ipc://{self.folder}/wakes-{rank}" if self.folder else f"tcp://{host_and_port(own_host, '*')}"


def find_link(server: ServerConfig) -> Link:
    """Returns the link of this process: that of the launcher that started it, else TCP as configured.

    Raises LaunchError where the folder or the token cannot be trusted.
    """
    folder, front_ends, for_prefill = os.environ.get(SOCKETS), _addresses(FRONT_ENDS), _addresses(FOR_PREFILL)
    if folder:
        check_folder(Path(folder))
        token = os.environ.get(TOKEN, "")
        return Link(folder=Path(folder), token=token, front_ends=front_ends, for_prefill=for_prefill)
    host, port = server.worker_host, server.worker_port
    token = shared_token(server.token_file, host, port)
    return Link(token=token, host=host, port=port, front_ends=front_ends, for_prefill=for_prefill)


def _addresses(variable: str) -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get(variable, "").split(",")))


def check_front_ends(config: ServeConfig, link: Link) -> None:
    """Raises ConfigError for several front ends beside ranks that `moe-serve serve` has not started."""
    if config.num_front_ends > 1 and link.folder is None and not link.front_ends:
        raise ConfigError(
            f"server.api_workers is {config.server.api_workers} and launcher.front_ends is "
            f"{config.launcher.front_ends} but only `moe-serve serve` starts several front ends; set "
            "server.api_workers: 1 and launcher.front_ends: first_host"
        )


def host_and_port(host: str, port: int | str) -> str:
    """Returns HOST:PORT, or [HOST]:PORT of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


TOKEN = "MOE_SERVE_TOKEN"
_MIN_LENGTH = 16  # with a shorter one, somebody who records a connection can try all of them
_MAX_LENGTH = 1024


def shared_token(token_file: str | None, host: str, port: int) -> str:
    """Returns the token of the front end at host:port: $MOE_SERVE_TOKEN, that of a file, or a new one in a file.

    token_file: server.token_file; None: a file of this user, which only processes of this machine can know
    Raises LaunchError where the token is too short, its file is open to others, or host can be reached from other
    machines and neither names a token.
    """
    given = os.environ.get(TOKEN)
    if given:
        return _checked(given, f"${TOKEN}")
    if token_file is not None:
        return _of_file(Path(token_file).expanduser())
    if not is_loopback(host):
        raise LaunchError(
            f"server.worker_host is {host}, which other machines may reach, and no token is set; give the front end "
            f"and all ranks the same ${TOKEN} (make one with: openssl rand -hex 32), or a server.token_file"
        )
    return _of_file(_default_folder() / f"token-{port}")


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address is this machine alone, as far as it can be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def _default_folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "moe_serve" if runtime else Path.home() / ".cache" / "moe_serve"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"no token is set, and the folder for one, {folder}, cannot be made ({error.strerror}); give the front end "
            f"and all ranks the same ${TOKEN}, or a server.token_file"
        ) from None
    return folder


def _of_file(path: Path) -> str:
    """Returns the token in a file. The process that starts first makes the file."""
    with contextlib.suppress(FileExistsError):
        _make(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(f"the token file {path} cannot be read ({error.strerror}); correct its path") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise LaunchError(f"the token file {path} is not a regular file; name one that is")
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise LaunchError(
                f"the token file {path} is open to other users; run: chown $USER {path} && chmod 600 {path}"
            )
        data = os.read(descriptor, _MAX_LENGTH + 2)
    finally:
        os.close(descriptor)
    return _checked(data.decode("ascii", errors="replace").strip(), f"the token in {path}")


def _make(path: Path) -> None:
    """Makes the file with a new token at once, so that nobody reads half of it. Raises FileExistsError if it exists."""
    if path.exists():
        return
    try:
        descriptor, made = tempfile.mkstemp(prefix=".token-", dir=path.parent)  # O_EXCL, mode 0600
    except OSError as error:
        raise LaunchError(f"the token file {path} cannot be made ({error.strerror}); name another folder") from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        os.link(made, path)
    finally:
        os.unlink(made)


def _checked(token: str, what: str) -> str:
    if not _MIN_LENGTH <= len(token) <= _MAX_LENGTH:
        raise LaunchError(
            f"{what} has {len(token)} characters, expected {_MIN_LENGTH} to {_MAX_LENGTH}; make one with: "
            "openssl rand -hex 32"
        )
    return token
