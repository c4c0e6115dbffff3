"""What a rank says when it attaches to a front end, and again when that may not know it any more. Torch-free.

A cut connection loses messages in both directions, and the front end may be another process afterwards. So a rank whose
connection was cut says hello again with all that a front end must know, and drops its requests: the front end submits
those that it still wants. A rank that only hears nothing keeps its requests, and says hello until it is heard.
"""

import msgspec

from moe_serve.engine.protocol.balance_messages import BalanceReport
from moe_serve.engine.protocol.messages import ForFrontEnds, Hello, Members, Message, Ready

SILENCE_S = 3.0  # a front end that is alive says so every ALIVE_PERIOD_S


class Greeting:
    """Remembers what this rank has told, so that it can be told again."""

    def __init__(self, silence_s: float = SILENCE_S):
        self._silence_s = silence_s
        self._hello: Hello | None = None
        self._ready: Ready | None = None
        self._members: Members | None = None
        self._placement: BalanceReport | None = None
        self._for_front_ends: ForFrontEnds | None = None
        self._newest_call = 0  # front ends tell new ranks again, one of them perhaps what is over
        self._said_s = 0.0

    def note(self, message: Message, now_s: float) -> None:
        """Remembers a message that is on its way, if it must be repeated."""
        match message:
            case Hello():
                self._hello, self._said_s = message, now_s
            case Ready():
                self._ready = message
            case Members():
                self._members = message
            case ForFrontEnds() if message.lasts and message.call_id >= self._newest_call:
                self._for_front_ends, self._newest_call = message, message.call_id
            case BalanceReport() if message.placement is not None:
                # Windows and decisions are news only once.
                self._placement = msgspec.structs.replace(message, window=None, decisions=[])

    def is_due(self, now_s: float, heard_s: float) -> bool:
        """Returns whether this rank should say hello because it hears nothing; only one that is ready listens."""
        return self._ready is not None and now_s - max(heard_s, self._said_s) > self._silence_s

    def again(self, num_reconnects: int, now_s: float) -> list[Message]:
        """Returns what to say now; nothing before the first hello."""
        if self._hello is None:
            return []
        self._said_s = now_s
        hello = msgspec.structs.replace(self._hello, num_reconnects=num_reconnects, is_ready=self._ready is not None)
        return [hello, *(each for each in self._told() if each is not None)]

    def _told(self) -> tuple[Message | None, ...]:
        # A pause comes before `Ready`: a front end may send requests from then on.
        return self._for_front_ends, self._ready, self._members, self._placement
