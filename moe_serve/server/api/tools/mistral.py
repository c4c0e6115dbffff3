"""Calls of Mistral's models. Torch-free.

older: [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]
newer: [TOOL_CALLS]NAME[ARGS]{…}[TOOL_CALLS]NAME[ARGS]{…}, with [CALL_ID]… before [ARGS], or without both
"""

from moe_serve.server.api.tools.calls import LONGEST_NAME
from moe_serve.server.api.tools.hermes import HermesParser
from moe_serve.server.api.tools.stream import Steps


class MistralParser(HermesParser):
    markers = ("[TOOL_CALLS]",)

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        if not (yield from self._accept("[")):
            yield from self._new_call()
            yield from self._skip_space()
            return
        while True:
            yield from self._skip_space()
            yield from self._named_call()
            yield from self._skip_space()
            if (yield from self._accept("]")):
                break
            yield from self._expect(",")
        yield from self._skip_space()

    def _new_call(self) -> Steps[None]:
        header = yield from self._word_until("{", LONGEST_NAME)
        self._text = "{" + self._text  # it belongs to the arguments
        self._unsaid[-1] = self._unsaid[-1][:-1]
        name, _, _ = header.partition("[CALL_ID]")
        self._start(name.replace("[ARGS]", "").strip())
        yield from self._json_arguments()
