"""What a living rank leaves for ranks that are started anew: how to find its shared memory, and what must be equal.

It lies in the files that a launcher shares with its ranks. These are in memory, and no other process has them: a rank
comes back where no disk has room for a byte. Torch-free.
"""

import contextlib
import os

import msgspec

from moe_serve.dispatch.shm.shared_files import FileMark
from moe_serve.errors import ConfigError, LaunchError
from moe_serve.launcher.facts import Fact, first_difference
from moe_serve.launcher.rank_env import RankEnv


class Handover(msgspec.Struct, frozen=True):
    """pid: of the rank that left it;  files, kernels: as in SharedFiles;  facts: what all ranks have in common"""

    launch_id: int
    pid: int
    files: dict[str, FileMark]
    kernels: str
    facts: list[Fact]


def leave_handover(env: RankEnv, handover: Handover) -> None:
    """Writes what ranks that are started anew need of this one. What is read meanwhile is none."""
    own = env.handover_file(env.rank)
    os.ftruncate(own, 0)
    os.pwrite(own, msgspec.json.encode(handover), 0)


def find_handover(env: RankEnv) -> Handover:
    """Returns what a rank of this launch that lives has left. Raises LaunchError where none does."""
    for rank in range(env.num_ranks):
        if rank == env.rank:
            continue
        with contextlib.suppress(OSError, msgspec.DecodeError):
            theirs = env.handover_file(rank)
            found = msgspec.json.decode(os.pread(theirs, os.fstat(theirs).st_size, 0), type=Handover)
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
