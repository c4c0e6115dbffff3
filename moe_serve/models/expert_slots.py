"""The slot tensors of one layer's experts while they are filled, from a checkpoint or at random."""

import math

import torch
from torch import Tensor

from moe_serve.ep.expert_form import PARTS, ExpertForm, scale_of
from moe_serve.errors import CapacityError
from moe_serve.kernels.grouped_gemm_fp8 import quantize_weight
from moe_serve.kernels.grouped_gemm_int8 import quantize_int8
from moe_serve.models.weight_plan import ExpertTensor
from moe_serve.models.weight_share import WeightShare


def empty_slots(plan: ExpertTensor, share: WeightShare, num_slots: int | None = None) -> dict[str, Tensor]:
    """Returns zeros for a matrix, and for its scales where the form has them, by name: [num_slots, ...].

    num_slots: None: those of the rank
    Raises CapacityError when the device has no memory for them.
    """
    num_slots = share.num_slots if num_slots is None else num_slots
    wanted = share.slot_form.tensors
    names = (name for name in (plan.name, scale_of(plan.name)) if name in wanted)
    slots = {}
    for name, (shape, kind) in ((name, wanted[name]) for name in names):
        try:
            slots[name] = torch.zeros(num_slots, *shape, dtype=kind, device=share.device)
        except RuntimeError as error:  # torch raises it for a lack of memory, on CPUs and on GPUs
            if "memory" not in str(error):
                raise
            size = num_slots * math.prod(shape) * kind.itemsize
            raise CapacityError(
                f"{num_slots} expert slots of one layer take {size / 2**30:.2f} GiB for {name} alone, more than "
                f"{share.device} has left; lower eplb.num_redundant_experts, or use more ranks"
            ) from None
    return slots


def put_expert(slots: dict[str, Tensor], slot_ids: list[int], name: str, form: ExpertForm, values: Tensor) -> None:
    """Writes one expert's matrix into its slots, in the form of the slots.

    slots: as empty_slots returned them;  values: [n, k] float
    """
    first, *replicas = slot_ids
    match form:
        case "dense":
            slots[name][first].copy_(values)
        case "int8":
            put_rows(slots, first, name, 0, *quantize_int8(values))
        case "fp8":
            weight = quantize_weight(values[None], PARTS[name])
            slots[name][first].copy_(weight.q[0])
            slots[scale_of(name)][first].copy_(weight.scale[0])
    copy_to_replicas(slots, first, replicas)


def put_rows(slots: dict[str, Tensor], slot: int, name: str, first_row: int, q: Tensor, scale: Tensor) -> None:
    """Writes rows of a quantised matrix and their scales.

    q: [rows, k], whole stacks of the matrix from first_row on;  scale: int8 [rows], fp8 [block rows, block columns]
    """
    rows, scales = slots[name][slot], slots[scale_of(name)][slot]
    # Each stack has the same number of rows and of block rows.
    first_scale = first_row * len(scales) // len(rows)
    rows[first_row : first_row + len(q)].copy_(q)
    scales[first_scale : first_scale + len(scale)].copy_(scale)


def copy_to_replicas(slots: dict[str, Tensor], slot: int, replicas: list[int]) -> None:
    """Copies one slot to other slots."""
    for tensor in slots.values():
        for replica in replicas:
            tensor[replica].copy_(tensor[slot])
