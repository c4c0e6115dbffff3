"""After every round each slot holds the bytes of the right expert; a round that fails leaves no trace.

A turn costs its share of a step on machines of any speed, and a stopped process does not blame others.
"""

import numpy as np
import pytest

from moe_serve.ep.weight_mover import (
    IDLE_S,
    MOST_S,
    MoveBudget,
    MoveDeadline,
    MoveFault,
    MoveSettings,
    moves_of_rank,
    round_id,
)
from moe_serve.eplb.migration.moves import MigrationRound, RoundLimits, SlotMove, apply_round
from moe_serve.eplb.migration.plan import plan_migration
from moe_serve.eplb.placement import Placement
from moe_serve.topology import Topology
from tests.ep.moving import BUSY_S, FORMS, VirtualRanks, random_placement, raw

RELABEL = ("ranks", "nodes", "none", "exact")


class Case:
    """Random ranks with random experts, and plans for them."""

    def __init__(self, seed: int):
        self.rng = rng = np.random.default_rng(seed)
        self.topology = Topology(int(rng.integers(1, 3)), int(rng.integers(1, 4)))
        self.num_layers = int(rng.integers(1, 3))
        self.slots_per_rank = int(rng.integers(1, 4))
        num_slots = self.topology.num_ranks * self.slots_per_rank
        self.num_logical = int(rng.integers(1, num_slots + 1))
        self.settings = MoveSettings(staging_slots=int(rng.integers(1, 3)))
        form = FORMS[int(rng.integers(len(FORMS)))]
        hidden, width = (32, 32) if form[0] == "mxfp4" else (int(n) for n in rng.integers(1, 4, 2))
        whole = form[0] != "fp8" and rng.random() < 0.3
        # Packed experts are padded to 32 rows.
        piece_bytes = 4096 if whole else int(rng.choice([5, 8, 24])) * (1 + 20 * form[2])
        placement = self._placement(version=int(rng.integers(5)))
        self.ranks = VirtualRanks(placement, form, hidden, width, self.settings, piece_bytes)

    def plan(self) -> list[MigrationRound]:
        """Returns the rounds from where the ranks are to another placement."""
        old = self.ranks.placement
        new = self._placement(old.version)
        relabel = RELABEL[int(self.rng.integers(len(RELABEL)))]
        return list(plan_migration(old, new, self.topology, RoundLimits(self.settings.staging_slots), relabel).rounds)

    def run(self, migration_round: MigrationRound) -> None:
        """Runs a round from start to activation."""
        ranks = self.ranks
        ranks.start(migration_round)
        ranks.advance(self.rng)
        ranks.check()
        ranks.activate(apply_round(ranks.placement, migration_round))
        ranks.check()

    def _placement(self, version: int) -> Placement:
        ranks = self.topology.num_ranks
        return random_placement(self.rng, self.num_layers, self.num_logical, ranks, self.slots_per_rank, version)


def check_sequence(seed: int) -> int:
    """Plans, moves and activates a few times, with a round cancelled now and then; returns the rounds that it ran."""
    case = Case(seed)
    num_rounds = 0
    for _ in range(3):
        for migration_round in case.plan():
            if case.rng.random() < 0.1:
                case.ranks.start(migration_round)
                case.ranks.advance(case.rng, int(case.rng.integers(20)))
                case.ranks.cancel()
                case.ranks.check()
                break
            case.run(migration_round)
            num_rounds += 1
    return num_rounds


def test_every_slot_holds_the_right_expert_after_every_round() -> None:
    assert sum(check_sequence(seed) for seed in range(100)) > 300


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_every_slot_holds_the_right_expert_after_every_round_of_10000_sequences(block: int) -> None:
    assert sum(check_sequence(seed) for seed in range(1000 + 500 * block, 1000 + 500 * (block + 1))) > 1500


def check_every_cancel(seed: int, most_turns: int) -> bool:
    """Cancels a round before its first turn, between any two turns of any ranks, and when all is staged.

    Returns False where the round has no turns, or more than these.
    """
    whole = Case(seed)
    rounds = whole.plan()
    if not rounds:
        return False
    whole.ranks.start(rounds[0])
    turns = whole.ranks.advance(np.random.default_rng(seed))
    if not 0 < turns <= most_turns:
        return False
    for cut in range(turns + 1):
        case = Case(seed)
        case.ranks.start(case.plan()[0])
        case.ranks.advance(np.random.default_rng(seed), cut)
        assert not case.ranks.all_staged or cut == turns
        case.ranks.cancel()
        case.ranks.check()
        for migration_round in case.plan():  # another round with the version of the cancelled one
            case.run(migration_round)
    return True


def test_a_round_can_be_cancelled_at_every_point_and_another_one_takes_its_version() -> None:
    assert sum(check_every_cancel(seed, most_turns=20) for seed in range(120)) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_a_round_can_be_cancelled_at_every_point_with_more_seeds(block: int) -> None:
    seeds = range(100 + 40 * block, 100 + 40 * (block + 1))
    assert sum(check_every_cancel(seed, most_turns=60) for seed in seeds) > 10


def test_a_rank_that_sleeps_through_a_cancel_takes_no_part_of_another_round_for_its_own() -> None:
    swap, ring = rounds_of_three(exchange=(0, 1)), rounds_of_three(exchange=(0, 1, 2))
    for turns in range(25):
        for sleeper in range(3):
            ranks = three_ranks()
            rng = np.random.default_rng(turns)
            ranks.start(swap)
            ranks.advance(rng, turns)
            awake = [mover for rank, mover in enumerate(ranks.movers) if rank != sleeper]
            for mover in awake:
                mover.cancel()
                mover.start(ring, 1)
            for _ in range(20):  # it wakes up and does not know yet that its round has ended
                ranks.movers[int(rng.integers(3))].advance(BUSY_S)
            ranks.movers[sleeper].cancel()
            ranks.check()
            ranks.movers[sleeper].start(ring, 1)
            ranks.advance(rng)
            ranks.activate(apply_round(ranks.placement, ring))
            ranks.check()


