"""The commands of an admin that a front end passes to the ranks, and the answer of a rank. Torch-free."""

from typing import Any

from moe_serve.engine.protocol.message import Message


class RecordCommand(Message, tag="record", frozen=True):
    """Start, stop or dump the recorder of expert load; the lowest rank that takes part answers with `Answer`.

    command: one of engine.step.RECORD_COMMANDS
    """

    call_id: int
    command: str


class Rebalance(Message, tag="rebalance", frozen=True):
    """Plan now, without waiting for the next window; answered as RecordCommand."""

    call_id: int


class SetPlacement(Message, tag="set_placement", frozen=True):
    """Move experts to these slots: [layers][slots], -1 = empty. Answered as RecordCommand; a refusal says why."""

    call_id: int
    physical_to_logical: list[list[int]]


class FlushCache(Message, tag="flush_cache", frozen=True):
    """Empty the prefix cache, if no request is open. Every rank answers for itself, with `Answer`."""

    call_id: int


STEP_WORDS = 11  # of one step in a profile, all int64; see Profiler.add


class Profile(Message, tag="profile", frozen=True):
    """Record steps for a profile, or stop and answer with them. Every rank answers for itself, with `Answer`.

    command: "start" or "stop";  max_s, most_steps, most_turns: where a recording ends by itself
    The facts of a stop: steps, int64 [n, STEP_WORDS]; turns, int64 [n, 2] (begin in ns, part); and their words.
    """

    call_id: int
    command: str
    max_s: float = 0.0
    most_steps: int = 0
    most_turns: int = 0


class Answer(Message, tag="answer", frozen=True):
    """The answer to a command of the front end. text: what was done, or why not;  facts: such as names of files"""

    rank: int
    launch_id: int
    call_id: int
    ok: bool
    text: str
    facts: dict[str, Any] = {}
