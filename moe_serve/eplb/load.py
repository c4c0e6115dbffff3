"""The recorded load of experts, and the load of slots and ranks that follows from it.

    window        consecutive steps of an engine, covered by one LoadRecord
    load          (token, expert) pairs: a token that is routed to k experts counts k times. Real tokens only, never
                  padding, dummy or warm-up rows
    balancedness  mean / max of the load of ranks, per layer: 1 is perfect, and 1 / balancedness is how much longer the
                  most loaded rank works than the average one

The first layer of the example in `placement.py`, with 40, 80, 20 and 20 tokens for its experts:

    tokens[0]         40  80  20  20                  of experts 0 .. 3
    slot_load[0]      40  40 | 20  20 | 40   0        expert 1 is split over slots 1 and 4
    rank_load[0]        80   |   40   |   40
    balancedness[0]   mean 53.3 / max 80 = 0.667

Shape words: L = MoE layers, E = logical experts, R = ranks, P = slots.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_serve.eplb.placement import Placement
from moe_serve.errors import TraceError

Floats = NDArray[np.float64]
Phase = Literal["prefill", "decode", "mixed"]
PHASES: tuple[Phase, ...] = get_args(Phase)
MAX_EXACT = 2**53  # counts up to here are exact in float64 as well


class StepCounts(NamedTuple):
    """Counts of decode steps, of each rank its own.

    steps:    with rows
    requests: that these steps had rows of
    tokens:   that came out; more than requests where drafts were right
    experts:  that the rows were routed to, each once for a step and layer; 0: not counted
    """

    steps: int = 0
    requests: int = 0
    tokens: int = 0
    experts: int = 0


class DecodeCounts(NamedTuple):
    """Decode steps with drafts of tokens, and those without."""

    with_drafts: StepCounts = StepCounts()
    without: StepCounts = StepCounts()

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Self:
        """Returns the counts of NUM_DECODE_COUNTS numbers, as `numbers` has them. Raises TraceError for others."""
        numbers = list(numbers)
        if len(numbers) != NUM_DECODE_COUNTS or not all(type(n) is int and 0 <= n <= MAX_EXACT for n in numbers):
            raise TraceError(f"expected {NUM_DECODE_COUNTS} whole numbers of at least 0, found {numbers!r:.80}")
        half = len(StepCounts._fields)
        return cls(StepCounts(*numbers[:half]), StepCounts(*numbers[half:]))

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Returns what `to_json` has made. Raises TraceError for anything else."""
        try:
            return cls.of(content[kind][name] for kind in cls._fields for name in StepCounts._fields)
        except (KeyError, TypeError):
            raise TraceError(f"expected counts of steps with_drafts and without, found {content!r:.80}") from None

    @property
    def numbers(self) -> list[int]:
        """Returns all counts, those of steps with drafts first."""
        return [*self.with_drafts, *self.without]

    def to_json(self) -> dict[str, dict[str, int]]:
        return {"with_drafts": self.with_drafts._asdict(), "without": self.without._asdict()}


NO_DECODES = DecodeCounts()
NUM_DECODE_COUNTS = len(NO_DECODES.numbers)


