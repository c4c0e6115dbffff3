"""`moe-serve chat`: a conversation with a running server over OpenAI's API, in a terminal or a pipe."""

import contextlib
import http.client
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import urlsplit

from moe_serve.bench.client import error_text
from moe_serve.errors import ConfigError, LaunchError, MoeServeError, RequestError

HELP = "/reset forgets the conversation, /system TEXT sets the system message (none: no TEXT), /exit or Ctrl-D ends"
_SILENCE_S = 600.0
_LARGEST_ERROR = 1 << 16
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a model could make a terminal do
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Piece:
    """A part of an answer."""

    text: str
    is_reasoning: bool = False


class ChatServer:
    """A server with OpenAI's API.

    Each method raises LaunchError when nothing answers, RequestError when what answers refuses.
    """

    def __init__(self, base_url: str, api_key: str | None):
        """Raises ConfigError for an address that is none."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url is {base_url!r}, expected http://HOST:PORT or https://HOST:PORT")
        self._parts = parts
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """Returns the first model that the server lists."""
        with self._answer("GET", "/v1/models", None) as answer:
            try:
                return str(json.loads(answer.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise LaunchError(f"{self._address} does not list models as OpenAI does; set --model") from None

    def stream(self, body: dict[str, Any]) -> Iterator[Piece]:
        """Yields an answer as it comes; a reader that stops early ends it on the server, too."""
        with self._answer("POST", "/v1/chat/completions", json.dumps({**body, "stream": True})) as answer:
            has_end = False
            for line in answer:
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if not data or data == b"[DONE]":
                    has_end |= data == b"[DONE]"
                    continue
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise RequestError(f"the answer was broken off: {error_text(data)}")
                choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
                delta = choice.get("delta") or {}
                if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                    yield Piece(reasoning, is_reasoning=True)
                if text := delta.get("content"):
                    yield Piece(text)
            if not has_end:
                raise LaunchError(f"{self._address} broke the answer off; see its log")

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: str | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=_SILENCE_S)
        try:
            connection.request(method, self._root + path, body, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RequestError(
                    f"{self._address} answers {answer.status}: {error_text(answer.read(_LARGEST_ERROR))}"
                )
            yield answer
        except ValueError:
            raise LaunchError(f"{self._address} does not answer as OpenAI's API does; see --base-url") from None
        except (OSError, http.client.HTTPException) as error:
            raise LaunchError(
                f"nothing answers at {self._address} ({error}); start it with moe-serve serve, or set --base-url"
            ) from None
        finally:
            connection.close()

    @property
    def _address(self) -> str:
        return f"{self._parts.scheme}://{self._parts.netloc}"


@dataclass
class Chat:
    """A conversation. fields: of every request;  shows_style: out is a terminal"""

    server: ChatServer
    fields: dict[str, Any]
    out: TextIO
    shows_style: bool
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Sends a message and writes the answer as it comes; Ctrl-C stops it, and what was said stays said.

        Raises LaunchError or RequestError; the conversation is then as before.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = [*self.messages, {"role": "user", "content": text}]
        said, is_dim = "", False
        try:
            for piece in self.server.stream({**self.fields, "messages": system + asked}):
                if piece.is_reasoning != is_dim:
                    is_dim = piece.is_reasoning
                    self._write((_DIM if is_dim else f"{_PLAIN}\n") if self.shows_style else "" if is_dim else "\n")
                self._write(_CONTROLS.sub("", piece.text) if self.shows_style else piece.text)
                said += "" if piece.is_reasoning else piece.text
        except KeyboardInterrupt:
            if not self.shows_style:
                raise
        finally:
            self._write((_PLAIN if is_dim and self.shows_style else "") + "\n")
        self.messages = [*asked, {"role": "assistant", "content": said}]

    def take(self, line: str) -> bool:
        """Obeys a line from a terminal; returns False at the end of the conversation."""
        command, _, rest = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.messages = []
            case "/system":
                self.system = rest.strip() or None
            case _ if command.startswith("/"):
                self._write(f"{HELP}\n")
            case _:
                self.say(line.strip())
        return True

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


def converse(chat: Chat, read_line: Callable[[], str]) -> None:
    """Takes lines from a terminal until they end. An error is shown, and the conversation goes on."""
    while True:
        try:
            if not chat.take(read_line()):
                return
        except EOFError:
            return
        except KeyboardInterrupt:
            chat.out.write("\n")
        except MoeServeError as error:
            print(f"moe-serve: {error}", file=sys.stderr)
