"""Two replays compared: changes by policy and window, what is not like with like, and files that are no report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.report import to_html, to_json
from moe_serve.eplb.replay.report_against import (
    EarlierReport,
    against_cells,
    against_page,
    against_to_json,
    against_to_table,
    read_report,
)
from moe_serve.eplb.replay.result import ReplayReport
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology
from tests.browser import BROWSER, browser_page


def report(policies: tuple[str, ...] = ("greedy",), num_slots: int = 8, num_windows: int = 4) -> ReplayReport:
    """Eight experts on two ranks; the hot ones are together on rank 0."""
    counts = np.array([[400, 400, 400, 100, 100, 100, 100, 100]])
    records = [LoadRecord(10 * i, 10, "decode", counts) for i in range(num_windows)]
    return replay(LoadTrace.of(records), policies, ReplaySettings(Topology(1, 2), num_slots))


def earlier(found: ReplayReport, folder: Path, **changes: Any) -> EarlierReport:
    path = folder / "before.json"
    path.write_text(json.dumps(to_json(found) | changes), encoding="utf-8")
    return read_report(path)


def test_a_report_against_itself_has_no_changes(tmp_path: Path) -> None:
    found = report(("greedy", "incremental"))
    compared = against_to_json(found, earlier(found, tmp_path))
    assert compared["conditions"] == {}
    assert compared["verdict"] == ["greedy: as before.", "incremental: as before."]
    for row in compared["policies"]:
        assert all(pair[0] == pair[1] for key, pair in row.items() if key != "policy")
    columns, rows = against_cells(found, earlier(found, tmp_path))
    assert columns == ["policy", "served", "min layer", "moves"]  # times are in neither
    assert all(cell.endswith("(=)") for row in rows for cell in row[1:])


def test_changes_are_told_by_policy_and_window(tmp_path: Path) -> None:
    found = report()
    content = to_json(found)
    row, series = content["policies"][1], content["windows"]["policies"]["greedy"]
    row["served_mean"] -= 0.125
    row["moves"] *= 2
    series["served_mean"][0] -= 0.5
    series["served_mean"][1] -= 0.25
    series["served_mean"][2] += 0.25
    (tmp_path / "before.json").write_text(json.dumps(content))
    was = read_report(tmp_path / "before.json")
    table = against_to_table(found, was)
    assert "(+0.1250)" in table
    assert "(-50.0%)" in table
    moves = int(found.policies[0].moves.sum())
    (sentence,) = against_to_json(found, was)["verdict"]
    assert f"(+0.1250), moves {moves} experts instead of {2 * moves}." in sentence
    assert sentence.endswith("Better in 2 of 3 windows, worse in 1, most at step 30 (-0.2500).")


@pytest.mark.parametrize(
    "was, cell",
    [(10_001, "10,001 (=)"), (10_000, "10,001 (+0.010%)"), (9000, "10,001 (+11.1%)"), (0, "10,001 (was 0)")],
)
def test_a_small_change_is_not_shown_as_none(was: int, cell: str, tmp_path: Path) -> None:
    found = report()
    content = to_json(found)
    content["policies"][1]["moves"] = was
    moved = replace(found.policies[0], moves=np.array([10_001, 0, 0]))
    found = replace(found, results=(found.floor, moved, found.results[-1]))
    assert against_cells(found, earlier(found, tmp_path, policies=content["policies"]))[1][1][3] == cell


def test_what_is_not_like_with_like_is_said(tmp_path: Path) -> None:
    was = earlier(report(("incremental",), num_slots=10, num_windows=3), tmp_path)
    found = report(("greedy",))
    words = " ".join(against_to_json(found, was)["verdict"])
    assert "Other cluster: 2 ranks on 1 node, 8 slots" in words
    assert "Other windows: 4, scored" in words
    assert "The load or the placement at the start differs: doing nothing serves at" in words
    assert "Policies only there: incremental; only here: greedy." in words
    assert "The best policy is greedy; it was incremental." in words


def test_times_that_one_report_lacks_are_not_made_up(tmp_path: Path) -> None:
    found = report()
    content = to_json(found)
    for row in content["policies"]:
        row |= {"step_s": 0.5, "tokens_per_s": 1000.0}
    was = earlier(found, tmp_path, policies=content["policies"])
    columns, rows = against_cells(found, was)
    assert columns[-2:] == ["step time", "tokens/s"]
    assert rows[1][-2:] == ["n/a (was 500.00 ms)", "n/a (was 1,000)"]


def test_replays_without_policies_compare_their_floors(tmp_path: Path) -> None:
    found = report(())
    assert against_to_json(found, earlier(found, tmp_path))["verdict"] == []
    assert [row[0] for row in against_cells(found, earlier(found, tmp_path))[1]] == ["do nothing", "perfect"]


def test_windows_of_a_long_report_are_averaged_for_the_page(tmp_path: Path) -> None:
    found = report(())
    content = to_json(found)
    content["windows"]["first_step"] = list(range(1500))
    for series in content["windows"]["policies"].values():
        series["served_mean"] = [0.5] * 1500
    data = against_page(found, earlier(found, tmp_path, windows=content["windows"]))
    assert len(data["steps"]) == len(data["served"]["do nothing"]) == 600
    assert set(data["served"]["do nothing"]) == {0.5}


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "line 1 column 1: not JSON"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
        ("[]", "has format None, expected 'moe_serve.replay_report'"),
        ('{"format": "moe_serve.simulation"}', "has format 'moe_serve.simulation'"),
        ('{"format": "moe_serve.replay_report"}', "wrong conditions"),
        ('{"format": "moe_serve.replay_report", "conditions": {}, "policies": 3, "windows": {}}', "wrong policies"),
    ],
    ids=["empty", "deep", "digits", "list", "simulation", "bare", "policies"],
)
def test_what_is_no_report_is_refused_with_the_reason(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_report(tmp_path / "r.json")
    assert str(caught.value).endswith("give what moe-serve replay --json wrote" if text else "or cut off?")


@pytest.mark.parametrize("value", ["much", True, float("nan"), 1e300, None, [1]], ids=str)
def test_a_number_that_is_none_is_refused_by_its_key(value: object, tmp_path: Path) -> None:
    content = to_json(report())
    content["policies"][1]["served_mean"] = value
    with pytest.raises(ConfigError, match="served_mean"):
        earlier(report(), tmp_path, policies=content["policies"])
    content["windows"]["policies"]["greedy"]["served_mean"][1] = value
    with pytest.raises(ConfigError, match="windows: greedy: served_mean"):
        earlier(report(), tmp_path, windows=content["windows"])


def test_a_missing_file_and_series_of_another_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_report(tmp_path / "none.json")
    content = to_json(report())
    content["windows"]["first_step"].pop()
    with pytest.raises(ConfigError, match="windows: do nothing: served_mean"):
        earlier(report(), tmp_path, windows=content["windows"])


@pytest.mark.slow
def test_a_browser_draws_both_replays(tmp_path: Path) -> None:
    found = report(("greedy", "incremental"))
    page_text = to_html(found, against=against_page(found, earlier(report(num_windows=9), tmp_path)))
    (tmp_path / "page.html").write_text(page_text, encoding="utf-8")

    async def look() -> None:
        async with browser_page((tmp_path / "page.html").as_uri()) as page:
            await page.shows("#against-title", "Against before.json")
            await page.shows("#against-verdict", "only here: incremental")
            assert await page.page.locator("#against path").count() == 4  # doing nothing and greedy, twice
            assert page.problems == []

    BROWSER.run(look())
