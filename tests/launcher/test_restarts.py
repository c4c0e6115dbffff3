"""How often lost ranks are started again."""

from moe_serve.config import LauncherConfig
from moe_serve.launcher.restarts import Restarts


def test_restarts_count_within_the_window_and_the_report_says_what_was_lost():
    now = [0.0]
    restarts = Restarts(LauncherConfig(max_restarts=2, restart_window_s=10), clock=lambda: now[0])
    assert restarts.note_loss("rank 0 died")
    now[0] = 5.0
    assert restarts.note_loss("rank 1 died")
    assert restarts.describe() == "restart 2 of 2 within 10 s"
    now[0] = 12.0  # the first is forgotten
    assert restarts.note_loss("rank 2 died")
    now[0] = 13.0
    assert not restarts.note_loss("rank 3 died")
    report = restarts.report()
    assert report[0] == "the ranks were lost 3 times within 10 s:"
    assert [line[-11:] for line in report[1:-1]] == ["rank 1 died", "rank 2 died", "rank 3 died"]
    assert "launcher.max_restarts" in report[-1]


def test_what_served_is_started_again_at_once_and_what_ends_at_its_start_after_ever_longer_pauses():
    restarts = Restarts(LauncherConfig(max_restarts=100))
    pauses = []
    for had_served in (True, True, False, False, False, False, False, False, True, False):
        restarts.note_loss("rank 0 died", had_served)
        pauses.append(restarts.pause_s)
    assert pauses == [0, 0, 5, 10, 20, 40, 60, 60, 0, 5]


def test_without_restarts_the_first_loss_is_the_end():
    restarts = Restarts(LauncherConfig(max_restarts=0))
    assert not restarts.note_loss("rank 0 died")
    assert restarts.report() == ["launcher.max_restarts is 0: the ranks are not started again"]
