"""The process that parses large bodies: `python -m …_process PARENT_PID`."""

from typing import Any

import msgspec

from moe_serve.errors import RequestError
from moe_serve.server.api.body_parser import HEAD, KINDS, Parsed
from moe_serve.server.workers.helper_process import serve_jobs

_MAX_MEMORY_BYTES = 2 << 30


def answer(job: bytes) -> bytes:
    """Returns a Parsed for a body with its HEAD."""
    number, max_prompts = HEAD.unpack_from(job)
    parsed: Parsed[Any]
    try:
        parsed = Parsed(KINDS[number].parse(job[HEAD.size :], max_prompts))
        return msgspec.msgpack.encode(parsed)
    except RequestError as error:
        return msgspec.msgpack.encode(Parsed(None, str(error), error.field))
    except MemoryError:
        return msgspec.msgpack.encode(Parsed(None, "the body takes too much memory to parse; send a simpler one"))


if __name__ == "__main__":
    serve_jobs(answer, _MAX_MEMORY_BYTES)
