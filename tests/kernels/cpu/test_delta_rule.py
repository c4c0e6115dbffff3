"""The gated delta rule: the kernel and its plain form, chunks, batches and threads."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu.operations import Recorder, recorded_once
from moe_serve.kernels.delta_rule import DeltaWeights, SequenceStates, columns_of, delta_rule_reference
from moe_serve.kernels.forms import DeltaShape
from tests.tolerance import FLOAT32, relative_error

SHAPES = [
    DeltaShape(2, 4, 24, 40, 4),
    DeltaShape(1, 1, 7, 5, 2),
    DeltaShape(3, 3, 128, 64, 3, grouped=True),
    DeltaShape(2, 6, 16, 33, 4, grouped=True),
]


class Layer:
    """A layer with random weights, and pools of states that hold rubbish."""

    def __init__(self, shape: DeltaShape, num_slots: int = 6):
        generator = torch.Generator().manual_seed(3)
        self.draw = partial(torch.randn, generator=generator)
        heads = shape.value_heads
        decay = -self.draw(heads).exp()
        self.weights = DeltaWeights(
            shape, self.draw(shape.taps, shape.channels), decay, self.draw(heads), self.draw(shape.value_width), 1e-5
        )
        self.pools = [torch.full((num_slots, *each), 99.0) for each in shape.state_shapes]

    def plain(self, rows: Tensor, starts: list[int], slots: list[list[int]]) -> Tensor:
        return delta_rule_reference(rows, self.weights, self.pools, states_of(starts, slots))

    def compiled(self, rows: Tensor, starts: list[int], slots: list[list[int]]) -> Tensor:
        def record(do: Recorder) -> Tensor:
            return do.delta_rule(rows, self.weights, self.pools)

        sequences = states_of(starts, slots)
        return recorded_once(len(rows), record, sequences=sequences.address)


def states_of(starts: list[int], slots: list[list[int]]) -> SequenceStates:
    return SequenceStates(torch.tensor(starts, dtype=torch.int32), torch.tensor(slots))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_computes_what_the_plain_function_does(shape: DeltaShape, library) -> None:
    ours, theirs = Layer(shape), Layer(shape)
    rows = ours.draw(24, shape.row_width)
    first = [0, 1, 1, 3, 24], [[-1, 0, 0, 0], [-1, 4, 0, 0], [-1, 1, 0, 0], [-1, 2, 17, 3]]
    then = [0, 1, 2, 24], [[0, 0, 1, 4], [3, 1, 0, 0], [2, 2, 0, 0]]  # the second goes on from the copy
    for starts, slots in (first, then):
        got, wanted = ours.compiled(rows, starts, slots), theirs.plain(rows.clone(), starts, slots)
        for one, other in zip([got, *ours.pools], [wanted, *theirs.pools], strict=True):
            assert relative_error(one, other) < FLOAT32


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_depend_on_no_cut_no_neighbour_and_no_thread(shape: DeltaShape, library) -> None:
    layer = Layer(shape)
    rows, others = layer.draw(50, shape.row_width), layer.draw(9, shape.row_width)
    wanted = layer.compiled(rows, [0, 50], [[-1, 0, 0, 0]]).clone()
    kept = [pool[0].clone() for pool in layer.pools]
    for cuts in ((0, 1, 2, 3, 20, 50), (0, 16, 33, 50)):
        library.set_threads(2)
        found = []
        for start, end in pairwise(cuts):
            batch, length = torch.cat((others, rows[start:end])), end - start
            slots = [[-1, 2, 5, 3], [-1 if start == 0 else 1, 1, 0, 0]]
            found.append(layer.compiled(batch, [0, 9, 9 + length], slots)[9:].clone())
        library.set_threads(1)
        assert torch.equal(torch.cat(found), wanted)
        assert all(torch.equal(pool[1], state) for pool, state in zip(layer.pools, kept, strict=True))
    # A copy is the state after exactly so many tokens: what goes on from it has the same bits.
    layer.compiled(rows, [0, 50], [[-1, 0, 19, 4]])
    assert torch.equal(layer.compiled(rows[19:], [0, 31], [[4, 1, 0, 0]]), wanted[19:])
    layer.compiled(rows, [0, 50], [[-1, 0, 20, 4]])  # one token late
    assert not torch.equal(layer.compiled(rows[19:], [0, 31], [[4, 1, 0, 0]]), wanted[19:])


def test_both_orders_of_a_row_hold_the_same_parts() -> None:
    shape = DeltaShape(2, 4, 3, 5, 4)
    for grouped in (False, True):
        columns = columns_of(replace(shape, grouped=grouped))
        widths = torch.tensor([3, 3, 5, 5, 1, 1])
        used = {at for head in columns for start, n in zip(head, widths, strict=True) for at in range(start, start + n)}
        assert used == set(range(shape.row_width))
