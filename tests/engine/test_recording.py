import errno
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.build import record_to
from moe_serve.eplb import read_trace
from moe_serve.eplb.files.trace_jsonl import JsonlWriter
from moe_serve.eplb.load import LoadRecord
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
    served = SimpleNamespace(spec=spec, limits=SimpleNamespace(model_name="m"), on_record=None)
    record = LoadRecord(0, 1, "decode", np.ones((2, 4), dtype=np.int64))
    record_to(path, served)  # type: ignore[arg-type]
    served.on_record(record)

    def full(writer: JsonlWriter, record: LoadRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JsonlWriter, "add", full)
    served.on_record(record)
    assert served.on_record is None
    assert len(list(read_trace(path))) == 1
