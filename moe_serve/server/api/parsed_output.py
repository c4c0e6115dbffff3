"""Splits the text of an answer into reasoning, content and calls, by the configured parsers.

One parser serves both kinds of answers: it gets a streamed one in pieces, and a whole one in one piece.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from moe_serve.attention_dp.constraint import Constraint, FormStart
from moe_serve.config import ServerConfig
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.api.tool_fields import ReasoningUse, ToolUse
from moe_serve.server.api.tools.harmony import (
    ANALYSIS,
    CHANNEL,
    END,
    FINAL,
    MESSAGE,
    START,
    HarmonyParser,
    analysis_tokens,
)
from moe_serve.server.api.tools.json_calls import InputParser, NamedCallParser, RequiredCallsParser, input_of
from moe_serve.server.api.tools.parser import (
    CallArguments,
    CallParser,
    CallStart,
    Content,
    Parser,
    Part,
    Reasoning,
    joined,
)
from moe_serve.server.api.tools.registry import HARMONY, REASONING_PARSERS, TOOL_CALL_PARSERS, known_name
from moe_serve.server.api.tools.think import ThinkParser, up_to

Delta = dict[str, Any]  # what is new of a message, as in OpenAI's chunks: {"content": "more text"}


@dataclass(frozen=True)
class NewOutput:
    """Output of a model since the last piece.

    text:      released by the StopMatcher;  token_ids: new tokens; the text of some may come later
    finish:    why the output ends here: "stop", "length" or "abort"; None: more comes
    """

    text: str
    token_ids: Sequence[int]
    finish: str | None


class OutputParser(Protocol):
    """Reads the output of one choice."""

    def push(self, new: NewOutput) -> list[Delta]:
        """Returns what is new of the message; all that was held back, where the output ends."""

    def finish_reason(self, reason: str) -> str:
        """Returns why the message ended in OpenAI's words, such as "tool_calls" for a "stop"."""

    def reasoning_tokens(self) -> int | None:
        """Returns how many tokens of the output were reasoning; None where that is not known."""


class PlainText:
    """All that the model writes is the message's content."""

    def push(self, new: NewOutput) -> list[Delta]:
        return [{"content": new.text}] if new.text else []

    def finish_reason(self, reason: str) -> str:
        return reason

    def reasoning_tokens(self) -> int | None:
        return None


def merged(deltas: list[Delta]) -> Delta:
    """Returns one delta for several: texts are joined, calls by their index."""
    texts: dict[str, list[str]] = {}
    calls: dict[int, dict[str, Any]] = {}
    of_calls: dict[int, list[str]] = {}
    for delta in deltas:
        for key, value in delta.items():
            if key != "tool_calls":
                texts.setdefault(key, []).append(value)
                continue
            for call in value:
                calls.setdefault(call["index"], call)
                kind, field = field_of(call)
                of_calls.setdefault(call["index"], []).append(call[kind][field])
    message: Delta = {key: "".join(parts) for key, parts in texts.items()}
    if calls:
        message["tool_calls"] = [_with_text(call, "".join(of_calls[index])) for index, call in calls.items()]
    return message


def field_of(call: Delta) -> tuple[str, str]:
    """Returns under which names a call, or what is new of it, has its text: arguments of a function, or an input."""
    return ("custom", "input") if "custom" in call else ("function", "arguments")


def _with_text(call: Delta, text: str) -> Delta:
    kind, field = field_of(call)
    return {**call, kind: {**call[kind], field: text}}