@dataclass(frozen=True, eq=False)
class LoadRecord:
    """The load of one window of steps. Checked when built; arrays are read-only.

    first_step, num_steps: the window; steps of an engine epoch
    phase:         "prefill", "decode" or "mixed"
    tokens:        [L, E] int64, (token, expert) pairs routed to each expert in the window
    per_step:      [num_steps, L, E] int64, the same for each step; None = not recorded
    by_source:     [L, R, E] int64, the same by source rank; None = not recorded
    activations:   [L, E] int64, in how many batches the expert had at least one token; None = not recorded
    step_time_s:   mean measured time of a step with tokens; None = not recorded
    num_forwards:  steps with tokens; None = not recorded, all of them
    model_id:      which model, "" = unknown
    placement_version: version of the placement in use, None = unknown
    placement:     the placement in use, None = unknown
    decodes:       decode steps of all ranks, with drafts and without; None = not recorded
    Raises TraceError naming the field and the fix.
    """

    first_step: int
    num_steps: int
    phase: str
    tokens: NDArray[np.int64]
    per_step: NDArray[np.int64] | None = None
    by_source: NDArray[np.int64] | None = None
    activations: NDArray[np.int64] | None = None
    step_time_s: float | None = None
    num_forwards: int | None = None
    model_id: str = ""
    placement_version: int | None = None
    placement: Placement | None = None
    decodes: DecodeCounts | None = None

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise TraceError(f"phase is {self.phase!r}; give one of {', '.join(PHASES)}")
        if self.first_step < 0 or self.num_steps < 0:
            raise TraceError(
                f"first_step is {self.first_step} and num_steps {self.num_steps}; steps count from 0 and a window has "
                "at least 0 of them"
            )
        if max(self.first_step, self.num_steps) > MAX_EXACT:
            raise TraceError(f"first_step is {self.first_step} and num_steps {self.num_steps}; give at most 2^53")
        if self.step_time_s is not None and not 0 <= self.step_time_s < math.inf:
            raise TraceError(f"step_time_s is {self.step_time_s}; give seconds of at least 0, or None")
        if self.num_forwards is not None and not 0 <= self.num_forwards <= self.num_steps:
            raise TraceError(f"num_forwards is {self.num_forwards}; give 0 to num_steps ({self.num_steps}), or None")
        object.__setattr__(self, "tokens", checked_counts(self.tokens, "tokens", 2))
        num_layers, num_logical = self.tokens.shape
        expected = {
            "per_step": (self.num_steps, num_layers, num_logical),
            "by_source": (num_layers, None, num_logical),
            "activations": (num_layers, num_logical),
        }
        for name, shape in expected.items():
            value = getattr(self, name)
            if value is None:
                continue
            array = checked_counts(value, name, len(shape))
            if any(want not in (None, got) for want, got in zip(shape, array.shape, strict=True)):
                raise TraceError(f"{name} has shape {array.shape}, expected {shape} beside tokens {self.tokens.shape}")
            object.__setattr__(self, name, array)

    def active_steps(self) -> NDArray[np.int64] | None:
        """Returns in how many steps each expert had a token, [L, E] int64; None where the record cannot tell."""
        if self.activations is not None:
            return self.activations
        if self.per_step is not None:
            return np.asarray((self.per_step > 0).sum(axis=0))
        return (self.tokens > 0).astype(np.int64) if self.num_steps == 1 else None

    @property
    def activation_share(self) -> Floats | None:
        """Share of the steps with tokens in which each expert has some, [L, E]; None: not recorded."""
        return None if self.activations is None else np.minimum(self.activations / max(self.busy_steps, 1), 1.0)

    @property
    def busy_steps(self) -> int:
        """The number of steps that share the tokens: those with a forward where the record says it, else all."""
        return self.num_steps if self.num_forwards is None else self.num_forwards

    @property
    def num_layers(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_logical(self) -> int:
        return int(self.tokens.shape[1])


@dataclass(frozen=True, eq=False)
class LoadTrace:
    """Load records in order, and the model they are from.

    Iterating opens the source anew, so a trace may be larger than memory and may be read more than once.

    open_records:  starts one pass over the records
    num_logical:   E of every record
    moe_layer_ids: model layer of each row of the records
    topk:          experts per token; None = unknown
    model_id:      which model; "" = unknown
    source:        where the trace came from, for reports: a path and a format, or a description of a generator
    num_records:   how many records there are; None = not known before the end
    """

    open_records: Callable[[], Iterator[LoadRecord]]
    num_logical: int
    moe_layer_ids: tuple[int, ...]
    topk: int | None = None
    model_id: str = ""
    source: str = ""
    num_records: int | None = None

    def __iter__(self) -> Iterator[LoadRecord]:
        for index, record in enumerate(self.open_records()):
            if record.tokens.shape != (len(self.moe_layer_ids), self.num_logical):
                raise TraceError(
                    f"{self.source or 'trace'}, record {index}: tokens has shape {record.tokens.shape}, expected "
                    f"{(len(self.moe_layer_ids), self.num_logical)} as in the rest; split traces of different models"
                )
            yield record

    @classmethod
    def of(
        cls,
        records: Iterable[LoadRecord],
        moe_layer_ids: tuple[int, ...] = (),
        topk: int | None = None,
        model_id: str = "",
        source: str = "",
    ) -> "LoadTrace":
        """Returns a trace of records that are in memory already; at least one."""
        kept = tuple(records)
        if not kept:
            raise TraceError(f"{source or 'trace'} has no records; give at least one")
        ids = moe_layer_ids or tuple(range(kept[0].num_layers))
        return cls(lambda: iter(kept), kept[0].num_logical, ids, topk, model_id, source, len(kept))


def checked_counts(value: ArrayLike, name: str, ndim: int) -> NDArray[np.int64]:
    """Returns value as a read-only int64 array of ndim dimensions.

    Raises TraceError when it has another number of dimensions, is negative, NaN, fractional, or above 2^53.
    """
    array = np.asarray(value)
    if array.ndim != ndim or array.dtype.kind not in "iuf":
        raise TraceError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; give whole numbers with {ndim} dimensions"
        )
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.floor(array)).all()):
        raise TraceError(f"{name} holds NaN, infinity or fractions; counts are whole numbers")
    if array.size and (array.min() < 0 or array.max() > MAX_EXACT):
        raise TraceError(
            f"{name} ranges from {array.min()} to {array.max()}; counts lie between 0 and 2^53: check for overflow"
        )
    counts = np.array(array, dtype=np.int64)
    counts.setflags(write=False)
    return counts


