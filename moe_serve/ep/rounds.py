"""The order in which the rounds of a layer advance: in turn, or overlapped.

    experts compute   [experts 0] [experts 1] [experts 2] . . .
    on the wire       [rows 0][rows 1][results 0] [rows 2][results 1]  [results 2]

A round is a generator (`MoeLayer._round`). It advances six times: it sends counts, dispatches, receives rows, runs its
experts, sends results, receives results. An order is a list of round numbers; each entry advances that round once. It
depends on the step plan alone, so all ranks make the same calls in the same order. Results have the same bits in every
order wherever an expert's result for a row does not depend on the rows beside it, since rounds are never added up.
"""

from collections.abc import Generator
from functools import cache

from torch import Tensor

Round = Generator[None, None, Tensor]
SHARED = -1  # in an order: now the shared expert computes
ADVANCES = 6


def advance(round: Round) -> Tensor | None:
    """Runs a round up to its next yield. Returns its result at the end, else None."""
    try:
        next(round)
    except StopIteration as end:
        result: Tensor = end.value
        return result
    return None


@cache
def in_turn(num_rounds: int) -> tuple[int, ...]:
    """Returns the order of rounds that do not overlap; the shared expert computes while the first rows travel."""
    order = [number for number in range(num_rounds) for _ in range(ADVANCES)]
    return (*order[:2], SHARED, *order[2:])


@cache
def overlapped(num_rounds: int, live_handles: int) -> tuple[int, ...]:
    """Returns the order in which, under the experts of a round, the rows of the next one and the results of the last
    one travel.

    At any time at most two calls that carry rows are in flight, received in the order of their sends, and the counts of
    one round ahead of them. A handle lives from dispatch to the receipt of its combine, so three handles are alive.
    With live_handles = 2 the results of the last round are received before the next one dispatches.
    The shared expert computes under the last combine, where no experts are left to hide it, and where no rank waits for
    what comes after it.
    """
    first = range(min(2, num_rounds))
    order = [*first, *first]  # counts, then rows
    if num_rounds > 2:
        order.append(2)  # counts are sent one round ahead
    for number in range(num_rounds):
        last = [number - 1] if number else []
        order.append(number)  # receives rows
        if 0 < number < num_rounds - 1:
            if live_handles < 3:
                order += last
                last = []
            order.append(number + 1)  # dispatches
            if number + 2 < num_rounds:
                order.append(number + 2)  # sends counts
        order.append(number)  # experts
        order += last  # receives the results of the last round
        order.append(number)  # sends results
    return (*order, SHARED, num_rounds - 1)
