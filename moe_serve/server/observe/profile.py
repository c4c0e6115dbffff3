"""`/start_profile` and `/stop_profile`: a trace of all ranks' steps, written to server.profile_dir. Torch-free.

The file's name is ours; no request says where anything is written. The ranks stop by themselves at the bounds below.
"""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import Answer, Profile
from moe_serve.errors import MoeServeError, RequestError
from moe_serve.process_facts import boot_id
from moe_serve.server.edge.body import Bodies
from moe_serve.server.edge.errors import error_body, json_bytes
from moe_serve.server.edge.guard import ADMIN
from moe_serve.server.edge.json_fields import Fields, parse_object, real_number
from moe_serve.server.observe.profile_trace import RankProfile, RequestSpan, about, align, events
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.open_request import OpenRequest
from moe_serve.server.requests.request_stats import finish_of

DEFAULT_S, LONGEST_S = 10.0, 60.0
MOST_STEPS, MOST_TURNS = 50_000, 300_000  # of all ranks together: a file of some tens of MiB
MOST_REQUESTS = 20_000
_EVENTS_AT_ONCE = 500  # written without a pause for other threads


class Spans:
    """The requests that end while a profile runs."""

    def __init__(self) -> None:
        self.is_on = False
        self.kept: list[RequestSpan] = []

    def add(self, request: OpenRequest) -> None:
        """Notes a request that has just ended."""
        if not self.is_on or len(self.kept) >= MOST_REQUESTS:
            return
        first_s = request.first_token_s
        self.kept.append(
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
    spans, busy = Spans(), asyncio.Lock()
    bridge.book.at_end.append(spans.add)
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
            fields = Fields(parse_object(body) if body.strip() else {}, "", {}, {"output_dir": "duration_s"})
        duration_s = fields.take("duration_s", _duration)
        fields.refuse_the_rest()
        check_folder()
        num_ranks = config.parallel.num_ranks
        limits = DEFAULT_S if duration_s is None else duration_s, MOST_STEPS // num_ranks, MOST_TURNS // num_ranks
        async with busy:
            refusal = _refusal(await bridge.profile(Profile(0, "start", *limits)))
            if refusal is None:
                spans.is_on, spans.kept = True, []
        return refusal or _json({"status": "ok", "message": "Start profiling.", "duration_s": limits[0]})

    @app.post("/stop_profile", tags=[ADMIN])
    async def stop() -> Response:
        """Ends the profile and writes it; the answer names the file in server.profile_dir. ui.perfetto.dev opens it."""
        into = check_folder()
        async with busy:
            answers = await bridge.profile(Profile(0, "stop"))
            spans.is_on, requests = False, spans.kept
            if (refusal := _refusal(answers)) is not None:
                return refusal
            # In a thread, a few events at a time: requests go on meanwhile.
            path = await asyncio.to_thread(write_profile, into, answers, requests)
        return _json({"status": "ok", "message": "Stop profiling.", "file": path.name, "num_ranks": len(answers)})


def write_profile(folder: Path, answers: Sequence[Answer], requests: Sequence[RequestSpan]) -> Path:
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
    return _json(error_body("; ".join(refused), 409), 409) if refused else None


def _duration(name: str, value: Any) -> float:
    seconds = real_number(name, value)
    if not 0 < seconds <= LONGEST_S:
        raise RequestError(f"{name} is {seconds:g}, expected more than 0 and at most {LONGEST_S:g} seconds", field=name)
    return seconds


def _json(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")
