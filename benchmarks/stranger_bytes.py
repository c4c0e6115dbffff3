"""What strangers send to ports that are not theirs."""

import random
import struct

from moe_serve.engine.protocol.messages import Fatal, Wake, encode


def payloads() -> list[bytes]:
    """Returns noise, length prefixes of 4 GB, invalid UTF-8, and real messages without a token."""
    draw = random.Random(11)
    huge = b"\x02" + struct.pack(">Q", 2**32)
    frames = [encode(Wake(0, 1)), encode(Fatal(1, 0, "rank 1 has ended", 1)), b"\x93\xa4wak\xff\xff\0"]
    return [
        b"",
        bytes(draw.randrange(256) for _ in range(4096)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"\x80\x04K\x01.",
        struct.pack("<Q", 2**32) + b"\xff" * 64,
        struct.pack(">I", 2**32 - 1) + b"\xff" * 64,
        greeting(b"NULL") + huge + b"x" * 1000,
        greeting(b"CURVE") + huge + b"x" * 1000,
        *(greeting(b"NULL") + b"\0" + bytes([len(frame)]) + frame for frame in frames),
    ]


def greeting(mechanism: bytes) -> bytes:
    """Returns the greeting of ZMTP 3.0."""
    return b"\xff" + b"\0" * 8 + b"\x7f\x03\0" + mechanism.ljust(20, b"\0") + b"\0" * 32
