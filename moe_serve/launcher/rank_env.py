"""Reads which rank this process is from what torchrun, MPI, Slurm or `moe-serve serve` set.

Under MPI, rank, local rank and an address chosen by rank 0 come from mpi4py itself, because the variables differ
between MPI implementations.
"""

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from moe_serve.errors import LaunchError

# The environment variable by which our own launcher names the descriptors that its ranks have inherited, of files in
# memory: the store through which they meet where all are on one host, one for each rank of this host, and one of the
# launcher (rank_start.py).
LAUNCH_FILES = "MOE_SERVE_LAUNCH_FILES"
PAGE_FILES = "MOE_SERVE_PAGE_FILES"  # of `moe-serve serve` with prefill ranks: memory for pages on their way
PAGES_AT = "MOE_SERVE_PAGES_AT"  # where roles have hosts of their own: where those of the decode ranks take pages
STORE_FD = "MOE_SERVE_STORE_FD"  # rank 0's, of a socket that listens at the master's address
WEIGHT_FILES = "MOE_SERVE_WEIGHT_FILES"  # of `moe-serve serve` with prefill ranks: memory for one copy of the weights
PAGES_FD = "MOE_SERVE_PAGES_FD"  # of memory for pages of the KV cache that all ranks of this host share
LINK_FD = "MOE_SERVE_LINK_FD"  # of a socket at which a rank of several hosts listens for those of others
NUM_BEFORE = "MOE_SERVE_NUM_BEFORE"  # set by a launcher that replaces a lost rank alone
_MPI_MARKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


@dataclass(frozen=True)
class RankEnv:
    """This process's place in the launch.

    launch_id:     as the launcher drew it; 0: rank 0 draws it when the ranks meet
    restarts_left: how often the launcher starts all ranks again when one is lost
    source:        the launcher, in words
    launch_files:  descriptors of our own launcher, as LAUNCH_FILES says; (): of another one
    master_port:   0: the ranks meet in the first of these files
    num_before:    processes that were this rank before in this launch; None: lost ranks are not replaced alone
    store_fd:      a socket of the launcher that listens at the master's address, for rank 0's store
    link_fd:       one at which this rank listens for ranks of other hosts; the launcher has it, too
    page_files:    descriptors of memory for pages on their way, by prefill rank: of all, or on a host that has only
                   such ranks, of those of this host
    pages_at:      HOST:PORT where each decode host takes pages of prefill ranks; (): all ranks are on this one
    pages_fd:      memory of cache.host_gb, of all ranks of this host
    weight_files:  memory for one copy of the weights that both roles share, as in engine.model.shared_weights
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    master_addr: str
    master_port: int
    launch_id: int
    source: str
    restarts_left: int = 0
    launch_files: tuple[int, ...] = ()
    num_before: int | None = None
    store_fd: int | None = None
    link_fd: int | None = None
    page_files: tuple[int, ...] = ()
    pages_at: tuple[str, ...] = ()
    pages_fd: int | None = None
    weight_files: tuple[int, ...] = ()

    @property
    def store(self) -> str:
        """Where the ranks meet, in words."""
        return f"{self.master_addr}:{self.master_port}" if self.master_port else "a file of their launcher"

    @property
    def local_ranks(self) -> range:
        """The ranks of this host, under our own launcher."""
        first = self.rank - self.local_rank
        return range(first, first + self.num_local_ranks)

    @property
    def store_path(self) -> str:
        """The path of the store under our own launcher."""
        return f"/proc/self/fd/{self.launch_files[0]}"

    def handover_file(self, rank: int) -> int:
        """Returns the descriptor of what a rank of this host leaves for new ones, under our own launcher."""
        return self.launch_files[1 + rank - self.local_ranks.start]


def read_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv:
    """Returns this process's place: from torchrun's variables, MPI, Slurm, or alone.

    Raises LaunchError naming the variable that is missing or wrong.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    if any(mark in environ for mark in _MPI_MARKS):
        return _from_mpi()
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        return _from_slurm(environ)
    return RankEnv(0, 1, 0, 1, "127.0.0.1", 0, 0, "single process")


def check_num_ranks(env: RankEnv, num_ranks: int) -> None:
    """Raises LaunchError where the launcher started another number of ranks than the configuration says."""
    if env.num_ranks == num_ranks:
        return
    if env.source == "single process":
        raise LaunchError(
            f"parallel.num_ranks is {num_ranks} but this process was started alone; start it by `moe-serve serve`, by "
            f"`torchrun --nproc-per-node {num_ranks} -m moe_serve.launcher.serve`, or by "
            f"`mpirun -n {num_ranks} python -m moe_serve.launcher.serve`"
        )
    raise LaunchError(
        f"{env.source} started {env.num_ranks} ranks but parallel.num_ranks is {num_ranks}; start {num_ranks}, "
        f"or add --set parallel.num_ranks={env.num_ranks}"
    )


def _number(environ: Mapping[str, str], name: str, source: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise LaunchError(
            f"{name} is not set, though other {source} variables are; start the ranks by torchrun, or set {name}"
        )
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name} is {text!r}, expected a whole number; start the ranks by torchrun") from None


