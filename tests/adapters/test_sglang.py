"""Our planner in the place of SGLang's `rebalance_experts`.

`stub` = the documented interfaces, `installed` = SGLang's own modules.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.adapters import sglang
from moe_serve.adapters.plugin import POLICY, RANK_MOVES, START
from moe_serve.errors import PlacementError
from tests.adapters.conftest import SglangPoint, engine_start, uneven_load


def replaced(point: SglangPoint, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(POLICY, "incremental")
    sglang.register()
    point.apply_hooks()
    return point.algorithms.rebalance_experts


def arguments(point: SglangPoint, load: Any, slots: int, per_rank: int, **more: Any) -> dict[str, Any]:
    """Returns the call as SGLang makes it, with the load in two uneven steps."""
    steps = torch.from_numpy(np.stack([load // 3, load - load // 3]))
    return {
        "tokens_per_expert": steps,
        "num_physical_experts": slots,
        "num_local_physical_experts": per_rank,
        "num_groups": None,
        "num_nodes": 1,
        "algorithm": point.algorithms.EplbAlgorithm[more.pop("algorithm", "deepseek")],
        **more,
    }


def check_maps(rows: Any, slots_of: Any, count: Any, empty: tuple[int, ...] = ()) -> None:
    """The three maps say the same, and leave out the slots of lost ranks."""
    assert {rows.dtype, slots_of.dtype, count.dtype} == {torch.int64}
    for layer in range(len(rows)):
        for expert in range(count.shape[1]):
            held = [s for s in np.flatnonzero(rows[layer].numpy() == expert) if s not in empty]
            assert slots_of[layer, expert][slots_of[layer, expert] >= 0].tolist() == held
            assert count[layer, expert] == len(held) > 0


def test_an_installed_package_changes_nothing_until_it_is_asked(sglang_point: SglangPoint) -> None:
    sglang.register()
    sglang_point.apply_hooks()
    assert sglang_point.algorithms.rebalance_experts is sglang_point.own


def test_the_first_placement_and_the_next_one_edit_what_sglang_has(
    sglang_point: SglangPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = replaced(sglang_point, monkeypatch)
    load = uneven_load(3, 32)
    first = ours(**arguments(sglang_point, load, 40, 5))  # SGLang has no placement yet
    check_maps(*first)
    sglang_point.use(first[0].numpy())
    again = ours(**arguments(sglang_point, load, 40, 5))
    assert torch.equal(again[0], first[0])
    load[:, 3] += load.sum(axis=1) // 10
    moved = ours(**arguments(sglang_point, load, 40, 5))
    check_maps(*moved)
    assert 0 < (moved[0] != first[0]).sum() < 40
    assert torch.equal(moved[0], ours(**arguments(sglang_point, load, 40, 5))[0])  # every rank plans the same


def test_layers_move_by_gain_and_only_where_something_moves(
    sglang_point: SglangPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = replaced(sglang_point, monkeypatch)
    manager = pytest.importorskip("sglang.srt.eplb.eplb_manager").EPLBManager
    managed = manager.__new__(manager)
    layers = dict.fromkeys(range(1, 5))  # layer 0 is dense
    managed._layers, managed._per_chunk = list(layers), 2  # of the stub
    managed._model_runner = SimpleNamespace(model=SimpleNamespace(routed_experts_weights_of_layer=layers))
    managed._rebalance_layers_per_chunk = 2
    old, load = engine_start(5, 16, 20), np.full((5, 16), 1000)
    assert managed._compute_update_layer_ids_chunks() == [[1, 2], [3, 4]], "no plan yet: as SGLang has them"
    load[0] = 0
    load[1, 9] += 3000
    load[3, 9] += 9000
    load[4, 9] += 5000
    sglang_point.use(old)
    rows, *_ = ours(**arguments(sglang_point, load, 20, 5))
    changed = np.flatnonzero((rows.numpy() != old).any(axis=1)).tolist()
    assert {1, 3, 4} <= set(changed)
    chunks = managed._compute_update_layer_ids_chunks()
    assert [layer for chunk in chunks for layer in chunk][:3] == [3, 4, 1]
    assert sorted(layer for chunk in chunks for layer in chunk) == changed
    assert all(len(chunk) == 2 for chunk in chunks[:-1])
    for _ in range(4):
        sglang_point.use(rows.numpy())
        rows, *_ = ours(**arguments(sglang_point, load, 20, 5))
    assert managed._compute_update_layer_ids_chunks() == [], "nothing moves, so no layer takes a turn"


@pytest.mark.parametrize("policy", ["incremental", "refined"])
def test_without_redundant_slots_nothing_moves(
    sglang_point: SglangPoint, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv(POLICY, policy)
    sglang.register()
    sglang_point.apply_hooks()
    old = engine_start(3, 32, 32)
    sglang_point.use(old)
    new = sglang_point.algorithms.rebalance_experts(**arguments(sglang_point, uneven_load(3, 32), 32, 1))[0]
    assert np.array_equal(new.numpy(), old)


def test_a_limit_of_experts_to_one_rank_is_kept(sglang_point: SglangPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_MOVES, "1")
    ours, old = replaced(sglang_point, monkeypatch), engine_start(3, 32, 40)
    sglang_point.use(old)
    new = ours(**arguments(sglang_point, uneven_load(3, 32), 40, 10))[0].numpy()
    pairs = zip(old.reshape(12, 10), new.reshape(12, 10), strict=True)
    assert max(len(set(has.tolist()) - set(had.tolist())) for had, has in pairs) == 1


def test_layers_without_experts_keep_their_rows(sglang_point: SglangPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replaced(sglang_point, monkeypatch)
    old, load = engine_start(3, 16, 20), uneven_load(3, 16)
    load[0] = 0  # SGLang has a row for every layer of the model, dense ones too
    sglang_point.use(old)
    rows, *_ = ours(**arguments(sglang_point, load, 20, 5))
    assert np.array_equal(rows[0], old[0])
    assert not np.array_equal(rows[1], old[1])


def test_a_hierarchical_algorithm_keeps_groups_on_one_node(
    sglang_point: SglangPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = replaced(sglang_point, monkeypatch)
    sglang_point.use(engine_start(2, 32, 40))
    rows, *_ = ours(
        **arguments(
            sglang_point, uneven_load(2, 32), 40, 5, num_groups=4, num_nodes=2, algorithm="deepseek_hierarchical"
        )
    )
    node_has = [set((layer[20 * n : 20 * n + 20] // 8).tolist()) for layer in rows for n in range(2)]
    assert [len(groups) for groups in node_has] == [2, 2, 2, 2]


def test_lost_ranks_get_nothing(sglang_point: SglangPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replaced(sglang_point, monkeypatch)
    sglang_point.use(engine_start(2, 16, 24))
    sglang_point.lose(6, [1, 4])
    call = arguments(sglang_point, uneven_load(2, 16), 24, 4, algorithm="elasticity_aware", num_nodes=2, num_groups=2)
    lost = (4, 5, 6, 7, 16, 17, 18, 19)
    rows, slots_of, count = ours(**call)
    check_maps(rows, slots_of, count, lost)
    assert (rows[:, list(lost)] == 0).all()
    sglang_point.lose(6, [0, 1, 4])  # 12 slots for 16 experts
    with pytest.raises(PlacementError, match="num_slots is 24, of which 12"):
        ours(**call)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({POLICY: "milp"}, "incremental, refined, greedy"),
     ({POLICY: "greedy", START: "p.json"}, "--init-expert-location")],
)  # fmt: skip
def test_wrong_settings_end_sglangs_start_though_it_survives_a_plugins_exceptions(
    sglang_point: SglangPoint, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], says: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=says):
        sglang.register()


def test_another_signature_ends_the_start(monkeypatch: pytest.MonkeyPatch, sglang_point: SglangPoint) -> None:
    monkeypatch.setenv(POLICY, "incremental")
    monkeypatch.setattr(sglang_point.algorithms, "rebalance_experts", lambda load, num_slots: None)
    with pytest.raises(SystemExit, match="takes load, num_slots; the adapter knows tokens_per_expert, "):
        sglang.register()


def test_sglangs_own_metadata_takes_the_plan(sglang_point: SglangPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only against SGLang itself: its ExpertLocationMetadata calls the hooked function and builds all its maps."""
    location = sglang_point.location
    if not hasattr(location, "ExpertLocationMetadata"):
        pytest.skip("a stub has no ExpertLocationMetadata")
    replaced(sglang_point, monkeypatch)
    sglang_point.use(engine_start(2, 16, 24))
    moe = SimpleNamespace(eplb_algorithm="auto", ep_dispatch_algorithm="static", ep_join_mode="none")
    monkeypatch.setattr(location, "get_exec", lambda: SimpleNamespace(moe=moe))
    monkeypatch.setattr(location, "get_parallel", lambda: SimpleNamespace(nnodes=2, ep_size=6))
    monkeypatch.setattr(location, "get_device", lambda: SimpleNamespace(device="cpu"))
    monkeypatch.setattr(location.torch.distributed, "get_rank", lambda: 3)
    common = {
        "model_config_for_expert_location": SimpleNamespace(num_groups=2, num_layers=2, num_logical_experts=16),
        "num_physical_experts": 24,
        "ep_size": 6,
    }
    own = location.ExpertLocationMetadata
    monkeypatch.setattr(own, "_init_common", staticmethod(lambda model_config: common))
    made = own.init_by_eplb(None, torch.from_numpy(uneven_load(2, 16)))
    assert (made.num_layers, made.num_logical_experts, made.ep_size) == (2, 16, 6)
    assert (made.logical_to_rank_dispatch_physical_map >= 0).all()
    check_maps(
        made.physical_to_logical_map, made.logical_to_all_physical_map, made.logical_to_all_physical_map_num_valid
    )
