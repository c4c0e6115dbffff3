"""While a rank loads, its experts are in memory once: packing needs room for one expert beside the slots."""

import ctypes
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_serve.models.spec import read_spec
from moe_serve.models.stored_weights import StoredWeights
from moe_serve.models.weight_plan import dense_tensors, expert_tensors
from moe_serve.models.weight_share import WeightShare
from moe_serve.models.weights import load_weights
from tests.engine.offline import tiny_model
from tests.models.runner import one_rank

SIZES = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 4}
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def memory_bytes(name: str) -> int:
    """Returns a size of this process: VmRSS, what it has now; VmHWM, its peak."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not CLEAR.exists(), reason="needs the peak of /proc/self/status")
def test_the_peak_of_loading_is_the_weights_and_one_expert(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen3_moe")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SIZES))
    spec = read_spec(folder)
    parts = [part for plan in dense_tensors(spec) for part in plan.parts] + [p.fused for p in expert_tensors(spec)]
    tensors = {part.source: torch.zeros(part.shape, dtype=torch.bfloat16) for part in parts}
    save_file(tensors, folder / "model.safetensors")
    del tensors
    stored = StoredWeights.of(spec, folder)
    share = WeightShare(spec, one_rank(spec), 0, torch.float32, "cpu", "dense", stored)
    wanted = sum(share.dense_bytes.values()) + spec.num_moe_layers * share.num_slots * share.slot_form.num_bytes
    assert wanted > 190 * 2**20
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would be used again, without growing
    before = memory_bytes("VmRSS")
    CLEAR.write_text("5")  # the peak begins anew
    loaded = load_weights(folder, share)
    grown = memory_bytes("VmHWM") - before
    assert loaded.bytes_read > 190 * 2**20
    most = wanted + 16 * share.slot_form.num_bytes
    assert wanted * 0.75 < grown < most, f"{grown >> 20} MiB for {wanted >> 20}"
