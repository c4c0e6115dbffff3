"""Reports say what binds; pages hold their own numbers, and leave out parts with nothing to say."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.replay import curve_slots, replay, with_redundancy_curve
from moe_serve.eplb.replay.report import (
    as_bytes,
    as_seconds,
    change_words,
    changes,
    layer_rows,
    page_data,
    to_html,
    to_json,
    to_table,
    verdict,
)
from moe_serve.eplb.replay.result import ReplayReport
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.topology import Topology
from tests.browser import BROWSER, browser_page

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
    curved = with_redundancy_curve(found, synthetic_trace(replace(LOAD, skew=2.0)), TOPOLOGY)
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
    assert sum(map(sum, data["traffic"]["nodes"][0][1])) == pytest.approx(1, abs=1e-4)
    traffic, whole = data["traffic"], steady.floor.traffic
    name, shares = traffic["ranks"][0]
    assert (name, len(traffic["ranks"])) == ("do nothing", 2)
    assert matrix(shares, "<u2") / 65535 * traffic["most"] == pytest.approx(whole / whole.sum(), abs=1e-5)
    assert data["steps"] == steady.first_steps.tolist()


def test_layers_are_a_table_of_numbers(steady: ReplayReport) -> None:
    rows, best = layer_rows(steady), steady.policies[0]
    assert [row["layer"] for row in rows] == list(range(32))
    assert rows[3]["served"] == pytest.approx(best.served[:, 3].mean(), abs=1e-5)
    assert rows[3]["nothing"] == pytest.approx(steady.floor.served[:, 3].mean(), abs=1e-5)
    assert rows[3]["worst"] == pytest.approx(best.served[:, 3].min(), abs=1e-5)
    assert sum(row["received"] for row in rows) == best.moves.sum()
    assert rows[3]["bytes"] == rows[3]["received"] * steady.expert_bytes
    content = json.loads(json.dumps(to_json(steady), allow_nan=False))
    assert content["layers"] == {"policy": "greedy", "rows": rows}
    assert np.array(content["traffic"]["greedy"]).shape == (8, 8)
    assert page_data(steady)["layerRows"][3] == list(rows[3].values())


def test_phases_stand_side_by_side_where_there_are_several(steady: ReplayReport) -> None:
    assert "side by side" not in to_table(steady)
    assert page_data(steady)["phases"] is None
    counts = {"prefill": np.array([[9, 1, 1, 1]]), "decode": np.array([[1, 1, 1, 9]])}
    records = [LoadRecord(i, 1, phase, 100 * counts[phase]) for i, phase in enumerate(("prefill", "decode") * 3)]
    found = replay(LoadTrace.of(records), ["static", "greedy"], ReplaySettings(Topology(1, 2), 4))
    assert found.phases == ("decode", "prefill", "decode", "prefill", "decode")
    parts = to_json(found)["phases"]
    assert [row["windows"] for row in parts["prefill"]] == [2] * 4
    assert parts["decode"][2]["served_mean"] == pytest.approx(found.policies[1].served[::2].mean())
    (header,) = [line for line in to_table(found).splitlines() if "decode: served" in line]
    assert header.index("prefill: served") < header.index("decode: served")
    picture = page_data(found)["phases"]
    assert picture["lines"][0]["name"] == "prefill"
    assert picture["lines"][0]["steps"] == found.first_steps[1::2].tolist()
    assert len(picture["lines"][1]["served"]["greedy"]) == 3


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


def small_report(policies: list[str], num_layers: int = 2, num_slots: int = 8) -> ReplayReport:
    """Eight experts on two ranks; in layer 0 the hot ones are together on rank 0, in layer 1 none is hot."""
    counts = np.full((num_layers, 8), 100)
    counts[:1, :3] = 400
    records = [LoadRecord(10 * i, 10, "decode", counts) for i in range(4)]
    return replay(LoadTrace.of(records), policies, ReplaySettings(Topology(1, 2), num_slots))


def matrix(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(-1, 8)


@pytest.mark.parametrize("policy", ["greedy", "incremental"])
def test_experts_received_add_up_to_the_moves(policy: str) -> None:
    found = small_report([policy])
    result = found.policies[0]
    assert result.received.sum() == result.moves.sum() > 0
    assert found.floor.received.shape == found.results[-1].received.shape == (2, 8)
    assert not found.floor.received.any()


def test_results_of_other_processes_say_what_moved() -> None:
    records = [LoadRecord(i, 1, "decode", np.array([[9, 1, 1, 1]])) for i in range(3)]
    settings = ReplaySettings(Topology(1, 2), 6)
    alone, beside = (replay(LoadTrace.of(records), ["greedy", "refined"], settings, jobs=jobs) for jobs in (1, 2))
    for one, other in zip(alone.results, beside.results, strict=True):
        assert np.array_equal(one.received, other.received)


def test_changes_name_replicas_before_and_after_and_each_move() -> None:
    found = small_report(["incremental"])
    data = changes(found)
    assert data is not None
    start, final = found.floor.final, found.best.final
    assert start is not None
    assert final is not None
    assert np.array_equal(matrix(data["before"], "u1"), start.replica_count)
    assert np.array_equal(matrix(data["after"], "u1"), final.replica_count)
    assert np.array_equal(matrix(data["received"], "<u2"), found.best.received)
    assert [row[2] for row in data["layers"]] == found.best.received.sum(axis=1).tolist()
    assert data["layers"][0][1] > data["layers"][0][0]
    assert f"ranks received {found.best.moves.sum()} experts in all, most in layer 0" in data["words"]
    assert "Predicted" not in data["words"]  # times need a model and a hardware


def test_a_gain_and_a_loss_are_told_apart() -> None:
    found = small_report(["incremental"])
    best, floor, windows = found.best, found.floor, len(found.num_steps)
    for stall_s, end in ((0.25, "500.00 ms gained."), (1.0, "250.00 ms lost.")):
        timed = (
            replace(floor, step_s=np.full(windows, 0.05), stall_s=np.zeros(windows)),
            replace(best, step_s=np.full(windows, 0.025), stall_s=np.eye(1, windows)[0] * stall_s),
            found.results[-1],
        )
        words = change_words(replace(found, results=timed))  # 3 windows x 10 steps x 25 ms less
        assert "steps take 750.00 ms less than doing nothing" in words
        assert words.endswith(end)


def test_a_page_leaves_out_what_has_nothing_to_say() -> None:
    data = page_data(small_report(["greedy"]))
    assert data["changes"] is not None
    labels = [card["label"] for card in data["cards"]]
    assert "slots rewritten per rebalance" in labels
    assert not any("node" in label for label in labels)  # sources are not in the trace

    still = page_data(small_report(["static"]))
    assert still["changes"] is None
    assert "slots rewritten per rebalance" not in [card["label"] for card in still["cards"]]

    alone = page_data(small_report([]))
    assert [card["from"] for card in alone["cards"]] == ["", ""]  # nothing to compare with
    assert set(alone["time"]) == {"span", "before"}


PARTS = ["heat", "shown", "layers-section", "curves-section", "moves-part", "redundancy-part", "traffic-section",
         "traffic-nodes", "phases-section", "layer-table", "after-part", "sweep-section"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "policies, num_layers, shown",
    [
        (
            ["greedy"],
            2,
            {"heat", "shown", "layers-section", "curves-section", "moves-part", "layer-table", "after-part"},
        ),
        (["greedy"], 1, {"heat", "shown", "curves-section", "moves-part", "layer-table", "after-part"}),
        ([], 2, {"heat", "layer-table"}),
    ],
    ids=["moves", "one layer", "no policy"],
)
def test_a_browser_draws_each_part_that_has_something_to_say(
    policies: list[str], num_layers: int, shown: set[str], tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text(to_html(small_report(policies, num_layers)), encoding="utf-8")

    async def look() -> None:
        async with browser_page((tmp_path / "page.html").as_uri()) as page:
            assert {part for part in PARTS if await page.page.locator(f"#{part}").is_visible()} == shown
            if "shown" in shown:
                for button, title in (("replicas", "What changed"), ("received", "What it cost"), ("load", "Expert")):
                    await page.page.click(f"#shown [data-key={button}]")
                    await page.shows("#heat-title", title)
            assert page.problems == []

    BROWSER.run(look())


@pytest.mark.slow
def test_a_browser_sorts_layers_saves_them_and_draws_traffic_and_phases(tmp_path: Path) -> None:
    phases = [replace(record, phase=("prefill", "decode")[i % 2]) for i, record in enumerate(synthetic_trace(LOAD))]
    found = replay(LoadTrace.of(phases, topk=2), ["greedy"], ReplaySettings(TOPOLOGY, 16))
    (tmp_path / "page.html").write_text(to_html(found), encoding="utf-8")

    async def look() -> None:
        async with browser_page((tmp_path / "page.html").as_uri()) as page:
            for part in ("traffic-section", "traffic-nodes", "phases-section"):
                assert await page.page.locator(f"#{part}").is_visible()
            assert await page.page.locator("#traffic-ranks canvas").count() == 2
            assert await page.page.locator("#phases svg").count() == 2
            served = "#layer-table tbody td:nth-child(4)"
            await page.page.click("#layer-table th:nth-child(4) button")
            falling = [float(text) for text in await page.page.locator(served).all_text_contents()]
            assert falling == sorted(falling, reverse=True)
            async with page.page.expect_download() as waited:
                await page.page.click("#layer-save")
            path = await (await waited.value).path()
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            assert lines[0].startswith('"layer","hottest expert, × mean","do nothing","greedy"')
            assert [round(float(line.split(",")[3]), 4) for line in lines[1:]] == falling
            assert page.problems == []

    BROWSER.run(look())
