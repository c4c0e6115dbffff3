"""Decoders: whatever an unauthenticated peer sends, the answer is one kind of error."""

import random

import msgspec
import pytest

from moe_serve.engine.protocol.messages import (
    Answer,
    Hello,
    SetPlacement,
    TokenEvent,
    Tokens,
    Wake,
    decode_to_front_end,
    decode_to_rank,
    decode_wake,
    encode,
)

DECODERS = (decode_wake, decode_to_rank, decode_to_front_end)
INVALID_UTF8 = b"\x93\xa4\xff\xfe\xfd\xfc\x00\x00"
DEEP = encode(Answer(0, 0, 1, True, "", {}))[:-1] + b"\x81\xa1a" * 100_000 + b"\x01"


@pytest.mark.parametrize("data", [b"", b"\xff" * 1000, b"\x80\x04K\x01.", INVALID_UTF8, DEEP], ids=range(5))
@pytest.mark.parametrize("decode", DECODERS)
def test_what_is_not_ours_is_a_decode_error(decode, data):
    with pytest.raises(msgspec.DecodeError):
        decode(data)


def test_changed_bytes_of_real_messages_are_decoded_or_refused():
    draw = random.Random(7)
    real = [
        encode(Tokens(0, 0, [TokenEvent("request", 0, 3, [7])])),
        encode(Hello(0, 2, 0, 1, "host")),
        encode(SetPlacement(1, [[0, 1]])),
        encode(Wake(1, 2)),
    ]
    num_decoded = 0
    for _ in range(5000):
        data = bytearray(draw.choice(real))
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        for decode in DECODERS:
            try:
                message = decode(bytes(data))
            except msgspec.DecodeError:
                continue
            assert encode(decode(encode(message))) == encode(message)  # bytes, since a changed number may be NaN
            num_decoded += 1
    assert num_decoded > 100
