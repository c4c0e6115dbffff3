"""The ZeroMQ sockets of one process: each has bounds, and over TCP is encrypted and authenticated by CURVE.

Both sides derive the keys from the token of the system. An unauthenticated peer does not know the server's public key,
so the first message of its handshake is refused, and no message of ours is decoded. Each connection draws new keys, so
recorded bytes are of no use later.
"""

import hashlib
import time
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from moe_serve.errors import LaunchError
from moe_serve.links.link import Link
from moe_serve.log import get_logger

MAX_MESSAGE_BYTES = 64 * 2**20  # a larger message ends its connection
_HIGH_WATER = 100_000  # messages queued for one peer; further ones are dropped, and the peer will miss its deadline
_HANDSHAKE_MS = 10_000  # a connection that has not said who it is by then is closed
# Of the connection, answered by ZeroMQ's own thread: a cable that is cut is noticed, and the socket connects again.
_HEARTBEAT_MS, _HEARTBEAT_DEADLINE_MS = 5_000, 20_000
_MAX_RECONNECT_MS = 1_000
_LINGER_MS = 1_000
_CONNECT_MS = 3_000  # the kernel itself would try on, with growing pauses: a cable that was mended would be found late


class LinkSockets:
    """Makes sockets of a link, in a context of their own."""

    def __init__(self, link: Link):
        """Raises LaunchError where this ZeroMQ lacks CURVE and the link needs it."""
        self._keys = None if link.folder and not link.token else Keys.of(link.token)
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitored: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []

    def bound(self, kind: int, address: str, max_bytes: int = MAX_MESSAGE_BYTES) -> "zmq.Socket[bytes]":
        """Returns a socket that listens at an address. Raises zmq.ZMQError when it cannot be opened."""
        socket = self._new(kind, address, max_bytes)
        if (keys := self._keys_for(address)) is not None:
            self._let_in_our_own(keys)
            keys.serve(socket)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer whose connection was cut comes back under its name
        socket.bind(address)
        return socket

    def connected(self, kind: int, address: str, linger_ms: int = _LINGER_MS) -> "zmq.Socket[bytes]":
        """Returns a socket that connects to an address, and again whenever the connection is lost.

        linger_ms: how long the last messages may take to leave when it is closed
        """
        socket = self._dialling(kind, address, linger_ms)
        socket.connect(address)
        return socket

    def reconnecting(
        self, kind: int, address: str, routing_id: bytes
    ) -> tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]:
        """Returns a socket that connects under a routing id, and one with an event for each connection made or cut.

        When a connection was cut, messages in both directions may be lost; the next one counts as that of the same peer
        at a ROUTER of ours.
        """
        socket = self._dialling(kind, address, _LINGER_MS)
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
        connections = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
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

    def _keys_for(self, address: str) -> "Keys | None":
        """Returns the keys for a socket with this address; None: it is in a folder that only its owner enters."""
        return None if address.startswith("ipc://") else self._keys

    def _dialling(self, kind: int, address: str, linger_ms: int) -> "zmq.Socket[bytes]":
        """Returns a socket that is about to connect."""
        socket = self._new(kind, address, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, linger_ms)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        if (keys := self._keys_for(address)) is not None:
            keys.connect(socket)
        return socket

    def _new(self, kind: int, address: str, max_bytes: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in (
            (zmq.IPV6, int("[" in address)),
            (zmq.LINGER, 500),
            (zmq.MAXMSGSIZE, max_bytes),
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.RCVHWM, _HIGH_WATER),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.CONNECT_TIMEOUT, _CONNECT_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_DEADLINE_MS),
        ):
            socket.setsockopt(option, value)
        self._sockets.append(socket)
        return socket

    def _let_in_our_own(self, keys: "Keys") -> None:
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=keys)


DOMAIN = "moe_serve"  # ZeroMQ asks the authenticator of a socket only where it has a domain


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, as Z85 text."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class Keys:
    """The keys of one system. server: of sockets that bind;  client: of sockets that connect"""

    server: KeyPair
    client: KeyPair

    @classmethod
    def of(cls, token: str) -> "Keys":
        """Returns the keys of a token. Raises LaunchError where this ZeroMQ has no CURVE."""
        if not zmq.has("curve"):
            raise LaunchError(
                f"ZeroMQ {zmq.zmq_version()} was built without CURVE, which links between processes need; install the "
                "wheel: pip install --force-reinstall --only-binary :all: pyzmq"
            )
        return cls(_key_pair(token, b"moe_serve server"), _key_pair(token, b"moe_serve client"))

    def serve(self, socket: "zmq.Socket[bytes]") -> None:
        """Sets up a socket that will bind; an `Authenticator` must run in its context."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())

    def connect(self, socket: "zmq.Socket[bytes]") -> None:
        """Sets up a socket that will connect."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client.secret)

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether a client may come in: pyzmq's authenticator calls it with the client's public key."""
        return key == self.client.public


def _key_pair(token: str, purpose: bytes) -> KeyPair:
    secret = z85.encode(hashlib.blake2b(token.encode(), key=purpose, digest_size=32).digest())
    return KeyPair(zmq.curve_public(secret), secret)


log = get_logger(__name__)
_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_TOLD_EVERY_S = 60.0


class Refusals:
    """Counts refused connections to a socket, and logs them once a minute.

    Made beside the socket, before it is shared; `look` belongs to one thread, and is called often.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", address: str):
        self._socket = socket
        self._address = address
        self._num_refused = 0
        self._told_s: float | None = None
        where = f"inproc://refusals-{id(self)}"
        socket.monitor(where, _EVENTS)
        self._events: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        # Without a bound: ZeroMQ's own thread would wait for a reader that is late, and serve no connection meanwhile.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(where)

    def look(self) -> None:
        """Counts what was refused since the last look."""
        while self._events.poll(0):
            self._events.recv_multipart()
            self._num_refused += 1
        now_s = time.monotonic()
        if self._num_refused and (self._told_s is None or now_s - self._told_s > _TOLD_EVERY_S):
            log.warning(
                "%d connections to %s were refused: they did not show the token of this system. If a rank is missing, "
                "give it the front end's MOE_SERVE_TOKEN or server.token_file",
                self._num_refused,
                self._address,
            )
            self._told_s, self._num_refused = now_s, 0

    def close(self) -> None:
        self._socket.disable_monitor()  # first: ZeroMQ's thread would wait for a reader that is gone
        self._events.close(linger=0)
