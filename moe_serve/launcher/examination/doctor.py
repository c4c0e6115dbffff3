"""`moe-serve doctor` on one rank: look, exchange through the store, measure every pair, exchange again, judge, print.

The judgement names the ranks of each fault and the line that fixes it: what keeps the ranks from serving, and what is
suspicious.
"""

import ipaddress
import os
import platform
import re
import resource
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

import msgspec
import torch
import zmq
from rich.table import Table
from torch.distributed import Store

from moe_serve.config import ServeConfig
from moe_serve.dispatch.shm.memory import host_mark
from moe_serve.engine.model.model_plan import choose_numerics, compute_dtype
from moe_serve.engine.rank_memory import bytes_in_words
from moe_serve.errors import LaunchError, MoeServeError
from moe_serve.kernels.cpu.digest import kernel_digest
from moe_serve.launcher.examination.check import available_bytes, make_console
from moe_serve.launcher.examination.pairs import SECRET_BYTES, Door, Listener, Pair, measure, partners
from moe_serve.launcher.examination.transport import SHARED, free_bytes
from moe_serve.launcher.facts import Fact, by_value, facts_of, first_difference
from moe_serve.launcher.preflight import look_for_files
from moe_serve.launcher.rank_env import RankEnv, address_of, interface_towards
from moe_serve.launcher.rendezvous import device_of, gather, leave, list_ranks, open_store

T = TypeVar("T", bound=msgspec.Struct)
_MIN_FILES = 4096
_MIN_SHM_BYTES = 1 << 30
_MIN_MEMLOCK = 1 << 30
_CLOCK_S = 1.0
_SLOW = 4.0  # times the median of its kind
_NOTICED_US = 1000.0  # a slower link is suspicious only where a message takes longer than this
_OWN_OF_A_RANK = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE")
_PACKAGES = ("torch", "numpy", "pyzmq", "msgspec", "tokenizers", "triton", "mpi4py")
_MATTERS = re.compile(
    r"(NCCL|GLOO|TP|OMP|MKL|KMP|CUDA|NVSHMEM|UCX|FI|TORCH|MOE_SERVE|MALLOC)_|PYTHONPATH$|LD_|https?_proxy$|no_proxy$",
    re.IGNORECASE,
)
_SECRET = "MOE_SERVE_TOKEN"
_LISTENS = "0A"  # the state of /proc/net/tcp
_MOST_PAIRS = 64  # rows; of more pairs, the slowest are shown


class RankReport(msgspec.Struct, frozen=True):
    """One rank's findings about its process and its machine; `judge` compares those of all ranks.

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


class Finding(msgspec.Struct, frozen=True):
    """level: "problem" = it cannot serve so, "warning" = it may serve badly;  fix: a line to type, or to change"""

    level: Literal["problem", "warning"]
    text: str
    fix: str


class Diagnosis(msgspec.Struct, frozen=True):
    """The findings about all ranks and pairs; the same on all ranks."""

    ranks: list[RankReport]
    pairs: list[Pair]
    findings: list[Finding]

    @property
    def can_serve(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)


def run_doctor(env: RankEnv, config: ServeConfig, deadline_s: float) -> Diagnosis:
    """Returns the diagnosis of all ranks of the launch. Raises LaunchError naming ranks that do not come in time."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    store = open_store(env, deadline_s)
    report = look(env, config)
    reports = _exchange(store, env, "doctor: ranks", report, RankReport, deadline_s)
    pairs: list[Pair] = []
    if env.num_ranks > 1:
        pairs = _measure(store, env, report, deadline_s)
        leave(store, env, "doctor: pairs")
    return Diagnosis(reports, pairs, judge(config, reports, pairs))


class _Measured(msgspec.Struct, frozen=True):
    pairs: list[Pair]


