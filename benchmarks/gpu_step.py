"""A MoE layer of a decode step as it would run on a GPU: launches, bytes over the unavoidable, and the chip's floor.

    python -m benchmarks.gpu_step [--chip H100] [--tokens 128] [--context 4096]

Needs no GPU: the step is recorded on tensors without memory (moe_serve/roofline/launches.py). The floor of a launch is
the larger of its bytes at the rate of the memory and its FLOP at that of the matrix units, from the chip's profile;
nothing here was timed. Attention is one launch of its contract.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, save
from moe_serve.eplb.cost.profile_files import HardwareProfile, load_hardware
from moe_serve.kernels.part_clock import ATTENTION, GATE
from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import ModelSpec
from moe_serve.roofline.launches import Launch
from moe_serve.roofline.step import RankStep, record_step
from moe_serve.roofline.work import Work, in_layers, total, unavoidable_bytes, work_of
from tests.models.published import DEEPSEEK_V3, GPT_OSS_20B, PUBLISHED

NOTES = """
Recorded without a GPU, and not timed: launches are those of the product's decoder on tensors without memory, bytes and
FLOP follow from their shapes. Attention reads each cached row once. Launches of the MoE layer
are those from the router's logits to the sum of its results, with the shared expert, and dispatch and combine among
GPUs that write into each other's memory; with redundant experts also the collective that gathers counts. The
unavoidable bytes are each touched weight and each cached row once, the residual in and out, and rows and results of
experts written and read once. The least time of a launch is that of its
bytes at the full rate of the chip's memory, or of its FLOP at the full rate of its matrix units.
"""
FP8 = {"wire_dtype": "fp8", "expert_form": "fp8"}
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-V3, 32 ranks, FP8": (DEEPSEEK_V3, {"num_ranks": 32, "transport": "slabs"} | FP8),
    "DeepSeek-V3, 8 ranks, FP8": (DEEPSEEK_V3, {"num_ranks": 8, "transport": "slabs"} | FP8),
    "DeepSeek-V3, 32 ranks, FP8, 32 redundant": (
        DEEPSEEK_V3,
        {"num_ranks": 32, "transport": "slabs", "redundant": 32, "split": "exact"} | FP8,
    ),
    "gpt-oss-20b, 4 ranks, MXFP4": (
        GPT_OSS_20B | {"layer_types": ["full_attention"] * 24},
        {"num_ranks": 4, "transport": "slabs", "expert_form": "mxfp4"},
    ),
    "GLM-4.5-Air, 8 ranks": (PUBLISHED["GLM-4.5-Air"][0], {"num_ranks": 8, "transport": "slabs"}),
    "Llama-4-Scout, 8 ranks": (PUBLISHED["Llama-4-Scout"][0], {"num_ranks": 8, "transport": "slabs"}),
    "MiniMax-M2, 8 ranks": (PUBLISHED["MiniMax-M2"][0], {"num_ranks": 8, "transport": "slabs"}),
    "Phi-3.5-MoE, 1 rank": (PUBLISHED["Phi-3.5-MoE"][0], {}),
    "OLMoE-1B-7B, 1 rank": (PUBLISHED["OLMoE-1B-7B"][0], {}),
}


def one_layer(config: dict[str, Any]) -> ModelSpec:
    """Returns a published model cut to one MoE layer."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        spec = read_spec(Path(folder))
    return replace(spec, num_layers=1, moe_layer_ids=(0,))


def floor_us(work: Work, chip: HardwareProfile, narrow: bool) -> float:
    """Returns the least time of a launch on a chip. narrow: its products are of FP8"""
    return 1e6 * max(
        work.num_bytes / chip.hbm_bytes_per_s, work.flops / (chip.fp8_flops if narrow else chip.bf16_flops)
    )


def recorded_layer(name: str, tokens: int, context: int) -> tuple[RankStep, list[Launch]]:
    """Returns a step of STEPS and the launches of its layer."""
    config, options = STEPS[name]
    step = RankStep(one_layer(config), tokens, context, **options)
    return step, in_layers(record_step(step).launches)


def moe_launches(launches: list[Launch]) -> int:
    """Returns how many launches are the MoE layer's: from the router's logits to the sum, the shared expert included.

    The norm before it belongs to the residual.
    """
    return sum(each.part != ATTENTION and (each.part, each.name) != (GATE, "norm_kernel") for each in launches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="H100", help="a hardware profile of moe_serve/eplb/cost/profiles")
    parser.add_argument("--tokens", type=int, default=128, help="of a rank, each of another request")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each request in the cache")
    options = parser.parse_args()
    chip, rows = load_hardware(options.chip), []
    for name in STEPS:
        step, launches = recorded_layer(name, options.tokens, options.context)
        works = [work_of(launch, step) for launch in launches]
        narrow = [bool(launch.arguments.get("SCALED")) for launch in launches]
        floors = [floor_us(work, chip, is_narrow) for work, is_narrow in zip(works, narrow, strict=True)]
        moved, least = total(works).num_bytes, unavoidable_bytes(step)
        rows.append(
            {
                "model": name,
                "launches of the MoE layer": moe_launches(launches),
                "with attention": len(launches),
                "MB moved": round(moved / 1e6),
                "over the unavoidable": f"{moved / least:.3f}",
                f"µs at least, {chip.name}": round(sum(floors)),
                "µs of the unavoidable": round(1e6 * least / chip.hbm_bytes_per_s),
            }
        )
    title = f"A layer of a decode step, {options.tokens} tokens a rank of {options.context} tokens each, bfloat16"
    print(save("gpu_step", title, rows, conditions("torch", "triton"), NOTES))


if __name__ == "__main__":
    main()
