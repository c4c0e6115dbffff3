"""The experts' feed-forward by compiled kernels: gate and up, activation, down, in one call for all slots."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_serve.kernels.cpu.checks import dense
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.linear import GROUPS, KINDS
from moe_serve.kernels.cpu.packed import gate_up_size, group_facts, group_packed_size, packed_size, padded
from moe_serve.kernels.cpu.rows import float_bits
from moe_serve.kernels.forms import MXFP4_BLOCK, SILU, Activation, GroupForm, num_groups, num_scale_rows
from moe_serve.kernels.group_quantised import Activations

_ACTIVATIONS = ("silu", "clamped_swiglu", "relu2", "clamped_silu")  # in the order of experts.c


@dataclass(frozen=True)
class GroupedExperts:
    """How experts in groups are packed and multiplied. gate_up, down: forms of the matrices"""

    gate_up: GroupForm
    down: GroupForm
    activations: Activations


@dataclass(frozen=True)
class PackedExperts:
    """The weights of S slots, packed. They are widened as they are read: the products are those of float32 weights.

    gate_up holds two matrices of that width, so stacks is 2; of an activation without a gate it holds one, up.

    gate_up: [S, gate_up_size(width, hidden)], down: [S, packed_size(hidden, width)]
    scales:  float32, contiguous: None for float32 and bfloat16; int8, and float8_e4m3fn by output channel:
             gate_up_scale [S, stacks x width], down_scale [S, hidden]; float8_e4m3fn by 128 x 128 as
             kernels/quantised.py has them: gate_up_scale [S, stacks x ceil(width / 128), ceil(hidden / 128)],
             down_scale [S, ceil(hidden / 128), ceil(width / 128)];
             MXFP4 (kernels/quantised.py): hidden and width are multiples of 32, weights are uint8 of two numbers each,
             gate_up [S, gate_up_size(width, hidden / 2)] and down [S, packed_size(hidden, width / 2)]; scales are uint8
             exponents, packed too: [S, gate_up_size(width, hidden / 32)], [S, packed_size(hidden, width / 32)]
    groups:  of weights in groups, which are uint8 with their scales among them: gate_up [S, group_packed_size(stacks x
             padded(width), hidden, form)], down [S, group_packed_size(hidden, width, form)]; None: of all others
    biases:  float32, contiguous: gate_up_bias [S, stacks x width], gate first, and down_bias [S, hidden]; None: none
    held:    [slots] int64, the expert of each slot, where slots only name theirs; S is the number of experts then
    """

    gate_up: Tensor
    down: Tensor
    hidden: int
    width: int
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = SILU
    groups: GroupedExperts | None = None
    held: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.held is None or dense(self.held, torch.int64, len(self.held)), f"held experts {self.held}"
        if self.groups is None:
            self._check_weights()
        else:
            self._check_groups(self.groups)
        for bias, size in ((self.gate_up_bias, self._stacks * self.width), (self.down_bias, self.hidden)):
            shape = self.gate_up.shape[0], size
            assert bias is None or dense(bias, torch.float32, *shape), f"bias {bias.dtype} {tuple(bias.shape)}"
        for tensor in (self.gate_up, self.down, self.gate_up_scale, self.down_scale):
            assert tensor is None or tensor.is_contiguous(), "weights with gaps"

    def _check_groups(self, groups: GroupedExperts) -> None:
        assert self.gate_up_scale is self.down_scale is None, "scales lie among the weights"
        rows = self._stacks * padded(self.width)
        sizes = (rows, self.hidden, groups.gate_up), (self.hidden, self.width, groups.down)
        for weight, size in zip((self.gate_up, self.down), sizes, strict=True):
            wanted = self.gate_up.shape[0], group_packed_size(*size)
            assert dense(weight, torch.uint8, *wanted), f"{weight.dtype} {tuple(weight.shape)}, expected {wanted}"

    def _check_weights(self) -> None:
        slots, hidden, width, stacks = self.gate_up.shape[0], self.hidden, self.width, self._stacks
        in_mxfp4 = self.gate_up.dtype == torch.uint8
        assert self.gate_up.dtype == self.down.dtype, f"{self.gate_up.dtype} above {self.down.dtype}"
        per_word = 2 if in_mxfp4 else 1
        assert not in_mxfp4 or hidden % MXFP4_BLOCK == width % MXFP4_BLOCK == 0, f"MXFP4 of {hidden} x {width}"
        assert self.gate_up.shape == (slots, gate_up_size(width, hidden // per_word, stacks)), tuple(self.gate_up.shape)
        assert self.down.shape == (slots, packed_size(hidden, width // per_word)), tuple(self.down.shape)
        scales: tuple[tuple[int, ...] | None, ...] = (None, None)
        if self.gate_up.dtype == torch.int8 or self.by_channel:
            scales = (slots, stacks * width), (slots, hidden)
        elif self.gate_up.dtype == torch.float8_e4m3fn:
            gate_up = slots, num_scale_rows(stacks * width, stacks), num_groups(hidden)
            scales = gate_up, (slots, num_groups(hidden), num_groups(width))
        elif in_mxfp4:
            blocks = gate_up_size(width, hidden // MXFP4_BLOCK, stacks), packed_size(hidden, width // MXFP4_BLOCK)
            scales = (slots, blocks[0]), (slots, blocks[1])
        for scale, shape in zip((self.gate_up_scale, self.down_scale), scales, strict=True):
            assert (None if scale is None else tuple(scale.shape)) == shape, f"scales of {self.gate_up.dtype}: {shape}"

    @property
    def _stacks(self) -> int:
        return self.activation.stacks

    @property
    def by_channel(self) -> bool:
        """Whether FP8 weights have a scale for each output channel."""
        scale = self.gate_up_scale
        return self.gate_up.dtype == torch.float8_e4m3fn and scale is not None and scale.dim() == 2

    @cached_property
    def facts(self) -> Tensor:
        """Returns the block of int64 that experts.c reads."""
        kind = KINDS.index(self.gate_up.dtype) if self.groups is None else GROUPS
        tensors = (self.gate_up, self.down, self.gate_up_scale, self.down_scale, self.gate_up_bias, self.down_bias)
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, self.held))
        num_slots = len(self.gate_up if self.held is None else self.held)
        sizes = num_slots, self.hidden, self.width
        activation = self.activation
        numbers = float_bits(activation.alpha), float_bits(activation.limit)
        facts = *sizes, kind, self.by_channel, _ACTIVATIONS.index(activation.kind), *addresses, *numbers
        return torch.tensor([*facts, *(0 if each is None else each.data_ptr() for each in self._group_facts)])

    @cached_property
    def _group_facts(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns what groups.h reads of both matrices, where they are in groups."""
        if self.groups is None:
            return None, None
        groups = self.groups
        return group_facts(groups.gate_up, groups.activations), group_facts(groups.down, groups.activations)


def packed_ffn(
    x: Tensor, rows_per_slot: Tensor, experts: PackedExperts, out: Tensor | None = None, slab_rows: int = 0
) -> Tensor:
    """Returns down(activation(gate(x), up(x))) of each row, by its slot's weights: like x, in `out` if given.

    x:             [rows, hidden] float32, of any row stride, sorted by slot
    rows_per_slot: [S] int64
    slab_rows:     > 0: slot s begins at row s * slab_rows, and rows beyond its count are left as they are
    """
    out = torch.empty_like(x) if out is None else out
    assert x.dtype == out.dtype == torch.float32, f"rows of {x.dtype} into {out.dtype}"
    assert rows_per_slot.dtype == torch.int64, f"counts of {rows_per_slot.dtype}"
    middle = torch.empty(x.shape[0], padded(experts.width))
    cpu_library().call.expert_ffn(
        experts.facts.data_ptr(), x.data_ptr(), x.stride(0), rows_per_slot.data_ptr(), slab_rows, middle.data_ptr(),
        out.data_ptr(), out.stride(0),
    )  # fmt: skip
    return out
