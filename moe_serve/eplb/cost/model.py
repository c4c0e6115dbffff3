"""Predicted time of MoE layers and of whole steps, from a placement's load and two profiles.

The model:
- grouped GEMM: rows are rounded up to tiles, the weights of every active expert are streamed once, and the total is the
  root of the summed squares of compute and memory time, since near the ridge neither hides the other;
- dispatch and combine: a fixed latency, then the busiest of all links of ranks, NICs, and NICs of a node together. Low
  latency sends a row per (token, expert), normal one per (token, node) and (token, rank);
- attention: projections as GEMMs, the core by its KV bytes or its FLOPs;
- overlap: the shared expert during the dispatch, or two half-batches of which one computes while the other is sent;
- everything else (gaps, elementwise kernels, scheduling) is one factor.

docs/cost-model.md says what the numbers were fitted on, and the error elsewhere. Everything is vectorised over layers.
Shape words: L = layers, R = ranks, P = slots, K = slots per rank.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.cost.links import Mode, Sharing, busiest_rows, carry_seconds, expected_places
from moe_serve.eplb.cost.profile_files import HardwareProfile, ModelProfile
from moe_serve.eplb.load import slot_load
from moe_serve.eplb.migration.moves import SlotMove
from moe_serve.eplb.migration.plan import MigrationPlan
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import RankCost
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Batch:
    """What one rank runs in one step.

    phase:           "decode" (every token is a request's next one) or "prefill" (tokens are prompt chunks)
    tokens_per_rank: new tokens
    context:         decode: tokens in the cache per request; prefill: length of a prompt
    two_batch:       overlap two half-batches
    """

    phase: Literal["decode", "prefill"]
    tokens_per_rank: float
    context: float
    two_batch: bool = False

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
    """Seconds of one step. `total_s` includes overhead and overlap; the parts are plain sums over layers."""

    total_s: float
    attention_s: float
    dispatch_s: float
    ffn_s: float
    combine_s: float
    shared_s: float
    other_s: float


class CostModel:
    """Predicts times of one model on one cluster."""

    def __init__(self, hardware: HardwareProfile, model: ModelProfile, topology: Topology) -> None:
        """topology: where its ranks_per_node differs from the profile's, links are shared as the topology says."""
        self.hardware, self.model, self.topology = hardware, model, topology
        self._flops = hardware.gemm_efficiency * (hardware.fp8_flops if model.compute == "fp8" else hardware.bf16_flops)
        self._hbm = hardware.hbm_efficiency * hardware.hbm_bytes_per_s
        places = (topology.num_nodes, topology.num_ranks)
        groups = (model.num_logical, model.topk, model.num_groups, model.topk_groups)
        self._sharing = Sharing(*(expected_places(n, *groups) / model.topk for n in places))

    def grouped_gemm(self, rows: Floats, n: int, k: int, is_mean: bool = False) -> Floats:
        """Returns the time of [rows_g, k] x [k, n] over groups g: rows [..., groups] -> [...].

        is_mean: rows are means over steps, so a group with few rows is not always active, nor a tile always full
        """
        tile = self.hardware.tile_rows
        if is_mean:  # Poisson arrivals: active unless no row arrived; a started tile is half full
            active = 1 - np.exp(-rows)
            tiles = np.maximum(active, rows / tile + 0.5 * active)
        else:
            active = (rows > 0).astype(np.float64)
            tiles = np.ceil(rows / tile)
        compute = 2.0 * n * k * tile * tiles.sum(axis=-1) / self._flops
        activations = rows.sum(axis=-1) * (k * self.model.weight_bytes + n * 2.0)  # inputs as wide as weights, out bf16
        memory = (active.sum(axis=-1) * n * k * self.model.weight_bytes + activations) / self._hbm
        return np.asarray(np.hypot(compute, memory))

    def expert_ffn(self, rank_slot_rows: Floats, is_mean: bool = False) -> Floats:
        """Returns the time of the routed experts of each rank: rows [..., K] -> [...]."""
        width, hidden = self.model.moe_intermediate, self.model.hidden
        return self.grouped_gemm(rank_slot_rows, 2 * width, hidden, is_mean) + self.grouped_gemm(
            rank_slot_rows, hidden, width, is_mean
        )

    def dispatch(self, rank_rows: Floats, mode: Mode, traffic: Floats | None = None) -> Floats:
        """Returns the time of one dispatch: rows that arrive at each rank [..., R] -> [...].

        traffic: [..., R, R] rows from rank to rank; None = every rank sends the same everywhere
        """
        return self.hardware.dispatch_latency_s + self._carry(rank_rows, self.model.dispatch_bytes, mode, traffic)

    def combine(self, rank_rows: Floats, mode: Mode, traffic: Floats | None = None) -> Floats:
        """Returns the time of one combine; arguments as for its dispatch."""
        return self.hardware.combine_latency_s + self._carry(rank_rows, self.model.combine_bytes, mode, traffic)

    def moe_layer(
        self, slot_rows: Floats, mode: Mode, is_mean: bool = False, traffic: Floats | None = None
    ) -> LayerTime:
        """Returns the time of the MoE part of each layer, without shared experts.

        slot_rows: [L, P] rows that each slot serves in one step, over all sources
        traffic:   [L, R, R] rows from rank to rank; None = every rank sends the same everywhere
        """
        by_rank = slot_rows.reshape(len(slot_rows), self.topology.num_ranks, -1)
        rank_rows = by_rank.sum(axis=2)
        ffn = self.expert_ffn(by_rank, is_mean).max(axis=1)
        return LayerTime(self.dispatch(rank_rows, mode, traffic), ffn, self.combine(rank_rows, mode, traffic))

    def attention(self, batch: Batch) -> float:
        """Returns the time of the attention of one layer on one rank."""
        m, tokens, context = self.model, batch.tokens_per_rank, batch.context
        if m.attention == "mla":
            head = m.nope_dim + m.rope_dim
            shapes = [(m.kv_lora + m.rope_dim, m.hidden), (m.num_heads * (m.nope_dim + m.v_dim), m.kv_lora)]
            shapes += (
                [(m.q_lora, m.hidden), (m.num_heads * head, m.q_lora)] if m.q_lora else [(m.num_heads * head, m.hidden)]
            )
            shapes.append((m.hidden, m.num_heads * m.v_dim))
            kv_bytes = (m.kv_lora + m.rope_dim) * m.kv_bytes
            # Absorbed for decode: every head reads the latent. Expanded for prefill.
            widths = 2 * m.kv_lora + m.rope_dim if batch.phase == "decode" else head + m.v_dim
        else:
            shapes = [((m.num_heads + 2 * m.num_kv_heads) * m.head_dim, m.hidden), (m.hidden, m.num_heads * m.head_dim)]
            kv_bytes = 2 * m.num_kv_heads * m.head_dim * m.kv_bytes
            widths = 2 * m.head_dim
        projections = sum(self._gemm(tokens, n, k) for n, k in shapes)
        seen = context if batch.phase == "decode" else context / 2  # causal: half the prompt on average
        flops = 2.0 * m.num_heads * widths * tokens * seen
        read = kv_bytes * (tokens * context if batch.phase == "decode" else tokens)
        core = max(flops / self.hardware.attention_flops, read / self.hardware.attention_bytes_per_s)
        return projections + core

    def step(self, batch: Batch, slot_rows: Floats | None = None, is_mean: bool = False) -> StepTime:
        """Returns the time of a whole step.

        slot_rows: [num_moe_layers, P] rows of each slot in the step; None = perfectly even over as many slots as
                   experts (rounded up to the ranks)
        """
        m = self.model
        if slot_rows is None:
            slots = -(-m.num_logical // self.topology.num_ranks) * self.topology.num_ranks
            rows = batch.tokens_per_rank * self.topology.num_ranks * m.topk / slots
            slot_rows = np.full((m.num_moe_layers, slots), rows)
        if len(slot_rows) != m.num_moe_layers:
            raise ConfigError(
                f"slot_rows has {len(slot_rows)} layers, {m.name} has {m.num_moe_layers} MoE layers; give all of them"
            )
        parts = 2 if batch.two_batch else 1
        part = Batch(batch.phase, batch.tokens_per_rank / parts, batch.context)
        layers = self.moe_layer(slot_rows / parts, batch.mode, is_mean)
        attention = self.attention(part)
        shared = self._ffn(part.tokens_per_rank, m.num_shared * m.moe_intermediate)
        if batch.two_batch:
            compute, travel = attention + shared + layers.ffn_s, layers.dispatch_s + layers.combine_s
            moe = 2 * np.maximum(compute, travel).sum()
        else:
            moe = (attention + np.maximum(layers.dispatch_s, shared) + layers.ffn_s + layers.combine_s).sum()
        num_dense = m.num_layers - m.num_moe_layers
        dense = parts * num_dense * (attention + self._ffn(part.tokens_per_rank, m.dense_intermediate))
        sampled = batch.tokens_per_rank if batch.phase == "decode" else batch.tokens_per_rank / max(batch.context, 1)
        head = self._gemm(sampled, m.vocab, m.hidden)
        return StepTime(
            total_s=float(moe + dense + head) * self.hardware.step_overhead,
            attention_s=parts * attention * m.num_layers,
            dispatch_s=parts * float(layers.dispatch_s.sum()),
            ffn_s=parts * float(layers.ffn_s.sum()),
            combine_s=parts * float(layers.combine_s.sum()),
            shared_s=parts * shared * m.num_moe_layers,
            other_s=float(dense - parts * num_dense * attention + head),
        )

    def migration_seconds(self, plan: MigrationPlan, topology: Topology | None = None) -> float:
        """Returns the time of all rounds of a migration without overlap.

        Each takes as long as its busiest link or NIC, then a copy from staging into the slot.
        """
        topology = topology or self.topology
        return sum(self.transfer_seconds(*_busiest(moves.moves, topology)) for moves in plan.rounds)

    def transfer_seconds(self, by_link: float, by_nic: float) -> float:
        """Returns the time to move experts into one rank, by_link from its node, by_nic from others, and into slots."""
        hardware, size = self.hardware, self.model.expert_bytes
        link = by_link * size / (hardware.link_bytes_per_s * hardware.link_efficiency)
        nic = by_nic * size / (hardware.nic_bytes_per_s * hardware.nic_efficiency_normal)
        return max(link, nic) + (by_link + by_nic) * 2 * size / self._hbm

    def rank_cost(self, mode: Mode) -> RankCost:
        """Returns the linear prices of the step_time objective."""
        m, hardware = self.model, self.hardware
        row = m.hidden * (m.dispatch_bytes + m.combine_bytes)
        nic = hardware.nic_efficiency_low_latency if mode == "low_latency" else hardware.nic_efficiency_normal
        return RankCost(
            token_s=6.0 * m.hidden * m.moe_intermediate / self._flops
            + row / (hardware.link_bytes_per_s * hardware.link_efficiency),
            activated_s=m.expert_bytes / self._hbm,
            off_node_token_s=row / (hardware.nic_bytes_per_s * nic) if self.topology.num_nodes > 1 else 0.0,
        )

    def _carry(self, rank_rows: Floats, value_bytes: float, mode: Mode, traffic: Floats | None) -> Floats:
        rows = busiest_rows(rank_rows, self.topology, traffic, self._sharing if mode == "normal" else None)
        return carry_seconds(rows, self.model.hidden * value_bytes, self.hardware, mode)

    def _gemm(self, rows: float, n: int, k: int) -> float:
        return float(self.grouped_gemm(np.array([float(rows)]), n, k)) if n and k else 0.0

    def _ffn(self, rows: float, width: int) -> float:
        return self._gemm(rows, 2 * width, self.model.hidden) + self._gemm(rows, self.model.hidden, width)


@dataclass(frozen=True)
class PredictedCost(GateCost):
    """Costs as the model predicts them. mode: of the dispatch kernels that serve the load"""

    costs: CostModel
    mode: Mode = "low_latency"

    def layer_seconds(self, tokens: Floats, placement: Placement) -> Floats:
        """Returns the seconds of the MoE part of each layer, overhead included: tokens [L, E] of all ranks -> [L]."""
        times = self.costs.moe_layer(slot_load(tokens, placement), self.mode, is_mean=True)
        return times.total_s * self.costs.hardware.step_overhead

    def migration_seconds(self, plan: MigrationPlan, topology: Topology) -> float:
        return self.costs.migration_seconds(plan, topology)


def _busiest(moves: tuple[SlotMove, ...], topology: Topology) -> tuple[int, int]:
    """Returns how many experts the busiest rank of a round moves over its link, and over its NIC."""
    link: dict[tuple[str, int], int] = {}
    nic: dict[tuple[str, int], int] = {}
    for move in moves:
        if move.src_rank in (move.dst_rank, -1):
            continue
        counts = link if topology.node_of(move.src_rank) == topology.node_of(move.dst_rank) else nic
        for key in (("out", move.src_rank), ("in", move.dst_rank)):
            counts[key] = counts.get(key, 0) + 1
    return max(link.values(), default=0), max(nic.values(), default=0)
