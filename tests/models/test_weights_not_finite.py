"""A checkpoint that holds NaN or Inf is refused with the tensor and the file, on whichever rank, in whatever form."""

import math
import random
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_serve.ep.expert_form import ExpertForm
from moe_serve.errors import ModelError
from moe_serve.kernels.forms import PER_CHANNEL
from moe_serve.models.checkpoint import all_tensors
from moe_serve.models.families.registry import read_spec
from moe_serve.models.stored_tensor import StoredTensor
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import ExpertReloader, ExpertToRead, all_finite, load_weights
from tests.models.families import Oracle
from tests.models.fp8_checkpoint import write_fp8_checkpoint
from tests.models.mxfp4_checkpoint import write_mxfp4_checkpoint
from tests.models.test_weights import fuse_experts, placed, rewritten

NOT_FINITE: dict[str, list[bytes]] = {
    "F32": [struct.pack("<f", value) for value in (math.nan, math.inf, -math.inf)],
    "F16": [struct.pack("<e", value) for value in (math.nan, math.inf, -math.inf)],
    "BF16": [b"\xc0\x7f", b"\xc0\xff", b"\x80\x7f", b"\x80\xff"],
    "F64": [struct.pack("<d", value) for value in (math.nan, -math.inf, 1e39)],  # the last one is Inf in float32
    "F8_E4M3": [b"\x7f", b"\xff"],
    "U8": [b"\xff"],  # a scale of MXFP4
}


@contextmanager
def poked(tensor: StoredTensor, item: int, value: bytes) -> Iterator[None]:
    """One number of a file is another one."""
    with tensor.path.open("r+b") as file:
        file.seek(tensor.start + item * len(value))
        before = file.read(len(value))
        file.seek(-len(value), 1)
        file.write(value)
        file.flush()
        try:
            yield
        finally:
            file.seek(tensor.start + item * len(value))
            file.write(before)


def in_dtype(dtype: torch.dtype) -> Callable[[Path, Path], Path]:
    def written(source: Path, folder: Path) -> Path:
        return rewritten(source, folder, lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})

    return written


def fused(source: Path, folder: Path) -> Path:
    return rewritten(source, folder, fuse_experts(read_spec(source)))


def shares(folder: Path, form: ExpertForm, dtype: torch.dtype, packed: bool) -> list[WeightShare]:
    """What each of two ranks reads, with experts on both."""
    spec = read_spec(folder)
    placement, stored = placed(spec, 2, 2), StoredWeights.of(spec, folder) if packed else None
    return [WeightShare(spec, placement, rank, dtype, "cpu", form, stored) for rank in range(2)]


def make_folder(kind: str, oracle: Oracle, folder: Path) -> Path:
    match kind:
        case "fp8":
            return write_fp8_checkpoint(folder)
        case "fp8 by channel":
            return write_fp8_checkpoint(folder, PER_CHANNEL)
        case "mxfp4":
            return write_mxfp4_checkpoint(folder)
        case "fused":
            return fused(oracle("qwen3_moe")[1], folder)
        case _:
            name, _, dtype = kind.partition(" in ")
            return in_dtype(getattr(torch, dtype))(oracle(name)[1], folder)


CASES: list[tuple[str, ExpertForm, torch.dtype, bool]] = [
    ("deepseek_v3 in float32", "dense", torch.float32, False),
    ("deepseek_v3 in bfloat16", "dense", torch.float32, True),
    ("deepseek_v3 in bfloat16", "int8", torch.float32, False),
    ("qwen3_moe in float16", "dense", torch.bfloat16, False),
    ("mixtral in float64", "dense", torch.float32, False),
    ("granitemoeshared in float32", "int8", torch.float32, True),
    ("gpt_oss in bfloat16", "dense", torch.float32, False),
    ("fused", "dense", torch.float32, True),
    ("fp8", "dense", torch.float32, True),
    ("fp8", "int8", torch.float32, False),
    ("fp8 by channel", "fp8", torch.float32, True),
    ("mxfp4", "mxfp4", torch.float32, True),
    ("mxfp4", "dense", torch.float32, False),
]


