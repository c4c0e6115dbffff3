"""The ZeroMQ sockets of one process: every one with bounds, and over TCP with CURVE."""

import zmq
from zmq.auth.thread import ThreadAuthenticator

from moe_serve.links.curve import DOMAIN, Keys
from moe_serve.links.link import Link

MAX_MESSAGE_BYTES = 64 * 2**20  # a larger message ends its connection
_HIGH_WATER = 100_000  # messages queued for one peer; further ones are dropped, and the peer will miss its deadline
_HANDSHAKE_MS = 10_000  # a connection that has not said who it is by then is closed
# Of the connection, answered by ZeroMQ's own thread: a cable that is cut is noticed, and the socket connects again.
_HEARTBEAT_MS, _HEARTBEAT_DEADLINE_MS = 5_000, 20_000
_MAX_RECONNECT_MS = 1_000


class LinkSockets:
    """Makes sockets of a link, in a context of their own."""

    def __init__(self, link: Link):
        """Raises LaunchError where this ZeroMQ lacks CURVE and the link needs it."""
        self._keys = None if link.folder else Keys.of(link.token)
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitored: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []

    def bound(self, kind: int, address: str, max_bytes: int = MAX_MESSAGE_BYTES) -> "zmq.Socket[bytes]":
        """Returns a socket that listens at an address. Raises zmq.ZMQError when it cannot be opened."""
        socket = self._new(kind, address, max_bytes)
        if self._keys is not None:
            self._let_in_our_own(self._keys)
            self._keys.serve(socket)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer whose connection was cut comes back under its name
        socket.bind(address)
        return socket

    def connected(self, kind: int, address: str, linger_ms: int = 1000) -> "zmq.Socket[bytes]":
        """Returns a socket that connects to an address, and again whenever the connection is lost.

        linger_ms: how long the last messages may take to leave when it is closed
        """
        socket = self._new(kind, address, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, linger_ms)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        if self._keys is not None:
            self._keys.connect(socket)
        socket.connect(address)
        return socket

    def reconnecting(
        self, kind: int, address: str, routing_id: bytes
    ) -> tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]:
        """Returns a socket that connects under a routing id, and one with an event for each connection made or cut.

        When a connection was cut, messages in both directions may be lost; the next one counts as that of the same peer
        at a ROUTER of ours.
        """
        socket = self._new(kind, address, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
        connections = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        if self._keys is not None:
            self._keys.connect(socket)
        socket.connect(address)
        self._monitored.append((socket, connections))
        return socket, connections

    def close(self) -> None:
        """Closes all sockets; returns once their last messages have left, or their linger times are over."""
        for monitored, connections in self._monitored:
            monitored.disable_monitor()
            connections.close()
        for socket in self._sockets:
            socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _new(self, kind: int, address: str, max_bytes: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in (
            (zmq.IPV6, int("[" in address)),
            (zmq.LINGER, 500),
            (zmq.MAXMSGSIZE, max_bytes),
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.RCVHWM, _HIGH_WATER),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_DEADLINE_MS),
        ):
            socket.setsockopt(option, value)
        self._sockets.append(socket)
        return socket

    def _let_in_our_own(self, keys: Keys) -> None:
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=keys)
