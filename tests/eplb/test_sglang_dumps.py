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


def write_recording(
    folder: Path, counts: np.ndarray, written_s: float, table: np.ndarray = P2L, start: int = 0
) -> None:
    """Writes the per_pass dumps of one recording. counts: [ranks, passes, layers, P]; start: its first pass."""
    for rank, passes in enumerate(counts):
        records = [
            {"forward_pass_id": start + number, "rank": rank, "gatherer_key": "primary",
             "global_physical_count": torch.from_numpy(each)}
            for number, each in enumerate(passes)
        ]  # fmt: skip
        content = {"records": records, "last_physical_to_logical_map": torch.from_numpy(table)}
        torch.save(content, folder / f"expert_distribution_recorder_{written_s + 0.01 * rank}_{rank}.pt")


def some_counts(num_ranks: int = 2, num_passes: int = 3) -> np.ndarray:
    counts = RNG.integers(1, 9, (num_ranks, num_passes, 3, 6)).astype(np.int32)
    counts[:, :, 0] = 0
    return counts


def test_recordings_of_a_restarted_server_in_one_folder_are_kept_apart(tmp_path: Path) -> None:
    first, second = some_counts(), some_counts()
    moved = P2L[:, ::-1].copy()
    write_recording(tmp_path, first, 1700000000.5)
    write_recording(tmp_path, second, 1700000600.5, moved)  # the same forward_pass_ids, and a placement of its own
    trace = read_trace(tmp_path)
    assert trace.num_records == 6
    assert "2 recordings, kept apart" in trace.source
    records = list(trace)
    assert [record.first_step for record in records] == list(range(6))
    for number in range(3):
        np.testing.assert_array_equal(records[number].tokens, expected_logical(first[:, number].sum(axis=0)))
        mirrored = second[:, number, :, ::-1].sum(axis=0)
        np.testing.assert_array_equal(records[3 + number].tokens, expected_logical(mirrored))


def test_two_dumps_of_one_server_follow_each_other(tmp_path: Path) -> None:
    first, second = some_counts(), some_counts()
    write_recording(tmp_path, second, 1700000060.5, start=3)
    write_recording(tmp_path, first, 1700000000.5)
    both = np.concatenate([first, second], axis=1).sum(axis=0)
    np.testing.assert_array_equal([r.tokens for r in read_trace(tmp_path)], [expected_logical(each) for each in both])


def test_recordings_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    write_recording(tmp_path, some_counts(), 1700000000.5)
    write_recording(tmp_path, some_counts(), 1700000600.5)
    name = "expert_distribution_recorder_17000{}_{}.pt"
    (tmp_path / name.format("00600.5", 0)).rename(tmp_path / "renamed.pt")
    with pytest.raises(
        TraceError, match=r"forward pass 0 of rank \d is in another file, too; the server was restarted"
    ):
        read_trace(tmp_path)
    (tmp_path / "renamed.pt").unlink()
    with pytest.raises(TraceError, match="1 dumps of rank 0, but 2 of rank 1; copy the files of all ranks"):
        read_trace(tmp_path)
    (tmp_path / name.format("00000.51", 1)).unlink()
    with pytest.raises(TraceError, match="written 600 s apart; they are of different recordings"):
        read_trace(tmp_path)


def test_recordings_whose_files_were_written_at_the_same_time_are_refused(tmp_path: Path) -> None:
    write_recording(tmp_path, some_counts(), 1700000000.5)
    write_recording(tmp_path, some_counts(), 1700000000.505)  # rank 0's, before rank 1 wrote the first one's
    with pytest.raises(TraceError, match="recordings 0 and 1 were written at the same time"):
        read_trace(tmp_path)


