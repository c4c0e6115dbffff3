"""The protocols between ranks hold under every schedule, and SPIN sees each mistake that is sown into their models.

What the models share with the code comes from the code: the order of a rank's calls, buffers, queues. All
checks have two calls in flight: with one, acknowledgements are redundant, and a broken one would not show.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_serve.dispatch.gpu.region import Region
from moe_serve.dispatch.shm.region import NUM_BUFFERS
from tests.dispatch.models.programs import OVER_SHARED_MEMORY, OVER_SLABS, program
from tests.dispatch.models.spin import Search, needs_spin, search

pytestmark = needs_spin


def shared_memory(num_ranks: int, may_lose: bool) -> dict[str, object]:
    return {
        "R": num_ranks,
        "BUFFERS": NUM_BUFFERS,
        "MAY_LOSE": int(may_lose),
        "PROGRAM": program(2, OVER_SHARED_MEMORY),
        "NEXT_PROGRAM": program(1, OVER_SHARED_MEMORY),
    }


# In a step results tell that rows were read, and rows that results were. Calls of one kind, two in flight, need the
# acknowledgements.
ROWS_ALONE = shared_memory(3, True) | {
    "PROGRAM": "send(ROWS, 1); send(ROWS, 2); receive(ROWS, 1); send(ROWS, 3); receive(ROWS, 2); send(ROWS, 4); "
    "receive(ROWS, 3); receive(ROWS, 4)",
    "NEXT_PROGRAM": "send(ROWS, 1); send(ROWS, 2); receive(ROWS, 1); receive(ROWS, 2)",
}


def slabs(num_ranks: int, may_be_late: bool) -> dict[str, object]:
    return {
        "R": num_ranks,
        "QUEUES": Region.num_queues,
        "MAY_BE_LATE": int(may_be_late),
        "PROGRAM": program(2, OVER_SLABS),
    }


def frames(num_epochs: int, num_calls: int, room: int) -> dict[str, object]:
    """room: what a connection takes at once"""
    return {"R": 3, "BUFFERS": NUM_BUFFERS, "EPOCHS": num_epochs, "CALLS": num_calls, "ROOM": room}


def moves(num_rounds: int, lost: int = 2) -> dict[str, object]:
    return {"R": 3, "LOST": lost, "STEPS": 3, "ROUNDS": num_rounds}


EXCHANGE = {"R": 3, "BUFFERS": 2, "STEPS": 4}
GROUPS = {"R": 3, "EPOCHS": 2, "SUSPICIONS": 2}


@dataclass(frozen=True)
class Check:
    """A model at a size. optimised: the compiler's flag; -O0 for a short search, since C takes longer"""

    model: str
    name: str
    defined: dict[str, object]
    optimised: str = "-O1"
    is_slow: bool = False  # those that are not take ten seconds of a core together


CHECKS = (
    Check("shared_memory.pml", "a step, 2 ranks x 4 calls, one lost and back", shared_memory(2, True), "-O0"),
    Check("shared_memory.pml", "a step, 3 ranks x 4 calls, none lost", shared_memory(3, False), "-O0"),
    Check("shared_memory.pml", "a step, 3 ranks x 4 calls, one lost and back", shared_memory(3, True), "-O0", True),
    Check("shared_memory.pml", "rows alone, 3 ranks x 4 calls, one lost and back", ROWS_ALONE, "-O0"),
    Check("slabs.pml", "3 ranks x 4 calls", slabs(3, False), "-O0"),
    Check("slabs.pml", "2 ranks x 4 calls, one wait ends at its deadline", slabs(2, True), "-O0"),
    Check("slabs.pml", "3 ranks x 4 calls, one wait ends at its deadline", slabs(3, True), is_slow=True),
    Check("frames.pml", "3 ranks, 2 epochs x 2 calls", frames(2, 2, 2), is_slow=True),
    Check("frames.pml", "3 ranks, 3 epochs x 1 call, a rejoin", frames(3, 1, 1), is_slow=True),
    Check("moves.pml", "3 ranks, 1 round, the last lost and back", moves(1)),
    Check("moves.pml", "3 ranks, 2 rounds, the last lost and back", moves(2), is_slow=True),
    Check("moves.pml", "3 ranks, 1 round, rank 0 lost, which announces", moves(1, lost=0), is_slow=True),
    Check("moves.pml", "3 ranks, 1 round, rank 1 lost", moves(1, lost=1), is_slow=True),
    Check("step_exchange.pml", "3 ranks x 4 steps, one lost and back", EXCHANGE, "-O0"),
    Check("regroup.pml", "3 ranks, 2 epochs, 2 suspicions", GROUPS),
)


@pytest.mark.parametrize(
    "check",
    [pytest.param(each, marks=[pytest.mark.slow] * each.is_slow, id=f"{each.model}, {each.name}") for each in CHECKS],
)
def test_a_protocol_holds_under_every_schedule(check: Check, tmp_path: Path) -> None:
    found = search(check.model, tmp_path, check.defined, check.optimised)
    assert not found.error
    assert found.states > 1000


MISTAKES = {
    "shared_memory.pml": (shared_memory(2, True), "FLAG_FIRST", "NO_ACK", "EARLY_ACK", "UNCHECKED", "KEPT_FLAGS"),
    "slabs.pml": (slabs(2, True), "FLAG_FIRST", "NO_DONE", "ONE_QUEUE"),
    "step_exchange.pml": (EXCHANGE, "FLAG_FIRST", "ONE_BUFFER", "KEPT_FLAGS", "UNCHECKED", "HASTY"),
    "frames.pml": (
        frames(2, 2, 2),
        *("FLAG_FIRST", "RESUMED", "KEPT_STATE", "TAKES_OLD", "NO_FENCE", "LATE_WORD", "NOT_CUT"),
    ),
    "moves.pml": (moves(2), "ALONE", "IN_PLACE", "TRUSTED", "SAME_TICKET", "KEPT_COUNT"),
    "regroup.pml": (GROUPS, "OWN_WORD", "NO_WAIT"),
}


def search_with(model: str, mistake: str, folder: Path) -> Search:
    defined = ROWS_ALONE if mistake in ("NO_ACK", "EARLY_ACK") else MISTAKES[model][0]
    return search(model, folder, {**defined, mistake: ""}, "-O0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, mistake", [(model, mistake) for model, (_, *mistakes) in MISTAKES.items() for mistake in mistakes]
)
def test_a_mistake_is_caught(model: str, mistake: str, tmp_path: Path) -> None:
    assert search_with(model, mistake, tmp_path).error


def test_each_mistake_that_a_model_names_is_tried() -> None:
    for model, (_, *mistakes) in MISTAKES.items():
        text = (Path(__file__).parent / model).read_text(encoding="utf-8")
        assert {name for name in mistakes if f"#ifdef {name}\n" in text or f"#ifndef {name}\n" in text} == {*mistakes}
