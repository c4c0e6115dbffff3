"""Helper processes: a client with long jobs waits for its own, and others do not."""

import asyncio
import errno
import os
import signal
from io import BytesIO

import pytest

from moe_serve.errors import QueueFullError
from moe_serve.server.workers import helper_process
from moe_serve.server.workers.helper_process import (
    FRAME,
    REPLY,
    HelperPair,
    TooLongError,
    serve_one,
    unbounded_time,
)
from tests.server.served import in_event_loop, until

SPINS = "tests.server.workers.spinning_helper"


@in_event_loop
async def test_a_client_with_long_jobs_holds_up_nobody_else():
    pair = HelperPair(SPINS, deadline_s=60.0, short_s=0.02, core_s=100.0)
    try:
        slow = [asyncio.create_task(pair.ask("slow", b"spin")) for _ in range(3)]
        await until(lambda: "slow" in pair._slow)
        late = asyncio.create_task(pair.ask("slow", b"its own"))
        for number in range(10):
            assert await pair.ask("other", b"%d" % number) == b"%d" % number
        assert not any(task.done() for task in [*slow, late])
        assert "other" not in pair._slow
        for task in [*slow, late]:
            task.cancel()
        await asyncio.gather(*slow, late, return_exceptions=True)
        assert await pair.ask("slow", b"again") == b"again"
    finally:
        await pair.close()


@in_event_loop
async def test_a_long_job_ends_after_its_time_in_the_second_process_and_its_client_is_forgiven(monkeypatch):
    monkeypatch.setattr(helper_process, "_SLOW_S", 0.0)
    pair = HelperPair(SPINS, deadline_s=60.0, short_s=0.02, core_s=0.05)
    try:
        with pytest.raises(TooLongError):
            await pair.ask("slow", b"spin")
        first = pair._first._process
        assert await pair.ask("slow", b"again") == b"again"
        assert pair._first._process is first, "what was ended is the job, not the process"
        assert first is not None
        assert first.returncode is None
    finally:
        await pair.close()


@in_event_loop
async def test_a_process_that_is_stopped_is_no_fault_of_the_job_and_the_next_one_gets_another():
    pair = HelperPair(SPINS, deadline_s=60.0, short_s=10.0, core_s=10.0)
    try:
        await pair.ask("client", b"a")
        pair._first._deadline_s = 0.1
        os.kill(pair._first._process.pid, signal.SIGSTOP)
        with pytest.raises(QueueFullError, match="too busy"):
            await pair.ask("client", b"b")
        assert not pair._slow
        pair._first._deadline_s = 60.0
        assert await pair.ask("client", b"c") == b"c"
    finally:
        await pair.close()


@in_event_loop
async def test_a_job_for_which_no_process_can_be_started_may_come_again(monkeypatch):
    pair = HelperPair(SPINS, deadline_s=60.0, short_s=10.0, core_s=10.0)

    async def no_descriptor(*command: str, **pipes: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", no_descriptor)
        with pytest.raises(QueueFullError, match=r"no process can be started .*Too many open files"):
            await pair.ask("client", b"a")
    try:
        assert await pair.ask("client", b"a") == b"a"
    finally:
        await pair.close()


@in_event_loop
async def test_processes_that_are_started_ahead_take_the_first_jobs():
    pair = HelperPair(SPINS, deadline_s=60.0, short_s=10.0, core_s=10.0)
    try:
        await pair.start(b"anything")
        both = [pair._first._process, pair._second._process]
        assert None not in both
        pair._note("slow")
        assert [await pair.ask(client, b"a") for client in ("quick", "slow")] == [b"a", b"a"]
        assert [pair._first._process, pair._second._process] == both
    finally:
        await pair.close()


@in_event_loop
async def test_processes_that_cannot_be_started_ahead_are_said_and_tried_again_with_the_first_job(monkeypatch, caplog):
    pair = HelperPair(SPINS, deadline_s=60.0, short_s=10.0, core_s=10.0)

    async def no_descriptor(*command: str, **pipes: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, caplog.at_level("WARNING"):
        patch.setattr(asyncio, "create_subprocess_exec", no_descriptor)
        await pair.start(b"anything")
    assert [f"{SPINS} could not be started ahead" in record.getMessage() for record in caplog.records] == [True, True]
    try:
        assert await pair.ask("client", b"a") == b"a"
    finally:
        await pair.close()


# The child's side: one job, one answer, and when it ends.


def serve(job: bytes, core_s: float = 60.0, kept_bytes: int | None = None) -> tuple[bool, bytes]:
    """Returns whether the process goes on, and what it wrote."""

    def answer(job: bytes) -> bytes:
        while job == b"spin":
            pass
        if job == b"free":
            with unbounded_time():
                sum(range(5_000_000))
        return job[::-1]

    sink = BytesIO()
    return serve_one(BytesIO(FRAME.pack(len(job), core_s) + job), sink, answer, kept_bytes), sink.getvalue()


def test_a_job_is_answered_and_the_end_of_the_input_ends_the_process():
    assert serve(b"abc") == (True, REPLY.pack(3, False, False) + b"cba")
    assert not serve_one(BytesIO(), BytesIO(), bytes)


def test_a_job_that_takes_longer_ends_and_the_process_goes_on():
    assert serve(b"spin", 0.02) == (True, REPLY.pack(0, True, False))
    assert serve(b"free", 0.02) == (True, REPLY.pack(4, False, False) + b"eerf")


def test_a_process_that_has_grown_says_with_its_answer_that_it_ends():
    assert serve(b"abc", kept_bytes=0) == (False, REPLY.pack(3, False, True) + b"cba")
