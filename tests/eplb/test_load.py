import numpy as np
import pytest

from moe_serve.eplb.load import LoadRecord, LoadTrace, balancedness, rank_load, rank_traffic, slot_load
from moe_serve.eplb.placement import Placement
from moe_serve.errors import TraceError
from tests.eplb.test_placement import EXAMPLE


def test_loads_of_the_example_that_opens_the_module():
    tokens = np.array([[40, 80, 20, 20], [1, 1, 1, 1]])
    assert slot_load(tokens, EXAMPLE)[0].tolist() == [40, 40, 20, 20, 40, 0]
    load = rank_load(tokens, EXAMPLE)
    assert load[0].tolist() == [80, 40, 40]
    assert balancedness(load)[0] == pytest.approx(0.667, abs=5e-4)


def test_traffic_is_that_of_a_loop_over_slots_with_empty_ones() -> None:
    by_source = np.random.default_rng(0).integers(0, 50, (EXAMPLE.num_layers, EXAMPLE.num_ranks, EXAMPLE.num_logical))
    expected = np.zeros((EXAMPLE.num_ranks, EXAMPLE.num_ranks))
    for layer, table in enumerate(EXAMPLE.physical_to_logical):
        for slot, expert in enumerate(table):
            if expert >= 0:
                share = by_source[layer, :, expert] / EXAMPLE.replica_count[layer, expert]
                expected[:, slot // EXAMPLE.slots_per_rank] += share
    np.testing.assert_allclose(rank_traffic(by_source, EXAMPLE), expected)
    assert (EXAMPLE.physical_to_logical < 0).any()


def test_no_load_is_perfectly_balanced_and_excluded_ranks_do_not_count():
    assert balancedness(np.zeros((2, 4))).tolist() == [1.0, 1.0]
    assert balancedness(np.array([[4.0, 4.0, 0.0]]), np.array([0, 1])).tolist() == [1.0]


def test_an_empty_slot_has_no_load():
    placement = Placement(np.array([[-1, 0, -1, 1]]), 2, 2)
    assert slot_load(np.array([[5, 7]]), placement).tolist() == [[0, 5, 0, 7]]


def test_a_trace_may_be_read_twice_and_checks_its_records():
    records = [LoadRecord(i, 10, "decode", np.full((2, 4), i)) for i in range(3)]
    trace = LoadTrace.of(records, topk=2, source="here")
    assert [r.first_step for r in trace] == [r.first_step for r in trace] == [0, 1, 2]
    assert (trace.num_logical, trace.moe_layer_ids, trace.num_records) == (4, (0, 1), 3)
    mixed = LoadTrace.of([records[0], LoadRecord(1, 10, "decode", np.ones((2, 5)))], source="mixed.npz")
    with pytest.raises(TraceError, match=r"mixed.npz, record 1"):
        list(mixed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"phase": "warmup"}, "phase"),
        ({"first_step": -1}, "first_step"),
        ({"tokens": np.full((1, 2), -1)}, "between 0 and 2"),
        ({"tokens": np.array([[0.5, 1.0]])}, "fractions"),
        ({"tokens": np.array([[np.nan, 1.0]])}, "NaN"),
        ({"tokens": np.array([[2.0**60, 1.0]])}, "overflow"),
        ({"tokens": np.ones(3)}, "2 dimensions"),
        ({"per_step": np.ones((3, 1, 2))}, "per_step has shape"),
        ({"by_source": np.ones((1, 4, 3))}, "by_source has shape"),
        ({"activations": np.ones((2, 2))}, "activations has shape"),
    ],
)
def test_a_wrong_record_says_the_field_and_the_fix(change, words):
    fields = {"first_step": 0, "num_steps": 2, "phase": "prefill", "tokens": np.ones((1, 2))} | change
    with pytest.raises(TraceError, match=words):
        LoadRecord(**fields)
