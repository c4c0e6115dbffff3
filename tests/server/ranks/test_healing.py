"""Connections are cut, the front end or all ranks are started again: requests go on with the same tokens.

Over real sockets, with the mailbox of a real rank.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from moe_serve.engine.protocol import mailbox
from moe_serve.engine.protocol.messages import Fatal, Members
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.ranks.request_book import MAX_LOSSES
from moe_serve.server.requests.open_request import Changes, OpenRequest, UnavailableError
from tests.server.fake_worker import FakeWorker, LinkedWorker
from tests.server.proxy import Proxy
from tests.server.ranks.test_bridge import finished, spec
from tests.server.served import bridge_over_tcp, end_without_a_word, fake_config, in_event_loop, until

GOES_ON = {"on_lost_rank": "mask"}


@contextlib.asynccontextmanager
async def ranks(*workers: FakeWorker) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def front_end(port: int = 0, *overrides: str, num_ranks: int = 2) -> AsyncIterator[Bridge]:
    bridge = bridge_over_tcp(fake_config(num_ranks, f"server.worker_port={port}", *overrides))
    await bridge.start()
    try:
        yield bridge
    finally:
        await bridge.close()


def check_tokens(requests: list[OpenRequest]) -> None:
    for request in requests:
        assert request.failure is None
        count = request.spec.params.max_new_tokens
        assert request.matcher.output_ids == [2 + (request.spec.seed + i) % 2000 for i in range(count)]


@in_event_loop
async def test_a_loss_that_every_rank_reports_is_said_once_and_again_with_the_rank_that_is_named(caplog):
    async with front_end(num_ranks=4) as bridge:
        workers = [FakeWorker(rank, 4, bridge.link.port, token=bridge.link.token) for rank in range(4)]
        async with ranks(*workers):
            await bridge.wait_until_ready()
            for worker in workers[:3]:
                worker.say(Fatal(worker.rank, 0, "a rank went away", -1))
                await asyncio.sleep(0.6)  # longer than a report waits for one that names the rank
            (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
            assert said == "rank 0 on testhost reports that a rank is lost: a rank went away"
            workers[3].say(Fatal(3, 0, "out of memory", 3))
            await until(lambda: "rank 3 on testhost failed" in caplog.text)


@in_event_loop
async def test_cut_connections_heal_and_requests_go_on_where_they_were():
    async with front_end() as bridge:
        proxy = Proxy(bridge.link.port)
        await proxy.start()
        workers = [LinkedWorker(rank, 2, proxy.port, token=bridge.link.token) for rank in range(2)]
        async with ranks(*workers):
            await bridge.wait_until_ready()
            changes = Changes()
            requests = bridge.submit([spec(seed=20 * i, max_new_tokens=200) for i in range(8)], changes)
            for cut in range(1, 4):
                known = [request.num_output for request in requests]
                await until(lambda known=known: all(r.num_output > k for r, k in zip(requests, known, strict=True)))
                proxy.cut()
                await until(lambda cut=cut: all(worker.num_reconnects == cut for worker in workers))
            await finished(changes, 8)
            check_tokens(requests)
            assert bridge.book.counters["num_resubmitted"] >= 8
            assert bridge.book.counters["num_failed"] == 0
            await until(lambda: not any(worker.running for worker in workers))
        await proxy.stop()


@in_event_loop
async def test_a_front_end_that_is_started_again_joins_running_ranks_and_learns_what_it_missed():
    async with front_end(num_ranks=3) as first:
        port = first.link.port
        workers = [LinkedWorker(rank, 3, port, launch_id=5, info=GOES_ON) for rank in (0, 2)]
        lost = FakeWorker(1, 3, port, launch_id=5, info=GOES_ON)
        async with ranks(*workers):
            async with ranks(lost):
                await first.wait_until_ready()
                left = first.submit([spec(max_new_tokens=5000, rank=0)], Changes())
                await until(lambda: left[0].num_output > 0)
            for worker in workers:
                worker.say(Members(worker.rank, 5, 1, [0, 2], "rank 1 died"))
            await until(lambda: 1 in first.workers.masked)
            end_without_a_word(first)
            async with front_end(port, num_ranks=3) as second:
                await second.wait_until_ready()
                assert second.workers.masked == {1: "rank 1 died"}
                assert not workers[0].running, "what the old front end had submitted is dropped"
                changes = Changes()
                requests = second.submit([spec(seed=i) for i in range(6)], changes)
                await finished(changes, 6)
                check_tokens(requests)
                assert {request.rank for request in requests} == {0, 2}


async def lose_launch(bridge: Bridge, workers: list[FakeWorker], rank: int) -> None:
    workers[rank].say(Fatal(rank, workers[rank].launch_id, "out of memory", rank))
    await until(lambda: bridge.workers.loss is not None)


def launch(bridge: Bridge, launch_id: int) -> list[FakeWorker]:
    return [FakeWorker(rank, 2, bridge.link.port, launch_id, restarts_left=1) for rank in range(2)]


@in_event_loop
async def test_requests_outlive_all_ranks_where_these_are_started_again():
    async with front_end() as bridge:
        changes = Changes()
        old = launch(bridge, 7)
        async with ranks(*old):
            await bridge.wait_until_ready()
            requests = bridge.submit([spec(seed=20 * i, max_new_tokens=60) for i in range(8)], changes)
            await until(lambda: all(request.num_output for request in requests))
            await lose_launch(bridge, old, 1)
        assert "being started again: rank 1 on testhost failed: out of memory" in bridge.problem()
        with pytest.raises(UnavailableError, match="started again"):
            bridge.submit([spec()], changes)
        bridge.book.abort(requests[0])
        async with ranks(*launch(bridge, 3)):
            await finished(changes, 7)
        check_tokens(requests[1:])
        assert bridge.book.counters["num_resubmitted"] == 7


@in_event_loop
async def test_requests_wait_no_longer_than_the_deadline_for_ranks_that_nobody_starts():
    async with front_end(0, "server.restart_deadline_s=0.1") as bridge:
        changes = Changes()
        old = launch(bridge, 7)
        async with ranks(*old):
            await bridge.wait_until_ready()
            bridge.submit([spec(max_new_tokens=5000)], changes)
            await lose_launch(bridge, old, 1)
        (request,) = await finished(changes, 1)
        assert "not started again within server.restart_deadline_s = 0.1 s" in str(request.failure)
        assert bridge.problem() == "rank 1 on testhost failed: out of memory"


@in_event_loop
async def test_requests_wait_no_longer_where_the_next_launch_begins_before_it_is_known_who_was_lost(monkeypatch):
    monkeypatch.setattr("moe_serve.server.ranks.bridge._UNNAMED_LOSS_S", 0.3)
    async with front_end(0, "server.restart_deadline_s=0.6") as bridge:
        changes = Changes()
        old = launch(bridge, 7)
        async with ranks(*old):
            await bridge.wait_until_ready()
            bridge.submit([spec(max_new_tokens=5000)], changes)
            old[0].say(Fatal(0, 7, "connection closed by peer", -1))
            await until(lambda: bridge.workers.loss is not None)
            next_one = asyncio.create_task(launch(bridge, 8)[0].run(ready=False))
            (request,) = await finished(changes, 1)
            assert "not started again within server.restart_deadline_s = 0.6 s" in str(request.failure)
            next_one.cancel()
            await asyncio.gather(next_one, return_exceptions=True)


@in_event_loop
async def test_a_request_that_ends_one_launch_after_the_other_is_not_tried_for_ever():
    async with front_end() as bridge:
        changes = Changes()
        request = other = None
        for number in range(1, MAX_LOSSES + 2):
            workers = launch(bridge, number)
            for worker in workers:
                worker.reply = lambda submit: []
            async with ranks(*workers):
                await bridge.wait_for_restart()
                if request is None:
                    request, other = bridge.submit([spec(rank=0), spec(rank=1)], changes)
                await lose_launch(bridge, workers, 0)
        (failed,) = await finished(changes, 1)
        assert failed is request
        assert f"{MAX_LOSSES + 1} ranks were lost while they served this request" in str(failed.failure)
        assert not other.is_done


@in_event_loop
async def test_a_launch_that_is_gone_without_a_word_is_replaced_and_its_requests_go_on(monkeypatch):
    monkeypatch.setattr("moe_serve.server.ranks.rank_table.GONE_S", 0.5)
    monkeypatch.setattr(mailbox.Greeting.__init__, "__defaults__", (0.2,))
    async with front_end() as bridge:
        changes = Changes()
        async with ranks(*launch(bridge, 7)):
            await bridge.wait_until_ready()
            requests = bridge.submit([spec(seed=i, max_new_tokens=120) for i in range(4)], changes)
            await until(lambda: all(request.num_output for request in requests))
        async with ranks(*(LinkedWorker(rank, 2, bridge.link.port, 4) for rank in range(2))):
            await finished(changes, 4)
        check_tokens(requests)


@in_event_loop
async def test_a_rank_that_is_refused_hears_why():
    async with front_end() as bridge, ranks(*launch(bridge, 7)):
        await bridge.wait_until_ready()
        second = LinkedWorker(0, 3, bridge.link.port, 8)
        async with ranks(second):
            await until(lambda: second.refusal is not None)
        assert "belongs to 3 ranks but this front end serves 2" in second.refusal
