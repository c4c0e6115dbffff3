"""Placement files of every engine: written and read back they are the same; wrong ones name file, key and fault."""

import json
from pathlib import Path

import numpy as np
import pytest

from moe_serve.eplb.files.placements import read_placement, write_placement
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError

MOE_LAYERS = (3, 4, 5)  # a model with three dense layers first, like DeepSeek-V3


def example(moe_layer_ids: tuple[int, ...] = MOE_LAYERS, seed: int = 0) -> Placement:
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(np.concatenate([np.arange(8), rng.permutation(8)[:4]])) for _ in range(3)]
    return Placement(np.array(rows, dtype=np.int32), 8, 4, moe_layer_ids)


@pytest.mark.parametrize(
    "target, name",
    [
        ("moe_serve", "p.json"),
        ("sglang", "p.json"),
        ("sglang", "p.pt"),
        ("tensorrt_llm", "p.yaml"),
        ("vllm", "p.json"),
        ("vllm_ascend", "p.json"),
    ],
)
def test_every_target_reads_back_as_the_same_placement(tmp_path: Path, target: str, name: str) -> None:
    placement = example()
    write_placement(placement, tmp_path / name, target)
    again = read_placement(tmp_path / name, 4, 8, MOE_LAYERS)
    np.testing.assert_array_equal(again.physical_to_logical, placement.physical_to_logical)
    assert (again.num_logical, again.num_ranks, again.moe_layer_ids) == (8, 4, MOE_LAYERS)


def test_our_file_says_everything_itself(tmp_path: Path) -> None:
    placement = Placement(np.array([[0, 1, -1, 1]]), 2, 2, (7,), version=5)
    write_placement(placement, tmp_path / "p.json")
    again = read_placement(tmp_path / "p.json")
    np.testing.assert_array_equal(again.physical_to_logical, placement.physical_to_logical)
    assert (again.num_ranks, again.num_logical, again.moe_layer_ids, again.version) == (2, 2, (7,), 5)


def test_sglang_file_has_a_row_for_every_layer_of_the_model(tmp_path: Path) -> None:
    write_placement(example(), tmp_path / "p.json", "sglang", num_model_layers=8)
    rows = json.loads((tmp_path / "p.json").read_text())["physical_to_logical_map"]
    assert len(rows) == 8
    assert rows[3] == example().physical_to_logical[0].tolist()
    assert rows[0] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("target", ["sglang", "tensorrt_llm", "vllm", "vllm_ascend"])
def test_a_target_without_empty_slots_is_refused_by_name(tmp_path: Path, target: str) -> None:
    placement = Placement(np.array([[0, 1, 2, -1]]), 3, 2, (5,))
    with pytest.raises(PlacementError, match=r"layer 5, slot 3\) and (SGLang|TensorRT-LLM|vLLM|vllm-ascend)"):
        write_placement(placement, tmp_path / "p.json", target)
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    "content, says",
    [
        ('{"physical_to_logical_map": [[0, 1], [1, ', r"p.json line 1 column \d+: not JSON"),
        ('{"physical_to_logical_map": [[0, 1, 2, 3], [0, 1, 2]]}', r"map\[1\]: 3 slots, expected 4"),
        ('{"physical_to_logical_map": [[0, 1, 2, 9]]}', r"map\[0\]\[3\]: expert 9, expected an id below 4"),
        ('{"physical_to_logical_map": [[0, 1, 2, 1.5]]}', r"map\[0\]\[3\]: expected an expert id, found 1.5"),
        ('{"physical_to_logical_map": [[0, 1, 2, 3, 0]]}', "5 slots do not divide over 2 ranks"),
        ('{"physical_to_logical_map": []}', "no layers"),
        ('{"physical_to_logical_map": 3}', "expected a list"),
        ('{"weights": [1]}', "not a placement; expected 'physical_to_logical_map'.*found keys"),
        ("[1, 2]", "not a placement"),
        ("garbage", "not JSON"),
        ('{"logical_count": [[1, 2], [3]]}', "logical_count: lists of different lengths"),
        ('{"logical_count": [[1, 2], [3, 4]]}', "2 experts, expected 4"),
        ('{"layer_list": []}', "layer_list: expected one entry"),
    ],
)
def test_a_wrong_file_says_where_and_what(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(PlacementError, match=says):
        read_placement(tmp_path / "p.json", 2, 4, (0,))


def test_the_placement_of_another_model_is_refused(tmp_path: Path) -> None:
    write_placement(example(), tmp_path / "p.json")
    with pytest.raises(PlacementError, match="num_logical: 8 experts, expected 16"):
        read_placement(tmp_path / "p.json", 4, 16, MOE_LAYERS)
    with pytest.raises(PlacementError, match="moe_layer_ids"):
        read_placement(tmp_path / "p.json", 4, 8, (0, 1, 2))
    with pytest.raises(PlacementError, match="on 4 ranks, expected 2"):
        read_placement(tmp_path / "p.json", 2, 8, MOE_LAYERS)
    write_placement(example((0, 1, 2)), tmp_path / "s.json", "sglang")
    with pytest.raises(PlacementError, match=r"3 layers, expected 2 .* or at least 6"):
        read_placement(tmp_path / "s.json", 4, 8, (4, 5))
    with pytest.raises(PlacementError, match="does not say over how many ranks"):
        read_placement(tmp_path / "s.json")


def test_a_missing_expert_is_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"physical_to_logical_map": [[0, 1, 1, 0]]}')
    with pytest.raises(PlacementError, match=r"p\.json: "):
        read_placement(tmp_path / "p.json", 2, 3, (0,))


def test_a_truncated_torch_file_is_refused(tmp_path: Path) -> None:
    write_placement(example(), tmp_path / "p.pt", "sglang")
    whole = (tmp_path / "p.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PlacementError, match=r"cut\.pt is not a complete torch file"):
        read_placement(tmp_path / "cut.pt", 4, 8, MOE_LAYERS)


class _RunsCode:
    def __reduce__(self):  # type: ignore[no-untyped-def]
        return print, ("must never appear",)


def test_a_torch_file_with_code_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    torch.save({"physical_to_logical_map": _RunsCode()}, tmp_path / "p.pt")
    with pytest.raises(PlacementError, match=r"carries code .* and is refused"):
        read_placement(tmp_path / "p.pt", 4, 8)
    assert capsys.readouterr().out == ""


def test_an_oversized_torch_file_is_refused_with_the_convert_line(tmp_path: Path) -> None:
    write_placement(example(), tmp_path / "p.pt", "sglang")
    with pytest.raises(PlacementError, match=r"moe-serve convert .*p\.pt p\.npz --max-pt-gib 1"):
        read_placement(tmp_path / "p.pt", 4, 8, max_torch_bytes=100)