def on_arrival(num_ranks: int, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns counts of ranks that counted at their own slots only, and a table of as many experts."""
    counts = np.zeros((num_ranks, 4, 2, num_slots), dtype=np.int32)
    size = num_slots // num_ranks
    for rank in range(num_ranks):
        counts[rank, :, :, rank * size : (rank + 1) * size] = RNG.integers(20, 99, (4, 2, size))
    return counts, np.tile(np.arange(num_slots), (2, 1))


@pytest.mark.parametrize("present", [1, 2, 3, 5, 7])
def test_dumps_that_lack_the_last_ranks_are_noticed_where_ranks_counted_on_arrival(
    tmp_path: Path, present: int
) -> None:
    counts, table = on_arrival(8, 24)
    write_recording(tmp_path, counts[:present], 1700000000.5, table)
    says = (
        f"ranks 0 to {present - 1} found, but 8 ranks of 3 slots each took part; copy the files of ranks {present} to 7"
    )
    with pytest.raises(TraceError, match=says):
        read_trace(tmp_path)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 24])
def test_dumps_of_all_ranks_that_counted_on_arrival_are_read(tmp_path: Path, num_ranks: int) -> None:
    counts, table = on_arrival(num_ranks, 24)
    write_recording(tmp_path, counts, 1700000000.5, table)
    np.testing.assert_array_equal([r.tokens for r in read_trace(tmp_path)], counts.sum(axis=0))


def test_dumps_that_lack_the_last_rank_are_noticed_where_slots_do_not_divide(tmp_path: Path) -> None:
    counts = RNG.integers(1, 9, (7, 2, 2, 24)).astype(np.int32)
    write_recording(tmp_path, counts, 1700000000.5, np.tile(np.arange(24), (2, 1)))
    with pytest.raises(TraceError, match="24 slots do not divide over 7 ranks; copy the files of all ranks"):
        read_trace(tmp_path)


def test_a_dump_that_states_the_number_of_ranks_is_believed(tmp_path: Path) -> None:
    write_passes(tmp_path, some_counts(), per_token=True)
    path = tmp_path / "expert_distribution_recorder_1.5_0.pt"
    content = torch.load(path)
    content["records"][0]["misc_objects"] = [{"layer_id": 1, "num_tokens_per_rank": [1, 2, 3]}]
    torch.save(content, path)
    with pytest.raises(TraceError, match="3 ranks of 2 slots each took part; copy the files of ranks 2 to 2"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    "key, value",
    [
        ("rank", "0"),
        ("rank", -1),
        ("forward_pass_id", torch.ones(3)),
        ("forward_mode", None),
        ("global_physical_count", torch.ones(3, 6, dtype=torch.bfloat16)),
        ("global_physical_count", torch.full((3, 6), -5)),
        ("global_physical_count", torch.full((3, 6), 0.5)),
        ("global_physical_count", torch.ones(1, dtype=torch.int64).expand(1 << 20, 1 << 20)),
        ("global_physical_count", "many"),
    ],
)
def test_a_dump_with_an_odd_value_is_refused_by_its_key(tmp_path: Path, key: str, value: Any) -> None:
    record = {"forward_pass_id": 0, "rank": 0, "global_physical_count": torch.ones(3, 6), key: value}
    torch.save({"records": [record], "last_physical_to_logical_map": torch.from_numpy(P2L)}, tmp_path / "d.pt")
    with pytest.raises(TraceError, match=f"key {key}|claims"):
        list(read_trace(tmp_path / "d.pt"))


def test_an_expert_beyond_the_slots_is_refused(tmp_path: Path) -> None:
    table = torch.from_numpy(P2L).clone()
    table[1, 1] = 4_128_770
    record = {"forward_pass_id": 0, "rank": 0, "global_physical_count": torch.ones(3, 6)}
    torch.save({"records": [record], "last_physical_to_logical_map": table}, tmp_path / "d.pt")
    with pytest.raises(TraceError, match="expert 4128770 in 6 slots; every expert has one at least"):
        read_trace(tmp_path / "d.pt")


def test_a_stat_dump_that_repeats_one_value_over_a_huge_shape_is_refused(tmp_path: Path) -> None:
    torch.save({"logical_count": torch.ones(1).expand(1 << 40, 4, 8)}, tmp_path / "d.pt")
    with pytest.raises(TraceError, match=r"claims .* bytes and holds 4"):
        read_trace(tmp_path / "d.pt")
