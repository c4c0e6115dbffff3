"""A step on a GPU reads nothing back and has sizes that no number changes; so a graph can hold those of decodes.

Held for every family by recording its launches on fake CUDA tensors.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from benchmarks.gpu_step import STEPS, moe_launches, recorded_layer
from moe_serve.kernels.part_clock import ATTENTION, COMBINE, DISPATCH, EXPERTS, GATE, MLP
from moe_serve.kernels.triton.sampling import pack_parameters, sample_rows_triton
from moe_serve.models.decoder.mla import expand_from
from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import MlaSpec, ModelSpec
from moe_serve.roofline.launches import HostCopy, HostRead, Recording, fake_gpu, recorded
from moe_serve.roofline.step import GPU, RankStep, ReadyStep, record_step
from moe_serve.roofline.work import total, unavoidable_bytes, work_of
from tests.kernels.sampling_rows import rows_of
from tests.models.families import ANOTHERS_FORM, FAMILIES, ON_CPUS_ALONE, spec_of
from tests.models.fp8_checkpoint import write_fp8_checkpoint
from tests.models.mxfp4_checkpoint import write_mxfp4_config

ON_GPUS = [name for name, (model_type, _) in FAMILIES.items() if model_type not in ON_CPUS_ALONE]
FIRST_OF_TYPE = {FAMILIES[name][0]: name for name in reversed(ON_GPUS)}
DAILY = set(FIRST_OF_TYPE.values()) - ANOTHERS_FORM
EACH = [pytest.param(name, marks=[] if name in DAILY else pytest.mark.slow) for name in ON_GPUS]
MOE_LAUNCHES = 14  # of a MoE layer, from the router's logits to the sum of its results, the shared expert included
MOVED = 1.15  # bytes over those that no step can do without
LAUNCHES = 27  # of a layer with its attention, those that prepare an indexer's queries and keys included
FAST_WITH_REPLICAS = ("qwen3_moe", "deepseek_v3")
WITH_REPLICAS = [
    pytest.param(name, marks=[] if name in FAST_WITH_REPLICAS else pytest.mark.slow) for name in FIRST_OF_TYPE.values()
]
NORM = GATE, "norm_kernel"
NORM_GATE = 8  # launches of the gate of a norm: two products, and three of each sigmoid
VALUE_GATES = 5  # and of those of values in latent attention: another product of the latent, its sum, a sigmoid
CHOICE = 2  # launches beside that of attention where an indexer scores and chooses its keys


@pytest.mark.parametrize(
    "reads, error",
    [
        (lambda x: x.sum().item(), DataDependentOutputException),
        (lambda x: x.tolist(), DataDependentOutputException),
        (lambda x: bool(x[0] > 0), DataDependentOutputException),
        (lambda x: x[x > 0], DynamicOutputShapeException),
        (lambda x: x.nonzero(), DynamicOutputShapeException),
        (lambda x: torch.repeat_interleave(x), DynamicOutputShapeException),
        (lambda x: x.cpu(), HostRead),
        (lambda x: x + torch.ones(3, dtype=torch.int64).to(GPU), HostCopy),
    ],
)
def test_a_recording_fails_where_the_host_waits(reads: Callable[[torch.Tensor], Any], error: type[Exception]) -> None:
    with fake_gpu():
        x = torch.empty(3, dtype=torch.int64, device=GPU)
        with recorded(), pytest.raises(error):
            reads(x)


def test_views_and_new_memory_are_no_launches() -> None:
    with fake_gpu():
        x = torch.empty(3, 4, device=GPU)
        with recorded() as recording:
            _ = torch.empty_like(x).view(4, 3).t()[1:, :2].unsqueeze(0).expand(2, -1, -1)
            _ = torch.nn.functional.linear(x, x)
    assert [launch.name for launch in recording.launches] == ["mm"]


# By the local transport, two families do in test_replicas_are_chosen_without_a_wait_and_by_one_launch.
@pytest.mark.parametrize("name", EACH)
def test_a_decode_step_never_waits_and_launches_little(name: str, tmp_path: Path) -> None:
    spec = spec_of(name, tmp_path)
    recording = record_step(RankStep(spec, transport="slabs", num_ranks=4))
    layers, moe_layers, dense = spec.num_layers, spec.num_moe_layers, 4 * (spec.num_layers - spec.num_moe_layers)
    attention = [each.name for each in recording.launches if each.part == ATTENTION]
    assert attention.count("attend_kernel") == layers
    num_moe = num_moe_launches(recording, spec)
    assert num_moe <= most_moe_launches(spec)
    most = LAUNCHES + (CHOICE if getattr(spec.attention, "indexer", None) else 0)
    most += VALUE_GATES + 2 * NORM_GATE if spec.norm_names.gate_rank else 0
    assert len(attention) + num_moe + moe_layers + dense <= most * layers


def most_moe_launches(spec: ModelSpec) -> int:
    return (MOE_LAUNCHES + (NORM_GATE if spec.norm_names.gate_rank else 0)) * spec.num_moe_layers


def num_moe_launches(recording: Recording, spec: ModelSpec) -> int:
    """Returns the launches of all MoE layers; the norm before the gate is the residual's."""
    parts = (GATE, DISPATCH, EXPERTS, COMBINE, MLP)
    found = [each.name for each in recording.launches if each.part in parts and (each.part, each.name) != NORM]
    dense = 4 * (spec.num_layers - spec.num_moe_layers)  # norm, gate and up, activation, down
    return len(found) - dense


