"""Which windows teach prices, which measure a move, and when the next plan is due."""

import numpy as np

from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.window_watch import MOST_WITHOUT_WHOLE, WindowWatch

OLD, NEW = (Placement.trivial(1, 4, 2, 0) for _ in range(2))


def record(first_step, num_steps=100, tokens=9):
    return LoadRecord(first_step, num_steps, "decode", np.full((1, 4), tokens))


def test_the_window_in_which_a_move_ends_measures_it_but_teaches_no_prices():
    watch = WindowWatch(OLD, 1, learns=False)
    assert watch.close(record(0), OLD, is_moving=False).whole
    watch.plan_asked(100)
    watch.complete(130)
    closed = watch.close(record(100), NEW, is_moving=False)
    assert (closed.first, closed.last, closed.whole, closed.unseen) == (OLD, NEW, False, True)
    closed = watch.close(record(200), NEW, is_moving=False)
    assert (closed.first, closed.last, closed.whole, closed.unseen) == (NEW, NEW, True, True)


def test_a_window_that_the_plan_knew_in_part_or_in_which_experts_still_move_measures_nothing():
    watch = WindowWatch(OLD, 1, learns=False)
    watch.plan_asked(50)  # by hand, inside the window
    watch.complete(70)
    assert not watch.close(record(0), NEW, is_moving=False).unseen
    watch.plan_asked(100)
    closed = watch.close(record(100), NEW, is_moving=True)
    assert not closed.unseen
    assert not closed.whole


def test_windows_without_load_say_nothing():
    watch = WindowWatch(OLD, 1, learns=False)
    assert watch.close(record(0, tokens=0), OLD, is_moving=False) is None
    assert watch.num_windows == 0


def test_the_cooldown_counts_unseen_windows():
    watch = WindowWatch(OLD, 3, learns=False)
    watch.rest()
    assert [watch.is_due() for _ in range(4)] == [False, False, True, True]


def test_where_prices_are_learned_a_window_without_a_move_is_waited_for_once_in_a_while():
    for learns in (False, True):
        watch = WindowWatch(OLD, 1, learns)
        due = []
        for index in range(2 * MOST_WITHOUT_WHOLE + 2):
            watch.close(record(100 * index), OLD, is_moving=False)
            due.append(watch.is_due())
            if due[-1]:  # a plan, and a move that ends within the next window
                watch.plan_asked(100 * (index + 1))
                watch.complete(100 * (index + 1) + 30)
        one_cycle = [True] * MOST_WITHOUT_WHOLE + [False]
        assert due == (one_cycle * 2 if learns else [True] * len(due))
