"""A folder that only its owner can enter, for the sockets of one system and all else that its processes share.

Its launcher holds a lock on it. The folder of a launcher that was killed is removed by the next launcher, which takes
the lock first, so that no folder in use is removed.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from moe_serve.errors import FolderError, LaunchError

_PREFIX = "moe_serve-"
_LOCK = "lock"
_MAX_PATH = 92  # the path of a Unix socket has at most 107 bytes, its own name up to 14


class OwnFolder:
    """A new folder with mode 0700, until `remove` or the end of a `with` block, which gets its path.

    Raises LaunchError where its path is too long for sockets, FolderError where it cannot be made.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        remove_left_behind(parent)
        try:
            while not self._make_in(parent):
                pass
        except OSError as error:
            raise not_writable(parent, error.errno) from None

    def _make_in(self, parent: Path) -> bool:
        """Makes a folder; returns False where another launcher has removed it before it was locked."""
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        if len(os.fsencode(self.path)) > _MAX_PATH:
            shutil.rmtree(self.path, ignore_errors=True)
            raise LaunchError(f"$TMPDIR is {parent}, which is too long for the names of sockets; set TMPDIR=/tmp")
        self._lock = (self.path / _LOCK).open("w", encoding="ascii")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return os.fstat(self._lock.fileno()).st_nlink > 0

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Removes the folder with all that is in it. Safe to call again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def check_folder(path: Path) -> None:
    """Raises LaunchError unless a folder belongs to this user, and nobody else may enter it."""
    try:
        facts = path.lstat()
    except OSError as error:
        raise LaunchError(f"the folder of sockets {path} cannot be used ({error.strerror}); start anew") from None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise LaunchError(f"the folder of sockets {path} is open to other users; remove it, and start anew")


def not_writable(folder: Path, code: int | None) -> FolderError:
    """Returns the error for a folder of sockets that cannot be written to. code: an errno"""
    return FolderError(
        f"the folder {folder} cannot be written to ({os.strerror(code or 0)}); make room there, or start again with "
        "TMPDIR set to another folder"
    )


def remove_left_behind(parent: Path) -> None:
    """Removes this user's folders whose launchers are gone."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is somebody else's, its launcher lives, or it is just being removed
            facts = path.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                continue
            with (path / _LOCK).open("r", encoding="ascii") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
