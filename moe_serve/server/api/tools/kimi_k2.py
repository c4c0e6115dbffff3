"""Calls of Kimi-K2, which gives them ids of its own. Torch-free.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…
"""

import re

from moe_serve.server.api.tools.calls import LONGEST_NAME, CallParser
from moe_serve.server.api.tools.json_text import Malformed
from moe_serve.server.api.tools.stream import Steps

SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?\Z", re.DOTALL)


class KimiK2Parser(CallParser):
    markers = (SECTION, _CALL)

    def _calls(self, marker: str) -> Steps[None]:
        if marker == SECTION:
            yield from self._skip_space()
            yield from self._expect(_CALL)
        while True:
            call_id = (yield from self._word_until(_ARGUMENTS, LONGEST_NAME)).strip()
            named = _ID.match(call_id)
            if named is None:
                raise Malformed
            self._start(named["name"], call_id)
            yield from self._skip_space()
            yield from self._json_arguments()
            yield from self._skip_space()
            yield from self._accept(_CALL_END)
            yield from self._skip_space()
            if not (yield from self._accept(_CALL)):
                break
        yield from self._accept(_SECTION_END)
        yield from self._skip_space()
