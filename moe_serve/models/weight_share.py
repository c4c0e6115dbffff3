"""The part of a model's weights that one rank holds or reads, and the form in which it holds them.

The compiled CPU kernels keep weights as the checkpoint stores them: bfloat16 stays bfloat16. Widening a bfloat16 to
float32 is exact, so kernels that widen what they read compute what float32 weights would give, from half the memory.
The same holds for the FP8 of experts and of most projections; other FP8 is dequantised to float32. Dense experts of an
MXFP4 checkpoint are bfloat16, also exactly. Vectors (norms, biases) are always float32.

Projections, embeddings and the head that are stored in groups (GGUF, GPTQ, AWQ, compressed-tensors) stay in them. What
is small (routers, gates of shared experts), what the absorbed form of MLA cuts into heads (kv_b), and columns that
act-order scatters over groups are widened to float32.

GPUs that have e4m3 keep projections of FP8 checkpoints as well, and multiply them with rows in FP8, as experts.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from moe_serve.ep.expert_form import ExpertForm, SlotForm
from moe_serve.kernels.cpu.packed import group_packed_size
from moe_serve.kernels.forms import FP8_GROUP, GroupForm
from moe_serve.kernels.group_quantised import Activations
from moe_serve.models.checkpoint import BLOCK_DTYPES, all_tensors, has_weights
from moe_serve.models.checkpoint_parts import PACKED, CheckpointParts
from moe_serve.models.spec import GqaSpec, MlaSpec, ModelSpec
from moe_serve.models.weight_plan import DenseTensor, dense_tensors, expert_tensors

if TYPE_CHECKING:
    from moe_serve.eplb.placement import Placement


@dataclass(frozen=True)
class StoredWeights:
    """The dtypes in which weights are kept as stored.

    dense:      bfloat16, float32, or float8_e4m3fn with its scales, of each tensor by its name in weight_plan.py that
                is not in groups
    experts:    bfloat16 or float32, of experts in form dense
    keeps_fp8:  whether all experts are stored in e4m3 with scales that the kernels take
    groups:     where all experts are stored in groups: the forms of gate_up and of down, by model layer id
    dense_groups: of each dense tensor that is kept in groups: the form of each of its parts
    widened:    dense matrices whose codes are widened to float32
    """

    dense: Mapping[str, torch.dtype]
    experts: torch.dtype
    keeps_fp8: bool
    groups: Mapping[int, tuple[GroupForm, GroupForm]] = field(default_factory=dict)
    dense_groups: Mapping[str, tuple[GroupForm, ...]] = field(default_factory=dict)
    widened: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: ModelSpec, folder: Path | None) -> Self:
        """Returns them for a checkpoint; without one (None, or a folder without weights) as config.json suggests.

        Raises ModelError where a file cannot be read.
        """
        if folder is None or not has_weights(folder):
            return cls._as_configured(spec)
        return cls._as_read(spec, CheckpointParts(spec, all_tensors(folder)))

    @classmethod
    def _as_configured(cls, spec: ModelSpec) -> Self:
        is_bfloat16 = spec.checkpoint_dtype == "bfloat16" and spec.fp8_block is None  # FP8 is dequantised to float32
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        dense = {plan.name: dtype if plan.kind == "matrix" else torch.float32 for plan in dense_tensors(spec)}
        experts = torch.bfloat16 if spec.experts_in_mxfp4 else dtype
        return cls(dense, experts, keeps_fp8=spec.fp8_block is not None and spec.fp8_block.is_kept)

    @classmethod
    def _as_read(cls, spec: ModelSpec, parts: CheckpointParts) -> Self:
        dense, in_groups, widened = {}, _dense_groups(spec, parts), []
        for plan in dense_tensors(spec):
            names = parts.dtype_names(plan.parts) if plan.kind == "matrix" else set()
            is_fp8 = names == {"F8_E4M3"} and _keeps_projection(spec, plan)
            dense[plan.name] = torch.float8_e4m3fn if is_fp8 else _kept(names)
            if names & {PACKED, *BLOCK_DTYPES} and plan.name not in in_groups:
                widened.append(plan.name)
        for name in [name for name in dense if name.endswith("gate_up") and name not in in_groups]:
            down = name.removesuffix("gate_up") + "down"
            if dense[name] != dense[down]:  # one kernel reads both, as the same dtype
                dense[name] = dense[down] = torch.float32
        experts: set[str] = set()
        is_kept = spec.fp8_block is not None and spec.fp8_block.is_kept
        for matrix in (plan for plan in expert_tensors(spec) if plan.kind == "matrix"):
            is_kept &= not (parts.is_fused(matrix) and parts.mixes_gate_and_up(matrix))
            stored = parts.parts(matrix, range(spec.num_logical))
            experts |= {"BF16"} if matrix.mxfp4_scale is not None else parts.dtype_names(stored)
        keeps_fp8 = is_kept and experts == {"F8_E4M3"}
        return cls(dense, _kept(experts), keeps_fp8, _expert_groups(spec, parts), in_groups, tuple(widened))

    @property
    def dense_meaning(self) -> str:
        """Returns in words how dense layers in groups are kept; "" where the checkpoint has none."""
        if not self.dense_groups and not self.widened:
            return ""
        kept = f"{len(self.dense_groups)} matrices keep the checkpoint's own codes and scales"
        names = Counter(name.rpartition(".")[2] for name in self.widened)
        widened = ", ".join(f"{name} of {count} layers" if count > 1 else name for name, count in names.items())
        return f"{kept}; widened to float32: {widened}" if widened else kept


def _kept(dtype_names: set[str]) -> torch.dtype:
    """Returns bfloat16 where all of a tensor is stored in it, else float32, since no value is rounded."""
    return torch.bfloat16 if dtype_names == {"BF16"} else torch.float32


def _expert_groups(spec: ModelSpec, parts: CheckpointParts) -> dict[int, tuple[GroupForm, GroupForm]]:
    """Returns the forms of gate_up and of down in each layer; nothing where some experts are stored otherwise."""
    found: dict[int, dict[str, GroupForm]] = {layer: {} for layer in spec.moe_layer_ids}
    for matrix in (plan for plan in expert_tensors(spec) if plan.kind == "matrix"):
        stored = {parts.group_form(part) for part in parts.parts(matrix, range(spec.num_logical))}
        form = stored.pop()
        if stored or form is None or matrix.mxfp4_scale is not None:
            return {}
        found[matrix.layer_id][matrix.name] = form
    return {layer: (forms["gate_up"], forms["down"]) for layer, forms in found.items()}


def _dense_groups(spec: ModelSpec, parts: CheckpointParts) -> dict[str, tuple[GroupForm, ...]]:
    """Returns the forms of the parts of each dense tensor that stays in groups."""
    found: dict[str, tuple[GroupForm, ...]] = {}
    for plan in dense_tensors(spec):
        forms = tuple(parts.group_form(part) for part in plan.parts)
        if plan.name.rpartition(".")[2] in (*_PROJECTIONS, "embed", "lm_head") and None not in forms:
            found[plan.name] = tuple(form for form in forms if form is not None)
    for name in [name for name in found if name.endswith("gate_up")]:  # one kernel reads them and down
        if name.removesuffix("gate_up") + "down" not in found or len(set(found[name])) > 1:
            del found[name]
    downs = [name for name in found if name.endswith("down")]
    return {
        name: forms
        for name, forms in found.items()
        if name not in downs or name.removesuffix("down") + "gate_up" in found
    }


_PROJECTIONS = (
    "qkv", "q_kv_a", "q_b", "o", "gate_up", "down", "shared_gate_up", "shared_down", "delta_in", "delta_out",
    "conv_in", "conv_out", "mamba_in", "mamba_out", "lightning_in", "lightning_out",
    "latent_in", "latent_out", "selective_in", "selective_out", "attend_in", "index_q_b",
)  # fmt: skip


def _keeps_projection(spec: ModelSpec, plan: DenseTensor) -> bool:
    """Returns whether the kernels take a dense tensor as it is stored, where all its parts are FP8.

    A block of scales holds rows of one part only, and those that are reordered for the rotation stay in it.
    """
    block, name = spec.fp8_block, plan.name.rpartition(".")[2]
    if block is None or not block.is_kept or name not in _PROJECTIONS:
        return False
    attention = spec.attention
    if name == "qkv" and isinstance(attention, GqaSpec) and attention.value_dim is not None:  # whose rows are padded
        return False
    if block.by_channel:
        return True
    if name.endswith("gate_up"):  # of which the kernel takes a stack of blocks for each of both
        return len(plan.parts) == spec.activation.stacks or plan.shape[0] // 2 % FP8_GROUP == 0
    return all(part.shape[0] % FP8_GROUP == 0 for part in plan.parts[:-1]) and _rotation_keeps_blocks(spec, name)


def fp8_projections(spec: ModelSpec, folder: Path | None) -> frozenset[str]:
    """Returns the names of the dense tensors that a GPU multiplies in FP8, as StoredWeights.of reads them.

    Without a checkpoint all are in FP8 that may be.
    """
    if spec.fp8_block is None or not spec.fp8_block.is_kept:
        return frozenset()
    if folder is not None and has_weights(folder):
        stored = StoredWeights.of(spec, folder)
        return frozenset(name for name, dtype in stored.dense.items() if dtype == torch.float8_e4m3fn)
    kept = {plan.name for plan in dense_tensors(spec) if plan.kind == "matrix" and _keeps_projection(spec, plan)}
    ups = {name.removesuffix("down") + "gate_up": name for name in kept if name.endswith("down")}
    return frozenset(kept - {down for gate_up, down in ups.items() if gate_up not in kept})


def _rotation_keeps_blocks(spec: ModelSpec, name: str) -> bool:
    attention = spec.attention
    if name == "lightning_in":  # whose rows are brought into another order
        return False
    has_gate = isinstance(attention, GqaSpec) and attention.has_gate
    if name not in ("qkv", "q_kv_a", "q_b") or (spec.rope.interleaved and not has_gate):  # nothing is reordered
        return True
    if isinstance(attention, GqaSpec):
        return not has_gate and FP8_GROUP % attention.head_dim == 0
    assert isinstance(attention, MlaSpec), "no other attention reorders its rows"
    return all(size % attention.rope_dim == 0 for size in (FP8_GROUP, attention.query_dim, attention.latent_dim))


@dataclass(frozen=True)
class WeightShare:
    """All dense tensors, and the experts of the rank's own slots.

    As what a rank reads of a copy that several share it may lack dense tensors, which another one reads.

    placement: its moe_layer_ids are those of the spec
    dtype:     of everything but quantised experts, and of what `stored` says
    form:      of the experts
    stored:    for the compiled CPU kernels, which take matrices as they are stored, and experts packed; None: others
    activations: what weights in groups are multiplied with
    fp8_dense: names of dense tensors that a GPU keeps in FP8
    """

    spec: ModelSpec
    placement: "Placement"
    rank: int
    dtype: torch.dtype
    device: torch.device | str
    form: ExpertForm = "dense"
    stored: StoredWeights | None = None
    activations: Activations = "float"
    has_dense: bool = True
    fp8_dense: frozenset[str] = frozenset()

    @property
    def slot_form(self) -> SlotForm:
        """Returns the form of one slot; of the largest where layers differ."""
        if self.form != "groups":
            return self.slot_form_of(0)
        return max(map(self.slot_form_of, self.spec.moe_layer_ids), key=lambda form: form.num_bytes)

    @property
    def slot_forms(self) -> dict[int, SlotForm]:
        """Returns the form of one slot by MoE layer of the model."""
        return {layer: self.slot_form_of(layer) for layer in self.spec.moe_layer_ids}

    def slot_form_of(self, layer_id: int) -> SlotForm:
        """Returns the form of one slot of a layer of the model."""
        dtype = self.dtype if self.stored is None else self.stored.experts
        spec, packed = self.spec, self.stored is not None
        return SlotForm(
            self.form,
            spec.expert_hidden,
            spec.moe_intermediate,
            dtype,
            packed,
            by_channel=self.form == "fp8" and spec.fp8_block is not None and spec.fp8_block.by_channel,
            has_bias=spec.expert_bias,
            activation=spec.activation,
            activations=self.activations,
            stored_groups=self.stored.groups[layer_id] if self.form == "groups" and self.stored is not None else None,
        )

    def dense_groups(self, plan: DenseTensor) -> tuple[GroupForm, ...]:
        """Returns the form of each part of a dense tensor that the rank keeps in groups; () where it does not."""
        return () if self.stored is None else self.stored.dense_groups.get(plan.name, ())

    def dense_dtype(self, plan: DenseTensor) -> torch.dtype:
        """Returns the dtype in which the rank keeps a dense tensor that is not in groups."""
        if plan.kind in ("bias32", "choices"):
            return torch.float32
        if self.stored is not None:
            return self.stored.dense[plan.name]
        return torch.float8_e4m3fn if plan.name in self.fp8_dense else self.dtype

    def dense_scales(self, plan: DenseTensor) -> tuple[int, ...]:
        """Returns the shape of the scales of a dense tensor that the rank keeps in FP8."""
        block, shapes = self.spec.fp8_block, [part.shape for part in plan.parts]
        assert block is not None
        if block.by_channel:
            return (sum(shape[0] for shape in shapes),)
        return sum(block.num_scales(*shape)[0] for shape in shapes), block.num_scales(*shapes[0])[1]

    @property
    def dense_bytes(self) -> dict[str, int]:
        """Returns the size of each dense tensor by its name, with its scales."""
        sizes = {}
        for plan in dense_tensors(self.spec):
            if forms := self.dense_groups(plan):
                rows = zip(plan.parts, forms, strict=True)
                sizes[plan.name] = sum(group_packed_size(part.shape[0], part.shape[1], form) for part, form in rows)
                continue
            dtype = self.dense_dtype(plan)
            sizes[plan.name] = math.prod(plan.shape) * dtype.itemsize
            if dtype == torch.float8_e4m3fn:
                sizes[plan.name] += 4 * math.prod(self.dense_scales(plan))
        return sizes

    @property
    def num_slots(self) -> int:
        """Returns the slots of the rank, per layer."""
        return self.placement.slots_per_rank

    @cached_property
    def slots(self) -> dict[int, dict[int, list[int]]]:
        """Returns the rank's local slots of each expert, {model layer id: {expert: [slot, ..]}}."""
        first, end = self.rank * self.num_slots, (self.rank + 1) * self.num_slots
        found: dict[int, dict[int, list[int]]] = {}
        for layer, row in zip(self.placement.moe_layer_ids, self.placement.physical_to_logical, strict=True):
            slots = found[layer] = {}
            for slot, expert in enumerate(row[first:end].tolist()):
                if expert >= 0:
                    slots.setdefault(expert, []).append(slot)
        return found
