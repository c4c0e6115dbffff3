"""The step contract: the state that every rank shares before a step, and the plan that all ranks compute from it.

Expert-parallel ranks must make the same collective calls in the same order, or they hang. So no private state decides
about a collective: each rank contributes one `RankState` row, and the pure function `plan_step` turns the same rows
into the same `StepPlan` on every rank. Numpy only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from moe_serve.errors import PeerError

Int64Array = NDArray[np.int64]
PHASES = ("decode", "prefill", "mixed")  # of a step with rows
MOVE_FAULTS = (
    "an expert arrived with a wrong checksum",
    "the experts did not arrive in time",
    "it cannot read or write the experts of this round",
)
RECORD_COMMANDS = ("start", "stop", "dump")  # of the recorder that clients control
HOLDS_RECORDING, WRITES_DUMP, DUMP_FAILED = 1, 2, 4


class RankState(NamedTuple):
    """One rank's row of the exchange: a fixed number of int64, known before the tokens of the previous step.

    decode_tokens, prefill_tokens: rows that this rank proposes to run
    held_steps:                    for how many steps in a row its prefill was held back
    has_work:                      1 if requests are waiting or running, even where nothing can run now
    wants_stop:                    1 if it was asked to end
    placement_version:             of the expert placement that its weights and tables follow
    regrouped:                     1 in the first exchange of a group; the ranks may then be at different steps
    masked, asking_to_rejoin:      sets of ranks, as bits: the masked ones, and those of them that ask to rejoin
    has_message:                   1 if it has a message for all ranks, such as the next round of a migration
    needs_placement:               1 if it has rejoined, and must be told where experts are
    staged:                        version of the round whose experts it has staged and checked; 0 = none
    fault, fault_layer:            why it cancels the running round, as 1 + index into MOVE_FAULTS, 0 = it does not;
                                   and the row of the layer where
    record_command:                the command of a client to the load recorder, as 1 + index into RECORD_COMMANDS
    record_time_us:                time of that command, wall clock; names the files of a dump
    recorder:                      its part of a recording: a set of HOLDS_RECORDING, WRITES_DUMP and DUMP_FAILED
    even_phases:                   phases in which the exact split does not pay, as bits in the order of PHASES
    predictions:                   how often the layer that predicts tokens should run behind the forward
    """

    launch_id: int
    step: int
    decode_tokens: int = 0
    prefill_tokens: int = 0
    held_steps: int = 0
    has_work: int = 0
    wants_stop: int = 0
    placement_version: int = 0
    regrouped: int = 0
    masked: int = 0
    asking_to_rejoin: int = 0
    has_message: int = 0
    needs_placement: int = 0
    staged: int = 0
    fault: int = 0
    fault_layer: int = 0
    record_command: int = 0
    record_time_us: int = 0
    recorder: int = 0
    even_phases: int = 0
    predictions: int = 0

    def to_row(self) -> Int64Array:
        """Returns the state as one row, [num_fields] int64."""
        return np.array(self, dtype=np.int64)

    @classmethod
    def from_row(cls, row: Int64Array) -> Self:
        """Returns the state in a row of `to_row`."""
        return cls._make(row.tolist())


ROW_LENGTH = len(RankState._fields)


@dataclass(frozen=True)
class StepSettings:
    """The part of the configuration that `plan_step` needs; the same on every rank.

    max_tokens_per_rank: rows that one dispatch carries; a longer step runs in chunks
    prefill_hold_steps:  how many steps a prefill may wait for prefills of the other ranks
    record_window_steps: a load record is closed every so many steps
    overlap_from_tokens: a step runs in two halves that overlap from this many rows of one rank on; None = never
    """

    max_tokens_per_rank: int
    prefill_hold_steps: int = 0
    record_window_steps: int = 1000
    overlap_from_tokens: int | None = None


@dataclass(frozen=True)
class MoveCancelled:
    """The reason why the running round ends without effect. layer: row of the placement"""

    rank: int
    reason: str
    layer: int


@dataclass(frozen=True)
class MovePlan:
    """The moves of experts in a step.

    activate:       version of the round that all ranks have staged: its experts serve from this step on; 0 = none
    cancel:         the running round ends without effect
    placement_from: the root of a broadcast of the placement, which some rank lacks since it has rejoined; None = none
    message_from:   the root of a broadcast of a message, such as the next round; None = none
    """

    activate: int = 0
    cancel: MoveCancelled | None = None
    placement_from: int | None = None
    message_from: int | None = None


NO_MOVES = MovePlan()


@dataclass(frozen=True)
class RecorderStates:
    """The ranks' parts of the recording that clients control.

    time_us: when the command of this step was asked for, wall clock
    holders: ranks that hold a recording; one that was masked has dropped its own
    writers, failed: ranks that write a dump now, and those whose last dump could not be written
    """

    time_us: int = 0
    holders: tuple[int, ...] = ()
    writers: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()

    @classmethod
    def of(cls, states: Sequence[RankState], ranks: Sequence[int]) -> "RecorderStates":
        """Returns what the ranks' rows say."""
        if not any(state.recorder or state.record_command for state in states):
            return NO_RECORDING  # as in nearly every step
        by_rank = list(zip(ranks, states, strict=True))
        of_flag = (
            tuple(rank for rank, state in by_rank if state.recorder & flag)
            for flag in (HOLDS_RECORDING, WRITES_DUMP, DUMP_FAILED)
        )
        return cls(next((state.record_time_us for state in states if state.record_command), 0), *of_flag)


