"""What grows with what in a step: a record of few sizes says what others do, and the packaged ones are of today."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_serve.eplb.cost.kernels import even_amounts
from moe_serve.eplb.cost.step_record import Amounts, StepRecord, load_steps, total
from moe_serve.eplb.load import Phase
from moe_serve.errors import ConfigError
from moe_serve.roofline.record import STEPS, record_kind, record_model
from moe_serve.roofline.step import RankStep, Transport, record_step
from moe_serve.roofline.work import even_load, work_of
from tests.models.families import spec_of
from tests.roofline.packaged import spec_of as priced_spec

# Of a step, or a part of it, before it is recorded anew. Small changes of kernels need no new files.
DRIFT_OF_BYTES, DRIFT_OF_LAUNCHES = 0.02, 0.1


def amounts_of(step: RankStep) -> Amounts:
    load = even_load(step)
    slots = step.placement.slots_per_rank
    return {
        **even_amounts(step.sequences, step.length, step.new_tokens, step.num_ranks, slots, step.spec.topk),
        "row": load.rows, "expert": load.experts,
    }  # fmt: skip


def said(record: StepRecord, step: RankStep) -> tuple[float, float, float]:
    """Returns launches, bytes and FLOP of a step as its record says them."""
    amounts = amounts_of(step)
    works = [(each.times, (each.launches, each.num_bytes, each.flops)) for each in record.kernels]
    launches, num_bytes, flops = (
        sum(times * float(total(work[index], amounts)) for times, work in works) for index in range(3)
    )
    return launches, num_bytes, flops


def done(step: RankStep) -> tuple[float, float, float]:
    """Returns those of a recording of all layers."""
    launches = record_step(step).launches
    works = [work_of(launch, step) for launch in launches]
    return len(launches), sum(work.num_bytes for work in works), sum(work.flops for work in works)


SIZES = {
    "decode": [(160, 3000, 1), (200, 700, 1), (130, 12000, 1)],
    "prefill": [(3, 0, 700), (1, 500, 1500), (2, 0, 3000)],
}
# One with dense layers, shared experts and latents; one with windows in every other layer, sinks and biases.
KINDS = [pytest.param(*kind, marks=[pytest.mark.slow] if "local" in kind else []) for kind in STEPS]
MODELS = ["deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("phase, transport", KINDS)
def test_a_record_of_few_sizes_says_what_others_do(
    name: str, phase: Phase, transport: Transport, tmp_path: Path
) -> None:
    spec = replace(spec_of(name, tmp_path), max_position=20000)
    record = record_kind(RankStep(spec), phase, transport)
    for number, (sequences, context, new_tokens) in enumerate(SIZES[phase]):
        num_ranks = 1 if transport == "local" else (4, 8, 2)[number]
        step = RankStep(spec, sequences, context, new_tokens, num_ranks, transport)
        assert said(record, step) == pytest.approx(done(step), rel=0.02), sequences


@pytest.mark.slow  # the default suite records such steps once (tests/launcher/cli/test_balancer.py)
@pytest.mark.parametrize(
    "name, phase, transport, form",
    [
        ("deepseek_v3", "decode", "slabs", {"redundant": 8, "cache_dtype": torch.int8}),
        ("deepseek_v3", "prefill", "collective", {"redundant": 8, "cache_dtype": torch.int8}),
        ("mixtral", "decode", "slabs", {"redundant": 8, "cache_dtype": torch.float8_e4m3fn}),
    ],
)
def test_replicas_and_a_cache_in_8_bits_are_recorded_likewise(
    name: str, phase: Phase, transport: Transport, form: dict[str, Any], tmp_path: Path
) -> None:
    spec = replace(spec_of(name, tmp_path), max_position=20000)
    like = RankStep(spec, **form)
    record = record_kind(like, phase, transport)
    for (sequences, context, new_tokens), num_ranks in zip(SIZES[phase], (4, 8, 2), strict=True):
        step = RankStep(spec, sequences, context, new_tokens, num_ranks, transport, **form)
        assert said(record, step) == pytest.approx(done(step), rel=0.02), sequences
    splits = [each for each in record.kernels if each.name == "split_replicas"]
    assert [each.launches for each in splits] == [{"step": 1.0}] * len({each.layers for each in splits} | {"moe"})
    plain = RankStep(spec, sequences, context, new_tokens, num_ranks, transport)
    cached = [
        sum(work_of(launch, step).num_bytes for launch in record_step(step).launches if launch.name == "attend_kernel")
        for step in (replace(plain, cache_dtype=form["cache_dtype"]), plain)
    ]
    assert cached[0] < cached[1]


def by_part(record: StepRecord, step: RankStep) -> dict[tuple[str, str], tuple[float, float]]:
    """Returns launches and bytes of each part, by kind of layer."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    amounts = amounts_of(step)
    for kernel in record.kernels:
        launches, num_bytes = found.get((kernel.layers, kernel.part), (0.0, 0.0))
        more = total(kernel.launches, amounts), total(kernel.num_bytes, amounts)
        found[kernel.layers, kernel.part] = launches + more[0], num_bytes + more[1]
    return found


