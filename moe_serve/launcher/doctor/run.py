"""Runs the doctor on one rank: look, exchange through the store, measure every pair, exchange again, judge."""

import os
import secrets
from typing import TypeVar

import msgspec
from torch.distributed import Store

from moe_serve.config import ServeConfig
from moe_serve.errors import LaunchError
from moe_serve.launcher.doctor.findings import Finding, judge
from moe_serve.launcher.doctor.machine import RankReport, look
from moe_serve.launcher.doctor.pairs import SECRET_BYTES, Door, Listener, Pair, measure_all
from moe_serve.launcher.meeting import gather, leave, open_store
from moe_serve.launcher.rank_env import RankEnv

T = TypeVar("T", bound=msgspec.Struct)


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
