"""Calls of ranks over shared memory, recorded, are a path of the model; a wrong order is none.

A step of two halves runs through two layers, as ep/moe_layer.py makes its calls, on forked ranks. So the model's
PROGRAM and its waits are those of the code. Rows are moved by numpy, since the C helper sends counts in one call, which
cannot be seen from outside. Every event has a time of the one clock that processes of a host share: what is stored has
the time before the store, what is seen the time after the load. So whatever a rank has seen of another stands in order.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.shm.channel import Channel
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
Event = tuple[int, int, int, int, int]  # nanoseconds, rank, kind, channel, number of the call
Mistake = Literal["none", "flag first", "not waited"]

pytestmark = needs_spin


def record(rank: int, group: EpGroup, mistake: Mistake) -> list[Event]:
    """Returns what a rank does in a step. mistake: made with the rows, or with the results where rank 0 is late"""
    one = Scenario((9, 0, 12)[: group.num_ranks], topk=2, slots_per_rank=6 // group.num_ranks, hidden=ONE.hidden)
    transport = make_all_to_all(group, one.request("shm", compiled=False))
    assert isinstance(transport, ShmAllToAll)
    layer = a_layer(transport, num_redundant=2, num_ranks=group.num_ranks, rank=rank)
    events: list[Event] = []

    def note(kind: int, channel: Channel, call: int) -> None:
        events.append((time.monotonic_ns(), rank, kind, CHANNELS.index(channel._name), call))

    def before(act: Callable[..., Any], kind: int, channel: Channel) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            note(kind, channel, arguments[0] if arguments else channel.num_sent)
            return act(*arguments)

        return noted

    def after(act: Callable[..., Any], kind: int, channel: Channel) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            result = act(*arguments)
            note(kind, channel, arguments[0] if arguments else result)
            return result

        return noted

    counts, rows, results = transport._counts, transport._rows, transport._results
    if mistake == "not waited":
        results.wait = lambda call: None  # type: ignore[method-assign]
    for channel in (counts, rows, results):
        for name, kind, order in (("signal", RAISES, before), ("wait", SEES, after), ("acknowledge", READS, before)):
            setattr(channel, name, order(getattr(channel, name), kind, channel))
    # Data are written once `begin` has returned: of counts at once, of rows and results in a call that can be seen.
    counts.begin = after(counts.begin, WRITES, counts)  # type: ignore[method-assign]
    copier = transport._copier
    for name, channel in (("send_rows", rows), ("send_results", results)):
        act = getattr(copier, name)

        def send(*arguments: Any, act: Callable[..., Any] = act, channel: Channel = channel) -> Any:
            if channel is rows and mistake == "flag first":
                channel.signal(channel.num_sent)
            if channel is results and mistake == "not waited" and rank == 0:
                time.sleep(0.2)
            note(WRITES, channel, channel.num_sent)
            return act(*arguments)

        setattr(copier, name, send)
    take_turns([stack(layer, half, NUM_LAYERS) for half in one.inputs(rank)[0].tensor_split(2)])
    return events


def is_path(events: list[Event], num_ranks: int, folder: Path) -> bool:
    """Returns whether the model can do this."""
    numbers = [64 * rank + 16 * kind + 4 * channel + call - 1 for _, rank, kind, channel, call in events]
    defined = {
        "R": num_ranks,
        "BUFFERS": NUM_BUFFERS,
        "MAY_LOSE": 0,
        "PROGRAM": program(NUM_LAYERS, OVER_SHARED_MEMORY),
        "NEXT_PROGRAM": "skip",
        "LENGTH": len(numbers),
        "RECORDED": ", ".join(map(str, numbers)),
    }
    found = search("shared_memory.pml", folder, defined, "-O0", may_stand=True)
    assert not found.error or found.error.startswith("assertion violated (at<"), found.error
    return bool(found.error)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_recorded_step_is_a_path_of_the_model_and_a_wrong_order_is_none(num_ranks: int, tmp_path: Path) -> None:
    events = sorted(event for of_rank in run_ranks(num_ranks, record, "none") for event in of_rank)
    assert len(events) == num_ranks * 2 * NUM_LAYERS * len(CHANNELS) * 4
    assert is_path(events, num_ranks, tmp_path)
    # The last flag of all is seen before it is raised.
    raised = max(at for at, event in enumerate(events) if event[2] == RAISES)
    of_call = events[raised][3:]
    seen = next(at for at in range(raised, len(events)) if events[at][2] == SEES and events[at][3:] == of_call)
    events.insert(raised, events.pop(seen))
    assert not is_path(events, num_ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["flag first", "not waited"])
def test_a_recorded_step_with_a_mistake_is_no_path(mistake: Mistake, tmp_path: Path) -> None:
    events = sorted(event for of_rank in run_ranks(2, record, mistake) for event in of_rank)
    assert not is_path(events, 2, tmp_path)
