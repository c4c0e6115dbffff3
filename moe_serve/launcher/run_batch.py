"""Files of requests in the form of OpenAI's Batch API, answered by the server's own application without its port.

Form: platform.openai.com/docs/api-reference/batch. A line is {"custom_id", "method": "POST", "url", "body"}; an answer
is {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}. Answers stand in the order in
which they end.
"""

import asyncio
import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from moe_serve.config import ServeConfig
from moe_serve.errors import ConfigError, LaunchError, MoeServeError
from moe_serve.launcher.background import BackgroundRanks, OrderlyEnd
from moe_serve.launcher.preflight import load_tokenizer, look_for_files
from moe_serve.server.app import make_app
from moe_serve.server.edge.errors import error_body
from moe_serve.server.edge.gate import GENERATING
from moe_serve.server.ranks.bridge import Bridge

_BUSY = (429, 503)  # a queue that is full, ranks that start again
_BUSY_PAUSE_S = 0.2
_MOST_REFUSALS = 3  # of one line, by ranks that serve: it is what they cannot do
_NO_CLIENTS = {  # settings of a server that are about its clients
    "api_key_file": None, "admin_api_key_file": None, "rpm_limit": None, "tpm_limit": None,
    "max_parallel_requests": None, "api_workers": 1, "request_deadline_s": None, "queue_deadline_s": None,
    "degrade": (),
}  # fmt: skip
_KEPT = "what is answered is kept: run the same command again to go on"
Progress = Callable[[int, int], None]  # answered lines, all lines


class Line(msgspec.Struct, frozen=True):
    """A request of the file. Its body stays JSON."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Status(msgspec.Struct, frozen=True):
    status_code: int = 200


class _AnswerOf(msgspec.Struct, frozen=True):
    """What is read of an answer that is there already, and which no request has."""

    custom_id: str
    id: str
    response: _Status


@dataclass(frozen=True)
class Answer:
    """status: of HTTP;  body: JSON"""

    status: int
    body: bytes


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the requests of a file. Raises ConfigError with the number of the first line that is none."""
    seen: dict[str, int] = {}
    for number, text in _lines_of(path):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f'{path}, line {number}: {error}; a line is {{"custom_id": "1", "method": "POST", '
                '"url": "/v1/chat/completions", "body": {…}}'
            ) from None
        if line.method != "POST" or line.url not in GENERATING:
            raise ConfigError(
                f"{path}, line {number}: {line.method} {line.url[:60]} is not served in a batch; expected POST to "
                f"{', '.join(sorted(GENERATING))}"
            )
        if not bytes(line.body).lstrip().startswith(b"{"):
            raise ConfigError(f"{path}, line {number}: body is no object")
        if line.custom_id in seen:
            raise ConfigError(
                f"{path}, line {number}: custom_id {line.custom_id[:60]!r} is that of line {seen[line.custom_id]}; "
                "give each line its own"
            )
        seen[line.custom_id] = number
        yield line


@dataclass(frozen=True)
class Answered:
    """What a file of answers holds.

    ids:       of requests with an answer
    refused:   of those that no rank could serve, which are asked again
    num_bytes: of its whole lines
    """

    ids: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    num_bytes: int = 0


def read_answered(path: Path) -> Answered:
    """Returns what a file holds; nothing if there is none.

    Raises ConfigError for a file of something else, which is not written to.
    """
    ids: dict[bool, set[str]] = {False: set(), True: set()}  # by whether it was refused
    num_bytes = 0
    for number, text in _lines_of(path) if path.exists() else ():
        if not text.endswith(b"\n"):  # its writer was killed
            break
        num_bytes += len(text)
        if not text.strip():
            continue
        try:
            answer = msgspec.json.decode(text, type=_AnswerOf)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ConfigError(f"{path}, line {number}: this is no answer of a batch; give another file to -o") from None
        ids[answer.response.status_code == 503].add(answer.custom_id)
    return Answered(frozenset(ids[False]), frozenset(ids[True]), num_bytes)


def _opened(path: Path, found: Answered) -> RawIOBase:
    """Returns a file open behind the answers that stay. Raises ConfigError where it cannot be written."""
    num_bytes, path = found.num_bytes, path.resolve()
    try:
        if found.refused:
            with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
                kept = Path(folder) / path.name
                with kept.open("wb") as file:
                    for _, text in _lines_of(path):
                        if text.endswith(b"\n") and text.strip() and not _is_refused(text):
                            file.write(text)
                num_bytes = kept.stat().st_size
                kept.replace(path)
        opened = path.open("r+b" if path.exists() else "wb", buffering=0)
        opened.truncate(num_bytes)
        opened.seek(num_bytes)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from None
    return opened


def _is_refused(text: bytes) -> bool:
    return msgspec.json.decode(text, type=_AnswerOf).response.status_code == 503


