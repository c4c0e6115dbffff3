"""The dense weights of a decoder in the form that its operations read: for torch, or packed for compiled kernels."""

from typing import Any

import torch
from torch import Tensor

from moe_serve.kernels.activation import activate
from moe_serve.kernels.cpu.experts import GroupedExperts, PackedExperts
from moe_serve.kernels.cpu.linear import PackedHeads, PackedLinear, PackedParts, RowTable
from moe_serve.kernels.cpu.packed import (
    gate_up_size,
    group_packed_size,
    pack,
    pack_gate_up,
    pack_groups,
    pack_groups_gate_up,
    packed_size,
    padded,
)
from moe_serve.kernels.forms import SILU, Activation
from moe_serve.kernels.group_quantised import Activations, GroupQuantised, GroupRows, rows_of
from moe_serve.kernels.linear import Fp8Linear, HeadLinear, Linear
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.packed_memory import PackedMemory
from moe_serve.kernels.quantised import gated_gemm_fp8, quantize

Scales = tuple[Tensor | None, Tensor | None]  # of gate and up, and of down
AnyMatrix = Tensor | GroupRows
_IN_GROUPS = "only the compiled kernels take weights in groups"


def take_rows(weight: Any, order: Tensor) -> Any:
    """Returns a matrix or a vector with its rows in another order. weight: Tensor or GroupRows;  order: [n] int64"""
    if isinstance(weight, GroupRows):
        return weight.take(order)
    bits = weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight  # torch indexes no FP8
    return rows_of(bits, order).view(weight.dtype)


class GatedMlp:
    """down(silu(gate(x)) * up(x)), of dense layers and shared experts, or by another activation."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation):
        """gate_up: [2 I, H], gate rows first, or [I, H] where the activation has no gate; down: [H, I]"""
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]"""
        return self._down(activate(self._gate_up(x), self._activation))

    def middle(self, x: Tensor, logits: Tensor | None) -> Tensor:
        """Returns what down is applied to, [T, I], each row times the sigmoid of its logit, if given, on CUDA."""
        from moe_serve.kernels.triton.silu_mul import silu_mul_triton

        assert self._activation == SILU, "models with other MLPs are refused on GPUs"

        return silu_mul_triton(self._gate_up(x), logits=logits)

    def add_down_(self, middle: Tensor, total: Tensor) -> Tensor:
        """Adds down(middle) to total [T, H] in place, and returns it."""
        return self._down.add_to_(total, middle)


class Fp8Mlp:
    """The same function of weights in FP8, on a GPU: what lies between is quantised before it leaves the kernel."""

    def __init__(self, gate_up: Fp8Linear, down: Fp8Linear, numerics: Numerics):
        """gate_up: [2 I, H], gate rows first, in two parts;  down: [H, I]"""
        self._gate_up = gate_up
        self._down = down
        self._numerics = numerics

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]"""
        return self._down.of_quantised(self.middle(x, None), x.dtype)

    def middle(self, x: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns what GatedMlp does, quantised."""
        if logits is None:
            return gated_gemm_fp8(*quantize(x), self._gate_up.weight, None, self._numerics)
        from moe_serve.kernels.triton.silu_mul import silu_mul_triton

        return quantize(silu_mul_triton(self._gate_up(x), logits=logits))

    def add_down_(self, middle: tuple[Tensor, Tensor], total: Tensor) -> Tensor:
        """Adds down(middle) to total [T, H] in place, and returns it."""
        return self._down.of_quantised(middle, total.dtype, total)


