"""Keeps the edits of all layers within one number of moves: those that gain more per move than one price for all.

The gains of a layer's first n edits over their moves are a curve. Of its upper concave hull, the steepest pieces of all
layers are taken first, until the moves are spent.

Shape words: L = layers, n = edits.
"""

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.policies.edits import Ids
from moe_serve.eplb.policies.single_edits import EditLog

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def edits_within(log: EditLog, start: Ints, weight: Floats, most: int) -> Ints:
    """Returns how many edits of each layer to keep, [L], so that all of them make at most `most` moves together.

    start:  [L] moves before the first edit, which count
    weight: [L] what a gain of a layer counts, e.g. its mean rank load in tokens
    """
    keep: Ints = np.zeros(len(start), dtype=np.int64)
    pieces: list[tuple[float, int, int, int]] = []  # price, layer, moves, edits at its end
    for layer in range(len(start)):
        rows = np.flatnonzero(log.layer == layer)
        moves = np.concatenate([start[layer : layer + 1], log.moves[rows]])
        gain = np.cumsum(np.concatenate([[0.0], weight[layer] * log.gain[rows]]))
        at = 0
        while at < len(rows):
            dearer = moves[at + 1 :] - moves[at]
            price = np.where(dearer > 0, (gain[at + 1 :] - gain[at]) / np.maximum(dearer, 1), np.inf)
            end = at + len(price) - int(price[::-1].argmax())  # the last of equal ones
            pieces.append((float(price.max()), layer, int(moves[end] - moves[at]), end))
            at = end
    left = most - int(start.sum())
    stopped = np.zeros(len(start), dtype=bool)
    for _, layer, num_moves, end in sorted(pieces, key=lambda piece: (-piece[0], piece[1], piece[3])):
        if stopped[layer] or num_moves > max(left, 0):
            stopped[layer] = True
            continue
        keep[layer] = end
        left -= num_moves
    return keep


def replay_edits(table: Ids, log: EditLog, keep: Ints) -> None:
    """Makes the first keep[l] edits of each layer, in place: table [L, R, K]."""
    done = np.zeros(len(keep), dtype=np.int64)
    for layer, slot, other, expert in zip(log.layer, log.slot, log.other, log.expert, strict=True):
        if done[layer] == keep[layer]:
            continue
        done[layer] += 1
        row = table[layer].reshape(-1)
        if expert < 0:
            row[[slot, other]] = row[[other, slot]]
        else:
            row[slot] = expert
