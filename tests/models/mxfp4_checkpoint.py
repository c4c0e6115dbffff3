"""A tiny checkpoint of gpt-oss whose experts are stored in MXFP4."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_plan import Part, dense_tensors, expert_tensors
from tests.engine.offline import tiny_model

MXFP4_CONFIG = {"quantization_config": {"quant_method": "mxfp4"}}


def random_mxfp4(num_experts: int, n: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns blocks [num_experts, n, k / 32, 16] and scales [num_experts, n, k / 32] of values well below one."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 124, (num_experts, n, k // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def write_mxfp4_config(folder: Path, **values: object) -> Path:
    """Writes the config.json of the tiny gpt-oss, with experts in MXFP4, and returns its folder."""
    path = tiny_model(folder, "gpt_oss")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96} | MXFP4_CONFIG | values))
    return path


def write_mxfp4_checkpoint(folder: Path) -> Path:
    """Writes the tiny gpt-oss with random weights, and returns its folder."""
    folder.mkdir(exist_ok=True)
    path = write_mxfp4_config(folder)
    spec = read_spec(path)
    generator = torch.Generator().manual_seed(7)

    def drawn(part: Part) -> Tensor:
        return torch.randn(part.shape, generator=generator) * part.shape[-1] ** -0.5

    tensors = {part.source: drawn(part) for plan in dense_tensors(spec) for part in plan.parts}
    for seed, plan in enumerate(expert_tensors(spec)):
        (fused,) = plan.fused
        if plan.mxfp4_scale is None:
            tensors[fused.source] = drawn(fused)
        else:
            coded = random_mxfp4(spec.num_logical, *plan.shape, seed)
            tensors[fused.source], tensors[plan.mxfp4_scale.source] = coded
    save_file(tensors, path / "model.safetensors")
    return path