def _lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines with their numbers from 1."""
    try:
        with path.open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None


def run_batch(config: ServeConfig, source: Path, target: Path, api_key: str | None, progress: Progress) -> int:
    """Answers the lines of a file that have no answer yet, and returns how many answers are errors.

    api_key: where the environment has some
    Raises ConfigError for files that are none, and LaunchError where the system ends early: what is answered is kept.
    """
    ids = [line.custom_id for line in read_lines(source)]
    found = read_answered(target)
    answered, strange = found.ids, (found.ids | found.refused).difference(ids)
    if strange:
        other = min(strange)
        raise ConfigError(
            f"{target} has an answer to {other[:60]!r}, which is not in {source}; give another file to -o"
        )
    if len(answered) == len(ids):
        progress(len(ids), len(ids))
        return 0
    look_for_files(config)
    config = config.model_copy(update={"server": config.server.model_copy(update=_NO_CLIENTS)})
    tokenizer = load_tokenizer(config)
    with _opened(target, found) as file:
        ranks = BackgroundRanks(config, tokenizer, True)
        end = OrderlyEnd(
            lambda: ranks.give_up("the process was asked to end (SIGTERM)"), config.server.drain_deadline_s
        )
        try:
            with end.call():
                app = make_app(config, ranks.bridge, tokenizer)
                lines = (line for line in read_lines(source) if line.custom_id not in answered)
                batch = _Batch(app, ranks.bridge, lines, file, api_key, end)
                num_open = config.engine.max_running_requests * config.parallel.num_ranks
                return ranks.call(batch.run(num_open, lambda num: progress(len(answered) + num, len(ids))))
        finally:
            end.close()
            ranks.close()


class _Batch:
    """Sends lines to an application, and writes what it answers."""

    def __init__(
        self, app: Any, bridge: Bridge, lines: Iterator[Line], file: RawIOBase, api_key: str | None, end: OrderlyEnd
    ):
        self._app = app
        self._bridge = bridge
        self._lines = lines
        self._file = file
        self._end = end
        self._headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        if api_key is not None:
            self._headers.append((b"authorization", f"Bearer {api_key}".encode()))
        self._num_answered = 0
        self._num_errors = 0

    async def run(self, num_open: int, advance: Callable[[int], None]) -> int:
        """Returns how many answers are errors. num_open: lines at a time;  advance: called with answered lines

        Raises LaunchError where the system, or this process, is to end, and where the file cannot be written.
        """
        try:
            async with self._app.router.lifespan_context(self._app), asyncio.TaskGroup() as group:
                for _ in range(num_open):
                    group.create_task(self._answer_lines(advance))
        except* MoeServeError as problems:
            raise problems.exceptions[0] from None
        if self._end.is_asked and next(self._lines, None) is not None:
            raise LaunchError(f"the process was asked to end; {_KEPT}")
        return self._num_errors

    async def _answer_lines(self, advance: Callable[[int], None]) -> None:
        while not self._end.is_asked and (line := next(self._lines, None)) is not None:
            answer = await self._answer(line)
            self._write(line, answer)
            self._num_answered += 1
            self._num_errors += answer.status != 200
            advance(self._num_answered)

    async def _answer(self, line: Line) -> Answer:
        body = bytes(line.body)
        if _asks_for_a_stream(body):
            return _refused("stream is true, but a batch has whole answers; leave it out", 400)
        num_refusals = 0
        while True:
            try:
                answer = await ask(self._app, line.url, body, self._headers)
            except Exception as error:
                return _refused(f"{type(error).__name__}: {str(error)[:300]}", 500)
            if answer.status not in _BUSY:
                return answer
            if not self._bridge.is_restarting and answer.status == 503:
                problem = self._bridge.problem()
                if problem is not None:
                    raise LaunchError(f"{problem}; {_KEPT}")
                num_refusals += 1
                if num_refusals == _MOST_REFUSALS:
                    return answer
            await self._bridge.wait_for_restart()
            await asyncio.sleep(_BUSY_PAUSE_S)

    def _write(self, line: Line, answer: Answer) -> None:
        value = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": {
                "status_code": answer.status,
                "request_id": uuid.uuid4().hex,
                "body": msgspec.Raw(answer.body),
            },
            "error": None,
        }
        text = memoryview(msgspec.json.encode(value) + b"\n")
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError as error:  # such as a full disk
            raise LaunchError(f"the answers cannot be written ({error.strerror}); {_KEPT}") from None


def _refused(message: str, status: int) -> Answer:
    return Answer(status, msgspec.json.encode(error_body(message, status)))


def _asks_for_a_stream(body: bytes) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(body).get("stream") is True
    return False


async def ask(app: ASGIApp, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> Answer:
    """Returns an ASGI application's answer to a POST."""
    sent = False
    status, parts = 0, list[bytes]()

    async def receive() -> Message:
        nonlocal sent
        if sent:  # whoever waits for the client to leave waits for ever
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", os.getpid()), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return Answer(status, b"".join(parts))
