"""Two half-batches through dispatch, experts and combine, each computing while the rows of the other travel.

    rank computes            . . . . . [experts A][experts B] . . .
    rows travel    [out A][out B]                [home A ][home B]

A caller of the four calls, no part of any transport or layer; when it pays is the step plan's to decide. Results are
those of two plain rounds, bit for bit: halves never meet in an addition.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from moe_serve.dispatch.base import AllToAll, MaskedRows, PackedRows

Experts = Callable[[PackedRows | MaskedRows], Tensor]


@dataclass(frozen=True)
class HalfBatch:
    """hidden: [T, H];  physical_ids: [T, K] int64;  weights: [T, K] float32;  T may be 0"""

    hidden: Tensor
    physical_ids: Tensor
    weights: Tensor


def run_overlapped(
    all_to_all: AllToAll, first: HalfBatch, second: HalfBatch, experts: Experts
) -> tuple[Tensor, Tensor]:
    """Returns both halves' combined results, [T, H] each. Two handles are in flight at the same time."""
    first_sent = all_to_all.dispatch(first.hidden, first.physical_ids)
    second_sent = all_to_all.dispatch(second.hidden, second.physical_ids)
    arrived = first_sent.wait()
    first_home = all_to_all.combine(experts(arrived.rows), first.weights, arrived.handle)
    arrived = second_sent.wait()
    second_home = all_to_all.combine(experts(arrived.rows), second.weights, arrived.handle)
    return first_home.wait(), second_home.wait()


def run_in_turn(all_to_all: AllToAll, halves: tuple[HalfBatch, ...], experts: Experts) -> tuple[Tensor, ...]:
    """Returns the same without overlap: what the above is held against."""
    results = []
    for half in halves:
        arrived = all_to_all.dispatch(half.hidden, half.physical_ids).wait()
        results.append(all_to_all.combine(experts(arrived.rows), half.weights, arrived.handle).wait())
    return tuple(results)
