"""What the front end knows of the balancer, whoever leads the ranks. Pure."""

import json
import logging
from statistics import fmean

import numpy as np
import pytest

from moe_serve.engine.balancing.balancer import BalanceReports
from moe_serve.engine.protocol.messages import BalanceReport, DecisionReport, WindowReport
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.events import Decision
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.observe.eplb import status_json
from moe_serve.server.ranks.balance import NUM_EVENTS, NUM_POINTS, BalanceBook


def report(step=0, version=0, rank=0, launch_id=0, state="watching", **more) -> BalanceReport:
    return BalanceReport(rank, launch_id, step, "dynamic", state, version, more.pop("totals", {}), **more)


def window(first_step: int, *balance: float, num_ranks: int = 2, at_end: float | None = None) -> WindowReport:
    loads = [[1.0, 2 / b - 1] + [0.0] * (num_ranks - 2) for b in balance]
    at_end = fmean(balance) if at_end is None else at_end
    return WindowReport(
        first_step, 100, "decode", 0.01 / balance[0], list(balance), loads, [[3, 4]] * len(balance), at_end
    )


def decision(kind: str, step: int, reason: str = "why", gain_s: float = 0.0) -> DecisionReport:
    return DecisionReport(1000.0 + step, step, kind, reason, 2, gain_s, gain_s / 10)


def told(book: BalanceBook, *reports: BalanceReport) -> BalanceBook:
    for number, one in enumerate(reports):
        book.take(one, 2000.0 + number)
    return book


def a_move(book: BalanceBook, first_step: int, **more) -> None:
    """Balancedness 0.5, a move of 3 experts in 2 rounds, then 0.9."""
    moved = {"num_experts_moved": 3.0, "num_rounds": 2.0, "num_bytes_moved": 600.0}
    told(
        book,
        report(first_step + 100, window=window(first_step, 0.4, 0.6), totals={"num_rounds": 0.0}, **more),
        report(first_step + 100, state="moving", decisions=[decision("move", first_step + 100, gain_s=5.0)], **more),
        report(
            first_step + 110, version=1, state="moving", totals={"num_experts_moved": 2.0, "num_rounds": 1.0}, **more
        ),
        report(first_step + 120, version=2, totals=moved, decisions=[decision("done", first_step + 120)], **more),
        report(
            first_step + 200, version=2, totals=moved, window=window(first_step + 100, 0.5, 0.7, at_end=0.8), **more
        ),
        report(first_step + 300, version=2, totals=moved, window=window(first_step + 200, 0.9, 0.9), **more),
    )


def test_a_move_is_told_from_its_decision_to_what_it_brought(caplog):
    book = BalanceBook("dynamic")
    with caplog.at_level(logging.INFO, "moe_serve"):
        a_move(book, 0)
    (move,) = book.moves
    assert (move.version, move.num_experts, move.num_rounds, move.num_bytes) == (2, 3, 2, 600)
    assert (move.before, move.after) == (pytest.approx(0.5), pytest.approx(0.85))
    assert move.step_before_s > move.step_after_s
    assert move.failed is None
    assert book.moves.running is None
    assert [event.kind for event in book.events] == ["move", "done"]
    assert "why: 3 experts moved in 2 rounds" in caplog.text
    assert "placement 2 serves at balancedness 0.80, 0.50 before" in caplog.text
    assert caplog.text.count("serves at") == 1


def test_a_move_that_the_balancer_has_measured_shows_its_balancedness_though_no_other_window_follows():
    """The steps of a run of the demo model, after which its clients left: the tile went on to say 0.96 -> –."""
    book = told(
        BalanceBook("dynamic"),
        report(300, window=window(200, 0.96)),
        report(305, state="moving", decisions=[decision("move", 305)]),
        report(321, version=3, decisions=[decision("done", 321)]),
    )
    assert status_json(book, 2000.0)["moves"][0]["balancedness_after"] is None
    told(book, report(400, version=3, window=window(300, 0.95, at_end=0.98), decisions=[decision("watch", 400)]))
    move = status_json(book, 2000.0)["moves"][0]
    assert (move["balancedness_before"], move["balancedness_after"]) == (pytest.approx(0.96), pytest.approx(0.98))
    assert move["step_time_after_s"] is None, "no step of this window alone was on the new placement"
    told(book, report(500, version=3, window=window(400, 0.9)))
    assert status_json(book, 2000.0)["moves"][0]["step_time_after_s"] == pytest.approx(0.01 / 0.9)


