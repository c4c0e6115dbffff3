"""What a rank reports of itself, about once a second, whatever happens. Torch-free."""

from moe_serve.engine.message import Message


class Status(Message, tag="status", frozen=True):
    """A rank is alive, and its load; sent every ALIVE_PERIOD_S.

    resident_bytes, num_open_files: of its process; 0 where that is not known
    log_lines:                      how many warnings and errors it has logged, by level
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
