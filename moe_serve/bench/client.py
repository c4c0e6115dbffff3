"""Sends one request and notes when its tokens came. The HTTP client is aiohttp, which vLLM's tool uses as well.

What each endpoint takes and answers, bodies of requests and events of its stream, stands below as pure functions.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from moe_serve.bench.load import Ask
from moe_serve.errors import LaunchError

if TYPE_CHECKING:
    import aiohttp

_LARGEST_EVENT = 16 << 20
_LARGEST_ERROR = 1 << 16
_METRICS_S = 5.0  # for an answer


@dataclass
class Outcome:
    """The course of one request. Times are seconds since the first request was due, unless said otherwise.

    due_s, sent_s:  when it should have been sent, and was
    chunk_s:        when each chunk with output came;  end_s: when the stream ended, or failed
    error:          its kind, such as "HTTP 429"; None = complete;  detail: what the server said
    retry_after_s:  what a refusal asked for, in seconds; None = nothing
    num_output:     tokens as the server counts them, else chunks: is_counted
    route:          where the request began, of servers with prefill ranks that say so
    """

    number: int
    domain: str
    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    error: str | None = None
    detail: str = ""
    retry_after_s: float | None = None
    num_prompt: int | None = None
    num_output: int = 0
    num_cached: int | None = None
    route: str | None = None
    is_counted: bool = False

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first one; None for an output of one token."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s


class Client:
    """Asks one endpoint of one server. An asynchronous context manager."""

    def __init__(self, base_url: str, endpoint: str, options: "Options", api_key: str | None, timeout_s: float):
        at = base_url.rstrip("/").removesuffix("/v1")
        self._url, self._metrics_url = at + PATHS[endpoint], at + "/metrics"
        self._endpoint = endpoint
        self._options = options
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        headers = {"content-type": "application/json"}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        connector = aiohttp.TCPConnector(limit=0)  # else requests would wait here, unseen
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def metrics(self) -> str:
        """Returns what the server says at /metrics; "" where it says nothing."""
        import aiohttp

        assert self._session is not None
        try:
            async with self._session.get(
                self._metrics_url, timeout=aiohttp.ClientTimeout(total=_METRICS_S)
            ) as response:
                if response.status != 200:
                    return ""
                return (await _body(response, _LARGEST_EVENT)).decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError, TimeoutError):
            return ""

    async def ask(self, ask: Ask, due_s: float, begin_s: float) -> Outcome:
        """Returns how a request went; never raises for what a server or a network does. begin_s: of the clock"""
        import aiohttp

        assert self._session is not None
        body = body_of(self._endpoint, ask, self._options)
        outcome = Outcome(ask.number, ask.domain, due_s, sent_s=time.monotonic() - begin_s)
        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status == 200:
                    await self._read(response, outcome, begin_s)
                else:
                    outcome.error = f"HTTP {response.status}"
                    outcome.retry_after_s = _seconds(response.headers.get("retry-after"))
                    outcome.detail = error_text(await _body(response, _LARGEST_ERROR))
        except TimeoutError:
            outcome.error, outcome.detail = "timeout", f"no end within {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            outcome.error, outcome.detail = "no connection", str(error)[:200]
        except aiohttp.ClientPayloadError as error:
            outcome.error, outcome.detail = "cut stream", str(error)[:200]
        except (aiohttp.ClientError, OSError) as error:
            outcome.error, outcome.detail = "broken connection", f"{type(error).__name__}: {error}"[:200]
        except ValueError as error:
            outcome.error, outcome.detail = "bad event", str(error)[:200]
        except asyncio.CancelledError:
            outcome.error, outcome.detail = "interrupted", "the run was ended before it"
        outcome.end_s = time.monotonic() - begin_s
        return outcome

    async def _read(self, response: "aiohttp.ClientResponse", outcome: Outcome, begin_s: float) -> None:
        read, has_end = _read_native if self._endpoint == "generate" else _read_openai, False
        async for data in _events(response):
            now_s = time.monotonic() - begin_s
            if data == b"[DONE]":
                has_end = True
                continue
            event = read(data)
            if event.error is not None:
                outcome.error, outcome.detail = "error in the stream", event.error
                return
            has_end |= event.is_end
            if event.has_output:
                outcome.chunk_s.append(now_s)
            if event.num_prompt is not None:
                outcome.num_prompt = event.num_prompt
            if event.num_cached is not None:
                outcome.num_cached = event.num_cached
            if event.route is not None:
                outcome.route = event.route
            if event.num_output is not None:
                outcome.num_output, outcome.is_counted = event.num_output, True
        if not has_end:
            outcome.error, outcome.detail = "cut stream", "it ended without a finish reason and without [DONE]"
        elif not outcome.chunk_s:
            outcome.error, outcome.detail = "no output", "the stream ended without any"
        if not outcome.is_counted:
            outcome.num_output = len(outcome.chunk_s)


async def _body(response: "aiohttp.ClientResponse", most: int) -> bytes:
    """Returns the body, or its first bytes. most: of them"""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) >= most:
            break
    return bytes(body[:most])


async def _events(response: "aiohttp.ClientResponse") -> AsyncIterator[bytes]:
    """Yields the data of each server-sent event, however the network cuts them; events of one line, as servers send."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(rest) > _LARGEST_EVENT:
            raise ValueError(f"an event is larger than {_LARGEST_EVENT >> 20} MiB")
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _seconds(retry_after: str | None) -> float | None:
    """Returns the seconds of a Retry-After header; None for none, and for a date, which model servers do not send."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdigit() else None


async def model_of(base_url: str, api_key: str | None) -> str:
    """Returns the first model that a server lists.

    Raises LaunchError when nothing answers there, or what answers lists none.
    """
    import aiohttp

    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        timeout = aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{root}/v1/models") as response,
        ):
            if response.status != 200:
                text = error_text(await _body(response, _LARGEST_ERROR))
                raise LaunchError(f"{root}/v1/models answers {response.status} ({text}); set --model or the API key")
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise LaunchError(f"nothing serves at {root} ({error}); start a server, or set --base-url") from None
    except (ValueError, LookupError, TypeError):
        raise LaunchError(f"{root}/v1/models does not list models as OpenAI does; set --model") from None


PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}


@dataclass(frozen=True)
class Options:
    """Settings of every request. extra: fields of the body that win over ours"""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Event:
    """One event of a stream. Counts are totals so far; None = not given.

    has_output: it brings output;  is_end: the output is complete
    """

    has_output: bool = False
    is_end: bool = False
    error: str | None = None
    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None
    route: str | None = None


def body_of(endpoint: str, ask: Ask, options: Options) -> bytes:
    """Returns the body of a request for a stream."""
    if endpoint == "generate":
        params = {"max_new_tokens": ask.max_tokens, "temperature": options.temperature}
        if options.ignore_eos:
            params["ignore_eos"] = True
        body: dict[str, Any] = {"text": ask.prompt, "stream": True, "sampling_params": params}
    else:
        body = {
            "model": options.model,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if endpoint == "chat":
            body |= {"messages": [{"role": "user", "content": ask.prompt}], "max_completion_tokens": ask.max_tokens}
        else:
            body |= {"prompt": ask.prompt, "max_tokens": ask.max_tokens}
        if options.ignore_eos:
            body["ignore_eos"] = True
    return json.dumps(body | dict(options.extra)).encode()


def error_text(body: bytes) -> str:
    """Returns the message in an error's body, whatever its form, as one short line."""
    try:
        value = json.loads(body)
        error = value.get("error", value) if isinstance(value, dict) else value
        message = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        message = body.decode("utf-8", "replace")
    return " ".join(str(message).split())[:200]


def _read_native(data: bytes) -> Event:
    value = _object(data)
    if "error" in value:
        return Event(error=error_text(data))
    info = value.get("meta_info") or {}
    route = info.get("route")
    num_output = info.get("completion_tokens")
    return Event(
        has_output=bool(num_output),
        is_end=info.get("finish_reason") is not None,
        num_prompt=info.get("prompt_tokens"),
        num_output=num_output,
        num_cached=info.get("cached_tokens"),
        route=route if isinstance(route, str) else None,
    )


def _read_openai(data: bytes) -> Event:
    value = _object(data)
    if "error" in value:
        return Event(error=error_text(data))
    choice: dict[str, Any] = next(iter(value.get("choices") or ()), {})
    delta = choice.get("delta")
    is_end = choice.get("finish_reason") is not None
    if delta is None:
        has_output = bool(choice)
    else:  # the first event of a chat may hold the role alone
        has_output = any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    usage = value.get("usage") or {}
    return Event(
        has_output=has_output,
        is_end=is_end,
        num_prompt=usage.get("prompt_tokens"),
        num_output=usage.get("completion_tokens"),
        num_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def _object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("an event is not an object")
    return value
