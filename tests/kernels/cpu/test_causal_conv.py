"""Causal convolutions over sequences: the kernel and its plain form, chunks, batches and threads."""

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.causal_conv import ConvWeights, causal_conv_reference
from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.forms import ConvShape, GatedConvShape
from moe_serve.kernels.sequence_states import SequenceStates
from tests.kernels.cpu.stateful import SLOTS, StatefulLayer, compare_with_plain, hold_bits

SHAPES = [
    GatedConvShape(72, 3).conv,
    ConvShape(67, 4, first=5, silu=True),
    ConvShape(16, 2, first=40),
    ConvShape(1, 16, first=3, before=4, silu=True),
]


class Layer(StatefulLayer):
    row_width = 250

    def __init__(self, shape: ConvShape):
        super().__init__()
        self.weights = ConvWeights(shape, self.draw(shape.taps, shape.channels), self.draw(shape.channels))
        self.pools = [torch.full((SLOTS, *shape.state_shape), 99.0)]

    def plain(self, rows: Tensor, sequences: SequenceStates) -> Tensor:
        return causal_conv_reference(rows, self.weights, self.pools[0], sequences)

    def record(self, rows: Tensor, do: Recorder) -> Tensor:
        return do.causal_conv(rows, self.weights, self.pools[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_computes_what_the_plain_function_does(shape: ConvShape, library) -> None:
    compare_with_plain(Layer(shape), Layer(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", ["by_torch", "compiled"])
def test_bits_depend_on_no_cut_no_neighbour_and_no_thread(how: str, shape: ConvShape, library) -> None:
    layer = Layer(shape)
    hold_bits(layer, getattr(layer, how), library.set_threads)
