"""What every test run needs: one thread per process, folders on two workers, and nothing left behind.

Stays light: tests of policies, schedulers and the server must not pay for importing torch. Ranks are in ranks.py.
"""

import ctypes
import gc
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported: ranks are forked, and threads do not survive a fork
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)

# Hundreds of processes that tests start would each compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Front ends and ranks that tests start have one, and make no file for it in the home folder.
os.environ["MOE_SERVE_TOKEN"] = "the token of all tests"

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # Where other processes have the cores, an example may take seconds that say nothing of it.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

# Files that share a whole system: one worker runs all of a folder, one after the other.
TOGETHER = ("tests/launcher/demo",)
PR_SET_CHILD_SUBREAPER = 36
LEAVE_S = 30.0  # a hang guard: processes that are on their way out may take this long


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command that runs inside a test sends log lines to that test's stderr, which is closed after it."""
    logger = logging.getLogger("moe_serve")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture(autouse=True)
def _draws_of_its_own() -> None:
    """What a test draws does not depend on the tests before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Runs folders on two workers, a file at a time; single files, and what is to be looked at, in this process."""
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput") or option.dist != "no":
        return
    if option.numprocesses is None:
        looked_at = option.keyword or option.usepdb or option.trace or option.capture == "no" or option.collectonly
        folders = any(Path(argument).is_dir() for argument in config.args)
        option.numprocesses = min(2, len(os.sched_getaffinity(0))) if folders and not looked_at else 0
    if option.numprocesses:
        option.dist = "loadfile"  # a module's fixtures are made once


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = nodeid.partition("::")[0].rpartition("/")[0]
            return folder if folder in TOGETHER else str(super()._split_scope(nodeid))

    return Scheduling(config, log)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps the collector of cycles from looking again and again through modules and tests, which all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    gc.collect()  # else what is garbage by now would stay, too
    gc.freeze()
    if was_enabled:
        gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    # Orphans of our children become our children, so that a forgotten worker is found below whoever started it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    session.config.stash[_SHM_BEFORE] = _shared_memory()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # Not later: tests of other files look at the processes below this one.
    if nextitem is None or nextitem.path != item.path:
        _close_browser()


def _close_browser() -> None:
    if "tests.browser" in sys.modules:
        sys.modules["tests.browser"].BROWSER.close()


@pytest.hookimpl(trylast=True)  # workers have ended by then, and their orphans are this process's
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    gc.unfreeze()  # else extension modules complain on exit about what is still there
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].close_pools()
    _close_browser()
    answer = getattr(session.config, "workeroutput", None)  # of a worker, to the process that started it
    before = session.config.stash[_SHM_BEFORE] if answer is None else None
    deadline = time.monotonic() + LEAVE_S
    while (left := _leftovers(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if answer is not None:
        answer[_LEFT] = left
    elif left := [*dict.fromkeys([*_left_by_workers, *left])]:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("")
            for line in left:
                reporter.write_line(f"LEFT BEHIND: {line}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    _left_by_workers.extend(getattr(node, "workeroutput", {}).get(_LEFT, []))


_LEFT = "left behind"
_left_by_workers: list[str] = []
_SHM_BEFORE = pytest.StashKey[frozenset[str]]()


def _leftovers(shm_before: frozenset[str] | None) -> list[str]:
    """Returns one line for each process, listening port and shared-memory segment that this run leaves.

    shm_before: None in a worker: another may be between making a segment and mapping it
    """
    tree = _descendants(os.getpid())
    lines = [f"process {pid}: {_command(pid)}" for pid in tree if "resource_tracker" not in _command(pid)]
    lines += [f"listening port {port} in the test process" for port in _listening_ports(os.getpid())]
    if shm_before is None:
        return lines
    # Other test runs on this machine may be using segments at this moment: a segment is ours if nobody else holds it.
    mine = {os.getpid(), *tree}
    for name in sorted(_shared_memory() - shm_before):
        if not _held_by_others(f"/dev/shm/{name}", mine):
            lines.append(f"shared-memory segment /dev/shm/{name}")
    return lines


def _shared_memory() -> frozenset[str]:
    try:
        return frozenset(os.listdir("/dev/shm"))
    except OSError:
        return frozenset()


def _held_by_others(path: str, mine: set[int]) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if int(maps.parent.name) in mine:
            continue
        try:
            if path in maps.read_text():
                return True
        except OSError:
            continue
    return False


def _descendants(root: int) -> list[int]:
    """Returns the living processes below root; what has ended and only waits to be reaped does not count."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "?"


def _listening_ports(pid: int) -> list[int]:
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)
