"""Our planner as vllm-ascend's placement policy, loaded through vLLM's plugin group `vllm.general_plugins`.

Written to vllm-ascend of August 2026, whose policies are numbers: ours takes the place of all of them, whatever
`eplb_policy_type` says. It plans in a process of its own beside each rank; an exception there would leave the rank
waiting for ever, so a plan that fails is the placement in use.
"""

from typing import TYPE_CHECKING

import numpy as np

from moe_serve.adapters.plugin import START, AdapterSettings, check_parameters, read_settings
from moe_serve.adapters.recording import LoadRecording
from moe_serve.adapters.replan import Cluster, replan
from moe_serve.errors import PlacementError
from moe_serve.log import configure_logging, get_logger

if TYPE_CHECKING:
    from torch import Tensor

logger = get_logger(__name__)


def register() -> None:
    """Puts our policy in the place of vllm-ascend's, where that is installed and MOE_SERVE_EPLB asks for it.

    Raises ConfigError for a wrong setting, which ends vLLM's start.
    """
    settings = read_settings()
    if settings is None:
        return
    try:
        from vllm_ascend.eplb.core.policy.policy_abstract import EplbPolicy
        from vllm_ascend.eplb.core.policy.policy_factory import PolicyFactory
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "vllm_ascend":
            return  # a vLLM without it
        raise
    check_parameters(EplbPolicy.rebalance_experts, MoeServePolicy.rebalance_experts, "vllm-ascend of August 2026")
    PolicyFactory.generate_policy = staticmethod(lambda policy_type: MoeServePolicy(settings))
    configure_logging(who="eplb")
    logger.info("vllm-ascend's experts are placed by moe_serve, policy %s", settings.policy)
    if settings.start is not None:  # vLLM's own EPLB, which vllm-ascend's second model runner uses, does read it
        logger.warning("%s plays no part in vllm-ascend's dynamic EPLB; give it expert_map_path", START)


class MoeServePolicy:
    """A policy as vllm-ascend calls it. Picklable: it goes to the process that plans."""

    def __init__(self, settings: AdapterSettings) -> None:
        self.settings = settings
        self._recording: LoadRecording | None = None  # opened by the process that plans

    def rebalance_experts(
        self, current_expert_table: "Tensor", expert_workload: "Tensor"
    ) -> "tuple[int, list[int], Tensor]":
        """Returns (1 if an expert moves, layers in their order, the expert of each slot [L, R, K] int64).

        current_expert_table: [L, R, K] expert of each slot
        expert_workload:      [L, R, K] tokens of each slot, or [steps, L, R, K]
        """
        import torch

        table = np.asarray(current_expert_table).astype(np.int64)
        work = np.asarray(expert_workload)
        steps = len(work) if work.ndim > table.ndim else self.settings.window_steps
        work = work.reshape(-1, *table.shape).sum(axis=0)
        num_layers, num_ranks, _ = table.shape
        load = np.zeros((num_layers, int(table.max()) + 1))
        np.add.at(load, (np.arange(num_layers)[:, None, None], table), np.maximum(work, 0))
        if self.settings.record is not None:
            self._recording = self._recording or LoadRecording(self.settings.record)
            self._recording.add(load, steps)
        old = table.reshape(num_layers, -1)
        try:
            cluster = Cluster(num_ranks, num_slots=old.shape[1])
            given = self.settings
            new = replan(load, cluster, old, given.policy, None, given.max_rank_moves, given.min_gain)
        except PlacementError as error:
            logger.error("no new placement, the one in use stays: %s", error)
            new = old
        return int((new != old).any()), list(range(num_layers)), torch.from_numpy(new.reshape(table.shape))
