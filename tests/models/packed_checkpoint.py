"""Small checkpoints of whole numbers, packed as GPTQ, AWQ and compressed-tensors define it, beside their values.

The packers are written from the formats' definitions, with whole numbers of 64 bits.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_plan import dense_tensors, expert_tensors

# Widths that are multiples of a group of 32 and of 64, of which one is not one of 128.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 192,
    "intermediate_size": 96, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 48, "max_position_embeddings": 256, "num_experts": 4,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """method: of quantization_config, and of the packer;  group: -1: whole rows"""

    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    act_order: bool = False
    version_2: bool = False  # of GPTQ: zeros as they are

    def __str__(self) -> str:
        flags = ("symmetric", "act_order", "version_2")
        said = [flag for flag in flags if getattr(self, flag)]
        return "-".join([self.method, str(self.bits), str(self.group), *said])

    @property
    def quantization_config(self) -> dict[str, Any]:
        match self.method:
            case "gptq":
                form = "gptq_v2" if self.version_2 else "gptq"
                return {
                    "quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": self.act_order,
                    "sym": self.symmetric, "checkpoint_format": form, "lm_head": True,
                }  # fmt: skip
            case "awq":
                return {
                    "quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm",
                }  # fmt: skip
            case _:
                weights = {
                    "type": "int", "num_bits": self.bits, "symmetric": self.symmetric, "dynamic": False,
                    "strategy": "channel" if self.group == -1 else "group",
                    "group_size": None if self.group == -1 else self.group,
                    "actorder": "group" if self.act_order else None, "observer": "minmax",
                }  # fmt: skip
                group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
                return {
                    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*mlp.gate$"],
                    "config_groups": {"group_0": group},
                }  # fmt: skip


def write_packed_checkpoint(folder: Path, packing: Packing, **changes: Any) -> Path:
    """Writes a random model with packed projections, and beside it, in `folder`-values, the same values in float32."""
    values_folder = folder.with_name(folder.name + "-values")
    for each, config in ((folder, {"quantization_config": packing.quantization_config}), (values_folder, {})):
        each.mkdir()
        (each / "config.json").write_text(json.dumps(CONFIG | config | changes))
    spec = read_spec(values_folder)
    generator = torch.Generator().manual_seed(5)
    packed: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    parts = [part for dense in dense_tensors(spec) for part in dense.parts]
    for plan in expert_tensors(spec):
        parts += [part for expert in range(spec.num_logical) for part in plan.parts_of(expert)]
    for part in parts:
        if "_proj" in part.source or part.source == "lm_head.weight":
            pieces, value = packed_matrix(packing, *part.shape, generator)
            packed |= {part.source.removesuffix("weight") + end: piece for end, piece in pieces.items()}
            values[part.source] = value
        else:
            size = 0.1 if len(part.shape) == 1 else part.shape[-1] ** -0.5
            tensor = torch.randn(part.shape, generator=generator) * size + (1 if "norm" in part.source else 0)
            packed[part.source] = values[part.source] = tensor
    save_file(packed, folder / "model.safetensors")
    save_file(values, values_folder / "model.safetensors")
    return folder


def packed_matrix(packing: Packing, n: int, k: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the pieces of a random matrix by the ends of their names, and its values [n, k] in float32."""
    group = k if packing.group == -1 else packing.group
    groups, codes = k // group, torch.randint(0, 1 << packing.bits, (n, k), generator=generator)
    scale = ((torch.rand(n, groups, generator=generator) + 0.5) * 4 * k**-0.5 / (1 << packing.bits)).half()
    middle = 1 << packing.bits - 1
    zero = torch.full((n, groups), middle)
    if not packing.symmetric:  # a stored zero of 0 is one that version 1 of GPTQ wraps to the largest
        zero = torch.randint(0, 1 << packing.bits, (n, groups), generator=generator)
    index = torch.arange(k) // group
    if packing.act_order:
        index = index[torch.randperm(k, generator=generator)]
    if packing.method == "compressed-tensors":
        scale = scale.bfloat16()
    values = scale.float()[:, index] * (codes - zero[:, index])
    return pieces_of(packing, codes, zero, scale, index), values


def pieces_of(packing: Packing, codes: Tensor, zero: Tensor, scale: Tensor, index: Tensor) -> dict[str, Tensor]:
    """Returns the pieces of a matrix by the ends of their names.

    codes: [n, k] int64;  zero, scale: of groups, [n, groups];  index: the group of each column, [k]
    """
    bits = packing.bits
    match packing.method:
        case "gptq":
            stored = zero if packing.version_2 else (zero - 1) % (1 << bits)
            pieces = {
                "qweight": words(codes.T, bits, 0),
                "qzeros": words(stored.T, bits, 1),
                "scales": scale.T.contiguous(),
                "g_idx": index.int(),
            }
        case "awq":
            places = [0, 2, 4, 6, 1, 3, 5, 7]
            pieces = {
                "qweight": words(codes.T, 4, 1, places),
                "qzeros": words(zero.T, 4, 1, places),
                "scales": scale.T.contiguous(),
            }
        case _:
            pieces = {
                "weight_packed": words(codes, bits, 1),
                "weight_scale": scale,
                "weight_shape": torch.tensor(codes.shape),
            }
            if not packing.symmetric:
                pieces["weight_zero_point"] = words(zero, bits, 0)
            if packing.act_order:
                pieces["weight_g_idx"] = index.int()
    return pieces


def words(codes: Tensor, bits: int, dim: int, places: list[int] | None = None) -> Tensor:
    """Returns int32 that hold neighbours along a dimension, in the order of `places`, the first in the lowest bits."""
    if dim == 0:
        return words(codes.T, bits, 1, places).T.contiguous()
    count = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % count))
    of_word = padded.unflatten(1, (-1, count))[..., places or range(count)]
    numbers = (of_word << bits * torch.arange(count)).sum(2)
    return (numbers - ((numbers >> 31) << 32)).int()  # those of 32 bits without a sign as those with one


def change_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Replaces a tensor, or leaves it out where the change gives None."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, folder / "model.safetensors")
