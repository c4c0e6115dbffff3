"""Requests beyond what the ranks run wait in the front end, in order, and start as soon as there is space."""

import asyncio

from moe_serve.server.requests.open_request import Changes
from tests.server.ranks.test_bridge import finished, spec
from tests.server.served import Served, in_event_loop, serving, until

ONE = ("engine.max_running_requests=1",)
SENT = 3  # one that runs and two ahead


async def full(served: Served) -> list[asyncio.Task]:
    """Calls that fill all ranks; the ranks stand still."""
    served.hold()
    count = SENT * len(served.workers)
    calls = [
        asyncio.create_task(served.generate(input_ids=[7], sampling_params={"max_new_tokens": 3})) for _ in range(count)
    ]
    await until(lambda: sum(len(worker.submitted) for worker in served.workers) == count)
    return calls


def seeds(served: Served) -> list[int]:
    return [submit.seed for worker in served.workers for submit in worker.submitted]


@in_event_loop
async def test_a_rank_gets_what_it_runs_and_a_few_more_and_all_are_served():
    async with serving(2, *ONE) as served:
        changes = Changes()
        served.hold()
        requests = served.bridge.submit([spec(seed=10 * i) for i in range(20)], changes)
        info = (await served.client.get("/server_info")).json()["requests"]
        assert (info["open"], info["waiting"]) == (20, 20 - 2 * SENT)
        assert info["waiting_tokens"] == (20 - 2 * SENT) * (2 + 4)
        served.go_on()
        await finished(changes, 20)
        assert [request.matcher.output_ids[0] for request in requests] == [2 + 10 * i for i in range(20)]
        assert seeds(served) != sorted(seeds(served)) or len(set(seeds(served))) == 20


@in_event_loop
async def test_a_priority_goes_first_among_those_that_wait():
    async with serving(1, *ONE) as served:
        calls = await full(served)
        one = {"input_ids": [7]}
        for seed, priority in [(1, None), (2, 0), (3, 50), (4, -1)]:
            params = {"max_new_tokens": 1, "sampling_seed": seed}
            calls.append(asyncio.create_task(served.generate(**one, sampling_params=params, priority=priority)))
            await until(lambda count=len(calls): len(served.bridge.book) == count)
        served.workers[0].go.set()
        assert [(await call).status_code for call in calls] == [200] * len(calls)
        assert seeds(served)[SENT:] == [3, 1, 2, 4]
        refused = await served.generate(**one, priority=101)
        assert refused.json()["error"]["message"] == "priority is 101, expected -100 to 100"


@in_event_loop
async def test_requests_for_a_chosen_rank_do_not_hold_up_those_for_any():
    async with serving(2, *ONE) as served:
        served.hold()
        changes = Changes()
        served.bridge.submit([spec(rank=1) for _ in range(50)], changes)
        others = Changes()
        served.workers[0].go.set()
        served.bridge.submit([spec(seed=9) for _ in range(5)], others)
        await finished(others, 5)
        assert len(served.workers[1].submitted) == SENT


@in_event_loop
async def test_what_is_taken_back_waits_in_its_old_order_and_goes_on_where_it_stopped():
    async with serving(1, *ONE) as served:
        worker, book = served.workers[0], served.bridge.book
        worker.round_s = 0.01
        changes = Changes()
        requests = served.bridge.submit([spec(seed=10 * i, max_new_tokens=30) for i in range(5)], changes)
        await until(lambda: requests[0].num_output >= 3)
        book.is_held = True
        book.take_back()
        held = [list(request.matcher.output_ids) for request in requests]
        assert book.num_waiting == 5
        await until(lambda: len(worker.aborted) == SENT)
        await asyncio.sleep(0.05)
        assert [list(request.matcher.output_ids) for request in requests] == held
        book.is_held = False
        book.send_waiting()
        await finished(changes, 5)
        assert [request.matcher.output_ids for request in requests] == [
            [2 + 10 * i + count for count in range(30)] for i in range(5)
        ]
        assert [submit.seed for submit in worker.submitted[SENT:]] == [0, 10, 20, 30, 40]
