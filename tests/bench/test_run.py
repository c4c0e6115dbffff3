"""A load against a server with known delays: what is reported lies within bounds, and every failure has its name."""

import asyncio
import json
import xml.etree.ElementTree as ElementTree

import pytest

from moe_serve.bench.client import Client, Options, Outcome, model_of
from moe_serve.bench.load import Lengths, Load, Prompts
from moe_serve.bench.picture import picture_of
from moe_serve.bench.report import report_of, table_of
from moe_serve.bench.run import Ran, run_load
from moe_serve.errors import LaunchError
from tests.bench.fake_openai import Fake, running

pytest.importorskip("aiohttp")
SIX = Lengths(6, 6)


def ran(fake: Fake, endpoint: str = "completions", timeout_s: float = 20.0, key: str | None = None, **fields) -> Ran:
    load = Load(**{"num_prompts": 6, "output_len": SIX, "num_warmups": 0, "max_concurrency": 3, **fields})

    async def run() -> Ran:
        async with Client(f"{fake.url}/v1", endpoint, Options("fake"), key, timeout_s) as client:
            return await run_load(load, Prompts(load, None), client, lambda outcome: None)

    return asyncio.run(run())


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_reported_times_are_those_of_the_server(endpoint, in_pieces):
    with running(Fake(first_s=0.05, gap_s=0.01, in_pieces=in_pieces)) as fake:
        report = report_of(ran(fake, endpoint), {}, is_paced=False)
    assert (report.num_complete, report.errors, report.warnings) == (6, {}, ())
    assert (report.num_prompt, report.num_output, report.num_cached) == (60, 36, 24)
    latencies = report.latencies
    assert [len(latencies[name].values) for name in ("ttft", "tpot", "itl", "e2el")] == [6, 6, 30, 6]
    # A sleep may take longer on a busy machine, but never shorter; what is reported must add up in any case.
    assert latencies["ttft"].values[0] >= 49
    assert latencies["e2el"].values[0] >= 98
    assert report.seconds >= 2 * 0.098
    for outcome in report.outcomes:
        assert 0.098 <= outcome.ttft_s + 5 * outcome.tpot_s <= outcome.e2e_s + 1e-9
    assert latencies["itl"].mean == pytest.approx(latencies["tpot"].mean)
    assert fake.most_open == 3


def test_requests_are_sent_as_the_endpoint_wants_them():
    with running(Fake(first_s=0)) as fake:
        for endpoint in ("completions", "chat", "generate"):
            ran(fake, endpoint, num_prompts=1, key="secret")
        assert asyncio.run(model_of(fake.url, None)) == "fake"
    completion, chat, native = fake.bodies
    assert (completion["model"], completion["max_tokens"], completion["stream"]) == ("fake", 6, True)
    assert chat["messages"] == [{"role": "user", "content": completion["prompt"]}]
    assert (native["text"], native["sampling_params"]["max_new_tokens"]) == (completion["prompt"], 6)
    assert fake.keys == ["Bearer secret"] * 3


def test_metrics_are_read_to_their_end():
    lines = "".join(f'moe_serve_rank_steps_total{{rank="{rank}"}} {rank}\n' for rank in range(12_000))

    async def read(fake: Fake) -> str:
        async with Client(fake.url, "completions", Options("fake"), None, 20.0) as client:
            return await client.metrics()

    with running(Fake(metrics=lines.encode())) as fake:
        assert len(lines) > 1 << 18, "as much as a connection holds at a time"
        assert asyncio.run(read(fake)) == lines


def test_every_failure_is_counted_by_its_kind_and_the_rest_is_measured():
    kinds = {"refuses": {0}, "cuts": {1}, "breaks": {2}, "silent": {3}}
    with running(Fake(first_s=0.01, **{name: frozenset(numbers) for name, numbers in kinds.items()})) as fake:
        report = report_of(ran(fake, num_prompts=7, max_concurrency=7, timeout_s=4.0), {}, is_paced=False)
    assert report.errors == {"HTTP 429": 1, "cut stream": 1, "error in the stream": 1, "timeout": 1}
    assert report.examples["HTTP 429"] == "the queue is full"
    assert report.examples["error in the stream"] == "rank 1 was lost"
    assert report.longest_retry_after_s == 1
    assert (report.num_complete, report.num_output) == (3, 18)
    text = table_of(report)
    assert "3 / 4" in text
    assert "1 × HTTP 429: the queue is full" in text
    assert "Retry-After" in text
    ElementTree.fromstring(picture_of(report, "a < b & c"))
    json.dumps(report.as_json())


