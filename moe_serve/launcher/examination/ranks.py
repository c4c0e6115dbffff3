"""`moe-serve doctor` on one rank: look, exchange through the store, measure every pair, exchange again, judge.

The judgement says what keeps the ranks from serving, what is suspicious, and the line that fixes it.
"""

import ipaddress
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Literal, TypeVar

import msgspec
from torch.distributed import Store

from moe_serve.config import ServeConfig
from moe_serve.errors import LaunchError
from moe_serve.launcher.examination.machine import RankReport, look
from moe_serve.launcher.examination.pairs import SECRET_BYTES, Door, Listener, Pair, measure_all
from moe_serve.launcher.facts import by_value, first_difference
from moe_serve.launcher.rank_env import RankEnv
from moe_serve.launcher.rendezvous import gather, leave, open_store

T = TypeVar("T", bound=msgspec.Struct)
_MIN_FILES = 4096
_MIN_SHM_BYTES = 1 << 30
_MIN_MEMLOCK = 1 << 30
_CLOCK_S = 1.0
_SLOW = 4.0  # times the median of its kind
_NOTICED_US = 1000.0  # a slower link is suspicious only where a message takes longer than this
_OWN_OF_A_RANK = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE")


class Finding(msgspec.Struct, frozen=True):
    """level: "problem" = it cannot serve so, "warning" = it may serve badly;  fix: a line to type, or to change"""

    level: Literal["problem", "warning"]
    text: str
    fix: str


class Diagnosis(msgspec.Struct, frozen=True):
    """What the doctor knows at the end; the same on all ranks."""

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


class _Call(msgspec.Struct, frozen=True):
    """door: of a rank;  secret: rank 0's counts, in hexadecimal"""

    door: Door
    secret: str


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
        measured = _Measured(measure_all(env.rank, doors, secret))
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


def judge(config: ServeConfig, reports: Sequence[RankReport], pairs: Sequence[Pair]) -> list[Finding]:
    """Returns what is wrong, problems first. reports: by rank;  pairs: in both directions"""
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
        yield Finding("problem", f"{_ranks(who)}: {text}", "see the text")


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
            f"{_ranks(few)}: at most {reports[few[0]].files} open files",
            "ulimit -n 65536  # or LimitNOFILE=65536",
        )
    small = where(lambda report: report.num_local_ranks > 1 and report.shm_bytes < _MIN_SHM_BYTES)
    if small and reports[small[0]].device == "cpu":
        text = f"{_ranks(small)}: {reports[small[0]].shm_bytes >> 20} MiB of /dev/shm are free"
        yield Finding("warning", text, "mount -o remount,size=8G /dev/shm  # docker run --shm-size=8g")
    locked = where(lambda report: report.device == "cuda" and 0 <= report.memlock < _MIN_MEMLOCK)
    if locked:
        text = f"{_ranks(locked)}: only {reports[locked[0]].memlock >> 20} MiB may be locked, RDMA needs more"
        yield Finding("warning", text, "ulimit -l unlimited  # LimitMEMLOCK=infinity, docker run --ulimit memlock=-1")
    threads = config.parallel.threads_per_rank
    crowded = where(lambda report: _is_crowded(report.num_local_ranks, threads or 1, report.cores))
    if crowded and reports[crowded[0]].device == "cpu":
        first = reports[crowded[0]]
        text = f"{_ranks(crowded)}: {first.num_local_ranks} ranks of {threads or 1} threads on {first.cores} cores"
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


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:8]))}{more}"
