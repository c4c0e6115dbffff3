"""The recurrence of state-space layers: the kernel and its plain form, chunks, batches and threads."""

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.forms import MambaShape
from moe_serve.kernels.sequence_states import SequenceStates
from moe_serve.kernels.state_space import StateSpaceWeights, state_space_reference
from tests.kernels.cpu.stateful import SLOTS, StatefulLayer, compare_with_plain, hold_bits

SIZES = (1, 3, 16, 64, 4), (2, 4, 7, 33, 3), (1, 1, 1, 5, 2)
SHAPES = [MambaShape(*sizes, conv_bias=True, bias=False) for sizes in SIZES]


class Layer(StatefulLayer):
    def __init__(self, shape: MambaShape):
        super().__init__()
        self.row_width, decay = shape.row_width, -self.draw(shape.heads).exp()
        self.weights = StateSpaceWeights(shape, decay, self.draw(shape.heads), self.draw(shape.heads))
        self.pools = [torch.full((SLOTS, *shape.state_shapes[1]), 99.0)]

    def parts_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.weights.shape
        return rows[:, shape.inner : -shape.heads], rows[:, -shape.heads :]

    def plain(self, rows: Tensor, sequences: SequenceStates) -> Tensor:
        return state_space_reference(*self.parts_of(rows), self.weights, self.pools[0], sequences)

    def record(self, rows: Tensor, do: Recorder) -> Tensor:
        return do.state_space(*self.parts_of(rows), self.weights, self.pools[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_computes_what_the_plain_function_does(shape: MambaShape, library) -> None:
    compare_with_plain(Layer(shape), Layer(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", ["by_torch", "compiled"])
def test_bits_depend_on_no_cut_no_neighbour_and_no_thread(how: str, shape: MambaShape, library) -> None:
    layer = Layer(shape)
    hold_bits(layer, getattr(layer, how), library.set_threads)
