"""The recurrence of Mamba's first state-space layers: the kernel and its plain form, chunks, batches and threads."""

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.forms import SelectiveShape
from moe_serve.kernels.selective_space import SelectiveRows, SelectiveWeights, in_tiles, selective_space_reference
from moe_serve.kernels.sequence_states import SequenceStates
from tests.kernels.cpu.stateful import SLOTS, StatefulLayer, compare_with_plain, hold_bits

SHAPES = [SelectiveShape(*sizes, rank=1, taps=2, conv_bias=True, bias=False) for sizes in ((64, 16), (75, 7), (1, 1))]


class Layer(StatefulLayer):
    def __init__(self, shape: SelectiveShape):
        super().__init__()
        inner, width = shape.inner, shape.state_width
        self.row_width = 3 * inner + 2 * width
        decay = in_tiles(-self.draw(inner, width).exp())
        self.weights = SelectiveWeights(shape, decay, self.draw(inner), self.draw(inner))
        self.pools = [torch.full((SLOTS, *shape.state_shapes[1]), 99.0)]

    def parts_of(self, rows: Tensor) -> SelectiveRows:
        inner = self.weights.shape.inner
        sizes = [inner, inner, 2 * self.weights.shape.state_width, inner]
        return SelectiveRows(*torch.split(rows, sizes, 1))

    def plain(self, rows: Tensor, sequences: SequenceStates) -> Tensor:
        return selective_space_reference(self.parts_of(rows), self.weights, self.pools[0], sequences)

    def record(self, rows: Tensor, do: Recorder) -> Tensor:
        return do.selective_space(self.parts_of(rows), self.weights, self.pools[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_computes_what_the_plain_function_does(shape: SelectiveShape, library) -> None:
    compare_with_plain(Layer(shape), Layer(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", ["by_torch", "compiled"])
def test_bits_depend_on_no_cut_no_neighbour_and_no_thread(how: str, shape: SelectiveShape, library) -> None:
    layer = Layer(shape)
    hold_bits(layer, getattr(layer, how), library.set_threads)
