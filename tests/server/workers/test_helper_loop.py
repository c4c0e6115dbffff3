"""The child's side of a helper process: one job, one answer, and when it ends."""

from io import BytesIO

import pytest

from moe_serve.server.workers import helper_loop
from moe_serve.server.workers.helper_loop import serve_one, unbounded_time
from moe_serve.server.workers.pool import FRAME, REPLY


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests has often grown beyond what a helper may."""
    monkeypatch.setattr(helper_loop, "_KEPT_BYTES", 1 << 60)


def serve(job: bytes, core_s: float = 60.0) -> tuple[bool, bytes]:
    """Returns whether the process goes on, and what it wrote."""

    def answer(job: bytes) -> bytes:
        while job == b"spin":
            pass
        if job == b"free":
            with unbounded_time():
                sum(range(5_000_000))
        return job[::-1]

    sink = BytesIO()
    return serve_one(BytesIO(FRAME.pack(len(job), core_s) + job), sink, answer), sink.getvalue()


def test_a_job_is_answered_and_the_end_of_the_input_ends_the_process():
    assert serve(b"abc") == (True, REPLY.pack(3, False, False) + b"cba")
    assert not serve_one(BytesIO(), BytesIO(), bytes)


def test_a_job_that_takes_longer_ends_and_the_process_goes_on():
    assert serve(b"spin", 0.02) == (True, REPLY.pack(0, True, False))
    assert serve(b"free", 0.02) == (True, REPLY.pack(4, False, False) + b"eerf")


def test_a_process_that_has_grown_says_with_its_answer_that_it_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(helper_loop, "_KEPT_BYTES", 0)
    assert serve(b"abc") == (False, REPLY.pack(3, False, True) + b"cba")
