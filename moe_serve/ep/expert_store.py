"""The experts of one rank and one layer: their weights by slot, and the gated MLP over rows that arrive there.

Addresses of weights never change: new experts are copied into slots. Where all ranks map all experts of a layer,
packed, a slot only names the one that it holds.
"""

import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.dispatch.base import MaskedRows, PackedRows
from moe_serve.ep.expert_form import MATRICES, ExpertForm, SlotForm, bias_of, scale_of
from moe_serve.kernels.activation import activate, activate_quantize
from moe_serve.kernels.cpu.experts import GroupedExperts, PackedExperts, packed_ffn
from moe_serve.kernels.forms import SILU, Activation, BlockScaled, Mxfp4
from moe_serve.kernels.grouped_gemm import gpu_gemm, group_rows
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.quantised import gated_gemm_fp8, grouped_gemm_fp8, grouped_gemm_int8, quantize, quantize_int8


class ExpertStore:
    """dict[name, Tensor [slots, ...]] at fixed addresses, in the memory order of the GEMM.

    For the compiled CPU kernels matrices come packed. On CPU without them a matrix [n, k] is kept as [k, n]
    (kernels/grouped_gemm.py; int8 is not, kernels/quantised.py), rewritten in the memory it was loaded into. A slot
    is the same list of contiguous tensors on every rank, so that moving an expert copies bytes and interprets none.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        slot_form: SlotForm | None = None,
        held: NDArray[np.int32] | None = None,
    ):
        """tensors: by name, [slots, ...], contiguous, named as in expert_form.SlotForm.

        slot_form: of each slot; None: of matrices that are not packed, of experts with SiLU
        held:      the expert of each slot, -1 = none, where `tensors` are all experts of the layer, [experts, ...]
        The store owns them afterwards: do not use them any more.
        """
        self._slot_form = slot_form
        slots = {tensor.shape[0] for tensor in tensors.values()}
        assert len(slots) == 1, f"tensors disagree about the number of slots: {sorted(slots)}"
        self.num_slots = slots.pop() if held is None else len(held)
        self._held = None if held is None else torch.zeros(self.num_slots, dtype=torch.int64)
        assert self._held is None or self.is_packed, "slots name experts for the compiled kernels alone"
        if held is not None:
            self.hold(held)
        self._stored = dict(tensors)
        if not self.is_packed:
            self._stored = {name: _into_gemm_order(name, tensor) for name, tensor in tensors.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    @property
    def names_experts(self) -> bool:
        """Whether slots name experts that all ranks map: then nothing is copied into them."""
        return self._held is not None

    def hold(self, experts: NDArray[np.int32]) -> None:
        """Changes the experts that the slots name, between two steps. experts: [slots], -1 = none"""
        assert self._held is not None, "slots have memory of their own"
        self._held.numpy()[:] = np.maximum(experts, 0)  # no row goes to an empty slot

    @property
    def is_packed(self) -> bool:
        """Whether the compiled CPU kernels read this store."""
        return self._slot_form is not None and self._slot_form.packed

    @cached_property
    def packed(self) -> PackedExperts:
        """The view of a packed store that the compiled CPU kernels take."""
        stored, form = self._stored, self._slot_form
        assert form is not None, "the matrices are not packed"
        assert form.packed, "the matrices are not packed"
        scales = stored.get(scale_of("gate_up")), stored.get(scale_of("down"))
        biases = self.bias("gate_up"), self.bias("down")
        sizes = form.hidden, form.width
        groups = None if form.groups is None else GroupedExperts(*form.groups, form.activations)
        weights = stored["gate_up"], stored["down"]
        return PackedExperts(*weights, *sizes, *scales, *biases, form.activation, groups, self._held)

    @property
    def activation(self) -> Activation:
        """The activation of the experts."""
        return SILU if self._slot_form is None else self._slot_form.activation

    @property
    def form(self) -> ExpertForm:
        """The form in which the weights are kept."""
        if self._slot_form is not None:
            return self._slot_form.form
        forms: dict[torch.dtype, ExpertForm] = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
        return forms.get(self._stored["gate_up"].dtype, "dense")

    @property
    def slot_bytes(self) -> int:
        """Size of one expert, in bytes."""
        return sum(math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in self._stored.values())

    @property
    def shapes(self) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
        """Name, shape [slots, ...] and dtype of each tensor: equal for stores that can exchange experts."""
        return tuple((name, tensor.shape, tensor.dtype) for name, tensor in self._stored.items())

    def matrix(self, name: str) -> Tensor:
        """Returns [slots, n, k], a view: y = x @ matrix[slot].T"""
        assert not self.is_packed, f"{name} is packed"
        stored = self._stored[name]
        return stored.transpose(1, 2) if _is_reordered(name, stored) else stored

    def scale(self, name: str) -> Tensor:
        """Returns the scales of a matrix, [slots, ...]."""
        return self._stored[scale_of(name)]

    def bias(self, name: str) -> Tensor | None:
        """Returns the biases of a matrix, [slots, n] float32; None: there are none."""
        return self._stored.get(bias_of(name))

    def block_scaled(self, name: str) -> BlockScaled:
        """Returns an FP8 matrix with its scales, a view."""
        return BlockScaled(self.matrix(name), self.scale(name), self.activation.stacks if name == "gate_up" else 1)

    def mxfp4(self, name: str) -> Mxfp4:
        """Returns a matrix in MXFP4, a view."""
        return Mxfp4(self._stored[name], self.scale(name))

    def slot(self, slot_id: int) -> dict[str, Tensor]:
        """Returns the tensors of one expert by name, as contiguous views to send from or receive into."""
        at = slot_id if self._held is None else int(self._held[slot_id])
        return {name: tensor[at] for name, tensor in self._stored.items()}

    def write_slot(self, slot_id: int, expert: Mapping[str, Tensor]) -> None:
        """Copies an expert, as `slot` of any store returns it, into a slot. Addresses do not change."""
        assert not self.names_experts, "what all ranks map is not written to"
        assert expert.keys() == self._stored.keys(), f"expert has {sorted(expert)}, the store {sorted(self._stored)}"
        for name, tensor in expert.items():
            self._stored[name][slot_id].copy_(tensor)

    def staging(self, num_slots: int) -> "ExpertStore":
        """Returns a store of the same form filled with zeros, a staging buffer for incoming experts."""
        store = ExpertStore.__new__(ExpertStore)
        store.num_slots, store._slot_form, store._held = num_slots, self._slot_form, None
        store._stored = {name: t.new_zeros(num_slots, *t.shape[1:]) for name, t in self._stored.items()}
        return store


def _is_reordered(name: str, tensor: Tensor) -> bool:
    return name in MATRICES and tensor.device.type == "cpu" and tensor.dtype not in (torch.int8, torch.uint8)


def _into_gemm_order(name: str, tensor: Tensor) -> Tensor:
    """Returns [slots, k, n] in the memory of tensor [slots, n, k], rewritten slot by slot, without a second copy."""
    assert tensor.is_contiguous(), f"{name} is not contiguous"
    if not _is_reordered(name, tensor):
        return tensor
    slots, n, k = tensor.shape
    reordered = tensor.view(slots, k, n)
    for slot in range(slots):
        reordered[slot].copy_(tensor[slot].t().clone(memory_format=torch.contiguous_format))
    return reordered


_PACKED_ALONE = "on CPUs only the compiled kernels multiply experts of four bits"


def expert_ffn(
    rows: PackedRows | MaskedRows, experts: ExpertStore, numerics: Numerics = FAST, out: Tensor | None = None
) -> Tensor:
    """Returns down(activation(gate(x), up(x))) of each row with its slot's weights, in the shape of rows.x.

    In masked rows what lies beyond a slot's count is undefined, before and after. In batch_invariant a row's bits
    depend on that row and its slot's weights only. Quantised experts quantise the rows of both products too, each row
    by itself.

    out: where results may be written, in the shape of rows.x; a product that cannot ignores it
    """
    if numerics.compiled:
        if isinstance(rows, PackedRows):
            return packed_ffn(rows.x, rows.rows_per_slot, experts.packed, out)
        out = None if out is None else out.flatten(0, 1)
        slab_rows = rows.x.shape[1]
        return packed_ffn(rows.x.flatten(0, 1), rows.rows_per_slot, experts.packed, out, slab_rows).view_as(rows.x)
    if rows.x.device.type != "cpu":
        return _gpu_ffn(rows, experts, numerics, out)
    if isinstance(rows, PackedRows):
        return _packed_ffn(rows.x, rows.rows_per_slot, experts, numerics, out)
    # Static sizes serve graphs; a CPU has none, and gathering the filled rows once is cheaper than computing all.
    filled = torch.arange(rows.x.shape[1]) < rows.rows_per_slot[:, None]
    slabs = torch.empty_like(rows.x)
    slabs[filled] = _packed_ffn(rows.x[filled], rows.rows_per_slot, experts, numerics)
    return slabs


def _packed_ffn(
    x: Tensor, counts: Tensor, experts: ExpertStore, numerics: Numerics, out: Tensor | None = None
) -> Tensor:
    """x: [rows, H], counts: [slots] int64 CPU -> [rows, H]"""
    match experts.form:
        case "dense":
            grouped = group_rows(counts, x, numerics)
            middle = _activate(grouped.gemm(x, experts.matrix("gate_up")), experts, counts)
            return _add_bias(grouped.gemm(middle, experts.matrix("down"), out), experts.bias("down"), counts)
        case "fp8":
            gate_up, down = experts.block_scaled("gate_up"), experts.block_scaled("down")
            between = grouped_gemm_fp8(*quantize(x), gate_up, counts, x.dtype, numerics)
            quantised = activate_quantize(between, experts.activation)
            return grouped_gemm_fp8(*quantised, down, counts, x.dtype, numerics)
        case "int8":
            gate_up_q, gate_up_scale = experts.matrix("gate_up"), experts.scale("gate_up")
            between = grouped_gemm_int8(*quantize_int8(x), gate_up_q, gate_up_scale, counts, torch.float32)
            middle_q, middle_scale = quantize_int8(_activate(between, experts, counts))
            results = grouped_gemm_int8(
                middle_q, middle_scale, experts.matrix("down"), experts.scale("down"), counts, x.dtype
            )
            return _add_bias(results, experts.bias("down"), counts)
        case "mxfp4" | "int4" | "groups":
            raise AssertionError(_PACKED_ALONE)


def _activate(gate_up: Tensor, experts: ExpertStore, counts: Tensor) -> Tensor:
    """Returns the input of the down projection. gate_up: [rows, stacks x I] without biases, which is used up"""
    return activate(_add_bias(gate_up, experts.bias("gate_up"), counts), experts.activation)


def _add_bias(rows: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Adds each slot's bias to its rows, in place. rows: [rows, n], bias: [slots, n], counts: [slots] CPU"""
    if bias is not None:
        rows += bias.repeat_interleave(counts, dim=0, output_size=rows.shape[0])
    return rows


