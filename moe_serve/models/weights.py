"""Brings a rank's weights into memory: from a checkpoint, or drawn at random.

A rank holds all dense tensors and the experts of its own slots, and reads the bytes of those only. FP8 checkpoints are
dequantised as they are read: weight = stored value x scale of its block (blocks of 128 x 128; the last may be partial).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_serve.errors import ModelError
from moe_serve.models.checkpoint import DTYPES, Checkpoint
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_plan import DenseTensor, ExpertTensor, Part, dense_tensors, expert_tensors, is_ignored

if TYPE_CHECKING:
    from moe_serve.eplb.placement import Placement

Progress = Callable[[int, int], None]  # (bytes read so far, bytes to read)

NAMED_IN_A_MESSAGE = 8  # tensors of each kind; a wrong folder would name thousands


@dataclass(frozen=True)
class LoadedWeights:
    """One rank's weights, on the device.

    dense:      tensors named as in weight_plan.py
    experts:    per MoE layer (its model layer id) "gate_up" [slots_per_rank, 2 I, H], gate rows first, and "down"
                [slots_per_rank, H, I]; an empty slot holds zeros
    bytes_read: of the checkpoint, 0 for dummy weights
    """

    dense: dict[str, Tensor]
    experts: dict[int, dict[str, Tensor]]
    bytes_read: int


def load_weights(
    folder: str | Path,
    spec: ModelSpec,
    placement: "Placement",
    rank: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> LoadedWeights:
    """Returns the weights of one rank out of a folder of safetensors files.

    placement: its moe_layer_ids are those of the spec; progress: called as bytes come in
    Raises ModelError, naming all missing, unknown and mis-shaped tensors at once, or the file that is corrupt.
    """
    with Checkpoint(folder) as checkpoint:
        reader = _Reader(checkpoint, spec, dtype, device)
        reader.check()
        slots = _slots_of(placement, rank)
        if progress is not None:
            reader.report_to(progress, slots)
        dense = {plan.name: reader.dense(plan) for plan in dense_tensors(spec)}
        experts: dict[int, dict[str, Tensor]] = {layer: {} for layer in spec.moe_layer_ids}
        for plan in expert_tensors(spec):
            tensor = reader.experts(plan, slots[plan.layer_id], placement.slots_per_rank)
            experts[plan.layer_id][plan.name] = tensor
        return LoadedWeights(dense, experts, checkpoint.bytes_read)


def dummy_weights(
    spec: ModelSpec,
    placement: "Placement",
    rank: int,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
) -> LoadedWeights:
    """Returns random weights of the model's shapes, of a size that keeps activations near one.

    Every tensor is drawn from (seed, its name), so an expert has the same values on any rank and in any placement.
    """

    def draw(name: str, shape: tuple[int, ...], kind: str) -> Tensor:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.randn(shape, generator=generator, device=device)
        if kind == "matrix":
            values *= shape[-1] ** -0.5
        else:
            values *= 0.1
        if kind == "norm":
            values += 1
        return values if kind == "bias32" else values.to(dtype)

    dense = {plan.name: draw(plan.name, plan.shape, plan.kind) for plan in dense_tensors(spec)}
    slots = _slots_of(placement, rank)
    experts: dict[int, dict[str, Tensor]] = {layer: {} for layer in spec.moe_layer_ids}
    for plan in expert_tensors(spec):
        tensor = torch.zeros(placement.slots_per_rank, *plan.shape, dtype=dtype, device=device)
        for expert, places in slots[plan.layer_id].items():
            tensor[places] = draw(f"layers.{plan.layer_id}.experts.{expert}.{plan.name}", plan.shape, "matrix")
        experts[plan.layer_id][plan.name] = tensor
    return LoadedWeights(dense, experts, 0)


def _slots_of(placement: "Placement", rank: int) -> dict[int, dict[int, list[int]]]:
    """Returns the rank's local slots of each expert, {model layer id: {expert: [slot, ..]}}."""
    width = placement.slots_per_rank
    found: dict[int, dict[int, list[int]]] = {}
    for layer, row in zip(placement.moe_layer_ids, placement.physical_to_logical, strict=True):
        slots = found[layer] = {}
        for slot, expert in enumerate(row[rank * width : (rank + 1) * width].tolist()):
            if expert >= 0:
                slots.setdefault(expert, []).append(slot)
    return found


