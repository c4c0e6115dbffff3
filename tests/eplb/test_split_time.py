"""The split of a batch by time: against every choice of replicas on small layers, its bound, and the same in C."""

import json
from dataclasses import asdict, replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.cost.measured import MeasuredCost, PriorPrices
from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.load import LoadRecord, LoadTrace, balancedness
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.rebalance.events import WindowClosed
from moe_serve.eplb.rebalance.rebalancer import make_rebalancer
from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts, planned_time
from moe_serve.eplb.replay.costs import ProfileCosts, Serving
from moe_serve.eplb.replay.replay import Scorer, replay
from moe_serve.eplb.replay.settings import EvenSteps, ReplaySettings
from moe_serve.eplb.split.exact import PROVEN, UNPROVEN
from moe_serve.eplb.split.layer import ReplicaGraph
from moe_serve.eplb.split.make import make_split, make_splits
from moe_serve.eplb.split.time import MAX_WEIGHT_ROWS, ExpertTime
from moe_serve.errors import ConfigError, TraceError
from moe_serve.topology import Topology
from tests.eplb.split_cases import by_source_of, cases, layer_of, random_case

TIMES = [ExpertTime(0), ExpertTime(1), ExpertTime(9), ExpertTime(300, tile_rows=16)]


def rank_ticks(slot_tokens, num_ranks, time):
    """Returns the time of each rank; the tokens of two slots of one expert on one rank are on the lower one."""
    return np.array([time.ticks(tokens) for tokens in slot_tokens.tolist()]).reshape(num_ranks, -1).sum(axis=1)


def shares(tokens, number):
    """Yields every way to give tokens to a number of replicas."""
    for cuts in combinations(range(tokens + number - 1), number - 1):
        ends = (-1, *cuts, tokens + number - 1)
        yield [after - before - 1 for before, after in pairwise(ends)]


def least_ticks(layer, counts, time):
    """Returns the smallest possible largest rank time, by trying every share of every expert."""
    graph = ReplicaGraph.of(layer)
    by_expert = [
        shares(int(counts[e]), graph.replica_start[i + 1] - graph.replica_start[i]) for i, e in enumerate(graph.experts)
    ]
    tops = []
    for chosen in product(*by_expert):
        given = np.array([tokens for expert in chosen for tokens in expert], dtype=np.int64)
        tops.append(rank_ticks(graph.to_slots(counts[None], given[None])[0], graph.num_ranks, time).max())
    return min(tops)


def test_a_few_tokens_are_not_spread_and_many_are():
    layer = layer_of([0, 1, 0, 1], 2)  # both experts on both ranks
    split = make_split("time", layer, time=ExpertTime(10))
    assert split.split(np.array([4, 4])).tolist() == [4, 0, 0, 4]  # each rank reads one expert
    assert split.split(np.array([1000, 10])).reshape(2, 2).sum(axis=1).tolist() == pytest.approx([500, 510], abs=10)
    assert make_split("exact", layer).split(np.array([4, 4])).tolist() == [2, 2, 2, 2]  # reads both on both


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(TIMES))
def test_it_is_complete_within_its_bound_and_no_slower_than_the_exact_split_of_tokens(case, time):
    row, counts, num_ranks = case
    layer = layer_of(row, num_ranks, len(counts))
    split = make_split("time", layer, time=time)
    slot_tokens = split.split(counts)
    assert (slot_tokens >= 0).all()
    assert (slot_tokens[row < 0] == 0).all()
    assert [slot_tokens[row == e].sum() for e in range(len(counts))] == counts.tolist()
    most = rank_ticks(slot_tokens, num_ranks, time).max()
    assert most <= rank_ticks(make_split("exact", layer).split(counts), num_ranks, time).max()
    assert split.outcomes.tolist() in ([1, 0, 0], [0, 0, 1])


def test_it_is_near_the_best_of_all_splits_and_proves_only_what_is_best():
    rng = np.random.default_rng(0)
    gaps, num_proven = [], 0
    while len(gaps) < 150:
        row, counts, num_ranks = random_case(rng, max_ranks=3, max_tokens=5)
        layer = layer_of(row, num_ranks, len(counts))
        graph = ReplicaGraph.of(layer)
        if not 0 < sum(counts[list(graph.experts)]) <= 11 or len(graph.experts) > 4:
            continue
        time = TIMES[len(gaps) % 3]
        split = make_split("time", layer, time=time)
        most, least = rank_ticks(split.split(counts), num_ranks, time).max(), least_ticks(layer, counts, time)
        gaps.append(most / least - 1)
        assert most >= least
        if split.outcomes[PROVEN]:
            num_proven += 1
            assert most == least, (row, counts, num_ranks, time)
    assert num_proven > 40
    assert np.mean(gaps) < 0.005
    assert np.mean(np.array(gaps) > 0) < 0.05


