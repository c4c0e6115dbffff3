"""Calls of GLM-4.5 and its successors. Torch-free.

<tool_call>NAME
<arg_key>KEY</arg_key>
<arg_value>VALUE</arg_value>
</tool_call>
"""

from moe_serve.server.api.tools.calls import LONGEST_NAME
from moe_serve.server.api.tools.json_text import Malformed, Truncated
from moe_serve.server.api.tools.stream import Steps
from moe_serve.server.api.tools.xml_calls import XmlCallParser


class Glm45Parser(XmlCallParser):
    markers = ("<tool_call>",)

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        # A name ends at a line's end, or at the first tag.
        name = ""
        while (char := (yield from self._next())) not in ("\n", "<", ""):
            if len(name) > LONGEST_NAME:
                raise Malformed
            name += self._take(1)
        if not char:
            raise Truncated
        self._begin_call(name.strip())
        yield from self._skip_space()
        while (yield from self._tag("<arg_key>")):
            key = yield from self._word_until("</arg_key>", LONGEST_NAME)
            yield from self._skip_space()
            yield from self._expect("<arg_value>")
            yield from self._parameter(key.strip(), "</arg_value>")
            yield from self._skip_space()
        self._end_call()
        yield from self._expect("</tool_call>")
        yield from self._skip_space()