def test_a_refused_client_of_a_closed_loop_waits_as_long_as_it_is_asked_to():
    with running(Fake(first_s=0, gap_s=0, refuses=frozenset({0}))) as fake:
        outcomes = ran(fake, num_prompts=2, max_concurrency=1).outcomes
    assert outcomes[1].sent_s - outcomes[0].end_s >= 1.0


def test_a_server_that_is_not_there_is_an_error_of_each_request_and_of_the_warm_up():
    report = report_of(ran(Fake(url="http://127.0.0.1:1"), num_prompts=2), {}, is_paced=False)
    assert report.errors == {"no connection": 2}
    assert "–" in table_of(report)
    ElementTree.fromstring(picture_of(report, "nothing"))
    with pytest.raises(LaunchError, match=r"the warm-up failed: no connection.*--base-url"):
        ran(Fake(url="http://127.0.0.1:1"), num_warmups=1)
    with pytest.raises(LaunchError, match="nothing serves at"):
        asyncio.run(model_of("http://127.0.0.1:1", None))


def test_without_usage_chunks_are_counted_and_the_report_says_so():
    with running(Fake(first_s=0, gap_s=0, has_usage=False)) as fake:
        report = report_of(ran(fake), {}, is_paced=False)
    assert (report.num_output, report.num_prompt, report.num_cached) == (36, 0, None)
    assert any("gives no usage" in text for text in report.warnings)


def test_an_open_loop_keeps_its_times_whatever_comes_back():
    with running(Fake(first_s=0.3, gap_s=0)) as fake:
        found = ran(fake, num_prompts=10, request_rate=100, burstiness=float("inf"), max_concurrency=None)
    assert [outcome.due_s for outcome in found.outcomes] == pytest.approx([index / 100 for index in range(10)])
    assert all(outcome.sent_s >= outcome.due_s for outcome in found.outcomes)
    assert fake.most_open == 10


def test_an_open_loop_that_falls_behind_says_so():
    with running(Fake(first_s=0.05, gap_s=0)) as fake:
        found = ran(fake, num_prompts=6, request_rate=1000, max_concurrency=1)
    assert fake.most_open == 1
    report = report_of(found, {}, is_paced=True)
    assert report.late.values[-1] >= 200
    assert any("fell behind" in text for text in report.warnings)


def test_a_run_that_is_interrupted_reports_what_it_has():
    async def run(fake: Fake) -> Ran:
        load = Load(num_prompts=50, output_len=SIX, num_warmups=0, max_concurrency=2)
        async with Client(fake.url, "completions", Options("fake"), None, 20.0) as client:
            task = asyncio.create_task(run_load(load, Prompts(load, None), client, lambda _: ends.set()))
            ends = asyncio.Event()
            await ends.wait()
            task.cancel()
            return await task

    with running(Fake(first_s=0.05)) as fake:
        found = asyncio.run(run(fake))
    report = report_of(found, {}, is_paced=False)
    assert found.was_interrupted
    assert 1 <= report.num_complete < 50
    assert set(report.errors) <= {"interrupted"}
    assert any("interrupted" in text for text in report.warnings)


def test_goodput_counts_requests_within_all_bounds():
    def outcome(number: int, ttft_s: float, gap_s: float, num_tokens: int = 3) -> Outcome:
        chunks = [1 + ttft_s + index * gap_s for index in range(num_tokens)]
        return Outcome(number, "code", 1, 1, chunks[-1], chunks, num_output=num_tokens, is_counted=True)

    outcomes = [outcome(0, 0.1, 0.01), outcome(1, 0.3, 0.01), outcome(2, 0.1, 0.05), outcome(3, 0.1, 0, num_tokens=1)]
    found = Ran(outcomes, 2.0, 0.1, False)
    assert report_of(found, {"ttft": 200, "tpot": 30}, is_paced=False).num_good == 2
    assert report_of(found, {"e2el": 150}, is_paced=False).num_good == 2
    report = report_of(found, {"ttft": 1000}, is_paced=False)
    assert (report.num_good, report.as_json()["request_goodput"]) == (4, 2.0)
    assert report_of(found, {}, is_paced=False).num_good is None


def test_times_are_told_apart_by_the_route_that_the_server_names():
    outcomes = [
        Outcome(number, "code", 1, 1, 2, [1 + ttft_s, 1.6], num_output=2, is_counted=True, route=route)
        for number, (ttft_s, route) in enumerate([(0.1, "short"), (0.5, "prefill"), (0.3, "short")])
    ]
    report = report_of(Ran(outcomes, 2.0, 0.1, False), {}, is_paced=False)
    assert {route: latencies["ttft"].mean for route, latencies in report.routes.items()} == {
        "prefill": pytest.approx(500), "short": pytest.approx(200),
    }  # fmt: skip
    assert report.as_json()["routes"]["short"]["completed"] == 2
    assert "began by route prefill: 1 requests" in table_of(report)
