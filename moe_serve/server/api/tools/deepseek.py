"""Calls of DeepSeek-V3, R1 and V3.1: each between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`. Torch-free.

V3:   function<｜tool▁sep｜>NAME
      ```json
      {…}
      ```
V3.1: NAME<｜tool▁sep｜>{…}
"""

from moe_serve.server.api.tools.calls import LONGEST_NAME, CallParser
from moe_serve.server.api.tools.stream import Steps

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekV31Parser(CallParser):
    markers = (_SECTION, _CALL)

    def _calls(self, marker: str) -> Steps[None]:
        if marker == _SECTION:
            yield from self._skip_space()
            yield from self._expect(_CALL)
        while True:
            yield from self._call()
            yield from self._skip_space()
            yield from self._accept(_CALL_END)
            yield from self._skip_space()
            if not (yield from self._accept(_CALL)):
                break
        yield from self._accept(_SECTION_END)
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
