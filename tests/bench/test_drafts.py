"""What a run's drafts did, read from the metrics of a server as it shows them."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from moe_serve.attention_dp.speculation import FORM, OWN, SpeculationCounters
from moe_serve.bench.drafts import drafts_between
from moe_serve.engine.protocol.messages import Status
from moe_serve.engine.status import EngineCounters
from moe_serve.eplb.load import DecodeCounts, StepCounts
from moe_serve.server.observe.metrics import RankMetrics


class Table(list[Any]):
    """Stands in for the ranks of a front end."""

    loss = None


def shown(*counters: dict[str, float]) -> str:
    """Returns /metrics of ranks with these counters."""
    registry = CollectorRegistry()
    views = [
        SimpleNamespace(rank=rank, status=Status(rank, 0, 7, 1, 0, 5, 10, 0, each, []), serves=True)
        for rank, each in enumerate(counters)
    ]
    table: Any = Table(views)
    registry.register(RankMetrics(table, None))
    return generate_latest(registry).decode()


def of(drafts: int, right: int, with_drafts: StepCounts, without: StepCounts, saved_s: float) -> dict[str, float]:
    counted = SpeculationCounters()
    counted.num_drafts |= {OWN: drafts, FORM: drafts}
    counted.num_accepted |= {OWN: right, FORM: drafts}
    totals = counted.totals() | EngineCounters(decodes=DecodeCounts(with_drafts, without)).totals()
    return totals | {"speculation_saved_seconds": saved_s}


def test_totals_of_all_ranks_are_those_of_the_run_alone() -> None:
    before = shown(
        of(10, 5, StepCounts(1, 1, 2, 30), StepCounts(5, 5, 5, 100), 1.0), of(0, 0, StepCounts(), StepCounts(), 0.0)
    )
    after = shown(
        of(30, 11, StepCounts(3, 4, 10, 90), StepCounts(7, 9, 9, 190), 0.5),
        of(4, 4, StepCounts(1, 1, 5, 40), StepCounts(1, 2, 2, 30), 0.25),
    )
    drafts = drafts_between(before, after)
    assert drafts is not None
    assert drafts.sources["own"] == (10.0, 24.0)
    assert drafts.sources["form"] == (24.0, 24.0)
    assert drafts.decodes["with"] == {"steps": 3, "requests": 4, "tokens": 13, "experts": 100}
    assert drafts.tokens_per_step == pytest.approx((13 + 6) / (4 + 6))
    assert drafts.experts_per_token("without") == pytest.approx(120 / 6)
    assert drafts.saved_s == pytest.approx(-0.25)
    rows = dict(drafts.rows())
    assert rows["drafts of own text, right"] == "10 of 24 (42%)"
    assert rows["experts for a token, with / without"] == "7.7 / 20.0"
    assert rows["time of ranks that drafts saved"] == "-0.25 s"
    assert drafts.as_json()["sources"]["own"] == {"right": 10.0, "verified": 24.0}
    assert drafts.as_json()["experts_per_token"] == {"with": 100 / 13, "without": 20.0}


def test_a_server_without_drafts_says_nothing_of_them() -> None:
    plain = shown(EngineCounters().totals())
    assert drafts_between("", plain) is None
    assert drafts_between("", "") is None
    assert drafts_between("", "# HELP x y\nvllm:num_requests_running 3\n") is None


def test_a_server_that_has_ended_or_was_started_again_says_nothing_of_the_run() -> None:
    many, few = (shown(of(drafts, 1, StepCounts(1, 1, 2), StepCounts(1, 1, 1), 0.0)) for drafts in (5, 2))
    assert drafts_between(many, "") is None
    assert drafts_between(many, few) is None
    assert drafts_between(few, many) is not None


def test_experts_are_shown_where_every_step_has_drafts() -> None:
    drafts = drafts_between("", shown(of(2, 1, StepCounts(2, 2, 4, 50), StepCounts(), 0.0)))
    assert drafts is not None
    assert dict(drafts.rows())["experts for a token, with / without"] == "12.5 / –"


def test_experts_that_nobody_counts_are_left_out() -> None:
    drafts = drafts_between("", shown(of(2, 1, StepCounts(1, 1, 2), StepCounts(1, 1, 1), 0.0)))
    assert drafts is not None
    assert drafts.experts_per_token("with") is None
    assert not any("experts" in name for name, _ in drafts.rows())
