"""Bridge: every request that was taken ends, whatever the ranks do. Over real sockets, without a model."""

import asyncio

import pytest
import zmq

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.protocol.messages import SUPERVISOR, Fatal, Hello, TokenEvent, Tokens, encode
from moe_serve.errors import LaunchError
from moe_serve.links.sockets import LinkSockets
from moe_serve.server.ranks import bridge as bridge_module
from moe_serve.server.requests.open_request import Changes, OpenRequest, RequestSpec, UnavailableError
from tests.server.fake_worker import FakeWorker
from tests.server.served import Served, bridge_over_tcp, fake_config, in_event_loop, serving, until

LONG = {"max_new_tokens": 50}


async def finished(changes: Changes, num_requests: int) -> list[OpenRequest]:
    done = []
    while len(done) < num_requests:
        request = await changes.next()
        if request.is_done:
            done.append(request)
    return done


def spec(ids=(5, 6), seed=1, **fields) -> RequestSpec:
    params = SamplingParams(max_new_tokens=fields.pop("max_new_tokens", 4))
    return RequestSpec(list(ids), params, seed, **fields)


async def waiting_calls(served: Served, count: int = 4) -> list[asyncio.Task]:
    """Open HTTP calls, some streaming, on ranks that produce nothing."""
    served.hold()
    calls = [
        asyncio.create_task(served.generate(input_ids=[7], sampling_params=LONG, stream=bool(i % 2)))
        for i in range(count)
    ]
    await until(lambda: sum(len(worker.submitted) for worker in served.workers) == count)
    return calls


async def all_fail(calls: list[asyncio.Task], words: str) -> None:
    for response in await asyncio.gather(*calls):
        assert words in response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.status_code == 503


@in_event_loop
async def test_a_rank_that_reports_its_own_failure_ends_every_request():
    async with serving() as served:
        calls = await waiting_calls(served)
        served.workers[1].say(Fatal(1, 0, "out of memory", 1))
        await all_fail(calls, "rank 1 on testhost failed: out of memory")
        ready = await served.client.get("/ready")
        assert ready.status_code == 503
        assert "rank 1" in ready.json()["error"]["message"]
        assert (await served.generate(text="a")).status_code == 503
        assert len(served.bridge.book) == 0


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (1, "rank 0 on testhost reports that rank 1 on testhost is lost"),
        (-1, "rank 0 on testhost reports that a rank is lost"),
    ],
)
@in_event_loop
async def test_a_peer_ends_every_request_with_its_report_of_a_lost_rank_whether_it_can_name_it_or_not(lost, words):
    async with serving() as served:
        calls = await waiting_calls(served)
        served.workers[0].say(Fatal(0, 0, "connection closed by peer", lost))
        await all_fail(calls, words)


@in_event_loop
async def test_a_loss_without_a_name_waits_for_one(monkeypatch):
    monkeypatch.setattr(bridge_module, "_UNNAMED_LOSS_S", 20.0)  # on a busy machine the name may come late
    async with serving() as served:
        calls = await waiting_calls(served)
        served.workers[0].say(Fatal(0, 0, "connection closed by peer", -1))
        await asyncio.sleep(0.05)
        assert (await served.client.get("/ready")).status_code == 503
        assert not any(call.done() for call in calls)
        sockets = LinkSockets(served.bridge.link)
        launcher = sockets.connected(zmq.DEALER, served.bridge.link.front_end)
        launcher.send(encode(Hello(SUPERVISOR, 2, 0, 1, "testhost")))
        launcher.send(encode(Fatal(SUPERVISOR, 0, "rank 1 was killed by SIGKILL", 1)))
        await all_fail(calls, "rank 1 was killed by SIGKILL")
        sockets.close()


@in_event_loop
async def test_a_silent_rank_is_lost_once_no_step_can_explain_it():
    async with serving(2, "server.worker_deadline_s=1", "engine.step_deadline_s=1.5") as served:
        calls = await waiting_calls(served)
        served.kill(1)
        while served.bridge.problem() is None:  # rank 0 goes on showing that it lives
            served.workers[0].load(1)
            await asyncio.sleep(0.2)
        await all_fail(
            calls, "(at most 1.5: the larger of server.worker_deadline_s and engine.step_deadline_s); it hangs"
        )


@in_event_loop
async def test_a_rank_that_was_told_to_end_by_somebody_else_is_named():
    from moe_serve.engine.protocol.messages import Goodbye

    async with serving() as served:
        calls = await waiting_calls(served)
        served.workers[0].say(Goodbye(0, 0))
        await all_fail(calls, "rank 0 was told to end")


@in_event_loop
async def test_ranks_that_do_not_come_in_time_are_named():
    bridge = bridge_over_tcp(fake_config(2, "server.attach_deadline_s=0.5"))
    await bridge.start()
    worker = FakeWorker(0, 2, bridge.link.port)
    task = asyncio.create_task(worker.run())
    with pytest.raises(UnavailableError, match=r"attach_deadline_s = 0.5 s \(rank 1: not attached\)"):
        await bridge.wait_until_ready()
    await bridge.close()
    task.cancel()


@in_event_loop
async def test_ending_the_server_ends_requests_and_ranks():
    async with serving() as served:
        calls = await waiting_calls(served)
        served.server.stop()
        await all_fail(calls, "the server is ending")
    assert all(worker.was_shut_down for worker in served.workers)