def _measure(store: Store, env: RankEnv, report: RankReport, deadline_s: float) -> list[Pair]:
    secret = secrets.token_bytes(SECRET_BYTES)
    if env.rank == 0:
        store.set("moe_serve/doctor: secret", secret.hex())
    secret = bytes.fromhex(store.get("moe_serve/doctor: secret").decode())
    try:
        listener = Listener(report.address or "127.0.0.1", secret)
    except OSError as error:
        raise LaunchError(
            f"rank {env.rank} cannot listen on {report.address} ({error.strerror}); set GLOO_SOCKET_IFNAME"
        ) from None
    try:
        door = Door(env.rank, report.address, listener.port)
        doors = _exchange(store, env, "doctor: doors", door, Door, deadline_s)
        measured = _Measured([measure(env.rank, doors[other], secret) for other in partners(env.rank, len(doors))])
        rows = _exchange(store, env, "doctor: pairs", measured, _Measured, deadline_s)
    finally:
        listener.close()
    return [pair for row in rows for pair in row.pairs]


def _exchange(store: Store, env: RankEnv, name: str, own: T, kind: type[T], deadline_s: float) -> list[T]:
    rows = gather(store, env, name, msgspec.json.encode(own).decode(), deadline_s)
    try:
        return [msgspec.json.decode(row, type=kind) for row in rows]
    except (ValueError, RecursionError) as error:
        raise LaunchError(
            f"what a rank wrote into the store cannot be read ({error}); are all of one version of moe_serve?"
        ) from None


def look(env: RankEnv, config: ServeConfig) -> RankReport:
    """Returns the findings of this rank about its process and its machine."""
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
        shm_bytes=free_bytes(SHARED),
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


def judge(config: ServeConfig, reports: Sequence[RankReport], pairs: Sequence[Pair]) -> list[Finding]:
    """Returns the faults that were found, problems first. reports: by rank;  pairs: in both directions"""
    found = [
        *_of_ranks(reports),
        *_of_agreement(reports),
        *_of_limits(config, reports),
        *_of_addresses(reports),
        *_of_store(reports),
        *_of_pairs(reports, pairs),
        *_of_environment(reports),
    ]
    return sorted(found, key=lambda finding: finding.level)


def _of_ranks(reports: Sequence[RankReport]) -> Iterator[Finding]:
    for text in dict.fromkeys(problem for report in reports for problem in report.problems):
        who = [report.rank for report in reports if text in report.problems]
        yield Finding("problem", f"{list_ranks(who)}: {text}", "see the text")


def _of_agreement(reports: Sequence[RankReport]) -> Iterator[Finding]:
    difference = first_difference([report.facts for report in reports if report.facts])
    if difference is not None:
        text, _, fix = difference.rpartition(". ")
        yield Finding("problem", text, fix)
    for package in dict.fromkeys(name for report in reports for name in report.packages):
        values = [report.packages.get(package, "not installed") for report in reports]
        if package != "torch" and len(set(values)) > 1:
            yield Finding("warning", f"{package} differs: {by_value(values)}", "install the same versions on all hosts")
    bits = [report.kernels.rpartition(", bits ")[2] for report in reports]
    if len(set(bits)) > 1:
        fix = (
            "--set engine.cpu_kernels=no_amx where some have amx and others have not; else install the same C "
            "compiler on all machines, or --set engine.cpu_kernels=torch"
        )
        yield Finding("problem", f"ranks compute differently: {by_value([each.kernels for each in reports])}", fix)
    for report in reports:
        if report.packages.get("zmq curve") != "yes":
            fix = "pip install --force-reinstall pyzmq  # its wheels bring CURVE"
            yield Finding("problem", f"rank {report.rank}: this libzmq has no CURVE, which links need", fix)