def test_corrupt_bytes_are_found_and_nothing_is_activated() -> None:
    swap = rounds_of_three(exchange=(1, 2))
    ranks = three_ranks()
    source, destination = ranks.movers[1], ranks.movers[2]
    ranks.start(swap)
    while destination.running and not ranks.shared.segments[1][-ranks.slot_bytes :].strip(b"\0"):
        source.advance(BUSY_S)
    for _ in range(10):
        source.advance(BUSY_S)
    segment = ranks.shared.segments[1]
    segment[len(segment) - 3] ^= 4
    for _ in range(20):
        destination.advance(BUSY_S)
    assert destination.fault == MoveFault("checksum", layer_row=0)
    assert not destination.staged
    destination.advance(BUSY_S)
    ranks.cancel()
    assert destination.fault is None
    ranks.check()
    ranks.start(swap)  # the same round once more
    ranks.advance(np.random.default_rng(0))
    ranks.activate(apply_round(ranks.placement, swap))
    ranks.check()


def test_an_expert_that_does_not_come_is_late_and_others_are_not() -> None:
    swap = rounds_of_three(exchange=(0, 1), layer=1)
    ranks = three_ranks(MoveSettings(deadline_s=0.0))
    ranks.start(swap)
    ranks.movers[0].advance(BUSY_S)  # rank 1, its source, is stopped
    ranks.movers[2].advance(BUSY_S)
    assert ranks.movers[0].fault == MoveFault("late", layer_row=1)
    assert ranks.movers[2].fault is None
    assert ranks.movers[2].staged == 1, "it has nothing to wait for"
    ranks.cancel()
    ranks.check()


def test_what_arrived_after_the_deadline_but_before_anybody_looked_is_not_late() -> None:
    ranks = three_ranks(MoveSettings(deadline_s=0.0))
    ranks.start(rounds_of_three(exchange=(0, 1)))
    receiving = ranks.movers[0]
    assert not receiving.staged
    ranks.movers[1].advance(0.0)
    receiving.advance(0.0)
    assert receiving.staged == 1
    assert receiving.fault is None


@pytest.mark.parametrize("staging_slots", [1, 2])
def test_rings_inside_a_rank_pass_through_one_spare_slot(staging_slots: int) -> None:
    # Two rings, one of them with a branch; on rank 1, whose first slot is 6.
    ring = [SlotMove(0, 1, 6, 1, 7), SlotMove(0, 1, 8, 1, 6), SlotMove(0, 1, 7, 1, 8)]
    pair = [SlotMove(1, 1, 6, 1, 9), SlotMove(1, 1, 7, 1, 6), SlotMove(1, 1, 6, 1, 7)]
    placement = Placement(np.tile(np.arange(12), (2, 1)), 12, 2, allow_lost=True)
    for start in range(3):
        moves = (*ring[start:], *ring[:start], *pair)
        migration_round = MigrationRound(moves)
        assert moves_of_rank(migration_round, 1, 6).needs_spare
        ranks = VirtualRanks(placement, settings=MoveSettings(staging_slots))
        ranks.start(migration_round)
        assert ranks.all_staged, "nothing travels"
        ranks.activate(apply_round(placement, migration_round))
        ranks.check()


def test_a_slot_that_becomes_empty_is_left_alone() -> None:
    placement = Placement(np.array([[0, 1, 0, 1]]), 2, 2)
    ranks = VirtualRanks(placement)
    migration_round = MigrationRound((SlotMove(0, -1, -1, 0, 1),))
    ranks.start(migration_round)
    assert ranks.all_staged
    before = raw(ranks.stores[0][0], 1)
    ranks.activate(apply_round(placement, migration_round))
    assert raw(ranks.stores[0][0], 1).equal(before)
    ranks.check()


def test_rounds_of_one_version_with_other_moves_are_different_rounds() -> None:
    one, other = rounds_of_three(exchange=(0, 1)), rounds_of_three(exchange=(1, 0))
    assert round_id(one, 7) == round_id(MigrationRound(one.moves), 7)
    assert len({round_id(one, 7), round_id(one, 8), round_id(other, 7), round_id(MigrationRound(()), 7)}) == 4
    assert all(0 < round_id(one, version) < 2**63 for version in range(100))


def test_a_staged_round_stays_staged_until_it_is_active() -> None:
    ranks = three_ranks()
    swap = rounds_of_three(exchange=(0, 1))
    ranks.start(swap)
    ranks.advance(np.random.default_rng(0))
    for mover in ranks.movers:
        mover.advance(0.0)
        assert mover.staged == mover.running == 1
    ranks.activate(apply_round(ranks.placement, swap))
    assert all(not mover.running and not mover.staged for mover in ranks.movers)


def three_ranks(settings: MoveSettings = MoveSettings(), piece_bytes: int = 8) -> VirtualRanks:
    """Three ranks with two slots each and two layers."""
    placement = Placement(np.tile(np.arange(6), (2, 1)), 6, 3)
    return VirtualRanks(placement, settings=settings, piece_bytes=piece_bytes)


def rounds_of_three(exchange: tuple[int, ...], layer: int = 0) -> MigrationRound:
    """A round in which the first slots of these ranks change hands in a ring, two slots to a rank."""
    pairs = zip(exchange, exchange[1:] + exchange[:1], strict=True)
    return MigrationRound(tuple(SlotMove(layer, src, 2 * src, dst, 2 * dst) for src, dst in pairs))


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
