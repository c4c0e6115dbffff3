"""Where one thing is done at a time, clients take turns."""

import asyncio

import pytest

from moe_serve.errors import QueueFullError
from moe_serve.server.workers.fair_queue import FairQueue
from tests.server.served import in_event_loop


async def work(queue: FairQueue, client: str, done: list[str]) -> None:
    async with queue.turn(client):
        await asyncio.sleep(0)
        done.append(client)


@in_event_loop
async def test_a_client_with_much_work_delays_another_by_one_piece_of_it():
    queue, done = FairQueue("pieces"), []
    await asyncio.gather(*[work(queue, client, done) for client in "aaaaaabbc"])
    assert "".join(done) == "aabcabaaa"
    await work(queue, "c", done)
    assert done[-1] == "c"


@in_event_loop
async def test_as_many_as_may_have_their_turn_at_once_and_one_that_leaves_passes_it_on():
    queue, active, most = FairQueue("pieces", at_once=2), 0, 0

    async def piece(client: str) -> None:
        nonlocal active, most
        async with queue.turn(client):
            active += 1
            most = max(most, active)
            try:
                await asyncio.sleep(0.001)
            finally:
                active -= 1

    for _ in range(2):
        tasks = [asyncio.ensure_future(piece(client)) for client in "aaaabbcc"]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[5].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most == 2
        async with asyncio.timeout(1), queue.turn("d"), queue.turn("d"):  # both are free again
            pass


@in_event_loop
async def test_the_line_of_one_client_is_bounded_and_others_go_on():
    queue, done = FairQueue("pieces", max_waiting=2), []
    waiting = [asyncio.ensure_future(work(queue, "a", done)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="2 pieces of this client wait already"):
        await work(queue, "a", done)
    await work(queue, "b", done)
    await asyncio.gather(*waiting)
    assert sorted(done) == ["a", "a", "a", "b"]


@pytest.mark.parametrize("num_before", range(6))
@in_event_loop
async def test_who_leaves_while_it_waits_works_or_as_its_turn_comes_holds_up_nobody(num_before):
    queue, done = FairQueue("pieces"), []
    tasks = [asyncio.ensure_future(work(queue, client, done)) for client in "aabb"]
    for _ in range(num_before):
        await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tasks[3].exception() is None
    await work(queue, "c", done)
    assert done[-1] == "c"
