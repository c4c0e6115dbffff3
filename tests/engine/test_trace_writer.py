import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_serve.attention_dp.draft_gate import Decision, best_lengths
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.model.load_windows import TraceWriter
from moe_serve.eplb import read_trace
from moe_serve.eplb.files.trace_jsonl import (
    JsonlWriter,
    RollingTrace,
    TraceMeta,
    begin_trace,
    read_events,
    recorded_latency,
)
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ConfigError
from tests.engine.offline import prompts_with_shared_beginnings, serve, submits_of
from tests.ranks import RankFailure


def test_a_served_load_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    requests = submits_of(prompts_with_shared_beginnings(20, 2048, 30), params)
    served = serve(2, requests, [f"eplb.record_path={path}", "eplb.record_window_steps=4"])
    trace = read_trace(path)
    records = list(trace)
    assert (trace.num_logical, trace.topk, trace.moe_layer_ids) == (32, 4, (1, 2, 3, 4))
    assert [record.tokens.tolist() for record in records] == served.load
    assert sum(record.num_steps for record in records) == served.num_steps
    assert all(record.first_step == 4 * index for index, record in enumerate(records))
    assert records[-1].placement is not None
    assert records[-1].placement.num_ranks == 2
    assert records[0].step_time_s is not None
    assert records[0].step_time_s > 0


def test_a_trace_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"eplb.record_path: .*missing/load.jsonl cannot be written"):
        serve(1, [], [f"eplb.record_path={tmp_path}/missing/load.jsonl"])


META = TraceMeta(4, (1, 2), 2, "m")


def writer_to(path: Path, rank: int = 0, membership: Any = None) -> TraceWriter:
    return TraceWriter(RollingTrace(path, META, 2**30), rank, membership)


def record(first_step: int, placement: Placement | None = None) -> LoadRecord:
    return LoadRecord(first_step, 1, "decode", np.full((2, 4), first_step + 1), placement=placement)


def test_a_full_disk_ends_the_trace_and_not_the_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "load.jsonl"
    begin_trace(path, META).close()
    writer = writer_to(path)
    writer.add(record(0))
    calls = []

    def full(writer: JsonlWriter, record: LoadRecord) -> None:
        calls.append(record)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JsonlWriter, "add", full)
    writer.add(record(1))
    writer.add(record(2))
    assert len(calls) == 1, "nothing may follow a line that may be incomplete"
    assert len(list(read_trace(path))) == 1


def test_a_restart_goes_on_with_the_trace_and_does_not_overwrite_it(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    params = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
    requests = submits_of(prompts_with_shared_beginnings(4, 2048, 20), params)
    overrides = [f"eplb.record_path={path}", "eplb.record_window_steps=4"]
    first = serve(1, requests, overrides)
    before = path.read_bytes()
    second = serve(2, requests, overrides)
    assert path.read_bytes().startswith(before)
    records = list(read_trace(path))
    assert [record.tokens.tolist() for record in records] == first.load + second.load
    ends = [record.first_step + record.num_steps for record in records]
    assert [record.first_step for record in records] == [0, *ends[:-1]], "steps of the trace go on"
    assert ends[-1] == first.num_steps + second.num_steps
    num_ranks = [record.placement.num_ranks for record in records if record.placement]
    assert num_ranks == [1] * len(first.load) + [2] * len(second.load)


def test_a_rank_refuses_such_a_file_before_it_serves(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text("my notes")
    with pytest.raises(RankFailure, match="exists and is not a"):
        serve(1, [], [f"eplb.record_path={path}"])
    assert path.read_text() == "my notes"


def test_the_first_of_the_ranks_that_take_part_writes_the_trace(tmp_path: Path) -> None:
    """Rank 0 is masked for a while and rejoins; its file and its idea of the placement are not what they were."""
    path = tmp_path / "load.jsonl"
    begin_trace(path, META).close()
    whole = Placement.trivial(2, 4, 2, 4, moe_layer_ids=(1, 2))
    masked = whole.without_ranks([0])[0]
    groups = [SimpleNamespace(members=[0, 1], epoch=0) for _ in range(2)]
    ranks = [writer_to(path, rank, group) for rank, group in enumerate(groups)]

    def close_window(first_step: int, placement: Placement, *taking_part: int) -> None:
        for rank in taking_part:
            ranks[rank].add(record(first_step, placement))

    close_window(0, whole, 0, 1)
    groups[1].members, groups[1].epoch = [1], 1
    close_window(1, masked, 1)
    close_window(2, masked, 1)
    for group in groups:
        group.members, group.epoch = [0, 1], 2
    close_window(3, whole, 0, 1)
    records = list(read_trace(path))
    assert [record.first_step for record in records] == [0, 1, 2, 3]
    placements = [record.placement.physical_to_logical.tolist() for record in records]
    assert placements == [each.physical_to_logical.tolist() for each in (whole, masked, masked, whole)]


def test_events_of_a_run_stand_between_its_records_at_their_steps_of_the_trace(tmp_path: Path) -> None:
    """Rank 0 is masked between plan_requested and plan_ready; a second run goes on behind the first."""
    path = tmp_path / "load.jsonl"
    for _ in range(2):
        begin_trace(path, META).close()
        groups = [SimpleNamespace(members=[0, 1], epoch=0) for _ in range(2)]
        ranks = [writer_to(path, rank, group) for rank, group in enumerate(groups)]
        for writer in ranks:
            writer.event("started", 0)
            writer.add(record(0))
            writer.event("plan_requested", 1, layers=[0, 1])
        groups[1].members, groups[1].epoch = [1], 1
        ranks[1].event("plan_ready", 4)
        ranks[1].add(record(1))
        ranks[1].event("round_activated", 2, version=1)
        for writer in ranks:
            writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    names = [line.get("event", "record") for line in lines]
    assert names == ["started", "record", "plan_requested", "plan_ready", "record", "round_activated"] * 2
    events = list(read_events(path))
    assert [event["step"] for event in events] == [0, 1, 4, 2, 2, 3, 6, 4]
    assert events[1] == {"event": "plan_requested", "step": 1, "layers": [0, 1]}
    assert recorded_latency(path) == 3
    assert [each.first_step for each in read_trace(path)] == [0, 1, 2, 3]


def test_a_server_that_has_ended_leaves_its_trace_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    writer = TraceWriter(RollingTrace(path, META, 2**30, begin_trace(path, META)), 0, None)
    writer.add(record(0))
    with pytest.raises(ConfigError, match="another server writes"):
        begin_trace(path, META)
    writer.close()
    begin_trace(path, META).close()


def test_choices_of_drafts_are_in_the_trace_and_can_be_made_again(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    params = SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True)
    requests = submits_of([[5, 6, 7, 8, 9, 10, 11] * 4] * 3, params)
    overrides = [f"eplb.record_path={path}", "eplb.record_window_steps=8", "speculation.mode=auto"]
    served = serve(1, requests, overrides)
    chosen = [event for event in read_events(path) if event["event"] == "drafts"]
    assert chosen
    for event in chosen:
        *inputs, lengths = (event[name] for name in Decision._fields)
        assert best_lengths(*inputs) == lengths
        assert event["rank"] == 0
    assert [record.decodes for record in read_trace(path)] == [record.decodes for record in served.records]
