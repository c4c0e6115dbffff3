"""Our planner behind SGLang's EPLB, loaded through SGLang's own plugin group `sglang.srt.plugins`.

Written to SGLang 0.5.23. Its algorithms are members of an enumeration, so ours cannot have a name there: the hook
replaces `rebalance_experts`, whatever `--eplb-algorithm` says. That name still chooses whether router groups stay on
one node (`…_hierarchical`) and whether lost ranks are left out (`elasticity_aware`).
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.adapters.plugin import START, AdapterSettings, check_parameters, read_settings
from moe_serve.adapters.recording import LoadRecording
from moe_serve.adapters.replan import Cluster, Ints, old_or_raise, replan
from moe_serve.eplb.load import rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.log import configure_logging, get_logger

if TYPE_CHECKING:
    from torch import Tensor

TARGET = "sglang.srt.eplb.eplb_algorithms.rebalance_experts"
CHUNKS = "sglang.srt.eplb.eplb_manager.EPLBManager._compute_update_layer_ids_chunks"
logger = get_logger(__name__)


def register() -> None:
    """Puts our planner in the place of SGLang's, if MOE_SERVE_EPLB asks for it.

    SGLang calls it in each of its processes. Ends the process for a wrong setting: SGLang logs what a plugin raises and
    would serve on with its own planner.
    """
    try:
        settings = read_settings()
        if settings is None:
            return
        if settings.start is not None:
            raise ConfigError(f"{START} is for vLLM; SGLang reads a placement itself: --init-expert-location")
        from sglang.srt.eplb import eplb_algorithms
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        order = LayerOrder()
        ours = make_rebalance_experts(settings, order)
        check_parameters(eplb_algorithms.rebalance_experts, ours, "SGLang 0.5.23")
    except (ConfigError, ImportError) as error:
        raise SystemExit(f"moe_serve's planner cannot be plugged into SGLang: {error}") from None
    HookRegistry.register(TARGET, ours, HookType.REPLACE)
    HookRegistry.register(CHUNKS, order.chunks, HookType.AFTER)
    configure_logging(who="eplb")
    logger.info("SGLang's experts are placed by moe_serve, policy %s", settings.policy)


class LayerOrder:
    """The order in which SGLang moves the layers of the last plan: those that gain most first, others not at all.

    It moves `--eplb-rebalance-layers-per-chunk` layers after each forward pass, or all of them at once.
    """

    def __init__(self) -> None:
        self._layers: list[int] | None = None  # None: as SGLang has them

    def note(self, load: NDArray[np.number], old: Ints | None, new: Ints, cluster: Cluster) -> None:
        """Orders the layers of a plan. load: [L, E];  old: [L, P] in use, or None;  new: [L, P]

        A layer's gain is what its busiest rank loses. All layers are left to move where ranks are lost or have come.
        """
        self._layers = None
        if old is None or old.shape != new.shape or cluster.excluded or (old < 0).any():
            return
        num_logical, busiest = load.shape[1], []
        for rows in (old, new):
            placement = Placement(rows.astype(np.int32), num_logical, cluster.num_ranks)
            busiest.append(rank_load(load.astype(np.float64), placement).max(axis=1))
        changed = np.flatnonzero((old != new).any(axis=1))
        gain = (busiest[0] - busiest[1])[changed]
        self._layers = changed[np.argsort(-gain, kind="stable")].tolist()

    def chunks(self, chunks: list[list[int]], *_: object) -> list[list[int]]:
        """Returns SGLang's chunks of layer ids with the changed layers of the last plan alone, in our order."""
        if self._layers is None or not chunks:
            return chunks
        moved = {layer for chunk in chunks for layer in chunk}
        layers, size = [layer for layer in self._layers if layer in moved], len(chunks[0])
        return [layers[first : first + size] for first in range(0, len(layers), size)]


def make_rebalance_experts(settings: AdapterSettings, order: LayerOrder) -> Any:
    """Returns a function that takes the place of SGLang's `rebalance_experts`. order: is told of each plan"""

    recording = None if settings.record is None else LoadRecording(settings.record)

    def rebalance_experts(
        tokens_per_expert: "Tensor",
        num_physical_experts: int,
        num_local_physical_experts: int,
        num_groups: int | None,
        num_nodes: int,
        algorithm: Any,
    ) -> "tuple[Tensor, Tensor, Tensor]":
        """Returns the expert of every slot [L, P], the slots of every expert [L, E, X] (-1 = no more), replicas [L, E].

        tokens_per_expert: [steps, L, E];  algorithm: a member of SGLang's EplbAlgorithm. All int64 on the CPU.
        """
        import torch

        load = tokens_per_expert.sum(dim=0).cpu().numpy()
        if recording is not None:
            recording.add(load, len(tokens_per_expert))
        num_ranks = num_physical_experts // num_local_physical_experts
        excluded = _lost_ranks() if algorithm.name.startswith("elasticity_aware") else ()
        hierarchical = algorithm.name.endswith("_hierarchical") and not excluded and bool(num_groups)
        cluster = Cluster(num_ranks, num_nodes, num_physical_experts, num_groups, hierarchical, excluded)
        old = _placement_in_use(len(load))
        try:
            rows = replan(load, cluster, old, settings.policy, None, settings.max_rank_moves, settings.min_gain)
        except PlacementError as error:
            if excluded:
                raise  # the placement in use has experts on lost ranks
            rows = old_or_raise(error, old, num_physical_experts)
        order.note(load, old, rows, cluster)
        placement = Placement(rows.astype(np.int32), load.shape[1], num_ranks)
        return (
            torch.from_numpy(np.maximum(rows, 0)),  # SGLang has expert 0 in the slots of lost ranks
            torch.from_numpy(placement.logical_to_physical.astype(np.int64)),
            torch.from_numpy(placement.replica_count.astype(np.int64)),
        )

    return rebalance_experts


def _placement_in_use(num_layers: int) -> Ints | None:
    """Returns SGLang's current [L, P], which it does not hand to its algorithms; None while it has none."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    if metadata is None or len(metadata.physical_to_logical_map_cpu) != num_layers:
        return None
    rows: Ints = metadata.physical_to_logical_map_cpu.numpy().astype(np.int64)
    return rows


def _lost_ranks() -> tuple[int, ...]:
    """Returns the ranks that SGLang's elastic EP has lost."""
    from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager

    state = ElasticEPStateManager.instance()
    if state is None:
        return ()
    return tuple(rank for rank, serves in enumerate(state.active_ranks.cpu().tolist()) if not serves)
