"""Load dumps of other engines, recognised by content, with hand-made files whose counts are known."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_serve.eplb.files.balance_log import read_balance_log
from moe_serve.eplb.files.placements import read_placement
from moe_serve.eplb.files.traces import read_trace
from moe_serve.errors import TraceError

RNG = np.random.default_rng(5)


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.dat").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(TraceError, match="can carry code, and is refused"):
        read_trace(tmp_path / "d.dat")


def write_statistics(folder: Path, counts: np.ndarray, raw: bool = False) -> None:
    """counts: [ranks, iterations, layers, E]; layers are 3, 4, …; iterations 50, 51, …"""
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": counts.shape[3], "num_experts_per_token": 2}))
    for rank, iterations in enumerate(counts):
        tensors = {}
        for i, layers in enumerate(iterations):
            for layer, row in enumerate(layers):
                value = np.repeat(np.arange(len(row)), row).reshape(-1, 1) if raw else row
                tensors[f"{50 + i}_{3 + layer}"] = np.ascontiguousarray(value, dtype=np.int32)
        save_file(tensors, folder / f"rank{rank}{'_raw' if raw else ''}.safetensors")


@pytest.mark.parametrize("raw", [False, True])
def test_tensorrt_statistics_sum_over_ranks(tmp_path: Path, raw: bool) -> None:
    counts = RNG.integers(0, 9, (2, 3, 2, 4))
    write_statistics(tmp_path, counts, raw)
    trace = read_trace(tmp_path)
    assert (trace.moe_layer_ids, trace.num_logical, trace.topk, trace.num_records) == ((3, 4), 4, 2, 3)
    np.testing.assert_array_equal([r.tokens for r in trace], counts.sum(axis=0))
    first = next(iter(trace))
    assert first.first_step == 50
    assert first.by_source is not None
    np.testing.assert_array_equal(first.by_source[:, 1], counts[1, 0])


def test_tensorrt_statistics_with_a_fault_name_it(tmp_path: Path) -> None:
    counts = RNG.integers(0, 9, (3, 2, 2, 4))
    write_statistics(tmp_path, counts)
    (tmp_path / "rank1.safetensors").rename(tmp_path / "rank7.safetensors")
    with pytest.raises(TraceError, match=r"ranks \[0, 2, 7\], expected 0 to 7"):
        read_trace(tmp_path)
    write_statistics(tmp_path, counts)
    (tmp_path / "rank7.safetensors").unlink()
    save_file({"50_3": np.ones(4, dtype=np.int32)}, tmp_path / "rank2.safetensors")
    with pytest.raises(TraceError, match=r"rank2\.safetensors: iterations and layers differ .*'50_4'"):
        read_trace(tmp_path)
    whole = (tmp_path / "rank0.safetensors").read_bytes()
    (tmp_path / "rank0.safetensors").write_bytes(whole[:20])
    with pytest.raises(TraceError, match=r"rank0\.safetensors is cut off"):
        read_trace(tmp_path)
    write_statistics(tmp_path, counts)
    (tmp_path / "meta_info.json").write_text('{"num_experts": 5}')
    with pytest.raises(TraceError, match=r"key '50_3': shape \[4\], expected \[5\]"):
        list(read_trace(tmp_path))


@pytest.mark.parametrize("indent", [None, 1])
def test_adrs_history_is_streamed(tmp_path: Path, indent: int | None) -> None:
    counts = RNG.integers(0, 9, (40, 3, 4))
    entries = [{"logical_expert_load": c.tolist(), "note": 'a "quoted\\" ] text'} for c in counts]
    (tmp_path / "h.json").write_text(json.dumps({"about": [1, 2], "load_history": entries}, indent=indent))
    done: list[tuple[int, int]] = []
    trace = read_trace(tmp_path / "h.json", progress=lambda at, of: done.append((at, of)))
    np.testing.assert_array_equal([r.tokens for r in trace], counts)
    assert done == sorted(done)
    assert 0 < done[0][0] < done[-1][0] <= done[-1][1]


@pytest.mark.parametrize("chunk", [7, 64])
def test_adrs_history_survives_any_chunk_border(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_serve.eplb.files.vllm._CHUNK", chunk)
    counts = RNG.integers(0, 9999, (9, 2, 5))
    entries = [{"name": f'tricky \\ " }}] {i}', "logical_expert_load": c.tolist()} for i, c in enumerate(counts)]
    (tmp_path / "h.json").write_text(json.dumps({"load_history": entries}))
    np.testing.assert_array_equal([r.tokens for r in read_trace(tmp_path / "h.json")], counts)


def test_a_cut_adrs_history_says_which_entry(tmp_path: Path) -> None:
    text = json.dumps({"load_history": [{"logical_expert_load": [[1, 2]]}] * 3})
    (tmp_path / "h.json").write_text(text[:-20])
    with pytest.raises(TraceError, match=r"ends inside .*load_history\[2\].*cut off"):
        list(read_trace(tmp_path / "h.json"))
    (tmp_path / "h.json").write_text('{"load_history": [{"logical_expert_load": [[1, 2]]}, {"other": 1}]}')
    with pytest.raises(TraceError, match=r"load_history\[1\]: expected 'logical_expert_load'.*found keys \['other'\]"):
        list(read_trace(tmp_path / "h.json"))


def test_vllm_dumps_in_logical_and_physical_form(tmp_path: Path) -> None:
    lines = [
        {"step": 100, "logical_expert_load": [[1, 2], [3, 4]]},
        {
            "step": 200,
            "physical_expert_load": [[1, 2, 3], [4, 5, 6]],
            "physical_to_logical_map": [[0, 1, 0], [1, 0, -1]],
        },
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    records = list(read_trace(tmp_path / "d.jsonl"))
    assert [r.first_step for r in records] == [100, 200]
    assert [r.tokens.tolist() for r in records] == [[[1, 2], [3, 4]], [[4, 2], [5, 4]]]
    (tmp_path / "d.jsonl").unlink()
    for index, line in enumerate(lines):
        (tmp_path / f"w{index}.json").write_text(json.dumps(line))
    assert [r.tokens.tolist() for r in read_trace(tmp_path)] == [[[1, 2], [3, 4]], [[4, 2], [5, 4]]]


def test_megatron_router_lines(tmp_path: Path) -> None:
    lines = [
        {"step": s, "stage": 0, "block": 0, "layer": layer, "rank": rank, "num_tokens": 2, "topk": 2,
         "top_indices": [[s, 3], [rank, layer]]}
        for s in (0, 1) for layer in (1, 2) for rank in (0, 1)
    ]  # fmt: skip
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    trace = read_trace(tmp_path / "m.jsonl")
    assert (trace.num_logical, trace.topk, trace.moe_layer_ids, trace.num_records) == (4, 2, (1, 2), 2)
    first, second = trace
    assert first.tokens.tolist() == [[3, 3, 0, 2], [3, 1, 2, 2]]
    assert second.by_source is not None
    assert second.by_source[0].tolist() == [[1, 2, 0, 1], [0, 3, 0, 1]]
    assert read_trace(tmp_path / "m.jsonl", num_logical=16).num_logical == 16
    with pytest.raises(TraceError, match="expert 3 is chosen, expected ids below 3"):
        read_trace(tmp_path / "m.jsonl", num_logical=3)
    lines[5]["num_tokens"] = 7
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(TraceError, match="line 6, key top_indices: 2 tokens, expected 7"):
        read_trace(tmp_path / "m.jsonl")


def test_counts_by_name(tmp_path: Path) -> None:
    (tmp_path / "n.json").write_text(json.dumps({"code": [[1.0, 2.0]], "docs": [[3.0, 4.0]]}, indent=2))
    trace = read_trace(tmp_path / "n.json")
    assert [r.tokens.tolist() for r in trace] == [[[1, 2]], [[3, 4]]]
    assert "code, docs" in trace.source


LOG = """EPLB step: 100 for model deepseek-r1: avg_tokens=812.50, max_tokens=1500, balancedness=0.5417, \
steps until the next rearrangement: 2900
INFO something else
[Expert Balancedness] forward_pass_id=7 current_pass_balancedness=0.812 last_10_average_balancedness=0.800 \
gpu_physical_count_sum=1234
"""


def test_logs_give_balancedness_and_are_refused_as_traces(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(LOG)
    first, second = read_balance_log(tmp_path / "server.log")
    assert (first.step, first.balancedness, first.max_tokens, first.model_id) == (100, 0.5417, 1500.0, "deepseek-r1")
    assert (second.step, second.balancedness, second.mean_tokens) == (7, 0.812, None)
    with pytest.raises(TraceError, match="not which experts are busy, so it cannot be replayed"):
        read_trace(tmp_path / "server.log")
    (tmp_path / "other.log").write_text("nothing\n")
    with pytest.raises(TraceError, match="no balancedness lines"):
        list(read_balance_log(tmp_path / "other.log"))


def test_ascend_maps_are_placements_and_say_so(tmp_path: Path) -> None:
    content = {"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 2, "device_list": [
        {"device_id": 1, "device_expert": [2, 3]}, {"device_id": 0, "device_expert": [0, 1]}]}]}  # fmt: skip
    (tmp_path / "m.json").write_text(json.dumps(content, indent=4))
    placement = read_placement(tmp_path / "m.json")
    assert placement.physical_to_logical.tolist() == [[0, 1, 2, 3]]
    assert placement.num_ranks == 2
    with pytest.raises(TraceError, match="is a placement, not a load trace"):
        read_trace(tmp_path / "m.json")


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.txt", b"hello", "not a load trace; expected ours"),
        ("a.json", b'{"a": 1}', r"JSON, but no load trace.*found keys \['a'\]"),
        ("a.json", b'{"a": [1, ', "not JSON.*cut off"),
        ("a.npz", b"PK\x03\x04rest", "cut off"),
        ("a.bin", b"   ", "is empty"),
    ],
)
def test_what_is_not_a_trace_is_told_what_is(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read_trace(tmp_path / name)


def test_missing_files_and_empty_folders_are_told_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "none.npz")
    with pytest.raises(TraceError, match="no dumps in it"):
        read_trace(tmp_path)
