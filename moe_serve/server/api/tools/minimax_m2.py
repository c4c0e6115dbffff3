"""Calls of MiniMax-M2. Torch-free.

<minimax:tool_call>
<invoke name="NAME">
<parameter name="KEY">VALUE</parameter>
</invoke>
</minimax:tool_call>
"""

from moe_serve.server.api.tools.calls import LONGEST_NAME
from moe_serve.server.api.tools.json_text import Malformed
from moe_serve.server.api.tools.stream import Steps
from moe_serve.server.api.tools.xml_calls import XmlCallParser


class MiniMaxM2Parser(XmlCallParser):
    markers = ("<minimax:tool_call>",)

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        if not (yield from self._accept("<invoke name=")):
            raise Malformed
        while True:
            self._begin_call(_unquoted((yield from self._word_until(">", LONGEST_NAME))))
            yield from self._skip_space()
            while (yield from self._tag("<parameter name=")):
                name = yield from self._word_until(">", LONGEST_NAME)
                yield from self._parameter(_unquoted(name), "</parameter>")
                yield from self._skip_space()
            self._end_call()
            yield from self._expect("</invoke>")
            yield from self._skip_space()
            if not (yield from self._accept("<invoke name=")):
                break
        yield from self._accept("</minimax:tool_call>")
        yield from self._skip_space()


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'")
