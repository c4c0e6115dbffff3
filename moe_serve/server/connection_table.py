"""The open connections by client, and who yields when there are too many. Torch-free."""

import time
from collections import defaultdict
from collections.abc import Iterator

from moe_serve.server.connection import Connection


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

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._client_of))

    def __len__(self) -> int:
        return len(self._client_of)

    def admit(self, connection: Connection, client: str) -> bool:
        """Returns whether there is room for a new connection of a client, after making some; adds it."""
        own = self._by_client.get(client, {})
        if len(own) >= self.max_per_client:
            if not self._yield_one(client):
                self.num_refused += 1
                return False
        elif len(self) >= self.max_connections:
            largest = max(self._by_client, key=lambda name: len(self._by_client[name]))
            if not self._yield_one(largest):
                self.num_refused += 1
                return False
        self._by_client[client][connection] = None
        self._client_of[connection] = client
        return True

    def make_room(self) -> None:
        """Ends one waiting connection, where there is one: the process has run out of descriptors."""
        for client in sorted(self._by_client, key=lambda name: -len(self._by_client[name])):
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

    def sweep(self) -> None:
        """Ends the connections whose deadlines have passed."""
        now_s = time.monotonic()
        for connection in self:
            connection.sweep(now_s)

    def _yield_one(self, client: str) -> bool:
        """Ends the oldest connection of a client that may yield; returns False where none may."""
        oldest = next((connection for connection in self._by_client[client] if connection.may_yield), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.give_up()
        return True
