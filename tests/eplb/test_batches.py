"""Batches differ from the windows that they are in: the draw of one, the fit to single steps, and what it costs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_serve.eplb.cost.batches import (
    excess_of_ranks,
    expected_experts,
    find_spread,
    shares_of_batch,
    tokens_of_batch,
    within_capacity,
)
from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.files.traces import read_trace
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.replay.advise import AdviseSettings, advise
from moe_serve.eplb.replay.costs import ProfileCosts, Serving
from moe_serve.eplb.replay.replay import Scorer
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.replay.simulator import Simulation, Sweep, simulate
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.topology import Topology

DEMO = load_model_profile("demo")
LAYERS, EXPERTS, TOPK = DEMO.num_moe_layers, DEMO.num_logical, DEMO.topk


def drawn_steps(spread: float, requests: int, prompt: int, steps: int = 60, seed: int = 0) -> np.ndarray:
    """Returns [S, L, E] tokens of steps whose requests each have shares of their own: token by token, no formula."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(64, 5.0), size=3)
    out = np.zeros((steps, 3, 64), dtype=np.int64)
    for step in range(steps):
        for _ in range(requests):
            own = shares_of_batch(shares, spread, 1, 1e9, rng)
            for layer in range(3):
                weights = np.log(own[layer] + 1e-300) + rng.gumbel(size=(prompt, 64))
                np.add.at(out[step, layer], np.argsort(-weights, axis=1)[:, :4], 1)
    return out


@pytest.mark.parametrize(("spread", "requests", "prompt"), [(0.0, 8, 64), (0.5, 8, 64), (0.5, 64, 4), (2.0, 8, 64)])
def test_the_spread_of_requests_is_found_from_single_steps(spread: float, requests: int, prompt: int) -> None:
    """A draw of four different experts lets the popular ones lose, so a large spread is found too small."""
    found = find_spread(passes(drawn_steps(spread, requests, prompt)), 4, prompt, 8)
    assert found is not None
    print(f"spread {spread}, {requests} requests of {prompt} tokens: {found.words()}")
    assert 0.7 * spread - 0.05 <= found.spread <= 1.25 * spread + 0.1
    assert found.low <= found.spread <= found.high
    assert found.drawn == pytest.approx(found.measured, rel=0.05), "passes that the fit has not seen"
    if spread * prompt > 4:
        assert abs(found.by_chance - found.measured) > 2 * abs(found.drawn - found.measured)


def test_a_load_that_changes_is_no_spread() -> None:
    first, second = (drawn_steps(0.0, 8, 64, steps=32, seed=seed) for seed in (0, 1))
    found = find_spread(passes(np.concatenate([first, second])), 4, 64, 8)
    assert found is not None
    assert found.num_passes == 64
    assert found.spread < 0.1


def test_windows_without_single_passes_of_prompts_show_no_spread() -> None:
    steps = drawn_steps(1.0, 4, 16, steps=8)
    assert find_spread(passes(steps), 4, 16, 8) is not None
    assert find_spread(passes(steps[:6]), 4, 16, 8) is None, "too few"
    assert find_spread(passes(steps, "decode"), 4, 16, 8) is None
    assert find_spread(passes(steps), 4, 1, 8) is None, "prompts of one token"
    assert find_spread(LoadTrace.of([record_of(steps, keep=False)], topk=4), 4, 16, 8) is None
    whole = find_spread(LoadTrace.of([record_of(steps, keep=True)], topk=4), 4, 16, 8)
    assert whole == find_spread(passes(steps), 4, 16, 8)


