"""The dense weights of a decoder in the form that its operations read: for torch, or packed for compiled kernels."""

import torch
from torch import Tensor

from moe_serve.kernels.activation import silu_mul
from moe_serve.kernels.cpu.experts import PackedExperts
from moe_serve.kernels.cpu.linear import PackedHeads, PackedLinear, RowTable
from moe_serve.kernels.cpu.packed import gate_up_size, pack, pack_gate_up, packed_size
from moe_serve.kernels.linear import HeadLinear, Linear
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.packed_memory import PackedMemory

Scales = tuple[Tensor | None, Tensor | None]  # of gate and up, and of down


class GatedMlp:
    """down(silu(gate(x)) * up(x)), of dense layers and shared experts."""

    def __init__(self, gate_up: Linear, down: Linear):
        """gate_up: [2 I, H], gate rows first; down: [H, I]"""
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]"""
        return self._down(silu_mul(self._gate_up(x)))

    def middle(self, x: Tensor, logits: Tensor | None) -> Tensor:
        """Returns what down is applied to, [T, I], each row times the sigmoid of its logit, if given, on CUDA."""
        from moe_serve.kernels.triton.silu_mul import silu_mul_triton

        return silu_mul_triton(self._gate_up(x), logits=logits)

    def add_down_(self, middle: Tensor, total: Tensor) -> Tensor:
        """Adds down(middle) to total [T, H] in place, and returns it."""
        return self._down.add_to_(total, middle)


class PackedMlp:
    """The weights of the same function for the compiled kernel of experts: those of one slot."""

    def __init__(self, gate_up: Tensor, down: Tensor, scales: Scales, memory: PackedMemory):
        """gate_up: [2 I, H], gate rows first;  down: [H, I]; float32, bfloat16, or FP8 with scales"""
        hidden, width = down.shape
        sizes = gate_up_size(width, hidden), packed_size(hidden, width)
        packed_gate_up = memory.pack((1, sizes[0]), gate_up, lambda packed: pack_gate_up(gate_up, packed[0]))
        packed_down = memory.pack((1, sizes[1]), down, lambda packed: pack(down, packed[0]))
        gate_up_scale, down_scale = (None if scale is None else scale[None] for scale in scales)
        self.experts = PackedExperts(packed_gate_up, packed_down, hidden, width, gate_up_scale, down_scale)


class WeightForms:
    """Brings the dense weights of one model into form; those of equal shape share their proof of row counts."""

    def __init__(self, numerics: Numerics, memory: PackedMemory):
        """memory: of packed weights, which the compiled kernels alone read"""
        self._numerics = numerics
        self._memory = memory
        self._proven: dict[object, tuple[int, ...]] = {}

    def embedding(
        self, rows: Tensor, head: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor | RowTable, Linear | PackedLinear]:
        """Returns the table of embeddings and the projection to logits; the kernels read both from one packed weight.

        rows: [vocab_size, H];  head: the projection's weight, likewise; None: it is that of the embeddings
        bias: of the projection, [vocab_size]; None: there is none
        """
        weight = rows if head is None else head
        if not self._numerics.compiled:
            return rows, self.linear(weight, bias)
        projection = PackedLinear(weight, bias, memory=self._memory)
        return projection.rows if head is None else RowTable.of(self._memory.keep(rows)), projection

    def linear(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Linear | PackedLinear:
        """weight: [n, k], bias: [n] -> a function of rows [T, k] -> [T, n]

        scale: [n] or by block, of a weight in FP8, which the compiled kernels alone take
        """
        if self._numerics.compiled:
            return PackedLinear(weight, bias, scale, self._memory)
        return Linear(weight, bias, self._numerics, self._proven)

    def ones(self, *shape: int, like: Tensor) -> Tensor:
        """Returns the weight of a norm that has none, beside a matrix of this dtype and device."""
        if self._numerics.compiled:
            return torch.ones(shape)
        return torch.ones(shape, dtype=like.dtype, device=like.device)

    def per_head(self, weight: Tensor) -> HeadLinear | PackedHeads:
        """weight: [heads, k, n] -> a function of rows [T, heads, k] -> [T, heads, n]"""
        if self._numerics.compiled:
            return PackedHeads(weight, self._memory)
        return HeadLinear(weight, self._numerics, self._proven)

    def mlp(self, gate_up: Tensor, down: Tensor, scales: Scales = (None, None)) -> GatedMlp | PackedMlp:
        """gate_up: [2 I, H], gate rows first;  down: [H, I] -> a function of rows [T, H] -> [T, H]

        scales: [2 I] and [H], or by block, of weights in FP8, which the compiled kernels alone take
        """
        if self._numerics.compiled:
            return PackedMlp(gate_up, down, scales, self._memory)
        linear = (Linear(weight, None, self._numerics, self._proven) for weight in (gate_up, down))
        return GatedMlp(*linear)
