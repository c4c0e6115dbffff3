"""Our own traces: written, read back, the same records; streamed; a damaged file says where it is damaged."""

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_serve.eplb.files.trace_jsonl import JsonlWriter, TraceMeta, read_events
from moe_serve.eplb.files.traces import read_trace, write_trace
from moe_serve.eplb.files.windows import folded
from moe_serve.eplb.load import DecodeCounts, LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.errors import TraceError
from tests.eplb.loads import same_slots


def example(num_records: int = 5, full: bool = True) -> LoadTrace:
    rng = np.random.default_rng(1)
    placement = Placement.trivial(3, 8, 2, 2, (3, 4, 6))
    records = []
    for index in range(num_records):
        per_step = rng.integers(0, 50, (4, 3, 8))
        by_source = rng.integers(0, 50, (3, 2, 8))
        records.append(
            LoadRecord(
                4 * index,
                4,
                "decode",
                per_step.sum(axis=0),
                per_step=per_step if full else None,
                by_source=by_source if full else None,
                activations=(per_step > 0).sum(axis=0) if full else None,
                step_time_s=0.01 * (index + 1) if full else None,
                num_forwards=index % 4 if full else None,
                placement_version=7 if full else None,
                placement=placement if full else None,
                decodes=DecodeCounts.of(range(index, index + 8)) if full else None,
            )
        )
    return LoadTrace.of(records, (3, 4, 6), 2, "a model")


