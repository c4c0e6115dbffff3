"""Predicted time of MoE layers and whole steps, from a placement's load and profiles of hardware, model and engine.

The model:
- grouped GEMM: rows are rounded up to tiles, the weights of every active expert are streamed once, and the total is the
  root of the summed squares of compute and memory time, since near the ridge neither hides the other;
- dispatch and combine: a fixed latency, then the busiest of all links of ranks, NICs, and NICs of a node together. Low
  latency sends a row per (token, expert). Normal sends one per (token, node) over the NICs, where any rank of the node
  may receive it for the others, and one per (token, rank) over the links, also for rows that came over a NIC;
- attention: projections as GEMMs, the core by its KV bytes or its FLOPs;
- elementwise kernels: the bytes they move (`kernels.elementwise_bytes`);
- overlap: the shared expert during the dispatch, or two half-batches in stages (`overlapped_seconds`);
- everything else (gaps, launches, scheduling) is one factor of the engine. Of our engine launches, bytes and FLOP are
  recorded instead (`kernels.RecordedKernels`).

docs/cost-model.md says what the numbers were fitted on, and the error elsewhere. Everything is vectorised over layers.
Shape words: L = layers, R = ranks, N = nodes, P = slots, K = slots per rank.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import comb

import numpy as np

from moe_serve.eplb.cost.gate_cost import GateCost
from moe_serve.eplb.cost.kernels import (
    Batch,
    Floats,
    Kernels,
    LayerTime,
    Mode,
    RecordedKernels,
    StepKernels,
    StepTime,
)
from moe_serve.eplb.cost.profile_files import EngineProfile, HardwareProfile, ModelProfile, load_engine
from moe_serve.eplb.cost.step_record import ModelSteps, load_steps
from moe_serve.eplb.load import Phase, own_load, slot_load
from moe_serve.eplb.migration.moves import SlotMove
from moe_serve.eplb.migration.plan import MigrationPlan
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology

DEFAULT_ENGINE = "SGLang"


@dataclass(frozen=True)
class Sharing:
    """Rows sent per route where one row serves several experts of a token: per node, and per rank."""

    node: float
    rank: float


@dataclass(frozen=True, eq=False)
class BusiestRows:
    """Rows on the busiest link of a rank, NIC of a rank, and node's NICs together; [...] each, in or out."""

    link: Floats
    nic: Floats
    node: Floats