def _of_limits(config: ServeConfig, reports: Sequence[RankReport]) -> Iterator[Finding]:
    def where(test: Callable[[RankReport], bool]) -> list[int]:
        return [report.rank for report in reports if test(report)]

    few = where(lambda report: report.files < _MIN_FILES)
    if few:
        yield Finding(
            "warning",
            f"{list_ranks(few)}: at most {reports[few[0]].files} open files",
            "ulimit -n 65536  # or LimitNOFILE=65536",
        )
    small = where(lambda report: report.num_local_ranks > 1 and report.shm_bytes < _MIN_SHM_BYTES)
    if small and reports[small[0]].device == "cpu":
        text = f"{list_ranks(small)}: {reports[small[0]].shm_bytes >> 20} MiB of /dev/shm are free"
        yield Finding("warning", text, "mount -o remount,size=8G /dev/shm  # docker run --shm-size=8g")
    locked = where(lambda report: report.device == "cuda" and 0 <= report.memlock < _MIN_MEMLOCK)
    if locked:
        text = f"{list_ranks(locked)}: only {reports[locked[0]].memlock >> 20} MiB may be locked, RDMA needs more"
        yield Finding("warning", text, "ulimit -l unlimited  # LimitMEMLOCK=infinity, docker run --ulimit memlock=-1")
    threads = config.parallel.threads_per_rank
    crowded = where(lambda report: _is_crowded(report.num_local_ranks, threads or 1, report.cores))
    if crowded and reports[crowded[0]].device == "cpu":
        first = reports[crowded[0]]
        text = f"{list_ranks(crowded)}: {first.num_local_ranks} ranks of {threads or 1} threads on {first.cores} cores"
        yield Finding(
            "warning", text, f"--set parallel.threads_per_rank={max(1, first.cores // first.num_local_ranks)}"
        )


def _is_crowded(ranks: int, threads: int, cores: int) -> bool:
    """Returns whether threads get in each other's way. Ranks of one core each may share cores: shm/shared_cores.py."""
    one_core_each = ranks <= cores < 2 * ranks
    return threads * ranks > cores and not (1 < threads <= cores and one_core_each)


def _of_addresses(reports: Sequence[RankReport]) -> Iterator[Finding]:
    several_hosts = len({report.host_mark for report in reports}) > 1
    for report in reports:
        if not report.address:
            what = f"interface {report.interface}" if report.interface else "interface towards rank 0"
            fix = "export GLOO_SOCKET_IFNAME=…  # a name from `ip -brief address`"
            yield Finding("problem", f"rank {report.rank}: there is no {what} with an address", fix)
        elif several_hosts and ipaddress.ip_address(report.address).is_loopback:
            text = f"rank {report.rank}: would listen on {report.address}, which other hosts cannot reach"
            yield Finding("problem", text, "export MASTER_ADDR=…  # rank 0's address on the network of the ranks")
        elif ipaddress.ip_address(report.address).is_global:
            text = f"rank {report.rank}: {report.address} ({report.interface}) is a public address, and gloo is open"
            yield Finding("warning", text, "export GLOO_SOCKET_IFNAME=…  # an interface of a private network")


def _of_store(reports: Sequence[RankReport]) -> Iterator[Finding]:
    everywhere = [address for address in reports[0].store if address in ("0.0.0.0", "::")]
    if everywhere:
        yield Finding(
            "warning",
            f"the store of the launch on {reports[0].host} listens on all interfaces, and takes writes from anyone",
            "allow its port and those of the ranks from the hosts of the ranks only; see SECURITY.md",
        )


def _of_pairs(reports: Sequence[RankReport], pairs: Sequence[Pair]) -> Iterator[Finding]:
    for pair in pairs:
        if pair.error:
            target = reports[pair.target]
            text = f"rank {pair.source} cannot reach rank {pair.target} at {target.address} ({pair.error})"
            fix = f"nc -vz {target.address} …  # from {reports[pair.source].host}: a firewall, or GLOO_SOCKET_IFNAME"
            yield Finding("problem", text, fix)
    good = [pair for pair in pairs if not pair.error]
    late = [pair for pair in good if abs(pair.clock_s) > _CLOCK_S]
    if late:
        worst = max(late, key=lambda pair: abs(pair.clock_s))
        text = f"the clocks of ranks {worst.source} and {worst.target} differ by {abs(worst.clock_s):.1f} s"
        yield Finding("warning", text, "timedatectl set-ntp true  # on all hosts: logs and traces carry these times")
    for local in (True, False):
        kind = [pair for pair in good if (_host(reports, pair.source) == _host(reports, pair.target)) is local]
        yield from _slow_ones(kind)


