"""Bytes that kernels between the GEMMs move through the memory: norms, quantisation, rotary embedding, permutation.

Derived from the shapes of a model, each value read and written once by each kernel that engines run: adding the
residual and normalising is one, so are quantising, embedding and concatenating the queries, concatenating the keys,
permuting rows into the order of experts, and the activation with its quantisation. Low-latency dispatch quantises and
orders rows itself, and its combine reduces them. For DeepSeek-V3 on 32 ranks prefill moves 0.86 MB for each token and
MoE layer. Router scores and indices are left out: below 1 %.
"""

from dataclasses import dataclass
from typing import Literal

from moe_serve.eplb.cost.profile_files import ModelProfile

WIDE = 2.0  # bytes of a bf16 value


@dataclass(frozen=True)
class ElementwiseBytes:
    """Bytes read and written. attention, moe: for each token of the rank and layer;  row: for each row of an expert"""

    attention: float
    moe: float
    row: float


def elementwise_bytes(
    model: ModelProfile, phase: Literal["decode", "prefill"], ranks_of_token: float
) -> ElementwiseBytes:
    """Returns the bytes for each token and each expert row. ranks_of_token: ranks that hold a token's experts, mean"""
    m, hidden = model, model.hidden
    narrow = m.weight_bytes if m.compute == "fp8" else 0.0  # nothing to quantise where GEMMs take bf16

    def quantised(values: float) -> float:
        return values * (WIDE + narrow) if narrow else 0.0

    add_and_norm = 4 * WIDE * hidden
    if m.attention == "mla":
        queries, output = m.num_heads * (m.nope_dim + m.rope_dim), m.num_heads * m.v_dim
        keys = queries if phase == "prefill" else m.kv_lora + m.rope_dim  # expanded, or the latent that the cache takes
    else:
        queries = output = m.num_heads * m.head_dim
        keys = m.num_kv_heads * m.head_dim
    attention = add_and_norm + quantised(hidden) + 2 * WIDE * (queries + keys) + quantised(output)
    activation = m.moe_intermediate * (2 * WIDE + (narrow or WIDE))
    moe = add_and_norm + 3 * WIDE * hidden + m.num_shared * (activation + quantised(hidden))
    if phase == "decode":
        return ElementwiseBytes(attention, moe, activation)
    permute = 2 * m.dispatch_bytes * hidden
    reduce = WIDE * hidden * (1 + ranks_of_token / m.topk)
    return ElementwiseBytes(attention, moe + quantised(hidden), permute + activation + reduce)
