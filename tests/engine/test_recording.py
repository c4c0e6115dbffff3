import errno
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.build import cut_unfinished_line, record_to
from moe_serve.eplb import read_trace
from moe_serve.eplb.files.jsonl_writer import JsonlWriter
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
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


def test_a_full_disk_ends_the_trace_and_not_the_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "load.jsonl"
    spec = SimpleNamespace(num_logical=4, moe_layer_ids=(1, 2), topk=2)
    served = SimpleNamespace(spec=spec, limits=SimpleNamespace(model_name="m"), on_record=None, membership=None)
    record = LoadRecord(0, 1, "decode", np.ones((2, 4), dtype=np.int64))
    record_to(path, served)  # type: ignore[arg-type]
    served.on_record(record)

    def full(writer: JsonlWriter, record: LoadRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JsonlWriter, "add", full)
    served.on_record(record)
    assert served.on_record is None
    assert len(list(read_trace(path))) == 1


@pytest.mark.parametrize("rest", ["", "x", "y" * 200_000])
def test_a_line_that_was_cut_off_is_removed(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "load.jsonl"
    for whole in ("", "a\n", "a\n" + "b" * 100_000 + "\n"):
        path.write_text(whole + rest)
        cut_unfinished_line(path)
        assert path.read_text() == whole


def test_the_first_of_the_ranks_that_take_part_writes_the_trace(tmp_path: Path) -> None:
    """Rank 0 is out for a while and comes back; its file and its idea of the placement are not what they were."""
    path = tmp_path / "load.jsonl"
    whole = Placement.trivial(2, 4, 2, 4)
    masked = whole.without_ranks([0])[0]
    spec = SimpleNamespace(num_logical=4, moe_layer_ids=(0, 1), topk=2)
    limits = SimpleNamespace(model_name="m")
    groups = [SimpleNamespace(members=[0, 1], epoch=0) for _ in range(2)]
    ranks = [SimpleNamespace(spec=spec, limits=limits, on_record=None, membership=group) for group in groups]
    for rank, served in enumerate(ranks):
        record_to(path, served, rank)  # type: ignore[arg-type]

    def close_window(first_step: int, placement: Placement, *taking_part: int) -> None:
        for rank in taking_part:
            tokens = np.full((2, 4), first_step)
            ranks[rank].on_record(LoadRecord(first_step, 1, "decode", tokens, placement=placement))

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
