"""The processes of a serving system on this machine: the ranks, and other children such as the front end.

Each child has its own process group, dies with its parent, and has its output collected line by line, since its last
lines explain its end. Lost ones are restarted within bounds: how often and how soon is decided here, too.
"""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_serve.child_process import describe_exit
from moe_serve.config import LauncherConfig, ServeConfig
from moe_serve.dispatch.hosts.handshake import key_of_launch, listen
from moe_serve.dispatch.hosts.stand_in import StandIn
from moe_serve.dispatch.shared_files import SharedFiles
from moe_serve.engine.protocol.messages import Members
from moe_serve.launcher.rank_env import LAUNCH_FILES, LINK_FD, NUM_BEFORE, STORE_FD, new_launch_id, own_host
from moe_serve.launcher.rank_start import HostMemory, describe_memory, keep_open, log_of_host, make_memory
from moe_serve.links.folder import not_writable
from moe_serve.links.link import FRONT_ENDS, SOCKETS, TOKEN, Link

_IMPORT_PATH = str(Path(__file__).parents[2])  # where children find this package
WORKER = "moe_serve.launcher.serve"  # the module that is one rank
_SPARE = "moe_serve.launcher.spare"  # the module that becomes one
LAST_LINES = 15  # of a child's output, kept for a report of its end
TERMINATE_S = 2.0  # between SIGTERM and SIGKILL
_FIRST_PAUSE_S = 5.0  # before a restart that follows a failed start; doubled for each further one
_MOST_PAUSE_S = 60.0
_SPARE_AFTER_S = 5.0  # of serving: its imports should delay no start, and a short one needs none
_NEW_S = 1.0  # a new process of a rank has no connections with others before: until then the one before counts as gone
_UNMASKED_S = 3.0  # after which a rank of several hosts is replaced though the others have not masked it
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
    """One process. on_line gets every line it prints, from a thread; waits: it is told what to do by `tell`."""

    def __init__(
        self,
        who: str,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        on_line: OnLine,
        pass_fds: Sequence[int] = (),
        waits: bool = False,
    ):
        self.who = who
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._on_line = on_line
        command = [sys.executable, "-m", "moe_serve.child_process", str(os.getpid()), module, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
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

    def tell(self, line: str) -> bool:
        """Tells a process that waits what to do, in one line; returns False where it has ended."""
        assert self.process.stdin is not None, "it does not wait"
        try:
            with self.process.stdin as stdin:
                stdin.write(line + "\n")
        except OSError:
            return False
        return self.code is None

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
        if self.process.stdin is not None:
            self.process.stdin.close()


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


@dataclass(frozen=True)
class Launch:
    """One start of all ranks of several hosts.

    store_host, store_port: where they meet;  front_ends: HOST:PORT of each, by its number
    """

    launch_id: int
    store_host: str
    store_port: int
    front_ends: tuple[str, ...] = ()


class LocalRanks:
    """The ranks of one system on this machine: all of them, or those of one of several hosts.

    config: effective
    folder: of this launcher. A start after the first writes nothing there: the disk may be full by then
    module: the Python module that runs as one rank
    link:   how the ranks find the front ends; None: by sockets in the folder

    launch_id: of the ranks that were started last;  launch: the same, where there are several hosts
    """

    def __init__(
        self, config: ServeConfig, on_line: OnLine, folder: Path, module: str = WORKER, link: Link | None = None
    ):
        self.config = config
        self._on_line = on_line
        self._module = module
        self.folder = folder
        self.link = Link(folder=folder) if link is None else link
        self._num_local = config.parallel.num_ranks // config.launcher.nnodes
        self._first = config.launcher.node_rank * self._num_local  # rank of this host
        self._meeting: dict[str, str] = {}  # variables that say where the ranks of several hosts meet
        self._reported: set[int] = set()
        self._num_before: list[int] = []  # by rank: processes that ended in this launch
        self._replaced_s: list[float] = []  # when each rank was replaced last
        self._files: list[int] = []  # of this launch, in memory: see LAUNCH_FILES
        self._kept: SharedFiles | None = None  # shared memory of the ranks of this host
        self._listeners: dict[int, socket.socket] = {}  # of each rank of one of several hosts
        self._stand_in: StandIn | None = None  # votes where they cannot
        self._spare: Child | None = None  # becomes the next rank that is replaced
        self._served_s: float | None = None  # since when without a spare process
        self.launch_id = 0
        self.launch: Launch | None = None
        self.children: list[Child] = []

    @property
    def config_file(self) -> Path:
        """The file with the effective configuration, which the processes read; it exists from start() on."""
        return self.folder / "effective.yaml"

    def start(self) -> None:
        """Starts one process for each rank; again, after `end`, as a new launch.

        Raises FolderError where the folder cannot be written to at the first start.
        """
        self._begin(new_launch_id(), None)

    def start_in(self, launch: Launch, store_fd: int | None = None) -> None:
        """Starts the ranks of this host in a launch of several; as `start`.

        store_fd: a listening socket, where rank 0 opens the store of the launch
        """
        self._take_part_in(launch)
        self._begin(launch.launch_id, store_fd)

    def join(self, launch: Launch, memory: HostMemory, num_before: Mapping[int, int]) -> None:
        """Starts the ranks of this host beside those of other hosts, which go on with a launch.

        num_before: by rank, processes that were this rank before
        """
        self._take_part_in(launch)
        own = range(self._first, self._first + self._num_local)
        self._begin(launch.launch_id, None, memory, [num_before.get(rank, 0) for rank in own])

    def _take_part_in(self, launch: Launch) -> None:
        self._meeting = {"MASTER_ADDR": launch.store_host, "MASTER_PORT": str(launch.store_port)}
        self.link = replace(self.link, front_ends=launch.front_ends)
        self.launch = launch

    def memory_of_hosts(self) -> HostMemory | None:
        """Returns what another host needs to join the launch; None: its ranks cannot."""
        return None if self._kept is None else describe_memory(self._files, self.launch_id, self._kept)

    def _begin(
        self,
        launch_id: int,
        store_fd: int | None,
        memory: HostMemory | None = None,
        num_before: Sequence[int] | None = None,
    ) -> None:
        if not self.launch_id:
            self._write_config()
        self.launch_id = launch_id
        self._files = [os.memfd_create("moe_serve_launch") for _ in range(2 + self._num_local)]
        if self._meeting:
            master = self._meeting["MASTER_ADDR"]
            own = own_host(master) or master
            known = {} if memory is None else memory.addresses
            ranks = range(self._first, self._first + self._num_local)
            # Those that are started anew later, too, look for these ranks where they were.
            self._listeners = {rank: listen(own, known.get(rank, ("", 0))[1]) for rank in ranks}
        if memory is not None:
            self._kept = make_memory(self._files, memory)
        self._reported, self._num_before = set(), list(num_before or [0] * self._num_local)
        self.children, self._replaced_s = [], [-math.inf] * self._num_local
        for number in range(self._num_local):
            self.children.append(self._start(number, store_fd if self._first + number == 0 else None))

    def finish(self, rank: int) -> None:
        """Ends what is left of a rank whose process has ended; takes a second where its output does not end."""
        self.children[rank - self._first].finish()

    def may_replace(self, death: Death) -> bool:
        """Returns whether a rank of one of several hosts is started anew before node rank 0, maybe cut off, says so.

        That is one that was killed, where others go on: the new process waits until they do.
        """
        return death.was_killed and self._kept is not None and self.config.engine.on_lost_rank == "mask"

    def end_rank(self, rank: int, num_before: int) -> None:
        """Ends a process of a rank of this host, unless it was replaced. num_before: of that process"""
        if self._num_before[rank - self._first] == num_before:
            self.finish(rank)

    def replace_ended(self, rank: int, num_before: int) -> None:
        """Replaces a process of a rank of this host, unless that was done. num_before: of that process"""
        if self._num_before[rank - self._first] == num_before:
            self.finish(rank)
            self.replace(rank)

    def replace(self, rank: int) -> None:
        """Starts a new process for one rank, after `finish`, beside the others of its launch."""
        number = rank - self._first
        self._reported.discard(number)
        self._num_before[number] += 1
        self._replaced_s[number] = time.monotonic()
        spare, self._spare, self._served_s = self._spare, None, None
        if spare is not None:
            spare.who = f"rank {rank}"
            if spare.tell(json.dumps(self._environment_of(number))):
                self.children[number] = spare
                return
            spare.finish()
        self.children[number] = self._start(number)

    def keep_spare(self) -> None:
        """Keeps a process ready to replace the next rank. Called all the time, once the ranks serve."""
        launcher = self.config.launcher
        if self._spare is not None or not launcher.keep_spare or not launcher.max_restarts or not self.children:
            return
        if self.config.engine.on_lost_rank == "end" or self._num_local == self.config.parallel.num_ranks == 1:
            return
        now_s = time.monotonic()
        self._served_s = now_s if self._served_s is None else self._served_s
        if now_s - self._served_s < _SPARE_AFTER_S:
            return
        environ = child_environment(self.link) | self._meeting | self._common_environment()
        passed = [*self._files, *(listener.fileno() for listener in self._listeners.values())]
        arguments = [self._module, *self._arguments]
        self._spare = Child("spare process", _SPARE, arguments, environ, self._on_line, passed, waits=True)

    def _start(self, number: int, store_fd: int | None = None) -> Child:
        rank = self._first + number
        environ = child_environment(self.link) | self._meeting | self._common_environment()
        environ |= self._environment_of(number)
        passed = list(self._files)
        if rank in self._listeners:
            passed.append(self._listeners[rank].fileno())
        if store_fd is not None:
            environ[STORE_FD] = str(store_fd)
            passed.append(store_fd)
        return Child(f"rank {rank}", self._module, self._arguments, environ, self._on_line, pass_fds=passed)

    @property
    def _arguments(self) -> list[str]:
        return ["--config", str(self.config_file)]

    def _common_environment(self) -> dict[str, str]:
        """Returns what all ranks of this host are told."""
        return {
            "WORLD_SIZE": str(self.config.parallel.num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_local),
            LAUNCH_FILES: ",".join(map(str, self._files)),
            "MOE_SERVE_LAUNCH_ID": str(self.launch_id),
            "MOE_SERVE_RESTARTS_LEFT": str(self.config.launcher.max_restarts),
        }

    def _environment_of(self, number: int) -> dict[str, str]:
        """Returns what one rank is told beside that."""
        rank = self._first + number
        environ = {"RANK": str(rank), "LOCAL_RANK": str(number)}
        if rank in self._listeners:
            environ[LINK_FD] = str(self._listeners[rank].fileno())
        if self.config.launcher.max_restarts:
            environ[NUM_BEFORE] = str(self._num_before[number])
        return environ

    def keep_host(self) -> None:
        """Does what keeps this one of several hosts in the launch where none of its ranks is left. Called all the time.

        It keeps their shared memory, for ranks that are started anew, and votes where they cannot.
        """
        if not self._meeting or not self._files:
            return
        if self._kept is None:
            self._kept = keep_open(self._files, self.launch_id)
        if self._kept is None:
            return
        if self._stand_in is None:
            key = key_of_launch(self.link.token, self.launch_id)
            self._stand_in = StandIn(key, self._listeners, log_of_host(self._files, self.launch_id, self._kept))
        since_s = time.monotonic() - _NEW_S
        gone = [
            child.code is not None or at_s > since_s
            for child, at_s in zip(self.children, self._replaced_s, strict=True)
        ]
        self._stand_in.note_ended(rank for rank, is_gone in enumerate(gone, self._first) if is_gone)

    def _write_config(self) -> None:
        try:
            self.config_file.write_text(self.config.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise not_writable(self.folder, error.errno) from None

    def deaths(self) -> list[Death]:
        """Returns the ranks that ended since the last call. Those that were killed come first, as the likely cause."""
        found = []
        for number, child in enumerate(self.children):
            code = child.code
            if code is not None and number not in self._reported:
                self._reported.add(number)
                found.append(self._death(number, code))
        return sorted(found, key=lambda death: not death.was_killed)

    def ended(self) -> list[Death]:
        """Returns the ranks whose processes have ended and were not replaced."""
        return [
            self._death(number, code) for number, child in enumerate(self.children) if (code := child.code) is not None
        ]

    def _death(self, number: int, code: int) -> Death:
        child, rank = self.children[number], self._first + number
        return Death(rank, child.process.pid, code, tuple(child.last_lines), self._num_before[number])

    def end(self, grace_s: float) -> None:
        """Ends all ranks; those that are ending get grace_s to do so."""
        end_children(self.children, grace_s)
        if self._spare is not None:
            self._spare.finish()
        self._spare = self._served_s = None
        if self._stand_in is not None:
            self._stand_in.close()
            self._stand_in = None
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        while self._listeners:
            self._listeners.popitem()[1].close()
        while self._files:
            os.close(self._files.pop())


def child_environment(link: Link) -> dict[str, str]:
    """Returns the environment for a child: that of this process, without the variables of a launcher.

    link: of the system; who may enter its folder needs no token
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCH_VARIABLES)}
    paths = [_IMPORT_PATH, *filter(None, [os.environ.get("PYTHONPATH")])]
    for name in (TOKEN, SOCKETS, FRONT_ENDS):
        environ.pop(name, None)
    over_tcp = {TOKEN: link.token, FRONT_ENDS: ",".join(link.front_ends)}
    environ |= over_tcp if link.folder is None else {SOCKETS: str(link.folder)}
    # torch's own lines, about names of hosts that it does not find, help nobody: its errors are reported by us.
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}


def pause_s(num_failed: int) -> float:
    """Returns how long to wait before the next start, after so many in a row that failed.

    A process that had served is restarted at once. A start that fails for want of memory, say, may succeed a little
    later: the restarts that are left should not be used up within seconds.
    """
    return min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (num_failed - 1)) if num_failed else 0.0


def in_a_while(seconds: float) -> str:
    """Returns when that is, to be put behind "again"."""
    return f" in {seconds:g} s" if seconds else ""


def left_out(who: str, code: int) -> str:
    """Returns the end of a line that says why a process is not restarted. code: with which it exited"""
    why = "a setting must be corrected first" if code == 2 else "it was lost too often"
    return f"{who} is not started again: {why}; the others serve on"


class Restarts:
    """Counts losses, of one rank or of all: after `max_restarts` restarts within the window, the next loss is the end.

    what:  processes, for the report
    clock: seconds, in which the window is measured
    """

    def __init__(
        self, config: LauncherConfig, what: str = "the ranks were", clock: Callable[[], float] = time.monotonic
    ):
        self._what = what
        self._config = config
        self._clock = clock
        self._losses: deque[tuple[float, str, str]] = deque(maxlen=config.max_restarts + 1)  # (seconds, at, reason)
        self._num_failed = 0  # starts in a row

    @property
    def pause_s(self) -> float:
        """How long to wait before the restart that follows the last loss."""
        return pause_s(self._num_failed)

    def note_loss(self, reason: str, had_served: bool = True) -> bool:
        """Notes that a rank, or all, were lost; returns whether they are to be restarted.

        had_served: False: their start failed
        """
        self._num_failed = 0 if had_served else self._num_failed + 1
        now_s = self._clock()
        self._losses.append((now_s, time.strftime("%H:%M:%S"), reason))
        return self.num_recent <= self._config.max_restarts

    @property
    def is_one_left(self) -> bool:
        """Whether another loss within the window is followed by a restart."""
        return self.num_recent < self._config.max_restarts

    @property
    def num_recent(self) -> int:
        """The losses within the window."""
        since_s = self._clock() - self._config.restart_window_s
        return sum(at_s >= since_s for at_s, _, _ in self._losses)

    def describe(self) -> str:
        """Returns which restart this is."""
        return f"restart {self.num_recent} of {self._config.max_restarts} within {self._config.restart_window_s:g} s"

    def report(self) -> list[str]:
        """Returns the lines that say what was lost when, and what to do."""
        if not self._config.max_restarts:
            return [f"launcher.max_restarts is 0: {self._what.removesuffix(' were')} are not started again"]
        lines = [f"{self._what} lost {self.num_recent} times within {self._config.restart_window_s:g} s:"]
        lines += [f"  {at}  {reason}" for _, at, reason in self._losses]
        lines.append("correct the cause and start again, or raise launcher.max_restarts")
        return lines


@dataclass
class _Failed:
    """Starts of a rank that failed, in a row. reason: of the last one"""

    number: int
    reason: str


class Replacements:
    """The lost ranks of one launch, and the processes that replace them.

    A rank is replaced once its process has ended and the others have reported that they go on without it, or wait for
    it. It is back when they report that it takes part, for which it has `server.attach_deadline_s`. Its new process may
    end before that, or be late. Where the others serve on, another start follows after a pause, which grows; where they
    wait, all ranks are restarted.

    restarts:    counts the replacements, beside the restarts of all ranks
    others_wait: whether the other ranks compute nothing until the lost one is back
    """

    def __init__(self, config: ServeConfig, restarts: Restarts):
        self._restarts = restarts
        self._num_ranks = config.parallel.num_ranks
        self._unmasked_s = math.inf if config.launcher.nnodes == 1 else _UNMASKED_S
        self._deadline_s = config.server.attach_deadline_s
        self._group_epoch = 0
        self._masked: set[int] = set()
        self._ended: dict[int, tuple[Death, float]] = {}  # not yet replaced; not before that time
        self._started_s: dict[int, float] = {}
        self._failed: dict[int, _Failed] = {}
        self._said_late: set[int] = set()
        self.others_wait = False

    def regrouped(self, message: Members) -> bool:
        """Notes which ranks take part; returns False for old news: several front ends may pass it on."""
        if message.group_epoch <= self._group_epoch:
            return False
        self._group_epoch, self.others_wait = message.group_epoch, message.waits
        self._masked = set(range(self._num_ranks)) - set(message.members)
        for rank in {*self._started_s, *self._failed} - self._masked:
            self._started_s.pop(rank, None)
            self._failed.pop(rank, None)
        return True

    def ended(self, death: Death, now_s: float) -> str | None:
        """Notes that a rank's process has ended; returns a line about it where it was a replacement."""
        if self._started_s.pop(death.rank, None) is None:
            self._ended[death.rank] = death, now_s
            return None
        failed = self._failed.setdefault(death.rank, _Failed(0, ""))
        failed.number, failed.reason = failed.number + 1, f"{death} before it took part again"
        wait_s = 0.0 if death.code == 2 else pause_s(failed.number)
        self._ended[death.rank] = death, now_s + wait_s
        return f"{failed.reason}; the next start is due{in_a_while(wait_s) or ' now'}"

    def due(self, now_s: float) -> list[Death]:
        """Returns the ends of the ranks to be replaced now, each once.

        On several hosts also one that the others have not masked for a while: it waits for that itself.
        """
        waits_s = {rank: 0.0 if rank in self._masked else self._unmasked_s for rank in self._ended}
        ranks = [rank for rank in sorted(self._ended) if self._ended[rank][1] + waits_s[rank] <= now_s]
        return [self._ended.pop(rank)[0] for rank in ranks]

    def may_replace(self, death: Death) -> bool:
        """Returns whether a rank that is due is replaced, which counts as a restart: not for a wrong setting."""
        if death.code == 2 or not self._restarts.is_one_left:
            return False
        self._restarts.note_loss(str(death))
        return True

    def started(self, rank: int, now_s: float) -> None:
        """Notes that a replacement has been started."""
        self._ended.pop(rank, None)
        self._said_late.discard(rank)
        self._started_s[rank] = now_s

    def late(self, now_s: float) -> dict[int, str]:
        """Returns the ranks whose replacements are late, each once, and a line about each."""
        late = {rank: line for rank, line in self._late(now_s).items() if rank not in self._said_late}
        self._said_late.update(late)
        return late

    def _late(self, now_s: float) -> dict[int, str]:
        said = f"was restarted alone and did not take part within server.attach_deadline_s = {self._deadline_s:g} s"
        late = [rank for rank, started_s in self._started_s.items() if now_s - started_s > self._deadline_s]
        return {rank: f"rank {rank} {said}" for rank in late}

    def failed(self, now_s: float) -> str | None:
        """Returns why all ranks must be restarted: the others wait for one whose replacement failed. Else None."""
        if not self.others_wait:
            return None
        reasons = [each.reason for each in self._failed.values()] + list(self._late(now_s).values())
        return reasons[0] if reasons else None
