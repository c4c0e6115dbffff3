"""Alive, ready, and tokens come out: three answers that differ when a rank is missing or stuck."""

import asyncio

from tests.server.served import in_event_loop, serving, until


@in_event_loop
async def test_a_process_is_alive_before_its_ranks_are_and_ready_once_they_are():
    async with serving(start=False) as served:
        for path in ("/ready", "/readyz", "/health_generate"):
            response = await served.client.get(path)
            assert response.status_code == 503
            assert "rank 0, 1: not attached" in response.json()["error"]["message"]
        assert (await served.generate(text="a")).status_code == 503
        health = await served.client.get("/health")
        assert (health.status_code, (await served.client.get("/ping")).status_code) == (200, 200)
        assert "rank 0, 1: not attached" in health.json()["status"]
        served.tasks += [asyncio.create_task(served.workers[0].run())]
        await until(lambda: len(list(served.bridge.workers)) == 1)
        await until(lambda: "rank 1: not attached" in served.bridge.problem())
        served.tasks += [asyncio.create_task(served.workers[1].run())]
        await served.bridge.wait_until_ready()
        for path in ("/ready", "/readyz", "/health", "/health_generate"):
            assert (await served.client.get(path)).status_code == 200


@in_event_loop
async def test_a_stuck_rank_is_named_where_tokens_are_asked_for_and_left_without_the_probe():
    async with serving(2, "server.health_deadline_s=0.3") as served:
        served.workers[1].go.clear()
        response = await served.client.get("/health_generate")
        assert response.status_code == 503
        assert "no token came out of rank 1 within server.health_deadline_s = 0.3 s" in response.text
        assert (await served.client.get("/ready")).status_code == 200
        await until(lambda: len(served.workers[1].aborted) == 1)
        assert len(served.bridge.book) == 0
        served.workers[1].go.set()
        assert sorted((await served.client.get("/health_generate")).json()["seconds"]) == ["0", "1"]


@in_event_loop
async def test_tokens_of_others_count_and_askers_share_a_probe():
    async with serving(2, "engine.max_running_requests=1", "engine.max_queued_requests=1", round_s=0.01) as served:
        calls = [
            asyncio.create_task(served.generate(text="a", sampling_params={"max_new_tokens": 200})) for _ in range(3)
        ]
        await until(lambda: len(served.bridge.book) == 3)
        answers = await asyncio.gather(*(served.client.get("/health_generate") for _ in range(20)))
        assert [answer.status_code for answer in answers] == [200] * 20
        probes = [submit for worker in served.workers for submit in worker.submitted if submit.prompt_ids == [0]]
        assert len(probes) < 20
        for call in calls:
            call.cancel()
