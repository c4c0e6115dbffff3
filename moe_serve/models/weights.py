"""Loads a rank's weights: from a checkpoint, or drawn at random; single experts also later, while the rank serves.

A rank holds all dense tensors and the experts of its own slots, and reads only their bytes. Where the ranks of a host
share one copy (weight_file.py), each reads a part of it. Experts are kept in the
form of `model.expert_weights` (ep/expert_form.py), everything else in the compute dtype; for the compiled CPU kernels,
matrices in the dtype of the checkpoint (weight_share.py). Experts are packed one by one while they are loaded, so that
a rank's experts are in memory once.

Matrices in groups of four to eight bits (kernels/group_quantised.py) are read as they are stored, or dequantised.

FP8 tensors are stored as e4m3 with a scale for every square block (128 x 128; the last of a row or column may be
partial), for every row or for the whole tensor. Dense tensors are dequantised as they are read, to float32 for the
compiled CPU kernels; experts are converted to the form of their slots.

All numbers are checked for NaN and Inf as they are read, in one pass over what has just come into the cache of the CPU:
one bad number in an expert that few requests choose would fail those requests much later.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.ep.expert_form import MATRICES, SlotForm, scale_of
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.errors import CapacityError, ModelError
from moe_serve.kernels.cpu.packed import pack, pack_gate_up, pack_groups, pack_groups_gate_up
from moe_serve.kernels.forms import INT4, Fp8Block
from moe_serve.kernels.group_quantised import (
    Activations,
    GroupQuantised,
    GroupRows,
    quantise_groups,
    shapes_alone,
    stack,
)
from moe_serve.kernels.huge_pages import zeros_in_huge_pages
from moe_serve.kernels.packed_memory import OWN_MEMORY, PackedMemory
from moe_serve.kernels.quantised import dequantise_mxfp4, quantise_mxfp4, quantize_int8, quantize_weight
from moe_serve.models.checkpoint import BLOCK_DTYPES, Checkpoint
from moe_serve.models.checkpoint_parts import CheckpointParts
from moe_serve.models.gguf_blocks import dequantise_blocks, groups_of, mxfp4_blocks
from moe_serve.models.model_files import shown
from moe_serve.models.weight_plan import DenseTensor, ExpertTensor, Part, dense_tensors, expert_tensors
from moe_serve.models.weight_share import WeightShare

Progress = Callable[[int, int], None]  # (bytes read so far, bytes to read)
Dense = Tensor | GroupRows


@dataclass(frozen=True)
class LoadedWeights:
    """One rank's weights, on the device.

    dense:      tensors named as in weight_plan.py, with "NAME_scale" of those in FP8; GroupRows of those in groups
    experts:    per MoE layer (its model layer id) the tensors of expert_form.SlotForm, [slots_per_rank, ...]:
                "gate_up", "down", their scales and biases; an empty slot holds zeros
    slot_forms: of the experts' slots, per MoE layer
    bytes_read: of the checkpoint, 0 for dummy weights
    activations: what dense tensors in groups are multiplied with
    memory:     takes the packed forms of dense tensors
    held:       the expert of each of the rank's slots, by layer, where `experts` are all, [num_logical, ...]
    """

    dense: dict[str, Dense]
    experts: dict[int, dict[str, Tensor]]
    slot_forms: dict[int, SlotForm]
    bytes_read: int
    activations: Activations = "float"
    memory: PackedMemory = OWN_MEMORY
    held: Mapping[int, NDArray[np.int32]] | None = None

    def store(self, layer_id: int) -> ExpertStore:
        """Returns the experts of a layer as its MoE layer keeps them; takes them out, since the store owns them."""
        held = None if self.held is None else self.held[layer_id]
        return ExpertStore(self.experts.pop(layer_id), self.slot_forms[layer_id], held)


def load_weights(
    folder: str | Path, share: WeightShare, progress: Progress | None = None, room: "ExpertRoom | None" = None
) -> LoadedWeights:
    """Returns the weights of one rank out of a folder of safetensors files.

    progress: called as bytes are read;  room: for experts, None: new memory
    Raises ModelError, naming all missing, unknown and mis-shaped tensors at once, or the file that is corrupt.
    """
    with Checkpoint(folder) as checkpoint:
        reader = CheckpointWeights(checkpoint, share)
        reader.check()
        total = reader.num_bytes()

        def report() -> None:
            if progress is not None:
                progress(checkpoint.bytes_read, total)

        report()
        dense, experts = _load(reader, share, report, room)
        return LoadedWeights(dense, experts, share.slot_forms, checkpoint.bytes_read, share.activations)


def dummy_weights(share: WeightShare, seed: int = 0, room: "ExpertRoom | None" = None) -> LoadedWeights:
    """Returns random weights of the model's shapes, of a size that keeps activations near one.

    Every tensor is drawn from (seed, its name), so an expert has the same values on any rank and in any placement; a
    quantised form rounds those of the dense one.
    """
    dense, experts = _load(DummyWeights(share, seed), share, lambda: None, room)
    return LoadedWeights(dense, experts, share.slot_forms, 0)


def no_weights(share: WeightShare) -> LoadedWeights:
    """Returns the tensors of a share with their shapes alone: its device is meta."""
    dense: dict[str, Dense] = {}
    for plan in dense_tensors(share.spec):
        dense[plan.name] = _shape_alone(plan, share)
        if not share.dense_groups(plan) and share.dense_dtype(plan) == torch.float8_e4m3fn:
            dense[scale_of(plan.name)] = torch.empty(share.dense_scales(plan), device=share.device)
    experts = {
        layer: {
            name: torch.empty(share.num_slots, *shape, dtype=dtype, device=share.device)
            for name, (shape, dtype) in form.tensors.items()
        }
        for layer, form in share.slot_forms.items()
    }
    return LoadedWeights(dense, experts, share.slot_forms, 0, share.activations)


def _shape_alone(plan: DenseTensor, share: WeightShare) -> Dense:
    if forms := share.dense_groups(plan):
        parts = zip(forms, plan.parts, strict=True)
        return GroupRows.of([shapes_alone(form, *part.shape) for form, part in parts])
    return torch.empty(plan.shape, dtype=share.dense_dtype(plan), device=share.device)


class WeightSource(Protocol):
    """Gives single tensors: CheckpointWeights, DummyWeights."""

    def dense(self, plan: DenseTensor) -> Mapping[str, Dense]:
        """Returns a dense tensor on the device, and the scales of one that is kept in FP8, by name."""
        ...

    def put_expert(self, plan: ExpertTensor, expert: int, one: dict[str, Tensor]) -> None:
        """Writes one expert of a matrix, [n, k], and its scales where the form has them, or biases [n], into `one`."""
        ...


ExpertRoom = Callable[[ExpertTensor], dict[str, Tensor]]  # gives what `empty_slots` does for a matrix


def _load(
    source: WeightSource, share: WeightShare, report: Callable[[], None], room: ExpertRoom | None
) -> tuple[dict[str, Dense], dict[int, dict[str, Tensor]]]:
    """Returns `dense` and `experts` of LoadedWeights. report: called after each dense tensor and each expert

    Every expert is read once, in ascending order, so that files are read forward.
    """
    dense: dict[str, Dense] = {}
    for dense_plan in dense_tensors(share.spec) if share.has_dense else ():
        dense |= source.dense(dense_plan)
        report()
    experts: dict[int, dict[str, Tensor]] = {layer: {} for layer in share.spec.moe_layer_ids}
    for plan in expert_tensors(share.spec):
        tensors = empty_slots(plan, share, share.num_slots) if room is None else room(plan)
        for expert, (first, *replicas) in sorted(share.slots[plan.layer_id].items()):
            with _filling(plan, share, tensors, first) as one:
                source.put_expert(plan, expert, one)
            for tensor in tensors.values():
                for replica in replicas:
                    tensor[replica].copy_(tensor[first])
            report()
        experts[plan.layer_id] |= tensors
    return dense, experts


# ---- single experts, while the rank serves


@dataclass(frozen=True)
class ExpertToRead:
    """layer_row: of the placement;  slot: of the rank's own, counted from 0"""

    layer_row: int
    expert: int
    slot: int


