"""Which projections of an FP8 checkpoint keep their values and scales under the compiled CPU kernels. Torch-free."""

import math

from moe_serve.kernels.forms import FP8_GROUP
from moe_serve.models.attention_spec import GqaSpec
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_plan import DenseTensor

_PROJECTIONS = ("qkv", "q_kv_a", "q_b", "o", "gate_up", "down", "shared_gate_up", "shared_down")


def keeps_projection(spec: ModelSpec, plan: DenseTensor) -> bool:
    """Returns whether the kernels take a dense tensor as it is stored, where all its parts are FP8.

    A block of scales holds rows of one part only, and those that are reordered for the rotation stay in it.
    """
    block, name = spec.fp8_block, plan.name.rpartition(".")[2]
    if block is None or not block.is_kept or name not in _PROJECTIONS:
        return False
    if block.by_channel:
        return True
    if name.endswith("gate_up"):  # of which the kernel takes two stacks of blocks
        return len(plan.parts) == 2 or plan.shape[0] // 2 % FP8_GROUP == 0
    return all(part.shape[0] % FP8_GROUP == 0 for part in plan.parts[:-1]) and _rotation_keeps_blocks(spec, name)


def _rotation_keeps_blocks(spec: ModelSpec, name: str) -> bool:
    if spec.rope.interleaved or name not in ("qkv", "q_kv_a", "q_b"):  # nothing is reordered
        return True
    attention = spec.attention
    if isinstance(attention, GqaSpec):
        return FP8_GROUP % attention.head_dim == 0
    return all(size % attention.rope_dim == 0 for size in (FP8_GROUP, attention.query_dim, attention.latent_dim))


def scale_bytes(spec: ModelSpec, plan: DenseTensor) -> int:
    """Returns the size of the float32 scales of a projection that is kept."""
    block = spec.fp8_block
    assert block is not None
    return 4 * sum(
        part.shape[0] if block.by_channel else math.prod(block.num_scales(*part.shape)) for part in plan.parts
    )
