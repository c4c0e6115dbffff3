"""Dense projections by compiled kernels: the weight is packed once, read once for up to 64 rows, and widened there."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.packed import group_facts, group_packed_size, pack, pack_groups, packed_size
from moe_serve.kernels.forms import num_groups
from moe_serve.kernels.group_quantised import Activations, GroupQuantised
from moe_serve.kernels.packed_memory import OWN_MEMORY, PackedMemory

# In the order of weights.h; bytes hold two numbers of MXFP4 each.
KINDS = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8)
GROUPS = len(KINDS)  # weights in groups, whatever their form


@dataclass(frozen=True, eq=False)
class RowTable:
    """Rows that kernels look up by id, float32, bfloat16, or in groups.

    data:   [num_rows, width], or the same as a packed weight
    groups: what groups.h reads of a packed weight in groups; else None
    """

    data: Tensor
    num_rows: int
    width: int
    is_packed: bool
    groups: Tensor | None = None

    @property
    def kind(self) -> int:
        """How numbers are kept, as weights.h counts it."""
        return KINDS.index(self.data.dtype) if self.groups is None else GROUPS

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        """Returns the table of rows [num_rows, width] without gaps."""
        assert rows.is_contiguous(), f"rows with strides {rows.stride()}"
        num_rows, width = rows.shape
        return cls(rows, num_rows, width, is_packed=False)


class _Projection:
    """heads matrices [n, k], packed; a block of int64 holds their facts, as gemm.c reads them."""

    _groups: Tensor | None = None  # what groups.h reads

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: Tensor | None, memory: PackedMemory):
        heads, n, k = weight.shape
        scales = [(n,), (num_groups(n), num_groups(k))] if weight.dtype == torch.float8_e4m3fn else [None]
        assert (None if scale is None else scale.shape) in scales, f"{weight.dtype} with scales {scale}"

        def fill(packed: Tensor) -> None:
            for head in range(heads):
                pack(weight[head], packed[head])

        self._packed = memory.pack((heads, packed_size(n, k)), weight, fill)
        self._bias = None if bias is None else bias.float().contiguous()
        self._scale = None if scale is None else scale.float().contiguous()
        addresses = (0 if each is None else each.data_ptr() for each in (self._packed, self._bias, self._scale))
        by_channel = scale is not None and scale.dim() == 1
        self._settle(torch.tensor([heads, n, k, KINDS.index(weight.dtype), by_channel, *addresses, 0]))

    def _settle(self, facts: Tensor) -> None:
        self.facts = facts
        self._at = facts.data_ptr()
        self._linear = cpu_library().call.linear


class PackedLinear(_Projection):
    """y = x W^T + b with weights of float32, bfloat16 or FP8. A row's bits depend on that row only."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        scale: Tensor | None = None,
        memory: PackedMemory = OWN_MEMORY,
    ):
        """weight: [n, k] float32, bfloat16 or float8_e4m3fn, bias: [n] or None

        scale: of FP8: [n], or [ceil(n / 128), ceil(k / 128)]
        """
        super().__init__(weight[None], bias, scale, memory)
        self.out_features, self.in_features = weight.shape

    @classmethod
    def of_groups(
        cls,
        weight: GroupQuantised,
        bias: Tensor | None,
        activations: Activations,
        memory: PackedMemory = OWN_MEMORY,
    ) -> Self:
        """Returns the projection by a weight [n, k] in groups. activations: what it is multiplied with"""
        made = cls.__new__(cls)
        made.out_features, made.in_features = n, k = weight.codes.shape
        size = group_packed_size(n, k, weight.form)
        made._packed = memory.pack((1, size), weight.codes, lambda packed: pack_groups(weight, packed[0]))
        made._bias = None if bias is None else bias.float().contiguous()
        made._groups = groups = group_facts(weight.form, activations)
        bias_at = 0 if made._bias is None else made._bias.data_ptr()
        made._settle(torch.tensor([1, n, k, GROUPS, 0, made._packed.data_ptr(), bias_at, 0, groups.data_ptr()]))
        return made

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, k] float32, of any row stride -> [rows, n]; rows may be 0."""
        return self.into(x, x.new_empty(x.shape[0], self.out_features))

    @property
    def rows(self) -> RowTable:
        """Returns the rows of the weight, [n, k], as they lie packed."""
        return RowTable(self._packed, self.out_features, self.in_features, True, self._groups)

    @property
    def parts(self) -> "tuple[PackedLinear, ...]":
        """The projections to neighbouring columns of the result."""
        return (self,)

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes the projection of x [rows, k] to out [rows, n], both float32 and of any row stride; returns out."""
        assert x.dtype == out.dtype == torch.float32, f"rows of {x.dtype} into {out.dtype}"
        assert x.stride(1) == out.stride(1) == 1 or not x.numel() or self.in_features == 1 or self.out_features == 1
        self._linear(self._at, x.data_ptr(), x.shape[0], x.stride(0), 0, out.data_ptr(), out.stride(0), 0)
        return out


class PackedParts:
    """One projection to the columns of several, whose weights have forms of their own."""

    def __init__(self, parts: tuple[PackedLinear, ...]):
        self.parts = parts
        self.out_features = sum(part.out_features for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, k] float32, of any row stride -> [rows, n]; rows may be 0."""
        out, column = x.new_empty(x.shape[0], self.out_features), 0
        for part in self.parts:
            part.into(x, out[:, column : column + part.out_features])
            column += part.out_features
        return out


class PackedHeads(_Projection):
    """One projection per head, y[t, h] = x[t, h] W[h]. A row's bits depend on that row only."""

    def __init__(self, weight: Tensor, memory: PackedMemory = OWN_MEMORY):
        """weight: [heads, k, n] float32 or bfloat16"""
        super().__init__(weight.transpose(1, 2), None, None, memory)
        self.num_heads, _, self.out_features = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, heads, k] float32, of any strides of rows and heads -> [rows, heads, n]"""
        out = x.new_empty(x.shape[0], self.num_heads, self.out_features)
        strides = (x.stride(0), x.stride(1), out.data_ptr(), out.stride(0), out.stride(1))
        self._linear(self._at, x.data_ptr(), x.shape[0], *strides)
        return out
