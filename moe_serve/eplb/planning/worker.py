"""A planner process: `python -m moe_serve.eplb.planning.worker PARENT_PID` answers requests on stdin until it ends.

It takes what time serving leaves, ends with its parent, and never loads torch. A request that a policy refuses is
answered in words; any other error ends the process with a traceback, and its parent starts another one.
"""

import contextlib
import os
import sys

from moe_serve.child_process import die_with_parent
from moe_serve.eplb.migration.plan import migration_to
from moe_serve.eplb.planning.wire import PIECE_BYTES, Ask, MessageReader, Reply, pieces
from moe_serve.eplb.policies.make import make_policy
from moe_serve.errors import MoeServeError


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


if __name__ == "__main__":
    main()