@pytest.mark.parametrize("transport, num_ranks", [("local", 1), ("slabs", 4)])
def test_tokens_are_drawn_behind_a_decode_step_before_the_host_waits(
    transport: str, num_ranks: int, tmp_path: Path
) -> None:
    step = RankStep(spec_of("qwen3_moe", tmp_path), transport=transport, num_ranks=num_ranks)
    sampling = rows_of([{"top_p": 0.9, "seed": row} for row in range(step.sequences)])
    with fake_gpu():
        ready = ReadyStep.of(step)
        with recorded(takes_copies=True) as recording:  # and no read
            logits = ready.forward(ready.batch)
            forward = len(recording.launches)
            ready.parallel.all_to_all.end_step()
            tokens = sample_rows_triton(logits, sampling)
    assert (tokens.shape, tokens.is_cuda) == ((step.sequences,), True)
    flags = ["copy_"] if transport == "slabs" else []
    behind = recording.launches[forward:]
    assert [each.name for each in behind] == [*flags, "_to_copy", "sample_kernel"]
    to_host = [sum(t.nbytes for t in each.tensors if not t.is_cuda) for each in behind]
    assert to_host == [8 * num_ranks] * len(flags) + [len(pack_parameters(sampling)), 0]


@pytest.mark.parametrize("name", EACH)
def test_a_step_of_prompts_never_waits_and_attends_all_of_them_together(name: str, tmp_path: Path) -> None:
    spec = spec_of(name, tmp_path)
    mla = spec.attention if isinstance(spec.attention, MlaSpec) else None
    attended = {"attend_kernel", "expand_kernel", "index_scores_kernel", "choose_kernel"}
    prompts = ((40, 90),) if mla is None else ((0, 70), (200, 5), (40, 90))  # latents are attended in several ways
    for context, new_tokens in prompts:
        names = []
        for sequences in (2, 5):
            launches = record_step(RankStep(spec, sequences, context, new_tokens)).launches
            names.append([each.name for each in launches if each.part == ATTENTION and each.name in attended])
        assert names[0] == names[1], "launches grow with the number of sequences"
        expands = mla is not None and mla.indexer is None and expand_from(mla) is not None and new_tokens > 5
        assert names[0].count("expand_kernel") == (2 * spec.num_layers if expands else 0), (context, new_tokens)
        assert names[0].count("attend_kernel") == spec.num_layers


