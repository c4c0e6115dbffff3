"""The engines' extension points: their own classes where the engine is installed, else stubs of what it documents.

Each test of an adapter runs against both: `stub` always, `installed` only where the engine can be imported.
"""

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_serve.adapters.settings import POLICY, START


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICY, raising=False)
    monkeypatch.delenv(START, raising=False)


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
