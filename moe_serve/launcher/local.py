"""The processes of a serving system on this machine: the ranks, and other children such as the front end.

Each child has its own process group, dies with its parent, and has its output collected line by line, since its last
lines explain its end.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_serve.child_process import describe_exit
from moe_serve.config import ServeConfig
from moe_serve.launcher.rank_env import LAUNCH_FILES, NUM_BEFORE
from moe_serve.links.folder import not_writable
from moe_serve.links.link import SOCKETS, TOKEN

_IMPORT_PATH = str(Path(__file__).parents[2])  # where children find this package
WORKER = "moe_serve.launcher.serve"  # the module that is one rank
LAST_LINES = 15  # of a child's output, kept for a report of its end
TERMINATE_S = 2.0  # between SIGTERM and SIGKILL
# Set by a launcher that started this process.
_LAUNCH_VARIABLES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_")

OnLine = Callable[[str, str], None]  # (who, line)


@dataclass(frozen=True)
class Death:
    """A rank that ended. was_killed: by a signal, so it could not report why

    num_before: processes that were this rank before it, in the same launch
    """

    rank: int
    pid: int
    code: int
    last_lines: tuple[str, ...]
    num_before: int = 0

    @property
    def was_killed(self) -> bool:
        return self.code < 0

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid}) {describe_exit(self.code)}"


class Child:
    """One process. on_line gets every line it prints, from a thread."""

    def __init__(
        self,
        who: str,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        on_line: OnLine,
        pass_fds: Sequence[int] = (),
    ):
        self.who = who
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._on_line = on_line
        command = [sys.executable, "-m", "moe_serve.child_process", str(os.getpid()), module, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            pass_fds=tuple(pass_fds),
            process_group=0,  # so that Ctrl-C reaches only the parent, which ends its children in order
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name=f"output of {who}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last_lines.append(line.rstrip("\n"))
            self._on_line(self.who, line.rstrip("\n"))

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child and all it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def wait(self, deadline_s: float) -> bool:
        """Returns whether the child has ended, waiting for it until a time of time.monotonic()."""
        try:
            self.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def finish(self) -> None:
        """Kills what is left of the child and its own children, and closes its output."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join(1.0)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()


def end_children(children: Sequence[Child], grace_s: float) -> None:
    """Ends processes: waits for those that are ending, then SIGTERM, then SIGKILL. None is left when it returns."""
    steps: list[tuple[float, signal.Signals | None]] = [(grace_s, signal.SIGTERM), (TERMINATE_S, None)]
    for wait_s, next_signal in steps:
        deadline_s = time.monotonic() + wait_s
        left = [child for child in children if not child.wait(deadline_s)]
        for child in left:
            if next_signal is not None:
                child.signal(next_signal)
    for child in children:
        child.finish()


class LocalRanks:
    """All ranks of one system, on this machine.

    config: effective
    folder: that of the system's sockets. A start after the first writes nothing there: the disk may be full by then
    module: the Python module that runs as one rank

    launch_id: of the ranks that were started last
    """

    def __init__(self, config: ServeConfig, on_line: OnLine, folder: Path, module: str = WORKER):
        self.config = config
        self._on_line = on_line
        self._module = module
        self.folder = folder
        self._reported: set[int] = set()
        self._num_before: list[int] = []  # by rank: processes that ended in this launch
        self._files: list[int] = []  # of this launch, in memory: see LAUNCH_FILES
        self.launch_id = 0
        self.children: list[Child] = []

    @property
    def config_file(self) -> Path:
        """The file with the effective configuration, which the processes read; it exists from start() on."""
        return self.folder / "effective.yaml"

    def start(self) -> None:
        """Starts one process for each rank; again, after `end`, as a new launch.

        Raises FolderError where the folder cannot be written to at the first start.
        """
        if not self.launch_id:
            self._write_config()
        self.launch_id = new_launch_id()
        num_ranks = self.config.parallel.num_ranks
        self._files = [os.memfd_create("moe_serve_launch") for _ in range(1 + num_ranks)]
        self._reported, self._num_before = set(), [0] * num_ranks
        self.children = []
        for rank in range(num_ranks):
            self.children.append(self._start(rank))

    def finish(self, rank: int) -> None:
        """Ends what is left of a rank whose process has ended; takes a second where its output does not end."""
        self.children[rank].finish()

    def replace(self, rank: int) -> None:
        """Starts a new process for one rank, after `finish`, beside the others of its launch."""
        self._reported.discard(rank)
        self._num_before[rank] += 1
        self.children[rank] = self._start(rank)

    def _start(self, rank: int) -> Child:
        num_ranks, max_restarts = self.config.parallel.num_ranks, self.config.launcher.max_restarts
        environ = child_environment(self.folder) | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            LAUNCH_FILES: ",".join(map(str, self._files)),
            "MOE_SERVE_LAUNCH_ID": str(self.launch_id),
            "MOE_SERVE_RESTARTS_LEFT": str(max_restarts),
        }
        if max_restarts:
            environ[NUM_BEFORE] = str(self._num_before[rank])
        arguments = ["--config", str(self.config_file)]
        return Child(f"rank {rank}", self._module, arguments, environ, self._on_line, pass_fds=self._files)

    def _write_config(self) -> None:
        try:
            self.config_file.write_text(self.config.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise not_writable(self.folder, error.errno) from None

    def deaths(self) -> list[Death]:
        """Returns the ranks that ended since the last call. Those that were killed come first, as the likely cause."""
        found = []
        for rank, child in enumerate(self.children):
            code = child.code
            if code is not None and rank not in self._reported:
                self._reported.add(rank)
                found.append(Death(rank, child.process.pid, code, tuple(child.last_lines), self._num_before[rank]))
        return sorted(found, key=lambda death: not death.was_killed)

    def end(self, grace_s: float) -> None:
        """Ends all ranks; those that are ending get grace_s to do so."""
        end_children(self.children, grace_s)
        while self._files:
            os.close(self._files.pop())


def child_environment(folder: Path) -> dict[str, str]:
    """Returns the environment for a child: that of this process, without the variables of a launcher."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCH_VARIABLES)}
    paths = [_IMPORT_PATH, *filter(None, [os.environ.get("PYTHONPATH")])]
    environ.pop(TOKEN, None)  # who may enter the folder needs none
    return environ | {SOCKETS: str(folder), "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}


def new_launch_id() -> int:
    """Returns a random number that names one launch, from 1 to 2^62."""
    return 1 + secrets.randbits(62)