def _from_torchrun(environ: Mapping[str, str]) -> RankEnv:
    rank = _number(environ, "RANK", "torchrun")
    num_ranks = _number(environ, "WORLD_SIZE", "torchrun")
    if not 0 <= rank < num_ranks:
        raise LaunchError(f"RANK is {rank} with WORLD_SIZE {num_ranks}; ranks count from 0 to WORLD_SIZE - 1")
    return RankEnv(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=_number(environ, "LOCAL_RANK", "torchrun", default=0),
        num_local_ranks=_number(environ, "LOCAL_WORLD_SIZE", "torchrun", default=1),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT", "torchrun", default=0 if LAUNCH_FILES in environ else None),
        launch_id=_number(environ, "MOE_SERVE_LAUNCH_ID", "moe-serve", default=0),
        restarts_left=_restarts_left(environ),
        launch_files=_descriptors(environ, LAUNCH_FILES),
        page_files=_descriptors(environ, PAGE_FILES),
        pages_at=tuple(filter(None, environ.get(PAGES_AT, "").split(","))),
        weight_files=_descriptors(environ, WEIGHT_FILES),
        num_before=_number(environ, NUM_BEFORE, "moe-serve") if NUM_BEFORE in environ else None,
        store_fd=_number(environ, STORE_FD, "moe-serve") if STORE_FD in environ else None,
        link_fd=_number(environ, LINK_FD, "moe-serve") if LINK_FD in environ else None,
        pages_fd=_number(environ, PAGES_FD, "moe-serve") if PAGES_FD in environ else None,
        source="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the launcher",
    )


def _descriptors(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    return tuple(int(each) for each in environ.get(name, "").split(",") if each)


def _restarts_left(environ: Mapping[str, str]) -> int:
    """Returns what `moe-serve serve` or torchrun say; torchrun's agents count on their own, so it is an estimate."""
    if "TORCHELASTIC_MAX_RESTARTS" not in environ:
        return _number(environ, "MOE_SERVE_RESTARTS_LEFT", "moe-serve", default=0)
    done = _number(environ, "TORCHELASTIC_RESTART_COUNT", "torchrun", default=0)
    return max(0, _number(environ, "TORCHELASTIC_MAX_RESTARTS", "torchrun") - done)


def _from_mpi() -> RankEnv:
    try:
        from mpi4py import MPI
    except ImportError:
        raise LaunchError(
            "this process was started by MPI but mpi4py is not installed; pip install 'moe-serve[mpi]', or start the "
            "ranks by torchrun"
        ) from None
    import numpy as np

    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    # Raw bytes on purpose: the lower-case calls of mpi4py pickle.
    address = np.zeros(256, dtype=np.uint8)
    if world.rank == 0:
        host = "127.0.0.1" if local.size == world.size else socket.getfqdn()
        text = f"{host}:{free_port()}".encode()
        address[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    world.Bcast(address, root=0)
    host, _, port = bytes(address).rstrip(b"\0").decode().rpartition(":")
    env = RankEnv(world.rank, world.size, local.rank, local.size, host, int(port), 0, "mpirun")
    # Finalize now: a worker exits by os._exit, and an MPI that was not finalized leaves shared memory behind.
    local.Free()
    MPI.Finalize()
    return env


def _from_slurm(environ: Mapping[str, str]) -> RankEnv:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise LaunchError(
                f"srun started this process but {name} is not set; export MASTER_ADDR (the first node of the job) and "
                "MASTER_PORT before srun, or start by torchrun"
            )
    return RankEnv(
        rank=_number(environ, "SLURM_PROCID", "Slurm"),
        num_ranks=_number(environ, "SLURM_NTASKS", "Slurm"),
        local_rank=_number(environ, "SLURM_LOCALID", "Slurm", default=0),
        num_local_ranks=_number(environ, "SLURM_NTASKS_PER_NODE", "Slurm", default=1),
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT", "Slurm"),
        launch_id=0,
        source="srun",
    )


def new_launch_id() -> int:
    """Returns a random number that names one launch, from 1 to 2^62."""
    return 1 + secrets.randbits(62)


def free_port() -> int:
    """Returns a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def host_name(env: RankEnv) -> str:
    """Returns the name of this host for people; with its address where the ranks are on several hosts."""
    name = socket.gethostname()
    address = None if env.num_local_ranks == env.num_ranks else own_host(env.master_addr)
    return f"{name} ({address})" if address else name


def own_host(master: str) -> str | None:
    """Returns the address of this host under which others reach it; None where it cannot be determined.

    master: the address where all ranks meet
    """
    return address_of(os.environ.get("GLOO_SOCKET_IFNAME", "")) or own_address(master)


def interface_towards(address: str) -> str | None:
    """Returns the name of the network interface that routes to an address; None if it cannot be determined.

    Without it gloo binds to the address of the host's own name, often 127.0.0.1, and peers on other hosts fail.
    """
    own = own_address(address)
    return next((name for _, name in socket.if_nameindex() if own is not None and address_of(name) == own), None)


def own_address(peer: str) -> str | None:
    """Returns the address of this host that routes to a peer, under which the peer reaches it; None where none does."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # UDP: nothing is sent
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return None


def address_of(interface: str) -> str | None:
    """Returns the IPv4 address of a network interface of this host; None where it has none, or does not exist."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface[:15].encode())
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
        except OSError:
            return None
