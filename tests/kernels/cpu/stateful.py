"""What kernels that keep states of sequences are held to: their plain form, chunks, batches and threads."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from moe_serve.kernels.cpu.operations import Recorder, recorded_once
from moe_serve.kernels.sequence_states import SequenceStates
from tests.tolerance import FLOAT32, relative_error

Run = Callable[[Tensor, list[int], list[list[int]]], Tensor]
SLOTS = 6


class StatefulLayer(ABC):
    """A kernel with random weights, and pools of states that hold rubbish."""

    row_width: int
    pools: list[Tensor]

    def __init__(self) -> None:
        self.draw = partial(torch.randn, generator=torch.Generator().manual_seed(3))

    @abstractmethod
    def plain(self, rows: Tensor, sequences: SequenceStates) -> Tensor:
        """Returns what the plain function makes of rows [T, row_width]."""

    @abstractmethod
    def record(self, rows: Tensor, do: Recorder) -> Tensor:
        """Records the kernel, and returns where results will be."""

    def by_torch(self, rows: Tensor, starts: list[int], slots: list[list[int]]) -> Tensor:
        return self.plain(rows, states_of(starts, slots))

    def compiled(self, rows: Tensor, starts: list[int], slots: list[list[int]]) -> Tensor:
        sequences = states_of(starts, slots)
        return recorded_once(len(rows), partial(self.record, rows), sequences=sequences.address)


def states_of(starts: list[int], slots: list[list[int]]) -> SequenceStates:
    width = max(map(len, slots))
    padded = [[*row, *[0] * (width - len(row))] for row in slots]
    return SequenceStates(torch.tensor(starts, dtype=torch.int32), torch.tensor(padded))


def compare_with_plain(ours: StatefulLayer, theirs: StatefulLayer) -> None:
    """Both are the same layer, of which one computes by the kernel and the other by torch."""
    rows = ours.draw(24, ours.row_width)
    first = [0, 1, 1, 3, 24], [[-1, 0, 0, 0], [-1, 4, 0, 0], [-1, 1, 0, 0], [-1, 2, 17, 3]]
    then = [0, 1, 2, 24], [[0, 0, 1, 4], [3, 1, 0, 0], [2, 2, 0, 0]]  # the second goes on from the copy
    drafts = [0, 2, 4, 24], [[0, 0, -1, 4], [1, 5, -2, 1, 3], [2, 2, 0]]  # a copy behind each row
    for starts, slots in (first, then, drafts):
        got, wanted = ours.compiled(rows, starts, slots), theirs.by_torch(rows.clone(), starts, slots)
        for one, other in zip([got, *ours.pools], [wanted, *theirs.pools], strict=True):
            assert relative_error(one, other) < FLOAT32


def hold_bits(layer: StatefulLayer, run: Run, set_threads: Callable[[int], object]) -> None:
    """run: of the layer, by torch or compiled"""
    rows, others = layer.draw(50, layer.row_width), layer.draw(9, layer.row_width)
    wanted = run(rows, [0, 50], [[-1, 0, 0, 0]]).clone()
    kept = [pool[0].clone() for pool in layer.pools]
    for cuts in ((0, 1, 2, 3, 20, 50), (0, 16, 33, 50)):
        set_threads(2)
        found = []
        for start, end in pairwise(cuts):
            batch, length = torch.cat((others, rows[start:end])), end - start
            slots = [[-1, 2, 5, 3], [-1 if start == 0 else 1, 1, 0, 0]]
            found.append(run(batch, [0, 9, 9 + length], slots)[9:].clone())
        set_threads(1)
        assert torch.equal(torch.cat(found), wanted)
        assert all(torch.equal(pool[1], state) for pool, state in zip(layer.pools, kept, strict=True))
    # A copy is the state after exactly so many tokens: what goes on from it has the same bits.
    run(rows, [0, 50], [[-1, 0, 19, 4]])
    assert torch.equal(run(rows[19:], [0, 31], [[4, 1, 0, 0]]), wanted[19:])
    # So is each of several, of chunks with drafts of which some do not count.
    run(rows, [0, 19], [[-1, 0, 0, 0]])
    guessed = torch.cat((rows[19:22], others[:2]))
    run(guessed, [0, 5], [[0, 0, -4, 1, 2, 3, 4]])
    for number, slot in enumerate((1, 2, 3), start=20):
        assert torch.equal(run(rows[number:], [0, 50 - number], [[slot, 5, 0, 0]]), wanted[number:])
    run(rows, [0, 50], [[-1, 0, 20, 4]])  # one token late
    assert not torch.equal(run(rows[19:], [0, 31], [[4, 1, 0, 0]]), wanted[19:])
