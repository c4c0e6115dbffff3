"""Calls of ranks over shared memory, recorded, are a path of the model; a wrong order is none.

A step of two halves runs through two layers, as ep/moe_layer.py makes its calls, on forked ranks, by numpy and by the
C helper. So the model's PROGRAM and its waits are those of the code. Every event has the time before it and the time
after it, by the one clock that processes of a host share: what ended before another began stands before it, and SPIN
may choose the order of what overlaps. The C helper writes and announces counts in one call, and sees and reads them in
another.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from moe_serve.c_library import find_compiler
from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.shm.channel import Channel
from moe_serve.dispatch.shm.counts import NativeCounts
from moe_serve.dispatch.shm.region import NUM_BUFFERS
from moe_serve.dispatch.shm.transport import ShmAllToAll
from moe_serve.ep.moe_layer import take_turns
from tests.dispatch.contract import Scenario
from tests.dispatch.models.programs import OVER_SHARED_MEMORY, program
from tests.dispatch.models.spin import needs_spin, search
from tests.ep.test_rounds import ONE, a_layer, stack
from tests.ranks import run_ranks

NUM_LAYERS = 2
# As shared_memory.pml numbers them.
WRITES, RAISES, SEES, READS = range(4)
CHANNELS = ("counts", "dispatch", "combine")
Event = tuple[int, int, int, int, int, int]  # nanoseconds of begin and end, rank, kind, channel, number of the call
Mistake = Literal["none", "flag first", "not waited"]

pytestmark = needs_spin


def record(rank: int, group: EpGroup, compiled: bool, mistake: Mistake) -> list[Event]:
    """Returns what a rank does in a step, in its order.

    mistake: made with the rows, or with the results where rank 0 is late
    """
    one = Scenario((9, 0, 12)[: group.num_ranks], topk=2, slots_per_rank=6 // group.num_ranks, hidden=ONE.hidden)
    transport = make_all_to_all(group, one.request("shm", compiled=compiled))
    assert isinstance(transport, ShmAllToAll)
    layer = a_layer(transport, num_redundant=2, num_ranks=group.num_ranks, rank=rank)
    events: list[Event] = []

    def note(kind: int, channel: Channel, call: int, began: int) -> None:
        events.append((began, time.monotonic_ns(), rank, kind, CHANNELS.index(channel._name), call))

    def noted(act: Callable[..., Any], channel: Channel, *kinds: int) -> Callable[..., Any]:
        """Returns a function that notes its events. Channels are told the call's number, the C helper is not."""

        def call(*arguments: Any) -> Any:
            began = time.monotonic_ns()
            result = act(*arguments)
            if isinstance(result, int) and result < 0:
                return result  # the C helper has not done it: a peer is late
            number = channel.num_sent if WRITES in kinds else channel._read + 1 if len(kinds) > 1 else arguments[0]
            for kind in kinds:
                note(kind, channel, number, began)
            return result

        return call

    counts, rows, results = transport._counts, transport._rows, transport._results
    exchange, copier = transport._exchange, transport._copier
    if mistake == "not waited":
        results.wait = lambda call: None  # type: ignore[method-assign]
    for channel in (rows, results) if compiled else (counts, rows, results):
        for name, kind in (("signal", RAISES), ("wait", SEES), ("acknowledge", READS)):
            setattr(channel, name, noted(getattr(channel, name), channel, kind))
    if isinstance(exchange, NativeCounts):
        for name, kinds in (("_send", (WRITES, RAISES)), ("_receive", (SEES, READS))):
            setattr(exchange, name, noted(getattr(exchange, name), counts, *kinds))
    else:
        begin = counts.begin

        def begin_counts() -> int:  # data are written at once when it has returned
            call = begin()
            note(WRITES, counts, call, time.monotonic_ns())
            return call

        counts.begin = begin_counts  # type: ignore[method-assign]
    for name, channel in (("send_rows", rows), ("send_results", results)):
        act = noted(getattr(copier, name), channel, WRITES)

        def send(*arguments: Any, act: Callable[..., Any] = act, channel: Channel = channel) -> Any:
            if channel is rows and mistake == "flag first":
                channel.signal(channel.num_sent)
            if channel is results and mistake == "not waited" and rank == 0:
                time.sleep(0.2)
            return act(*arguments)

        setattr(copier, name, send)
    take_turns([stack(layer, half, NUM_LAYERS) for half in one.inputs(rank)[0].tensor_split(2)])
    return events


def is_path(of_ranks: list[list[Event]], folder: Path) -> bool:
    """Returns whether the model can do this."""
    num_ranks, each = len(of_ranks), max(len(events) for events in of_ranks)
    in_order = [event for events in of_ranks for event in events]
    numbers = [16 * kind + 4 * channel + call - 1 for _, _, _, kind, channel, call in in_order]
    ended = [sum(end < event[0] for _, end, *_ in events) for event in in_order for events in of_ranks]
    defined = {
        "R": num_ranks,
        "BUFFERS": NUM_BUFFERS,
        "MAY_LOSE": 0,
        "PROGRAM": program(NUM_LAYERS, OVER_SHARED_MEMORY),
        "NEXT_PROGRAM": "skip",
        "EACH": each,
        "RECORDED": ", ".join(map(str, numbers)),
        "ENDED": ", ".join(map(str, ended)),
    }
    found = search("shared_memory.pml", folder, defined, "-O0", may_stand=True)
    assert not found.error or found.error.startswith("assertion violated 0"), found.error
    return bool(found.error)


@pytest.mark.parametrize(
    "compiled, num_ranks",
    [
        (True, 2),
        pytest.param(True, 3, marks=pytest.mark.slow),
        pytest.param(False, 2, marks=pytest.mark.slow),
        pytest.param(False, 3, marks=pytest.mark.slow),
    ],
    ids=["C, 2 ranks", "C, 3 ranks", "numpy, 2 ranks", "numpy, 3 ranks"],
)
def test_a_recorded_step_is_a_path_of_the_model_and_a_wrong_order_is_none(
    compiled: bool, num_ranks: int, tmp_path: Path
) -> None:
    if compiled and find_compiler() is None:
        pytest.skip("no C compiler")
    of_ranks = run_ranks(num_ranks, record, compiled, "none")
    assert [len(events) for events in of_ranks] == [2 * NUM_LAYERS * len(CHANNELS) * 4] * num_ranks
    assert is_path(of_ranks, tmp_path)
    # The last flag of all is seen before it is raised.
    raised = max(event for events in of_ranks for event in events if event[3] == RAISES)
    seen = min(
        event
        for events in of_ranks
        for event in events
        if event[3] == SEES and event[4:] == raised[4:] and event[2] != raised[2]
    )
    events = of_ranks[raised[2]]
    events[events.index(raised)] = (seen[1] + 1, seen[1] + 1, *raised[2:])
    assert not is_path(of_ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "C"])
@pytest.mark.parametrize("mistake", ["flag first", "not waited"])
def test_a_recorded_step_with_a_mistake_is_no_path(mistake: Mistake, compiled: bool, tmp_path: Path) -> None:
    assert not is_path(run_ranks(2, record, compiled, mistake), tmp_path)
