"""Reports say what binds; pages hold their own numbers."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest

from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.replay import curve_slots, replay, with_redundancy_curve
from moe_serve.eplb.replay.report import as_bytes, as_seconds, page_data, to_html, to_json, to_table, verdict
from moe_serve.eplb.replay.result import ReplayReport
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.topology import Topology

TOPOLOGY = Topology(2, 4)
LOAD = SyntheticLoad(family="zipf", num_windows=4, num_layers=32, num_logical=8, topk=2, tokens_per_step=4096,
                     steps_per_window=20, num_sources=8)  # fmt: skip


def report(load: SyntheticLoad = LOAD, slots: int = 16, policies: tuple[str, ...] = ("greedy",)) -> ReplayReport:
    costs = ProfileCosts(CostModel(load_hardware("H100"), load_model_profile("Mixtral-8x7B"), TOPOLOGY))
    return replay(synthetic_trace(load), policies, ReplaySettings(TOPOLOGY, slots, costs=costs))


@pytest.fixture(scope="module")
def steady() -> ReplayReport:
    return report()


def test_every_column_is_filled_when_the_data_is_there(steady: ReplayReport) -> None:
    assert steady.missing == {}
    row = steady.summary(steady.policies[0])
    assert all(value is not None for value in row.values())
    assert row["bytes"] == row["moves"] * steady.expert_bytes
    assert "n/a" not in to_table(steady)


def test_predicted_rates_are_in_order(steady: ReplayReport) -> None:
    floor, greedy, perfect = (steady.summary(r) for r in steady.results)
    assert floor["step_s"] > greedy["step_s"] >= perfect["step_s"]
    total = steady.total_seconds(steady.policies[0])
    assert greedy["tokens_per_s"] == pytest.approx(steady.tokens.sum() / total)
    assert total > (steady.policies[0].step_s * steady.num_steps).sum()  # the moves are paid for


def test_too_few_slots_are_named_as_the_limit() -> None:
    found = report(replace(LOAD, skew=2.0), slots=8)
    curved = with_redundancy_curve(found, TOPOLOGY)
    words = " ".join(verdict(curved))
    assert "Slots bind" in words
    assert "more memory on each rank" in words


def test_old_plans_are_named_as_the_limit() -> None:
    found = report(replace(LOAD, family="lognormal", rho=0.2, skew=1.0), slots=24)
    assert "Age binds" in " ".join(verdict(found))
    noisy = report(
        replace(LOAD, family="zipf", tokens_per_step=2, steps_per_window=5, num_sources=0), policies=("greedy",)
    )
    assert "longer windows" in " ".join(verdict(noisy)) or "Slots bind" in " ".join(verdict(noisy))


def test_a_balanced_system_is_left_alone() -> None:
    assert "no limit is worth attacking" in " ".join(verdict(report(replace(LOAD, family="uniform"), slots=8)))


def test_moves_that_cost_more_than_they_bring_are_said() -> None:
    load = replace(LOAD, family="swing", period=1, tokens_per_step=64, steps_per_window=2)
    assert "Moving costs more than it brings for greedy" in " ".join(verdict(report(load)))


def test_json_is_plain_and_timings_are_apart(steady: ReplayReport) -> None:
    content = json.loads(json.dumps(to_json(steady), allow_nan=False))
    assert set(content.pop("timings")) == {"greedy"}
    assert "plan_s" not in json.dumps(content)
    series = content["windows"]["policies"]["greedy"]
    assert len(series["served_mean"]) == len(content["windows"]["first_step"]) == 3


def test_a_page_carries_the_numbers_of_the_report(steady: ReplayReport) -> None:
    data = page_data(steady)
    heat = np.frombuffer(base64.b64decode(data["heat"]["data"]), np.uint8).reshape(32, 8)
    hottest = steady.load.argmax(axis=1)
    assert (heat[np.arange(32), hottest] == heat.max(axis=1)).all()
    picture = data["time"]["before"]
    assert len(base64.b64decode(picture["load"])) == 8 * 3
    assert sum(map(sum, data["traffic"][0][1])) == pytest.approx(1, abs=1e-4)
    assert data["steps"] == steady.first_steps.tolist()


def test_a_page_cannot_be_broken_out_of(steady: ReplayReport) -> None:
    evil = replace(steady, conditions={"trace": "</script><script>alert(1)</script>"})
    page = to_html(evil, "<b>title</b>")
    assert "<script>alert" not in page
    assert "<b>title" not in page


def test_long_traces_are_averaged_for_the_page() -> None:
    found = report(replace(LOAD, num_windows=1201, num_layers=32, num_sources=0, tokens_per_step=64), policies=())
    assert len(page_data(found)["steps"]) == 600


def test_curve_slots_cover_what_is_in_use() -> None:
    slots = curve_slots(256, 32, 288)
    assert slots[0] == 256
    assert 288 in slots
    assert slots[-1] == 512
    assert all(number % 32 == 0 for number in slots)
    assert curve_slots(8, 8, 8) == [8, 16, 24]


@pytest.mark.parametrize("value, text", [(None, "n/a"), (5, "5 B"), (44_040_192, "44.0 MB"), (3.2e12, "3.2 TB")])
def test_sizes_have_units(value: int | None, text: str) -> None:
    assert as_bytes(value) == text


@pytest.mark.parametrize(
    "value, text", [(None, "n/a"), (0, "0"), (2.5, "2.50 s"), (0.0125, "12.50 ms"), (3e-5, "30 µs")]
)
def test_times_have_units(value: float | None, text: str) -> None:
    assert as_seconds(value) == text