@dataclass(frozen=True)
class ExpertReloader:
    """Reads experts that were lost with their ranks, with the bits that they were loaded with at start.

    share:  form and dtype in which the rank keeps experts; its placement does not matter
    folder: of the checkpoint; None: dummy weights, drawn again from the seed
    """

    share: WeightShare
    folder: Path | None
    seed: int = 0

    def read(self, experts: Sequence[ExpertToRead], stores: Sequence[ExpertStore]) -> None:
        """Writes experts into slots of their layers' stores, which belong to the rows of the placement in order.

        One expert at a time is held beside the slots.
        Raises ModelError, naming the file, when it cannot be read; slots that were not reached keep what they held.
        """
        if experts:
            with self.opened() as read:
                read(experts, stores)

    @contextmanager
    def opened(self) -> Iterator[Callable[[Sequence[ExpertToRead], Sequence[ExpertStore]], None]]:
        """Gives `read` for many calls, between which the files stay open. Raises as that does."""
        if self.folder is None:
            yield partial(self._copy, DummyWeights(self.share, self.seed))
            return
        with self._naming_the_folder():
            checkpoint = Checkpoint(self.folder)
        with checkpoint:
            yield partial(self._copy, CheckpointWeights(checkpoint, self.share))

    @contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        try:
            yield
        except (OSError, KeyError) as error:  # the files were whole at the start, and have changed since
            raise ModelError(
                f"{self.folder}: an expert cannot be read again ({error}); restore the checkpoint"
            ) from None

    def _copy(self, source: "WeightSource", experts: Sequence[ExpertToRead], stores: Sequence[ExpertStore]) -> None:
        plans: dict[int, list[ExpertTensor]] = {}
        for plan in expert_tensors(self.share.spec):
            plans.setdefault(plan.layer_id, []).append(plan)
        layer_ids = self.share.spec.moe_layer_ids
        for each in sorted(experts, key=lambda each: (each.layer_row, each.expert)):
            store = stores[each.layer_row]
            tensors = {name: tensor[None] for name, tensor in store.slot(each.slot).items()} if store.is_packed else {}
            for plan in plans[layer_ids[each.layer_row]]:
                if not store.is_packed:  # the store keeps them in another order
                    tensors |= empty_slots(plan, self.share, 1)
                with self._naming_the_folder(), _filling(plan, self.share, tensors, 0) as one:
                    source.put_expert(plan, each.expert, one)
            if not store.is_packed:
                store.write_slot(each.slot, ExpertStore(tensors, self.share.slot_form).slot(0))


