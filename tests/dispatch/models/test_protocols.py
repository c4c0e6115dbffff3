"""The protocols between ranks hold under every schedule, and SPIN sees each mistake that is sown into their models.

What the models share with the code comes from the code: the order of a rank's calls, buffers, queues. All
checks have two calls in flight: with one, acknowledgements are redundant, and a broken one would not show.
"""

from pathlib import Path

import pytest

from moe_serve.dispatch.gpu.region import Region
from moe_serve.dispatch.shm.region import NUM_BUFFERS
from tests.dispatch.models.programs import OVER_SHARED_MEMORY, OVER_SLABS, program
from tests.dispatch.models.spin import needs_spin, search

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
slow = pytest.mark.slow  # those that are not take half a minute of a core together


@pytest.mark.parametrize(
    "model, defined, optimised",
    [
        pytest.param("shared_memory.pml", shared_memory(2, True), "-O0", marks=slow),
        pytest.param("shared_memory.pml", shared_memory(3, False), "-O0", marks=slow),
        ("shared_memory.pml", shared_memory(3, True), "-O0"),
        ("shared_memory.pml", ROWS_ALONE, "-O0"),
        ("slabs.pml", slabs(3, False), "-O0"),
        ("slabs.pml", slabs(3, True), "-O1"),
        pytest.param("frames.pml", frames(2, 2, 2), "-O1", marks=slow),
        pytest.param("frames.pml", frames(3, 1, 1), "-O1", marks=slow),  # with a rejoin
        ("moves.pml", moves(1), "-O1"),
        pytest.param("moves.pml", moves(2), "-O1", marks=slow),
        pytest.param("moves.pml", moves(1, lost=0), "-O1", marks=slow),  # who announces the rounds
        pytest.param("moves.pml", moves(1, lost=1), "-O1", marks=slow),
        ("step_exchange.pml", EXCHANGE, "-O0"),
        ("regroup.pml", GROUPS, "-O1"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value['R']} ranks",
)
def test_a_protocol_holds_under_every_schedule(
    model: str, defined: dict[str, object], optimised: str, tmp_path: Path
) -> None:
    found = search(model, tmp_path, defined, optimised)
    assert not found.error
    assert found.states > 1000


MISTAKES = {
    "shared_memory.pml": (shared_memory(3, True), "FLAG_FIRST", "NO_ACK", "EARLY_ACK", "UNCHECKED", "KEPT_FLAGS"),
    "slabs.pml": (slabs(2, True), "FLAG_FIRST", "NO_DONE", "ONE_QUEUE"),
    "step_exchange.pml": (EXCHANGE, "FLAG_FIRST", "ONE_BUFFER", "KEPT_FLAGS", "UNCHECKED", "HASTY"),
    "frames.pml": (
        frames(2, 2, 2),
        *("FLAG_FIRST", "RESUMED", "KEPT_STATE", "TAKES_OLD", "NO_FENCE", "LATE_WORD", "NOT_CUT"),
    ),
    "moves.pml": (moves(2), "ALONE", "IN_PLACE", "TRUSTED", "SAME_TICKET", "KEPT_COUNT"),
    "regroup.pml": (GROUPS, "OWN_WORD", "NO_WAIT"),
}


@slow
@pytest.mark.parametrize(
    "model, mistake", [(model, mistake) for model, (_, *mistakes) in MISTAKES.items() for mistake in mistakes]
)
def test_a_mistake_is_caught(model: str, mistake: str, tmp_path: Path) -> None:
    defined = ROWS_ALONE if mistake in ("NO_ACK", "EARLY_ACK") else MISTAKES[model][0]
    assert search(model, tmp_path, {**defined, mistake: ""}, "-O0").error


def test_each_mistake_that_a_model_names_is_tried() -> None:
    for model, (_, *mistakes) in MISTAKES.items():
        text = (Path(__file__).parent / model).read_text(encoding="utf-8")
        assert {name for name in mistakes if f"#ifdef {name}\n" in text or f"#ifndef {name}\n" in text} == {*mistakes}