class PackedMlp:
    """The weights of the same function for the compiled kernel of experts: those of one slot."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: Activation, scales: Scales, memory: PackedMemory):
        """gate_up: [2 I, H], gate rows first, or [I, H];  down: [H, I]; float32, bfloat16, or FP8 with scales"""
        (hidden, width), stacks = down.shape, activation.stacks
        sizes = gate_up_size(width, hidden, stacks), packed_size(hidden, width)
        packed_gate_up = memory.pack((1, sizes[0]), gate_up, lambda packed: pack_gate_up(gate_up, packed[0], stacks))
        packed_down = memory.pack((1, sizes[1]), down, lambda packed: pack(down, packed[0]))
        gate_up_scale, down_scale = (None if scale is None else scale[None] for scale in scales)
        self.experts = PackedExperts(
            packed_gate_up, packed_down, hidden, width, gate_up_scale, down_scale, activation=activation
        )

    @classmethod
    def of_groups(
        cls,
        gate_up: GroupQuantised,
        down: GroupQuantised,
        activation: Activation,
        activations: Activations,
        memory: PackedMemory,
    ) -> "PackedMlp":
        """Returns it of weights in groups. activations: what they are multiplied with"""
        (hidden, width), stacks = down.codes.shape, activation.stacks
        sizes = (
            group_packed_size(stacks * padded(width), hidden, gate_up.form),
            group_packed_size(hidden, width, down.form),
        )
        made, groups = cls.__new__(cls), GroupedExperts(gate_up.form, down.form, activations)
        made.experts = PackedExperts(
            memory.pack((1, sizes[0]), gate_up.codes, lambda packed: pack_groups_gate_up(gate_up, packed[0], stacks)),
            memory.pack((1, sizes[1]), down.codes, lambda packed: pack_groups(down, packed[0])),
            hidden,
            width,
            activation=activation,
            groups=groups,
        )
        return made


class WeightForms:
    """Brings the dense weights of one model into form; those of equal shape share their proof of row counts."""

    def __init__(self, numerics: Numerics, memory: PackedMemory, activation: Activation, activations: Activations):
        """memory: of packed weights, which the compiled kernels alone read;  activation: of MLPs

        activations: beside weights in groups
        """
        self._numerics = numerics
        self._activation = activation
        self._activations = activations
        self._memory = memory
        self._proven: dict[object, tuple[int, ...]] = {}

    def embedding(
        self, rows: AnyMatrix, head: AnyMatrix | None, bias: Tensor | None
    ) -> tuple[Tensor | RowTable, Linear | PackedLinear]:
        """Returns the table of embeddings and the projection to logits; the kernels read both from one packed weight.

        rows: [vocab_size, H];  head: the projection's weight, likewise; None: it is that of the embeddings
        bias: of the projection, [vocab_size]; None: there is none
        """
        weight = rows if head is None else head
        if not self._numerics.compiled:
            assert isinstance(rows, Tensor) and isinstance(weight, Tensor), _IN_GROUPS  # noqa: PT018
            return rows, Linear(weight, bias, self._numerics, self._proven)
        projection = self._packed(weight, bias, None)
        if head is None:
            return projection.rows, projection
        if isinstance(rows, GroupRows):
            return self._packed(rows, None, None).rows, projection
        return RowTable.of(self._memory.keep(rows)), projection

    def linear(
        self, weight: AnyMatrix, bias: Tensor | None = None, scale: Tensor | None = None
    ) -> Linear | Fp8Linear | PackedLinear | PackedParts:
        """weight: [n, k], bias: [n] -> a function of rows [T, k] -> [T, n]

        scale: [n] or by block, of a weight in FP8
        Weights in groups are for the compiled kernels alone.
        """
        if isinstance(weight, GroupRows) and len(weight.parts) > 1:
            sizes = [len(part.codes) for part in weight.parts]
            biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
            parts = zip(weight.parts, biases, strict=True)
            return PackedParts(tuple(self._packed(GroupRows((part,)), of_part, None) for part, of_part in parts))
        if self._numerics.compiled:
            return self._packed(weight, bias, scale)
        assert isinstance(weight, Tensor), _IN_GROUPS
        if scale is not None:
            return Fp8Linear(weight, scale, bias, self._numerics)
        return Linear(weight, bias, self._numerics, self._proven)

    def take_linear(self, weights: dict[str, Any], name: str) -> Linear | Fp8Linear | PackedLinear | PackedParts:
        """Takes a projection out of the weights of a layer, with its bias and its scales where it has any."""
        return self.linear(weights.pop(name), weights.pop(f"{name}_bias", None), weights.pop(f"{name}_scale", None))

    def _packed(self, weight: AnyMatrix, bias: Tensor | None, scale: Tensor | None) -> PackedLinear:
        if isinstance(weight, GroupRows):
            return PackedLinear.of_groups(weight.whole, bias, self._activations, self._memory)
        return PackedLinear(weight, bias, scale, self._memory)

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

    def mlp(self, gate_up: AnyMatrix, down: AnyMatrix, scales: Scales = (None, None)) -> GatedMlp | Fp8Mlp | PackedMlp:
        """gate_up: [2 I, H], gate rows first, or [I, H];  down: [H, I] -> a function of rows [T, H] -> [T, H]

        scales: [2 I] and [H], or by block, of weights in FP8
        Both are in groups, or none; both in FP8, or none.
        """
        activation = self._activation
        if isinstance(gate_up, GroupRows):
            assert isinstance(down, GroupRows), "gate and up are in groups, and down is not"
            return PackedMlp.of_groups(gate_up.whole, down.whole, activation, self._activations, self._memory)
        assert isinstance(down, Tensor), "down is in groups, and gate and up are not"
        if self._numerics.compiled:
            return PackedMlp(gate_up, down, activation, scales, self._memory)
        if scales[0] is not None and scales[1] is not None:
            assert activation == SILU, "models with other MLPs are refused on GPUs"
            first = Fp8Linear(gate_up, scales[0], None, self._numerics, parts=2)
            return Fp8Mlp(first, Fp8Linear(down, scales[1], None, self._numerics), self._numerics)
        above, below = (Linear(weight, None, self._numerics, self._proven) for weight in (gate_up, down))
        return GatedMlp(above, below, activation)
