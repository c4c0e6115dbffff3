"""Predicted time of the kernels of one rank in one step: GEMMs, attention, and the elementwise traffic between them.

Of other engines the kernels follow from the shapes of the model (`Kernels`), of ours from its recorded launches
(`RecordedKernels`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.profile_files import EngineProfile, HardwareProfile, ModelProfile
from moe_serve.eplb.cost.step_record import Amounts, KernelRecord, Layers, ModelSteps, total
from moe_serve.eplb.load import Phase

Floats = NDArray[np.float64]
Mode = Literal["low_latency", "normal"]  # of dispatch and combine
WIDE = 2.0  # bytes of a bf16 value


@dataclass(frozen=True)
class Batch:
    """The work of one rank in one step.

    phase:           "decode" (every token is a request's next one), "prefill" (tokens are prompt chunks) or "mixed"
    tokens_per_rank: new tokens; those of a prompt that the cache holds are not among them
    context:         decode: tokens in the cache per request; others: length of a prompt
    two_batch:       overlap two half-batches
    cache_hit:       prefill: share of each prompt that the cache holds
    tokens_per_request: decode: a request's next one, and drafts behind it; its cached tokens are read once for them
    decode_share, decode_context: mixed: share of the tokens that decode, and tokens in the cache of their requests
    attention_ranks: ranks that share attention: each has a part of the heads, for the tokens of all of them
    """

    phase: Phase
    tokens_per_rank: float
    context: float
    two_batch: bool = False
    cache_hit: float = 0.0
    tokens_per_request: float = 1.0
    decode_share: float = 0.0
    decode_context: float = 0.0
    attention_ranks: int = 1

    @property
    def parts(self) -> tuple["Batch", ...]:
        """What it is of each phase."""
        if self.phase != "mixed":
            return (self,)
        decoding = self.tokens_per_rank * self.decode_share
        return (
            replace(self, phase="prefill", tokens_per_rank=self.tokens_per_rank - decoding),
            replace(self, phase="decode", tokens_per_rank=decoding, context=self.decode_context),
        )

    @property
    def mode(self) -> Mode:
        """The dispatch kernels that such a batch uses."""
        return "low_latency" if self.phase == "decode" else "normal"

    @property
    def kept_rows(self) -> float:
        """Tokens of prompts, with those that the cache holds; of a batch of one phase."""
        return self.tokens_per_rank / (1 - self.cache_hit) if self.phase == "prefill" else self.tokens_per_rank

    @property
    def tokens_of_request(self) -> float:
        """Tokens over requests, where requests choose experts alike.

        Mixed: as many prompts as would make a batch of prompts differ as much; decodes hardly do.
        """
        if self.phase == "decode":
            return self.tokens_per_request
        prompts = 1.0 if self.phase == "prefill" else 1 - self.decode_share
        return max(self.context * (1 - self.cache_hit), 1.0) * prompts

    @property
    def sampled(self) -> float:
        """Rows of which the rank computes logits."""
        return sum(
            part.tokens_per_rank / (1 if part.phase == "decode" else max(part.context, 1)) for part in self.parts
        )


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


class StepKernels(Protocol):
    """Seconds of a model's kernels on one GPU: in one layer where nothing else is said.

    hbm: bytes/s that kernels reach
    """

    hbm: float

    def attention_part(self, batch: Batch) -> float:
        """Returns the seconds of attention, with its norm and projections."""
        ...

    def gate_part(self, batch: Batch) -> float:
        """Returns those of a MoE layer's tokens beside its experts: norm, router, sums."""
        ...

    def shared_part(self, batch: Batch) -> float:
        """Returns those of the shared expert."""
        ...

    def dense_part(self, batch: Batch) -> float:
        """Returns those of a layer without experts beside its attention."""
        ...

    def expert_part(self, rank_slot_rows: Floats, batch: Batch, is_mean: bool = False) -> Floats:
        """Returns those of the routed experts of each rank: rows [..., K] -> [...]. is_mean: as of `tiled_work`"""
        ...

    def vocabulary_part(self, batch: Batch) -> float:
        """Returns those of embedding and logits, once in a step."""
        ...

    def dispatch_s(self, batch: Batch) -> float:
        """Returns those of a dispatch beside the time of its rows on links."""
        ...

    def combine_s(self, batch: Batch) -> float:
        """Returns those of a combine likewise."""
        ...

    def host_s(self, batch: Batch) -> float:
        """Returns the seconds in which the host starts the kernels of a step, while others run."""
        ...


def tiled_work(rows: Floats, tile: int, is_mean: bool) -> tuple[Floats, Floats, Floats]:
    """Returns the active groups, tiles and rows, summed over groups: rows [..., groups] -> [...] each.

    is_mean: rows are means over steps, so a group with few rows is not always active, nor a tile always full
    """
    if is_mean:  # Poisson arrivals: active unless no row arrived; a started tile is half full
        active = 1 - np.exp(-rows)
        tiles = np.maximum(active, rows / tile + 0.5 * active)
    else:
        active = np.minimum(rows, 1.0)  # a replica with half of a token has it in half of the steps
        tiles = np.where(rows < 1, rows, np.ceil(rows / tile))
    return active.sum(axis=-1), tiles.sum(axis=-1), rows.sum(axis=-1)


def gemm_flops(hardware: HardwareProfile, compute: str) -> float:
    """Returns the FLOP/s that large grouped GEMMs reach: compute "fp4", "fp8" or "bf16"."""
    peaks = {"fp4": hardware.fp4_flops or hardware.fp8_flops, "fp8": hardware.fp8_flops, "bf16": hardware.bf16_flops}
    return hardware.gemm_efficiency * peaks[compute]


class Kernels(StepKernels):
    """Times of one model's kernels on one GPU, as engines run them whose kernels are published.

    ranks_of_token: ranks that hold a token's experts, on average
    compute_share:  of the compute units, those that are free for compute; the rates of memory stay
    """

    def __init__(
        self, hardware: HardwareProfile, model: ModelProfile, ranks_of_token: float, compute_share: float = 1.0
    ) -> None:
        self.hardware, self.model = hardware, model
        self.flops = compute_share * gemm_flops(hardware, model.compute)
        self._expert_flops = compute_share * gemm_flops(hardware, model.expert_compute or model.compute)
        self.hbm = hardware.hbm_efficiency * hardware.hbm_bytes_per_s
        faster = hardware.fp8_flops / hardware.bf16_flops if model.attention_compute == "fp8" else 1.0
        self._attention_flops = compute_share * hardware.attention_flops * faster
        self._bytes = {phase: elementwise_bytes(model, phase, ranks_of_token) for phase in ("decode", "prefill")}

    def attention_part(self, batch: Batch) -> float:
        return self.attention(batch) + self.elementwise(batch)[0] + self.shared_tokens_s(batch)

    def shared_tokens_s(self, batch: Batch) -> float:
        """Returns the time on links of what ranks that share attention exchange around it.

        Each gathers the tokens of the others before, and the sums of all heads' outputs for its own tokens behind: an
        all-gather and a reduce-scatter, together the bytes of an all-reduce.
        """
        each_way = (batch.attention_ranks - 1) * batch.tokens_per_rank * self.model.hidden * WIDE
        return 2 * each_way / (self.hardware.link_bytes_per_s * self.hardware.link_efficiency)

    def gate_part(self, batch: Batch) -> float:
        return self.elementwise(batch)[1]

    def shared_part(self, batch: Batch) -> float:
        return self.ffn(batch.tokens_per_rank, self.model.num_shared * self.model.moe_intermediate)

    def dense_part(self, batch: Batch) -> float:
        return self.elementwise(batch)[1] + self.ffn(batch.tokens_per_rank, self.model.dense_intermediate)

    def expert_part(self, rank_slot_rows: Floats, batch: Batch, is_mean: bool = False) -> Floats:
        return self.expert_ffn(rank_slot_rows, is_mean) + self.expert_elementwise(rank_slot_rows.sum(axis=-1), batch)

    def vocabulary_part(self, batch: Batch) -> float:
        return self.gemm(batch.sampled, self.model.vocab, self.model.hidden)

    def dispatch_s(self, batch: Batch) -> float:
        return self.hardware.dispatch_latency_s

    def combine_s(self, batch: Batch) -> float:
        return self.hardware.combine_latency_s

    def host_s(self, batch: Batch) -> float:
        return 0.0  # in the engine's factor

    def grouped_gemm(self, rows: Floats, n: int, k: int, is_mean: bool = False) -> Floats:
        """Returns the time of [rows_g, k] x [k, n] over groups g: rows [..., groups] -> [...].

        is_mean: as of `tiled_work`
        """
        work = tiled_work(rows, self.hardware.tile_rows, is_mean)
        return self._gemm_seconds(work, n, k, self.flops, self.model.weight_bytes)

    def expert_ffn(self, rank_slot_rows: Floats, is_mean: bool = False) -> Floats:
        """Returns the time of the GEMMs of the routed experts of each rank: rows [..., K] -> [...]."""
        width, hidden = self.model.moe_intermediate, self.model.hidden
        work = tiled_work(rank_slot_rows, self.hardware.tile_rows, is_mean)
        rates = self._expert_flops, self.model.expert_weight_bytes or self.model.weight_bytes
        return self._gemm_seconds(work, 2 * width, hidden, *rates) + self._gemm_seconds(work, hidden, width, *rates)

    def _gemm_seconds(
        self, work: tuple[Floats, Floats, Floats], n: int, k: int, flops: float, weight_bytes: float
    ) -> Floats:
        active, tiles, rows = work
        compute = 2.0 * n * k * self.hardware.tile_rows * tiles / flops
        activations = rows * (k * weight_bytes + n * 2.0)  # inputs as wide as weights, out bf16
        memory = (active * n * k * weight_bytes + activations) / self.hbm
        return np.asarray(np.sqrt(compute * compute + memory * memory))

    def expert_elementwise(self, rank_rows: Floats, batch: Batch) -> Floats:
        """Returns the time of the elementwise kernels between the GEMMs of experts: rows [...] -> [...]."""
        return rank_rows * (self._bytes_of(batch).row / self.hbm)

    def gemm(self, rows: float, n: int, k: int) -> float:
        """Returns the time of [rows, k] x [k, n]."""
        return float(self.grouped_gemm(np.array([float(rows)]), n, k)) if n and k else 0.0

    def ffn(self, rows: float, width: int) -> float:
        """Returns the time of the GEMMs of a gated FFN."""
        return self.gemm(rows, 2 * width, self.model.hidden) + self.gemm(rows, self.model.hidden, width)

    def elementwise(self, batch: Batch) -> tuple[float, float]:
        """Returns the time of elementwise kernels on a layer's tokens: of the attention, and of the MoE part."""
        seconds = sum(part.tokens_per_rank * self._bytes[part.phase].attention for part in batch.parts) / self.hbm
        return seconds, batch.tokens_per_rank * self._bytes_of(batch).moe / self.hbm

    def _bytes_of(self, batch: Batch) -> "ElementwiseBytes":
        """Returns the bytes around the dispatch kernels that a batch uses."""
        return self._bytes["decode" if batch.mode == "low_latency" else "prefill"]

    def attention(self, batch: Batch) -> float:
        """Returns the time of the attention of one layer on one rank, without elementwise kernels.

        A prompt of which the cache holds a share attends to all of it: each new token sees the cached ones and half of
        the new ones, and MLA expands the cached latents anew. Prompts and decodes of one batch are projected together;
        the core of their attention is a kernel for each. Ranks that share attention each compute the latents of MLA for
        all their tokens, and read them all from the cache.
        """
        m, ranks = self.model, batch.attention_ranks
        tokens, heads = ranks * batch.tokens_per_rank, m.num_heads // ranks
        if m.attention == "mla":
            head = m.nope_dim + m.rope_dim
            shapes = [(m.kv_lora + m.rope_dim, m.hidden), (m.hidden, heads * m.v_dim)]
            shapes += [(m.q_lora, m.hidden), (heads * head, m.q_lora)] if m.q_lora else [(heads * head, m.hidden)]
            projections = sum(self.gemm(tokens, n, k) for n, k in shapes)
            kept_rows = ranks * sum(part.kept_rows for part in batch.parts)
            projections += self.gemm(kept_rows, heads * (m.nope_dim + m.v_dim), m.kv_lora)
        else:
            projections = sum(self.gemm(tokens, n, k) for n, k in m.gqa_projections(ranks))
        return projections + sum(self._attention_core(part) for part in batch.parts)

    def _attention_core(self, batch: Batch) -> float:
        """Returns the time of attention behind the projections, of a batch of one phase."""
        m, context, decodes, ranks = self.model, batch.context, batch.phase == "decode", batch.attention_ranks
        if m.attention == "mla":
            kv_bytes = (m.kv_lora + m.rope_dim) * m.kv_bytes
            # Absorbed for decode: every head reads the latent. Expanded for prefill.
            widths = 2 * m.kv_lora + m.rope_dim if decodes else m.nope_dim + m.rope_dim + m.v_dim
        else:
            kv_bytes = 2 * m.kv_heads_of(ranks) * m.head_dim * m.kv_bytes
            widths = 2 * m.head_dim
        # Causal: a new token of a prompt sees half of the new ones on average.
        seen = context if decodes else context * (1 + batch.cache_hit) / 2
        seen = min(seen, m.attended or seen)
        flops = 2.0 * m.num_heads * widths * batch.tokens_per_rank * seen
        rows = batch.tokens_per_rank / batch.tokens_per_request * seen if decodes else batch.kept_rows
        read = ranks * kv_bytes * rows
        return max(flops / self._attention_flops, read / self.hardware.attention_bytes_per_s)


class RecordedKernels(StepKernels):
    """Times of our kernels on one GPU, from their recorded launches, bytes and FLOP.

    Rates are those that published kernels reach, as of `Kernels`; each launch adds a time of its own. What a dispatch
    or a combine takes beside its rows is no less than for the published kernels.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        steps: ModelSteps,
        num_ranks: int,
        ranks_of_token: float,
        engine: EngineProfile,
        compute_share: float = 1.0,
    ) -> None:
        """ranks_of_token, compute_share: as of `Kernels`"""
        self.hardware, self.steps, self.num_ranks, self.engine = hardware, steps, num_ranks, engine
        self._ranks_of_token = ranks_of_token
        self.hbm = hardware.hbm_efficiency * hardware.hbm_bytes_per_s
        reached = compute_share * hardware.gemm_efficiency
        self._flops = {
            "bf16": reached * hardware.bf16_flops,
            "fp8": reached * hardware.fp8_flops,
            "attention": compute_share * hardware.attention_flops,
        }

    def attention_part(self, batch: Batch) -> float:
        layers = self.steps.sizes["num_layers"]
        return self._seconds(batch, "attention", ("moe", "dense")) / layers

    def gate_part(self, batch: Batch) -> float:
        return self._seconds(batch, "gate", ("moe",)) / self._moe_layers

    def shared_part(self, batch: Batch) -> float:
        return self._seconds(batch, "mlp", ("moe",)) / self._moe_layers

    def dense_part(self, batch: Batch) -> float:
        others = self.steps.sizes["num_layers"] - self.steps.sizes["num_moe_layers"]
        return self._seconds(batch, "mlp", ("dense",)) / max(others, 1)

    def expert_part(self, rank_slot_rows: Floats, batch: Batch, is_mean: bool = False) -> Floats:
        tile = self.hardware.tile_rows
        active, tiles, rows = tiled_work(rank_slot_rows, tile, is_mean)
        filled = {**self._amounts(batch), "row": rows, "expert": active}
        computed = {**filled, "row": tile * tiles}
        kernels = self._kernels(batch, "experts", ("moe",))
        seconds = sum(each.times * self._kernel_seconds(each, filled, computed) for each in kernels)
        return np.broadcast_to(np.asarray(seconds, dtype=np.float64) / self._moe_layers, rows.shape)

    def vocabulary_part(self, batch: Batch) -> float:
        return self._seconds(batch, "vocabulary", ("none",)) + self._seconds(batch, "other", ("none",))

    def dispatch_s(self, batch: Batch) -> float:
        ours = self._seconds(batch, "dispatch", ("moe",)) / self._moe_layers
        return ours if self.num_ranks == 1 else max(ours, self.hardware.dispatch_latency_s)

    def combine_s(self, batch: Batch) -> float:
        ours = self._seconds(batch, "combine", ("moe",)) / self._moe_layers
        return ours if self.num_ranks == 1 else max(ours, self.hardware.combine_latency_s)

    def host_s(self, batch: Batch) -> float:
        if batch.phase == "decode":  # one graph
            return 0.0
        amounts = self._amounts(batch)
        kernels = self.steps.step(batch.phase, self.num_ranks).kernels
        return float(sum(each.times * total(each.launches, amounts) for each in kernels)) * self.engine.host_launch_s

    @cached_property
    def _moe_layers(self) -> int:
        return max(self.steps.sizes["num_moe_layers"], 1)

    def _seconds(self, batch: Batch, part: str, layers: tuple[Layers, ...]) -> float:
        """Returns the seconds of a part in all layers of these kinds."""
        amounts = self._amounts(batch)
        kernels = self._kernels(batch, part, layers)
        return float(sum(each.times * self._kernel_seconds(each, amounts, amounts) for each in kernels))

    def _kernels(self, batch: Batch, part: str, layers: tuple[Layers, ...]) -> Iterable[KernelRecord]:
        step = self.steps.step(batch.phase, self.num_ranks)
        return (each for each in step.kernels if each.part == part and each.layers in layers)

    def _kernel_seconds(self, kernel: KernelRecord, amounts: Amounts, computed: Amounts) -> "float | Floats":
        """computed: the amounts from which its FLOP follow"""
        is_attention = kernel.rate == "attention"
        memory = total(kernel.num_bytes, amounts) / (self.hardware.attention_bytes_per_s if is_attention else self.hbm)
        compute = total(kernel.flops, computed) / self._flops[kernel.rate]
        both = np.maximum(memory, compute) if is_attention else np.sqrt(memory * memory + compute * compute)
        seconds: float | Floats = total(kernel.launches, amounts) * self.engine.launch_s + both
        return seconds

    def _amounts(self, batch: Batch) -> Amounts:
        """Returns the amounts of a batch with an even load."""
        slots = self.steps.slots_per_rank(self.num_ranks)
        if batch.phase == "decode":
            length, new = batch.context + batch.tokens_per_request, batch.tokens_per_request
        else:
            length, new = max(batch.context, 1.0), max(batch.context * (1 - batch.cache_hit), 1.0)
        sequences = batch.tokens_per_rank / new
        even = even_amounts(sequences, length, new, self.num_ranks, slots, self.steps.sizes["topk"])
        return {**even, "sent": batch.tokens_per_rank * self._ranks_of_token}


def even_amounts(
    sequences: float, length: float, new_tokens: float, num_ranks: int, slots_per_rank: int, topk: int
) -> Amounts:
    """Returns the amounts of a rank's step whose experts are chosen evenly.

    length: tokens of each sequence behind the step, of which new_tokens are computed in it
    """
    tokens = sequences * new_tokens
    rows = tokens * topk
    return {
        "step": 1.0,
        "token": tokens,
        "sequence": sequences,
        "key": sequences * length,
        "pair": tokens * length,
        "square": tokens * new_tokens,
        "row": rows,
        "expert": slots_per_rank * (1 - (1 - 1 / slots_per_rank) ** rows),
        "sent": tokens * num_ranks * (1 - (1 - 1 / num_ranks) ** topk),
        "rank": float(num_ranks),
        "slot": float(slots_per_rank),
    }


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
