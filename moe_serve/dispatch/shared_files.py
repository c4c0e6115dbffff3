"""The shared memory that the ranks of one host have mapped: files without names, open to a rank that joins later.

Nothing with a name would be left behind when all ranks are killed. So a rank keeps a descriptor of each file, and a
rank that is started anew in the place of a dead one opens them through /proc: the kernel lets only processes of the
same user do that. Device and inode tell whether it is the right file, should the process be another one by now.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from moe_serve.errors import PeerError

WEIGHTS = "weights of node "  # begins the name of a copy of the weights, which is mapped read-only


def weights_of(node: int) -> str:
    """Returns the name of the copy of the weights for ranks of a NUMA node. node: as process_facts.own_node"""
    return f"{WEIGHTS}{node}"


class FileMark(NamedTuple):
    """A file that a process has open. descriptor: its number there;  device, inode: of the file"""

    descriptor: int
    device: int
    inode: int


class SharedFiles:
    """The files of one rank by name.

    pid:     of the rank whose files this one opens; None: it has made them with the others
    kernels: what decides whether ranks compute alike, as text (engine/model/agreement.py)
    """

    def __init__(self, pid: int | None = None, marks: Mapping[str, FileMark] | None = None, kernels: str = ""):
        self._pid = pid
        self._theirs = dict(marks or {})
        self._kept: dict[str, int] = {}
        self.kernels = kernels

    @property
    def is_replacement(self) -> bool:
        """Whether this rank joins others that serve."""
        return self._pid is not None

    def has(self, name: str) -> bool:
        """Whether the living rank has a file of this name."""
        return name in self._theirs

    def keep(self, name: str, descriptor: int) -> None:
        """Keeps another descriptor of this file open, for ranks that come later."""
        self._kept[name] = os.dup(descriptor)

    def open(self, name: str, flags: int) -> int:
        """Returns a descriptor of a file of the living rank, and keeps the file too. flags: os.O_RDWR and so on

        Raises PeerError where that rank has ended meanwhile.
        """
        mark = self._theirs[name]
        try:
            descriptor = os.open(f"/proc/{self._pid}/fd/{mark.descriptor}", flags | os.O_CLOEXEC)
        except OSError as error:
            raise self._gone(name, error.strerror) from None
        if _identity(descriptor) != (mark.device, mark.inode):
            os.close(descriptor)
            raise self._gone(name, "it is another file now")
        self.keep(name, descriptor)
        return descriptor

    def open_again(self, name: str, flags: int) -> int:
        """Returns another descriptor of a file that is kept. flags: as for `open`"""
        return os.open(f"/proc/self/fd/{self._kept[name]}", flags | os.O_CLOEXEC)

    def marks(self) -> dict[str, FileMark]:
        """Returns what a rank that comes later needs to open these files."""
        return {name: FileMark(descriptor, *_identity(descriptor)) for name, descriptor in self._kept.items()}

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each file."""
        return {name: os.fstat(descriptor).st_size for name, descriptor in self._kept.items()}

    def close(self) -> None:
        """Keeps no file any longer."""
        while self._kept:
            os.close(self._kept.popitem()[1])

    def _gone(self, name: str, why: str | None) -> PeerError:
        text = f"the shared memory {name!r} of process {self._pid} cannot be opened ({why}); start all ranks again"
        return PeerError(text, -1, "start", 0)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
