"""A folder that only its owner enters: for the sockets of one system, and whatever else its processes share.

Its launcher holds a lock on it. A launcher that is killed leaves its folder behind; the next one removes it.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from types import TracebackType

from moe_serve.errors import LaunchError

_PREFIX = "moe_serve-"
_LOCK = "lock"
_MAX_PATH = 92  # the path of a Unix socket has at most 107 bytes, its own name up to 14
_SETTLED_S = 60.0  # a younger folder may not be locked yet


class OwnFolder:
    """A new folder with mode 0700, until `remove` or the end of a `with` block, which gets its path.

    Raises LaunchError where its path is too long for sockets.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        remove_left_behind(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        if len(os.fsencode(self.path)) > _MAX_PATH:
            shutil.rmtree(self.path, ignore_errors=True)
            raise LaunchError(f"$TMPDIR is {parent}, which is too long for the names of sockets; set TMPDIR=/tmp")
        self._lock = (self.path / _LOCK).open("w", encoding="ascii")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

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


def remove_left_behind(parent: Path) -> None:
    """Removes this user's folders whose launchers are gone."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it belongs to somebody else, or is just being removed
            facts = path.lstat()
            is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
            if is_ours and time.time() - facts.st_ctime > _SETTLED_S and _is_unlocked(path / _LOCK):
                shutil.rmtree(path, ignore_errors=True)


def _is_unlocked(path: Path) -> bool:
    """Returns whether a lock file exists that no process holds."""
    with path.open("r", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
