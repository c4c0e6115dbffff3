"""Profiles on request: ranks record their steps, and a trace in Chrome's JSON form shows them beside the requests.

The server chooses the file's name; no request says where anything is written. Ranks stop at the bounds below.

In ui.perfetto.dev each rank is a process with one track: its steps, and below each step its parts. The front end is a
process with the requests that ended meanwhile. Ranks of the front end's host read the same monotonic clock. For ranks
of other hosts, all ranks leave the exchange of a step together, up to the time of a message: the median difference over
the steps that both have recorded gives the offset. Without a common step the hosts' wall clocks do, and the trace says
so.
"""

import asyncio
import contextlib
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import FastAPI, Request, Response
from msgspec import Meta
from numpy.typing import NDArray

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import STEP_WORDS, Answer, Profile
from moe_serve.errors import MoeServeError, RequestError
from moe_serve.process_facts import boot_id
from moe_serve.server.edge.body import Bodies, Body, read_body
from moe_serve.server.edge.errors import error_json, json_bytes, json_response
from moe_serve.server.edge.guard import ADMIN
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.ranks.request_book import EndListener
from moe_serve.server.requests.open_request import OpenRequest
from moe_serve.server.requests.request_stats import finish_of

DEFAULT_S, LONGEST_S = 10.0, 60.0
MOST_STEPS, MOST_TURNS = 50_000, 300_000  # of all ranks together: a file of some tens of MiB
MOST_REQUESTS = 20_000
_EVENTS_AT_ONCE = 500  # written without a pause for other threads


class StartProfileBody(Body):
    """How long the profile runs at most."""

    other_words: ClassVar[Mapping[str, str]] = {"output_dir": "duration_s"}

    duration_s: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=LONGEST_S,
                extra={"expected": f"more than 0 and at most {LONGEST_S:g} seconds"},
                extra_json_schema={"default": DEFAULT_S},
            ),
        ]
        | None
    ) = None


class Spans:
    """The requests that ended between `start` and `stop`. at_end: the book's listeners"""

    def __init__(self, at_end: list[EndListener]) -> None:
        self._at_end = at_end
        self._kept: list[RequestSpan] = []

    def start(self) -> None:
        """Begins anew."""
        self.stop()
        self._kept = []
        self._at_end.append(self.add)

    def stop(self) -> "list[RequestSpan]":
        """Listens no more, and returns the first MOST_REQUESTS at most."""
        if self.add in self._at_end:
            self._at_end.remove(self.add)
        return self._kept

    def add(self, request: OpenRequest) -> None:
        """Notes a request that has just ended."""
        if len(self._kept) >= MOST_REQUESTS:
            return
        first_s = request.first_token_s
        self._kept.append(
            RequestSpan(
                request.request_id,
                request.rank,
                int(1e9 * request.submitted_s),
                None if first_s is None else int(1e9 * first_s),
                time.monotonic_ns(),
                len(request.spec.prompt_ids),
                request.num_output,
                finish_of(request),
            )
        )


def add_profile(app: FastAPI, config: ServeConfig, bridge: Bridge, bodies: Bodies) -> None:
    """Adds the two routes."""
    spans, busy = Spans(bridge.book.at_end), asyncio.Lock()
    folder = config.server.profile_dir

    def check_folder() -> Path:
        if folder is None:
            raise RequestError(
                "this server writes no profiles; start it with server.profile_dir (--profile-dir), the folder for them"
            )
        return Path(folder)

    @app.post("/start_profile", tags=[ADMIN])
    async def start(request: Request) -> Response:
        """Records the steps of all ranks, for duration_s seconds (10) at most, until /stop_profile."""
        async with bodies.read(request) as body:
            duration_s = read_body(body, StartProfileBody, may_be_empty=True).duration_s
        check_folder()
        num_ranks = config.parallel.num_ranks
        limits = DEFAULT_S if duration_s is None else duration_s, MOST_STEPS // num_ranks, MOST_TURNS // num_ranks
        async with busy:
            refusal = _refusal(await bridge.profile(Profile(0, "start", *limits)))
            if refusal is None:
                spans.start()
        return refusal or json_response({"status": "ok", "message": "Start profiling.", "duration_s": limits[0]})

    @app.post("/stop_profile", tags=[ADMIN])
    async def stop() -> Response:
        """Ends the profile and writes it; the answer names the file in server.profile_dir. ui.perfetto.dev opens it."""
        into = check_folder()
        async with busy:
            answers = await bridge.profile(Profile(0, "stop"))
            requests = spans.stop()
            if (refusal := _refusal(answers)) is not None:
                return refusal
            # In a thread, a few events at a time: requests go on meanwhile.
            path = await asyncio.to_thread(write_profile, into, answers, requests)
        return json_response(
            {"status": "ok", "message": "Stop profiling.", "file": path.name, "num_ranks": len(answers)}
        )


def write_profile(folder: Path, answers: Sequence[Answer], requests: "Sequence[RequestSpan]") -> Path:
    """Writes a trace of what ranks answered, and returns its path. Raises MoeServeError where that fails."""
    try:
        ranks = [RankProfile.of(answer.rank, answer.facts) for answer in answers]
    except (KeyError, ValueError, TypeError) as error:
        raise MoeServeError(f"a rank's profile cannot be read: {error}; its version is another one, perhaps") from None
    offsets = align(ranks, boot_id(), time.time_ns() - time.monotonic_ns())
    name = f"moe_serve_profile_{time.strftime('%Y%m%d_%H%M%S')}_{uuid.uuid4().hex[:8]}.json"
    part = folder / f"{name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(b'{"displayTimeUnit":"ms","otherData":' + json_bytes(about(ranks, offsets)))
            file.write(b',"traceEvents":[')
            lines: list[bytes] = []
            before = b"\n"
            for event in events(ranks, offsets, requests):
                lines.append(json_bytes(event))
                if len(lines) == _EVENTS_AT_ONCE:
                    file.write(before + b",\n".join(lines))
                    lines, before = [], b",\n"
                    time.sleep(0)
            file.write((before if lines else b"") + b",\n".join(lines) + b"\n]}\n")
        part.rename(folder / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise MoeServeError(
            f"the profile cannot be written to {folder}: {error.strerror}; give server.profile_dir a folder that this "
            "process may write to, with space"
        ) from None
    return folder / name


def _refusal(answers: Sequence[Answer]) -> Response | None:
    refused = [f"rank {answer.rank}: {answer.text}" for answer in answers if not answer.ok]
    return error_json(409, "; ".join(refused)) if refused else None


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
    """Added to a rank's times. how: it was found;  spread_ns: half the interquartile range"""

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
    """Returns how far the first rank's clock is ahead as both leave an exchange, for each step that both have."""
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
    """Yields the parts. Each lasts until the next turn; the last one has no end and is left out."""
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
