"""Outputs that a client forces to be calls, whose form structured output guarantees. Torch-free.

named function: the output is its arguments;  required: a list of `{"name": …, "parameters": {…}}`
"""

from moe_serve.server.api.tools.calls import CallParser
from moe_serve.server.api.tools.hermes import HermesParser
from moe_serve.server.api.tools.stream import Steps


class NamedCallParser(CallParser):
    """The whole output is the arguments of the one function."""

    def _parse(self) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._next()):
            (name,) = self._tools
            self._start(name)
        while True:
            if self._text:
                self._arguments(self._take(len(self._text)))
            if self._has_ended:
                return
            yield


class RequiredCallsParser(HermesParser):
    """The whole output is a list of calls."""

    markers = ("[",)

    def _calls(self, marker: str) -> Steps[None]:
        while True:
            yield from self._skip_space()
            yield from self._named_call()
            yield from self._skip_space()
            if (yield from self._accept("]")):
                return
            yield from self._expect(",")
