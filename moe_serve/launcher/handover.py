"""What a living rank leaves in the folder of its system for ranks that are started anew: how to find its shared memory,
and what must be equal. Only the owner enters that folder. Torch-free."""

import contextlib
import os
from pathlib import Path

import msgspec

from moe_serve.dispatch.shm.shared_files import FileMark
from moe_serve.errors import ConfigError, LaunchError
from moe_serve.launcher.facts import Fact, first_difference
from moe_serve.launcher.rank_env import RankEnv
from moe_serve.links.link import Link


class Handover(msgspec.Struct, frozen=True):
    """pid: of the rank that left it;  files, kernels: as in SharedFiles;  facts: what all ranks have in common"""

    launch_id: int
    pid: int
    files: dict[str, FileMark]
    kernels: str
    facts: list[Fact]


def leave_handover(link: Link, rank: int, handover: Handover) -> None:
    """Writes what ranks that are started anew need of this one."""
    path = _path(link, rank)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.encode(handover))
    os.replace(unfinished, path)


def find_handover(link: Link, env: RankEnv) -> Handover:
    """Returns what a rank of this launch that lives has left. Raises LaunchError where none does."""
    for rank in range(env.num_ranks):
        if rank == env.rank:
            continue
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found = msgspec.json.decode(_path(link, rank).read_bytes(), type=Handover)
            os.kill(found.pid, 0)
            if found.launch_id == env.launch_id:
                return found
    raise LaunchError(
        f"rank {env.rank} was started anew, but no other rank of its launch serves; start all ranks again"
    )


def check_like(theirs: Handover, own: list[Fact], env: RankEnv) -> None:
    """Raises ConfigError naming the first fact in which this rank differs from those that serve."""
    message = first_difference([own if rank == env.rank else theirs.facts for rank in range(env.num_ranks)])
    if message is not None:
        raise ConfigError(message)


def _path(link: Link, rank: int) -> Path:
    assert link.folder is not None, "ranks are started anew on one host alone"
    return link.folder / f"handover-{rank}"
