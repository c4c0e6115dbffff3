"""Plans in a process of their own: `PlannerProcess` asks and never waits, and the process answers until it is closed.

The process starts with the first request, or before. `poll` moves a bounded number of bytes through pipes that do not
block; when a plan takes too long, or the process ends or answers nonsense, the process is killed, the request ends as a
`PlanProblem`, and the next request starts another process, after a pause that grows with failures in a row.

The other end, `python -m moe_serve.eplb.planner_process PARENT_PID`, takes what time serving leaves, ends with its
parent, and never loads torch. A request that a policy refuses is answered in words; any other error ends it with a
traceback.

The bytes between the two are a header, then checksummed pieces; nothing is pickled.

    header   magic, length of the skeleton, length of the body, checksum of these three
    pieces   length, checksum, bytes; together they are the body: the skeleton, then the arrays, end to end
    skeleton the message as MessagePack, in which an array is its dtype, its shape and where it begins

A piece is made when it is due, so that a request of many megabytes costs its sender little at a time.
"""

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from moe_serve.child_process import describe_exit, die_with_parent
from moe_serve.eplb.migration.moves import RoundLimits
from moe_serve.eplb.migration.plan import MigrationPlan, migration_to
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.relabel import Relabel
from moe_serve.errors import MoeServeError

WORKER = "moe_serve.eplb.planner_process"
_IMPORT_PATH = str(Path(__file__).parents[2])  # where the process finds this package
_PIPE_BYTES = 1 << 20  # asked of the kernel, so that few polls carry a request
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # between a failure and the start of the next process
_END_S = 2.0  # between the end of a process's output and its own
# Killed processes are gone within milliseconds. A leader that hands over closes its planner between two steps, so it
# does not wait for one that hangs in the kernel.
_KILL_S = 0.1
PIECE_BYTES = 1 << 18
MAX_BODY_BYTES = 1 << 30
_MAGIC = b"MSP1"
_HEADER = struct.Struct("<4sIQI")
_PIECE = struct.Struct("<II")
_DTYPES = {"<f8", "<i8", "<i4"}  # of the arrays of requests and plans


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


class WireError(Exception):
    """Bytes that are no message of a planner."""


class Ask(msgspec.Struct, frozen=True):
    """Plan this. policy: a name of `make_policy`;  limits, relabel: of the migration to the plan"""

    request_id: int
    policy: str
    request: PlanRequest
    limits: RoundLimits
    relabel: Relabel


class Reply(msgspec.Struct, frozen=True):
    """The plan of a request and the migration to it, or why there is none."""

    request_id: int
    plan: Plan | None
    migration: MigrationPlan | None
    problem: str = ""


def answer(ask: Ask) -> Reply:
    """Returns the plan that is asked for and the migration to it, or why there is none."""
    try:
        plan = make_policy(ask.policy).plan(ask.request)
        return Reply(ask.request_id, plan, migration_to(ask.request, plan, ask.limits, ask.relabel))
    except MoeServeError as refusal:
        return Reply(ask.request_id, None, None, str(refusal))


def serve(source: int, sink: int) -> None:
    """Answers the requests of one file descriptor on another one, until the first ends."""
    reader = MessageReader(Ask)
    while data := os.read(source, PIECE_BYTES):
        ask = reader.feed(data)
        if ask is not None:
            for piece in pieces(answer(ask)):
                _write_all(sink, piece)


def _write_all(sink: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(sink, left) :]


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    with contextlib.suppress(OSError):
        os.nice(19)
    sink = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not get between the bytes of an answer
    serve(0, sink)


class _Array(msgspec.Struct, frozen=True):
    """first: where its bytes begin behind the skeleton"""

    dtype: str
    shape: list[int]
    first: int


M = TypeVar("M", Ask, Reply)


