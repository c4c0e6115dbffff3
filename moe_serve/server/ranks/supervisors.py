"""The launchers that watch the ranks through a front end: each hears what the ranks report."""

from collections.abc import Callable, Iterable

from moe_serve.engine.protocol.messages import Message, ToFrontEnd

SUPERVISOR = -1  # the rank in a launcher's Hello
_MAX_SUPERVISORS = 4

Observer = Callable[[ToFrontEnd], None]


class Supervisors:
    """Those that have attached, by their sockets' names, and one observer in this process.

    send: sends a message to a socket
    """

    def __init__(self, observer: Observer | None, send: Callable[[bytes, Message], None]):
        self._observer = observer
        self._send = send
        self._identities: dict[bytes, None] = {}  # by age

    def __contains__(self, identity: object) -> bool:
        return identity in self._identities

    def __len__(self) -> int:
        return len(self._identities)

    def attach(self, identity: bytes, story: Iterable[Message]) -> None:
        """Adds one, which hears at once what the ranks have reported so far; the oldest is dropped for too many."""
        self._identities.pop(identity, None)
        while len(self._identities) >= _MAX_SUPERVISORS:  # the oldest is gone, most likely
            self._identities.pop(next(iter(self._identities)))
        self._identities[identity] = None
        for message in story:
            self._send(identity, message)

    def tell(self, message: ToFrontEnd) -> None:
        """Passes on what happens while the ranks start and end."""
        if self._observer is not None:
            self._observer(message)
        for identity in self._identities:
            self._send(identity, message)
