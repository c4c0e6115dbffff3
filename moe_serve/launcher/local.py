"""The ranks of a serving system on this machine, as their launcher starts, replaces and ends them.

Lost ones are restarted within bounds: how often and how soon is decided here, too.
"""

import math
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_serve.child_process import describe_exit
from moe_serve.config import LauncherConfig, ServeConfig
from moe_serve.dispatch.hosts.handshake import key_of_launch, listen
from moe_serve.dispatch.hosts.stand_in import StandIn
from moe_serve.dispatch.shared_files import SharedFiles
from moe_serve.engine.protocol.messages import Members
from moe_serve.launcher.children import Forked, ForkServer, OnLine, end_children
from moe_serve.launcher.rank_env import (
    LAUNCH_FILES,
    LINK_FD,
    NUM_BEFORE,
    PAGE_FILES,
    PAGES_AT,
    PAGES_FD,
    STORE_FD,
    WEIGHT_FILES,
    new_launch_id,
    own_host,
)
from moe_serve.launcher.rank_start import (
    HostMemory,
    describe_memory,
    keep_open,
    log_of_host,
    make_memory,
    memory_for_pages,
)
from moe_serve.links.folder import not_writable
from moe_serve.links.link import FOR_PREFILL, FRONT_ENDS, SOCKETS, TOKEN, Link

_IMPORT_PATH = str(Path(__file__).parents[2])  # where children find this package
WORKER = "moe_serve.launcher.serve"  # the module that is one rank
_FIRST_PAUSE_S = 5.0  # before a restart that follows a failed start; doubled for each further one
_MOST_PAUSE_S = 60.0
_NEW_S = 1.0  # a new process of a rank has no connections with others before: until then the one before counts as gone
_UNMASKED_S = 3.0  # after which a rank of several hosts is replaced though the others have not masked it
# Set by a launcher that started this process.
_LAUNCH_VARIABLES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_")


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


@dataclass(frozen=True)
class Launch:
    """One start of all ranks of several hosts.

    store_host, store_port: where they meet; port 0: all are on one host, and meet there
    front_ends: HOST:PORT of each, by its number
    pages_at: where prefill ranks send pages, HOST:PORT of each decode host; (): there are no such ranks
    """

    launch_id: int
    store_host: str
    store_port: int
    front_ends: tuple[str, ...] = ()
    pages_at: tuple[str, ...] = ()


