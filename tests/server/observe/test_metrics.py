"""`/metrics`: the ranks and the balancer, as Prometheus reads them, over the real front end."""

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from moe_serve.attention_dp.speculation import OWN, SpeculationCounters
from moe_serve.engine.protocol.messages import Status
from tests.server.observe.reports import Story
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


async def families(served: Served, names: str = "") -> dict[str, Metric]:
    response = await served.client.get("/metrics", params={"names": names} if names else {})
    assert response.status_code == 200
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    """Returns the samples by the values of their labels, in the order of the labels' names."""
    return {tuple(sample.labels[name] for name in sorted(sample.labels)): sample.value for sample in family.samples}


@in_event_loop
async def test_the_balancers_metrics_before_it_has_said_anything():
    async with serving(2, "eplb.mode=off") as served:
        found = await families(served)
    assert values(found["moe_serve_eplb_mode"]) == {("off",): 1, ("static",): 0, ("dynamic",): 0}
    assert values(found["moe_serve_eplb_alarm"]) == {(): 0}
    assert not values(found["moe_serve_eplb_balancedness"])
    assert "moe_serve_eplb_progress_age_seconds" not in found


@in_event_loop
async def test_the_balancers_metrics_are_those_of_its_reports():
    story = Story(num_windows=20, shifts=(8,))
    async with serving(4, "eplb.mode=dynamic", info=story.info) as served:
        for _, report in story.reports():
            served.workers[0].say(report)
        served.workers[1].say(Status(1, 0, 7, 1, 0, 5, 10, 0, {"num_splits_unproven": 3.0, "num_splits_proven": 9.0}))
        await until(lambda: served.bridge.balance.num_windows == story.num_windows)
        await until(lambda: any(view.status for view in served.bridge.workers))
        found = await families(served)
        book = served.bridge.balance
    layers = values(found["moe_serve_eplb_balancedness"])
    assert layers == {(str(layer),): value for layer, value in enumerate(book.window.balancedness, 1)}
    assert values(found["moe_serve_eplb_balancedness_min"]) == {(): min(layers.values())}
    assert values(found["moe_serve_eplb_balancedness_mean"])[()] == pytest.approx(sum(layers.values()) / len(layers))
    tokens = values(found["moe_serve_eplb_rank_tokens"])
    assert sum(tokens.values()) == pytest.approx(story.num_windows * story.num_layers * story.tokens_per_window)
    assert values(found["moe_serve_eplb_experts_moved"]) == {(): story.totals["num_experts_moved"]}
    assert values(found["moe_serve_eplb_placement_version"]) == {(): story.totals["num_rounds"]}
    assert values(found["moe_serve_eplb_decisions"])[("move",)] == len(list(book.moves)) > 0
    assert values(found["moe_serve_eplb_splits"]) == {("proven", "1"): 9, ("unproven", "1"): 3}
    assert 0 <= values(found["moe_serve_eplb_progress_age_seconds"])[()] < 60
    assert values(found["moe_serve_eplb_last_move_balancedness_gain"])[()] > 0
    assert not any(name.startswith(("sglang", "vllm")) for name in found)
    num_series = sum(len(family.samples) for name, family in found.items() if name.startswith("moe_serve_eplb"))
    assert num_series < 60, "one for each layer, one for each rank, never their product"


@in_event_loop
async def test_a_scraper_may_ask_for_the_names_of_sglang_or_vllm_beside_ours():
    story = Story(num_windows=5, shifts=())
    async with serving(4, "eplb.mode=dynamic", info=story.info) as served:
        for _, report in story.reports():
            served.workers[0].say(report)
        served.workers[2].say(Status(2, 0, 7, 3, 2, 4, 10, 0))
        await until(lambda: served.bridge.balance.num_windows == story.num_windows)
        await until(lambda: any(view.status for view in served.bridge.workers))
        sglang, vllm = await families(served, "sglang"), await families(served, "vllm")
        unknown = await served.client.get("/metrics", params={"names": "triton"})
        mean = sum(point.mean for point in served.bridge.balance.points)
    assert values(sglang["sglang:num_running_reqs"]) == {("2", "demo"): 3}
    assert values(sglang["sglang:num_queue_reqs"]) == {("2", "demo"): 2}
    assert values(sglang["sglang:token_usage"])[("2", "demo")] == pytest.approx(0.6)
    summary = {sample.name: (sample.labels, sample.value) for sample in sglang["sglang:eplb_balancedness"].samples}
    assert summary["sglang:eplb_balancedness_count"] == ({"model_name": "demo", "forward_mode": "decode"}, 5)
    assert summary["sglang:eplb_balancedness_sum"][1] == pytest.approx(mean)
    assert values(vllm["vllm:num_requests_waiting"]) == {("2", "demo"): 2}
    assert "moe_serve_eplb_balancedness" in vllm
    assert "moe_serve_eplb_balancedness" in sglang
    assert not any("eplb" in name for name in vllm if name.startswith("vllm")), "vLLM exports none"
    assert unknown.status_code == 400
    assert "sglang or vllm" in unknown.json()["error"]["message"]


@in_event_loop
async def test_drafts_by_the_names_of_sglang_and_vllm():
    """vLLM counts a draft for each request and step; both tools' readers take 1 + accepted / drafts as the length."""
    counted = SpeculationCounters()
    for num_drafts, num_right in ((4, 4), (2, 0), (3, 1)):
        counted.count(OWN, num_drafts, num_right)
    async with serving(2) as served:
        before = await families(served, "sglang")
        assert "sglang:spec_accept_length" not in before or not before["sglang:spec_accept_length"].samples
        for worker in served.workers:
            worker.say(Status(worker.rank, 0, 7, 1, 0, 5, 10, 0, counted.totals(), []))
        await until(lambda: all(view.status for view in served.bridge.workers))
        vllm, sglang = await families(served, "vllm"), await families(served, "sglang")
    ranks = [("0", "demo"), ("1", "demo")]
    assert values(vllm["vllm:spec_decode_num_drafts"]) == dict.fromkeys(ranks, 3)
    assert values(vllm["vllm:spec_decode_num_draft_tokens"]) == dict.fromkeys(ranks, 9)
    assert values(vllm["vllm:spec_decode_num_accepted_tokens"]) == dict.fromkeys(ranks, 5)
    at = values(vllm["vllm:spec_decode_num_accepted_tokens_per_pos"])
    assert [at["0", "demo", str(position)] for position in range(4)] == [2, 1, 1, 1]
    assert values(sglang["sglang:spec_accept_length"]) == dict.fromkeys(ranks, pytest.approx(1 + 5 / 3))
    assert values(sglang["sglang:spec_accept_rate"]) == dict.fromkeys(ranks, pytest.approx(5 / 9))
