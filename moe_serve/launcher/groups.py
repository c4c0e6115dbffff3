"""Joins the ranks: process groups, and the three names of a rank.

`rank` is a process of the launch, `dp_rank` says whose requests it owns, `ep_rank` whose experts. They are mapped here
and nowhere else, from a mesh (pp, dp, attn_tp, ep). Today pp = attn_tp = 1, so all three numbers are equal.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store

from moe_serve.config import ServeConfig
from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.peer_calls import all_gather, reason_of
from moe_serve.dispatch.shm.memory import host_mark
from moe_serve.dispatch.shm.shared_files import SharedFiles
from moe_serve.errors import LaunchError
from moe_serve.launcher.rank_env import RankEnv, interface_towards

_ADDRESS_BYTES = 128


@dataclass(frozen=True)
class Mesh:
    """How ranks are numbered: the expert rank runs fastest over attention-TP ranks, then data-parallel ranks, then
    stages."""

    pp: int
    dp: int
    attn_tp: int

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.attn_tp

    def ep_rank(self, rank: int) -> int:
        return rank % (self.dp * self.attn_tp)


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank.

    ep:       carries token rows (gloo on CPU, NCCL on GPU); a collective that takes longer than the step deadline fails
    control:  gloo, for the exchange before each step and for small host tensors
    patient:  gloo, with the longer deadline of the start, since ranks differ in how long they read weights
    one_host: whether all ranks share one machine and its shared memory
    """

    env: RankEnv
    mesh: Mesh
    ep: EpGroup
    control: dist.ProcessGroup
    patient: dist.ProcessGroup
    one_host: bool


def join_groups(env: RankEnv, config: ServeConfig, device: torch.device, store: Store) -> Groups:
    """Returns this rank's groups; blocks until all ranks have joined.

    Raises LaunchError when they do not join within server.attach_deadline_s.
    """
    choose_interface(env)
    start_timeout = timedelta(seconds=config.server.attach_deadline_s)
    try:
        dist.init_process_group("gloo", store=store, rank=env.rank, world_size=env.num_ranks, timeout=start_timeout)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {env.rank} of {env.num_ranks} could not join the others at {env.store} "
            f"within {config.server.attach_deadline_s:g} s ({reason_of(error)}); "
            "check that all ranks were started and can reach that address"
        ) from None
    step_timeout = timedelta(seconds=config.engine.step_deadline_s)
    control = dist.new_group(backend="gloo", timeout=step_timeout)
    rows = control if device.type == "cpu" else dist.new_group(backend="nccl", timeout=step_timeout)
    mesh = Mesh(pp=config.parallel.pp, dp=env.num_ranks, attn_tp=config.parallel.attn_tp)
    patient = dist.group.WORLD
    assert patient is not None
    hosts = gather_bytes(host_mark().encode(), patient)
    process_group = rows if env.num_ranks > 1 else None
    files = None if env.num_before is None else SharedFiles()
    return Groups(
        env=env,
        mesh=mesh,
        ep=EpGroup(mesh.ep_rank(env.rank), mesh.num_ranks, device, process_group, count_nodes(hosts), files),
        control=control,
        patient=patient,
        one_host=len(set(hosts)) == 1,
    )


def choose_interface(env: RankEnv) -> None:
    """Makes gloo and NCCL listen at one interface, unless the user has chosen: the loopback one on a single host."""
    alone = env.num_local_ranks == env.num_ranks
    interface = interface_towards("127.0.0.1" if alone else env.master_addr)
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def count_nodes(hosts: Sequence[bytes]) -> int:
    """Returns how many nodes the ranks are on: equal ones, numbered one after the other.

    Where hosts hold unequal numbers of ranks, or ranks alternate between them, each rank counts as a node of its own.
    hosts: of each rank, equal bytes for ranks of one host
    """
    num_nodes = len(set(hosts))
    per_node = len(hosts) // num_nodes
    regular = len(hosts) % num_nodes == 0 and all(host == hosts[r - r % per_node] for r, host in enumerate(hosts))
    return num_nodes if regular else len(hosts)


def gather_bytes(data: bytes, group: dist.ProcessGroup) -> Sequence[bytes]:
    """Returns every rank's data, in rank order; at most 128 bytes each. No object collectives: those pickle."""
    assert len(data) <= _ADDRESS_BYTES
    mine = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    all_gather(rows, mine, group)
    return [bytes(row.tolist()).rstrip(b"\0") for row in rows]


def device_of(env: RankEnv, config: ServeConfig) -> torch.device:
    """Returns the device of this rank. Raises LaunchError where it is missing."""
    kind = config.parallel.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("parallel.device is cuda but torch sees no GPU here; set parallel.device: cpu")
    if env.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {env.local_rank} has no GPU: this machine has {torch.cuda.device_count()}; start at most that "
            "many ranks here"
        )
    torch.cuda.set_device(env.local_rank)
    return torch.device("cuda", env.local_rank)
