"""Liveness: a long step is no sign of death, a stopped process is, and a rank that hangs is lost at its deadline."""

import pytest

from moe_serve.engine.protocol.messages import Pulse
from moe_serve.server.ranks.rank_table import Liveness, RankTable
from tests.server.ranks.test_rank_table import attached, group_of, make_ready
from tests.server.served import fake_config


def liveness() -> Liveness:
    return Liveness(fake_config(2, "server.worker_deadline_s=30", "engine.step_deadline_s=60"))


def serving_at(now_s: float) -> RankTable:
    """Two ranks that were heard from at a time, as words and as pulses."""
    table = attached(0, 1)
    make_ready(table, 10, 10)
    for view in table:
        view.heard_s = now_s
        table.pulse(Pulse(view.rank, 0, 7, "the forward"), now_s)
    return table


def test_a_long_step_is_no_death_while_the_process_shows_life():
    table = serving_at(0.0)
    for now_s in range(60):
        for view in table:
            table.pulse(Pulse(view.rank, 0, 7, "the forward"), float(now_s))
        assert liveness().look(table, float(now_s)) is None


def test_a_step_that_does_not_end_is_lost_at_the_deadline_with_its_phase():
    table = serving_at(0.0)
    table.by_identity(b"socket0").heard_s = 60.5
    for view in table:
        table.pulse(Pulse(view.rank, 0, 7, "the forward"), 60.5)
    reason, rank = liveness().look(table, 61.0)
    assert rank == 1
    assert "last seen in the forward of step 7" in reason


def test_a_stopped_process_is_named_after_seconds_and_lost_before_the_deadline_of_a_step(caplog):
    table = serving_at(0.0)
    watch = liveness()
    for now_s in range(31):
        table.pulse(Pulse(0, 0, 7, "the exchange"), float(now_s))
        assert watch.look(table, float(now_s)) is None
    (warning,) = {record.getMessage() for record in caplog.records}
    assert warning.startswith("rank 1 on h has shown no sign of life for 6 s (last seen in the forward of step 7)")
    reason, rank = watch.look(table, 31.0)
    assert rank == 1
    assert "server.worker_deadline_s" in reason


def test_peers_that_can_go_on_get_the_time_for_it():
    table = group_of("mask", "mask")
    for view in table:
        table.pulse(Pulse(view.rank, 0, 7, ""), 0.0)
        view.heard_s = 100.0
    assert liveness().look(table, 100.0) is None
    assert liveness().look(table, 30 + 3 * 60 + 3) is not None


@pytest.mark.parametrize("is_masked", [False, True])
def test_only_ranks_that_serve_can_be_silent(is_masked):
    table = attached(0, 1)  # loading weights may take its time
    if is_masked:
        table = serving_at(0.0)
        for view in table:
            view.mask_reason = "it was late"
    assert liveness().look(table, 1000.0) is None


def test_a_pulse_of_another_launch_or_of_nobody_counts_for_nothing():
    table = serving_at(0.0)
    table.pulse(Pulse(1, 3, 9, "the forward"), 50.0)
    table.pulse(Pulse(9, 0, 9, "the forward"), 50.0)
    assert [view.pulse_s for view in table] == [0.0, 0.0]


def test_a_front_end_that_did_not_run_itself_says_so_and_of_no_rank_that_it_is_stopped(caplog):
    table, watch = serving_at(0.0), liveness()
    for now_s in (1.0, 2.0, 3.0):
        watch.discount_own(table, now_s)
        for view in table:
            table.pulse(Pulse(view.rank, 0, 7, "the forward"), now_s)
    watch.discount_own(table, 100.0)  # what the ranks have said meanwhile waits in the socket
    assert watch.look(table, 100.0) is None
    (warning,) = {record.getMessage() for record in caplog.records}
    assert warning == "this process did not run for 96 s: what is heard of ranks is late by as much"


def test_a_front_end_that_is_always_late_still_notices_a_stopped_rank(caplog):
    table, watch = serving_at(0.0), liveness()
    lost, now_s = None, 0.0
    while lost is None and now_s < 1000:
        now_s += 4.0
        watch.discount_own(table, now_s)
        table.pulse(Pulse(0, 0, 7, "the exchange"), now_s)
        table.by_identity(b"socket0").heard_s = now_s
        lost = watch.look(table, now_s)
    reason, rank = lost
    assert rank == 1
    assert "rank 1 on h has shown no sign of life for 6 s" in caplog.text
    assert "for 31 s" in reason, "as far as it ran itself"


def test_time_in_which_the_front_end_did_not_run_counts_neither_for_a_suspicion_nor_for_a_start():
    table, watch = group_of("mask", "mask"), liveness()
    table.suspect(1, "rank 1 was killed", now_s=0.0)
    watch.discount_own(table, 0.0)
    watch.discount_own(table, 1000.0)
    assert watch.look(table, 1000.0) is None
    starting, watch = attached(0), liveness()
    for now_s in (500.0, 1000.0):
        watch.discount_own(starting, now_s)
        assert watch.late_start(starting, now_s) is None
    assert watch.late_start(starting, 1100.1) is not None
