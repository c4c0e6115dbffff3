"""The engines' extension points: their own classes where the engine is installed, else stubs of what it documents.

Each test of an adapter runs against both: `stub` always, `installed` only where the engine can be imported.
"""

import logging
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from moe_serve.adapters.plugin import MIN_GAIN, POLICY, RANK_MOVES, RECORD, START, WINDOW


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (POLICY, START, RANK_MOVES, MIN_GAIN, RECORD, WINDOW):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _logger_as_before() -> Iterator[None]:
    logger = logging.getLogger("moe_serve")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def add_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """Makes `import name` give a module with these members, and its parents too."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    if len(parts) > 1:
        monkeypatch.setattr(sys.modules[".".join(parts[:-1])], parts[-1], module, raising=False)
    return module


@pytest.fixture(params=["stub", "installed"])
def vllm_policies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """vLLM's module of EPLB policies: EPLB_POLICIES, AbstractEplbPolicy and DefaultEplbPolicy."""
    if request.param == "stub":
        yield vllm_stub(monkeypatch)
        return
    module = pytest.importorskip("vllm.distributed.eplb.policy", reason="vLLM is not installed")
    before = dict(module.EPLB_POLICIES)
    yield module
    module.EPLB_POLICIES.update(before)


def vllm_stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The interface as vLLM 0.32 documents it."""

    class AbstractEplbPolicy(ABC):
        @classmethod
        @abstractmethod
        def rebalance_experts(
            cls,
            weight: Any,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: Any = None,
        ) -> Any: ...

    class DefaultEplbPolicy(AbstractEplbPolicy):
        @classmethod
        def rebalance_experts(cls, *args: Any) -> Any:
            raise AssertionError("the engine's own planner was asked")

    return add_module(
        monkeypatch,
        "vllm.distributed.eplb.policy",
        AbstractEplbPolicy=AbstractEplbPolicy,
        DefaultEplbPolicy=DefaultEplbPolicy,
        EPLB_POLICIES={"default": DefaultEplbPolicy},
    )


def uneven_load(num_layers: int, num_logical: int, seed: int = 0) -> Any:
    """Returns [L, E] int64 tokens, log-normal."""
    return (1000 * np.random.default_rng(seed).lognormal(0, 1, (num_layers, num_logical))).astype(np.int64)


def engine_start(num_layers: int, num_logical: int, num_slots: int) -> Any:
    """Returns [L, P] int64, the placement that vLLM starts with: experts in order, redundant ones again from 0."""
    return np.tile(np.arange(num_slots) % num_logical, (num_layers, 1))


def engine_moves(old: Any, new: Any, num_ranks: int) -> int:
    """Returns how many experts the ranks must receive: old, new [L, P]."""
    pairs = zip(old.reshape(len(old) * num_ranks, -1), new.reshape(len(new) * num_ranks, -1), strict=True)
    return sum(len(set(has.tolist()) - set(had.tolist())) for had, has in pairs)


class SglangPoint:
    """SGLang's extension points, its own or stubs: what the adapter reads and replaces."""

    def __init__(
        self, algorithms: Any, hooks: Any, elastic: Any, location: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.algorithms, self._hooks, self._elastic, self.location = algorithms, hooks, elastic, location
        self._monkeypatch = monkeypatch
        self.own = algorithms.rebalance_experts

    def apply_hooks(self) -> None:
        """What SGLang does once all plugins have run."""
        self._hooks.HookRegistry.apply_hooks()

    def use(self, rows: Any) -> None:
        """Makes rows [L, P] the placement in use."""
        self.location.set_global_expert_location_metadata(
            SimpleNamespace(physical_to_logical_map_cpu=torch_of(rows)), allow_overwrite=True
        )

    def lose(self, num_ranks: int, lost: list[int]) -> None:
        """Makes ranks lost, as elastic EP sees it."""
        active = torch_of(np.array([int(rank not in lost) for rank in range(num_ranks)]))
        self._monkeypatch.setattr(
            self._elastic.ElasticEPStateManager, "_instance", SimpleNamespace(active_ranks=active), raising=False
        )


def torch_of(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


@pytest.fixture(params=["stub", "installed"])
def sglang_point(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangPoint]:
    """SGLang's algorithms, hooks, elastic state and placement in use."""
    if request.param == "stub":
        yield sglang_stub(monkeypatch)
        return
    from importlib import import_module

    pytest.importorskip("sglang.srt.plugins", reason="SGLang is not installed")
    names = "eplb.eplb_algorithms", "plugins.hook_registry", "elastic_ep.elastic_ep", "eplb.expert_location"
    point = SglangPoint(*(import_module(f"sglang.srt.{name}") for name in names), monkeypatch)
    registry = point._hooks.HookRegistry
    before = point.location.get_global_expert_location_metadata()
    yield point
    point.algorithms.rebalance_experts = point.own
    registry._hooks.clear()
    registry._patched.clear()
    point.location.set_global_expert_location_metadata(before, allow_overwrite=True)


def sglang_stub(monkeypatch: pytest.MonkeyPatch) -> SglangPoint:
    """The interfaces as SGLang 0.5.23 documents them."""
    from enum import Enum

    names = ["deepseek", "deepseek_hierarchical", "deepseek_vec", "elasticity_aware", "elasticity_aware_hierarchical"]

    def rebalance_experts(
        tokens_per_expert: Any,
        num_physical_experts: int,
        num_local_physical_experts: int,
        num_groups: int | None,
        num_nodes: int,
        algorithm: Any,
    ) -> Any:
        raise AssertionError("the engine's own planner was asked")

    class HookRegistry:
        hooks: ClassVar[list[Any]] = []

        @classmethod
        def register(cls, target: str, hook: Any, hook_type: Any) -> None:
            cls.hooks.append((target, hook, hook_type))

        @classmethod
        def apply_hooks(cls) -> None:
            for target, hook, hook_type in cls.hooks:
                owner, name = target.rsplit(".", 1)
                found = pkgutil.resolve_name(owner)
                setattr(found, name, hook if hook_type == "replace" else after(getattr(found, name), hook))

    def after(own: Any, hook: Any) -> Any:
        def both(*arguments: Any) -> Any:
            return hook(own(*arguments), *arguments)

        return both

    class EPLBManager:
        def __init__(self, layers: list[int], per_chunk: int | None):
            self._layers, self._per_chunk = layers, per_chunk

        def _compute_update_layer_ids_chunks(self) -> list[list[int]]:
            size = self._per_chunk or 1_000_000
            return [self._layers[first : first + size] for first in range(0, len(self._layers), size)]

    class ElasticEPStateManager:
        _instance = None

        @classmethod
        def instance(cls) -> Any:
            return cls._instance

    in_use: dict[str, Any] = {"metadata": None}
    add_module(monkeypatch, "sglang.srt.eplb.eplb_manager", EPLBManager=EPLBManager)
    return SglangPoint(
        add_module(
            monkeypatch,
            "sglang.srt.eplb.eplb_algorithms",
            rebalance_experts=rebalance_experts,
            EplbAlgorithm=Enum("EplbAlgorithm", names),
        ),
        add_module(
            monkeypatch,
            "sglang.srt.plugins.hook_registry",
            HookRegistry=HookRegistry,
            HookType=SimpleNamespace(REPLACE="replace", AFTER="after"),
        ),
        add_module(monkeypatch, "sglang.srt.elastic_ep.elastic_ep", ElasticEPStateManager=ElasticEPStateManager),
        add_module(
            monkeypatch,
            "sglang.srt.eplb.expert_location",
            get_global_expert_location_metadata=lambda: in_use["metadata"],
            set_global_expert_location_metadata=lambda value, allow_overwrite: in_use.update(metadata=value),
        ),
        monkeypatch,
    )
