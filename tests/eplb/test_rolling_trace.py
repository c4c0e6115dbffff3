"""The trace that a running server appends to: continued, locked, limited in size, and read again as one."""

from pathlib import Path

import numpy as np
import pytest

from moe_serve.eplb import read_trace
from moe_serve.eplb.files.trace_jsonl import (
    RollingTrace,
    TraceMeta,
    begin_trace,
    end_of_trace,
    older_part_of,
    read_events,
)
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ConfigError

META = TraceMeta(4, (1, 2), 2, "m")
PLACEMENT = Placement.trivial(2, 4, 2, 4, moe_layer_ids=(1, 2))


def record(first_step: int) -> LoadRecord:
    return LoadRecord(first_step, 5, "decode", np.full((2, 4), first_step + 1), placement=PLACEMENT)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not a trace", "exists and is not a .jsonl load trace that can be continued"),
        (b'{"some": "json"}\n', "exists and is not a .jsonl load trace that can be continued"),
        (b"PK\x03\x04 an npz file\n\x00", "exists and is not a .jsonl load trace that can be continued"),
        (
            b'{"format":"moe_serve.trace","num_logical":8,"moe_layer_ids":[1,2],"topk":2,"model_id":"m"}\n',
            r"the load of m \(2 MoE layers from 1 to 2, 8 experts, topk 2\), and this server runs m \(.*4 experts",
        ),
        (
            b'{"format":"moe_serve.trace","num_logical":4,"moe_layer_ids":[1,2],"topk":2,"model_id":"other"}\n',
            "holds the load of other",
        ),
    ],
)
def test_a_file_that_is_no_trace_of_this_model_is_refused_and_stays_as_it_is(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "load.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"eplb.record_path: .*{reason}.*name another file, or move this one away"):
        begin_trace(path, META)
    assert path.read_bytes() == content


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_first_line_that_was_cut_off_is_written_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "load.jsonl"
    begin_trace(path, META).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    begin_trace(path, META).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("rest", ["", "x", '{"first_step": 7, "num_st', "y" * 200_000])
def test_a_line_that_was_cut_off_is_removed(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "load.jsonl"
    for whole, step in (
        ("", 0),
        ('{"a": 1}\n', 0),
        ('{"first_step": 3, "num_steps": 5}\n{"event": "' + "b" * 100_000 + '"}\n', 8),
    ):
        path.write_text(whole + rest)
        assert end_of_trace(path) == step
        assert path.read_text() == whole


MAX_BYTES = 4000


def fill(path: Path, num_records: int) -> None:
    """One run: records of 5 steps, and an event behind each."""
    trace = RollingTrace(path, META, MAX_BYTES, begin_trace(path, META))
    trace.open(0)
    for index in range(num_records):
        trace.add(record(5 * index))
        trace.event("round_activated", 5 * index + 5, version=index)
    trace.close()


@pytest.mark.parametrize("runs", [[100], [40, 1, 59], [3] * 25], ids=str)
def test_a_trace_of_limited_size_holds_its_newest_steps(tmp_path: Path, runs: list[int]) -> None:
    path = tmp_path / "load.jsonl"
    for num_records in runs:
        fill(path, num_records)
    sizes = [each.stat().st_size for each in (path, older_part_of(path))]
    assert sizes[1] >= MAX_BYTES // 2
    assert all(size < MAX_BYTES // 2 + 400 for size in sizes)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["load.1.jsonl", "load.jsonl"]
    records = list(read_trace(path))
    steps = [each.first_step for each in records]
    assert steps == list(range(steps[0], 5 * sum(runs), 5))
    assert len(records) > MAX_BYTES // 2 / 200, "both parts are read"
    assert all(each.placement is not None for each in records), "each part names the placement"
    events = [event for event in read_events(path) if event["event"] == "round_activated"]
    assert events[-1]["step"] == 5 * sum(runs)
    assert end_of_trace(path) == 5 * sum(runs)


def test_a_trace_that_has_just_rolled_goes_on_at_its_step(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    num = 0
    while not older_part_of(path).exists():
        fill(path, 1)
        num += 1
    assert not [line for line in path.read_text().splitlines() if "first_step" in line]
    assert end_of_trace(path) == 5 * num
    fill(path, 1)
    assert [each.first_step for each in read_trace(path)] == list(range(0, 5 * num + 1, 5))


@pytest.mark.parametrize("change", ["another model", "other steps", "no trace", "gone"])
def test_an_older_part_that_does_not_fit_is_left_out(tmp_path: Path, change: str) -> None:
    path = tmp_path / "load.jsonl"
    fill(path, 30)
    older = older_part_of(path)
    num_both = len(list(read_trace(path)))
    lines = older.read_text().splitlines(keepends=True)
    match change:
        case "another model":
            older.write_text("".join([lines[0].replace('"m"', '"n"'), *lines[1:]]))
        case "other steps":
            older.write_text("".join(line for line in lines[:-2] if "event" not in line))
        case "no trace":
            older.write_text(lines[0] + "my notes\n")
        case "gone":
            older.unlink()
    records = list(read_trace(path))
    assert 0 < len(records) < num_both
    assert records[-1].first_step == 145


def test_two_servers_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    lock = begin_trace(path, META)
    with pytest.raises(ConfigError, match=r"eplb.record_path: another server writes .*load.jsonl; name another file"):
        begin_trace(path, META)
    trace = RollingTrace(path, META, MAX_BYTES, lock)
    trace.open(0)
    for index in range(30):  # it rolls on the way
        trace.add(record(5 * index))
    with pytest.raises(ConfigError, match="another server writes"):
        begin_trace(path, META)
    trace.close()
    begin_trace(path, META).close()
    assert len(list(read_trace(path))) > 5
