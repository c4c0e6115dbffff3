"""Our planner behind vLLM's AbstractEplbPolicy: `stub` = the documented signature, `installed` = vLLM's own module."""

import inspect
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.adapters import vllm
from moe_serve.adapters.plugin import MIN_GAIN, POLICY, RANK_MOVES, RECORD, START, WINDOW
from moe_serve.eplb.files.placements import write_placement
from moe_serve.eplb.files.traces import read_trace
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import plan
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.topology import Topology
from tests.adapters.conftest import engine_moves, engine_start, uneven_load


def served(load: Any, rows: Any, num_ranks: int) -> float:
    placement = Placement(rows.astype(np.int32), load.shape[1], num_ranks)
    return float(balancedness(rank_load(load, placement), np.arange(num_ranks)).mean())


def registered(vllm_policies: Any, monkeypatch: pytest.MonkeyPatch, policy: str = "incremental") -> Any:
    monkeypatch.setenv(POLICY, policy)
    vllm.register()
    return vllm_policies.EPLB_POLICIES["default"]


def test_an_installed_package_changes_nothing_until_it_is_asked(vllm_policies: Any) -> None:
    before = dict(vllm_policies.EPLB_POLICIES)
    vllm.register()
    assert before == vllm_policies.EPLB_POLICIES