def test_c_splits_with_the_same_integers(library):
    rng = np.random.default_rng(1)
    outcomes = np.zeros(3, dtype=np.int64)
    for number in range(200):
        row, counts, num_ranks = random_case(rng, max_tokens=int(rng.choice([2, 9, 60, 1000])))
        layer, time = layer_of(row, num_ranks, len(counts), layer_row=number), TIMES[number % len(TIMES)]
        plain, native = make_split("time", layer, None, time), make_split("time", layer, library, time)
        for given_counts in (counts, by_source_of(counts, num_ranks, number)):
            assert (plain.split(given_counts) == native.split(given_counts)).all(), (row, counts, num_ranks, time)
        assert (plain.outcomes == native.outcomes).all()
        outcomes += plain.outcomes
    assert outcomes[PROVEN] > 0 < outcomes[UNPROVEN]


@pytest.mark.parametrize("time", [*TIMES, ExpertTime(MAX_WEIGHT_ROWS)])
def test_one_replica_serves_an_expert_in_no_more_time_than_two(time):
    """Which the bound rests on; times rise with rows, also where squares would overflow."""
    some = [*range(1, 40), 1000, 2**20, 2**26 - 1, 2**26, 2**27 - 1, 2**27, 2**40]
    ticks = [time.ticks(rows) for rows in some]
    assert ticks == sorted(ticks)
    assert all(time.ticks(a) + time.ticks(b) >= time.ticks(a + b) for a in some for b in some)


def test_a_trace_says_what_the_server_split_by():
    event = {"event": "split_changed", "step": 0, "phases": ["decode"], **asdict(ExpertTime(10))}
    assert EvenSteps.of([event]).time == ExpertTime(10)
    assert EvenSteps.of([{"event": "split_changed", "step": 0, "phases": []}]).time is None
    with pytest.raises(TraceError, match="weight_rows 'ten'"):
        EvenSteps.of([event | {"weight_rows": "ten"}])


def test_times_out_of_range_and_missing_ones_are_refused():
    with pytest.raises(ConfigError, match="weight_rows is -1"):
        ExpertTime(-1)
    with pytest.raises(ConfigError, match="needs the times of experts; give --model and --hardware"):
        make_split("time", layer_of([0, 1, 0, 1], 2))


