"""The parent's side of a planner process: asks it, and never waits for it.

The process starts with the first request, or before. `poll` moves a bounded number of bytes through pipes that do not
block; when a plan takes too long, or the process ends or answers nonsense, the process is killed, the request ends as a
`PlanProblem`, and the next request starts another process, after a pause that grows with failures in a row.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_serve.child_process import describe_exit
from moe_serve.eplb.migration.moves import RoundLimits
from moe_serve.eplb.migration.plan import MigrationPlan
from moe_serve.eplb.planning.worker import PIECE_BYTES, Ask, MessageReader, Reply, WireError, pieces
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.relabel import Relabel

WORKER = "moe_serve.eplb.planning.worker"
_IMPORT_PATH = str(Path(__file__).parents[3])  # where the process finds this package
_PIPE_BYTES = 1 << 20  # asked of the kernel, so that few polls carry a request
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # between a failure and the start of the next process
_END_S = 2.0  # between the end of a process's output and its own
# Killed processes are gone within milliseconds. A leader that hands over closes its planner between two steps, so it
# does not wait for one that hangs in the kernel.
_KILL_S = 0.1


@dataclass(frozen=True)
class PlanAnswer:
    """The plan of a request, and the migration to it."""

    request_id: int
    plan: Plan
    migration: MigrationPlan


@dataclass(frozen=True)
class PlanProblem:
    """The reason why a request has no plan, in words."""

    request_id: int
    reason: str


@dataclass
class _Open:
    """The open request.

    unsent:   pieces that are still to be written, the first one, `piece`, apart, since it may be cut
    has_more: the last turn wrote all that one may, and pieces are left
    ended_s:  when the process closed its output
    """

    request_id: int
    deadline_s: float
    unsent: Iterator[bytes]
    piece: memoryview
    is_sent: bool = False
    has_more: bool = False
    ended_s: float | None = None


class PlannerProcess:
    """Plans in a process of its own, at the lowest priority. At most one request is open; another one takes its place.

    policy:     a name of `make_policy`
    deadline_s: of one plan, from its request on, the start of the process included
    command:    of the process; its pid is added
    """

    def __init__(
        self,
        policy: str,
        deadline_s: float,
        now: Callable[[], float] = time.monotonic,
        command: tuple[str, ...] = (sys.executable, "-m", WORKER),
    ):
        self._policy = policy
        self._deadline_s = deadline_s
        self._now = now
        self._command = command
        self._open: _Open | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._reader = MessageReader(Reply)
        self._killed: list[subprocess.Popen[bytes]] = []  # not yet gone
        self._failures = 0  # in a row
        self._next_start_s = 0.0

    @property
    def pid(self) -> int | None:
        """The process that plans; None where none runs."""
        return None if self._child is None else self._child.pid

    @property
    def has_more_to_send(self) -> bool:
        """Whether the next poll should come soon, since it goes on with a request that one turn could not carry."""
        return self._open is not None and self._open.has_more

    def start(self) -> None:
        """Prepares for a plan that will be asked for, so that it comes sooner."""
        if self._child is None and self._now() >= self._next_start_s:
            with contextlib.suppress(OSError):  # the plan that needs it says why it cannot be started
                self._child = self._start()

    def submit(self, request_id: int, request: PlanRequest, limits: RoundLimits, relabel: Relabel) -> None:
        """Asks for a plan and the migration to it; arguments as in RequestPlan."""
        if self._open is not None or (self._child is not None and self._child.poll() is not None):
            self._end_child()  # it works on the request that this one replaces, or has ended while there was none
        ask = Ask(request_id, self._policy, request, limits, relabel)
        self._open = _Open(request_id, self._now() + self._deadline_s, pieces(ask), memoryview(b""))

    def poll(self) -> PlanAnswer | PlanProblem | None:
        """Returns how the open request ended; None = it has not, or there is none. Never waits."""
        if self._killed:
            self._killed = [child for child in self._killed if child.poll() is None]
        asked = self._open
        if asked is None:
            return None
        now_s = self._now()
        if now_s >= asked.deadline_s:
            return self._fail(
                asked, f"it took more than {self._deadline_s:g} s, the limit that eplb.plan_deadline_s sets"
            )
        if self._child is None:
            if now_s < self._next_start_s:
                return None
            try:
                self._child = self._start()
            except OSError as error:
                return self._fail(asked, f"the planner process cannot be started ({error.strerror})")
        try:
            if asked.ended_s is not None:
                return self._look_for_end(self._child, asked, now_s)
            self._write(self._child, asked)
            return self._read(self._child, asked, now_s)
        except WireError as problem:
            return self._fail(asked, f"the planner process answered nonsense: {problem}")

    def close(self) -> None:
        """Ends the process, and the open request with it."""
        self._open = None
        self._end_child()
        deadline_s = time.monotonic() + _KILL_S
        for child in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline_s - time.monotonic()))
        self._killed = []

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [_IMPORT_PATH, *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {name: value for name, value in os.environ.items() if name != "MOE_SERVE_TOKEN"}
        environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        child = subprocess.Popen(
            [*self._command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environ | {"PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,  # so that Ctrl-C reaches only the parent
        )
        self._reader = MessageReader(Reply)
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            if sys.platform == "linux":
                with contextlib.suppress(OSError):
                    fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return child

    def _write(self, child: subprocess.Popen[bytes], asked: _Open) -> None:
        """Writes of the request what fits into one turn, as far as the pipe takes it: small pieces all at once."""
        assert child.stdin is not None
        num_written = 0
        asked.has_more = False  # a full pipe is tried again in any later turn
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # a process that ended has closed its output, too
            while num_written < PIECE_BYTES and not asked.is_sent:
                if not asked.piece:
                    asked.piece = memoryview(next(asked.unsent, b""))
                    asked.is_sent = not asked.piece
                    continue
                taken = os.write(child.stdin.fileno(), asked.piece)
                asked.piece = asked.piece[taken:]
                num_written += taken
            asked.has_more = not asked.is_sent

    def _read(self, child: subprocess.Popen[bytes], asked: _Open, now_s: float) -> PlanAnswer | PlanProblem | None:
        assert child.stdout is not None
        try:
            data = os.read(child.stdout.fileno(), PIECE_BYTES)
        except BlockingIOError:
            return None
        if not data:
            asked.ended_s = now_s
            return self._look_for_end(child, asked, now_s)
        reply = self._reader.feed(data)
        if reply is None:
            return None
        if reply.request_id != asked.request_id:
            raise WireError(f"an answer to request {reply.request_id}, which is not open")
        self._open, self._failures = None, 0
        if reply.plan is None or reply.migration is None:
            return PlanProblem(reply.request_id, reply.problem)
        return PlanAnswer(reply.request_id, reply.plan, reply.migration)

    def _look_for_end(self, child: subprocess.Popen[bytes], asked: _Open, now_s: float) -> PlanProblem | None:
        assert asked.ended_s is not None
        code = child.poll()
        if code is None and now_s < asked.ended_s + _END_S:
            return None
        how = "closed its output" if code is None else describe_exit(code)
        where = "; its last lines are in the log of this rank" if code is not None and code >= 0 else ""
        return self._fail(asked, f"the planner process {how}{where}")

    def _fail(self, asked: _Open, reason: str) -> PlanProblem:
        self._open = None
        self._end_child()
        self._next_start_s = self._now() + min(_FIRST_PAUSE_S * 2.0**self._failures, _LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 16)
        return PlanProblem(asked.request_id, reason)

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()
        self._killed.append(child)
