"""What one rank finds about its process and its machine. Nothing is judged here: ranks.py sees all ranks."""

import os
import platform
import re
import resource
import socket
from importlib import metadata
from pathlib import Path

import msgspec
import torch
import zmq

from moe_serve.config import ServeConfig
from moe_serve.dispatch.shm.memory import host_mark
from moe_serve.engine.model.model_plan import choose_numerics, compute_dtype
from moe_serve.errors import MoeServeError
from moe_serve.kernels.cpu.digest import kernel_digest
from moe_serve.launcher.facts import Fact, facts_of
from moe_serve.launcher.preflight import look_for_files
from moe_serve.launcher.rank_env import RankEnv, address_of, interface_towards
from moe_serve.launcher.rendezvous import device_of

_PACKAGES = ("torch", "numpy", "pyzmq", "msgspec", "tokenizers", "triton", "mpi4py")
_MATTERS = re.compile(
    r"(NCCL|GLOO|TP|OMP|MKL|KMP|CUDA|NVSHMEM|UCX|FI|TORCH|MOE_SERVE|MALLOC)_|PYTHONPATH$|LD_|https?_proxy$|no_proxy$",
    re.IGNORECASE,
)
_SECRET = "MOE_SERVE_TOKEN"
_LISTENS = "0A"  # the state of /proc/net/tcp


class RankReport(msgspec.Struct, frozen=True):
    """One rank as it sees itself.

    host_mark: equal for ranks that share a kernel and /dev/shm;  address, interface: towards the other ranks
    master:    what MASTER_ADDR resolves to here
    files, files_hard: limit of open files;  memlock: bytes that may be locked, -1 = any number
    store:     addresses on which this host listens at the port of the launch's store, on rank 0
    kernels:   what computes, and on CPUs a hash of its bits
    problems:  that this rank has alone
    """

    rank: int
    host: str
    host_mark: str
    num_local_ranks: int
    address: str
    interface: str
    master: str
    device: str
    packages: dict[str, str]
    environ: dict[str, str]
    cores: int
    memory_bytes: int
    shm_bytes: int
    files: int
    files_hard: int
    memlock: int
    store: list[str]
    facts: list[Fact]
    kernels: str
    problems: list[str]


def look(env: RankEnv, config: ServeConfig) -> RankReport:
    """Returns what this rank finds here."""
    problems, facts, device, kernels = [], [], "unknown", "unknown"
    try:
        device = device_of(env, config).type
        kernels = _kernels(config, device)
        look_for_files(config)
        facts = facts_of(config, device)
    except MoeServeError as error:
        problems.append(str(error))
    interface, address = _towards_the_others(env)
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return RankReport(
        rank=env.rank,
        host=socket.gethostname(),
        host_mark=host_mark(),
        num_local_ranks=env.num_local_ranks,
        address=address,
        interface=interface,
        master=_resolve(env.master_addr),
        device=device,
        packages=_versions(),
        environ={name: _value_of(name) for name in sorted(os.environ) if _MATTERS.match(name)},
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=available_bytes(),
        shm_bytes=_free_bytes("/dev/shm"),
        files=files,
        files_hard=files_hard,
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        store=listening_addresses(env.master_port) if env.rank == 0 and env.num_ranks > 1 else [],
        facts=facts,
        kernels=kernels,
        problems=problems,
    )


def _kernels(config: ServeConfig, device: str) -> str:
    """Returns what computes; on a CPU, it is built here as it would be by the ranks."""
    choice = choose_numerics(config, torch.device(device), compute_dtype(config, torch.device(device)))
    return f"{choice.kernels}, bits {kernel_digest()}" if choice.library is not None else choice.kernels


def _towards_the_others(env: RankEnv) -> tuple[str, str]:
    """Returns the interface that gloo will use, and its address; "" where it has none."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    interface = chosen or interface_towards(env.master_addr) or ""
    return interface, (address_of(interface) or "") if interface else ""


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["zmq curve"] = "yes" if zmq.has("curve") else "no"
    return found


def _value_of(name: str) -> str:
    return "set" if name == _SECRET else os.environ[name][:200]


def available_bytes() -> int:
    """Returns the bytes of memory that this process can still take: of the machine, or of its control group."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((group / "memory.current").read_text(encoding="ascii"))
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available


def _free_bytes(folder: str) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def listening_addresses(port: int) -> list[str]:
    """Returns the addresses of this network namespace on which some process listens at a TCP port."""
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state = line.split()[:4]
            address, _, hex_port = local.partition(":")
            if state == _LISTENS and int(hex_port, 16) == port:
                found.append(_address(address))
    return sorted(set(found))


def _address(digits: str) -> str:
    """Returns an address that /proc/net/tcp writes in hexadecimal words of the machine's byte order."""
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
