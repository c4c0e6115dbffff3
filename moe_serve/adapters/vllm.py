"""Our planner as vLLM's EPLB policy, loaded through vLLM's own plugin group `vllm.general_plugins`.

Written to vLLM 0.32's AbstractEplbPolicy. Its asynchronous EPLB accepts no policy but "default", so ours takes that
name, and `--eplb-config` stays as it is.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.adapters.plugin import AdapterSettings, check_parameters, read_settings
from moe_serve.adapters.recording import LoadRecording
from moe_serve.adapters.replan import Cluster, fitting_start, old_or_raise, replan
from moe_serve.eplb.files.placements import read_placement
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError
from moe_serve.log import configure_logging, get_logger

if TYPE_CHECKING:
    from torch import Tensor

logger = get_logger(__name__)


def register() -> None:
    """Puts our policy in the place of vLLM's default one, if MOE_SERVE_EPLB asks for it. May be called again.

    vLLM calls it in each of its processes. Raises MoeServeError for a wrong setting, which ends vLLM's start.
    """
    settings = read_settings()
    if settings is None:
        return
    from vllm.distributed.eplb.policy import EPLB_POLICIES, AbstractEplbPolicy

    policy = make_policy_class(settings)
    check_parameters(AbstractEplbPolicy.rebalance_experts, policy.rebalance_experts, "vLLM 0.32")
    AbstractEplbPolicy.register(policy)
    EPLB_POLICIES["default"] = policy
    configure_logging(who="eplb")
    logger.info("vLLM's experts are placed by moe_serve, policy %s", settings.policy)


def make_policy_class(settings: AdapterSettings) -> type[Any]:
    """Returns a class with the interface of vLLM's AbstractEplbPolicy; vLLM never makes an object of it."""
    start = None if settings.start is None else read_placement(settings.start)
    recording = None if settings.record is None else LoadRecording(settings.record)

    class MoeServeEplbPolicy:
        """vLLM's EPLB policy, planned by moe_serve."""

        @classmethod
        def rebalance_experts(
            cls,
            weight: "Tensor",
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: "Tensor | None" = None,
        ) -> "Tensor":
            """Returns the expert of every slot, [L, num_replicas] int64 on the CPU.

            weight: [L, E] tokens;  old_global_expert_indices: [L, slots in use], -1 = empty
            The placement in use stays where no plan is possible; the reason is logged as an error.
            """
            import torch

            old = None if old_global_expert_indices is None else old_global_expert_indices.cpu().numpy()
            # vLLM's own planner keeps the experts of a router group on one node under the same condition.
            hierarchical = num_groups > 0 and num_groups % num_nodes == 0
            cluster = Cluster(num_ranks, num_nodes, num_replicas, num_groups, hierarchical)
            load = weight.cpu().numpy()
            if recording is not None:
                recording.add(load, settings.window_steps)
            try:
                begin = _start(start, load, cluster, old)
                found = replan(load, cluster, old, settings.policy, begin, settings.max_rank_moves, settings.min_gain)
            except PlacementError as error:
                found = old_or_raise(error, old, num_replicas)
            return torch.from_numpy(found)

    return MoeServeEplbPolicy


def _start(
    start: Placement | None, load: NDArray[np.number], cluster: Cluster, old: NDArray[np.integer] | None
) -> Placement | None:
    """Returns the file's placement while vLLM still has the one that it starts every model with.

    vLLM reads no placement at its start, so the first rebalance installs the file's, edited to the load seen since.
    """
    num_logical = load.shape[1]
    if old is None or not (old == np.arange(old.shape[1]) % num_logical).all():
        return None
    return fitting_start(start, (len(load), num_logical), cluster)
