"""What a rank repeats to a front end that may not know it any more, and in which order."""

from moe_serve.engine.protocol.mailbox import Greeting
from moe_serve.engine.protocol.messages import ForFrontEnds, Hello, Ready
from tests.server.fake_worker import LIMITS

HELLO, READY = Hello(0, 2, 5, 99, "here"), Ready(0, 5, LIMITS, {})


def test_a_front_end_that_starts_anew_is_told_of_a_pause_before_it_may_send_requests() -> None:
    greeting, pause = Greeting(timeout_s=3.0), ForFrontEnds(1, 7, "pause", lasts=True)
    assert greeting.again(0, 0.0) == []
    for message in (HELLO, pause, READY, ForFrontEnds(1, 8, "abort"), ForFrontEnds(1, 6, "resume", lasts=True)):
        greeting.note(message, 0.0)
    hello, *rest = greeting.again(1, 1.0)
    assert isinstance(hello, Hello)
    assert (hello.num_reconnects, hello.is_ready) == (1, True)
    assert rest == [pause, READY]  # not an abort, which is over, nor an older end of a pause


def test_a_rank_that_hears_nothing_says_hello_again_once_it_is_ready() -> None:
    greeting = Greeting(timeout_s=3.0)
    greeting.note(HELLO, 0.0)
    assert not greeting.is_due(100.0, 0.0)
    greeting.note(READY, 0.0)
    assert [greeting.is_due(now_s, heard_s) for now_s, heard_s in ((3.0, 0.0), (3.5, 0.0), (3.5, 1.0))] == [
        False, True, False,
    ]  # fmt: skip
    greeting.again(0, 3.5)
    assert not greeting.is_due(6.0, 0.0)
