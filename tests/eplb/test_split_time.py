"""The split of a batch by time: against every choice of replicas on small layers, its bound, and the same in C."""

from dataclasses import asdict
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.eplb.replay.settings import EvenSteps
from moe_serve.eplb.split.exact import PROVEN, UNPROVEN
from moe_serve.eplb.split.layer import ReplicaGraph
from moe_serve.eplb.split.make import make_split
from moe_serve.eplb.split.time import MAX_WEIGHT_ROWS, ExpertTime
from moe_serve.errors import ConfigError, TraceError
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
