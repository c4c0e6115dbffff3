"""gpt-oss' output: messages with channels, in OpenAI's harmony format.

<|channel|>analysis<|message|>…<|end|><|start|>assistant
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|><|start|>assistant
<|channel|>final<|message|>…<|return|>

The library openai-harmony is not used: it loads its vocabulary from the network, and accepts no other file. Special
tokens are found by their text, so they must be shown (skip_special_tokens: false).
"""

import re
from collections.abc import Sequence

from moe_serve.server.api.tools.parser import CallParser, Content, Malformed, Part, Reasoning, Steps, Truncated

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END = "<|end|>"
ANALYSIS, FINAL = "analysis", "final"  # channels
_ENDS = (END, "<|return|>", "<|call|>", START, CHANNEL)
_LONGEST_HEADER = 512
_RECIPIENT = re.compile(r"\bto=(?P<name>[^\s<]+)")
_CUT_HEADER = re.compile(r"(<\|start\|>|<\|channel\|>)[^<]*(<\|channel\|>[^<]*)?(<[|a-z]*)?\Z")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(?P<name>\w+)")


def analysis_tokens(channel: int, analysis: int, start: int, end: int, token_ids: Sequence[int]) -> int:
    """Returns how many tokens belong to messages of the analysis channel, from their channel to their end.

    channel, analysis, start, end: ids of <|channel|>, the channel's name, <|start|> and <|end|>
    """
    count, is_inside = 0, False
    for i, token in enumerate(token_ids):
        if token == channel:
            is_inside = token_ids[i + 1 : i + 2] == [analysis]
        elif token == start:
            is_inside = False
        count += is_inside
        is_inside = is_inside and token != end
    return count


class HarmonyParser(CallParser):
    """Gives analysis as reasoning, calls of the client's functions as calls, all else as content."""

    def _parse(self) -> Steps[None]:
        self._last: type[Part] | None = None  # of texts: two messages of the same kind are apart by a newline
        while (yield from self._next()):
            self._has_call = False
            try:
                yield from self._accept(START)
                header = yield from self._header()
                yield from self._body(header)
            except Malformed as error:
                is_cut_off = isinstance(error, Truncated)
                if is_cut_off and (self._has_call or _CUT_HEADER.match("".join(self._unsaid) + self._text)):
                    return
                for marker in (START, CHANNEL):
                    yield from self._accept(marker)
                self._give_back()
                yield from self._text_of(Content)

    def _header(self) -> Steps[str]:
        """Reads a header, with the marker behind it. Raises Malformed for text that is none."""
        yield from self._skip_space()
        for beginning in (CHANNEL, MESSAGE, "assistant", "to="):
            while len(self._text) < len(beginning) and beginning.startswith(self._text) and not self._has_ended:
                yield
            if self._text.startswith(beginning):
                return (yield from self._word_until(MESSAGE, _LONGEST_HEADER))
        raise Malformed

    def _body(self, header: str) -> Steps[None]:
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL_NAME.search(header)
        name = recipient["name"].removeprefix("functions.") if recipient else ""
        if name in self._tools:
            yield from self._skip_space()
            if (yield from self._next()) == "{":
                self._start(name)
                yield from self._json_arguments()
                yield from self._skip_space()
                self._unsaid.clear()
            # What is left, such as a body that is no JSON, is the message's text.
        kind: type[Content] | type[Reasoning] = Reasoning if channel and channel["name"] == ANALYSIS else Content
        self._unsaid.clear()
        yield from self._text_of(kind)

    def _text_of(self, kind: type[Content] | type[Reasoning]) -> Steps[None]:
        """Reads text up to the end of the message, or to the next one."""
        is_first = self._last is kind

        def emit(text: str) -> None:
            nonlocal is_first
            self._add(kind(("\n" if is_first else "") + text))
            is_first, self._last = False, kind

        found = yield from self._until(_ENDS, emit, drop_space=False, consume=False)
        if found not in (START, CHANNEL):  # these belong to the next message
            self._take(len(found))
        self._unsaid.clear()
