"""Weights are in memory once: packing needs room for one expert beside the slots, and a tied embedding has one form."""

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_serve.dispatch.base import EpGroup
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.kernels.cpu.library import find_cpu_library
from moe_serve.kernels.numerics import Numerics
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_plan import dense_tensors, expert_tensors
from moe_serve.models.weight_share import StoredWeights, WeightShare
from moe_serve.models.weights import load_weights
from tests.engine.offline import tiny_model
from tests.models.runner import load_decoder, one_rank
from tests.ranks import run_ranks

EXPERTS = {
    "qwen3_moe": {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 4},
    "gpt_oss": {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 32, "num_hidden_layers": 4},
}
MALLOC_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h: larger pieces go back to the system once freed
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def memory_bytes(name: str) -> int:
    """Returns a size of this process: VmRSS, what it has now; VmHWM, its peak."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


TIED = {"hidden_size": 512, "vocab_size": 1 << 16, "tie_word_embeddings": True}
NEEDS_SIZES = pytest.mark.skipif(not CLEAR.exists(), reason="needs the sizes of /proc/self/status")


def write_zeros(folder: Path, sizes: Mapping[str, object], family: str = "qwen3_moe") -> Path:
    """Writes a tiny model of these sizes in bfloat16, or what MXFP4 needs, and returns its folder."""
    config = tiny_model(folder, family) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | sizes))
    spec = read_spec(config.parent)
    parts = [part for plan in dense_tensors(spec) for part in plan.parts]
    parts += [part for plan in expert_tensors(spec) for part in (*plan.fused, plan.mxfp4_scale) if part is not None]
    dtypes = {"U8": torch.uint8, None: torch.bfloat16}
    tensors = {part.source: torch.zeros(part.shape, dtype=dtypes[part.dtype_name]) for part in parts}
    save_file(tensors, config.parent / "model.safetensors")
    return config.parent


def memory_now() -> int:
    """Returns the bytes of this process, without what earlier tests have freed: it would be used without growing."""
    ctypes.CDLL(None).malloc_trim(0)
    return memory_bytes("VmRSS")


def measure_loading(rank: int, group: EpGroup, folder: Path) -> tuple[int, int, int, int]:
    """Returns bytes: what the weights take, one expert of them, what the peak of loading has added, and those read."""
    del rank, group
    # The C library keeps freed pieces of its heap, as many as earlier tests have taught it: no temporary lies there.
    ctypes.CDLL(None).mallopt(MALLOC_MMAP_THRESHOLD, 1 << 16)
    spec = read_spec(folder)
    stored = StoredWeights.of(spec, folder)
    share = WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu", "dense", stored)
    one = share.slot_form.num_bytes
    wanted = sum(share.dense_bytes.values()) + spec.num_moe_layers * share.num_slots * one
    before, code_before = memory_now(), memory_bytes("RssFile")
    CLEAR.write_text("5")  # the peak begins anew
    loaded = load_weights(folder, share)
    code = memory_bytes("RssFile") - code_before  # pages of libraries, which a forked rank looks up anew
    return wanted, one, memory_bytes("VmHWM") - before - code, loaded.bytes_read


@NEEDS_SIZES
@pytest.mark.parametrize(("family", "coding", "file_mib"), [("qwen3_moe", {}, 190), ("gpt_oss", MXFP4, 50)])
def test_the_peak_of_loading_is_the_weights_and_one_expert(
    family: str, coding: dict[str, object], file_mib: int, tmp_path: Path
) -> None:
    folder = write_zeros(tmp_path, EXPERTS[family] | coding, family)
    ((wanted, one, grown, bytes_read),) = run_ranks(1, measure_loading, folder)
    assert wanted > 190 * 2**20
    assert bytes_read > file_mib * 2**20
    # One or two experts beside the weights, and some 10 MiB that the process may touch anew after a long run of tests.
    assert wanted * 0.75 < grown < wanted + 12 * one, f"{grown >> 20} MiB for {wanted >> 20}"


@NEEDS_SIZES
@pytest.mark.skipif(find_cpu_library() is None, reason="no C compiler")
def test_a_tied_embedding_is_in_memory_once(tmp_path: Path) -> None:
    folder = write_zeros(tmp_path, TIED)
    table_bytes = 2 * TIED["vocab_size"] * TIED["hidden_size"]
    before = memory_now()
    decoder = load_decoder(folder, Numerics(compiled=True), moe_layer=MoeLayer)
    grown = memory_now() - before
    assert decoder.spec.tie_embeddings
    assert 0.9 * table_bytes < grown < 1.5 * table_bytes, f"{grown >> 20} MiB for {table_bytes >> 20}"
