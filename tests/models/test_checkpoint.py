"""safetensors files, whole and broken."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_serve.errors import ModelError
from moe_serve.models.checkpoint import Checkpoint


def write(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
def test_ranges_are_what_the_library_wrote_and_every_byte_is_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(6 * 5 * 7).view(6, 5, 7).to(dtype)
    save_file({"a": tensor, "b": torch.ones(3), "empty": torch.zeros(0, 4)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.bytes_read == 0
        got = checkpoint.read("a", 2, 3)
        assert got.dtype == dtype
        assert torch.equal(got.float(), tensor[2:5].float())
        assert checkpoint.bytes_read == tensor[2:5].nbytes
        assert torch.equal(checkpoint.read("a").float(), tensor.float())
        assert checkpoint.read("empty").shape == (0, 4)
        assert checkpoint.bytes_read == tensor[2:5].nbytes + tensor.nbytes


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
BROKEN = {
    "empty file": b"",
    "cut in the length": b"\x10\x00",
    "length beyond the file": struct.pack("<Q", 1 << 40) + b"{}",
    "cut header": struct.pack("<Q", 40) + b'{"a": ',
}
HEADERS = {
    "not json": b"{'a'}",
    "not utf-8": b'{"\xff": 1}',
    "a list": [],
    "an entry that is no object": {"a": 3},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "too few bytes for the shape": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    "a negative size": {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
    "offsets that go back": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
    "offsets of another type": {"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}},
    "data cut off": {"a": {"dtype": "F32", "shape": [200], "data_offsets": [0, 800]}},
}


@pytest.mark.parametrize("name", [*BROKEN, *HEADERS])
def test_a_broken_file_is_one_error_that_names_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if name in BROKEN:
        path.write_bytes(BROKEN[name])
    else:
        write(path, HEADERS[name], bytes(8))
    with pytest.raises(ModelError, match=r"model\.safetensors.*download the file again"):
        Checkpoint(tmp_path)


def test_a_folder_without_weights_and_an_index_without_its_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="load_format: dummy"):
        Checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    write(tmp_path / "one.safetensors", GOOD, bytes(8))
    with pytest.raises(ModelError, match=r"two\.safetensors named by .* are missing"):
        Checkpoint(tmp_path)
    index.write_text("[]")
    with pytest.raises(ModelError, match="is not a safetensors index"):
        Checkpoint(tmp_path)


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", GOOD, bytes(8))
    with pytest.raises(ModelError, match=r"tensor a is in one\.safetensors and two\.safetensors"):
        Checkpoint(tmp_path)