def test_a_window_in_which_experts_moved_tells_the_balance_of_its_load_on_both_placements():
    before = Placement(np.array([[0, 1, 2, 3]]), num_logical=4, num_ranks=2)
    after = Placement(np.array([[0, 3, 2, 1]]), num_logical=4, num_ranks=2, version=1)
    reports = BalanceReports(rank=0, launch_id=0, mode="dynamic")
    record = LoadRecord(0, 100, "decode", np.array([[30, 30, 10, 10]]), placement=before)
    reports.window_closed(record, after)
    window = reports.make(100, "watching", after).window
    assert window is not None
    assert (window.balancedness, window.mean_at_end) == ([pytest.approx(40 / 60)], pytest.approx(1.0))


def test_a_move_under_way_shows_how_far_it_is():
    book = told(
        BalanceBook("dynamic"),
        report(100, state="moving", decisions=[decision("move", 100)]),
        report(110, version=1, state="moving", totals={"num_experts_moved": 2.0, "num_rounds": 1.0}),
    )
    status = status_json(book, 2010.0)
    assert status["move"]["summary"] == "2 experts moved in 1 round"
    assert status["move"]["state"] == status["state"] == "moving"
    assert status["placement"] == {"version": 1, "age_s": 9.0}


@pytest.mark.parametrize("kind", ["manual", "restore"])
def test_a_move_that_a_person_or_a_loss_asks_for_is_told_as_any_other(kind):
    book = told(
        BalanceBook("dynamic"),
        report(100, state="moving", decisions=[decision(kind, 100)]),
        report(110, version=1, state="moving", totals={"num_experts_moved": 2.0, "num_rounds": 1.0}),
    )
    assert status_json(book, 2010.0)["move"]["summary"] == "2 experts moved in 1 round"
    told(book, report(120, version=2, decisions=[decision("group", 120)]))
    assert status_json(book, 2010.0)["move"] is None
    nothing = DecisionReport(1130.0, 130, kind, "0 experts", 0, 0.0, 0.0)
    told(book, report(130, version=2, decisions=[nothing]))
    assert status_json(book, 2010.0)["move"] is None, "there was nothing to move"


def test_a_failed_move_says_why_and_the_placement_stays(caplog):
    failed = decision("failed", 130, "round 1 was abandoned: rank 3, layer 2, step 130: checksum")
    book = told(BalanceBook("dynamic"), report(100, state="moving", decisions=[decision("move", 100)]))
    told(book, report(130, decisions=[failed], totals={"num_failures": 1.0}))
    status = status_json(book, 2000.0)
    assert status["move"] is None
    assert status["moves"][0]["state"] == "failed"
    assert "rank 3, layer 2, step 130: checksum" in status["moves"][0]["summary"]
    assert status["last_decision"]["kind"] == "failed"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_totals_and_history_live_on_when_the_leader_changes_and_when_ranks_are_restarted():
    book = BalanceBook("dynamic")
    a_move(book, 0)
    first = {"num_rounds": 2.0, "longest_pause_seconds": 0.5}
    told(
        book,
        report(400, 2, totals=first),
        report(410, 2, rank=1, totals={"num_rounds": 1.0, "longest_pause_seconds": 0.2}),
    )
    assert book.totals == {"num_rounds": 3.0, "longest_pause_seconds": 0.5}
    told(book, report(10, 0, launch_id=1, totals={"num_rounds": 4.0, "longest_pause_seconds": 0.7}))
    assert book.totals == {"num_rounds": 7.0, "longest_pause_seconds": 0.7}
    assert (book.version, status_json(book, 2000.0)["placement"]["age_s"]) == (0, 0.0)
    texts = [event.text for event in book.events if event.kind == "leader"]
    assert texts == ["rank 1 leads now", "the ranks were restarted"]
    assert len(book.points) == 3


