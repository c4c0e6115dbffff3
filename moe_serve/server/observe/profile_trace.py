"""A profile of all ranks as a trace in Chrome's JSON format, which ui.perfetto.dev opens. Pure functions, torch-free.

Each rank is a process with one track: its steps, and below each step its parts. The front end is a process with the
requests that ended meanwhile. Ranks of the front end's host read the same monotonic clock. Those of other hosts leave
the exchange of a step together with the others, up to the time of a message: the median difference over all steps that
both have recorded sets their clock. Without a common step the hosts' wall clocks do, and the trace says so.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.protocol.messages import STEP_WORDS

Int64Array = NDArray[np.int64]
_STEP, _PHASE, _BEGAN, _AGREED, _ENDED, _DECODE, _PREFILL, _ROUNDS, _OVERLAP, _PLACEMENT, _WAITED = range(STEP_WORDS)
_BETWEEN = "between"


@dataclass(frozen=True)
class RankProfile:
    """What a rank has recorded; times are in ns of its own monotonic clock.

    steps: [n, STEP_WORDS] int64, see Profiler.add;  turns: [n, 2] int64: begin, and index into `parts`
    clock: which monotonic clock it is; equal on one host. wall_ns: wall clock less this one
    """

    rank: int
    steps: Int64Array
    turns: Int64Array
    parts: Sequence[str]
    phases: Sequence[str]
    clock: str
    wall_ns: int
    num_left_out: int = 0
    turns_full: bool = False

    @classmethod
    def of(cls, rank: int, facts: dict[str, Any]) -> "RankProfile":
        """Returns the profile in an answer's facts. Raises ValueError where they do not fit together."""
        steps = np.frombuffer(facts["steps"], np.int64).reshape(-1, STEP_WORDS)
        turns = np.frombuffer(facts["turns"], np.int64).reshape(-1, 2)
        parts, phases = list(facts["parts"]), list(facts["phases"])
        if turns.size and not (turns[:, 1].min() >= 0 and turns[:, 1].max() < len(parts)):
            raise ValueError(f"rank {rank} names a part that is none")
        return cls(rank, steps, turns, parts, phases, str(facts["clock"]), int(facts["wall_ns"]),
                   int(facts["num_left_out"]), bool(facts["turns_full"]))  # fmt: skip


@dataclass(frozen=True)
class RequestSpan:
    """When a request came, had its first token, and ended, in ns of the front end's clock. first_ns: None = none"""

    request_id: str
    rank: int | None
    came_ns: int
    first_ns: int | None
    ended_ns: int
    num_prompt: int
    num_output: int
    finish: str


@dataclass(frozen=True)
class Offset:
    """What is added to a rank's times. how: it was found;  spread_ns: half the middle half's range"""

    ns: int
    how: str
    spread_ns: int = 0


