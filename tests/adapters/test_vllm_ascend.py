"""Our planner as vllm-ascend's policy, against stubs of its factory and abstract class.

The rules are those that its worker checks, and it keeps a layer's old row where one is broken: all experts placed, none
twice on a rank, and none moved inside a rank.
"""

import logging
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.adapters import vllm_ascend
from moe_serve.adapters.plugin import POLICY, START, AdapterSettings
from tests.adapters.conftest import add_module, engine_start, uneven_load


class PolicyFactory:
    @staticmethod
    def generate_policy(policy_type: int) -> Any:
        return "their own"


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Any:
    class EplbPolicy:
        def rebalance_experts(self, current_expert_table: Any, expert_workload: Any) -> Any: ...

    own = type("PolicyFactory", (PolicyFactory,), {})
    add_module(monkeypatch, "vllm_ascend.eplb.core.policy.policy_abstract", EplbPolicy=EplbPolicy)
    return add_module(monkeypatch, "vllm_ascend.eplb.core.policy.policy_factory", PolicyFactory=own).PolicyFactory


def test_it_acts_where_it_is_asked_and_vllm_ascend_is_there(
    factory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_ascend.register()
    assert factory.generate_policy(2) == "their own"
    monkeypatch.setenv(POLICY, "incremental")
    vllm_ascend.register()
    assert pickle.loads(pickle.dumps(factory.generate_policy(2))).settings == AdapterSettings("incremental")
    monkeypatch.setenv(START, "p.json")
    logging.getLogger("moe_serve").propagate = True
    monkeypatch.setattr(vllm_ascend, "configure_logging", lambda who: None)
    vllm_ascend.register()
    assert "give it expert_map_path" in caplog.text


def test_a_vllm_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(POLICY, "incremental")
    monkeypatch.setattr(vllm_ascend, "configure_logging", lambda who: pytest.fail("logs as the planner of nobody"))
    vllm_ascend.register()
    assert not caplog.records
    assert not [name for name in sys.modules if name.startswith("vllm_ascend")]


@pytest.mark.parametrize("steps", [(), (7,)], ids=["summed", "per step"])
def test_a_plan_keeps_the_rules_of_its_worker(steps: tuple[int, ...]) -> None:
    old = engine_start(3, 32, 40).reshape(3, 8, 5)
    count = np.stack([np.bincount(row.ravel(), minlength=32) for row in old])
    work = np.take_along_axis(uneven_load(3, 32) // count, old.reshape(3, -1), axis=1).reshape(old.shape)
    work = np.broadcast_to(work, (*steps, *old.shape)).copy()
    policy = vllm_ascend.MoeServePolicy(AdapterSettings("incremental"))
    changed, order, new = policy.rebalance_experts(torch.from_numpy(old), torch.from_numpy(work))
    assert (changed, order, new.dtype, tuple(new.shape)) == (1, [0, 1, 2], torch.int64, (3, 8, 5))
    for before, after in zip(old, new.numpy(), strict=True):
        assert set(after.ravel()) == set(range(32))
        for had, has in zip(before, after, strict=True):
            assert len(set(has)) == 5
            stays = np.isin(has, had)
            assert np.array_equal(has[stays], had[stays])
    limited = vllm_ascend.MoeServePolicy(AdapterSettings("incremental", max_rank_moves=1))
    _, _, new = limited.rebalance_experts(torch.from_numpy(old), torch.from_numpy(work))
    for had, has in zip(old.reshape(24, 5), new.numpy().reshape(24, 5), strict=True):
        assert len(set(has) - set(had)) <= 1
    unchanged, _, same = policy.rebalance_experts(torch.from_numpy(old), torch.zeros(old.shape))
    assert (unchanged, same.tolist()) == (0, old.tolist())


@pytest.mark.parametrize("policy", ["incremental", "refined", "greedy"])
def test_without_redundant_slots_nothing_changes(policy: str) -> None:
    old = engine_start(2, 16, 16).reshape(2, 16, 1)
    work = np.take_along_axis(uneven_load(2, 16), old.reshape(2, -1), axis=1).reshape(old.shape)
    changed, _, new = vllm_ascend.MoeServePolicy(AdapterSettings(policy)).rebalance_experts(
        torch.from_numpy(old), torch.from_numpy(work)
    )
    assert (changed, new.tolist()) == (0, old.tolist())


def test_a_plan_that_fails_is_the_placement_in_use() -> None:
    old = torch.from_numpy(engine_start(1, 8, 8).reshape(1, 4, 2))
    work = torch.full(old.shape, float("inf"))
    changed, _, new = vllm_ascend.MoeServePolicy(AdapterSettings("incremental")).rebalance_experts(old, work)
    assert changed == 0
    assert torch.equal(new, old)
