"""Helper processes: a client with long jobs waits for its own, and others do not."""

import asyncio

import pytest

from moe_serve.server.helpers.helper_pair import HelperPair
from moe_serve.server.helpers.helper_process import TooLongError
from tests.server.served import in_event_loop, until

SPINS = "tests.server.spinning_helper"


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
async def test_a_long_job_ends_after_its_time_in_the_second_process_and_its_client_is_forgiven():
    pair = HelperPair(SPINS, deadline_s=60.0, short_s=0.02, core_s=0.05, memory_s=0.0)
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
