"""The gated delta rule: the kernel and its plain form, chunks, batches and threads."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.delta_rule import DeltaWeights, columns_of, delta_rule_reference
from moe_serve.kernels.forms import DeltaShape
from moe_serve.kernels.sequence_states import SequenceStates
from tests.kernels.cpu.stateful import SLOTS, StatefulLayer, compare_with_plain, hold_bits

SHAPES = [
    DeltaShape(2, 4, 24, 40, 4),
    DeltaShape(1, 1, 7, 5, 2),
    DeltaShape(3, 3, 128, 64, 3, grouped=True),
    DeltaShape(2, 6, 16, 33, 4, grouped=True),
    DeltaShape(3, 3, 21, 40, 4, rank=5),
    DeltaShape(1, 1, 128, 128, 2, rank=1),
    DeltaShape(2, 2, 24, 40, 4, rank=0, bound=-3.0),
]


class Layer(StatefulLayer):
    def __init__(self, shape: DeltaShape):
        super().__init__()
        heads, self.row_width = shape.value_heads, shape.row_width
        decay = -self.draw(heads).exp()
        numbers = self.draw(shape.taps, shape.channels), decay, self.draw(shape.num_steps)
        self.weights = DeltaWeights(shape, *numbers, self.draw(shape.value_width), 1e-5)
        self.pools = [torch.full((SLOTS, *each), 99.0) for each in shape.state_shapes]
        self.sizes = shape.num_steps, heads * shape.value_width
        self.lifts = [self.draw(shape.rank or 0, n) for n in self.sizes]

    def apart(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns steps and gates, each row's made of that row alone, as products of kernels are."""
        rank = self.weights.shape.rank
        if rank is None:
            return None
        if rank == 0:
            steps, gates = rows.split([self.weights.shape.row_width - sum(self.sizes), *self.sizes], 1)[1:]
            return steps, gates
        latents = rows[:, -2 * rank : -rank], rows[:, -rank:]
        steps, gates = ((each[:, :, None] * lift).sum(1) for each, lift in zip(latents, self.lifts, strict=True))
        return steps, gates

    def plain(self, rows: Tensor, sequences: SequenceStates) -> Tensor:
        return delta_rule_reference(rows, self.apart(rows), self.weights, self.pools, sequences)

    def record(self, rows: Tensor, do: Recorder) -> Tensor:
        self.kept = self.apart(rows)  # as long as the recording reads them
        return do.delta_rule(rows, self.kept, self.weights, self.pools)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_computes_what_the_plain_function_does(shape: DeltaShape, library) -> None:
    compare_with_plain(Layer(shape), Layer(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_depend_on_no_cut_no_neighbour_and_no_thread(shape: DeltaShape, library) -> None:
    layer = Layer(shape)
    hold_bits(layer, layer.compiled, library.set_threads)


def test_both_orders_of_a_row_hold_the_same_parts() -> None:
    shape = DeltaShape(2, 4, 3, 5, 4)
    for grouped in (False, True):
        columns = columns_of(replace(shape, grouped=grouped))
        widths = torch.tensor([3, 3, 5, 5, 1, 1])
        used = {at for head in columns for start, n in zip(head, widths, strict=True) for at in range(start, start + n)}
        assert used == set(range(shape.row_width))