def test_experts_are_dealt_out_by_their_shares() -> None:
    shares = np.array([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    steps = np.array([[[1.0, 4, 3, 2], [0, 0, 0, 0]], [[5, 4, 0, 0], [1, 0, 0, 3]]])
    assert excess_of_ranks(steps, shares, 2).tolist() == [[1, 0], [2, 2]], "experts 1 and 0 against 2 and 3"


def passes(steps: np.ndarray, phase: str = "prefill") -> LoadTrace:
    """Returns the steps [S, L, E] as a recorder of single passes writes them."""
    return LoadTrace.of([LoadRecord(i, 1, phase, step) for i, step in enumerate(steps)], topk=4)


def record_of(per_step: np.ndarray, keep: bool) -> LoadRecord:
    return LoadRecord(0, len(per_step), "prefill", per_step.sum(axis=0), per_step=per_step if keep else None)


def test_each_layer_takes_another_step_of_the_record() -> None:
    per_step = np.arange(4)[:, None, None] * np.ones((4, 2, 3), dtype=np.int64)  # the first step is idle
    tokens, is_mean = tokens_of_batch(record_of(per_step, keep=True), 0.0, 1, 8)
    assert not is_mean
    assert tokens.tolist() == [[1, 1, 1], [2, 2, 2]]


def test_a_window_without_single_steps_is_drawn_alike_each_time_and_keeps_its_tokens() -> None:
    record = record_of(drawn_steps(0.0, 4, 32, steps=4), keep=False)
    first, is_mean = tokens_of_batch(record, 1.0, 4, 128)
    assert not is_mean
    assert np.array_equal(first, tokens_of_batch(record, 1.0, 4, 128)[0])
    assert np.array_equal(first.sum(axis=1), record.tokens.sum(axis=1) / 4)
    assert tokens_of_batch(record, 0.0, 4, 128)[1], "without a spread the means are priced"
    assert tokens_of_batch(replace(record, num_steps=1), 1.0, 4, 128)[1], "a window of one step is a batch already"


def test_windows_with_a_spread_cost_what_their_single_steps_cost() -> None:
    """The same load with single steps, and as sums with the spread that was found from them."""
    rng = np.random.default_rng(1)
    shares = np.full((LAYERS, EXPERTS), 1 / EXPERTS)
    requests, prompt = 16, 2048
    tokens = requests * prompt
    per_step = np.stack(
        [rng.multinomial(tokens * TOPK, shares_of_batch(shares, 16.0, requests, tokens, rng)) for _ in range(32)]
    )
    topology = Topology(1, 4)
    costs = ProfileCosts(CostModel(load_hardware("H800"), DEMO, topology), Serving("prefill", float(prompt)))
    found = find_spread(passes(per_step), TOPK, prompt, topology.num_ranks)
    assert found is not None
    drawn = replace(costs, serving=replace(costs.serving, request_spread=found.spread))
    table = np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))
    in_order = Placement(table, EXPERTS, topology.num_ranks)
    seconds = []
    for keep, prices in ((True, costs), (False, drawn), (False, costs)):
        scorer = Scorer(topology, TOPK, prices)
        parts = per_step.reshape(8, 4, LAYERS, EXPERTS)
        seconds.append(np.mean([scorer.score(record_of(part, keep), in_order).step_s for part in parts]))
    single, by_spread, by_mean = seconds
    print(f"single steps {single:.3e} s, drawn {by_spread:.3e} s, means {by_mean:.3e} s, spread {found.spread:.2f}")
    assert by_spread == pytest.approx(single, rel=0.03)
    assert by_mean < 0.95 * single


def test_few_prompts_in_a_step_leave_less_for_a_plan_to_gain() -> None:
    def gain(spread: float) -> float:
        simulation = Simulation(
            DEMO,
            load_hardware("H800"),
            Sweep(nodes=(1,), redundant=(4,), window_steps=(20,)),
            load=SyntheticLoad(num_windows=12, rho=1.0, skew=0.8),
            tokens_per_rank=4096,
            serving=Serving("prefill", 4096.0, "none", request_spread=spread),
            policies=("greedy",),
        )
        rows = {row["policy"]: row for row in next(iter(simulate(simulation))).rows()}
        return float(rows["do nothing"]["step_s"] / rows["greedy"]["step_s"])

    assert 1 < gain(8.0) < gain(0.0)


