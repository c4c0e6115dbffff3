"""The rounds of a layer through dispatch, experts and combine: in turn, or overlapped.

    rank computes            [experts 0] [experts 1] [experts 2] . . .
    rows travel    [out 0][out 1][home 0] [out 2][home 1]  [home 2]

A caller of the four calls, no part of any transport or layer; which of the two runs, and in how many rounds, is the
step plan's to decide. Two half-batches are two rounds. Results are the same, bit for bit, wherever an expert's result
for a row does not depend on the rows beside it: rounds never meet in an addition.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from torch import Tensor

from moe_serve.dispatch.base import AllToAll, Dispatched, Pending

V = TypeVar("V")
Experts = Callable[[Dispatched], Tensor]  # gives one result for each row, where `out` says if it likes


@dataclass(frozen=True)
class Round:
    """What one round sends.

    hidden: [T, H];  physical_ids: [T, K] int64;  weights: [T, K] float32;  T may be 0
    slot_counts: [R, P] int64, or None; see AllToAll.dispatch
    """

    hidden: Tensor
    physical_ids: Tensor
    weights: Tensor
    slot_counts: Tensor | None = None


# Begins a round: chooses experts and, where the choice of replicas needs them, sends counts; the wait chooses slots.
Begin = Callable[[], Pending[Round]]


def run_in_turn(
    all_to_all: AllToAll, rounds: Sequence[Begin], experts: Experts, meanwhile: Callable[[], V]
) -> tuple[list[Tensor], V]:
    """Returns the combined results of all rounds, [T, H] each, and what `meanwhile` gave.

    rounds: at least one, as many on every rank;  meanwhile: runs while the first round's rows are on their way
    """
    results: list[Tensor] = []
    for begin in rounds:
        pending, weights = _send(all_to_all, begin().wait())
        if not results:
            beside = meanwhile()
        arrived = pending.wait()
        results.append(all_to_all.combine(experts(arrived), weights, arrived.handle).wait())
    return results, beside


def run_overlapped(
    all_to_all: AllToAll, rounds: Sequence[Begin], experts: Experts, meanwhile: Callable[[], V]
) -> tuple[list[Tensor], V]:
    """Returns what run_in_turn does; while the experts of a round run, the next one's rows are on their way out and the
    last one's results on their way home.

    At any time two calls that carry rows are in flight, received in the order of the sends, and the counts of one round
    ahead of them. A handle lives from dispatch to the receipt of its combine, so three do, or two where the transport
    says so: then the results of the last round are received before the next one's rows leave.
    `meanwhile` runs under the last combine: nothing else is left to compute there, a combine never carries fewer bytes
    than the way out, and no rank waits for what comes after it.
    """
    sends = _sends(all_to_all, rounds)
    going_out = deque(islice(sends, 2))
    going_home: Pending[Tensor] | None = None
    results: list[Tensor] = []
    for number in range(len(rounds)):
        pending, weights = going_out.popleft()
        arrived = pending.wait()
        if 0 < number < len(rounds) - 1:
            if going_home is not None and most_handles(all_to_all) < 3:
                results.append(going_home.wait())
                going_home = None
            going_out.append(next(sends))
        expert_out = experts(arrived)
        if going_home is not None:
            results.append(going_home.wait())
        going_home = all_to_all.combine(expert_out, weights, arrived.handle)
    beside = meanwhile()
    assert going_home is not None, "a layer runs at least one round"
    return [*results, going_home.wait()], beside


def most_handles(all_to_all: AllToAll) -> int:
    """Returns how many handles may live at once: 3, unless a transport with a lane for each says fewer."""
    return int(getattr(all_to_all, "most_handles", 3))


def _sends(all_to_all: AllToAll, rounds: Sequence[Begin]) -> Iterator[tuple[Pending[Dispatched], Tensor]]:
    """Sends one round each time it is asked, and begins the one after it, so that its counts are there in time."""
    coming = iter(rounds)
    begun = deque(begin() for begin in islice(coming, 2))  # the first two leave together
    while begun:
        sent = _send(all_to_all, begun.popleft().wait())
        if not begun:
            begun.extend(begin() for begin in islice(coming, 1))
        yield sent


def _send(all_to_all: AllToAll, batch: Round) -> tuple[Pending[Dispatched], Tensor]:
    sent = all_to_all.dispatch(batch.hidden, batch.physical_ids, batch.slot_counts, batch.weights)
    return sent, batch.weights
