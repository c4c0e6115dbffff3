"""What every engine gets: a full placement, whatever our planners leave empty."""

import logging
from pathlib import Path

import numpy as np
import pytest

from moe_serve.adapters.plugin import POLICIES, AdapterSettings
from moe_serve.adapters.recording import LoadRecording
from moe_serve.adapters.replan import Cluster, default_rank_moves, layers_that_pay, replan
from moe_serve.eplb.files.traces import read_trace
from moe_serve.eplb.load import rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace


@pytest.mark.parametrize(
    ("load", "num_ranks", "per_rank"),
    [([1, 40, 68, 0, 8, 29], 2, 5), ([97, 17, 70, 29, 30, 99, 0, 0], 5, 6), ([0, 0, 0, 0], 4, 3)],
)
@pytest.mark.parametrize("policy", ["refined", "incremental", "greedy"])
def test_slots_in_which_no_replica_pays_are_filled_without_an_expert_twice_on_a_rank(
    load: list[int], num_ranks: int, per_rank: int, policy: str
) -> None:
    table = replan(np.array([load]), Cluster(num_ranks, num_slots=num_ranks * per_rank), None, policy)
    assert set(table.ravel().tolist()) == set(range(len(load)))
    assert all(len(set(rank)) == per_rank for rank in table.reshape(num_ranks, per_rank).tolist())


def test_a_rank_that_holds_all_experts_repeats_one() -> None:
    assert replan(np.array([[5, 1]]), Cluster(2, num_slots=6), None, "greedy").min() == 0


@pytest.mark.parametrize("load", [[19, 0, 9, 62, 0, 0, 29, 0], [0, 0, 0, 0, 0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize("policy", ["refined", "incremental", "greedy"])
def test_slots_that_are_filled_keep_router_groups_on_one_node(load: list[int], policy: str) -> None:
    cluster = Cluster(4, num_nodes=2, num_slots=20, num_groups=4, hierarchical=True)
    first, second = (set(node) for node in replan(np.array([load]), cluster, None, policy).reshape(2, 10).tolist())
    assert not first & second
    assert all({2 * group, 2 * group + 1} <= first or {2 * group, 2 * group + 1} <= second for group in range(4))


@pytest.mark.parametrize(
    ("tokens", "min_gain", "pays"),
    [
        ([90_000, 10_000, 10_000, 90_000], 0.0, True),  # two hot experts on a rank each, swapped: 180 -> 100 thousand
        ([90_000, 10_000, 10_000, 90_000], 0.5, False),  # 44 % of the time for one expert to each rank
        ([50_200, 50_000, 50_000, 49_800], 0.0, False),  # chance
    ],
)
def test_a_layer_moves_only_where_it_pays(tokens: list[int], min_gain: float, pays: bool) -> None:
    current = Placement(np.array([[0, 3, 1, 2]], dtype=np.int32), 4, 2)
    better = np.array([[[0, 2], [1, 3]]], dtype=np.int32)
    assert layers_that_pay(np.array([tokens], dtype=np.float64), current, better, min_gain).tolist() == [pays]


@pytest.mark.parametrize("policy", ["refined", "incremental", "greedy"])
def test_a_steady_load_moves_nothing_after_the_first_plan(policy: str) -> None:
    """Tokens are drawn anew, 60 an expert: a plan that levels one window gains nothing in the next."""
    rng = np.random.default_rng(3)
    shares = rng.dirichlet(np.full(64, 1.0), size=6)
    cluster = Cluster(8, num_slots=80)
    old = np.tile(np.arange(80) % 64, (6, 1))
    moved = []
    for _ in range(6):
        load = rng.multinomial(64 * 60, shares)
        new = replan(load, cluster, old, policy, min_gain=0.01)
        moved.append(float((new != old).mean()))
        old = new
    print(policy, moved)
    assert moved[0] > 0.05
    assert max(moved[2:]) <= 0.03


def test_ranks_of_few_slots_may_receive_any_number_of_experts() -> None:
    assert [default_rank_moves(Cluster(8, num_slots=8 * slots)) for slots in (1, 2, 3, 4, 9)] == [
        None,
        None,
        None,
        1,
        2,
    ]


def test_a_recording_that_cannot_be_written_ends_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("moe_serve"), "propagate", True)
    (tmp_path / "other.jsonl").write_text("not a trace\n")
    for path in (tmp_path / "other.jsonl", tmp_path / "nowhere" / "load.jsonl"):
        recording = LoadRecording(path)
        recording.add(np.ones((2, 4)), 10)
        recording.add(np.ones((2, 4)), 10)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert (tmp_path / "other.jsonl").read_text() == "not a trace\n"


def test_a_second_run_goes_on_in_the_file(tmp_path: Path) -> None:
    for _ in range(2):
        recording = LoadRecording(tmp_path / "load.jsonl")
        recording.add(np.ones((2, 4)), 10)
        recording.close()
    assert [record.first_step for record in read_trace(tmp_path / "load.jsonl")] == [0, 10]


@pytest.mark.parametrize("num_slots", [256, 320])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_slot_on_each_rank_takes_few_moves_for_a_load_that_drifts(policy: str, num_slots: int) -> None:
    drift = SyntheticLoad("lognormal", 6, 2, 256, rho=0.98, tokens_per_step=100_000)
    cluster, default = Cluster(num_slots, num_nodes=num_slots // 8, num_slots=num_slots), AdapterSettings(policy)
    old, moved = np.tile(np.arange(num_slots) % 256, (2, 1)), []
    for record in synthetic_trace(drift):
        new = replan(record.tokens, cluster, old, policy, min_gain=default.min_gain)
        gained = rank_load_top(record.tokens, old) - rank_load_top(record.tokens, new)
        assert ((gained > 0) == (new != old).any(axis=1)).all(), "none without gain"
        moved.append(float((new != old).mean()))
        old = new
    assert np.mean(moved[1:]) <= 0.03
    assert (max(moved) > 0) == (num_slots > 256), "without redundant experts no other placement is better"


def rank_load_top(tokens: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns the load of the busiest rank of each layer where each rank has one slot."""
    return rank_load(tokens, Placement(table.astype(np.int32), tokens.shape[1], table.shape[1])).max(axis=1)