# ---- sources


@dataclass(frozen=True)
class DummyWeights:
    """Draws single tensors; see `dummy_weights`."""

    share: WeightShare
    seed: int

    def dense(self, plan: DenseTensor) -> dict[str, Tensor]:
        values, dtype = self._draw(plan.name, plan.shape, plan.kind), self.share.dense_dtype(plan)
        if dtype != torch.float8_e4m3fn:
            return {plan.name: values.to(dtype)}
        stacks = 2 if plan.name.endswith("gate_up") else 1
        scales = self.share.dense_scales(plan)
        weight = quantize_weight(values[None], stacks, by_channel=len(scales) == 1)
        return {plan.name: weight.q[0], scale_of(plan.name): weight.scale[0]}

    def put_expert(self, plan: ExpertTensor, expert: int, one: dict[str, Tensor]) -> None:
        name = f"layers.{plan.layer_id}.experts.{expert}.{plan.name}"
        _put_matrix(one, plan.name, self.share.slot_form_of(plan.layer_id), self._draw(name, plan.shape, plan.kind))

    def _draw(self, name: str, shape: tuple[int, ...], kind: str) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        device = self.share.device
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.randn(shape, generator=generator, device=device)
        if kind == "choices":  # of each token as many experts as it has, side by side
            first = torch.randint(self.share.spec.num_logical, (shape[0], 1), generator=generator, device=device)
            return ((first + torch.arange(shape[1], device=device)) % self.share.spec.num_logical).float()
        values *= shape[-1] ** -0.5 if kind == "matrix" else 0.1
        return values + 1 if kind == "norm" else values


