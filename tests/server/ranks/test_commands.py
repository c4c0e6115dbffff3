"""Commands to the ranks: sent to all that take part, answered by the lowest, never awaited for ever."""

import asyncio

import pytest

from moe_serve.engine.protocol.messages import Answer, Fatal, FlushCache, Members, Rebalance, RecordCommand
from moe_serve.errors import QueueFullError
from moe_serve.server.ranks import calls
from moe_serve.server.ranks.calls import CommandBook
from moe_serve.server.requests.open_request import UnavailableError
from tests.server.served import in_event_loop, serving, until

START = "/start_expert_distribution_record"
DUMP = "/dump_expert_distribution_record"


@pytest.mark.parametrize("method", ["GET", "POST"])
@in_event_loop
async def test_the_recorder_is_controlled_as_sglangs(method: str):
    async with serving(2) as served:
        files = ["/tmp/expert_distribution_recorder_1.5.pt"]
        served.workers[0].answer = lambda call_id: Answer(0, 0, call_id, True, "done", {"files": files})
        wanted = {
            "start": "Start recording expert distribution.\n",
            "stop": "Stop recording expert distribution.\n",
            "dump": "Dump expert distribution record.\n",
        }
        for command, text in wanted.items():
            response = await served.client.request(method, f"/{command}_expert_distribution_record")
            assert (response.status_code, response.text) == (200, f"{text}done\n{files[0]}\n")
        await until(lambda: len(served.workers[1].commands) == 3)
        for worker in served.workers:
            first = served.workers[0].commands[0].call_id
            assert worker.commands == [RecordCommand(first + i, name) for i, name in enumerate(wanted)]


@in_event_loop
async def test_a_command_that_fails_says_why():
    async with serving(2) as served:
        served.workers[0].answer = lambda call_id: Answer(0, 0, call_id, False, "No space left on device")
        response = await served.client.post(DUMP)
        assert response.status_code == 409
        assert response.json()["error"]["message"] == "No space left on device"


@in_event_loop
async def test_without_recording_the_answer_says_what_to_set():
    async with serving(1, "eplb.mode=off") as served:
        response = await served.client.post(START)
        assert response.status_code == 400
        assert "start the server with eplb.mode=static" in response.json()["error"]["message"]
        assert not served.workers[0].commands


@in_event_loop
async def test_a_command_fails_when_the_ranks_end_or_the_server_does():
    async with serving(2) as served:
        calls = [asyncio.create_task(served.client.post(START)) for _ in range(2)]
        await until(lambda: len(served.workers[0].commands) == 2)
        served.workers[1].say(Fatal(1, 0, "out of memory", 1))
        for response in await asyncio.gather(*calls):
            assert response.status_code == 503
            assert "rank 1 on testhost failed: out of memory" in response.text
        assert (await served.client.post(START)).status_code == 503, "and no new one is taken"
    async with serving(2) as served:
        call = asyncio.create_task(served.client.post(START))
        await until(lambda: bool(served.workers[0].commands))
        served.server.stop()
        assert "the server is ending" in (await call).text


@in_event_loop
async def test_a_command_fails_with_its_leader_and_the_next_one_goes_to_the_ranks_that_are_left():
    async with serving(3, info={"on_lost_rank": "mask"}) as served:
        call = asyncio.create_task(served.bridge.command(Rebalance(0)))
        await until(lambda: bool(served.workers[0].commands))
        for rank in (1, 2):
            served.workers[rank].say(Members(rank, 0, 1, [1, 2], "rank 0 died"))
        with pytest.raises(UnavailableError, match="rank 0 was lost before it answered the rebalance command"):
            await call
        served.workers[1].answer = lambda call_id: Answer(1, 0, call_id, True, "planning")
        answer = await served.bridge.command(Rebalance(0))
        assert (answer.rank, answer.text) == (1, "planning")
        assert len(served.workers[0].commands) == 1


@in_event_loop
async def test_the_loss_of_another_rank_leaves_a_command_open():
    async with serving(3, info={"on_lost_rank": "mask"}) as served:
        call = asyncio.create_task(served.bridge.command(Rebalance(0)))
        await until(lambda: bool(served.workers[0].commands))
        for rank in (0, 1):
            served.workers[rank].say(Members(rank, 0, 1, [0, 1], "rank 2 died"))
        served.workers[0].say(Answer(0, 0, served.workers[0].commands[0].call_id, True, "done"))
        assert (await call).ok


@in_event_loop
async def test_open_commands_and_waits_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "_MAX_OPEN", 2)
    sent = []
    book = CommandBook(lambda rank, message: sent.append((rank, message)))
    waiting = [asyncio.create_task(book.call(Rebalance(0), [0, 1], 30.0)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="2 commands wait"):
        await book.call(Rebalance(0), [0, 1], 30.0)
    assert sent == [(rank, Rebalance(call_id)) for call_id in (1, 2) for rank in (0, 1)]
    book.take(Answer(0, 0, 2, True, "second"))
    book.take(Answer(0, 0, 2, True, "repeated"))
    book.take(Answer(0, 0, 99, True, "of nobody"))
    assert (await waiting[1]).text == "second"
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    with pytest.raises(UnavailableError, match=r"rank 4 did not answer the record command within 0.01 s"):
        await book.call(RecordCommand(0, "dump"), [4], 0.01)
    book.fail_all("over")


@pytest.mark.parametrize("method", ["GET", "POST"])
@in_event_loop
async def test_flush_cache_asks_every_rank_and_is_refused_while_requests_are_open(method: str):
    async with serving(2) as served:
        for rank, worker in enumerate(served.workers):
            worker.answer = lambda call_id, rank=rank: Answer(rank, 0, call_id, True, f"{3 + rank} blocks")
        response = await served.client.request(method, "/flush_cache")
        assert (response.status_code, response.text) == (
            200,
            "Cache flushed.\n3 blocks of rank 0, 4 blocks of rank 1\n",
        )
        served.workers[1].answer = lambda call_id: Answer(1, 0, call_id, False, "1 requests are open")
        response = await served.client.post("/flush_cache")
        assert (response.status_code, response.json()["error"]["message"]) == (400, "rank 1: 1 requests are open")
        served.hold()
        call = asyncio.create_task(served.generate(input_ids=[7]))
        await until(lambda: len(served.bridge.book) == 1)
        response = await served.client.post("/flush_cache")
        assert response.status_code == 400
        assert "1 requests are open; flush the cache when they have ended" in response.text
        assert [len(worker.commands) for worker in served.workers] == [2, 2], "and no rank was asked"
        call.cancel()


@in_event_loop
async def test_a_command_to_each_rank_names_those_that_did_not_answer():
    book = CommandBook(lambda rank, message: None)
    call = asyncio.create_task(book.call_each(FlushCache(0), [0, 1, 2], 0.05))
    await asyncio.sleep(0)
    book.take(Answer(1, 0, 1, True, "done"))
    with pytest.raises(UnavailableError, match=r"rank 0, 2 did not answer the flush_cache command within 0.05 s"):
        await call
    call = asyncio.create_task(book.call_each(FlushCache(0), [0, 1, 2], 30.0))
    await asyncio.sleep(0)
    book.lose([3])
    book.lose([0, 2])
    with pytest.raises(UnavailableError, match="rank 0, 2 was lost before it answered"):
        await call
