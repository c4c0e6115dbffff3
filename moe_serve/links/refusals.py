"""Counts the connections to a socket that were refused because they did not show the token of the system."""

import time

import zmq

from moe_serve.log import get_logger

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
