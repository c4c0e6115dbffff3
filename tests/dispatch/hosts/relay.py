"""A relay on the loopback interface that stands for the network between two hosts: it can cut, delay and swallow."""

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Relay:
    """Passes on what each connection to `address` carries to the target, and back.

    swallows: directions whose bytes vanish without a sign, "out" (to the target) or "back"
    delay_s:  of every piece;  most_bytes: after so many to the target, in all, connections are closed; None: never
    largest:  of a longer piece only so much comes, and nothing after it, as where large packets are lost; None: all
    stalls:   whether nothing is read, so that senders' buffers fill
    refuses:  whether new connections are closed at once;  num_taken: connections so far;  carried: bytes to the target
    """

    target: tuple[str, int]
    address: tuple[str, int] = ("", 0)
    swallows: set[str] = field(default_factory=set)
    delay_s: float = 0.0
    most_bytes: int | None = None
    largest: int | None = None
    stalls: bool = False
    refuses: bool = False
    num_taken: int = 0
    carried: int = 0
    _pairs: list[tuple[socket.socket, socket.socket]] = field(default_factory=list)
    _ends: bool = False

    def reset(self) -> None:
        """Resets all connections."""
        for pair in self._pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.shutdown(socket.SHUT_RD)  # its thread closes it
        self._pairs.clear()

    def _serve(self, listener: socket.socket) -> None:
        while not self._ends:
            if not select.select([listener], [], [], 0.05)[0]:
                continue
            near, _ = listener.accept()
            self.num_taken += 1
            if self.refuses:
                near.close()
                continue
            try:
                far = socket.create_connection(self.target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._pairs.append((near, far))
            if self.refuses:  # by now
                self.reset()
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        lost: list[socket.socket] = []  # nothing more comes from there
        with near, far, contextlib.suppress(OSError):
            while not self._ends:
                if self.stalls:
                    time.sleep(0.01)
                for one in [] if self.stalls else select.select([near, far], [], [], 0.05)[0]:
                    data = one.recv(1 << 16)
                    if not data:
                        return
                    time.sleep(self.delay_s)
                    if one is near:
                        self.carried += len(data)
                        if self.most_bytes is not None and self.carried > self.most_bytes:
                            far.sendall(data[: max(len(data) - (self.carried - self.most_bytes), 0)])
                            return
                    if ("out" if one is near else "back") not in self.swallows and one not in lost:
                        (far if one is near else near).sendall(data[: self.largest])
                    if self.largest is not None and len(data) > self.largest:
                        lost.append(one)


@contextlib.contextmanager
def relay(target: tuple[str, int]) -> Iterator[Relay]:
    """Yields a relay to an address of this machine."""
    made = Relay(target)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made.address = listener.getsockname()[:2]
        thread = threading.Thread(target=made._serve, args=(listener,))
        thread.start()
        try:
            yield made
        finally:
            made._ends = True
            thread.join()
            made.reset()