def test_experts_within_their_capacity_serve_what_is_left_or_all() -> None:
    by_rank = np.array([[9.0, 3, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]])[:, None]
    dropped = within_capacity(by_rank, 1.0, moves=False)
    assert dropped.tolist() == [[3, 3, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]]
    moved = within_capacity(by_rank, 1.5, moves=True)
    assert np.allclose(moved, [[5, 11 / 3, 5 / 3, 5 / 3], [2, 2, 2, 2], [0, 0, 0, 0]]), "4 for room of 2, 5 and 5"
    four = np.repeat(by_rank / 4, 4, axis=1)
    assert within_capacity(four, 1.0, moves=False)[0].tolist() == [4, 3, 0, 0], "each rank rounds up"
    assert np.array_equal(within_capacity(four, 9.0, moves=True), by_rank[:, 0])
    uneven = np.array([[[4.0, 0, 0, 0], [0, 4, 0, 0]]])
    assert within_capacity(uneven, 1.0, moves=False).tolist() == [[1, 1, 0, 0]]
    assert within_capacity(uneven, 1.0, moves=True).tolist() == [[2, 2, 2, 2]]


@pytest.mark.parametrize("moves", [False, True])
def test_a_trace_of_tokens_is_limited_as_the_ranks_limit_them(moves: bool, tmp_path: Path) -> None:
    """Ranks of other sizes and tastes, whose dumps hold the experts of each token."""
    torch = pytest.importorskip("torch")
    from moe_serve.kernels.capacity import ExpertCapacity, limit_experts
    from moe_serve.kernels.forms import RouterSpec
    from moe_serve.kernels.topk_gate import topk_gate_reference

    spec, served = RouterSpec(EXPERTS, TOPK), np.zeros((LAYERS, EXPERTS))
    changed = total = 0
    for rank, num_rows in enumerate((7, 64, 200, 1)):
        chosen = []
        for layer in range(LAYERS):
            logits = torch.randn(num_rows, EXPERTS) + 2 * torch.randn(EXPERTS)
            ids, weights = topk_gate_reference(logits, None, spec, torch.zeros(EXPERTS, dtype=torch.int64))
            chosen.append(ids.clone())
            changed += int(limit_experts(logits, None, spec, ids, weights, ExpertCapacity(1.25, moves)).sum())
            served[layer] += np.bincount(ids[ids >= 0].numpy(), minlength=EXPERTS)
        total += LAYERS * num_rows * TOPK
        record = {"forward_pass_id": 0, "rank": rank, "forward_mode": 2, "topk_ids_of_layer": torch.stack(chosen)}
        table = torch.arange(EXPERTS).expand(LAYERS, -1).contiguous()
        torch.save({"records": [record], "last_physical_to_logical_map": table}, tmp_path / f"of_rank_{rank}.pt")
    trace = read_trace(str(tmp_path))
    serving = Serving(expert_capacity=1.25, over_capacity="next" if moves else "drop")
    costs = ProfileCosts(CostModel(load_hardware("H800"), DEMO, Topology(1, 4)), serving)
    (window,) = trace
    found, _ = costs.batch_of(window, window.tokens[0].sum() / TOPK)
    if moves:
        assert found.sum() == pytest.approx(served.sum(), rel=0.02), "few find no expert with room"
    else:
        assert np.array_equal(found, served)
    said = costs.capacity_words(trace)
    assert said.startswith(f"{changed / total:.2%} of the choices")
    assert said.endswith("counted on each rank in each step")


