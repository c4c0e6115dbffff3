"""Calls between marker tokens.

DeepSeek V3:    function<｜tool▁sep｜>NAME, a line break, and the arguments as a block of json between triple backticks
DeepSeek V3.1:  NAME<｜tool▁sep｜>{…}
Kimi K2:        <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}
                <|tool_call_end|>…
"""

import re

from moe_serve.server.api.tools.parser import LONGEST_NAME, CallParser, Malformed, Steps

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekV31Parser(CallParser):
    """markers, ends: those of a section, and of a call in it"""

    markers = (_SECTION, _CALL)
    ends = (_SECTION_END, _CALL_END)

    def _calls(self, marker: str) -> Steps[None]:
        (section, call), (section_end, call_end) = self.markers, self.ends
        if marker == section:
            yield from self._skip_space()
            yield from self._expect(call)
        while True:
            yield from self._call()
            yield from self._skip_space()
            yield from self._accept(call_end)
            yield from self._skip_space()
            if not (yield from self._accept(call)):
                break
        yield from self._accept(section_end)
        yield from self._skip_space()

    def _call(self) -> Steps[None]:
        name = yield from self._word_until(_SEPARATOR, LONGEST_NAME)
        self._start(name.strip())
        yield from self._skip_space()
        yield from self._json_arguments()


class DeepSeekV3Parser(DeepSeekV31Parser):
    def _call(self) -> Steps[None]:
        yield from self._word_until(_SEPARATOR, LONGEST_NAME)  # the kind, which is always "function"
        name = yield from self._word_until("\n", LONGEST_NAME)
        self._start(name.strip())
        yield from self._skip_space()
        fenced = yield from self._accept("```json")
        yield from self._skip_space()
        yield from self._json_arguments()
        yield from self._skip_space()
        if fenced:
            yield from self._accept("```")


SECTION, _KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _ARGUMENTS, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?\Z", re.DOTALL)


class KimiK2Parser(DeepSeekV31Parser):
    markers = (SECTION, _KIMI_CALL)
    ends = (_KIMI_SECTION_END, _KIMI_CALL_END)

    def _call(self) -> Steps[None]:
        call_id = (yield from self._word_until(_ARGUMENTS, LONGEST_NAME)).strip()
        named = _ID.match(call_id)
        if named is None:
            raise Malformed
        self._start(named["name"], call_id)
        yield from self._skip_space()
        yield from self._json_arguments()