@pytest.mark.parametrize("time", [ExpertTime(0), ExpertTime(10), ExpertTime(300, 16), ExpertTime(80, 128)], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_mean_time_of_a_batch_is_that_of_drawn_batches(time, share):
    rng = np.random.default_rng(2)
    for mean in (0.02, 0.5, 3.0, 40.0, 2000.0):
        drawn = rng.poisson(mean / share, 100_000) * (rng.random(100_000) < share)
        rows = time.rows_of(drawn).mean()
        known, assumed = (time.mean_rows(np.array([[mean]]), a) for a in (np.array([[(drawn > 0).mean()]]), None))
        assert known[0, 0] == pytest.approx(rows, rel=0.04)
        if share == 1:
            assert assumed[0, 0] == pytest.approx(rows, rel=0.04)
    assert (time.mean_rows(np.zeros((2, 3))) == 0).all()


def test_the_rows_of_a_time_are_its_ticks():
    tokens = np.array([[0, 1, 16], [17, 1000, 2**20]])
    for time in TIMES:
        ticks = np.array([[time.ticks(int(each)) for each in row] for row in tokens])
        assert np.abs(16 * time.rows_of(tokens) - ticks).max() <= 1


class Noted:
    """A policy that keeps its requests."""

    name = "noted"

    def __init__(self):
        self.requests = []

    def plan(self, request):
        self.requests.append(request)
        return make_policy("greedy").plan(request)


@pytest.mark.parametrize(("split", "num_slots"), [("time", 48), ("time", 32), ("even", 48)])
def test_a_replay_plans_and_scores_time_where_that_serves_sooner(split, num_slots):
    time, rng = ExpertTime(10), np.random.default_rng(0)
    batches = rng.poisson(np.geomspace(0.05, 30, 32), (4, 50, 2, 32))
    trace = LoadTrace.of([LoadRecord(50 * i, 50, "decode", b.sum(axis=0), per_step=b) for i, b in enumerate(batches)])
    policy, steps = Noted(), EvenSteps((0,), (frozenset(),), time)
    chosen = ReplaySettings(Topology(1, 16), num_slots, history=2, split=split, even_steps=steps)
    found = replay(
        trace, [policy, "gate:greedy"], replace(chosen, gate_cost=MeasuredCost(PriorPrices(1e-6, 1e-9), 0.05))
    )
    by_time = split == "time" and num_slots > 32
    rows = time.rows_of(batches) if by_time else batches
    assert policy.requests[0].tokens == pytest.approx(rows[:2].sum(axis=(0, 1)), rel=0.05)
    assert policy.requests[0].series == pytest.approx(rows[:2].sum(axis=1), rel=0.1, abs=20)
    layers = make_splits(split, found.floor.final, time=time)
    tokens = np.array([[layer.split(c) for layer, c in zip(layers, batch, strict=True)] for batch in batches[3]])
    load = (time.rows_of(tokens) if by_time else tokens).reshape(50, 2, 16, -1).sum(axis=3)
    assert found.floor.served[-1] == pytest.approx(balancedness(load).mean(axis=0), rel=1e-6)
    assert ("count time" in found.conditions.get("split", "")) == by_time


def test_steps_are_priced_as_their_split_shares_them():
    """Two hot experts on the same two ranks of four: spread evenly, both ranks read both."""
    model = replace(load_model_profile("Mixtral-8x7B"), num_layers=1, num_moe_layers=1)
    costs = ProfileCosts(CostModel(load_hardware("H100"), model, Topology(1, 4)), Serving("decode"))
    placement = Placement(np.array([[0, 1, 2, 0, 1, 3, 4, 5, 2, 6, 7, 3]]), 8, 4)
    counts = np.array([[8, 8, 0, 0, 0, 0, 0, 0]])
    record = LoadRecord(0, 1, "decode", counts)
    took = {
        split: Scorer(Topology(1, 4), 2, costs, split).score(record, placement).step_s for split in ("even", "time")
    }
    assert took["time"] < took["even"]
    perfect = Scorer(Topology(1, 4), 2, costs, "time").perfect(record, 3).step_s
    assert perfect <= took["time"]


@pytest.mark.parametrize(
    ("ranks", "slots", "planned"), [(16, 64, ExpertTime(10)), (16, 48, None), (8, 64, None), (32, 64, ExpertTime(10))]
)
def test_plans_count_time_on_many_ranks_with_redundant_experts(ranks, slots, planned):
    assert planned_time(ExpertTime(10), ranks, slots, 48) == planned
    assert planned_time(None, ranks, slots, 48) is None


@pytest.mark.parametrize("active", [None, np.array([[10, 100, 10, 100, 1, 1, 1, 1]])], ids=["unknown", "recorded"])
def test_a_balancer_plans_and_prices_the_time_that_its_facts_name(active):
    facts = SystemFacts(1, 1000, 1e-6, 1e-6, survives_loss=False, split="time", expert_time=ExpertTime(10))
    told = json.loads(json.dumps(facts.to_event()))
    assert SystemFacts.from_event(told) == facts
    with pytest.raises(TraceError, match="balancer_started has weight_rows 'x'"):
        SystemFacts.from_event(facts.to_event() | {"expert_time": {"weight_rows": "x"}})
    start = Placement(np.arange(8, dtype=np.int32)[None], 8, 2)
    tokens = np.array([[100, 100, 100, 100, 1, 1, 1, 1]])  # of a hundred steps
    for time in (None, facts.expert_time):
        rebalancer = make_rebalancer(start, BalancerSettings(), replace(facts, expert_time=time))
        actions = ()
        for index in range(3):
            record = LoadRecord(100 * index, 100, "decode", tokens, activations=active, step_time_s=1e-3)
            actions = actions or rebalancer.handle(WindowClosed(100 * (index + 1), record))
        share = record.activation_share
        load = tokens / 100 if time is None else time.mean_rows(tokens / 100, share)
        assert actions[0].request.tokens == pytest.approx(load)
        seconds = rebalancer.cost.layer_seconds(tokens / 100, share, start)
        assert seconds == pytest.approx(rebalancer.cost.skew_s * load[:, :4].sum(axis=1))
