"""`/metrics`: the wait matrix of the ranks, as Prometheus reads it, over the real front end."""

from prometheus_client.parser import text_string_to_metric_families

from moe_serve.engine.messages import Status
from tests.server.served import Served, in_event_loop, serving, until

WAITS = "moe_serve_all_to_all_wait_seconds_total"


def status(rank: int, waited_s: list[float]) -> Status:
    return Status(rank, 0, 7, 1, 0, 5, 10, 0, {"num_steps": 7.0}, waited_s)


async def scrape(served: Served) -> dict[tuple[str, str], float]:
    response = await served.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(response.text) for sample in family.samples]
    return {(one.labels["rank"], one.labels["peer"]): one.value for one in samples if one.name == WAITS}


@in_event_loop
async def test_who_is_late_for_all_shows_as_a_column():
    waits = [[0.0, 0.1, 4.5], [0.2, 0.0, 4.25], [0.0, 0.0, 0.0]]
    async with serving(3) as served:
        assert await scrape(served) == {}, "nobody has said anything yet"
        for worker, row in zip(served.workers, waits, strict=True):
            worker.say(status(worker.rank, row))
        await until(lambda: all(view.status for view in served.bridge.workers))
        found = await scrape(served)
        info = (await served.client.get("/server_info")).json()
    assert found == {(str(r), str(p)): waits[r][p] for r in range(3) for p in range(3) if r != p}
    assert [rank["status"]["waited_s"] for rank in info["ranks"]] == waits


@in_event_loop
async def test_a_transport_that_does_not_measure_has_no_series():
    async with serving(2) as served:
        served.workers[0].load(num_running=1)
        await until(lambda: any(view.status for view in served.bridge.workers))
        assert await scrape(served) == {}