def test_the_share_beyond_a_capacity_is_that_of_steps_and_says_where_it_was_counted() -> None:
    layers, experts = DEMO.num_moe_layers, DEMO.num_logical
    skewed, even = np.zeros((layers, experts), dtype=np.int64), np.full((layers, experts), 400)
    skewed[:, 0] = 400 * experts
    costs = ProfileCosts(CostModel(load_hardware("H800"), DEMO, Topology(1, 4)), Serving(expert_capacity=1.25))
    by_rank = np.repeat(skewed[:, None] // 4, 4, axis=1)
    windows = [LoadRecord(0, 1, "decode", skewed, by_source=by_rank), LoadRecord(1, 999, "decode", 999 * even)]
    said = costs.capacity_words(LoadTrace.of(windows, topk=DEMO.topk))
    beyond = (1 - 1.25 / experts) / 1000
    assert said.startswith(f"{beyond:.2%} of the choices"), said
    assert said.endswith(
        "counted on each rank in each step in 1 of 2 windows, estimated from the load of all ranks in the others"
    )
    empty = LoadTrace.of([LoadRecord(0, 1, "decode", np.zeros_like(even))], topk=DEMO.topk)
    assert costs.capacity_words(empty).startswith("no choices")


def test_a_capacity_makes_steps_of_an_uneven_load_shorter_and_reports_what_is_beyond_it() -> None:
    def case(capacity: float | None, over: str = "next"):
        serving = Serving("prefill", 4096.0, "none", expert_capacity=capacity, over_capacity=over)
        load = SyntheticLoad(num_windows=3, skew=1.0)
        return simulate(
            Simulation(DEMO, load_hardware("H800"), Sweep(nodes=(1,), redundant=(0,)), load=load, serving=serving,
                       tokens_per_rank=4096, policies=(), plan_latency_s=0)
        )[0]  # fmt: skip

    free, moved, dropped = case(None), case(1.25), case(1.25, "drop")
    steps = [next(each.rows())["step_s"] for each in (free, moved, dropped)]
    assert steps[0] > steps[1] > steps[2]
    assert "capacity" not in free.report.conditions
    assert moved.report.conditions["capacity"] == dropped.report.conditions["capacity"]
    assert float(moved.report.conditions["capacity"].split("%")[0]) > 1
    assert "estimated" in moved.report.conditions["capacity"]


@pytest.mark.parametrize(("num_logical", "topk", "rows"), [(32, 4, 2), (256, 8, 4), (8, 2, 9), (8, 8, 3)])
def test_rows_that_choose_evenly_read_as_many_experts_as_is_said(num_logical: int, topk: int, rows: int) -> None:
    rng = np.random.default_rng(0)
    found = [
        len({expert for _ in range(rows) for expert in rng.permutation(num_logical)[:topk].tolist()})
        for _ in range(800)
    ]
    assert expected_experts(num_logical, topk, rows) == pytest.approx(np.mean(found), rel=0.02)
    assert expected_experts(num_logical, topk, 1) == pytest.approx(topk)


def test_single_passes_of_a_trace_say_how_much_its_requests_differ() -> None:
    """simulate and advise price windows by it, though they fold the passes; a spread that is given stays."""
    load = SyntheticLoad(
        "lognormal", 48, LAYERS, EXPERTS, TOPK, 1, 0.8, 1.0, tokens_per_step=64 * 4096, steps_per_window=1,
        phase="prefill", request_spread=12.0, requests_per_step=64.0,
    )  # fmt: skip
    trace, topology = synthetic_trace(load), Topology(1, 8)
    serving = Serving("prefill", 4096.0, "none")
    costs = ProfileCosts(CostModel(load_hardware("H800"), DEMO, topology), serving)
    settings = AdviseSettings(
        ReplaySettings(topology, 8, intervals=(1,), costs=costs), costs.model.hardware, ("incremental",), (0,),
        window_steps=8,
    )  # fmt: skip
    advised = advise(trace, settings).conditions
    simulation = Simulation(
        DEMO, costs.model.hardware, Sweep((1,), (), (0,), (8,)), trace=trace, serving=serving, policies=(),
        plan_latency_s=0,
    )  # fmt: skip
    simulated = simulate(simulation)[0].report.conditions
    for conditions in (advised, simulated):
        spread = float(conditions["prices"].rpartition("request spread ")[2].split(",")[0])
        assert spread == pytest.approx(12, rel=0.25)
        assert f"by a spread of {spread:.3g}" in conditions["batches"]
    given = replace(simulation, serving=replace(serving, request_spread=3.0))
    assert simulate(given)[0].report.conditions["prices"].endswith("request spread 3")
    decodes = replace(simulation, serving=Serving(), trace=LoadTrace.of([replace(r, phase="decode") for r in trace]))
    assert "batches" not in simulate(decodes)[0].report.conditions