def _slow_ones(pairs: Sequence[Pair]) -> Iterator[Finding]:
    if len(pairs) < 6:
        return  # too few to know what is usual
    latency, speed = median(pair.latency_us for pair in pairs), median(pair.mbytes_per_s for pair in pairs)
    for pair in pairs:
        who, fix = f"rank {pair.source} to rank {pair.target}", "look at cable, port and route between these hosts"
        if pair.latency_us > max(_SLOW * latency, _NOTICED_US):
            yield Finding("warning", f"{who}: {pair.latency_us:.0f} µs, others {latency:.0f} µs", fix)
        elif pair.mbytes_per_s < speed / _SLOW:
            yield Finding("warning", f"{who}: {pair.mbytes_per_s:.0f} MB/s, others {speed:.0f} MB/s", fix)


def _of_environment(reports: Sequence[RankReport]) -> Iterator[Finding]:
    names = sorted({name for report in reports for name in report.environ} - set(_OWN_OF_A_RANK))
    for name in names:
        values = [report.environ.get(name, "not set") for report in reports]
        if len(set(values)) > 1:
            yield Finding("warning", f"{name} differs: {by_value(values)}", f"export {name}=…  # the same on all hosts")


def _host(reports: Sequence[RankReport], rank: int) -> str:
    return reports[rank].host_mark


def to_json(diagnosis: Diagnosis) -> str:
    """Returns the diagnosis as one JSON object: ok, findings, ranks, pairs."""
    data = {"ok": diagnosis.can_serve} | msgspec.to_builtins(diagnosis)
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode()


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Prints each fault with its fix, then tables of ranks and pairs."""
    console = make_console()
    for finding in diagnosis.findings:
        style = "red" if finding.level == "problem" else "yellow"
        console.print(f"{finding.level}: {finding.text}", style=style, soft_wrap=True)
        console.print(f"    fix: {finding.fix}", soft_wrap=True)
    if diagnosis.can_serve:
        console.print("these ranks can serve together", style="green")
    for title, head, rows in _tables(diagnosis):
        console.print()
        console.print(title, style="italic")
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in head:
            table.add_column(name)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _tables(diagnosis: Diagnosis) -> Iterator[tuple[str, Sequence[str], list[Sequence[str]]]]:
    head = ("rank", "host", "interface", "device", "cores", "memory", "/dev/shm", "files", "memlock")
    rows: list[Sequence[str]] = [
        (
            str(each.rank),
            each.host,
            f"{each.interface} {each.address}",
            each.device,
            str(each.cores),
            bytes_in_words(each.memory_bytes),
            bytes_in_words(each.shm_bytes),
            str(each.files),
            "any" if each.memlock < 0 else bytes_in_words(each.memlock),
        )
        for each in diagnosis.ranks
    ]
    yield "ranks", head, rows
    first = diagnosis.ranks[0]
    versions = [*first.packages.items(), ("kernels", first.kernels)]
    yield "versions (rank 0)", ("package", "version"), [list(item) for item in versions]
    yield "environment (rank 0)", ("variable", "value"), [list(item) for item in first.environ.items()]
    if diagnosis.pairs:
        yield _pairs_title(diagnosis.pairs), ("from", "to", "latency", "bandwidth", "clock"), _pair_rows(diagnosis)


def _pairs_title(pairs: Sequence[Pair]) -> str:
    good = [pair for pair in pairs if not pair.error]
    if not good:
        return f"{len(pairs)} pairs"
    latency, speed = median(pair.latency_us for pair in good), median(pair.mbytes_per_s for pair in good)
    return f"{len(pairs)} pairs over TCP: median {latency:.0f} µs, {speed:.0f} MB/s"


def _pair_rows(diagnosis: Diagnosis) -> list[Sequence[str]]:
    slowest_first = sorted(diagnosis.pairs, key=lambda pair: (not pair.error, -pair.latency_us))
    return [
        (str(pair.source), str(pair.target), pair.error, "", "")
        if pair.error
        else (
            str(pair.source),
            str(pair.target),
            f"{pair.latency_us:.0f} µs",
            f"{pair.mbytes_per_s:.0f} MB/s",
            f"{pair.clock_s * 1e3:+.1f} ms",
        )
        for pair in slowest_first[:_MOST_PAIRS]
    ]