def slot_load(tokens: NDArray[np.number], placement: Placement) -> Floats:
    """Returns the load of each slot, where replicas share evenly: tokens [L, E] -> [L, P] float64."""
    table = placement.physical_to_logical
    safe = np.where(table < 0, 0, table)
    load = np.take_along_axis(np.asarray(tokens, dtype=np.float64), safe, axis=1)
    load = load / np.take_along_axis(placement.replica_count, safe, axis=1)
    return np.where(table < 0, 0.0, load)


def rank_load(tokens: NDArray[np.number], placement: Placement) -> Floats:
    """Returns the load of each rank likewise: tokens [L, E] -> [L, R] float64."""
    load = slot_load(tokens, placement)
    by_rank: Floats = load.reshape(placement.num_layers, placement.num_ranks, placement.slots_per_rank).sum(axis=2)
    return by_rank


def own_load(tokens: NDArray[np.number], placement: Placement) -> Floats:
    """Returns the load of each rank that begins on it, where ranks take their own replica of an expert first: [L, R].

    tokens: [L, E] of all ranks, an equal part from each. Other ranks spread theirs evenly over all replicas, so the
    load of slots is that of `slot_load`
    """
    held = np.sort(placement.by_rank, axis=2)
    first = held >= 0
    first[:, :, 1:] &= held[:, :, 1:] != held[:, :, :-1]  # a second replica on the same rank adds nothing
    layers = np.arange(placement.num_layers)[:, None, None]
    load = np.asarray(tokens, dtype=np.float64)[layers, np.maximum(held, 0)]
    own: Floats = np.where(first, load, 0.0).sum(axis=2) / placement.num_ranks
    return own


def rank_traffic(by_source: NDArray[np.number], placement: Placement) -> Floats:
    """Returns the load that goes from rank to rank, over all layers: by_source [L, R, E] -> [R, R] float64.

    Lines are the ranks of the tokens, columns those of the experts, whose replicas share evenly.
    """
    ranks = placement.num_ranks
    traffic = np.zeros((ranks, ranks))
    for tokens, table, count in zip(by_source, placement.physical_to_logical, placement.replica_count, strict=True):
        each = tokens / np.maximum(count, 1)  # of a replica
        traffic += np.where(table < 0, 0.0, each[:, table]).reshape(ranks, ranks, -1).sum(axis=2)
    return traffic


def balancedness(load: Floats, live_ranks: NDArray[np.integer] | None = None) -> Floats:
    """Returns mean / max over ranks: load [..., R] -> [...] float64; 1 where there is no load at all.

    live_ranks: ids of the ranks that take part; None = all. Excluded ranks carry nothing and must not raise the mean.
    """
    taking_part = load if live_ranks is None else load[..., live_ranks]
    top = taking_part.max(axis=-1)
    return np.where(top > 0, taking_part.mean(axis=-1) / np.where(top > 0, top, 1.0), 1.0)