@in_event_loop
async def test_ranks_of_a_new_launch_serve_on_and_the_old_ones_are_not_heard():
    async with serving() as served:
        calls = await waiting_calls(served)
        old = served.workers
        served.workers[1].say(Fatal(1, 0, "boom", 1))
        await all_fail(calls, "boom")
        served.workers = [FakeWorker(rank, 2, served.bridge.link.port, launch_id=1) for rank in range(2)]
        served.tasks += [asyncio.create_task(worker.run()) for worker in served.workers]
        await until(lambda: served.bridge.problem() is None)
        answer = await served.generate(input_ids=[7], sampling_params={"max_new_tokens": 3, "sampling_seed": 5})
        assert answer.json()["output_ids"] == [7, 8, 9]
        old[0].say(Fatal(0, 0, "late news", 0))
        await asyncio.sleep(0.1)
        assert served.bridge.problem() is None


@in_event_loop
async def test_old_and_repeated_events_are_dropped():
    async with serving() as served:
        served.hold()
        changes = Changes()
        (request,) = served.bridge.submit([spec(max_new_tokens=6)], changes)
        rank, name = request.rank, request.request_id
        await until(lambda: served.workers[rank].submitted)
        say = served.workers[rank].say
        for launch_id, attempt, index, ids in [
            (0, 0, 0, [10, 11]),
            (0, 0, 0, [10, 11]),  # repeated
            (0, 0, 1, [11, 12, 13]),  # overlaps
            (0, 7, 4, [99]),  # another attempt
            (3, 0, 4, [99]),  # another launch
            (0, 0, 4, [14, 15]),
        ]:
            say(Tokens(rank, launch_id, [TokenEvent(name, attempt, index, ids)]))
        served.workers[1 - rank].say(Tokens(1 - rank, 0, [TokenEvent(name, 0, 6, [99])]))  # another rank
        await finished(changes, 1)
        assert request.matcher.output_ids == [10, 11, 12, 13, 14, 15]


@in_event_loop
async def test_a_reader_of_ends_is_woken_once_for_each_request_with_all_its_tokens():
    async with serving() as served:
        changes = Changes(ends_only=True)
        opened = served.bridge.submit([spec(max_new_tokens=n) for n in (1, 9, 5)], changes)
        ended = [await asyncio.wait_for(changes.next(), 10) for _ in opened]
        assert all(request.is_done for request in ended)
        assert {request.request_id: request.num_output for request in ended} == {
            request.request_id: n for request, n in zip(opened, (1, 9, 5), strict=True)
        }


@in_event_loop
async def test_missing_tokens_are_asked_for_again_and_leave_no_hole():
    async with serving() as served:
        served.hold()
        changes = Changes()
        (request,) = served.bridge.submit([spec()], changes)
        worker = served.workers[request.rank]
        await until(lambda: worker.submitted)
        worker.say(Tokens(request.rank, 0, [TokenEvent(request.request_id, 0, 2, [10])]))
        await until(lambda: request.attempt == 1)
        for each in served.workers:
            each.go.set()
        await finished(changes, 1)
        assert request.failure is None
        assert request.matcher.output_ids == [3, 4, 5, 6]


@in_event_loop
async def test_garbage_of_whoever_knows_the_token_is_dropped():
    async with serving() as served:
        sockets = LinkSockets(served.bridge.link)
        peer = sockets.connected(zmq.DEALER, served.bridge.link.front_end)
        for data in (b"", b"\x80\x04K\x01.", b"\xff" * 1000, encode(Fatal(0, 0, "I am not rank 0", 0))):
            peer.send(data)
        peer.send_multipart([b"a", b"b", b"c"])
        await asyncio.sleep(0.1)
        assert (await served.generate(text="a", sampling_params=LONG)).status_code == 200
        assert served.bridge.problem() is None
        sockets.close()


@in_event_loop
async def test_a_rank_with_another_token_is_not_taken():
    async with serving(start=False, token="another token than ours") as served:
        served.tasks += [asyncio.create_task(served.workers[0].run())]
        await asyncio.sleep(0.2)
        assert list(served.bridge.workers) == []


@in_event_loop
async def test_ranks_hear_that_the_front_end_lives():
    async with serving() as served:
        await until(lambda: all(worker.num_alive >= 2 for worker in served.workers))


@in_event_loop
async def test_a_session_stays_with_its_rank_and_a_chosen_rank_is_obeyed():
    async with serving() as served:
        served.hold()
        changes = Changes()
        same = served.bridge.submit([spec(ids=(i,), session_id="s") for i in range(6)], changes)
        chosen = served.bridge.submit([spec(rank=rank) for rank in (1, 0, 1)], changes)
        assert len({request.rank for request in same}) == 1
        assert [request.rank for request in chosen] == [1, 0, 1]
        served.go_on()
        await finished(changes, 9)


@in_event_loop
async def test_a_taken_worker_port_says_what_to_do():
    first = bridge_over_tcp(fake_config(1))
    await first.start()
    second = bridge_over_tcp(fake_config(1, f"server.worker_port={first.link.port}"))
    with pytest.raises(LaunchError, match=r"Address already in use.*server\.worker_port"):
        await second.start()
    await first.close()
    await second.close()
