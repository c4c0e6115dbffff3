"""The clock of a step's parts: Python and C turn the same one, and no time is lost or counted twice."""

import time

import pytest

from moe_serve.kernels.cpu.library import find_cpu_library
from moe_serve.kernels.part_clock import ATTENTION, BETWEEN, EXPERTS, OTHER, PARTS, SAMPLE, PartClock


def test_the_parts_of_a_stretch_add_up_to_it() -> None:
    clock = PartClock()
    began_ns, before = clock.turn(OTHER), clock.sums_ns()
    for part in (ATTENTION, EXPERTS, ATTENTION, ATTENTION, SAMPLE):
        clock.turn(part)
        time.sleep(0.001)
    ended_ns = clock.turn(BETWEEN)
    taken = [now - then for now, then in zip(clock.sums_ns(), before, strict=True)]
    assert sum(taken) == ended_ns - began_ns
    assert taken[ATTENTION] >= 3e6
    assert taken[EXPERTS] >= 1e6
    assert [part for part, ns in enumerate(taken) if ns == 0 and part != BETWEEN] == [
        part for part in range(len(PARTS)) if part not in (OTHER, ATTENTION, EXPERTS, SAMPLE, BETWEEN)
    ]


@pytest.mark.parametrize("by_c", [False, True])
def test_turns_are_written_down_up_to_a_bound(by_c: bool) -> None:
    clock, library = PartClock(), find_cpu_library()
    if by_c and library is None:
        pytest.skip("no C compiler")

    def turn(part: int) -> None:
        if by_c:
            assert library is not None
            library.call.turn_part(clock.address, part)
        else:
            clock.turn(part)

    turn(OTHER)
    clock.write_turns(3)
    for part in (EXPERTS, EXPERTS, SAMPLE, OTHER, ATTENTION):
        turn(part)
    turns = clock.turns()
    assert list(turns[1::2]) == [EXPERTS, SAMPLE, OTHER], "one that changes nothing is none"
    assert list(turns[::2]) == sorted(turns[::2])
    clock.write_turns(0)
    turn(SAMPLE)
    assert not len(clock.turns())


def test_c_and_python_go_on_where_the_other_stopped() -> None:
    clock, library = PartClock(), find_cpu_library()
    if library is None:
        pytest.skip("no C compiler")
    began_ns, before = clock.turn(OTHER), clock.sums_ns()
    clock.write_turns(10)
    library.call.turn_part(clock.address, EXPERTS)
    time.sleep(0.002)
    clock.turn(ATTENTION)
    library.call.turn_part(clock.address, SAMPLE)
    ended_ns = clock.turn(BETWEEN)
    taken = [now - then for now, then in zip(clock.sums_ns(), before, strict=True)]
    assert sum(taken) == ended_ns - began_ns, "both read the host's monotonic clock"
    assert taken[EXPERTS] >= 2e6
    assert list(clock.turns()[1::2]) == [EXPERTS, ATTENTION, SAMPLE, BETWEEN]
