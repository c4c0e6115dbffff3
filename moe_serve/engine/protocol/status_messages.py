"""What a rank reports of itself, about once a second, whatever happens. Torch-free."""

import msgspec

from moe_serve.engine.protocol.message import Message

# Upper bounds of the buckets of a step's time, in seconds; one more bucket is beyond the last.
STEP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class PhaseTimes(msgspec.Struct, frozen=True):
    """The steps of one phase: their seconds, how many fell into each bucket, and seconds by part of a step.

    parts: by the names of kernels/part_clock.py; empty on a GPU, where the host does not see them
    """

    seconds: float
    buckets: list[int]
    parts: dict[str, float]


class Status(Message, tag="status", frozen=True):
    """A rank is alive, and its load; sent every ALIVE_PERIOD_S.

    resident_bytes, num_open_files: of its process; 0 where that is not known
    log_lines:                      how many warnings and errors it has logged, by level
    phases:                         the times of its steps, by phase
    """

    rank: int
    launch_id: int
    step: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    pending_tokens: int  # prefill tokens still to compute
    counters: dict[str, float] = {}  # running totals: steps, tokens, preemptions, prefix hits, sleeps
    waited_s: list[float] = []  # for each rank, how long this one has waited for its rows; empty = not measured
    resident_bytes: int = 0
    num_open_files: int = 0
    log_lines: dict[str, int] = {}
    phases: dict[str, PhaseTimes] = {}
