"""A rank dies or stops while experts move between the ranks: the others end the round, go on, and move again; no token,
no slot and no count is wrong.

The hardest moments run by default, all the others with `-m slow`.
"""

import signal
from pathlib import Path

import pytest

from moe_serve.eplb.files.placements import write_placement
from moe_serve.eplb.placement import Placement
from tests.engine.losing import NUM_ROUNDS, Outcome, serve_and_lose
from tests.engine.offline import tiny_model
from tests.engine.strikes import Fault
from tests.engine.test_recovery import check_survivors, check_trace, requests, settings_of, tokens_without_fault

NUM_RANKS = 3
# phase, calls of it that pass unharmed
MOMENTS = [
    ("exchange", 0), ("exchange receive", 0),
    ("hear send", 0), ("hear receive", 0), ("hear send", 1), ("hear receive", 1),
    ("counts send", 1), ("dispatch send", 1), ("dispatch receive", 0), ("combine send", 0), ("combine receive", 2),
    ("carry send", 0), ("carry receive", 0), ("carry send", 3), ("carry receive", 4),
    ("write", 0), ("activate", 0), ("activate", 2), ("window", 0), ("sample", 1),
]  # fmt: skip
KILLED_BY_DEFAULT = [(0, "hear receive", 1), (0, "activate", 0), (1, "carry send", 3)]
STOPPED_BY_DEFAULT: list[tuple[int, str, int]] = []  # their silence is of wall time, which a busy machine lacks


def cases(by_default: list[tuple[int, str, int]]) -> list[object]:
    """Returns (victim, phase, calls): the leader, and another one, at each moment."""
    every = [(victim, *moment) for victim in (0, 1) for moment in MOMENTS]
    marked = [pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in by_default]
    return [*by_default, *marked]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("moving"), "qwen3_moe")


def check_moves(outcomes: dict[int, Outcome], groups: list[list[int]]) -> None:
    """All ranks are where the others are, and experts have moved in the last group. groups: after the first one"""
    assert len({(outcome.step, outcome.version) for outcome in outcomes.values()}) == 1
    for outcome in outcomes.values():
        assert outcome.error == ""
        assert outcome.activated.count(len(groups[-1])) > 0
        assert outcome.activated[-1] == len(groups[-1])


@pytest.mark.parametrize(("victim", "phase", "calls"), cases(KILLED_BY_DEFAULT))
def test_the_others_go_on_without_a_killed_rank_and_move_again(
    model: Path, victim: int, phase: str, calls: int
) -> None:
    fault = Fault(victim, phase, 4, calls)
    outcomes, tokens, trace = serve_and_lose(NUM_RANKS, requests(), settings_of(model, 20), fault, "carried")
    assert tokens == tokens_without_fault(model)
    survivors = [rank for rank in range(NUM_RANKS) if rank != victim]
    assert sorted(outcomes) == survivors
    for outcome in outcomes.values():
        assert outcome.groups == [survivors]
        assert len(outcome.activated) >= NUM_ROUNDS, "the leader has made all its moves"
    check_moves(outcomes, [survivors])
    check_trace(trace, outcomes, victim)


@pytest.mark.parametrize(("victim", "phase", "calls"), cases(STOPPED_BY_DEFAULT))
def test_a_stopped_rank_rejoins_and_experts_move_to_it_again(model: Path, victim: int, phase: str, calls: int) -> None:
    fault = Fault(victim, phase, 4, calls, sign=signal.SIGSTOP)
    outcomes, tokens, trace = serve_and_lose(NUM_RANKS, requests(), settings_of(model, 2), fault, "carried")
    right = tokens_without_fault(model)
    assert tokens == right | {"extra": right["0"]}, "it serves again once it has rejoined"
    all_ranks = list(range(NUM_RANKS))
    assert sorted(outcomes) == all_ranks
    survivors = [rank for rank in all_ranks if rank != victim]
    for rank, outcome in outcomes.items():
        assert outcome.groups == ([all_ranks] if rank == victim else [survivors, all_ranks])
        assert outcome.num_told == int(rank == victim)
        assert rank == victim or outcome.activated.count(2) > 0, "experts have moved without it"
    check_moves(outcomes, [survivors, all_ranks])
    check_trace(trace, outcomes, victim)


def test_second_slots_are_put_back_and_the_next_loss_needs_no_reload(model: Path, tmp_path: Path) -> None:
    """24 slots on four ranks: the 18 of three are enough for two slots of each expert, the 12 of two for one. Without
    rank 1, experts 6 and 7 have one slot; without ranks 1 and 2, expert 6 would have none."""
    row = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 6, 0, 1, 2, 4, 5, 7, 0, 1, 3, 4, 5]
    write_placement(Placement([row] * 3, 8, 4), tmp_path / "placement.json")
    where = ["eplb.num_redundant_experts=0", f"eplb.init_expert_location={tmp_path}/placement.json", "eplb.trigger=0"]
    fault = Fault(1, "dispatch receive", 4, then=Fault(2, "restored", 5))
    outcomes, tokens, trace = serve_and_lose(4, requests(), [*settings_of(model, 20), *where], fault, "decided")
    check_survivors(outcomes, [[0, 2, 3], [0, 3]])
    assert tokens == tokens_without_fault(model)
    for outcome in outcomes.values():
        assert outcome.num_read == 0
        assert outcome.activated.count(3) > 0
    assert outcomes[0].decisions[:3] == ["group", "restore", "done"]
    check_trace(trace, outcomes, 1, num_ranks=4)
