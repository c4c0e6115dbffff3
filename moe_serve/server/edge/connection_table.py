"""The open connections by client, and who yields when there are too many. Torch-free."""

import time
from collections import defaultdict
from collections.abc import Iterator

from moe_serve.server.edge.connection import Connection

_LOOK_AGAIN_S = 0.05  # where all connections were busy: looking at thousands for each newcomer takes the loop


class ConnectionTable:
    """Bounds the connections, in all and of one client (an address).

    At a bound a newcomer takes the place of the oldest connection that waits for a request: of its own client, or of
    the client with the most connections. So silent connections keep nobody out. Where all are busy, it is refused.
    """

    def __init__(self, max_connections: int, max_per_client: int):
        self.max_connections = max_connections
        self.max_per_client = max_per_client
        self.num_refused = 0
        self._by_client: dict[str, dict[Connection, None]] = defaultdict(dict)  # each in the order of arrival
        self._client_of: dict[Connection, str] = {}
        self._busy_until_s: dict[str, float] = {}  # clients of which no connection could yield; "": of all

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._client_of))

    def __len__(self) -> int:
        return len(self._client_of)

    def admit(self, connection: Connection, client: str) -> bool:
        """Returns whether there is room for a new connection of a client, after making some; adds it."""
        own = self._by_client.get(client, {})
        full = client if len(own) >= self.max_per_client else "" if len(self) >= self.max_connections else None
        if full is not None and not self._yield_one(full):
            self.num_refused += 1
            return False
        self._by_client[client][connection] = None
        self._client_of[connection] = client
        return True

    def make_room(self) -> None:
        """Ends one waiting connection, where there is one: the process has run out of descriptors."""
        for client in sorted(self._by_client, key=self._num_of, reverse=True):
            if self._yield_one(client):
                return

    def remove(self, connection: Connection) -> None:
        """Forgets a connection; nothing where it is not known."""
        client = self._client_of.pop(connection, None)
        if client is None:
            return
        own = self._by_client[client]
        del own[connection]
        if not own:
            del self._by_client[client]
            self._busy_until_s.pop(client, None)

    def sweep(self) -> None:
        """Ends the connections whose deadlines have passed."""
        now_s = time.monotonic()
        for connection in self:
            connection.sweep(now_s)

    def _num_of(self, client: str) -> int:
        return len(self._by_client[client])

    def _yield_one(self, client: str) -> bool:
        """Ends the oldest connection of a client that may yield; returns False where none may.

        client: "" = the one with the most connections
        """
        now_s = time.monotonic()
        if now_s < self._busy_until_s.get(client, 0.0):
            return False
        own = self._by_client[client or max(self._by_client, key=self._num_of)]
        oldest = next((connection for connection in own if connection.may_yield), None)
        if oldest is None:
            self._busy_until_s[client] = now_s + _LOOK_AGAIN_S
            return False
        self.remove(oldest)
        oldest.give_up()
        return True
