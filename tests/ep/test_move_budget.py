"""A turn costs its share of a step on machines of any speed, and a stopped process does not blame others."""

import pytest

from moe_serve.ep.weight_mover import IDLE_S, MOST_S, MoveBudget, MoveDeadline

PIECE = 1000


class Machine:
    """A machine that copies at a speed, on a clock of its own."""

    def __init__(self, s_per_byte: float):
        self.s_per_byte = s_per_byte

    def turn(self, budget: MoveBudget, step_s: float) -> float:
        """Returns the seconds of one turn that carries whole pieces until the allowance is used up."""
        allowance, done = budget.allowance(step_s), 0
        while done < allowance:
            done += PIECE
        budget.record(done, done * self.s_per_byte)
        return done * self.s_per_byte


@pytest.mark.parametrize("s_per_byte", [1e-10, 1e-9, 1e-7])
@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.5])
def test_a_step_becomes_longer_by_its_share_or_by_one_piece(s_per_byte: float, step_s: float) -> None:
    budget, machine = MoveBudget(step_share=0.05), Machine(s_per_byte)
    turns = [machine.turn(budget, step_s) for _ in range(50)]
    assert all(0 < turn <= 0.05 * step_s + PIECE * s_per_byte for turn in turns[1:])
    assert turns[-1] >= 0.99 * 0.05 * step_s, "and the share is used"


def test_an_idle_engine_moves_for_longer_and_a_very_long_step_has_a_bound() -> None:
    budget, machine = MoveBudget(step_share=0.05), Machine(1e-9)
    assert machine.turn(budget, 0.0) == pytest.approx(IDLE_S, rel=0.01)
    assert machine.turn(budget, 100.0) == pytest.approx(MOST_S, rel=0.01)


def test_the_budget_follows_a_machine_that_becomes_slower_or_faster() -> None:
    budget, machine = MoveBudget(step_share=0.1), Machine(1e-9)
    for speed in (1e-9, 5e-9, 1e-9):
        machine.s_per_byte = speed
        for _ in range(100):
            turn = machine.turn(budget, 0.01)
        assert turn == pytest.approx(0.001, rel=0.05)


def test_a_turn_without_bytes_teaches_nothing() -> None:
    budget = MoveBudget(step_share=0.05)
    before = budget.allowance(0.01)
    budget.record(0, 3.0)
    assert budget.allowance(0.01) == before


def test_one_hiccup_does_not_stop_a_move() -> None:
    budget, machine = MoveBudget(step_share=0.05), Machine(1e-9)
    machine.turn(budget, 0.02)
    budget.record(PIECE, 30.0)  # this process was stopped for half a minute in the middle of a turn
    assert budget.allowance(0.02) >= 1
    for _ in range(2000):
        turn = machine.turn(budget, 0.02)
    assert turn == pytest.approx(0.001, rel=0.05)


def test_a_round_is_late_after_its_deadline_and_not_before() -> None:
    deadline = MoveDeadline(3.0, now_s=100.0)
    assert not any(deadline.has_passed(100.0 + 0.1 * i) for i in range(1, 30))
    assert deadline.has_passed(103.5)


def test_the_time_in_which_this_process_was_stopped_does_not_count() -> None:
    deadline = MoveDeadline(10.0, now_s=0.0)
    assert not deadline.has_passed(3600.0)
    assert not deadline.has_passed(3605.0)
    assert not any(deadline.has_passed(3605.0 + i) for i in (1, 2, 3, 4, 5))
    assert deadline.has_passed(3612.5)
