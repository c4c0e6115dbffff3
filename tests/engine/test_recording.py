from pathlib import Path

import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.eplb import read_trace
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
