"""Planners of the leaderboard: ours, those of other projects, and files that anybody drops into the folder `entries`.

Each is one function:

    def plan(tokens, num_slots, num_ranks, num_nodes, num_groups, current):
        '''tokens [L, E] int64: tokens routed to each expert of each layer in the last window
        num_slots: physical experts per layer, over all ranks; slot s is on rank s // (num_slots // num_ranks)
        num_nodes: of equally many consecutive ranks;  num_groups: expert groups of the router, 1 = none
        current [L, num_slots] int32: the expert in every slot now
        -> [L, num_slots] integers: the expert of every slot from now on'''
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.topology import Topology

FOLDER = Path(__file__).parent / "entries"
OURS = ("greedy", "refined", "incremental", "static")
PlanFunction = Callable[[NDArray[np.int64], int, int, int, int, NDArray[np.int32]], Any]


@dataclass(frozen=True)
class Entry:
    """name: in tables.   kind: moe_serve, deepseek, vllm, sglang or file.   source: our policy, or a path"""

    name: str
    kind: str
    source: str


def find_entries(deepseek: Path | None, vllm: Path | None, sglang: Path | None, folder: Path) -> list[Entry]:
    """Returns all planners. deepseek: eplb.py;  vllm, sglang: folders of their planners;  folder: of further files."""
    entries = [Entry(f"moe_serve {policy}", "moe_serve", policy) for policy in OURS]
    if deepseek is not None:
        entries += [Entry(f"DeepSeek EPLB, {way}", f"deepseek-{way}", str(deepseek)) for way in ("global", "by node")]
    if vllm is not None:
        entries.append(Entry("vLLM default", "vllm", str(vllm)))
    if sglang is not None:
        entries += [Entry(f"SGLang {name}", f"sglang-{name}", str(sglang)) for name in ("deepseek", "deepseek_vec")]
    return entries + [Entry(path.stem, "file", str(path)) for path in sorted(folder.glob("*.py"))]


def plan_function(entry: Entry) -> PlanFunction:
    """Returns the function of an entry; loads its code, and torch only where it is another project's."""
    kind, _, way = entry.kind.partition("-")
    match kind:
        case "moe_serve":
            return _ours(entry.source)
        case "file":
            module = _module("leaderboard_entry", Path(entry.source))
            if not callable(getattr(module, "plan", None)):
                raise ValueError(f"{Path(entry.source).name} has no function plan(tokens, num_slots, ...)")
            return module.plan  # type: ignore[no-any-return]
        case "deepseek":
            return _deepseek(_module("deepseek_eplb", Path(entry.source)), way == "by node")
        case "vllm":
            return _vllm(Path(entry.source))
        case "sglang":
            return _sglang(Path(entry.source), way)
    raise ValueError(f"entries of kind {entry.kind!r} are not known")


def _ours(policy: str) -> PlanFunction:
    def plan(
        tokens: NDArray[np.int64],
        num_slots: int,
        num_ranks: int,
        num_nodes: int,
        num_groups: int,
        current: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        topology = Topology(num_nodes, num_ranks // num_nodes)
        now = Placement(current, tokens.shape[1], num_ranks)
        return (
            make_policy(policy)
            .plan(PlanRequest(tokens, topology, num_slots, current=now))
            .placement.physical_to_logical
        )

    return plan


def _deepseek(eplb: Any, by_node: bool) -> PlanFunction:
    import torch

    torch.set_num_threads(1)

    def plan(
        tokens: NDArray[np.int64], num_slots: int, num_ranks: int, num_nodes: int, num_groups: int, current: object
    ) -> Any:
        groups, nodes = (num_groups, num_nodes) if by_node else (1, 1)
        return eplb.rebalance_experts(torch.from_numpy(tokens), num_slots, groups, nodes, num_ranks)[0].numpy()

    return plan


def _vllm(folder: Path) -> PlanFunction:
    """folder: vllm/distributed/eplb/policy, whose two modules run without the rest of vLLM."""
    import torch

    torch.set_num_threads(1)
    package = ModuleType("vllm_policy")
    package.__path__ = [str(folder)]
    sys.modules["vllm_policy"] = package
    _module("vllm_policy.abstract", folder / "abstract.py")
    policy = _module("vllm_policy.default", folder / "default.py").DefaultEplbPolicy

    def plan(
        tokens: NDArray[np.int64],
        num_slots: int,
        num_ranks: int,
        num_nodes: int,
        num_groups: int,
        current: NDArray[np.int32],
    ) -> Any:
        now = torch.from_numpy(current.astype(np.int64))
        return policy.rebalance_experts(
            torch.from_numpy(tokens), num_slots, num_groups, num_nodes, num_ranks, now
        ).numpy()

    return plan


def _sglang(folder: Path, algorithm: str) -> PlanFunction:
    """folder: sglang/srt/eplb/eplb_algorithms. As `--eplb-algorithm auto`: by node where groups divide into nodes."""
    import torch

    torch.set_num_threads(1)
    module = _module(f"sglang_{algorithm}", folder / f"{algorithm}.py")

    def plan(
        tokens: NDArray[np.int64], num_slots: int, num_ranks: int, num_nodes: int, num_groups: int, current: object
    ) -> Any:
        load, by_node = torch.from_numpy(tokens), num_groups % num_nodes == 0
        if algorithm == "deepseek":
            return module.rebalance_experts(load, num_slots, num_groups, num_nodes, num_ranks, by_node)[0].numpy()
        return module.rebalance_experts(load[None], num_slots, num_slots // num_ranks, num_groups, num_nodes, by_node)[
            0
        ].numpy()

    return plan


def _module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
