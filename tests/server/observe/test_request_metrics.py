"""`/metrics`: what becomes of requests, as counts and histograms, over the real front end and fake ranks."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_serve.config import load_config
from moe_serve.engine.protocol.messages import PhaseTimes, Status, TokenEvent, Tokens
from moe_serve.server.observe.metrics import PeerMetrics, RequestMetrics
from moe_serve.server.ranks.balance import BalanceBook
from moe_serve.server.ranks.request_book import RequestBook
from tests.server.served import Served, in_event_loop, serving, until


async def samples(served: Served, names: str = "") -> dict[tuple[str, ...], float]:
    """Returns values by name and values of the labels, in the order of the labels' names."""
    text = (await served.client.get("/metrics", params={"names": names} if names else {})).text
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(one.name, *(one.labels[name] for name in sorted(one.labels))): one.value for one in found}


def body(**params: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6, 7, 8], "sampling_params": params}


@in_event_loop
async def test_requests_are_counted_by_how_they_end():
    async with serving(2) as served:
        for length in (1, 3, 5):
            await served.generate(**body(max_new_tokens=length))
        await served.generate(**body(max_new_tokens=9, stop_token_ids=[7], sampling_seed=3))  # 5, 6, 7
        await served.generate(**body(max_new_tokens=0))
        served.workers[0].go.clear()
        served.workers[1].go.clear()
        left = asyncio.create_task(served.generate(**body(max_new_tokens=4)))
        await until(lambda: len(served.bridge.book) == 1)
        during = await samples(served)
        left.cancel()
        await until(lambda: len(served.bridge.book) == 0)
        found = await samples(served)
    ended = {key[1]: value for key, value in found.items() if key[0] == "moe_serve_requests_finished_total"}
    assert ended == {"length": 4, "stop": 1, "abort": 1, "refused": 0, "error": 0}
    assert during["moe_serve_requests_running",] == 1
    assert found["moe_serve_requests_running",] == 0
    assert found["moe_serve_generation_tokens_total",] == 1 + 3 + 5 + 3
    assert found["moe_serve_prompt_tokens_total",] == 5 * 4, "the one that was left had no first token"
    assert found["moe_serve_cached_prompt_tokens_total",] == 5 * 3, "as the fake ranks say"
    assert found["moe_serve_time_to_first_token_seconds_count",] == 4
    assert found["moe_serve_inter_token_latency_seconds_count",] == 2 + 4 + 2
    assert found["moe_serve_request_time_per_output_token_seconds_count",] == 3
    assert found["moe_serve_e2e_request_latency_seconds_count",] == 6
    assert found["moe_serve_queue_time_seconds_count",] == 4
    assert found["moe_serve_request_generation_tokens_bucket", "5.0"] == 6
    assert found["process_resident_memory_bytes",] > 1e6
    assert found["process_open_fds",] > 3


@in_event_loop
async def test_waiting_on_the_rank_counts_as_queue_time():
    async with serving(1) as served:
        (worker,) = served.workers
        worker.go.clear()
        call = asyncio.create_task(served.generate(**body(max_new_tokens=1)))
        await until(lambda: bool(worker.submitted))
        submit = worker.submitted[0]
        event = TokenEvent(submit.request_id, 0, 0, [9], "length", queued_us=2_500_000)
        worker.say(Tokens(0, 0, [event]))
        await call
        found = await samples(served)
    assert found["moe_serve_queue_time_seconds_sum",] == pytest.approx(2.5, abs=0.4)


@in_event_loop
async def test_a_request_that_fails_is_an_error_and_has_no_times():
    async with serving(1, failure=("NaN", None)) as served:
        assert (await served.generate(**body(max_new_tokens=1))).status_code == 500
        found = await samples(served)
    assert found["moe_serve_requests_finished_total", "error"] == 1
    assert found["moe_serve_e2e_request_latency_seconds_count",] == 0


@in_event_loop
async def test_a_request_that_cannot_be_served_to_its_end_is_its_clients_and_no_error():
    async with serving(1, failure=("no token", "sampling_params")) as served:
        assert (await served.generate(**body(max_new_tokens=9))).status_code == 400
        served.hold()
        assert (await served.generate(**body(), timeout=0.01)).status_code == 408
        found = await samples(served)
    finished = {key[1]: value for key, value in found.items() if key[0] == "moe_serve_requests_finished_total"}
    assert finished == {"stop": 0, "length": 0, "abort": 1, "refused": 1, "error": 0}
    assert found["moe_serve_prompt_tokens_total",] == 0


