"""Renders the messages of a chat as one text, by the model's chat template.

Templates run in processes of their own (chat_template_process.py), which are killed if a template does not end.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from moe_serve.config import ServeConfig, model_dir
from moe_serve.errors import ConfigError, ModelError, RequestError
from moe_serve.models.model_files import read_bytes
from moe_serve.models.tokenizer import tokenizer_settings
from moe_serve.server.workers.helper_process import HelperEnded, HelperPair, TooLongError

_LARGEST = 4 << 20  # bytes of a file with a template; real ones have up to 20 KB
_DEADLINE_S = 10.0  # for one text, with the start of the process
_SHORT_S = 0.03  # of a core: real templates take some 7 us for a message
_MAX_CORE_S = 1.0
_FIX = "copy the file again"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class RenderJob(msgspec.Struct, frozen=True):
    """A job of the process. special_tokens, kwargs: more variables;  max_chars: a longer text is refused

    is_own: the template is the server's own; compiling it does not count as time of the job
    """

    template: str
    is_own: bool
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    special_tokens: dict[str, str]
    kwargs: dict[str, Any]
    max_chars: int


class Rendered(msgspec.Struct, frozen=True):
    """The answer of the process: the text, or what is wrong."""

    text: str | None
    message: str = ""


class ChatTemplates:
    """The templates of a model by name, and the processes that render them, started by `start` or the first chats.

    trust_requests: clients may send templates of their own
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], trust_requests: bool = False
    ) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._trust_requests = trust_requests
        self._processes = HelperPair(
            "moe_serve.server.workers.chat_template_process", _DEADLINE_S, _SHORT_S, _MAX_CORE_S
        )

    @classmethod
    def load(cls, config: ServeConfig) -> Self:
        """Returns the templates of server.chat_template, or else of the model folder, which may have none.

        Raises ConfigError or ModelError for files that cannot be read.
        """
        folder = model_dir(config.model)
        settings = tokenizer_settings(folder)
        given = config.server.chat_template
        templates = _of_folder(folder, settings) if given is None else {"default": _of_setting(given)}
        tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token(settings.get(name))) is not None}
        return cls(templates, tokens, config.server.trust_request_chat_template)

    def tokenizer_info(self) -> dict[str, str | None]:
        """Returns the special tokens by name, and the chat template, None without one."""
        return {**self._special_tokens, "chat_template": self._templates.get("default")}

    async def start(self) -> None:
        """Starts the processes if the model has a template, so that the first chat need not wait for them."""
        if self._templates:
            job = RenderJob("", True, [], None, None, False, False, {}, {}, max_chars=1)
            await self._processes.start(msgspec.msgpack.encode(job))

    def job(self, prompt: Any, max_chars: int) -> RenderJob:
        """Returns the job for a chat. prompt: a ChatPrompt;  max_chars: a longer text is refused

        Raises RequestError if the model has no template, or if the messages are too long for any.
        """
        if len(prompt.messages) > max_chars or sum(len(each["content"]) for each in prompt.messages) > max_chars:
            raise RequestError(
                f"the messages have more characters than any prompt that is served ({max_chars}); shorten them",
                field="messages",
            )
        return RenderJob(
            template=self._template(prompt.chat_template, has_tools=prompt.tools is not None),
            is_own=prompt.chat_template is None,
            messages=prompt.messages,
            tools=prompt.tools,
            documents=prompt.documents,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            special_tokens=self._special_tokens,
            kwargs=prompt.kwargs,
            max_chars=max_chars,
        )

    async def render(self, prompt: Any, max_chars: int, client: str = "") -> str:
        """Returns the text of a chat. Arguments and errors as of `job`; client: its name

        Raises RequestError too if the template refuses the messages, and QueueFullError if too many of the client's
        chats wait.
        """
        try:
            reply = await self._processes.ask(client, msgspec.msgpack.encode(self.job(prompt, max_chars)))
        except TooLongError:
            raise RequestError(
                f"the chat template takes longer than {_MAX_CORE_S:g} s for these messages; send less", "messages"
            ) from None
        except TimeoutError:
            raise RequestError(
                f"the chat template takes longer than {_DEADLINE_S:g} s for these messages; send less", "messages"
            ) from None
        except HelperEnded:
            raise RequestError(
                "the chat template takes too much memory for these messages; send less", "messages"
            ) from None
        rendered = msgspec.msgpack.decode(reply, type=Rendered)
        if rendered.text is None:
            raise RequestError(rendered.message, field="messages")
        return rendered.text

    def _template(self, of_client: str | None, has_tools: bool) -> str:
        if of_client is not None and not self._trust_requests:
            raise RequestError(
                "chat_template is given, but this server renders its model's own; leave it out, or serve with "
                "server.trust_request_chat_template: true (--trust-request-chat-template)",
                field="chat_template",
            )
        names = ("tool_use", "default") if has_tools else ("default",)
        found = next((self._templates[name] for name in names if name in self._templates), None)
        template = found if of_client is None else of_client
        if template is None:
            raise RequestError(
                "the model has no chat template; send a prompt to /v1/completions, or serve with "
                "server.chat_template: FILE (--chat-template)",
                field="messages",
            )
        return template

    async def close(self) -> None:
        """Ends the processes."""
        await self._processes.close()


def _of_setting(given: str) -> str:
    path = Path(given).expanduser()
    try:
        return read_bytes(path, "give a file with a jinja template", _LARGEST).decode()
    except (ModelError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.chat_template: {error}") from None


def _of_folder(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates of a model folder by name; files win over tokenizer_config.json, as in transformers."""
    given = settings.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        for each in given:
            if isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str):
                templates[each["name"]] = each["template"]
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.exists():
            try:
                templates[name] = read_bytes(path, _FIX, _LARGEST).decode()
            except UnicodeDecodeError:
                raise ModelError(f"{path}: is not UTF-8 text; {_FIX}") from None
    return templates


def _token(given: Any) -> str | None:
    """Returns the text of a special token, which older files wrap in an object."""
    text = given.get("content") if isinstance(given, dict) else given
    return text if isinstance(text, str) else None