class CheckpointWeights:
    """Reads the planned tensors of one checkpoint, with experts stored one by one or fused."""

    def __init__(self, checkpoint: Checkpoint, share: WeightShare):
        self._checkpoint = checkpoint
        self._share = share
        self._spec = share.spec
        self._parts = CheckpointParts(share.spec, checkpoint.tensors)

    def check(self) -> None:
        """Compares the whole checkpoint with the plan, including what other ranks read.

        Raises ModelError with all missing, unknown, mis-shaped and unreadable tensors.
        """
        self._parts.check(self._checkpoint.folder, keeps_fp8=self._share.form == "fp8")

    def num_bytes(self) -> int:
        """Returns how many bytes the rank reads."""
        dense = dense_tensors(self._spec) if self._share.has_dense else ()
        total = sum(self._parts.num_bytes(part) for plan in dense for part in plan.parts)
        for plan in expert_tensors(self._spec):
            experts = self._share.slots[plan.layer_id]
            num_bytes = sum(self._parts.num_bytes(part) for part in self._parts.parts(plan, experts))
            is_fused = self._parts.is_fused(plan)
            total += num_bytes // self._spec.num_logical * len(experts) if is_fused else num_bytes
        return total

    def dense(self, plan: DenseTensor) -> Mapping[str, Dense]:
        if self._share.dense_groups(plan):
            return {plan.name: GroupRows.of([self._in_groups(part, None) for part in plan.parts])}
        out = torch.empty(plan.shape, dtype=self._share.dense_dtype(plan), device=self._share.device)
        if plan.in_heads:
            keys, values = (self._rows(part.source, None) for part in plan.parts)
            out.copy_(torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1))
            return {plan.name: out}
        scales, row = [], 0
        for part in plan.parts:
            rows = out[row : row + part.shape[0]]
            row += part.shape[0]
            if out.dtype == torch.float8_e4m3fn:
                values, of_part = self._stored_fp8(part, None)
                rows.copy_(values)
                scales.append(of_part)
            else:
                self._read(part, rows)
        if plan.plus_one:
            out += 1
        return {plan.name: out, scale_of(plan.name): torch.cat(scales)} if scales else {plan.name: out}

    def put_expert(self, plan: ExpertTensor, expert: int, one: dict[str, Tensor]) -> None:
        is_fused = self._parts.is_fused(plan)
        if is_fused and not plan.is_own_form:
            if plan.mxfp4_scale is not None and self._share.form == "mxfp4":
                _put_mxfp4(one, plan.name, *self._stored_mxfp4(plan, plan.mxfp4_scale, expert))
            else:
                form = self._share.slot_form_of(plan.layer_id)
                _put_matrix(one, plan.name, form, self._brought_into_form(plan, expert))
            return
        if plan.kind == "matrix" and self._share.form == "groups":
            which = expert if is_fused else None
            weights = [self._in_groups(part, which) for part in self._parts.parts(plan, (expert,))]
            _pack_in_groups(plan.name, self._share.slot_form_of(plan.layer_id), stack(weights), one)
            return
        row = 0
        for part in self._parts.parts(plan, (expert,)):
            if plan.kind == "bias":
                self._read(part, one[plan.name][row : row + part.shape[0]])
                row += part.shape[0]
            else:
                self._put_part(part, expert if is_fused else None, one, plan.name, row)
                row += part.shape[-2]

    def _put_part(self, part: Part, expert: int | None, one: dict[str, Tensor], name: str, row: int) -> None:
        """Writes stored rows of one expert from `row` of its matrix on, in the form of the slots."""
        match self._share.form:
            case "dense" | "int4":
                self._read(part, one[name][row : row + part.shape[-2]], expert)
            case "int8":
                values = torch.empty(part.shape[-2:])
                self._read(part, values, expert)
                _put_rows(one, name, row, *quantize_int8(values))
            case "fp8":
                _put_rows(one, name, row, *self._stored_fp8(part, expert))
            case "mxfp4":
                _put_rows(one, name, row, *self._mxfp4_rows(part))
            case "groups":
                raise AssertionError(f"{part.source} comes in groups, whole")

    def _brought_into_form(self, plan: ExpertTensor, expert: int) -> Tensor:
        """Returns one expert of a fused tensor in another form than ours: [n, k], or biases [n]."""
        if plan.mxfp4_scale is not None:
            return dequantise_mxfp4(*self._stored_mxfp4(plan, plan.mxfp4_scale, expert))
        values = self._rows(plan.fused[0].source, expert)
        return _gate_above_up(plan, values.t() if plan.transposed else values)

    def _stored_mxfp4(self, plan: ExpertTensor, scale: Part, expert: int) -> tuple[Tensor, Tensor]:
        """Returns the blocks and scales of one expert as they are stored, rows of gate before those of up."""
        blocks, scales = self._rows(plan.fused[0].source, expert), self._rows(scale.source, expert)
        if int(scales.max()) == _MXFP4_NAN:
            raise self._not_finite(scale.source, expert)
        return _gate_above_up(plan, blocks), _gate_above_up(plan, scales)

    def _mxfp4_rows(self, part: Part) -> tuple[Tensor, Tensor]:
        """Returns codes [rows, k / 2] and scales [rows, k / 32] of a matrix of a GGUF file, in the order of gpt-oss."""
        assert self._checkpoint.tensors[part.source].dtype_name == "MXFP4", f"{part.source} is not in MXFP4"
        codes, scales = mxfp4_blocks(self._checkpoint.read(part.source))
        if int(scales.max()) == _MXFP4_NAN:
            raise self._not_finite(part.source, None)
        return codes, scales

    def _in_groups(self, part: Part, expert: int | None) -> GroupQuantised:
        """Returns the codes and scales of a stored matrix, or of one expert of a fused one."""
        name = self._parts.stored_name(part)
        assert name is not None
        if (packed := self._parts.packed.get(name)) is not None:
            weight = packed.groups(part.shape[1], self._checkpoint.read)
        else:
            raw = self._checkpoint.read(name) if expert is None else self._checkpoint.read(name, expert, 1)[0]
            weight = groups_of(raw, self._checkpoint.tensors[name].dtype_name)
        scales = weight.scale, weight.minimum, weight.super_scale, weight.super_minimum
        if not all(each is None or all_finite(each, self._share.dtype) for each in scales):
            raise self._not_finite(name if packed is None else next(packed.tensors), expert)
        return weight

    def _read(self, part: Part, out: Tensor, expert: int | None = None) -> None:
        """Fills `out` with a stored tensor, or with one expert of a fused one."""
        name = self._parts.stored_name(part)
        assert name is not None
        if (packed := self._parts.packed.get(name)) is not None:
            values = packed.values(part.shape[1], self._checkpoint.read)
            if not all_finite(values, self._share.dtype):
                raise self._not_finite(next(packed.tensors), expert)
            out.copy_(values)
            return
        values = self._rows(name, expert)
        if values.dtype.itemsize == 1 and values.is_floating_point():
            values = dequantise(values, self._scales(name, values, expert), self._fp8_block)
        out.copy_(values)

    def _stored_fp8(self, part: Part, expert: int | None) -> tuple[Tensor, Tensor]:
        """Returns the values of an FP8 tensor and its scales as slots have them: [block rows, block columns] or [n]."""
        name = self._parts.stored_name(part)
        assert name is not None
        values = self._rows(name, expert)
        scales = self._scales(name, values, expert)
        return values, scales.expand(len(values), 1).flatten() if self._fp8_block.by_channel else scales

    @property
    def _fp8_block(self) -> Fp8Block:
        assert self._spec.fp8_block is not None
        return self._spec.fp8_block

    def _scales(self, name: str, values: Tensor, expert: int | None) -> Tensor:
        """Returns the scales of FP8 values [rows, columns] as float32, [block rows, block columns]."""
        return self._rows(self._parts.scale_name(name), expert).float().view(self._fp8_block.num_scales(*values.shape))

    def _rows(self, name: str, expert: int | None) -> Tensor:
        """Returns a stored tensor, or one expert of a fused one. Raises ModelError for numbers that are not finite."""
        stored = self._checkpoint.tensors[name]
        dtype_name = stored.dtype_name
        if expert is None:
            rows = self._checkpoint.read(name)
        elif self._spec.expert_names.form == "flat":
            num_rows = stored.shape[0] // self._spec.num_logical
            rows = self._checkpoint.read(name, expert * num_rows, num_rows)
        else:
            rows = self._checkpoint.read(name, expert, 1)[0]
        if dtype_name in BLOCK_DTYPES:
            rows = dequantise_blocks(rows, dtype_name)
        if not all_finite(rows, self._share.dtype):
            raise self._not_finite(name, expert)
        return rows

    def _not_finite(self, name: str, expert: int | None) -> ModelError:
        of_expert = "" if expert is None else f" of expert {expert}"
        return ModelError(
            f"{self._checkpoint.tensors[name].path}: tensor {shown(name)[1:-1]} holds numbers{of_expert} that are not "
            f"finite in {str(self._share.dtype).removeprefix('torch.')} (NaN or Inf), so no answer could be computed; "
            "download the file again, or convert the model again"
        )