def test_the_policy_takes_the_default_name_and_has_the_interface(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = registered(vllm_policies, monkeypatch)
    again = registered(vllm_policies, monkeypatch)  # vLLM may load plugins more than once
    assert issubclass(ours, vllm_policies.AbstractEplbPolicy)
    assert issubclass(again, vllm_policies.AbstractEplbPolicy)
    assert list(vllm_policies.EPLB_POLICIES) == ["default"]
    theirs = inspect.signature(vllm_policies.AbstractEplbPolicy.rebalance_experts)
    assert list(inspect.signature(ours.rebalance_experts).parameters) == list(theirs.parameters)


def test_another_signature_ends_vllms_start(vllm_policies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICY, "incremental")
    monkeypatch.setattr(vllm_policies.AbstractEplbPolicy, "rebalance_experts", lambda weight, ranks: None)
    with pytest.raises(ConfigError, match=r"takes weight, ranks; the adapter knows weight, num_replicas, .*vLLM 0\.32"):
        vllm.register()


@pytest.mark.parametrize("policy", ["incremental", "refined", "greedy"])
def test_a_plan_has_vllms_form_and_the_same_bits_for_every_rank(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    ours = registered(vllm_policies, monkeypatch, policy)
    load, old = uneven_load(3, 64), engine_start(3, 64, 80)
    args = torch.from_numpy(load).int(), 80, 8, 2, 16, torch.from_numpy(old).int()
    new = ours.rebalance_experts(*args)
    assert (new.dtype, new.device.type, tuple(new.shape)) == (torch.int64, "cpu", (3, 80))
    assert torch.equal(new, ours.rebalance_experts(*args))
    assert all(set(row) == set(range(64)) for row in new.tolist())
    assert served(load, new.numpy(), 16) > served(load, old, 16) + 0.2


def test_experts_that_stay_keep_their_slot_and_a_second_plan_moves_nothing(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = registered(vllm_policies, monkeypatch)
    load, old = torch.from_numpy(uneven_load(3, 64)), torch.from_numpy(engine_start(3, 64, 80))
    new = ours.rebalance_experts(load, 80, 1, 1, 8, old)
    for before, after in zip(old.reshape(24, 10).tolist(), new.reshape(24, 10).tolist(), strict=True):
        assert all(before.index(e) == slot for slot, e in enumerate(after) if e in before)
    assert 0 < (old != new).sum() < old.numel() / 2
    assert torch.equal(ours.rebalance_experts(load, 80, 1, 1, 8, new), new)


@pytest.mark.parametrize("policy", ["incremental", "refined", "greedy"])
@pytest.mark.parametrize(("slots", "most"), [(64, 0.0), (80, 0.25), (128, 0.6)])
def test_no_expert_moves_for_nothing(
    vllm_policies: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    slots: int,
    most: float,
) -> None:
    """With as many slots as experts, one on each rank, all of them moved and no rank was any better off."""
    ours = registered(vllm_policies, monkeypatch, policy)
    logging.getLogger("moe_serve").propagate = True
    ranks = slots if slots < 128 else 64
    load, old = torch.from_numpy(uneven_load(3, 64)), engine_start(3, 64, slots)
    with caplog.at_level(logging.INFO, "moe_serve"):
        new = ours.rebalance_experts(load, slots, 1, ranks // 8, ranks, torch.from_numpy(old))
    moves = engine_moves(old, new.numpy(), ranks)
    assert moves <= most * new.numel()
    assert f"{moves} of {new.numel()} slots receive an expert" in caplog.text
    assert torch.equal(ours.rebalance_experts(load, slots, 1, ranks // 8, ranks, new), new)


def test_a_limit_of_experts_to_one_rank_is_kept(vllm_policies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load, old = torch.from_numpy(uneven_load(3, 32)), engine_start(3, 32, 40)
    busiest = []
    for most in ("", "1"):
        monkeypatch.setenv(RANK_MOVES, most)
        new = registered(vllm_policies, monkeypatch).rebalance_experts(load, 40, 1, 1, 4, torch.from_numpy(old)).numpy()
        busiest.append(max(
            len(set(has.tolist()) - set(had.tolist()))
            for had, has in zip(old.reshape(12, 10), new.reshape(12, 10), strict=True)
        ))  # fmt: skip
    assert busiest[0] > busiest[1] == 1


def test_groups_of_the_router_stay_on_one_node_where_vllms_own_planner_keeps_them(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = registered(vllm_policies, monkeypatch)
    load, old = torch.from_numpy(uneven_load(2, 64)), torch.from_numpy(engine_start(2, 64, 80))
    new = ours.rebalance_experts(load, 80, 8, 4, 8, old).reshape(2, 4, 20)
    for layer in new:
        nodes_of = [{node for node in range(4) if (layer[node] // 8 == group).any()} for group in range(8)]
        assert all(len(nodes) == 1 for nodes in nodes_of)
    flat = ours.rebalance_experts(load, 80, 3, 4, 8, old)  # 3 groups do not spread over 4 nodes, nor divide 64
    assert set(flat[0].tolist()) == set(range(64))


@pytest.mark.parametrize(
    ("layers", "experts", "slots", "ranks"),
    [(1, 1, 1, 1), (2, 8, 8, 8), (1, 60, 64, 16), (2, 4, 24, 4), (1, 3, 64, 64)],
)
def test_awkward_sizes_fill_every_slot(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch, layers: int, experts: int, slots: int, ranks: int
) -> None:
    ours = registered(vllm_policies, monkeypatch)
    old = torch.from_numpy(engine_start(layers, experts, slots))
    for load in (uneven_load(layers, experts), np.eye(layers, experts, dtype=np.int64) * 10**9):
        for before in (old, None):
            new = ours.rebalance_experts(torch.from_numpy(load), slots, 1, 1, ranks, before)
            assert all(set(row) == set(range(experts)) for row in new.tolist())


def test_a_window_without_load_as_in_vllms_profile_run_changes_nothing(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = registered(vllm_policies, monkeypatch)
    old = torch.from_numpy(engine_start(2, 8, 12)).int()
    assert torch.equal(ours.rebalance_experts(torch.zeros(2, 8), 12, 1, 1, 4, old), old.long())


@pytest.mark.parametrize("slots_before", [32, 48], ids=["two ranks leave", "ranks join"])
def test_ranks_that_leave_or_join_get_a_full_placement(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch, slots_before: int
) -> None:
    ours = registered(vllm_policies, monkeypatch)
    old = engine_start(2, 16, slots_before)
    old[:, 40:] = -1  # ranks that have just joined hold nothing yet
    num_slots = 24 if slots_before == 32 else 48
    for load in (uneven_load(2, 16), np.zeros((2, 16), dtype=np.int64)):
        new = ours.rebalance_experts(torch.from_numpy(load), num_slots, 1, 1, num_slots // 4, torch.from_numpy(old))
        assert new.shape == (2, num_slots)
        assert all(set(row) == set(range(16)) for row in new.tolist())


def test_an_impossible_plan_keeps_the_placement_in_use_and_says_why(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = registered(vllm_policies, monkeypatch)
    logging.getLogger("moe_serve").propagate = True
    broken = uneven_load(2, 8).astype(np.float64)
    broken[1, 3] = np.nan
    old = torch.from_numpy(engine_start(2, 8, 12))
    with caplog.at_level(logging.ERROR, "moe_serve"):
        kept = ours.rebalance_experts(torch.from_numpy(broken), 12, 1, 1, 4, old)
    assert torch.equal(kept, old)
    assert "no new placement, the one in use stays" in caplog.text
    with pytest.raises(PlacementError):  # nothing to keep
        ours.rebalance_experts(torch.from_numpy(broken), 12, 1, 1, 4, None)


def test_the_first_rebalance_installs_the_placement_of_a_file(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    load = uneven_load(2, 16)
    planned = plan(load, Topology(1, 4), 20)
    write_placement(planned.placement, tmp_path / "start.json", "vllm")
    monkeypatch.setenv(START, str(tmp_path / "start.json"))
    ours = registered(vllm_policies, monkeypatch)
    first = ours.rebalance_experts(torch.from_numpy(load), 20, 1, 1, 4, torch.from_numpy(engine_start(2, 16, 20)))
    for found, file in zip(first.reshape(2, 4, 5), planned.placement.physical_to_logical.reshape(2, 4, 5), strict=True):
        assert sorted(sorted(rank) for rank in found.tolist()) == sorted(sorted(rank) for rank in file.tolist())
    assert engine_moves(engine_start(2, 16, 20), first.numpy(), 4) < engine_moves(
        engine_start(2, 16, 20), planned.placement.physical_to_logical, 4
    ), "ranks are relabelled"
    later = torch.from_numpy(uneven_load(2, 16, seed=1))
    monkeypatch.delenv(START)
    without = registered(vllm_policies, monkeypatch)  # once experts moved, the file plays no part
    args = later, 20, 1, 1, 4, first
    assert torch.equal(ours.rebalance_experts(*args), without.rebalance_experts(*args))
    draft = torch.from_numpy(engine_start(1, 16, 20))  # a draft model has other layers: the file is not for it
    assert ours.rebalance_experts(later[:1], 20, 1, 1, 4, draft).shape == (1, 20)


def test_the_load_that_vllm_counts_is_a_trace_for_our_tools(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second process of the engine writes nothing, a second run goes on; a draft model is left out."""
    path = tmp_path / "load.jsonl"
    monkeypatch.setenv(RECORD, str(path))
    monkeypatch.setenv(WINDOW, "250")
    ours = registered(vllm_policies, monkeypatch)
    other = registered(vllm_policies, monkeypatch)
    loads = [np.vstack([np.zeros((1, 32), dtype=np.int64), uneven_load(3, 32, seed)]) for seed in range(2)]
    old = torch.from_numpy(engine_start(4, 32, 40))
    for load in loads:
        for policy in (ours, other):
            old = policy.rebalance_experts(torch.from_numpy(load), 40, 1, 1, 8, old)
    draft = torch.from_numpy(engine_start(1, 16, 16))
    ours.rebalance_experts(torch.from_numpy(uneven_load(1, 16)), 16, 1, 1, 4, draft)
    trace = read_trace(path)
    assert trace.moe_layer_ids == (1, 2, 3), "the first layer never has load"
    assert [(record.first_step, record.num_steps, record.phase) for record in trace] == [
        (0, 250, "mixed"),
        (250, 250, "mixed"),
    ]
    for record, load in zip(trace, loads, strict=True):
        assert np.array_equal(record.tokens, load[1:])


@pytest.mark.parametrize(
    ("settings", "says"),
    [({POLICY: "fastest"}, "incremental, refined, greedy"), ({START: "x.json"}, "set MOE_SERVE_EPLB=incremental"),
     ({POLICY: "greedy", START: "/nowhere.json"}, "does not exist"),
     ({RANK_MOVES: "1"}, "MOE_SERVE_EPLB_MAX_MOVES_PER_RANK is set but"),
     ({POLICY: "incremental", RANK_MOVES: "0"}, "is '0'; give a whole number of at least 1"),
     ({POLICY: "incremental", RANK_MOVES: "²"}, "is '²'; give a whole number"),
     ({POLICY: "incremental", MIN_GAIN: "1"}, "MIN_GAIN is '1'; give a share from 0"),
     ({POLICY: "incremental", RECORD: "load.npz"}, "ends in .jsonl"),
     ({WINDOW: "100"}, "MOE_SERVE_EPLB_WINDOW is set but"),
     ({POLICY: "refined", RANK_MOVES: "1"}, "policy refined plans anew and ignores")],
)  # fmt: skip
def test_wrong_settings_end_vllms_start(
    vllm_policies: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], says: str
) -> None:
    before = dict(vllm_policies.EPLB_POLICIES)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ConfigError, PlacementError), match=says):
        vllm.register()
    assert before == vllm_policies.EPLB_POLICIES