def whole_message(deltas: list[Delta]) -> Delta:
    """Returns the message that all deltas of an output make. Its calls have no index: their order says it."""
    message: Delta = {"role": "assistant", "content": None, **merged(deltas)}
    if "tool_calls" in message:
        message["tool_calls"] = [
            {key: value for key, value in call.items() if key != "index"} for call in message["tool_calls"]
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message


_PROMPT_CHARS = 64  # of a prompt's text that say the same
_PROMPT_END = 16  # tokens of the prompt that say whether the output begins inside the reasoning


class OutputParsers:
    """The parsers of one server."""

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer | None):
        """Raises ConfigError for names that are not known."""
        reasoning = known_name("server.reasoning_parser", config.reasoning_parser, REASONING_PARSERS)
        calls = known_name("server.tool_call_parser", config.tool_call_parser, TOOL_CALL_PARSERS)
        self._is_harmony = HARMONY in (reasoning, calls)
        self._tags = None if reasoning is None else REASONING_PARSERS[reasoning]
        self._calls = None if calls is None else TOOL_CALL_PARSERS[calls]
        self._tokenizer = tokenizer
        self._end_id = self._id_of(self._tags.end) if self._tags else None
        self._count = self._make_count()
        of_calls = (MESSAGE, START, END) if self._is_harmony else self._calls.markers if self._calls else ()
        self._reasoning_hides = self._is_harmony or (self._tags is not None and self._are_hidden((self._tags.end,)))
        self._calls_hide = self._are_hidden(of_calls)

    def needs_special_tokens(self, tools: ToolUse) -> bool:
        """Returns whether special tokens must be shown, since markers are among them."""
        return self._reasoning_hides or (tools.choice == "auto" and self._calls_hide)

    def form_start(self, prompt: str, tools: ToolUse, continued: str | None = None) -> FormStart | None:
        """Returns where a constrained output begins to match its form: after its reasoning; None: at the first token.

        Reasoning whose end is not a single token cannot be told from the form, so None is returned. The same holds for
        a forced call of a harmony model, whose other channels may hold calls too.

        continued: the message that the output continues; None = none
        """
        prompt_end = prompt[-_PROMPT_CHARS:]
        if self._is_harmony:
            channel, final, message = (self._id_of(text) for text in (CHANNEL, FINAL, MESSAGE))
            if channel is None or final is None or message is None or tools.is_forced:
                return None
            return FormStart(((channel, final), (message,)), may_end=tools.choice == "auto")
        if self._tags is None or self._end_id is None:
            return None
        if self._tags.inside(prompt_end, continued):
            return FormStart(((self._end_id,),))
        opens = self._id_of(self._tags.start)
        if opens is None or continued is not None or prompt_end.rstrip().endswith(self._tags.end):
            return None
        return FormStart(((self._end_id,),), opens)

    def of(
        self,
        tools: ToolUse,
        reasoning: ReasoningUse,
        prompt_ids: Sequence[int],
        constraint: Constraint | None = None,
        continued: str | None = None,
    ) -> Callable[[], OutputParser]:
        """Returns a function that makes the parser of one choice.

        constraint: the form of the output;  continued: the message that it continues; None = none
        """
        calls, schemas = self._calls_of(tools)
        if self._is_harmony and not tools.is_forced:
            return lambda: ParsedOutput([HarmonyParser(schemas)], tools, reasoning, self._count)
        has_start = constraint is not None and constraint.start is not None
        tags = self._tags if (has_start if tools.is_forced else reasoning.separate) else None
        if tags is None and calls is None:
            return PlainText
        prompt_end = ""
        if tags is not None and constraint is not None and not has_start and constraint.kind != "structural_tag":
            # The form holds from the first token, wherever the prompt ends: only what it writes itself is reasoning.
            tags = replace(tags, begins_inside=False)
        elif tags is not None and self._tokenizer is not None:
            prompt_end = self._tokenizer.decode(prompt_ids[-_PROMPT_END:], skip_special_tokens=False)

        def stages() -> list[Parser]:
            return [
                *([ThinkParser(tags, prompt_end, continued)] if tags is not None else []),
                *([calls(schemas)] if calls is not None else []),
            ]

        return lambda: ParsedOutput(stages(), tools, reasoning, self._count)

    def _calls_of(self, tools: ToolUse) -> tuple[type[CallParser] | None, dict[str, dict[str, Any]]]:
        """Returns the parser of calls, None if there can be none, and the functions it knows."""
        if tools.only_input is not None:
            return InputParser, tools.schemas if tools.choice == "required" else {tools.name: tools.schemas[tools.name]}
        if tools.choice == "named":
            return NamedCallParser, {tools.name: tools.schemas[tools.name]}
        if tools.choice == "required":
            return RequiredCallsParser, tools.schemas
        if tools.choice == "auto" and tools.schemas and self._calls is not None:
            return self._calls, tools.schemas
        return None, {}

    def _make_count(self) -> Callable[[Sequence[int]], int] | None:
        """Returns a function that counts the reasoning tokens of an output; None if they cannot be told."""
        if self._is_harmony:
            channel, analysis, start, end = (self._id_of(text) for text in (CHANNEL, ANALYSIS, START, END))
            if channel is None or analysis is None or start is None or end is None:
                return None
            return partial(analysis_tokens, channel, analysis, start, end)
        return None if self._end_id is None else partial(up_to, self._end_id)

    def _id_of(self, marker: str) -> int | None:
        """Returns the id of a marker that is one token."""
        ids = [] if self._tokenizer is None else self._tokenizer.encode(marker, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    def _are_hidden(self, markers: Sequence[str]) -> bool:
        ids = [self._id_of(marker) for marker in markers]
        return self._tokenizer is not None and any(i is not None and not self._tokenizer.has_text(i) for i in ids)


class ParsedOutput:
    """Reads the output of one choice. Each stage reads the content that the stage before it leaves."""

    def __init__(
        self,
        stages: list[Parser],
        tools: ToolUse,
        reasoning: ReasoningUse,
        count_reasoning: Callable[[Sequence[int]], int] | None = None,
    ):
        """count_reasoning: counts the reasoning tokens of an output that has some; None: not known"""
        self._stages = stages
        self._tools = tools
        self._reasoning = reasoning
        self._count_reasoning = count_reasoning
        self._held: list[str] = []  # reasoning that is not streamed
        self._num_calls = 0  # of the message
        self._call: int | None = None  # whose arguments come; None: they are left out
        self._custom: tuple[CallStart, list[str]] | None = None  # a call that is held until its arguments are whole
        self._token_ids: list[int] = []
        self._has_reasoning = False

    def push(self, new: NewOutput) -> list[Delta]:
        """Returns what is new of the message; all that was held back, where the output ends."""
        if self._count_reasoning is not None:
            self._token_ids += new.token_ids
        parts = self._through([Content(new.text)] if new.text else [], new.finish is not None)
        deltas = [delta for part in parts for delta in self._deltas(part)]
        return deltas + (self._release() if new.finish is not None else [])

    def finish_reason(self, reason: str) -> str:
        """Returns "tool_calls" instead of "stop" after calls that the model chose to make."""
        return "tool_calls" if reason == "stop" and self._num_calls and self._tools.choice != "named" else reason

    def reasoning_tokens(self) -> int | None:
        """Returns the number of reasoning tokens, markers included; None if the markers are not single tokens."""
        if self._count_reasoning is None:
            return None
        return self._count_reasoning(self._token_ids) if self._has_reasoning else 0

    def _through(self, parts: list[Part], is_last: bool) -> list[Part]:
        for stage in self._stages:
            read: list[Part] = []
            for part in parts:
                read += stage.push(part.text) if isinstance(part, Content) else [part]
            parts = read + (stage.finish() if is_last else [])
        return joined(parts)

    def _deltas(self, part: Part) -> list[Delta]:
        match part:
            case Reasoning(text):
                self._has_reasoning = True
                if not self._reasoning.separate:
                    return [*self._release(), {"content": text}]
                if self._reasoning.included:
                    self._held.append(text)
                return self._release() if self._reasoning.streamed else []
            case Content(text):
                return [*self._release(), {"content": text}]
            case CallStart():
                before = self._release()
                self._call = None
                if self._num_calls and not self._tools.parallel:
                    return before
                if part.name in self._tools.inputs and self._tools.only_input is None:
                    self._custom = part, []
                    return before
                return [*before, self._begun(part)]
            case CallArguments(_, text):
                if self._custom is not None:
                    self._custom[1].append(text)
                    return []
                if self._call is None:
                    return []
                kind, field = ("function", "arguments") if self._tools.only_input is None else ("custom", "input")
                return [{"tool_calls": [{"index": self._call, kind: {field: text}}]}]

    def _begun(self, start: CallStart, text: str = "") -> Delta:
        """Returns the beginning of one more call. text: of its arguments"""
        self._call, self._num_calls = self._num_calls, self._num_calls + 1
        kind, field = ("custom", "input") if start.name in self._tools.inputs else ("function", "arguments")
        head = {"index": self._call, "id": start.id or f"call_{uuid.uuid4().hex[:24]}", "type": kind}
        return {"tool_calls": [{**head, kind: {"name": start.name, field: text}}]}

    def _release(self) -> list[Delta]:
        """Returns what was held back: a call of a custom tool, whose arguments end here, and reasoning."""
        deltas: list[Delta] = []
        if self._custom is not None:
            (start, parts), self._custom = self._custom, None
            arguments = "".join(parts)
            text = input_of(arguments)
            deltas = [{"content": arguments}] if text is None else [self._begun(start, text)]
        text = "".join(self._held)
        self._held.clear()
        return [*deltas, {"reasoning_content": text, "reasoning": text}] if text else deltas