class LocalRanks:
    """The ranks of one system on this machine: all of them, or those of one of several hosts.

    config: effective
    folder: of this launcher. A start after the first writes nothing there: the disk may be full by then
    link:   how the ranks find the front ends; None: by sockets in the folder
    page_files: descriptors of memory for pages on their way, as RankEnv has them; its maker closes them
    pages:  of other ranks of this host, which share cache.host_gb with these; None: there are none
    weight_files: of memory for one copy of the weights of both roles, as in RankEnv
    pages_at: as Launch has them, where there is none

    launch_id: of the ranks that were started last;  launch: the same, where there are several hosts
    are_reached: whether they can be started now
    """

    are_reached = True

    def __init__(
        self,
        config: ServeConfig,
        on_line: OnLine,
        folder: Path,
        link: Link | None = None,
        page_files: Sequence[int] = (),
        pages: int | None = None,
        weight_files: Sequence[int] = (),
        pages_at: Sequence[str] = (),
    ):
        self.config = config
        self._page_files, self._weight_files = tuple(page_files), tuple(weight_files)
        self._pages_at = tuple(pages_at)
        self._on_line = on_line
        self.folder = folder
        self.link = Link(folder=folder) if link is None else link
        self._num_local = config.ranks_per_host
        self._first = (config.launcher.node_rank - config.nodes.start) * self._num_local  # rank of this host
        self._meeting: dict[str, str] = {}  # variables that say where the ranks of several hosts meet
        self._reported: set[int] = set()
        self._num_before: list[int] = []  # by rank: processes that ended in this launch
        self._replaced_s: list[float] = []  # when each rank was replaced last
        self._files: list[int] = []  # of this launch, in memory: see LAUNCH_FILES
        self._kept: SharedFiles | None = None  # shared memory of the ranks of this host
        self._listeners: dict[int, socket.socket] = {}  # of each rank of one of several hosts
        self._stand_in: StandIn | None = None  # votes where they cannot
        self._server: ForkServer | None = None  # of this launch, as self._files
        self.pages = pages  # a descriptor of memory, which outlives the ranks
        if config.cache.host_gb is not None and pages is None:
            self.pages = memory_for_pages(config.cache.host_gb)
            weakref.finalize(self, os.close, self.pages)
        self.launch_id = 0
        self.launch: Launch | None = None
        self.children: list[Forked] = []

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
        if launch.store_port:
            self._meeting = {"MASTER_ADDR": launch.store_host, "MASTER_PORT": str(launch.store_port)}
        self.link = replace(self.link, front_ends=launch.front_ends)
        self.launch, self._pages_at = launch, launch.pages_at

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
        self.children[number] = self._start(number)

    def _start(self, number: int, store_fd: int | None = None) -> Forked:
        rank = self._first + number
        if self._server is None or not self._server.runs:
            arguments = ["--config", str(self.config_file)]
            # One thread, as in fork_server.py; a rank sets its own number.
            environ = child_environment(self.link) | {"OMP_NUM_THREADS": "1"}
            self._end_server()
            self._server = ForkServer(WORKER, arguments, environ, self._on_line)
        files: dict[str, Sequence[int]] = {LAUNCH_FILES: self._files, PAGE_FILES: self._page_files}
        files[WEIGHT_FILES] = self._weight_files
        if self.pages is not None:
            files[PAGES_FD] = [self.pages]
        if rank in self._listeners:
            files[LINK_FD] = [self._listeners[rank].fileno()]
        if store_fd is not None:
            files[STORE_FD] = [store_fd]
        return self._server.fork(f"rank {rank}", self._environment_of(number), files)

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.finish()
        self._server = None

    def _environment_of(self, number: int) -> dict[str, str]:
        """Returns what a rank is told."""
        told = {
            "RANK": str(self._first + number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(self.config.parallel.num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_local),
            "MOE_SERVE_LAUNCH_ID": str(self.launch_id),
            "MOE_SERVE_RESTARTS_LEFT": str(self.config.launcher.max_restarts),
        }
        if self.config.launcher.max_restarts:
            told[NUM_BEFORE] = str(self._num_before[number])
        if self._pages_at:
            told[PAGES_AT] = ",".join(self._pages_at)
        return told | self._meeting

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
        return Death(rank, child.pid, code, tuple(child.last_lines), self._num_before[number])

    def end(self, grace_s: float) -> None:
        """Ends all ranks; those that are ending get grace_s to do so."""
        end_children(self.children, grace_s)
        self._end_server()
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
    for name in (TOKEN, SOCKETS, FRONT_ENDS, FOR_PREFILL):
        environ.pop(name, None)
    if link.folder is not None:
        environ[SOCKETS] = str(link.folder)
    if link.token:
        environ |= {
            TOKEN: link.token, FRONT_ENDS: ",".join(link.front_ends), FOR_PREFILL: ",".join(link.for_prefill),
        }  # fmt: skip
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

    what: processes, for the report
    """

    def __init__(self, config: LauncherConfig, what: str = "the ranks were"):
        self._what = what
        self._config = config
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
        now_s = time.monotonic()
        self._losses.append((now_s, time.strftime("%H:%M:%S"), reason))
        return self.num_recent <= self._config.max_restarts

    @property
    def is_one_left(self) -> bool:
        """Whether another loss within the window is followed by a restart."""
        return self.num_recent < self._config.max_restarts

    @property
    def num_recent(self) -> int:
        """The losses within the window."""
        since_s = time.monotonic() - self._config.restart_window_s
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
    group_epoch: of the newest group
    """

    def __init__(self, config: ServeConfig, restarts: Restarts):
        self._restarts = restarts
        self._num_ranks = config.parallel.num_ranks
        self._unmasked_s = math.inf if len(config.nodes) == 1 else _UNMASKED_S
        self._deadline_s = config.server.attach_deadline_s
        self.group_epoch = 0
        self._masked: set[int] = set()
        self._ended: dict[int, tuple[Death, float]] = {}  # not yet replaced; not before that time
        self._started_s: dict[int, float] = {}
        self._failed: dict[int, _Failed] = {}
        self._said_late: set[int] = set()
        self.others_wait = False

    def regrouped(self, message: Members) -> bool:
        """Notes which ranks take part; returns False for old news: several front ends may pass it on."""
        if message.group_epoch <= self.group_epoch:
            return False
        self.group_epoch, self.others_wait = message.group_epoch, message.waits
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