@in_event_loop
async def test_ranks_show_what_they_reported():
    totals = {"num_prompt_tokens": 80.0, "num_cached_prompt_tokens": 32.0, "num_preempted": 2.0, "num_steps": 9.0,
              "num_decode_tokens": 50.0, "num_prefill_tokens": 48.0, "num_output_tokens": 51.0}  # fmt: skip
    totals |= {"num_decodes_with_drafts_tokens": 9.0, "num_decodes_with_drafts_experts": 70.0,
               "num_decodes_without_tokens": 5.0, "num_decodes_without_experts": 60.0}  # fmt: skip
    async with serving(2) as served:
        phases = {"decode": PhaseTimes(2.5, [0, 3, *[0] * 12, 1], {"attention": 1.5, "experts": 1.0})}
        status = Status(1, 0, 7, 3, 2, 4, 10, 99, totals, [], 12345, 17, {"warning": 4, "error": 1}, phases)
        served.workers[1].say(status)
        await until(lambda: any(view.status for view in served.bridge.workers))
        found = await samples(served)
        vllm = await samples(served, "vllm")
    assert found["moe_serve_rank_requests_running", "1"] == 3
    assert found["moe_serve_rank_requests_waiting", "1"] == 2
    assert (found["moe_serve_rank_kv_blocks_used", "1"], found["moe_serve_rank_kv_blocks_free", "1"]) == (6, 4)
    assert found["moe_serve_rank_prefix_cache_queries_total", "1"] == 80
    assert found["moe_serve_rank_prefix_cache_hits_total", "1"] == 32
    assert found["moe_serve_rank_preemptions_total", "1"] == 2
    assert found["moe_serve_rank_computed_tokens_total", "decode", "1"] == 50
    for drafts, tokens, experts in (("with", 9, 70), ("without", 5, 60)):
        assert found["moe_serve_rank_decode_tokens_total", drafts, "1"] == tokens
        assert found["moe_serve_rank_decode_experts_total", drafts, "1"] == experts
    assert found["moe_serve_rank_log_lines_total", "warning", "1"] == 4
    assert found["moe_serve_rank_resident_memory_bytes", "1"] == 12345
    assert found["moe_serve_rank_step_seconds_bucket", "0.001", "decode", "1"] == 3
    assert found["moe_serve_rank_step_seconds_count", "decode", "1"] == 4
    assert found["moe_serve_rank_step_seconds_sum", "decode", "1"] == 2.5
    assert found["moe_serve_rank_step_part_seconds_total", "attention", "decode", "1"] == 1.5
    assert not [key for key in found if key[0].startswith("moe_serve_rank_kv") and key[1] == "0"], "it said nothing"
    assert vllm["vllm:num_preemptions_total", "1", "demo"] == 2
    assert vllm["vllm:prefix_cache_hits_total", "1", "demo"] == 32


@in_event_loop
async def test_head_works_and_the_names_of_a_peer_may_be_a_setting():
    async with serving(1, "server.metrics_compat=sglang") as served:
        await served.generate(**body(max_new_tokens=2))
        head, plain = await served.client.head("/metrics"), await samples(served)
        ours = await samples(served, "vllm")
    assert head.status_code == 200
    assert not head.content
    assert plain["sglang:num_requests_total", "demo"] == 1
    assert plain["sglang:generation_tokens_total", "demo"] == 2
    assert plain["sglang:time_to_first_token_seconds_count", "demo"] == 1
    assert ours["vllm:request_success_total", "length", "demo"] == 1
    assert not any(key[0].startswith("sglang") for key in ours), "the scraper asked for others"


@pytest.mark.parametrize("number", [None, 2])
def test_each_of_several_front_ends_says_which_one_it_is(number: int | None) -> None:
    config = load_config()
    book, api_servers = RequestBook(config, None, lambda rank, message: None), SimpleNamespace(label=number)
    bridge: Any = SimpleNamespace(
        book=book, api_servers=api_servers, workers=[], config=config, balance=BalanceBook("static")
    )
    collectors = [RequestMetrics(bridge), PeerMetrics("vllm", bridge), PeerMetrics("sglang", bridge)]
    found = [sample for collector in collectors for family in collector.collect() for sample in family.samples]
    assert len(found) > 100
    wanted = None if number is None else "2"
    assert {sample.labels.get("front_end") for sample in found} == {wanted}