@pytest.mark.parametrize(
    "name", ["Qwen3-30B-A3B", *(pytest.param(name, marks=pytest.mark.slow) for name in ("DeepSeek-V3", "Mixtral-8x7B"))]
)
@pytest.mark.parametrize("phase, transport", KINDS)
def test_packaged_steps_are_those_of_today(name: str, phase: Phase, transport: Transport, tmp_path: Path) -> None:
    spec, packaged = priced_spec(name, tmp_path), load_steps(name)
    num_ranks = 1 if transport == "local" else 8
    like = RankStep(spec, expert_form=packaged.experts, wire_dtype=packaged.wire)  # type: ignore[arg-type]
    sequences, new_tokens = (128, 1) if phase == "decode" else (4, 2048)
    step = replace(like, sequences=sequences, context=2048, new_tokens=new_tokens, num_ranks=num_ranks)
    before = by_part(packaged.step(phase, num_ranks), step)
    after = by_part(record_kind(like, phase, transport), step)
    why = f"{name} has changed: record it anew by `python -m tests.roofline.packaged {name}`"
    assert set(before) == set(after), why
    for part, (launches, num_bytes) in after.items():
        assert before[part][0] == pytest.approx(launches, rel=DRIFT_OF_LAUNCHES, abs=1), (part, why)
        assert before[part][1] == pytest.approx(num_bytes, rel=DRIFT_OF_BYTES, abs=1e4), (part, why)


def test_a_wire_and_a_cache_that_gpus_do_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose auto, bf16 or fp8"):
        record_model(spec_of("mixtral", tmp_path), "mixtral", "float32")
    with pytest.raises(ConfigError, match="choose one of auto, int8, fp8_e4m3"):
        record_model(spec_of("mixtral", tmp_path), "mixtral", cache="float16")
    with pytest.raises(ConfigError, match="has an indexer, which reads its keys in bfloat16"):
        record_model(spec_of("deepseek_v32", tmp_path), "deepseek_v32", cache="int8")


@pytest.mark.parametrize(("family", "why"), [
    ("qwen3_next", "qwen3_next keeps states of requests, for which there is no GPU kernel: no steps"),
    ("longcat_flash", "longcat_flash has experts that give back what they take, which no GPU runs: no steps"),
    ("deepseek_v4", "deepseek_v4 attends entries of groups of tokens, which no GPU kernel has: no steps"),
    ("mimo_v2_flash", "mimo_v2_flash has values narrower than keys, which no GPU kernel has: no steps"),
])  # fmt: skip
def test_a_model_that_no_gpu_runs_has_no_steps(family: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        record_model(spec_of(family, tmp_path), family)
