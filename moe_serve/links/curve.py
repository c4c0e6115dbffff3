"""Encryption and authentication of TCP links: CURVE keys that both sides derive from the token of the system.

An unauthenticated peer does not know the server's public key, so the first message of its handshake is refused, and no
message of ours is decoded. Each connection draws new keys, so recorded bytes are of no use later.
"""

import hashlib
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from moe_serve.errors import LaunchError

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