def test_a_new_leader_ends_the_move_of_the_old_one():
    book = told(BalanceBook("dynamic"), report(100, state="moving", decisions=[decision("move", 100)]))
    told(book, report(120, rank=1))
    assert book.moves.running is None
    assert "rank 1 leads now" in next(iter(book.moves)).failed


def test_windows_after_a_restart_do_not_judge_a_move_before_it():
    book = BalanceBook("dynamic")
    a_move(book, 0)
    told(book, report(600, launch_id=1, window=window(500, 0.2)), report(700, launch_id=1, window=window(600, 0.2)))
    assert next(iter(book.moves)).after == pytest.approx(0.85)


def test_an_alarm_is_told_once_and_when_it_is_over(caplog):
    book = told(BalanceBook("dynamic"), *[report(1, alarm="no progress for 60 s", state="off")] * 3)
    assert status_json(book, 2000.0)["alarm"] == "no progress for 60 s"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    told(book, report(2))
    assert status_json(book, 2000.0)["alarm"] is None
    assert [event.text for event in book.events] == ["no progress for 60 s", "the alarm is over"]


def test_progress_is_news_and_not_a_sign_of_life():
    book = BalanceBook("dynamic")
    book.take(report(100, window=window(0, 0.5)), 10.0)
    book.take(report(150), 20.0)
    assert (book.heard_s, book.progress_s) == (20.0, 10.0)
    for number, news in enumerate([{"version": 1}, {"version": 1, "decisions": [decision("keep", 1)]}]):
        book.take(report(200, **news), 30.0 + number)
        assert book.progress_s == 30.0 + number


def test_every_list_is_bounded():
    book = BalanceBook("dynamic")
    for number in range(1000):
        news = [decision("move", number), decision("failed", number), decision("watch", number)]
        book.take(report(number, window=window(100 * number, 0.5), decisions=news), float(number))
    assert (len(book.points), len(book.events), len(list(book.moves))) == (NUM_POINTS, NUM_EVENTS, 50)
    assert (book.num_windows, book.num_events) == (1000, 3000)
    assert len(json_bytes(status_json(book, 0.0))) < 30_000
    assert book.decisions == {"move": 1000, "failed": 1000, "watch": 1000}


@pytest.mark.parametrize(
    "odd",
    [
        WindowReport(0, 0, "idle", 0.0, [], [], [], 1.0),
        WindowReport(0, 5, "mixed", float("nan"), [1.0], [[0.0]], [[0]], float("nan")),
        WindowReport(0, 5, "mixed", 0.0, [1.0, 0.5], [[0.0], [1.0, 2.0]], [[0], [1]], 0.75),
    ],
)
def test_no_report_makes_the_front_end_fail(odd):
    book = told(BalanceBook("static"), report(1, window=odd), report(2, decisions=[decision("done", 2)]))
    text = json_bytes(status_json(book, 5.0)).decode()
    status = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [one["kind"] for one in status["decisions"]] == ["done"]


def test_the_reports_of_a_leader_are_what_is_kept_here():
    placement = Placement(np.array([[0, 1, 2, 0], [1, 0, 2, 1]]), num_logical=3, num_ranks=2)
    record = LoadRecord(0, 100, "decode", np.array([[40, 30, 30], [10, 10, 0]]), step_time_s=0.01)
    reports = BalanceReports(rank=0, launch_id=0, mode="dynamic", wall_s=lambda: 1000.0)
    reports.window_closed(record, placement)
    book = BalanceBook("dynamic")
    decided = [Decision(100, "watch", "so so", (), 4.0, 0.0, -1.5), Decision(100, "move", "why", (0,), 5.0, 0.5)]
    told(book, reports.make(100, "moving", placement, decided))
    status = json.loads(json_bytes(status_json(book, 2003.0)))
    assert status["move"]["predicted_gain_s"] == 5.0
    gains = [(one["kind"], one["predicted_gain_s"], one["realised_gain_s"]) for one in status["decisions"]]
    assert gains == [("move", 5.0, None), ("watch", 4.0, -1.5)]
    assert status["window"]["balancedness"]["min"] == pytest.approx(10 / 15)
    assert book.placement == placement.physical_to_logical.tolist()
    assert book.rank_tokens == pytest.approx([50 + 15, 50 + 5])