NO_RECORDING = RecorderStates()


class StepPlan(NamedTuple):
    """The work of every rank in this step.

    phase:        "idle" (no rows anywhere), "decode", "prefill" or "mixed"
    max_tokens:   rows of the rank with the most
    num_chunks:   rounds of dispatch and combine in every MoE layer; ranks with fewer rows run empty ones
    overlap:      the rows of each rank run in two halves: one computes while rows of the other travel. Rounds are those
                  of a half
    hold_prefill: only the decode rows of the proposals run
    close_window: the load record ends with this step (and with the engine): all ranks take part in its reduction
    regrouped:    ranks were masked or have rejoined: the load record ends before this step, with its placement
    rejoining:    masked ranks that all others see waiting: the ranks end the load record, regroup with them, and do
                  nothing else
    sleep:        nothing to do anywhere: wait for a request or a wake before the next exchange
    stop:         the engine ends, on all ranks, without running a forward
    moves:        what happens to experts, before the forward
    record:       the recorder that clients control starts, stops or dumps after this step; None = goes on
    recorders:    what the ranks have of that recording
    split_evenly: the batches of this step are split evenly, whatever eplb.split says
    num_predictions: how often the layer that predicts tokens runs behind the forward
    """

    step: int
    phase: str
    max_tokens: int
    num_chunks: int
    overlap: bool
    hold_prefill: bool
    close_window: bool
    sleep: bool
    stop: bool
    regrouped: bool = False
    rejoining: tuple[int, ...] = ()
    moves: MovePlan = NO_MOVES
    record: str | None = None
    recorders: RecorderStates = NO_RECORDING
    split_evenly: bool = False
    num_predictions: int = 0

    @property
    def runs_forward(self) -> bool:
        return not (self.sleep or self.stop or self.phase == "idle" or self.rejoining)


