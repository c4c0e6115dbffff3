"""A rank is lost and its peers serve on: its requests move to them without a gap. Over real sockets."""

import asyncio
from collections.abc import Sequence

from moe_serve.engine.protocol.messages import Fatal, Members, TokenEvent, Tokens
from moe_serve.server.ranks import rank_table
from moe_serve.server.ranks.request_book import MAX_LOSSES
from moe_serve.server.requests.open_request import Changes, OpenRequest, UnavailableError
from tests.server.fake_worker import counting
from tests.server.ranks.test_bridge import finished, spec
from tests.server.served import Served, in_event_loop, serving, until

GOES_ON = {"on_lost_rank": "mask"}


def three_ranks(*overrides: str):
    return serving(3, *overrides, info=GOES_ON)


async def open_on_each(served: Served, changes: Changes, max_new_tokens: int = 40) -> list[OpenRequest]:
    """Requests of which every rank has some and has sent some tokens; then the ranks stand still."""
    specs = [spec(seed=10 * i, rank=i % 3, max_new_tokens=max_new_tokens) for i in range(6)]
    requests = served.bridge.submit(specs, changes)
    await until(lambda: all(request.num_output >= 2 for request in requests))
    served.hold()
    return requests


def say_group(
    served: Served,
    group_epoch: int,
    members: list[int],
    reason: str = "rank 1 died before exchange 7",
    ended: Sequence[int] = (),
) -> None:
    for rank in members:
        served.workers[rank].say(Members(rank, 0, group_epoch, members, reason, ended=list(ended)))


@in_event_loop
async def test_a_request_keeps_its_salt_on_the_rank_that_goes_on_with_it():
    async with three_ranks() as served:
        changes = Changes()
        specs = [spec(seed=10 * i, rank=i % 3, max_new_tokens=40, salt=f"salt {i}") for i in range(6)]
        requests = served.bridge.submit(specs, changes)
        await until(lambda: all(request.num_output >= 2 for request in requests))
        served.kill(1)
        served.bridge.report_loss("rank 1 was killed by SIGKILL", 1)
        say_group(served, 1, [0, 2], ended=[1])
        await all_right(served, changes, requests)
        submitted = [submit for worker in served.workers for submit in worker.submitted]
        assert {submit.salt for submit in submitted if submit.attempt} == {"salt 1", "salt 4"}
        assert all(submit.salt == f"salt {submit.seed // 10}" for submit in submitted)


async def all_right(served: Served, changes: Changes, requests: list[OpenRequest]) -> None:
    served.go_on()
    await finished(changes, len(requests))
    for request in requests:
        wanted = [2 + (request.spec.seed + i) % 2000 for i in range(request.spec.params.max_new_tokens)]
        assert request.failure is None
        assert request.matcher.output_ids == wanted


@in_event_loop
async def test_requests_of_a_dead_rank_go_on_elsewhere_without_a_gap():
    async with three_ranks() as served:
        changes = Changes()
        requests = await open_on_each(served, changes)
        before = [list(request.matcher.output_ids) for request in requests]
        served.kill(1)
        served.bridge.report_loss("rank 1 was killed by SIGKILL", 1)
        assert served.bridge.problem() is None, "the others are about to say what becomes of it"
        say_group(served, 1, [0, 2])
        await until(lambda: all(request.rank != 1 for request in requests))
        assert [request.attempt for request in requests] == [0, 1, 0, 0, 1, 0]
        for request, known in zip(requests, before, strict=True):
            if request.attempt:
                await until(lambda r=request: r.request_id in served.workers[r.rank].running)
                again = served.workers[request.rank].running[request.request_id]
                assert again.attempt == 1
                assert again.output_ids[: len(known)] == known  # one more may have been on its way
                assert again.output_ids == counting(again)[: len(again.output_ids)]
        assert (await served.client.get("/ready")).status_code == 200
        info = (await served.client.get("/server_info")).json()
        assert info["ranks_out"] == {"1": "rank 1 was killed by SIGKILL"}
        assert [rank["phase"] for rank in info["ranks"]] == ["ready", "out", "ready"]
        assert info["requests"]["num_moved"] == 2
        metrics = (await served.client.get("/metrics")).text
        assert 'moe_serve_rank_serving{rank="0"} 1.0' in metrics
        assert 'moe_serve_rank_serving{rank="1"} 0.0' in metrics
        refused = await served.generate(input_ids=[7], routed_dp_rank=1)
        assert refused.status_code == 503
        assert "masked now (rank 1 was killed by SIGKILL)" in refused.text
        await all_right(served, changes, requests)
        new = [served.bridge.submit([spec()], Changes())[0].rank for _ in range(6)]
        assert set(new) == {0, 2}


@in_event_loop
async def test_a_late_rank_is_not_heard_until_it_is_back_and_then_gets_requests_again():
    async with three_ranks() as served:
        changes = Changes()
        requests = await open_on_each(served, changes)
        say_group(served, 1, [0, 2], "rank 1 did not arrive")
        await until(lambda: all(request.rank != 1 for request in requests))
        moved = [request for request in requests if request.attempt]
        late = served.workers[1]
        for request in moved:  # what it had computed when it was left out
            late.say(Tokens(1, 0, [TokenEvent(request.request_id, 0, request.num_output, [999])]))
        await until(lambda: {request.request_id for request in moved} <= set(late.aborted))
        await all_right(served, changes, requests)
        say_group(served, 2, [0, 1, 2], "rank 1 rejoined")
        await until(lambda: served.bridge.workers.masked == {})
        assert {served.bridge.submit([spec()], Changes())[0].rank for _ in range(9)} == {0, 1, 2}