_MXFP4_NAN = 255  # of scales; blocks have no such values
_FIRST_NOT_FINITE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}  # without the sign


def all_finite(values: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether all stored numbers are finite in a dtype. Takes one pass, and no memory beside the values."""
    if not values.is_floating_point() or not values.numel():
        return True
    if values.dtype.itemsize == 1:  # of which each sign's numbers are in the order of their bytes, with NaN last
        first = _FIRST_NOT_FINITE[values.dtype]
        as_signed, as_unsigned = values.view(torch.int8), values.view(torch.uint8)
        return int(as_signed.max()) < first and int(as_unsigned.max()) < first + 128
    low, high = (float(edge) for edge in torch.aminmax(values))  # NaN where there is one
    largest = torch.finfo(dtype).max
    return -largest <= low and high <= largest


def dequantise(values: Tensor, scales: Tensor, block: Fp8Block) -> Tensor:
    """Returns the float32 weight of an FP8 checkpoint: each block times its scale.

    values: [rows, columns] fp8;  scales: float32, block.num_scales(rows, columns), for partial blocks too
    """
    for dim, edge in enumerate((block.rows, block.columns)):
        if edge is not None:  # else there is one scale, which multiplies all
            scales = scales.repeat_interleave(edge, dim)
    return values.float() * scales[: values.shape[0], : values.shape[1]]


def _gate_above_up(plan: ExpertTensor, rows: Tensor) -> Tensor:
    """Returns the rows of a matrix, those of gate before those of up where they alternate in the checkpoint."""
    return torch.cat((rows[0::2], rows[1::2])) if plan.interleaved else rows


# ---- slots of one layer's experts


def empty_slots(plan: ExpertTensor, share: WeightShare, num_slots: int) -> dict[str, Tensor]:
    """Returns zeros for a matrix, and for its scales where the form has them, by name: [num_slots, ...].

    Raises CapacityError when the device has no memory for them.
    """
    return _zeros(plan, share.slot_form_of(plan.layer_id), num_slots, share.device)


def _zeros(plan: ExpertTensor, form: SlotForm, num_slots: int, device: torch.device | str) -> dict[str, Tensor]:
    wanted = form.tensors
    slots = {}
    for name in (plan.name, scale_of(plan.name)):
        if name not in wanted:
            continue
        shape, dtype = wanted[name]
        try:
            slots[name] = zeros_in_huge_pages((num_slots, *shape), dtype, device)
        except RuntimeError as error:  # for a lack of memory, on CPUs and on GPUs
            if "memory" not in str(error):
                raise
            size = num_slots * math.prod(shape) * dtype.itemsize
            raise CapacityError(
                f"{num_slots} expert slots of one layer take {size / 2**30:.2f} GiB for {name} alone, more than "
                f"{device} has left; lower eplb.num_redundant_experts, or use more ranks"
            ) from None
    return slots


@contextmanager
def _filling(
    plan: ExpertTensor, share: WeightShare, slots: dict[str, Tensor], slot: int
) -> Iterator[dict[str, Tensor]]:
    """Gives the tensors of one expert to write: [n, k] and its scales, or biases [n].

    They are the slot itself, in form groups as it is packed, or temporary ones which are packed into the slot
    afterwards; of int4 a matrix in float32, which is quantised then.
    """
    of_slot, form = {name: tensor[slot] for name, tensor in slots.items()}, share.slot_form_of(plan.layer_id)
    if not form.packed or plan.kind != "matrix" or form.form == "groups":
        yield of_slot
        return
    if form.form == "int4":
        values = torch.zeros(plan.shape)
        yield {plan.name: values}
        _pack_in_groups(plan.name, form, quantise_groups(values, INT4), of_slot)
        return
    plain = _zeros(plan, replace(form, packed=False), 1, share.device)
    one = {name: tensor[0] for name, tensor in plain.items()}
    yield one
    pack_matrix = pack_gate_up if form.stacks(plan.name) == 2 else pack
    for name, tensor in one.items():
        if name == plan.name or share.form == "mxfp4":  # whose kernel reads scales in the order of the weights
            pack_matrix(tensor, of_slot[name])
        else:
            of_slot[name].copy_(tensor)


def _pack_in_groups(name: str, form: SlotForm, weight: GroupQuantised, of_slot: dict[str, Tensor]) -> None:
    (pack_groups_gate_up if form.stacks(name) == 2 else pack_groups)(weight, of_slot[name])


def _put_matrix(one: dict[str, Tensor], name: str, form: SlotForm, values: Tensor) -> None:
    """Writes one expert's matrix, [n, k] float, or biases [n], in the slots' form."""
    if name not in MATRICES:
        one[name].copy_(values)
        return
    match form.form:
        case "dense" | "int4":
            one[name].copy_(values)
        case "int8":
            _put_rows(one, name, 0, *quantize_int8(values.float()))
        case "fp8":
            weight = quantize_weight(values[None], form.stacks(name), by_channel=form.by_channel)
            one[name].copy_(weight.q[0])
            one[scale_of(name)].copy_(weight.scale[0])
        case "mxfp4":
            _put_mxfp4(one, name, *quantise_mxfp4(values))
        case "groups":
            raise AssertionError("nothing is rounded to a checkpoint's groups")


def _put_mxfp4(one: dict[str, Tensor], name: str, blocks: Tensor, scales: Tensor) -> None:
    """Writes one expert's matrix in MXFP4. blocks: [n, k / 32, 16] uint8;  scales: [n, k / 32] uint8"""
    one[name].copy_(blocks.flatten(-2))
    one[scale_of(name)].copy_(scales)


def _put_rows(one: dict[str, Tensor], name: str, first_row: int, q: Tensor, scale: Tensor) -> None:
    """Writes rows of a quantised matrix and their scales.

    q:     [rows, k], whole stacks of the matrix from first_row on
    scale: int8 and fp8 by channel [rows], other fp8 [block rows, block columns]
    """
    rows, scales = one[name], one[scale_of(name)]
    # Each stack has the same number of rows and of block rows.
    first_scale = first_row * len(scales) // len(rows)
    rows[first_row : first_row + len(q)].copy_(q)
    scales[first_scale : first_scale + len(scale)].copy_(scale)
