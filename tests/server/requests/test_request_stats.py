"""The line of a request that has ended, the id of a call in header and log, and histograms as Prometheus' own."""

import json
import logging

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from moe_serve.log import configure_logging
from moe_serve.server.observe.metrics import one_histogram
from moe_serve.server.requests import request_stats
from moe_serve.server.requests.open_request import Changes, OpenRequest, RequestSpec
from moe_serve.server.requests.request_stats import Histogram, RequestLog
from tests.clock import Clock
from tests.server.served import in_event_loop, serving, until

SECRET = "a prompt that no log may hold"


@pytest.fixture(autouse=True)
def _log_as_before():
    logger = logging.getLogger("moe_serve")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def lines_of(written: str) -> list[dict[str, object]]:
    return [line for line in map(json.loads, written.splitlines()) if line["message"] == "request ended"]


@in_event_loop
async def serve_one(capfd: pytest.CaptureFixture[str], seen: dict[str, object]) -> None:
    async with serving(1, "server.log_requests=true") as served:
        configure_logging(who="front end", form="json")
        body = {"text": SECRET, "rid": 'job "7"\nforged', "sampling_params": {"max_new_tokens": 3}}
        answer = await served.client.post("/generate", json=body, headers={"X-Request-Id": "trace-1"})
        seen["id"] = answer.headers["x-request-id"]
        await until(lambda: len(served.bridge.book) == 0)
        other = await served.client.post("/generate", json=body, headers={"X-Request-Id": "x" * 200})
        seen["replaced"] = other.headers["x-request-id"]
        seen["refused"] = (await served.client.post("/nowhere", headers={"X-Request-Id": "t2"})).headers["x-request-id"]


def test_one_line_tells_a_request_without_its_text(capfd):
    seen: dict[str, object] = {}
    serve_one(capfd, seen)
    written = capfd.readouterr().err
    first, second = lines_of(written)
    assert SECRET not in written
    assert first["rid"] == 'job "7"\nforged', "escaped by JSON, so it is still one line"
    assert (first["x_request_id"], first["finish"], first["output_tokens"], first["rank"]) == (
        "trace-1",
        "length",
        3,
        0,
    )
    assert first["cached_tokens"] == 3
    assert 0 <= first["queue_s"] <= first["ttft_s"] <= first["e2e_s"] < 60
    assert first["process"] == "front end"
    assert seen["id"] == "trace-1"
    assert len(str(seen["replaced"])) == 32, "too long: it gets one of ours"
    assert second["x_request_id"] == seen["replaced"]
    assert seen["refused"] == "t2", "every answer has it"


def test_a_line_of_text_quotes_what_could_be_mistaken(capfd):
    configure_logging(who="front end")
    request = ended(rid="a b=c\nfinish=stop\x1b")
    RequestLog().write(request)
    written = capfd.readouterr().err
    assert written.count("\n") == 1
    assert 'rid="a b=c\\nfinish=stop\\u001b"' in written
    assert "finish=abort" in written


def test_a_flood_of_requests_is_some_lines_and_a_count(caplog, monkeypatch):
    log, clock = RequestLog(), Clock(monkeypatch, 0.0, request_stats)
    logging.getLogger("moe_serve").propagate = True
    with caplog.at_level(logging.INFO, "moe_serve"):
        for _ in range(request_stats.MAX_LINES + 50):
            log.write(ended())
        assert len(caplog.records) == request_stats.MAX_LINES
        clock.now_s = 1.5
        log.write(ended())
    assert caplog.records[-1].fields["left_out"] == 50
    assert "left_out" not in caplog.records[0].fields


def ended(rid: str | None = None) -> OpenRequest:
    from moe_serve.attention_dp.request import SamplingParams

    spec = RequestSpec([1, 2, 3], SamplingParams(), seed=0, rid=rid)
    request = OpenRequest("0-1", spec, None, [], Changes())
    request.cut_short("the request was aborted")
    return request


# Our histogram says what Prometheus' own would.


VALUES = {
    "none": [],
    "one": [0.3],
    "on the bounds": [0.1, 0.5, 1.0],
    "outside": [-1.0, 0.0, 1e9, float("inf")],
    "many": [i / 97 for i in range(300)],
}


@pytest.mark.parametrize("name", VALUES)
def test_its_buckets_are_those_of_prometheus(name: str) -> None:
    bounds, registry = (0.1, 0.5, 1, 2.5), CollectorRegistry()
    reference, ours = Reference("x", "text", buckets=bounds, registry=registry), Histogram(bounds)
    for value in VALUES[name]:
        reference.observe(value)
        ours.observe(value)
    (expected,) = registry.collect()
    found = {(s.name, s.labels.get("le")): s.value for s in one_histogram("x", "text", ours, ()).samples}
    wanted = {(s.name, s.labels.get("le")): s.value for s in expected.samples if not s.name.endswith("_created")}
    assert found == pytest.approx(wanted)


def test_several_at_once_are_several() -> None:
    once, several = Histogram([1, 2]), Histogram([1, 2])
    for _ in range(3):
        once.observe(1.5)
    several.observe(1.5, 3)
    assert (once.counts, once.total) == (several.counts, several.total)
