"""Predicted time of the kernels of one rank in one step: GEMMs, attention, and the elementwise traffic between them."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.profile_files import HardwareProfile, ModelProfile

Floats = NDArray[np.float64]
Phase = Literal["decode", "prefill"]
Mode = Literal["low_latency", "normal"]  # of dispatch and combine
WIDE = 2.0  # bytes of a bf16 value


@dataclass(frozen=True)
class Batch:
    """The work of one rank in one step.

    phase:           "decode" (every token is a request's next one) or "prefill" (tokens are prompt chunks)
    tokens_per_rank: new tokens; those of a prompt that the cache holds are not among them
    context:         decode: tokens in the cache per request; prefill: length of a prompt
    two_batch:       overlap two half-batches
    cache_hit:       prefill: share of each prompt that the cache holds
    """

    phase: Phase
    tokens_per_rank: float
    context: float
    two_batch: bool = False
    cache_hit: float = 0.0

    @property
    def mode(self) -> Mode:
        """The dispatch kernels that such a batch uses."""
        return "low_latency" if self.phase == "decode" else "normal"


@dataclass(frozen=True, eq=False)
class LayerTime:
    """Seconds of the MoE part of each layer, [L]; the busiest rank sets each."""

    dispatch_s: Floats
    ffn_s: Floats
    combine_s: Floats

    @property
    def total_s(self) -> Floats:
        return self.dispatch_s + self.ffn_s + self.combine_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. `total_s` includes overlap and the engine's factor; the parts are plain sums over layers."""

    total_s: float
    attention_s: float
    dispatch_s: float
    ffn_s: float
    combine_s: float
    shared_s: float
    other_s: float


class Kernels:
    """Times of one model's kernels on one GPU.

    ranks_of_token: ranks that hold a token's experts, on average
    compute_share:  of the compute units, those that are free for compute; the rates of memory stay
    """

    def __init__(
        self, hardware: HardwareProfile, model: ModelProfile, ranks_of_token: float, compute_share: float = 1.0
    ) -> None:
        self.hardware, self.model = hardware, model
        peak = hardware.fp8_flops if model.compute == "fp8" else hardware.bf16_flops
        self.flops = compute_share * hardware.gemm_efficiency * peak
        self.hbm = hardware.hbm_efficiency * hardware.hbm_bytes_per_s
        self._attention_flops = compute_share * hardware.attention_flops
        self._bytes = {phase: elementwise_bytes(model, phase, ranks_of_token) for phase in ("decode", "prefill")}

    def grouped_gemm(self, rows: Floats, n: int, k: int, is_mean: bool = False) -> Floats:
        """Returns the time of [rows_g, k] x [k, n] over groups g: rows [..., groups] -> [...].

        is_mean: rows are means over steps, so a group with few rows is not always active, nor a tile always full
        """
        return self._gemm_seconds(self._work(rows, is_mean), n, k)

    def expert_ffn(self, rank_slot_rows: Floats, is_mean: bool = False) -> Floats:
        """Returns the time of the GEMMs of the routed experts of each rank: rows [..., K] -> [...]."""
        width, hidden, work = self.model.moe_intermediate, self.model.hidden, self._work(rank_slot_rows, is_mean)
        return self._gemm_seconds(work, 2 * width, hidden) + self._gemm_seconds(work, hidden, width)

    def _work(self, rows: Floats, is_mean: bool) -> tuple[Floats, Floats, Floats]:
        """Returns the active groups, tiles and rows, summed over groups: rows [..., groups] -> [...] each."""
        tile = self.hardware.tile_rows
        if is_mean:  # Poisson arrivals: active unless no row arrived; a started tile is half full
            active = 1 - np.exp(-rows)
            tiles = np.maximum(active, rows / tile + 0.5 * active)
        else:
            active = (rows > 0).astype(np.float64)
            tiles = np.ceil(rows / tile)
        return active.sum(axis=-1), tiles.sum(axis=-1), rows.sum(axis=-1)

    def _gemm_seconds(self, work: tuple[Floats, Floats, Floats], n: int, k: int) -> Floats:
        active, tiles, rows = work
        compute = 2.0 * n * k * self.hardware.tile_rows * tiles / self.flops
        activations = rows * (k * self.model.weight_bytes + n * 2.0)  # inputs as wide as weights, out bf16
        memory = (active * n * k * self.model.weight_bytes + activations) / self.hbm
        return np.asarray(np.sqrt(compute * compute + memory * memory))

    def expert_elementwise(self, rank_rows: Floats, batch: Batch) -> Floats:
        """Returns the time of the elementwise kernels between the GEMMs of experts: rows [...] -> [...]."""
        return rank_rows * (self._bytes[batch.phase].row / self.hbm)

    def gemm(self, rows: float, n: int, k: int) -> float:
        """Returns the time of [rows, k] x [k, n]."""
        return float(self.grouped_gemm(np.array([float(rows)]), n, k)) if n and k else 0.0

    def ffn(self, rows: float, width: int) -> float:
        """Returns the time of the GEMMs of a gated FFN."""
        return self.gemm(rows, 2 * width, self.model.hidden) + self.gemm(rows, self.model.hidden, width)

    def elementwise(self, batch: Batch) -> tuple[float, float]:
        """Returns the time of elementwise kernels on a layer's tokens: of the attention, and of the MoE part."""
        per_token = self._bytes[batch.phase]
        seconds = batch.tokens_per_rank / self.hbm
        return seconds * per_token.attention, seconds * per_token.moe

    def attention(self, batch: Batch) -> float:
        """Returns the time of the attention of one layer on one rank, without elementwise kernels.

        A prompt of which the cache holds a share attends to all of it: each new token sees the cached ones and half of
        the new ones, and MLA expands the cached latents anew.
        """
        m, tokens, context = self.model, batch.tokens_per_rank, batch.context
        new = 1 - batch.cache_hit
        kept_rows = tokens / new if batch.phase == "prefill" else tokens
        if m.attention == "mla":
            head = m.nope_dim + m.rope_dim
            shapes = [(m.kv_lora + m.rope_dim, m.hidden), (m.hidden, m.num_heads * m.v_dim)]
            shapes += (
                [(m.q_lora, m.hidden), (m.num_heads * head, m.q_lora)] if m.q_lora else [(m.num_heads * head, m.hidden)]
            )
            projections = sum(self.gemm(tokens, n, k) for n, k in shapes)
            projections += self.gemm(kept_rows, m.num_heads * (m.nope_dim + m.v_dim), m.kv_lora)
            kv_bytes = (m.kv_lora + m.rope_dim) * m.kv_bytes
            # Absorbed for decode: every head reads the latent. Expanded for prefill.
            widths = 2 * m.kv_lora + m.rope_dim if batch.phase == "decode" else head + m.v_dim
        else:
            shapes = [((m.num_heads + 2 * m.num_kv_heads) * m.head_dim, m.hidden), (m.hidden, m.num_heads * m.head_dim)]
            projections = sum(self.gemm(tokens, n, k) for n, k in shapes)
            kv_bytes = 2 * m.num_kv_heads * m.head_dim * m.kv_bytes
            widths = 2 * m.head_dim
        # Causal: a new token of a prompt sees half of the new ones on average.
        seen = context if batch.phase == "decode" else context * (batch.cache_hit + new / 2)
        flops = 2.0 * m.num_heads * widths * tokens * seen
        read = kv_bytes * (tokens * context if batch.phase == "decode" else kept_rows)
        return projections + max(flops / self._attention_flops, read / self.hardware.attention_bytes_per_s)


@dataclass(frozen=True)
class ElementwiseBytes:
    """Bytes read and written. attention, moe: for each token of the rank and layer;  row: for each row of an expert"""

    attention: float
    moe: float
    row: float


def elementwise_bytes(model: ModelProfile, phase: Phase, ranks_of_token: float) -> ElementwiseBytes:
    """Returns the bytes for each token and each expert row. ranks_of_token: ranks that hold a token's experts, mean

    Derived from the shapes of a model, each value read and written once by each kernel that engines run: adding the
    residual and normalising is one, so are quantising, embedding and concatenating the queries, concatenating the keys,
    permuting rows into the order of experts, and the activation with its quantisation. Low-latency dispatch quantises
    and orders rows itself, and its combine reduces them. For DeepSeek-V3 on 32 ranks prefill moves 0.86 MB for each
    token and MoE layer. Router scores and indices are left out: below 1 %.
    """
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
