"""How a checkpoint stores its weights, and so how the compiled CPU kernels keep them: bfloat16 stays bfloat16.

Widening a bfloat16 to float32 is exact, so kernels that widen what they read compute what float32 weights would give,
from half the memory. So it is with FP8 of experts and of most projections (fp8_projections.py); other FP8 is
dequantised to float32. Dense experts of an MXFP4 checkpoint are bfloat16, also exactly. Vectors (norms, biases) are
float32 always.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from moe_serve.kernels.forms import FP8_GROUP
from moe_serve.models.checkpoint import Checkpoint
from moe_serve.models.fp8_projections import keeps_projection
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_plan import DenseTensor, ExpertTensor, Part, dense_tensors, expert_tensors


@dataclass(frozen=True)
class StoredWeights:
    """The dtypes in which weights are kept as stored.

    dense:      bfloat16, float32, or float8_e4m3fn with its scales, of each tensor by its name in weight_plan.py
    experts:    bfloat16 or float32, of experts in form dense
    keeps_fp8:  whether all experts are stored in e4m3 with scales that the kernels take
    """

    dense: Mapping[str, torch.dtype]
    experts: torch.dtype
    keeps_fp8: bool

    @classmethod
    def of(cls, spec: ModelSpec, folder: Path | None) -> Self:
        """Returns them for a checkpoint; without one (None, or a folder without weights) as config.json suggests.

        Raises ModelError where a file cannot be read.
        """
        if folder is None or not any(folder.glob("*.safetensors")):
            return cls._as_configured(spec)
        with Checkpoint(folder) as checkpoint:
            return cls._as_read(spec, checkpoint)

    @classmethod
    def _as_configured(cls, spec: ModelSpec) -> Self:
        is_bfloat16 = spec.checkpoint_dtype == "bfloat16" and spec.fp8_block is None  # FP8 is dequantised to float32
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        dense = {plan.name: dtype if plan.kind == "matrix" else torch.float32 for plan in dense_tensors(spec)}
        experts = torch.bfloat16 if spec.experts_in_mxfp4 else dtype
        return cls(dense, experts, keeps_fp8=spec.fp8_block is not None and spec.fp8_block.is_kept)

    @classmethod
    def _as_read(cls, spec: ModelSpec, checkpoint: Checkpoint) -> Self:
        def dtypes(parts: tuple[Part, ...]) -> set[str]:
            names = (name for part in parts for name in (part.source, *part.aliases))
            return {checkpoint.tensors[name].dtype_name for name in names if name in checkpoint.tensors}

        def kept(plan: DenseTensor) -> torch.dtype:
            names = dtypes(plan.parts) if plan.kind == "matrix" else set()
            if names == {"F8_E4M3"} and keeps_projection(spec, plan):
                return torch.float8_e4m3fn
            return _kept(names)

        experts: set[str] = set()
        is_kept = spec.fp8_block is not None and spec.fp8_block.is_kept
        for plan in expert_tensors(spec):
            if plan.kind != "matrix":
                continue
            fused = {"BF16"} if plan.mxfp4_scale is not None else dtypes((plan.fused,))
            is_kept &= not (fused and mixes_gate_and_up(spec, plan))
            for expert in range(0 if fused else spec.num_logical):
                experts |= dtypes(plan.parts_of(expert))
            experts |= fused
        keeps_fp8 = is_kept and experts == {"F8_E4M3"}
        dense = {plan.name: kept(plan) for plan in dense_tensors(spec)}
        for name in [name for name in dense if name.endswith("gate_up")]:
            down = name.removesuffix("gate_up") + "down"
            if dense[name] != dense[down]:  # one kernel reads both, as the same dtype
                dense[name] = dense[down] = torch.float32
        return cls(dense, _kept(experts), keeps_fp8)


def mixes_gate_and_up(spec: ModelSpec, plan: ExpertTensor) -> bool:
    """Returns whether a block of scales of the fused tensor would hold rows of both gate and up."""
    by_channel = spec.fp8_block is not None and spec.fp8_block.by_channel
    return plan.name == "gate_up" and not by_channel and spec.moe_intermediate % FP8_GROUP > 0


def _kept(dtype_names: set[str]) -> torch.dtype:
    """Returns the dtype for what is stored in these: bfloat16 needs all of it to be so, since no value is rounded."""
    return torch.bfloat16 if dtype_names == {"BF16"} else torch.float32