def align(ranks: Sequence[RankProfile], clock: str, wall_ns: int) -> list[Offset]:
    """Returns the offset of each rank to the front end's clock. clock, wall_ns: the front end's, as of a rank"""
    here = [bool(clock) and rank.clock == clock for rank in ranks]
    by_wall = [Offset(rank.wall_ns - wall_ns, "wall clocks of the hosts") for rank in ranks]
    # One rank sets the clock of its host; any that shares the front end's host, else the first.
    reference = here.index(True) if any(here) else 0
    offsets = []
    for rank, is_here, wall in zip(ranks, here, by_wall, strict=True):
        if is_here:
            offsets.append(Offset(0, "same host"))
            continue
        first, base = ranks[reference], Offset(0, "") if here[reference] else by_wall[reference]
        differences = _differences(first, rank)
        if rank is first or not differences.size:
            offsets.append(wall)
            continue
        low, middle, high = np.quantile(differences, [0.25, 0.5, 0.75])
        how = f"exchanges shared with rank {first.rank}" + (
            "" if here[reference] else ", whose clock is by wall clocks"
        )
        offsets.append(Offset(int(middle) + base.ns, how, int(high - low) // 2))
    return offsets


def _differences(first: RankProfile, other: RankProfile) -> Int64Array:
    """Returns by how much the first rank's clock is ahead when both leave an exchange, for each step that both have."""
    _, mine, theirs = np.intersect1d(first.steps[:, _STEP], other.steps[:, _STEP], return_indices=True)
    differences: Int64Array = first.steps[mine, _AGREED] - other.steps[theirs, _AGREED]
    return differences


def events(
    ranks: Sequence[RankProfile], offsets: Sequence[Offset], requests: Sequence[RequestSpan]
) -> Iterator[dict[str, Any]]:
    """Yields the events of a trace; times in us since the first. Process 0 is the front end, 1 + r rank r."""
    begins = [int(rank.steps[0, _BEGAN]) + offset.ns for rank, offset in zip(ranks, offsets, strict=True)
              if len(rank.steps)]  # fmt: skip
    origin_ns = min([*begins, *(span.came_ns for span in requests)], default=0)
    yield _named(0, "front end")
    for rank in ranks:
        yield _named(1 + rank.rank, f"rank {rank.rank}")
    for span in requests:
        yield from _request(span, origin_ns)
    for rank, offset in zip(ranks, offsets, strict=True):
        yield from _steps(rank, origin_ns - offset.ns)
        yield from _parts(rank, origin_ns - offset.ns)


def _named(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _request(span: RequestSpan, origin_ns: int) -> Iterator[dict[str, Any]]:
    common = {"cat": "request", "id": span.request_id, "pid": 0, "tid": 0}
    shown = {"rank": span.rank, "prompt_tokens": span.num_prompt, "output_tokens": span.num_output}
    began, ended = _us(span.came_ns, origin_ns), _us(span.ended_ns, origin_ns)
    yield {**common, "ph": "b", "name": "request", "ts": began, "args": {**shown, "finish": span.finish}}
    if span.first_ns is not None:
        yield {**common, "ph": "n", "name": "first token", "ts": _us(span.first_ns, origin_ns)}
    yield {**common, "ph": "e", "name": "request", "ts": ended}


def _steps(rank: RankProfile, origin_ns: int) -> Iterator[dict[str, Any]]:
    waited_ns = None
    for row in rank.steps.tolist():
        phase = rank.phases[row[_PHASE]] if 0 <= row[_PHASE] < len(rank.phases) else "idle"
        args = {"step": row[_STEP], "decode_rows": row[_DECODE], "prefill_rows": row[_PREFILL],
                "rounds": row[_ROUNDS], "overlap": bool(row[_OVERLAP])}  # fmt: skip
        if waited_ns is not None:
            args["waited_us"] = (row[_WAITED] - waited_ns) / 1000
        waited_ns = row[_WAITED]
        common = {"pid": 1 + rank.rank, "tid": 1, "ts": _us(row[_BEGAN], origin_ns)}
        duration = _us(row[_ENDED], row[_BEGAN])
        yield {**common, "ph": "X", "cat": "step", "name": phase, "dur": duration, "args": args}
        rows = {"decode": row[_DECODE], "prefill": row[_PREFILL]}
        yield {**common, "ph": "C", "name": f"rows of rank {rank.rank}", "args": rows}
        if row[_PLACEMENT]:
            name = f"placement {row[_PLACEMENT]} serves"
            yield {**common, "ph": "i", "s": "p", "cat": "experts", "name": name, "ts": _us(row[_AGREED], origin_ns)}


def _parts(rank: RankProfile, origin_ns: int) -> Iterator[dict[str, Any]]:
    """A part lasts to the next turn; the last one has no end."""
    turns = rank.turns.tolist()
    for (began_ns, part), (ended_ns, _) in pairwise(turns):
        if rank.parts[part] != _BETWEEN:
            yield {
                "ph": "X", "cat": "part", "name": rank.parts[part], "pid": 1 + rank.rank, "tid": 1,
                "ts": _us(began_ns, origin_ns), "dur": _us(ended_ns, began_ns),
            }  # fmt: skip


def _us(ns: int, origin_ns: int) -> float:
    """Returns the time since the origin in us, from which readers get the same ns by rounding and by cutting off.

    Perfetto's trace_processor has done both; a part that ends 1 ns after its step would not lie inside it.
    """
    us = (ns - origin_ns) / 1000
    return us if int(us * 1000) == ns - origin_ns else math.nextafter(us, math.inf)


def about(ranks: Sequence[RankProfile], offsets: Sequence[Offset]) -> dict[str, Any]:
    """Returns what a reader must know of the trace: how clocks were set, and what did not fit."""
    return {
        f"rank {rank.rank}": {
            "clock": offset.how,
            "clock_spread_us": offset.spread_ns / 1000,
            "steps": len(rank.steps),
            "steps_left_out": rank.num_left_out,
            "parts_end_early": rank.turns_full,
        }
        for rank, offset in zip(ranks, offsets, strict=True)
    }
