"""A planner process: `python -m moe_serve.eplb.planning.worker PARENT_PID` answers requests on stdin until it ends.

It takes what time serving leaves, ends with its parent, and never loads torch. A request that a policy refuses is
answered in words; any other error ends the process with a traceback, and its parent starts another one.

The bytes between it and its parent are a header, then checksummed pieces; nothing is pickled.

    header   magic, length of the skeleton, length of the body, checksum of these three
    pieces   length, checksum, bytes; together they are the body: the skeleton, then the arrays, end to end
    skeleton the message as MessagePack, in which an array is its dtype, its shape and where it begins

A piece is made when it is due, so that a request of many megabytes costs its sender little at a time.
"""

import contextlib
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from moe_serve.child_process import die_with_parent
from moe_serve.eplb.migration.moves import RoundLimits
from moe_serve.eplb.migration.plan import MigrationPlan, migration_to
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.relabel import Relabel
from moe_serve.errors import MoeServeError

PIECE_BYTES = 1 << 18
MAX_BODY_BYTES = 1 << 30
_MAGIC = b"MSP1"
_HEADER = struct.Struct("<4sIQI")
_PIECE = struct.Struct("<II")
_DTYPES = {"<f8", "<i8", "<i4"}  # of the arrays of requests and plans


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