def pieces(message: Ask | Reply) -> Iterator[bytes]:
    """Yields the bytes of a message, at most PIECE_BYTES and a few at a time."""
    parts: list[memoryview] = []
    num_bytes = 0

    def describe(value: Any) -> Any:
        nonlocal num_bytes
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} has no place in a planner's message")
        first, flat = num_bytes, np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        parts.append(flat.data)
        num_bytes += flat.size
        return _Array(value.dtype.str, list(value.shape), first)

    skeleton = msgspec.msgpack.encode(message, enc_hook=describe)
    num_bytes += len(skeleton)
    head = _MAGIC + struct.pack("<IQ", len(skeleton), num_bytes)
    yield head + struct.pack("<I", zlib.crc32(head))
    for part in (memoryview(skeleton), *parts):
        for first in range(0, len(part), PIECE_BYTES):
            piece = part[first : first + PIECE_BYTES]
            yield b"".join((_PIECE.pack(len(piece), zlib.crc32(piece)), piece))


class MessageReader(Generic[M]):
    """Puts messages of one kind together from bytes as they arrive."""

    def __init__(self, kind: type[M]):
        self._kind: type[M] = kind
        self._unread = bytearray()
        self._body = bytearray()
        self._sizes: tuple[int, int] | None = None  # of the skeleton and the body, once the header is here

    def feed(self, data: bytes) -> M | None:
        """Takes the next bytes; returns the message that they complete. Raises WireError for anything else."""
        self._unread += data
        if self._sizes is None and len(self._unread) >= _HEADER.size:
            self._sizes = self._header(self._take(_HEADER.size))
        while self._sizes is not None and len(self._unread) >= _PIECE.size:
            length, checksum = _PIECE.unpack_from(self._unread)
            if length > PIECE_BYTES or len(self._body) + length > self._sizes[1]:
                raise WireError(f"a piece of {length} bytes does not fit a message of {self._sizes[1]}")
            if len(self._unread) < _PIECE.size + length:
                break
            piece = self._take(_PIECE.size + length)[_PIECE.size :]
            if zlib.crc32(piece) != checksum:
                raise WireError(f"the checksum of a piece is wrong after {len(self._body)} bytes")
            self._body += piece
            if len(self._body) == self._sizes[1]:
                return self._finish()
        return None

    def _take(self, length: int) -> bytes:
        taken = bytes(self._unread[:length])
        del self._unread[:length]
        return taken

    def _header(self, data: bytes) -> tuple[int, int]:
        magic, skeleton, body, checksum = _HEADER.unpack(data)
        if magic != _MAGIC or zlib.crc32(data[:-4]) != checksum:
            raise WireError(f"a message begins with {data[:8]!r}, which is no header of a planner's message")
        if not 0 < skeleton <= body <= MAX_BODY_BYTES:
            raise WireError(f"a message of {body} bytes with a skeleton of {skeleton}; at most {MAX_BODY_BYTES} fit")
        return skeleton, body

    def _finish(self) -> M:
        assert self._sizes is not None
        skeleton, arrays = memoryview(self._body)[: self._sizes[0]], memoryview(self._body)[self._sizes[0] :]
        self._body, self._sizes = bytearray(), None

        def array_of(kind: type, value: Any) -> Any:
            described = msgspec.convert(value, _Array)
            if described.dtype not in _DTYPES or described.first < 0 or any(n < 0 for n in described.shape):
                raise ValueError(f"{described} is no array of a plan")
            dtype = np.dtype(described.dtype)
            end = described.first + dtype.itemsize * prod(described.shape)
            if end > len(arrays):
                raise ValueError(f"{described} ends after the {len(arrays)} bytes of the message")
            return np.frombuffer(arrays[described.first : end], dtype=dtype).reshape(described.shape)

        try:
            message: M = msgspec.msgpack.decode(skeleton, type=self._kind, dec_hook=array_of)
        except (msgspec.MsgspecError, MoeServeError, ValueError, TypeError, OverflowError) as problem:
            raise WireError(f"not a {self._kind.__name__} of a planner: {problem}") from None
        return message


if __name__ == "__main__":
    main()
