"""One MoE layer of one rank: gate, count, choose replicas, dispatch, experts, combine.

Here the decision where experts live meets the transport that carries rows. A batch larger than the transport's
capacity runs in rounds, the same number on every rank; a rank without tokens runs them with none. How rounds follow
each other, in turn or overlapped, is dispatch/overlap.py's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_serve.dispatch.base import AllToAll, Deferred, Dispatched, Pending, Ready
from moe_serve.dispatch.overlap import Round, run_in_turn, run_overlapped
from moe_serve.ep.expert_ffn import expert_ffn
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.gate import Gate
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.ep.routing import RouterSpec
from moe_serve.kernels.numerics import Numerics

SharedExpert = Callable[[Tensor], Tensor]  # [T, H] -> [T, H]


@dataclass(frozen=True)
class ExpertParallel:
    """What all MoE layers of a rank share.

    max_tokens_per_rank: rows of one round of dispatch and combine
    """

    rank: int
    router: RouterSpec
    all_to_all: AllToAll
    replica_map: ReplicaMap
    recorder: LoadRecorder
    max_tokens_per_rank: int
    numerics: Numerics


class MoeLayer:
    """y = sum over a token's experts of weight x expert(x), plus the shared expert."""

    def __init__(
        self, parallel: ExpertParallel, layer_row: int, gate: Gate, experts: ExpertStore, shared: SharedExpert | None
    ):
        """layer_row: this layer's row of placement and load record"""
        self._parallel = parallel
        self._layer_row = layer_row
        self._gate = gate
        self._replicas = parallel.replica_map.layer(layer_row)
        self._shared = shared
        self.experts = experts

    def __call__(self, x: Tensor, num_tokens: int, num_chunks: int, overlap: bool = False) -> Tensor:
        """Returns the layer's output for the real rows; rows beyond them hold zeros plus the shared expert.

        x: [T_pad, H] compute dtype;  num_tokens: real rows, the first ones
        num_chunks: rounds among which the rows are dealt in runs as equal as can be;  overlap: experts of a round
        compute while rows of others travel; both equal on all ranks
        """
        capacity = self._parallel.max_tokens_per_rank
        assert num_chunks >= 1, "every rank runs at least one round"
        assert num_tokens <= num_chunks * capacity, f"{num_tokens} tokens in {num_chunks} rounds of {capacity}"
        rounds = [partial(self._begin, rows) for rows in x[:num_tokens].tensor_split(num_chunks)]
        run = run_overlapped if overlap else run_in_turn
        parts, shared = run(self._parallel.all_to_all, rounds, self._run_experts, lambda: self._run_shared(x))
        if num_tokens < x.shape[0]:
            parts.append(x.new_zeros(x.shape[0] - num_tokens, x.shape[1]))
        routed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return routed if shared is None else routed.add_(shared)

    def _begin(self, rows: Tensor) -> Pending[Round]:
        """Routes rows [T, H] and counts them; where experts may have replicas, tells the other ranks how many."""
        parallel, routing = self._parallel, self._gate(rows)
        ids, load = routing.topk_ids, routing.load
        if load is None and self._replicas.needs_counts:
            load = self._replicas.count(ids)
        if load is None:
            parallel.recorder.add(self._layer_row, ids, ids.shape[0])
        else:
            parallel.recorder.add_counts(self._layer_row, load)
        if not self._replicas.needs_counts or load is None:
            return Ready(Round(rows, self._replicas.only_slots(ids), routing.topk_weights))
        counts = parallel.all_to_all.exchange_counts(load)

        def choose_replicas() -> Round:
            physical_ids, slot_counts = self._replicas.split(ids, counts.wait(), parallel.rank)
            return Round(rows, physical_ids, routing.topk_weights, slot_counts)

        return Deferred(choose_replicas)

    def _run_experts(self, arrived: Dispatched) -> Tensor:
        return expert_ffn(arrived.rows, self.experts, self._parallel.numerics, arrived.out)

    def _run_shared(self, x: Tensor) -> Tensor | None:
        return None if self._shared is None else self._shared(x)


def make_moe_layer(
    parallel: ExpertParallel,
    layer_row: int,
    gate_weight: Tensor,
    correction_bias: Tensor | None,
    experts: Mapping[str, Tensor],
    shared: SharedExpert | None,
) -> MoeLayer:
    """Returns one layer.

    gate_weight: [E, H];  correction_bias: [E] or None;  experts: this rank's slots, "gate_up" [S, 2 I, H] (gate rows
    first) and "down" [S, H, I], which become the layer's own
    """
    gate = Gate(parallel.router, gate_weight, correction_bias, parallel.numerics)
    return MoeLayer(parallel, layer_row, gate, ExpertStore(experts), shared)
