import socket
import time

import pytest

from moe_serve.socket_bytes import receive


def test_at_a_deadline_one_is_told_what_was_missing():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"abc")
        with pytest.raises(TimeoutError, match="5 of 8 bytes are missing"):
            receive(ours, 8, until_s=time.monotonic() + 0.05)