class _Reader:
    """Reads planned tensors of one checkpoint and knows which layout each expert tensor is stored in."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str):
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._progress: Progress | None = None
        self._total = 0

    def report_to(self, progress: Progress, slots: dict[int, dict[int, list[int]]]) -> None:
        """Calls `progress` from now on, with the bytes that a rank with these slots reads as the total."""
        self._progress, self._total = progress, self.num_bytes(slots)
        progress(0, self._total)

    def check(self) -> None:
        """Compares the whole checkpoint with the plan, also what other ranks will read."""
        stored = self._checkpoint.tensors
        missing: list[str] = []
        misshaped: list[str] = []
        unreadable: list[str] = []
        known: set[str] = set()
        for part in self._all_parts():
            name = self._stored_name(part)
            if name is None:
                missing.append(part.source)
                continue
            tensor = stored[name]
            scale = self._scale_name(name)
            known |= {name, scale}
            if tensor.shape != part.shape:
                misshaped.append(f"{name} {list(tensor.shape)}, expected {list(part.shape)}")
            if tensor.dtype_name not in DTYPES:
                unreadable.append(f"{name} ({tensor.dtype_name})")
            if tensor.dtype_name.startswith("F8"):
                self._check_scale(name, scale, part, missing, misshaped, unreadable)
        extra = [name for name in stored if name not in known and not is_ignored(self._spec, name)]
        problems = [
            f"{len(names)} {what}: {', '.join(names[:NAMED_IN_A_MESSAGE])}{', ..' * (len(names) > NAMED_IN_A_MESSAGE)}"
            for what, names in (
                ("missing", missing),
                ("of another shape", misshaped),
                ("of a dtype that is not supported", unreadable),
                ("unknown", extra),
            )
            if names
        ]
        if problems:
            raise ModelError(
                f"{self._checkpoint.folder}: the tensors do not fit config.json ({self._spec.model_type}): "
                f"{'; '.join(problems)}. Use the config.json and weights of one model"
            )

    def _check_scale(
        self, name: str, scale: str, part: Part, missing: list[str], misshaped: list[str], unreadable: list[str]
    ) -> None:
        block = self._spec.fp8_block
        if block is None:
            unreadable.append(f"{name} (FP8, but config.json has no quantization_config)")
            return
        stored = self._checkpoint.tensors.get(scale)
        wanted = (*part.shape[:-2], -(-part.shape[-2] // block), -(-part.shape[-1] // block))
        if stored is None:
            missing.append(scale)
        elif stored.shape != wanted:
            misshaped.append(f"{scale} {list(stored.shape)}, expected {list(wanted)}")

    def _all_parts(self) -> Iterator[Part]:
        for dense in dense_tensors(self._spec):
            yield from dense.parts
        for plan in expert_tensors(self._spec):
            yield from self._parts(plan, range(self._spec.num_logical))

    def _parts(self, plan: ExpertTensor, experts: Iterable[int]) -> Iterator[Part]:
        """Yields what is stored for these experts: the fused tensor, or their own parts."""
        if self._is_fused(plan):
            yield plan.fused
        else:
            for expert in experts:
                yield from plan.parts_of(expert)

    def _is_fused(self, plan: ExpertTensor) -> bool:
        return plan.fused.source in self._checkpoint.tensors

    def _stored_name(self, part: Part) -> str | None:
        return next((name for name in (part.source, *part.aliases) if name in self._checkpoint.tensors), None)

    @staticmethod
    def _scale_name(name: str) -> str:
        return name + "_scale_inv"

    def num_bytes(self, slots: dict[int, dict[int, list[int]]]) -> int:
        """Returns how many bytes a rank with these slots reads."""
        total = sum(self._part_bytes(part) for plan in dense_tensors(self._spec) for part in plan.parts)
        for plan in expert_tensors(self._spec):
            experts = slots[plan.layer_id]
            if self._is_fused(plan):
                total += self._part_bytes(plan.fused) // self._spec.num_logical * len(experts)
            else:
                total += sum(self._part_bytes(part) for expert in experts for part in plan.parts_of(expert))
        return total

    def _part_bytes(self, part: Part) -> int:
        name = self._stored_name(part)
        assert name is not None
        scale = self._checkpoint.tensors.get(self._scale_name(name))
        return self._checkpoint.tensors[name].num_bytes + (scale.num_bytes if scale else 0)

    def dense(self, plan: DenseTensor) -> Tensor:
        dtype = torch.float32 if plan.kind == "bias32" else self._dtype
        out = torch.empty(plan.shape, dtype=dtype, device=self._device)
        row = 0
        for part in plan.parts:
            self._read(part, out[row : row + part.shape[0]])
            row += part.shape[0]
        return out

    def experts(self, plan: ExpertTensor, slots: dict[int, list[int]], slots_per_rank: int) -> Tensor:
        """Returns [slots_per_rank, *shape] with each expert read once, in ascending order: files are read forward."""
        out = torch.zeros(slots_per_rank, *plan.shape, dtype=self._dtype, device=self._device)
        for expert in sorted(slots):
            first, *replicas = slots[expert]
            if self._is_fused(plan):
                self._read(plan.fused, out[first], expert)
            else:
                row = 0
                for part in plan.parts_of(expert):
                    self._read(part, out[first, row : row + part.shape[0]])
                    row += part.shape[0]
            for replica in replicas:
                out[replica] = out[first]
        return out

    def _read(self, part: Part, out: Tensor, expert: int | None = None) -> None:
        """Fills `out` with a stored tensor, or with one expert of a fused one."""
        name = self._stored_name(part)
        assert name is not None
        values = self._rows(name, expert)
        if values.dtype.itemsize == 1 and values.is_floating_point():
            assert self._spec.fp8_block is not None
            values = dequantise(values, self._rows(self._scale_name(name), expert), self._spec.fp8_block)
        out.copy_(values)
        if self._progress is not None:
            self._progress(self._checkpoint.bytes_read, self._total)

    def _rows(self, name: str, expert: int | None) -> Tensor:
        return self._checkpoint.read(name) if expert is None else self._checkpoint.read(name, expert, 1)[0]


def dequantise(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Returns the float32 weight of an FP8 checkpoint: each `block` x `block` square times its scale.

    values: [rows, columns] fp8;  scales: [ceil(rows / block), ceil(columns / block)], for partial blocks too
    """
    wide = scales.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]
