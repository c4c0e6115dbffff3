"""SGLang's recorder dumps, with hand-made files whose counts are known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.eplb.files.traces import read_trace
from moe_serve.errors import TraceError

RNG = np.random.default_rng(5)


def test_sglang_stat_dump_drops_dense_layers_and_keeps_layer_ids(tmp_path: Path) -> None:
    counts = RNG.integers(1, 9, (6, 5, 8)).astype(np.int32)
    counts[:, :2] = 0  # two dense layers first
    torch.save({"rank": 0, "logical_count": torch.from_numpy(counts), "average_utilization_rate_over_window": None},
               tmp_path / "d.pt")  # fmt: skip
    trace = read_trace(tmp_path / "d.pt")
    assert (trace.moe_layer_ids, trace.num_logical, trace.num_records) == ((2, 3, 4), 8, 6)
    np.testing.assert_array_equal([r.tokens for r in trace], counts[:, 2:])


def test_sglang_counts_as_json_are_one_step(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"logical_count": [[1, 2], [3, 4]]}))
    (record,) = read_trace(tmp_path / "c.json")
    assert record.tokens.tolist() == [[1, 2], [3, 4]]


P2L = np.array([[0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 2, 3]])  # layer 0 is dense


def write_passes(folder: Path, counts: np.ndarray, per_token: bool = False, drop: tuple[int, int] = (-1, -1)) -> None:
    """counts: [ranks, passes, layers, P] physical."""
    for rank, passes in enumerate(counts):
        records: list[dict[str, Any]] = []
        for number, table in enumerate(passes):
            if (rank, number) == drop:
                continue
            record: dict[str, Any] = {"forward_pass_id": 10 + number, "rank": rank, "gatherer_key": "primary"}
            if per_token:
                width = int(table[1:].sum(axis=1).max())
                ids = np.full((3, width, 1), -1, dtype=np.int32)
                for layer in (1, 2):
                    flat = np.repeat(np.arange(6), table[layer])
                    ids[layer, : len(flat), 0] = flat
                record |= {"topk_ids_of_layer": torch.from_numpy(ids), "forward_mode": 2, "input_ids": [1, 2]}
            else:
                record["global_physical_count"] = torch.from_numpy(table)
            records.append(record)
        content = {"records": records, "last_physical_to_logical_map": torch.from_numpy(P2L)}
        torch.save(content, folder / f"expert_distribution_recorder_1.5_{rank}.pt")


def expected_logical(physical: np.ndarray) -> np.ndarray:
    out = np.zeros((2, 4), dtype=np.int64)
    for row in (1, 2):
        for slot in range(6):
            out[row - 1, P2L[row, slot]] += physical[row, slot]
    return out


@pytest.mark.parametrize("per_token", [False, True])
def test_sglang_pass_dumps_sum_over_ranks_and_know_their_sources(tmp_path: Path, per_token: bool) -> None:
    counts = RNG.integers(0, 9, (2, 3, 3, 6)).astype(np.int32)
    counts[:, :, 0] = 0
    write_passes(tmp_path, counts, per_token)
    trace = read_trace(tmp_path)
    assert (trace.moe_layer_ids, trace.num_logical, trace.num_records) == ((1, 2), 4, 3)
    assert trace.topk == (1 if per_token else None)
    for number, record in enumerate(trace):
        np.testing.assert_array_equal(record.tokens, expected_logical(counts[:, number].sum(axis=0)))
        assert record.by_source is not None
        np.testing.assert_array_equal(record.by_source[:, 1], expected_logical(counts[1, number]))
        assert record.phase == ("decode" if per_token else "mixed")


def test_sglang_counts_on_arrival_do_not_pretend_to_know_the_source(tmp_path: Path) -> None:
    counts = RNG.integers(1, 9, (2, 2, 3, 6)).astype(np.int32)
    counts[:, :, 0] = 0
    counts[0, :, :, 3:] = 0  # rank 0 has slots 0..2 and counted only those
    counts[1, :, :, :3] = 0
    write_passes(tmp_path, counts)
    assert all(record.by_source is None for record in read_trace(tmp_path))


def test_sglang_tensor_parallel_attention_counts_every_token_once(tmp_path: Path) -> None:
    counts = RNG.integers(1, 9, (1, 2, 3, 6)).astype(np.int32).repeat(2, axis=0)
    counts[:, :, 0] = 0
    write_passes(tmp_path, counts)
    record = next(iter(read_trace(tmp_path)))
    np.testing.assert_array_equal(record.tokens, expected_logical(counts[0, 0]))


def test_sglang_passes_that_one_rank_lacks_are_left_out_and_said(tmp_path: Path) -> None:
    counts = RNG.integers(1, 9, (2, 3, 3, 6)).astype(np.int32)
    write_passes(tmp_path, counts, drop=(1, 2))
    trace = read_trace(tmp_path)
    assert trace.num_records == 2
    assert "1 passes not in all files left out" in trace.source


def test_sglang_dumps_of_different_recordings_are_refused(tmp_path: Path) -> None:
    counts = RNG.integers(1, 9, (2, 2, 3, 6)).astype(np.int32)
    write_passes(tmp_path, counts)
    torch.save({"logical_count": torch.ones(2, 3, 4)}, tmp_path / "z.pt")
    with pytest.raises(TraceError, match=r"recorder modes are mixed .*z\.pt: stat"):
        read_trace(tmp_path)
    (tmp_path / "z.pt").unlink()
    (tmp_path / "expert_distribution_recorder_1.5_0.pt").unlink()
    with pytest.raises(TraceError, match=r"dumps of ranks \[1\] found, expected 0 to 1"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    "content, says",
    [
        ({"x": torch.ones(2)}, "expected 'logical_count' or 'records', found keys"),
        ({"logical_count": torch.ones(2)}, r"shape \[2\]"),
        ({"logical_count": torch.zeros(2, 3, 4)}, "no tokens in 2 steps"),
        ({"records": [], "last_physical_to_logical_map": torch.zeros(1, 2)}, "key records: empty"),
        ({"records": []}, "key last_physical_to_logical_map: not there"),
        ({"records": [3], "last_physical_to_logical_map": torch.zeros(1, 2)}, r"key records\[0\]: expected a record"),
        ({"physical_to_logical_map": torch.zeros(1, 2)}, "is a placement, not a load trace"),
    ],
)
def test_a_torch_file_that_is_no_dump_says_what_is_missing(tmp_path: Path, content: Any, says: str) -> None:
    torch.save(content, tmp_path / "d.pt")
    with pytest.raises(TraceError, match=says):
        read_trace(tmp_path / "d.pt")


def test_an_oversized_torch_dump_is_refused_with_the_convert_line(tmp_path: Path) -> None:
    torch.save({"logical_count": torch.ones(2, 3, 4)}, tmp_path / "d.pt")
    with pytest.raises(TraceError, match=r"read whole.*moe-serve convert"):
        read_trace(tmp_path / "d.pt", max_torch_bytes=64)