def _gpu_ffn(
    rows: PackedRows | MaskedRows, experts: ExpertStore, numerics: Numerics, out: Tensor | None = None
) -> Tensor:
    """Returns the rows' results, in `out`, if given. Counts on the accelerator are never read by the host."""
    x, counts = rows.x, rows.rows_per_slot
    filled = counts if isinstance(rows, MaskedRows) else None
    match experts.form:
        case "dense":
            gate_up: Tensor | Mxfp4 = experts.matrix("gate_up")
            down: Tensor | Mxfp4 = experts.matrix("down")
        case "mxfp4":
            gate_up, down = experts.mxfp4("gate_up"), experts.mxfp4("down")
        case "fp8":
            assert experts.bias("down") is None, "no FP8 checkpoint has biases"
            assert experts.activation == SILU, "no FP8 checkpoint has another activation"
            arrived = quantize(x, filled) if rows.scale is None else (x, rows.scale)
            dtype = x.dtype if rows.scale is None else torch.bfloat16
            middle = gated_gemm_fp8(*arrived, experts.block_scaled("gate_up"), counts, numerics)
            return grouped_gemm_fp8(*middle, experts.block_scaled("down"), counts, dtype, numerics, out)
        case "int8" | "int4" | "groups":
            raise AssertionError(f"experts in {experts.form} live on CPUs")
    between = gpu_gemm(x, gate_up, counts, numerics, experts.bias("gate_up"), experts.activation)
    return gpu_gemm(between, down, counts, numerics, experts.bias("down"), out=out)