class CostModel:
    """Predicts times of one model on one cluster."""

    def __init__(
        self,
        hardware: HardwareProfile,
        model: ModelProfile,
        topology: Topology,
        engine: EngineProfile | None = None,
    ) -> None:
        """topology: where its ranks_per_node differs from the profile's, links are shared as the topology says.

        engine: None = `DEFAULT_ENGINE`
        Raises ConfigError where the engine counts launches, and none of this model are recorded.
        """
        self.hardware, self.model, self.topology = hardware, model, topology
        self.engine = engine or load_engine(DEFAULT_ENGINE)
        places = (topology.num_nodes, topology.num_ranks)
        groups = (model.num_logical, model.topk, model.num_groups, model.topk_groups)
        nodes_of_token, ranks_of_token = (expected_places(n, *groups) for n in places)
        self._sharing = Sharing(nodes_of_token / model.topk, ranks_of_token / model.topk)
        self._ranks_of_token = ranks_of_token
        self._steps = _steps_of(self.engine, model) if self.engine.launch_s else None
        self.kernels = self._kernels(1.0)

    @cached_property
    def _shared_kernels(self) -> StepKernels:
        """Kernels beside normal dispatch and combine, which hold a part of the compute units."""
        return self._kernels(self.hardware.overlap_compute_share)

    def _kernels(self, compute_share: float) -> StepKernels:
        if self._steps is None:
            return Kernels(self.hardware, self.model, self._ranks_of_token, compute_share)
        ranks = self.topology.num_ranks, self._ranks_of_token
        return RecordedKernels(self.hardware, self._steps, *ranks, self.engine, compute_share)

    def dispatch(self, rank_rows: Floats, mode: Mode) -> Floats:
        """Returns the seconds of one dispatch: rows that arrive at each rank [..., R] -> [...]."""
        return self.hardware.dispatch_latency_s + self._dispatch(self._busiest(rank_rows, mode), mode)

    def combine(self, rank_rows: Floats, mode: Mode) -> Floats:
        """Returns the seconds of one combine; arguments as for its dispatch."""
        return self.hardware.combine_latency_s + self._combine(self._busiest(rank_rows, mode), mode)

    def moe_layer(
        self, slot_rows: Floats, batch: Batch, is_mean: bool = False, own_rows: Floats | None = None
    ) -> LayerTime:
        """Returns the time of the MoE part of each layer, without shared experts.

        slot_rows: [L, P] rows that each slot serves in one step, over all sources
        batch:     says the phase, and with two_batch that dispatch and combine run beside the experts
        is_mean:   as for `Kernels.grouped_gemm`
        own_rows:  [L, R] rows that each rank sends to itself; None = an equal part of what it gets
        """
        by_rank = slot_rows.reshape(len(slot_rows), self.topology.num_ranks, -1)
        rank_rows = by_rank.sum(axis=2)
        kernels = self._kernels_of(batch)
        busiest = self._busiest(rank_rows, batch.mode, own_rows)
        return LayerTime(
            kernels.dispatch_s(batch) + self._dispatch(busiest, batch.mode),
            kernels.expert_part(by_rank, batch, is_mean).max(axis=1),
            kernels.combine_s(batch) + self._combine(busiest, batch.mode),
        )

    def own_rows(self, tokens: Floats, placement: Placement) -> Floats | None:
        """Returns the rows that each rank sends to itself, as the engine chooses replicas; see `moe_layer`."""
        return own_load(tokens, placement) if self.engine.replica_choice == "own_first" else None

    def step(
        self,
        batch: Batch,
        slot_rows: Floats | None = None,
        is_mean: bool = False,
        own_rows: Floats | None = None,
    ) -> StepTime:
        """Returns the time of a whole step.

        slot_rows: [num_moe_layers, P] rows of each slot in the step; None = perfectly even over as many slots as
                   experts (rounded up to the ranks)
        own_rows:  as for `moe_layer`
        """
        if batch.phase == "mixed" and self._steps is not None:
            raise ConfigError(
                f"steps of {self.engine.name} are recorded of prompts and of decodes, not of both; give --phase "
                "prefill or decode, or another --engine"
            )
        m = self.model
        if batch.attention_ranks > 1:
            self._check_shared_attention(batch.attention_ranks)
        if slot_rows is None:
            slots = -(-m.num_logical // self.topology.num_ranks) * self.topology.num_ranks
            rows = batch.tokens_per_rank * self.topology.num_ranks * m.topk / slots
            slot_rows = np.full((m.num_moe_layers, slots), rows)
        if len(slot_rows) != m.num_moe_layers:
            raise ConfigError(
                f"slot_rows has {len(slot_rows)} layers, {m.name} has {m.num_moe_layers} MoE layers; give all of them"
            )
        kernels, parts = self._kernels_of(batch), 2 if batch.two_batch else 1
        part = replace(batch, tokens_per_rank=batch.tokens_per_rank / parts)
        layers = self.moe_layer(slot_rows / parts, part, is_mean, None if own_rows is None else own_rows / parts)
        attention, moe_passes, shared = (
            each(part) for each in (kernels.attention_part, kernels.gate_part, kernels.shared_part)
        )
        if batch.two_batch:
            moe = overlapped_seconds(
                Sides(attention, layers.ffn_s + moe_passes, shared, layers.dispatch_s, layers.combine_s),
                # The send and receive kernels of low latency hold every compute unit; their rows then travel alone.
                (kernels.dispatch_s(part), kernels.combine_s(part)) if batch.mode == "low_latency" else (0, 0),
            ).sum()
        else:
            moe = (
                attention + np.maximum(layers.dispatch_s, shared) + moe_passes + layers.ffn_s + layers.combine_s
            ).sum()
        num_dense = m.num_layers - m.num_moe_layers
        dense = parts * num_dense * (attention + kernels.dense_part(part))
        head = self.kernels.vocabulary_part(batch)
        on_host = parts * kernels.host_s(part)
        return StepTime(
            total_s=max(float(moe + dense + head), on_host) * self.engine.step_factor,
            attention_s=parts * attention * m.num_layers,
            dispatch_s=parts * float(layers.dispatch_s.sum()),
            ffn_s=parts * float((layers.ffn_s + moe_passes).sum()),
            combine_s=parts * float(layers.combine_s.sum()),
            shared_s=parts * shared * m.num_moe_layers,
            other_s=float(dense - parts * num_dense * attention + head),
        )

    def _check_shared_attention(self, ranks: int) -> None:
        """Raises ConfigError where so many ranks cannot share attention."""
        if self._steps is not None:
            raise ConfigError(
                f"{self.engine.name} shares no attention between ranks; give --attention-tp 1, or another --engine"
            )
        if self.model.num_heads % ranks or self.topology.ranks_per_node % ranks:
            raise ConfigError(
                f"attention_tp is {ranks}, but {self.model.name} has {self.model.num_heads} heads and a node "
                f"{self.topology.ranks_per_node} ranks; give a number that divides both"
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
        return max(link, nic) + (by_link + by_nic) * 2 * size / self.kernels.hbm

    def _busiest(self, rank_rows: Floats, mode: Mode, own_rows: Floats | None = None) -> BusiestRows:
        return busiest_rows(rank_rows, self.topology, self._sharing if mode == "normal" else None, own_rows)

    def _dispatch(self, rows: BusiestRows, mode: Mode) -> Floats:
        """Returns the seconds that rows take on links."""
        row_bytes = self.model.hidden * self.model.dispatch_bytes
        return carry_seconds(rows, row_bytes, self.hardware, mode)

    def _combine(self, rows: BusiestRows, mode: Mode) -> Floats:
        row_bytes = self.model.hidden * self.model.combine_bytes
        return carry_seconds(rows, row_bytes, self.hardware, mode)

    def _kernels_of(self, batch: Batch) -> StepKernels:
        return self._shared_kernels if batch.two_batch and batch.mode == "normal" else self.kernels


def _steps_of(engine: EngineProfile, model: ModelProfile) -> ModelSteps:
    """Returns the recorded steps of a model. Raises ConfigError where they are of another one."""
    steps = engine.steps or load_steps(model.name)
    other = {name: (size, getattr(model, name)) for name, size in steps.sizes.items() if size != getattr(model, name)}
    if other:
        differs = ", ".join(f"{name} {here} and {there}" for name, (here, there) in other.items())
        raise ConfigError(
            f"the recorded steps of {steps.name} and the profile {model.name} differ: {differs}; name the profile of "
            "the recorded model, or record that of the profile"
        )
    return steps


@dataclass(frozen=True)
class PredictedCost(GateCost):
    """Costs as the model predicts them. phase: of the load, which says what dispatch kernels serve it"""

    costs: CostModel
    phase: Phase = "decode"

    def layer_seconds(self, tokens: Floats, activations: Floats | None, placement: Placement) -> Floats:
        """Returns the seconds of the MoE part of each layer, without overlap, [L]; as if tokens were draws."""
        own_rows = self.costs.own_rows(tokens, placement)
        times = self.costs.moe_layer(slot_load(tokens, placement), Batch(self.phase, 0, 0), True, own_rows)
        return times.total_s * self.costs.engine.step_factor

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


@dataclass(frozen=True)
class Sides:
    """Seconds of one half-batch. experts, dispatch, combine: [L]; attention and shared are the same in each layer"""

    attention: float
    experts: Floats
    shared: float
    dispatch: Floats
    combine: Floats


def overlapped_seconds(sides: Sides, alone: tuple[float, float] = (0.0, 0.0)) -> Floats:
    """Returns the time of both half-batches in each layer: [L]. While one computes, rows of the other travel.

    Both pass attention, dispatch, experts and combine, half a layer apart, so that a layer has four stages:

        compute   attention of a     attention of b     experts of a     experts of b
        wires     combine of b       dispatch of a      dispatch of b    combine of a

    A stage lasts as long as the longer of its sides. The shared expert is computed beside a combine, which carries
    twice the bytes of a dispatch (the order of DeepSeek's published profile, and of SGLang's two-batch overlap).

    alone: seconds of a dispatch, and of a combine, beside which nothing computes
    """
    dispatch, combine = sides.dispatch - alone[0], sides.combine - alone[1]
    return (
        2 * sum(alone)
        + np.maximum(sides.attention + sides.shared, combine)
        + np.maximum(sides.attention, dispatch)
        + np.maximum(sides.experts, dispatch)
        + np.maximum(sides.experts + sides.shared, combine)
    )


def busiest_rows(
    rank_rows: Floats, topology: Topology, sharing: Sharing | None = None, own_rows: Floats | None = None
) -> BusiestRows:
    """Returns the most rows that any link or NIC carries, where the rows of others come from each of them alike.

    rank_rows: [..., R] routes that end at each rank
    sharing:   None = one row per route (low latency)
    own_rows:  [..., R] of these, those that begin at the rank itself; None = as many as from any other rank
    """
    num_nodes, per_node, num_ranks = topology.num_nodes, topology.ranks_per_node, topology.num_ranks
    split = (*rank_rows.shape[:-1], num_nodes, per_node)
    from_others = rank_rows - (rank_rows / num_ranks if own_rows is None else own_rows)
    from_each = from_others / max(num_ranks - 1, 1)
    near_in, far_in = from_each * (per_node - 1), from_each * (num_ranks - per_node)
    to_node = np.repeat(from_each.reshape(split).sum(axis=-1), per_node, axis=-1)
    near_out, far_out = to_node - from_each, from_each.sum(axis=-1, keepdims=True) - to_node
    node = np.maximum(far_in.reshape(split).sum(axis=-1), far_out.reshape(split).sum(axis=-1)).max(axis=-1)
    if sharing is None:
        link = np.maximum(near_in, near_out).max(axis=-1)
        return BusiestRows(link, np.maximum(far_in, far_out).max(axis=-1), node)
    node = node * sharing.node
    return BusiestRows(from_others.max(axis=-1) * sharing.rank, node / per_node, node)


def carry_seconds(rows: BusiestRows, row_bytes: float, hardware: HardwareProfile, mode: Mode) -> Floats:
    """Returns the time of the slowest link or NIC: [...]."""
    share = hardware.nic_efficiency_low_latency if mode == "low_latency" else hardware.nic_efficiency_normal
    link = rows.link / (hardware.link_bytes_per_s * hardware.link_efficiency)
    nic = rows.nic / (hardware.nic_bytes_per_s * share)
    node = rows.node / (hardware.node_nic_bytes_per_s * share)
    return np.asarray(row_bytes * np.maximum(link, np.maximum(nic, node)))


def expected_places(num_places: int, num_logical: int, topk: int, num_groups: int, topk_groups: int) -> float:
    """Returns on how many nodes (or ranks), called places here, the experts of a token are on average.

    Tokens pick topk_groups of num_groups groups, then topk experts inside them, uniformly. Places hold whole groups, or
    equal parts of one; otherwise experts are assumed to be spread at random.
    """
    per_place = num_logical / num_places
    per_group = num_logical // num_groups
    groups_here, rest = divmod(num_groups, num_places)
    if num_groups > 1 and groups_here and not rest:  # j of the place's groups are among the picked ones
        ways = comb(num_groups, topk_groups)
        return num_places * sum(
            comb(groups_here, j)
            * comb(num_groups - groups_here, topk_groups - j)
            / ways
            * (1 - _miss(topk_groups * per_group, j * per_group, topk))
            for j in range(min(groups_here, topk_groups) + 1)
        )
    if num_groups > 1 and num_places % num_groups == 0:
        return num_places * topk_groups / num_groups * (1 - _miss(topk_groups * per_group, per_place, topk))
    return num_places * (1 - _miss(num_logical, per_place, topk))


def _miss(total: int, here: float, picks: int) -> float:
    """Returns the chance that none of `picks` of `total` experts is one of `here`."""
    chance = 1.0
    for taken in range(picks):
        chance *= max(0.0, 1 - here / (total - taken)) if total > taken else 0.0
    return chance