def assert_same(left: LoadTrace, right: LoadTrace) -> None:
    assert (left.num_logical, left.moe_layer_ids, left.topk, left.model_id) == (
        right.num_logical,
        right.moe_layer_ids,
        right.topk,
        right.model_id,
    )
    records = list(zip(left, right, strict=True))
    assert records
    for a, b in records:
        for name in ("first_step", "num_steps", "num_forwards", "phase", "step_time_s", "placement_version", "decodes"):
            assert getattr(a, name) == getattr(b, name), name
        for name in ("tokens", "per_step", "by_source", "activations"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        assert (a.placement is None) == (b.placement is None)
        if a.placement is not None and b.placement is not None:
            assert same_slots(a.placement, b.placement)


@pytest.mark.parametrize("name", ["t.npz", "t.jsonl"])
def test_full_records_survive_a_round_trip(tmp_path: Path, name: str) -> None:
    assert write_trace(example(), tmp_path / name) == 5
    assert_same(read_trace(tmp_path / name), example())


@pytest.mark.parametrize("name", ["t.npz", "t.jsonl", "t.csv"])
def test_counts_survive_a_round_trip(tmp_path: Path, name: str) -> None:
    write_trace(example(), tmp_path / name, counts_only=True)
    assert_same(read_trace(tmp_path / name), example(full=False))


def test_a_trace_can_be_read_twice(tmp_path: Path) -> None:
    write_trace(example(), tmp_path / "t.npz")
    trace = read_trace(tmp_path / "t.npz")
    assert [r.first_step for r in trace] == [r.first_step for r in trace] == [0, 4, 8, 12, 16]


def test_csv_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"record 0 has per_step.*placement, which .csv cannot hold"):
        write_trace(example(), tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_counts_decodes_from_some_record_on_goes_into_an_npz(tmp_path: Path) -> None:
    """A server that counts them has continued the trace of one that did not."""
    records = [replace(record, decodes=record.decodes if index > 1 else None) for index, record in enumerate(example())]
    trace = LoadTrace.of(records, (3, 4, 6), 2, "a model")
    write_trace(trace, tmp_path / "t.npz")
    assert_same(trace, read_trace(tmp_path / "t.npz"))


@pytest.mark.parametrize("decodes", [np.arange(2), np.ones((2, 7), int), np.full((2, 8), -2), np.ones((2, 2, 8), int)])
def test_counts_of_decodes_of_another_form_are_refused_by_name(decodes: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", counts=np.ones((2, 1, 4), int), decodes=decodes)
    with pytest.raises(TraceError, match=r"t\.npz, key decodes\[0\]: expected 8 whole numbers"):
        list(read_trace(tmp_path / "t.npz"))


def test_npz_refuses_records_that_differ_in_their_fields(tmp_path: Path) -> None:
    first, second = list(example(2))
    trace = LoadTrace.of([first, replace(second, by_source=None)], (3, 4, 6))
    with pytest.raises(TraceError, match="record 1 and the first differ in by_source"):
        write_trace(trace, tmp_path / "t.npz")
    assert list(tmp_path.iterdir()) == []


def test_a_plain_savez_of_counts_is_a_trace(tmp_path: Path) -> None:
    counts = np.arange(24).reshape(2, 3, 4)
    np.savez(tmp_path / "t.npz", counts=counts)
    trace = read_trace(tmp_path / "t.npz")
    assert (trace.num_logical, trace.moe_layer_ids, trace.num_records) == (4, (0, 1, 2), 2)
    np.testing.assert_array_equal([r.tokens for r in trace], counts)


def test_the_plain_forms_of_jsonl_and_csv_are_traces(tmp_path: Path) -> None:
    counts = np.arange(24).reshape(2, 3, 4)
    with (tmp_path / "t.jsonl").open("w") as jsonl, (tmp_path / "t.csv").open("w") as csv:
        csv.write("window,layer,expert,count\n")
        for window, tables in enumerate(counts):
            for layer, row in enumerate(tables):
                jsonl.write(json.dumps({"window": window, "layer": layer + 3, "counts": row.tolist()}) + "\n")
                csv.writelines(f"{window},{layer + 3},{e},{c}\n" for e, c in enumerate(row) if c)
    for name in ("t.jsonl", "t.csv"):
        trace = read_trace(tmp_path / name)
        assert trace.moe_layer_ids == (3, 4, 5)
        np.testing.assert_array_equal([r.tokens for r in trace], counts)


def test_events_ride_along_and_a_live_writer_appends(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    records = list(example(2))
    for index, record in enumerate(records):
        writer = JsonlWriter(path, TraceMeta.of(example()), append=True)
        writer.add(record)
        writer.event("round_activated", 4 * index, version=index)
        writer.close()
    assert_same(read_trace(path), example(2))
    assert [event["version"] for event in read_events(path)] == [0, 1]


@pytest.mark.parametrize(
    "text, says",
    [
        ('{"window": 0, "layer": 0, "counts": [1, 2]}\n{"window": 1, "layer": 0, "cou', "line 2: not JSON .*cut off"),
        (
            '{"window": 0, "layer": 0, "counts": [1, 2]}\n{"window": 1, "layer": 0, "counts": [1]}\n',
            "line 2: 1 experts, expected 2",
        ),
        (
            '{"window": 1, "layer": 0, "counts": [1, 2]}\n{"window": 0, "layer": 0, "counts": [1, 2]}\n',
            "line 2: window 0 after window 1",
        ),
        (
            '{"window": 0, "layer": 0, "counts": [1]}\n{"window": 0, "layer": 1, "counts": [1]}\n'
            '{"window": 1, "layer": 0, "counts": [1]}\n',
            "window 1 ends without layers \\[1\\]",
        ),
        (
            '{"window": 0, "layer": 0, "counts": [1]}\n{"window": 0, "layer": 0, "counts": [1]}\n',
            "line 2: layer 0 of window 0 a second time",
        ),
        ('{"first_step": 0, "tokens": [[1, -2]]}\n', "line 1: tokens"),
        ('{"first_step": 0, "tokens": [[1, 2], [3]]}\n', "line 1, key tokens: lists of different lengths"),
        (
            '{"first_step": 0, "tokens": [[1, 2]]}\n{"first_step": 1, "tokens": [[1, 2, 3]]}\n',
            "line 2: 1 layers x 3 experts, expected 1 x 2",
        ),
        ('{"format": "moe_serve.trace", "num_logical": 2}\n', "line 1, key moe_layer_ids"),
        ('{"format": "moe_serve.trace", "num_logical": 2, "moe_layer_ids": [0]}\n[1]\n', "line 2: expected a JSON obj"),
        ('{"first_step": 0, "tokens": [[1, 2', "line 1: not JSON"),
    ],
)
def test_a_wrong_jsonl_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(TraceError, match=says):
        list(read_trace(tmp_path / "t.jsonl"))


@pytest.mark.parametrize(
    "rows, says",
    [
        ("0,0,0,1\n0,0,x,1\n", "line 3: expected .* found '0,0,x,1'"),
        ("0,0,0,1\n0,0,1\n", "line 3: expected"),
        ("1,0,0,1\n0,0,0,1\n", "line 3: window 0 after window 1"),
        ("0,0,0,1\n0,0,0,2\n", "line 3: 0,0,0,2: a second time"),
        ("0,0,0,-1\n", "line 2: 0,0,0,-1: expected"),
        ("", "no lines below"),
    ],
)
def test_a_wrong_csv_names_the_line(tmp_path: Path, rows: str, says: str) -> None:
    (tmp_path / "t.csv").write_text("window,layer,expert,count\n" + rows)
    with pytest.raises(TraceError, match=says):
        list(read_trace(tmp_path / "t.csv"))


def test_a_damaged_npz_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    write_trace(example(50), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="cut off or not an"):
        list(read_trace(path))
    damaged = bytearray(whole)
    damaged[200:260] = b"\x00" * 60
    path.write_bytes(bytes(damaged))
    with pytest.raises(TraceError, match=r"t\.npz, key"):
        list(read_trace(path))
    np.savez(path, counts=np.zeros((2, 3, 4)), meta=np.array('{"num_logical": 5, "moe_layer_ids": [0, 1, 2]}'))
    with pytest.raises(TraceError, match="key counts: 3 layers x 4 experts, expected 3 x 5"):
        read_trace(path)
    np.savez(path, counts=np.zeros((2, 3, 4), dtype=np.int64), activations=np.zeros((1, 3, 4), dtype=np.int64))
    with pytest.raises(TraceError, match="key activations: 1 records, expected 2"):
        list(read_trace(path))
    np.savez(path, counts=np.full((2, 3, 4), -1))
    with pytest.raises(TraceError, match="record 0: tokens"):
        list(read_trace(path))


def test_an_npz_with_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", counts=np.array([[["a"]]], dtype=object))
    with pytest.raises(TraceError, match="can carry code, and is refused"):
        read_trace(tmp_path / "t.npz")


@pytest.mark.parametrize("name", ["t.npz", "t.jsonl", "t.csv"])
def test_reading_and_writing_need_memory_for_one_record_only(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_serve.eplb.files.plain_counts._CHUNK", 1 << 13)  # lines of .csv are read in chunks
    num_records, tokens = 100 if name == "t.csv" else 300, np.arange(20 * 64).reshape(20, 64)

    def open_records() -> Iterator[LoadRecord]:
        return (LoadRecord(i, 1, "mixed", tokens) for i in range(num_records))

    trace = LoadTrace(open_records, 64, tuple(range(20)))
    tracemalloc.start()
    write_trace(trace, tmp_path / name)
    written_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    assert sum(int(r.tokens.sum()) for r in read_trace(tmp_path / name)) == num_records * tokens.sum()
    read_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    whole = num_records * tokens.nbytes
    limit = 0.6 * whole  # 1 MiB is read to see whether a file is an engine's log
    assert written_peak < limit
    assert read_peak < limit


def test_folding_sums_steps_and_keeps_activations_exact() -> None:
    singles = [
        LoadRecord(i, 1, "decode" if i < 6 else "prefill", np.array([[i % 2, i, 0]]), step_time_s=float(i))
        for i in range(9)
    ]
    windows = list(folded(LoadTrace.of(singles), 4))
    assert [(w.first_step, w.num_steps, w.phase) for w in windows] == [
        (0, 4, "decode"),
        (4, 2, "decode"),
        (6, 3, "prefill"),
    ]
    assert windows[0].tokens.tolist() == [[2, 6, 0]]
    assert windows[0].activations is not None
    assert windows[0].activations.tolist() == [[2, 3, 0]]
    assert windows[0].step_time_s == pytest.approx(1.5)


def test_idle_records_fold_into_any_window_and_keep_its_time() -> None:
    idle = np.zeros((1, 3))
    busy = np.array([[1, 2, 3]])
    records = [
        LoadRecord(0, 1, "mixed", idle),
        LoadRecord(1, 1, "decode", busy, step_time_s=2.0),
        LoadRecord(2, 5, "mixed", idle),
        LoadRecord(7, 1, "decode", busy, step_time_s=4.0),
        LoadRecord(8, 1, "prefill", busy, step_time_s=9.0),
        LoadRecord(9, 1, "mixed", idle),
    ]
    windows = list(folded(LoadTrace.of(records), 100))
    assert [(w.first_step, w.num_steps, w.phase) for w in windows] == [(0, 8, "decode"), (8, 2, "prefill")]
    assert windows[0].step_time_s is not None
    assert 2.0 < windows[0].step_time_s < 4.0
    assert windows[1].step_time_s == 9.0
    assert windows[0].num_forwards is None
    assert windows[0].decodes is None
    forwards = [replace(record, num_forwards=int(record.tokens.any())) for record in records]
    counts = DecodeCounts.of(range(8))
    windows = list(folded(LoadTrace.of([replace(record, decodes=counts) for record in forwards]), 100))
    assert [w.decodes for w in windows] == [
        DecodeCounts.of([4 * n for n in range(8)]),
        DecodeCounts.of([2 * n for n in range(8)]),
    ]
    assert [(w.num_steps, w.num_forwards, w.step_time_s) for w in windows] == [(8, 2, 3.0), (2, 1, 9.0)]


def test_folding_forgets_activations_it_cannot_know() -> None:
    records = [LoadRecord(0, 5, "mixed", np.array([[3]])), LoadRecord(5, 5, "mixed", np.array([[3]]))]
    assert next(iter(folded(LoadTrace.of(records), 10))).activations is None


@pytest.mark.parametrize("name", ["demo", "demo_unbalanced"])
def test_the_examples_are_real_counts_that_add_up(name: str) -> None:
    trace = read_trace(f"example:{name}")
    sums = {int(total) for record in trace for total in record.tokens.sum(axis=1)}
    assert (trace.num_logical, trace.moe_layer_ids, trace.topk) == (32, (1, 2, 3, 4), 4)
    assert sums == {131072 if name == "demo" else 65536}


def test_an_unknown_example_lists_the_known_ones() -> None:
    with pytest.raises(TraceError, match="example:demo, example:demo_unbalanced"):
        read_trace("example:other")
