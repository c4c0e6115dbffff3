"""A process that lies in cables: it passes packets on after a delay. `python -m tests.launcher.cable DELAY_S A:B ...`

A and B are network devices; what comes in at one goes out at the other. Packets keep their offloads (virtio header),
so a packet of 64 KiB is one packet here too.
"""

import contextlib
import select
import socket
import sys
import time
from collections import deque

_SOL_PACKET, _PACKET_VNET_HDR, _ETH_P_ALL, _PACKET_OUTGOING = 263, 15, 3, 4
_LARGEST = 1 << 17


def main() -> None:
    delay_s, ends = float(sys.argv[1]), {}
    for cable in sys.argv[2:]:
        a, b = map(_device, cable.split(":"))
        ends |= {a: b, b: a}
    held: deque[tuple[float, socket.socket, bytes]] = deque()
    print("carries", flush=True)
    while True:
        wait_s = max(held[0][0] - time.monotonic(), 0.0) if held else None
        for source in select.select(list(ends), [], [], wait_s)[0]:
            for packet in _packets(source):
                held.append((time.monotonic() + delay_s, ends[source], packet))
        while held and held[0][0] <= time.monotonic():
            _, out, packet = held.popleft()
            with contextlib.suppress(OSError):  # a full queue or a cable that is down loses packets
                out.send(packet)


def _device(name: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    made.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE
    made.bind((name, 0))
    made.setblocking(False)
    return made


def _packets(source: socket.socket) -> list[bytes]:
    found = []
    while len(found) < 64:
        try:
            packet, (_, _, kind, *_) = source.recvfrom(_LARGEST)
        except BlockingIOError:
            break
        if kind != _PACKET_OUTGOING:  # what this process sent itself
            found.append(packet)
    return found


if __name__ == "__main__":
    main()
