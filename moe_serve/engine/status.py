"""The status that a rank reports once a second: its counters, and how long its steps took, by phase and by part."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.attention_dp.scheduler import ScheduledChunk, Scheduler
from moe_serve.engine.protocol.messages import STEP_BOUNDS_S, PhaseTimes, Status
from moe_serve.engine.recovery.recovery import Recovery
from moe_serve.engine.step.plan import PHASES
from moe_serve.eplb.load import NO_DECODES, DecodeCounts, StepCounts
from moe_serve.kernels.part_clock import BETWEEN, EXCHANGE, PARTS, PartClock
from moe_serve.log import num_logged
from moe_serve.process_facts import num_open_files, resident_bytes

_IDLE = "idle"  # as in a plan; kept, and not reported


@dataclass
class EngineCounters:
    """Totals since the start; they only grow."""

    num_steps: int = 0  # exchanges
    num_forwards: int = 0
    num_overlapped_forwards: int = 0  # of them, those that ran in halves
    num_sleeps: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0  # ended because their logits were not finite
    decodes: DecodeCounts = NO_DECODES

    def count_forward(self, chunks: Sequence[ScheduledChunk], num_output_tokens: int, overlap: bool) -> None:
        """Counts a step that is done."""
        self.num_forwards += 1
        self.num_overlapped_forwards += overlap
        self.num_output_tokens += num_output_tokens
        for chunk in chunks:
            if chunk.samples and chunk.num_known == 1:
                self.num_decode_tokens += chunk.length
            else:
                self.num_prefill_tokens += chunk.length

    def count_decodes(self, num_requests: int, num_drafts: int, num_tokens: int, num_experts: int) -> None:
        """Counts a step of decodes alone. num_tokens: that came out;  num_experts: that its rows asked for"""
        kind = "with_drafts" if num_drafts else "without"
        steps, requests, tokens, experts = getattr(self.decodes, kind)
        counts = StepCounts(steps + 1, requests + num_requests, tokens + num_tokens, experts + num_experts)
        self.decodes = self.decodes._replace(**{kind: counts})

    def totals(self) -> dict[str, float]:
        """Returns all counters by name; those of decodes as `num_decodes_without_steps` and so on."""
        found = {name: float(value) for name, value in vars(self).items() if name != "decodes"}
        for kind, counts in self.decodes._asdict().items():
            found |= {f"num_decodes_{kind}_{name}": float(value) for name, value in counts._asdict().items()}
        return found


class StepTimes:
    """Totals since the start. A step lasts from the exchange to its end; voided and idle ones do not count.

    Parts are added up where one phase follows another, not in each step: a step of a small model takes 0.3 ms.

    clock:     measures the parts; the caller switches it during a step
    has_parts: False: parts are not reported
    """

    def __init__(self, clock: PartClock, has_parts: bool):
        self._clock = clock
        self._has_parts = has_parts
        self._is_in_step = False
        self._began_ns = 0
        self._before_ns = self._since_ns = clock.sums_ns()  # at the begin of the step, of the run of its phase
        self._phase = _IDLE
        self._seconds = dict.fromkeys((*PHASES, _IDLE), 0.0)
        self._buckets = {phase: [0] * (len(STEP_BOUNDS_S) + 1) for phase in (*PHASES, _IDLE)}
        self._parts_ns = {phase: [0] * len(PARTS) for phase in (*PHASES, _IDLE)}

    def begin(self) -> int:
        """Begins a step, with its exchange. Returns when, in ns."""
        began_ns = self._began_ns = self._clock.turn(EXCHANGE)
        sums_ns = self._clock.sums_ns()
        if self._is_in_step:  # the step before was void
            self._add_parts(self._before_ns)
            self._since_ns = sums_ns
        self._before_ns, self._is_in_step = sums_ns, True
        return began_ns

    def end(self, phase: str) -> int:
        """Ends a step and counts it in the phase of its plan. Returns when, in ns."""
        ended_ns = self._clock.turn(BETWEEN)
        self._is_in_step = False
        if phase != self._phase:
            self._add_parts(self._before_ns)
            self._phase = phase
        step_s = (ended_ns - self._began_ns) / 1e9
        self._seconds[phase] += step_s
        self._buckets[phase][bisect_left(STEP_BOUNDS_S, step_s)] += 1
        return ended_ns

    def report(self) -> dict[str, PhaseTimes]:
        """Returns the totals by phase, between two steps; a phase without steps is left out."""
        self._add_parts(self._before_ns if self._is_in_step else self._clock.sums_ns())
        return {
            phase: PhaseTimes(self._seconds[phase], list(self._buckets[phase]), self._parts(phase))
            for phase in PHASES
            if any(self._buckets[phase])
        }

    def _add_parts(self, until_ns: "array[int]") -> None:
        """Adds the parts of all steps of the present phase up to these sums."""
        totals = zip(self._parts_ns[self._phase], until_ns, self._since_ns, strict=True)
        self._parts_ns[self._phase] = [total + now - then for total, now, then in totals]
        self._since_ns = until_ns

    def _parts(self, phase: str) -> dict[str, float]:
        if not self._has_parts:
            return {}
        totals = zip(PARTS, self._parts_ns[phase], strict=True)
        return {name: total / 1e9 for name, total in totals if name != PARTS[BETWEEN]}


def totals_of(
    counters: EngineCounters,
    recovery: Recovery,
    scheduler: Scheduler,
    split_outcomes: Sequence[int],
    changed_choices: Sequence[int] = (),
) -> dict[str, float]:
    """Returns all counters of a rank, by name.

    split_outcomes: batches that the exact split has proven at once, proven after repair, not proven; () = it does not
                    serve. A batch that was not proven may be split exactly, and is never called so
    changed_choices: that moved over the capacity of an expert, and that were dropped; () = there is no such limit
    """
    totals = counters.totals()
    totals |= {name: float(getattr(recovery, name)) for name in ("num_voided_steps", "num_times_left_out")}
    totals |= {name: float(getattr(scheduler.stats, name)) for name in scheduler.stats.__slots__}
    pages: Counter[str] = Counter()
    for each in (scheduler.blocks.tiers, scheduler.blocks.receiver):
        pages.update({} if each is None else each.counters)
    totals |= {f"num_pages_{name}": float(number) for name, number in pages.items()}
    if scheduler.speculator is not None:
        totals |= scheduler.speculator.totals()
    names = ("num_splits_proven", "num_splits_repaired", "num_splits_unproven")
    totals |= {name: float(number) for name, number in zip(names, split_outcomes, strict=False)}
    names_of_choices = ("num_choices_moved", "num_choices_dropped")
    return totals | {name: float(number) for name, number in zip(names_of_choices, changed_choices, strict=False)}


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
        page_cost=None if scheduler.blocks.tiers is None else scheduler.blocks.tiers.cost_across,
    )
