"""The process that parses large bodies: `python -m moe_serve.server.body_parser_process PARENT_PID`. Torch-free.

It reads bodies from stdin and writes what it parsed to stdout, until stdin ends. It imports nothing that serves.
"""

import gc
import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from moe_serve.child_process import die_with_parent
from moe_serve.errors import RequestError
from moe_serve.server.body_parser import FRAME, REPLY, Parsed
from moe_serve.server.schemas import parse_generate

_MAX_MEMORY_BYTES = 2 << 30  # of addresses; beyond it a body is refused
_KEPT_BYTES = 256 << 20  # a process that has grown beyond this ends after its answer, and gives the memory back


def main() -> None:
    """Parses until stdin ends."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    os.nice(10)  # ranks and the front end may need the same core, and serve those whose bodies are small
    gc.disable()  # parsed JSON has no cycles, and looking through millions of lists for them takes seconds
    while serve_one(sys.stdin.buffer, sys.stdout.buffer):
        pass


def serve_one(source: BinaryIO, sink: BinaryIO) -> bool:
    """Reads one body and answers; returns False where there is none any more, or the process has grown too large."""
    head = source.read(FRAME.size)
    if len(head) < FRAME.size:
        return False
    max_prompts, size = FRAME.unpack(head)
    reply = msgspec.msgpack.encode(_parse(source.read(size), max_prompts))
    goes_on = _most_memory() <= _KEPT_BYTES
    sink.write(REPLY.pack(len(reply), not goes_on) + reply)
    sink.flush()
    return goes_on


def _most_memory() -> int:
    """Returns the most bytes that this process has held. Not ru_maxrss, which begins with what its parent held."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


def _parse(body: bytes, max_prompts: int) -> Parsed:
    try:
        return Parsed(parse_generate(body, max_prompts))
    except RequestError as error:
        return Parsed(None, str(error), error.field)
    except MemoryError:
        return Parsed(None, "the body takes too much memory to parse; send a simpler one")


if __name__ == "__main__":
    main()
