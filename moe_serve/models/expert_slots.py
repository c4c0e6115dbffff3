"""The slot tensors of one layer's experts while they are filled, from a checkpoint or at random."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from moe_serve.ep.expert_form import PARTS, ExpertForm, SlotForm, scale_of
from moe_serve.errors import CapacityError
from moe_serve.kernels.cpu.packed import pack, pack_gate_up
from moe_serve.kernels.fp8 import quantize_weight
from moe_serve.kernels.huge_pages import zeros_in_huge_pages
from moe_serve.kernels.int8 import quantize_int8
from moe_serve.kernels.mxfp4 import quantise_mxfp4
from moe_serve.models.weight_plan import ExpertTensor
from moe_serve.models.weight_share import WeightShare


def empty_slots(plan: ExpertTensor, share: WeightShare, num_slots: int | None = None) -> dict[str, Tensor]:
    """Returns zeros for a matrix, and for its scales where the form has them, by name: [num_slots, ...].

    num_slots: None: those of the rank
    Raises CapacityError when the device has no memory for them.
    """
    return _zeros(plan, share.slot_form, share.num_slots if num_slots is None else num_slots, share.device)


@contextmanager
def filling(
    plan: ExpertTensor, share: WeightShare, slots: dict[str, Tensor], slot: int
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Yields where to write one expert's matrix of [n, k] and its scales, or its biases: (tensors, slot).

    That is the slot itself, or a temporary expert which is packed into the slot afterwards.
    """
    if not share.slot_form.packed or plan.kind != "matrix":
        yield slots, slot
        return
    one = _zeros(plan, replace(share.slot_form, packed=False), 1, share.device)
    yield one, 0
    pack_matrix = pack_gate_up if plan.name == "gate_up" else pack
    pack_matrix(one.pop(plan.name)[0], slots[plan.name][slot])
    for name, scale in one.items():
        if share.form == "mxfp4":  # its kernel reads scales in the order of the weights
            pack_matrix(scale[0], slots[name][slot])
        else:
            slots[name][slot].copy_(scale[0])


def _zeros(plan: ExpertTensor, form: SlotForm, num_slots: int, device: torch.device | str) -> dict[str, Tensor]:
    wanted = form.tensors
    names = (name for name in (plan.name, scale_of(plan.name)) if name in wanted)
    slots = {}
    for name, (shape, kind) in ((name, wanted[name]) for name in names):
        try:
            slots[name] = zeros_in_huge_pages((num_slots, *shape), kind, device)
        except RuntimeError as error:  # for a lack of memory, on CPUs and on GPUs
            if "memory" not in str(error):
                raise
            size = num_slots * math.prod(shape) * kind.itemsize
            raise CapacityError(
                f"{num_slots} expert slots of one layer take {size / 2**30:.2f} GiB for {name} alone, more than "
                f"{device} has left; lower eplb.num_redundant_experts, or use more ranks"
            ) from None
    return slots


def put_matrix(slots: dict[str, Tensor], slot: int, name: str, form: ExpertForm, values: Tensor) -> None:
    """Writes one expert's matrix, [n, k] float, or biases [n] into a slot that is not packed, in the slots' form."""
    if name not in PARTS:
        slots[name][slot].copy_(values)
        return
    match form:
        case "dense":
            slots[name][slot].copy_(values)
        case "int8":
            put_rows(slots, slot, name, 0, *quantize_int8(values.float()))
        case "fp8":
            by_channel = slots[scale_of(name)][slot].dim() == 1
            weight = quantize_weight(values[None], PARTS[name], by_channel)
            slots[name][slot].copy_(weight.q[0])
            slots[scale_of(name)][slot].copy_(weight.scale[0])
        case "mxfp4":
            put_mxfp4(slots, slot, name, *quantise_mxfp4(values))


def put_mxfp4(slots: dict[str, Tensor], slot: int, name: str, blocks: Tensor, scales: Tensor) -> None:
    """Writes one expert's matrix in MXFP4 into a slot that is not packed.

    blocks: [n, k / 32, 16] uint8;  scales: [n, k / 32] uint8
    """
    slots[name][slot].copy_(blocks.flatten(-2))
    slots[scale_of(name)][slot].copy_(scales)


def put_rows(slots: dict[str, Tensor], slot: int, name: str, first_row: int, q: Tensor, scale: Tensor) -> None:
    """Writes rows of a quantised matrix and their scales.

    q:     [rows, k], whole stacks of the matrix from first_row on
    scale: int8 and fp8 by channel [rows], other fp8 [block rows, block columns]
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
