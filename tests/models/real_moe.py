"""The make_moe_layer closure over the real ep/ layer, on one rank."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.local import LocalAllToAll
from moe_serve.dispatch.wire import make_wire
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import ExpertParallel, MoeLayer, make_moe_layer
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.kernels.numerics import Numerics
from moe_serve.models.spec import ModelSpec
from tests.models.runner import one_rank


def make_real_moe(spec: ModelSpec, numerics: Numerics, dtype: torch.dtype = torch.float32) -> Callable[..., MoeLayer]:
    placement = one_rank(spec)
    group = EpGroup(0, 1, torch.device("cpu"), None)
    slots = placement.slots_per_rank
    parallel = ExpertParallel(
        0,
        spec.router,
        LocalAllToAll(slots, make_wire("auto", dtype)),
        ReplicaMap(placement),
        LoadRecorder(placement.num_layers, placement.num_logical, group),
        4096,
        numerics,
    )

    def make(layer_id: int, gate: Tensor, bias: Tensor | None, experts: dict[str, Tensor], shared: object) -> MoeLayer:
        return make_moe_layer(parallel, placement.moe_layer_ids.index(layer_id), gate, bias, experts, shared)

    return make