@pytest.mark.parametrize(("kind", "form", "dtype", "packed"), CASES, ids=str)
def test_every_tensor_of_a_checkpoint_is_looked_through(
    kind: str, form: ExpertForm, dtype: torch.dtype, packed: bool, oracle: Oracle, tmp_path: Path
) -> None:
    folder = make_folder(kind, oracle, tmp_path / "model")
    ranks, draw = shares(folder, form, dtype, packed), random.Random(0)
    for share in ranks:
        load_weights(folder, share)
    for name, tensor in all_tensors(folder).items():
        if name.endswith("_blocks"):  # of MXFP4, which has no such numbers
            continue
        value = draw.choice(NOT_FINITE[tensor.dtype_name])
        with poked(tensor, draw.randrange(math.prod(tensor.shape)), value):
            for share in list(ranks):
                words = refusal(folder, share)
                if words:
                    break
                ranks.reverse()  # the next tensor probably belongs to the other rank, too
        assert words.startswith(f"{tensor.path}: tensor {name} holds numbers"), f"{name}: who has seen {value!r}?"
        assert "\n" not in words
        assert "download the file again" in words


def refusal(folder: Path, share: WeightShare) -> str:
    try:
        load_weights(folder, share)
    except ModelError as error:
        return str(error)
    return ""


def test_an_expert_of_a_fused_tensor_is_named(oracle: Oracle, tmp_path: Path) -> None:
    folder = fused(oracle("qwen3_moe")[1], tmp_path / "model")
    (share, _) = shares(folder, "dense", torch.float32, packed=False)
    tensor = all_tensors(folder)["model.layers.1.mlp.experts.down_proj"]
    words = "down_proj holds numbers of expert 2 that are not finite in float32"
    bad = poked(tensor, 2 * math.prod(tensor.shape[1:]) + 5, NOT_FINITE["F32"][0])
    with bad, pytest.raises(ModelError, match=words):
        load_weights(folder, share)


def test_numbers_that_the_compute_dtype_makes_infinite_are_refused(oracle: Oracle, tmp_path: Path) -> None:
    folder = in_dtype(torch.float32)(oracle("qwen3_moe")[1], tmp_path / "model")
    tensor = all_tensors(folder)["model.norm.weight"]
    with poked(tensor, 3, struct.pack("<f", 3.4e38)):
        load_weights(folder, shares(folder, "dense", torch.float32, packed=False)[0])
        with pytest.raises(ModelError, match=re.escape("model.norm.weight holds numbers that are not finite in bfl")):
            load_weights(folder, shares(folder, "dense", torch.bfloat16, packed=False)[0])


def test_an_expert_that_is_read_again_is_looked_through_too(oracle: Oracle, tmp_path: Path) -> None:
    folder = in_dtype(torch.bfloat16)(oracle("qwen3_moe")[1], tmp_path / "model")
    share = shares(folder, "dense", torch.float32, packed=True)[0]
    weights = load_weights(folder, share)
    stores = [weights.store(layer) for layer in share.spec.moe_layer_ids]
    held = {name: tensor.clone() for name, tensor in stores[1].slot(0).items()}
    reloader, read = ExpertReloader(share, folder), [ExpertToRead(layer_row=1, expert=7, slot=0)]
    tensor = all_tensors(folder)["model.layers.1.mlp.experts.7.up_proj.weight"]
    words = re.escape(f"{tensor.path}: tensor model.layers.1.mlp.experts.7.up_proj.weight holds numbers")
    with poked(tensor, 9, NOT_FINITE["BF16"][0]), pytest.raises(ModelError, match=words):
        reloader.read(read, stores)
    assert all(torch.equal(stores[1].slot(0)[name], tensor) for name, tensor in held.items())
    reloader.read(read, stores)


def test_what_is_not_used_is_not_looked_at(oracle: Oracle, tmp_path: Path) -> None:
    folder = in_dtype(torch.float32)(oracle("qwen3_moe-dense-bias-window")[1], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((8,), math.nan)
    save_file(tensors, folder / "model.safetensors")
    load_weights(folder, shares(folder, "dense", torch.float32, packed=False)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_one_number_is_found_wherever_it_is(size: int, dtype: torch.dtype) -> None:
    for at in {0, size // 2, size - 1}:
        values = torch.linspace(-2, 2, size).to(dtype)
        assert all_finite(values, torch.float32)
        for bad in (math.nan, math.inf, -math.inf):
            values[at] = bad
            assert not all_finite(values, torch.float32)
    assert all_finite(torch.tensor([torch.finfo(dtype).max]), torch.float32) == (dtype != torch.float64)
    assert all_finite(torch.empty(0, dtype=dtype), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_each_byte_of_fp8_is_told_apart(dtype: torch.dtype) -> None:
    for byte in range(256):
        values = torch.tensor([0, byte, 1], dtype=torch.uint8).view(dtype)
        assert all_finite(values, torch.float32) == bool(values.float().isfinite().all()), byte
