"""The split with the fewest active experts on the worst rank: decode at small batches is bound by streaming the weights
of active experts (METRO)."""

import numpy as np

from moe_serve.eplb.split.exact import split_exact
from moe_serve.eplb.split.layer_slots import Int64s, LayerSlots
from moe_serve.eplb.split.policy import SplitPolicy
from moe_serve.eplb.split.replica_graph import ReplicaGraph


class FewestActivatedSplit(SplitPolicy):
    """All tokens of an expert go to one replica; the exact split of one token per active expert says which."""

    def __init__(self, layer: LayerSlots):
        super().__init__("fewest_activated", layer)
        self._graph = ReplicaGraph.of(layer)

    def split_plainly(self, counts: Int64s) -> Int64s:
        graph = self._graph
        totals = counts.sum(axis=0)
        active = (totals > 0).astype(np.int64).tolist()
        chosen = split_exact(graph, active, self._start(totals.tolist())).replica_tokens
        owner = np.array(graph.owner, dtype=np.int64)
        return graph.to_slots(counts, counts[:, graph.experts][:, owner] * chosen)

    def _start(self, totals: list[int]) -> list[int]:
        """Picks, heaviest expert first, the rank with fewest active experts, then fewest tokens: among choices with
        the same number of active experts this leans to balanced tokens."""
        graph = self._graph
        load = [(0, 0)] * graph.num_ranks
        for slot, tokens in zip(graph.fixed_slot.tolist(), totals, strict=True):
            if slot >= 0 and tokens:
                rank = slot // graph.layer.slots_per_rank
                load[rank] = (load[rank][0] + 1, load[rank][1] + tokens)
        start = [0] * graph.num_replicas
        for i in sorted(range(len(graph.experts)), key=lambda i: -totals[graph.experts[i]]):
            tokens = totals[graph.experts[i]]
            if tokens:
                replicas = range(graph.replica_start[i], graph.replica_start[i + 1])
                best = min(replicas, key=lambda c: load[graph.replica_rank[c]])
                start[best] = 1
                rank = graph.replica_rank[best]
                load[rank] = (load[rank][0] + 1, load[rank][1] + tokens)
        return start