@in_event_loop
async def test_a_rank_that_was_out_for_a_moment_only_has_dropped_its_requests_all_the_same():
    async with three_ranks() as served:
        changes = Changes()
        requests = await open_on_each(served, changes)
        # Its own word is here before the others' word of the group in between.
        served.workers[1].running.clear()
        served.workers[1].say(Members(1, 0, 2, [0, 1, 2], "rank 1 rejoined", times_masked=1))
        await until(lambda: sum(request.attempt for request in requests) == 2)
        assert served.bridge.workers.masked == {}
        say_group(served, 1, [0, 2])
        say_group(served, 2, [0, 1, 2])
        await all_right(served, changes, requests)
        assert sum(request.attempt for request in requests) == 2


@in_event_loop
async def test_a_request_that_ends_every_rank_that_gets_it_is_not_tried_for_ever():
    async with serving(6, info=GOES_ON) as served:
        served.hold()
        changes = Changes()
        (request,) = served.bridge.submit([spec()], changes)
        members = list(range(6))
        for group in range(1, MAX_LOSSES + 2):
            members.remove(request.rank)
            say_group(served, group, members, ended=[request.rank])
            await until(lambda group=group: request.attempt == group or request.is_done)
        assert isinstance(request.failure, UnavailableError)
        assert f"{MAX_LOSSES + 1} ranks were lost while they served this request" in str(request.failure)
        assert served.bridge.problem() is None


@in_event_loop
async def test_a_request_whose_ranks_are_only_late_goes_on_however_often():
    async with three_ranks() as served:
        served.hold()
        changes = Changes()
        (request,) = served.bridge.submit([spec(max_new_tokens=3)], changes)
        for turn in range(MAX_LOSSES + 3):
            late = request.rank
            say_group(served, 2 * turn + 1, [rank for rank in range(3) if rank != late], f"rank {late} did not arrive")
            await until(lambda turn=turn: request.attempt == turn + 1)
            say_group(served, 2 * turn + 2, [0, 1, 2], f"rank {late} rejoined")
            await until(lambda: served.bridge.workers.masked == {})
        await all_right(served, changes, [request])
        assert served.bridge.book.counters["num_moved"] == MAX_LOSSES + 3


@in_event_loop
async def test_a_request_with_new_tokens_since_the_last_loss_is_not_blamed():
    async with serving(7, info=GOES_ON) as served:
        served.hold()
        changes = Changes()
        (request,) = served.bridge.submit([spec(max_new_tokens=100)], changes)
        members = list(range(7))
        for group in range(1, MAX_LOSSES + 3):
            if group == MAX_LOSSES + 1:
                rank, index = request.rank, request.num_output
                say = served.workers[rank].say
                say(Tokens(rank, 0, [TokenEvent(request.request_id, request.attempt, index, [10])]))
                await until(lambda: request.num_output == 1)
            members.remove(request.rank)
            say_group(served, group, members, ended=[request.rank])
            await until(lambda group=group: request.attempt == group or request.is_done)
        assert request.failure is None


@in_event_loop
async def test_ranks_that_cannot_go_on_end_the_launch_in_their_own_words():
    async with three_ranks() as served:
        changes = Changes()
        requests = await open_on_each(served, changes)
        served.bridge.report_loss("rank 1 was killed by SIGKILL", 1)
        served.workers[0].say(Fatal(0, 0, "rank 1 cannot be spared: 9 experts had their only slots there", 1))
        await finished(changes, 6)
        assert all("9 experts had their only slots" in str(request.failure) for request in requests)
        assert (await served.client.get("/ready")).status_code == 503


@in_event_loop
async def test_a_rank_that_reports_its_own_failure_is_waited_out_and_the_last_one_is_not():
    async with serving(2, info=GOES_ON) as served:
        served.workers[1].say(Fatal(1, 0, "out of memory", 1))
        await until(lambda: served.bridge.workers.can_spare(1) and not served.bridge.workers.can_spare(0))
        assert served.bridge.problem() is None
        say_group(served, 1, [0])
        await until(lambda: 1 in served.bridge.workers.masked)
        assert served.bridge.workers.masked[1] == "rank 1 on testhost failed: out of memory"
        served.workers[0].say(Fatal(0, 0, "out of memory too", 0))
        await until(lambda: served.bridge.problem() is not None)


@in_event_loop
async def test_others_that_say_nothing_end_the_launch(monkeypatch):
    monkeypatch.setattr(rank_table, "_REGROUP_GRACE_S", 0.2)
    async with three_ranks("engine.step_deadline_s=0.1") as served:
        served.bridge.report_loss("rank 1 was killed by SIGKILL", 1)
        await asyncio.sleep(0)
        await until(lambda: served.bridge.problem() is not None)
        assert "was killed by SIGKILL; its peers did not report within 0.5 s" in served.bridge.problem()


def test_the_fake_rank_goes_on_where_an_earlier_attempt_stopped():
    from moe_serve.attention_dp.request import SamplingParams
    from moe_serve.engine.protocol.messages import Submit

    submit = Submit("a", 1, [5], SamplingParams(max_new_tokens=3), seed=1, output_ids=[3])
    assert counting(submit)[len(submit.output_ids) :] == [4, 5]
