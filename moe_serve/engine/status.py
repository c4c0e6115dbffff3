"""The status that a rank reports once a second."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.attention_dp.scheduler import ScheduledChunk, Scheduler, SchedulerStats
from moe_serve.engine.protocol.messages import Status
from moe_serve.engine.step_times import StepTimes
from moe_serve.log import num_logged
from moe_serve.process_facts import num_open_files, resident_bytes


@dataclass
class EngineCounters:
    """Totals since the start; they only grow."""

    num_steps: int = 0  # exchanges
    num_forwards: int = 0
    num_overlapped_forwards: int = 0  # of them, those whose rounds overlapped
    num_voided_steps: int = 0  # abandoned because a peer was lost
    num_times_left_out: int = 0  # this rank was masked
    num_sleeps: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0  # ended because their logits were not finite

    def count_forward(self, chunks: Sequence[ScheduledChunk], num_output_tokens: int, overlap: bool) -> None:
        """Counts a step that is done."""
        self.num_forwards += 1
        self.num_overlapped_forwards += overlap
        self.num_output_tokens += num_output_tokens
        for chunk in chunks:
            if chunk.length == 1 and chunk.samples:
                self.num_decode_tokens += 1
            else:
                self.num_prefill_tokens += chunk.length


def totals_of(counters: EngineCounters, stats: SchedulerStats, split_outcomes: Sequence[int]) -> dict[str, float]:
    """Returns all counters of a rank, by name.

    split_outcomes: batches that the exact split has proven at once, proven after repair, not proven; () = it does not
                    serve. What was not proven may be exact, and is never called so
    """
    totals = {name: float(value) for name, value in vars(counters).items()}
    totals |= {name: float(getattr(stats, name)) for name in stats.__slots__}
    names = ("num_splits_proven", "num_splits_repaired", "num_splits_unproven")
    return totals | {name: float(number) for name, number in zip(names, split_outcomes, strict=False)}


def make_status(
    rank: int,
    launch_id: int,
    step: int,
    scheduler: Scheduler,
    totals: dict[str, float],
    waited_s: Sequence[float],
    times: StepTimes,
) -> Status:
    """Returns the report of a rank. waited_s: for each rank, how long this one has waited for its rows"""
    return Status(
        rank=rank,
        launch_id=launch_id,
        step=step,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_free_blocks=scheduler.blocks.num_free,
        num_blocks=scheduler.blocks.num_blocks,
        pending_tokens=scheduler.pending_tokens,
        counters=totals,
        waited_s=list(waited_s),
        resident_bytes=resident_bytes(),
        num_open_files=num_open_files(),
        log_lines=num_logged(),
        phases=times.report(),
    )