@pytest.mark.parametrize("transport, num_ranks", [("local", 1), ("slabs", 4), ("collective", 4)])
def test_rows_are_quantised_once_for_fp8_experts(transport: str, num_ranks: int, tmp_path: Path) -> None:
    spec = spec_of("deepseek_v3", tmp_path)
    step = RankStep(spec, transport=transport, num_ranks=num_ranks, wire_dtype="fp8", expert_form="fp8")
    names = [launch.name for launch in record_step(step).launches]
    assert names.count("quantize_kernel") == (
        spec.num_moe_layers if transport == "collective" else 0
    )  # as they are sent
    assert "dequantize_kernel" not in names
    first_products = [launch for launch in record_step(step).launches if launch.arguments.get("SCALED")][::2]
    assert len(first_products) == spec.num_moe_layers
    assert {launch.arguments["x"].base.dtype for launch in first_products} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("transport, num_ranks", [("local", 1), ("slabs", 4)])
def test_projections_of_an_fp8_checkpoint_are_read_as_they_are_stored(
    transport: str, num_ranks: int, tmp_path: Path
) -> None:
    spec = read_spec(write_fp8_checkpoint(tmp_path))
    moved = []
    for form in ("dense", "fp8"):
        step = RankStep(spec, transport=transport, num_ranks=num_ranks, wire_dtype="fp8", expert_form=form)
        launches = record_step(step).launches
        moved.append(total([work_of(each, step) for each in launches if each.part in (ATTENTION, MLP)]).num_bytes)
        products = [each for each in launches if each.arguments.get("SCALED") and each.part in (ATTENTION, MLP)]
        # q_b and o of each layer; gate, up and down of the dense layer and of each shared expert
        assert len(products) == (4 * spec.num_layers if form == "fp8" else 0)
    assert moved[1] < moved[0]
    assert num_moe_launches(record_step(step), spec) <= MOE_LAUNCHES * spec.num_moe_layers


@pytest.mark.parametrize("name", STEPS)
def test_a_layer_of_a_published_model_moves_little_more_than_it_must(name: str) -> None:
    step, launches = recorded_layer(name, tokens=128, context=4096)
    assert moe_launches(launches) <= MOE_LAUNCHES
    works = [work_of(launch, step) for launch in launches]
    assert 1 <= total(works).num_bytes / unavoidable_bytes(step) <= MOVED


@pytest.mark.parametrize("transport, num_ranks", [("local", 1), ("slabs", 4)])
@pytest.mark.parametrize("split", ["even", "nearest", "exact"])
@pytest.mark.parametrize("name", WITH_REPLICAS)
def test_replicas_are_chosen_without_a_wait_and_by_one_launch(
    name: str, split: str, transport: str, num_ranks: int, tmp_path: Path
) -> None:
    spec = spec_of(name, tmp_path)
    step = RankStep(spec, transport=transport, num_ranks=num_ranks, redundant=4, split=split)
    recording = record_step(step)
    chosen = [each.name for each in recording.launches if each.name == "split_replicas_kernel"]
    assert len(chosen) == spec.num_moe_layers
    assert num_moe_launches(recording, spec) <= most_moe_launches(spec)


@pytest.mark.parametrize("transport, num_ranks", [("local", 1), ("slabs", 4)])
def test_mxfp4_experts_are_read_as_they_are_stored(transport: str, num_ranks: int, tmp_path: Path) -> None:
    spec = read_spec(write_mxfp4_config(tmp_path))
    step = RankStep(spec, transport=transport, num_ranks=num_ranks, expert_form="mxfp4")
    products = [each for each in record_step(step).launches if each.name == "grouped_gemm_kernel"]
    assert len(products) == 2 * spec.num_moe_layers
    stored = [each.arguments["weight"] for each in products]
    assert {getattr(weight, "base", weight).dtype for weight in stored} == {torch.uint8}
