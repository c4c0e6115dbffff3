"""Calls of Qwen3-Coder. Torch-free.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from moe_serve.server.api.tools.calls import LONGEST_NAME
from moe_serve.server.api.tools.stream import Steps
from moe_serve.server.api.tools.xml_calls import XmlCallParser


class Qwen3CoderParser(XmlCallParser):
    markers = ("<tool_call>", "<function=")

    def _calls(self, marker: str) -> Steps[None]:
        if marker == "<tool_call>":
            yield from self._skip_space()
            yield from self._expect("<function=")
        while True:
            self._begin_call((yield from self._word_until(">", LONGEST_NAME)).strip())
            yield from self._skip_space()
            while (yield from self._tag("<parameter=")):
                name = yield from self._word_until(">", LONGEST_NAME)
                yield from self._parameter(name.strip(), "</parameter>")
                yield from self._skip_space()
            self._end_call()
            yield from self._expect("</function>")
            yield from self._skip_space()
            yield from self._accept("</tool_call>")
            yield from self._skip_space()
            if not (yield from self._accept("<function=")):
                return
