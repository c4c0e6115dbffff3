"""What a page says about changes: which experts moved, what that brought and cost. Empty parts are left out."""

import asyncio
import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.report import change_words, changes, page_data, to_html
from moe_serve.eplb.replay.result import ReplayReport
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.topology import Topology
from tests.server.observe.dashboard.browser import browser_page


def report(policies: list[str], num_layers: int = 2, num_slots: int = 8) -> ReplayReport:
    """Eight experts on two ranks; in layer 0 the hot ones are together on rank 0, in layer 1 none is hot."""
    counts = np.full((num_layers, 8), 100)
    counts[:1, :3] = 400
    records = [LoadRecord(10 * i, 10, "decode", counts) for i in range(4)]
    return replay(LoadTrace.of(records), policies, ReplaySettings(Topology(1, 2), num_slots))


def matrix(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(-1, 8)


@pytest.mark.parametrize("policy", ["greedy", "incremental"])
def test_experts_received_add_up_to_the_moves(policy: str) -> None:
    found = report([policy])
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
    found = report(["incremental"])
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
    found = report(["incremental"])
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
    data = page_data(report(["greedy"]))
    assert data["changes"] is not None
    labels = [card["label"] for card in data["cards"]]
    assert "slots rewritten per rebalance" in labels
    assert not any("node" in label for label in labels)  # sources are not in the trace

    still = page_data(report(["static"]))
    assert still["changes"] is None
    assert "slots rewritten per rebalance" not in [card["label"] for card in still["cards"]]

    alone = page_data(report([]))
    assert [card["from"] for card in alone["cards"]] == ["", ""]  # nothing to compare with
    assert set(alone["time"]) == {"span", "before"}


PARTS = ["heat", "shown", "layers-section", "curves-section", "moves-part", "redundancy-part", "traffic-section",
         "after-part", "sweep-section"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "policies, num_layers, shown",
    [
        (["greedy"], 2, {"heat", "shown", "layers-section", "curves-section", "moves-part", "after-part"}),
        (["greedy"], 1, {"heat", "shown", "curves-section", "moves-part", "after-part"}),
        ([], 2, {"heat"}),
    ],
    ids=["moves", "one layer", "no policy"],
)
def test_a_browser_draws_each_part_that_has_something_to_say(
    policies: list[str], num_layers: int, shown: set[str], tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text(to_html(report(policies, num_layers)), encoding="utf-8")

    async def look() -> None:
        async with browser_page((tmp_path / "page.html").as_uri()) as page:
            assert {part for part in PARTS if await page.page.locator(f"#{part}").is_visible()} == shown
            if "shown" in shown:
                for button, title in (("replicas", "What changed"), ("received", "What it cost"), ("load", "Expert")):
                    await page.page.click(f"#shown [data-key={button}]")
                    await page.shows("#heat-title", title)
            assert page.problems == []

    asyncio.run(look())
