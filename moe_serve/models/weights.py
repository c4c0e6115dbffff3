"""Loads a rank's weights from a checkpoint, or draws them at random.

A rank holds all dense tensors and the experts of its own slots, and reads only their bytes. Experts are kept in the
form of `model.expert_weights` (ep/expert_form.py), everything else in the compute dtype; for the compiled CPU kernels,
matrices in the dtype of the checkpoint (stored_weights.py). Experts are packed one by one while they are loaded, so
that a rank's experts are in memory once.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_serve.ep.expert_form import SlotForm
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.models.checkpoint import Checkpoint
from moe_serve.models.expert_slots import copy_to_replicas, empty_slots, filling, put_matrix
from moe_serve.models.weight_plan import DenseTensor, ExpertTensor, dense_tensors, expert_tensors
from moe_serve.models.weight_reader import Progress, WeightReader
from moe_serve.models.weight_share import WeightShare


@dataclass(frozen=True)
class LoadedWeights:
    """One rank's weights, on the device.

    dense:      tensors named as in weight_plan.py, with "NAME_scale" of those in FP8
    experts:    per MoE layer (its model layer id) the tensors of expert_form.SlotForm, [slots_per_rank, ...]:
                "gate_up", "down", their scales and biases; an empty slot holds zeros
    slot_form:  of the experts' slots
    bytes_read: of the checkpoint, 0 for dummy weights
    """

    dense: dict[str, Tensor]
    experts: dict[int, dict[str, Tensor]]
    slot_form: SlotForm
    bytes_read: int

    def store(self, layer_id: int) -> ExpertStore:
        """Returns the experts of a layer as its MoE layer keeps them; takes them out, since the store owns them."""
        return ExpertStore(self.experts.pop(layer_id), self.slot_form)


def load_weights(folder: str | Path, share: WeightShare, progress: Progress | None = None) -> LoadedWeights:
    """Returns the weights of one rank out of a folder of safetensors files.

    progress: called as bytes are read
    Raises ModelError, naming all missing, unknown and mis-shaped tensors at once, or the file that is corrupt.
    """
    spec = share.spec
    with Checkpoint(folder) as checkpoint:
        reader = WeightReader(checkpoint, share)
        reader.check()
        if progress is not None:
            reader.report_to(progress)
        dense: dict[str, Tensor] = {}
        for dense_plan in dense_tensors(spec):
            dense |= reader.dense(dense_plan)
        experts: dict[int, dict[str, Tensor]] = {layer: {} for layer in spec.moe_layer_ids}
        for plan in expert_tensors(spec):
            experts[plan.layer_id] |= reader.experts(plan)
        return LoadedWeights(dense, experts, share.slot_form, checkpoint.bytes_read)


def dummy_weights(share: WeightShare, seed: int = 0) -> LoadedWeights:
    """Returns random weights of the model's shapes, of a size that keeps activations near one.

    Every tensor is drawn from (seed, its name), so an expert has the same values on any rank and in any placement; a
    quantised form rounds those of the dense one.
    """
    spec, weights = share.spec, DummyWeights(share, seed)
    dense = {plan.name: weights.dense(plan) for plan in dense_tensors(spec)}
    experts: dict[int, dict[str, Tensor]] = {layer: {} for layer in spec.moe_layer_ids}
    for plan in expert_tensors(spec):
        tensors = empty_slots(plan, share)
        for expert, slot_ids in share.slots[plan.layer_id].items():
            weights.put_expert(plan, expert, tensors, slot_ids)
        experts[plan.layer_id] |= tensors
    return LoadedWeights(dense, experts, share.slot_form, 0)


@dataclass(frozen=True)
class DummyWeights:
    """Draws single tensors; see `dummy_weights`."""

    share: WeightShare
    seed: int

    def dense(self, plan: DenseTensor) -> Tensor:
        """Returns a dense tensor on the device."""
        return self._draw(plan.name, plan.shape, plan.kind, self.share.dense_dtype(plan))

    def expert(self, plan: ExpertTensor, expert: int) -> dict[str, Tensor]:
        """Returns one expert of a matrix, and its scales where the form has them, by name: [1, ...]."""
        out = empty_slots(plan, self.share, num_slots=1)
        self.put_expert(plan, expert, out, [0])
        return out

    def put_expert(self, plan: ExpertTensor, expert: int, slots: dict[str, Tensor], slot_ids: list[int]) -> None:
        """Writes one expert of a matrix into these slots."""
        name = f"layers.{plan.layer_id}.experts.{expert}.{plan.name}"
        first, *replicas = slot_ids
        with filling(plan, self.share, slots, first) as (tensors, slot):
            values = self._draw(name, plan.shape, plan.kind, torch.float32)
            put_matrix(tensors, slot, plan.name, self.share.form, values)
        copy_to_replicas(slots, first, replicas)

    def _draw(self, name: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        device = self.share.device
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.randn(shape, generator=generator, device=device)
        if kind == "matrix":
            values *= shape[-1] ** -0.5
        else:
            values *= 0.1
        if kind == "norm":
            values += 1
        return values.to(dtype)
