"""A mailbox without sockets, for engines that tests and benchmarks run without a front end."""

import time
from collections import deque
from collections.abc import Sequence

from moe_serve.engine.protocol.mailbox import Inbound
from moe_serve.engine.protocol.messages import Message, Shutdown, Submit, Wake


class QueueMailbox:
    """A mailbox without sockets: `put` adds a request, `sent` holds the events.

    Wakes reach no peer, so sleeping ranks wake up at their heartbeats. With `end_when_idle` a rank asks for the end of
    the engine as soon as its queue is empty and it would wait.
    """

    def __init__(self, requests: Sequence[Submit] = (), end_when_idle: bool = True):
        self._inbox: deque[Inbound] = deque(requests)
        self._end_when_idle = end_when_idle
        self.sent: list[Message] = []

    def put(self, message: Inbound) -> None:
        self._inbox.append(message)

    def poll(self, timeout_s: float) -> list[Inbound]:
        arrived = list(self._inbox)
        self._inbox.clear()
        if not arrived and timeout_s > 0:
            if self._end_when_idle:
                return [Shutdown()]
            time.sleep(min(timeout_s, 0.001))
        return arrived

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def wake_peers(self, wake: Wake) -> None:
        pass

    def front_end_silent_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass
