"""One TCP connection between two processes of a system, authenticated by its token; nothing blocks.

Both ends say at once who they are: a line that other programs refuse, and a nonce. Each proves that it knows the token
(HMAC-SHA256 over both nonces), and each message carries a code over its number and text, so none can be changed, sent
again or left out. The text itself is not encrypted. Both ends first send more than a packet holds, so that a path that
loses large packets is told from one that works.
"""

import hashlib
import hmac
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator

from moe_serve.errors import LARGE_PACKETS_LOST, LaunchError

_GREETING = b"moe-serve channel 1\r\n\r\n"  # the empty line ends an HTTP request, so an HTTP server answers it
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_PROBE = bytes(32 << 10)  # several packets, jumbo frames too
_HEAD = struct.Struct(">I32s")  # bytes of the text, its code
MAX_TEXT_BYTES = 1 << 20
_MOST_UNSENT_BYTES = 8 << 20
_SHOWN_BYTES = 60  # of what another program says
# A host that is gone without a word is noticed within 20 s, by the kernel.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_USER_TIMEOUT, _USER_TIMEOUT_MS = 18, 20_000  # TCP_USER_TIMEOUT of Linux


class NotOursError(LaunchError):
    """The other end is another program, or has another token. To dial it again helps only where it is replaced."""


class Channel:
    """Sends and receives texts. `turn` is called often; nothing else reads or writes the socket.

    connected: a TCP socket, which may be connecting still;  dials: whether this end has made the connection
    is_open:   the other end has proved itself, and large packets pass
    """

    def __init__(self, connected: socket.socket, token: str, dials: bool):
        self.is_open = self._has_proved = False
        self.socket = connected
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option, value in _KEEPALIVE.items():
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            connected.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, _USER_TIMEOUT_MS)
        self._token = token.encode()
        self._dials = dials
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._arrived, self._unsent = b"", _GREETING + self._nonce
        self._key = b""  # of this connection, once the nonces are known
        self._has_ended = False
        self._num_sent = self._num_received = 0

    def send(self, text: bytes) -> None:
        """Sends a text, or keeps it until `turn` can. Raises OSError where the other end takes nothing any more."""
        assert self.is_open
        assert len(text) <= MAX_TEXT_BYTES
        code = self._code(self._dials, self._num_sent, text)
        self._num_sent += 1
        self._unsent += _HEAD.pack(len(text), code) + text
        if len(self._unsent) > _MOST_UNSENT_BYTES:
            raise OSError("it reads nothing")
        self._flush()

    def turn(self) -> Iterator[bytes]:
        """Yields the texts that have arrived.

        Raises NotOursError where the other end is no process of this system, OSError where the connection has ended.
        """
        try:
            self._flush()
            if not self.is_open:
                self._read(len(_GREETING) + _NONCE_BYTES + _PROOF_BYTES + len(_PROBE))
                self._shake_hands()
        except OSError as error:
            if not self._has_proved or self.is_open:
                raise
            raise OSError(f"{error.strerror or error}, as where {LARGE_PACKETS_LOST}") from None
        while self.is_open and (text := self._next()) is not None:
            yield text
        if self._has_ended:
            why = f", as where {LARGE_PACKETS_LOST}" if self._has_proved and not self.is_open else ""
            raise OSError(f"it closed the connection{why}")

    @property
    def silence(self) -> str:
        """What it means that the other end has said nothing more so far."""
        return LARGE_PACKETS_LOST if self._has_proved else "no answer, as where a firewall drops what is sent there"

    def close(self) -> None:
        """Closes the connection; what the kernel has taken is still delivered."""
        self.socket.close()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the other end reads."""
        return bool(self._unsent)

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._unsent = self._unsent[self.socket.send(self._unsent, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                return
            except OSError as error:
                if self._arrived or self.is_open:  # read first what it said before it went
                    self._has_ended, self._unsent = True, b""
                    return
                raise OSError(error.errno, os.strerror(error.errno or 0)) from None

    def _read(self, size: int) -> None:
        """Reads until `size` bytes have arrived, or there are no more now."""
        while len(self._arrived) < size and not self._has_ended:
            try:
                part = self.socket.recv(size - len(self._arrived))
            except BlockingIOError:
                return
            self._arrived += part
            self._has_ended = not part

    def _shake_hands(self) -> None:
        greeting, shown = self._arrived[: len(_GREETING)], self._arrived[:_SHOWN_BYTES]
        if not _GREETING.startswith(greeting):
            said = shown.decode(errors="replace").splitlines()[0] if shown.splitlines() else ""
            raise NotOursError(f"another program is there, which says {said!r}")
        after = self._arrived[len(_GREETING) :]
        if len(after) >= _NONCE_BYTES and not self._key:
            theirs = after[:_NONCE_BYTES]
            both = self._nonce + theirs if self._dials else theirs + self._nonce
            self._key = hmac.digest(self._token, b"moe_serve channel" + both, "sha256")
            for part in (self._proof(self._dials), _PROBE):  # in packets of their own
                self._unsent += part
                self._flush()
        if len(after) >= _NONCE_BYTES + _PROOF_BYTES and not self._has_proved:
            proof = after[_NONCE_BYTES : _NONCE_BYTES + _PROOF_BYTES]
            if not hmac.compare_digest(proof, self._proof(not self._dials)):
                raise NotOursError("it has another token (MOE_SERVE_TOKEN); give all hosts the same")
            self._has_proved = True
        if len(after) == _NONCE_BYTES + _PROOF_BYTES + len(_PROBE):
            self.is_open, self._arrived = True, b""

    def _proof(self, of_dialler: bool) -> bytes:
        return hmac.digest(self._key, b"I dial" if of_dialler else b"I listen", "sha256")

    def _code(self, of_dialler: bool, number: int, text: bytes) -> bytes:
        return hmac.new(self._key, struct.pack(">?Q", of_dialler, number) + text, hashlib.sha256).digest()

    def _next(self) -> bytes | None:
        self._read(_HEAD.size)
        if len(self._arrived) < _HEAD.size:
            return None
        size, code = _HEAD.unpack_from(self._arrived)
        if size > MAX_TEXT_BYTES:
            raise NotOursError(f"it sends a text of {size} bytes")
        self._read(_HEAD.size + size)
        text = self._arrived[_HEAD.size :]
        if len(text) < size:
            return None
        if not hmac.compare_digest(code, self._code(not self._dials, self._num_received, text)):
            raise NotOursError("a message was changed on its way")
        self._num_received += 1
        self._arrived = b""
        return text