def plan_step(states: Sequence[RankState], settings: StepSettings, ranks: Sequence[int] = ()) -> StepPlan:
    """Returns the plan of one step from the states of all ranks that take part, in rank order.

    ranks: the ranks of these states; none: 0, 1, 2, …
    Raises PeerError where the ranks are not in the same launch, group, step or placement: a rank that is out of step
    must not run another collective. In the first step of a group they go on with the highest step: a rank that finished
    a step that was voided for others keeps it, and its number is not used again. The same holds for a round that some
    ranks have activated in such a step, and the others have staged. Where placements differ for any other reason, one
    of the ranks that know the newest broadcasts it.
    """
    ranks = ranks or range(len(states))
    regrouped = all(state.regrouped for state in states)
    _check_agreement(states, ranks, regrouped)
    first = states[0]
    step = max(state.step for state in states)
    stop = any(state.wants_stop for state in states)
    record = next((RECORD_COMMANDS[state.record_command - 1] for state in states if state.record_command), None)
    sleep = not stop and not any(state.has_work for state in states)
    decodes = [state.decode_tokens for state in states]
    prefills = [state.prefill_tokens for state in states]
    has_decode, has_prefill, hold = any(decodes), any(prefills), False
    if has_decode and has_prefill and _hold_prefill(states, settings):
        has_prefill, hold, prefills = False, True, [0] * len(states)
    phase = "mixed" if has_decode and has_prefill else "decode" if has_decode else "prefill" if has_prefill else "idle"
    max_tokens = max(map(sum, zip(decodes, prefills, strict=True)))
    seen_by_all = -1
    for state in states:
        seen_by_all &= state.asking_to_rejoin
    rejoining = () if stop else ranks_of(seen_by_all & first.masked)
    overlap = settings.overlap_from_tokens is not None and max_tokens >= settings.overlap_from_tokens
    num_chunks = -(-max_tokens // ((1 + overlap) * settings.max_tokens_per_rank))
    return StepPlan(
        step=step,
        phase=phase,
        max_tokens=max_tokens,
        num_chunks=num_chunks,
        overlap=overlap,
        hold_prefill=hold,
        close_window=(stop or record is not None or (step + 1) % settings.record_window_steps == 0) and not rejoining,
        sleep=sleep and not rejoining,
        stop=stop,
        regrouped=regrouped,
        rejoining=rejoining,
        moves=NO_MOVES if rejoining else _plan_moves(states, ranks, regrouped),
        record=None if rejoining else record,
        recorders=RecorderStates.of(states, ranks),
        split_evenly=phase in PHASES and bool(first.even_phases >> PHASES.index(phase) & 1),
        num_predictions=max(state.predictions for state in states),
    )


def _round_to_activate(states: Sequence[RankState], regrouped: bool) -> int:
    """Returns the version of the round that all ranks can serve with from now on; 0 = none."""
    newest = max((state.placement_version for state in states), default=0)
    behind = [state for state in states if state.placement_version < newest]
    if behind or not states:
        return newest if regrouped and all(state.staged == newest for state in behind) else 0
    return newest + 1 if not regrouped and all(state.staged == newest + 1 for state in states) else 0


def _check_agreement(states: Sequence[RankState], ranks: Sequence[int], regrouped: bool) -> None:
    first = states[0]
    for rank, state in zip(ranks[1:], states[1:], strict=True):
        for name in ("launch_id", "step", "placement_version", "regrouped", "masked"):
            if getattr(state, name) == getattr(first, name):
                continue
            if not (regrouped and name in ("step", "placement_version")):
                raise PeerError(
                    f"rank {rank} is at {name} {getattr(state, name)} and rank {ranks[0]} at {getattr(first, name)} "
                    f"(step {first.step}): the ranks are out of step; restart the engine",
                    rank=rank,
                    phase="exchange",
                    step=first.step,
                )


def _plan_moves(states: Sequence[RankState], ranks: Sequence[int], regrouped: bool) -> MovePlan:
    version = states[0].placement_version
    if not any(
        s.staged or s.fault or s.has_message or s.needs_placement or s.placement_version != version for s in states
    ):
        return NO_MOVES  # as in nearly every step
    activate = _round_to_activate([state for state in states if not state.needs_placement], regrouped)
    by_rank = list(zip(ranks, states, strict=True))
    faults = [
        MoveCancelled(rank, MOVE_FAULTS[state.fault - 1], state.fault_layer) for rank, state in by_rank if state.fault
    ]
    roots = [rank for rank, state in by_rank if state.has_message]
    return MovePlan(
        activate=activate,
        cancel=faults[0] if faults else None,
        placement_from=_placement_root(by_rank, activate),
        message_from=roots[0] if roots else None,
    )


def _placement_root(by_rank: Sequence[tuple[int, RankState]], activate: int) -> int | None:
    """Returns the rank that broadcasts where experts are; None where all know, once they have activated a round."""
    knowing = [(rank, state) for rank, state in by_rank if not state.needs_placement] or by_rank
    newest = max(state.placement_version for _, state in knowing)
    is_behind = not activate and any(state.placement_version < newest for _, state in knowing)
    if not is_behind and not any(state.needs_placement for _, state in by_rank):
        return None
    return next(rank for rank, state in knowing if state.placement_version == newest)


def mask_of(ranks: Iterable[int]) -> int:
    """Returns a set of ranks as bits."""
    return sum(1 << rank for rank in set(ranks))


def ranks_of(mask: int) -> tuple[int, ...]:
    """Returns the ranks of a set of bits, ascending."""
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)


def _hold_prefill(states: Sequence[RankState], settings: StepSettings) -> bool:
    """Returns whether prefills wait, where some rank decodes: some ranks have none, and none has waited too long."""
    lonely = not all(state.prefill_tokens for state in states)
    return lonely and all(state.held_steps < settings.prefill_hold_steps for state in states)
