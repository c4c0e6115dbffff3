import errno
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.recording import TraceWriter, begin_trace, end_of_trace
from moe_serve.eplb import read_trace
from moe_serve.eplb.files.jsonl_writer import JsonlWriter
from moe_serve.eplb.files.trace_meta import TraceMeta
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


def record(first_step: int, placement: Placement | None = None) -> LoadRecord:
    return LoadRecord(first_step, 1, "decode", np.full((2, 4), first_step + 1), placement=placement)


def test_a_full_disk_ends_the_trace_and_not_the_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "load.jsonl"
    begin_trace(path, META)
    writer = TraceWriter(path, META, 0, None)
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


def test_a_rank_refuses_such_a_file_before_it_serves(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text("my notes")
    with pytest.raises(RankFailure, match="exists and is not a"):
        serve(1, [], [f"eplb.record_path={path}"])
    assert path.read_text() == "my notes"


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_first_line_that_was_cut_off_is_written_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "load.jsonl"
    begin_trace(path, META)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    begin_trace(path, META)
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


def test_the_first_of_the_ranks_that_take_part_writes_the_trace(tmp_path: Path) -> None:
    """Rank 0 is masked for a while and rejoins; its file and its idea of the placement are not what they were."""
    path = tmp_path / "load.jsonl"
    begin_trace(path, META)
    whole = Placement.trivial(2, 4, 2, 4, moe_layer_ids=(1, 2))
    masked = whole.without_ranks([0])[0]
    groups = [SimpleNamespace(members=[0, 1], epoch=0) for _ in range(2)]
    ranks = [TraceWriter(path, META, rank, group) for rank, group in enumerate(groups)]  # type: ignore[arg-type]

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
