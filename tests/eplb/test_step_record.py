"""Steps of our own engine, recorded: the packaged ones price what they say, and other files are refused in words."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.eplb.cost.kernels import Batch, RecordedKernels
from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_engine, load_hardware, load_model_profile, profile_names
from moe_serve.eplb.cost.step_record import KernelRecord, load_steps, packaged_steps, to_json, total
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology

H100, OURS = load_hardware("H100"), load_engine("moe_serve")
DECODE, PREFILL = Batch("decode", 128, 4096), Batch("prefill", 16384, 4096)


def priced(model: str = "DeepSeek-V3", nodes: int = 4, ranks_per_node: int = 8) -> CostModel:
    return CostModel(H100, load_model_profile(model), Topology(nodes, ranks_per_node), OURS)


def kernels_of(costs: CostModel) -> RecordedKernels:
    assert isinstance(costs.kernels, RecordedKernels)
    return costs.kernels


@pytest.mark.parametrize("model", packaged_steps())
@pytest.mark.parametrize("hardware", ["H100", "H200", "B200", "H20", "MI300X"])
@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(2, 8)])
def test_every_packaged_model_is_priced_on_every_gpu(model: str, hardware: str, topology: Topology) -> None:
    costs = CostModel(load_hardware(hardware), load_model_profile(model), topology, OURS)
    for batch in (DECODE, PREFILL, Batch("decode", 0, 0), replace(PREFILL, cache_hit=0.5, two_batch=True)):
        assert 0 < costs.step(batch).total_s < 1e3


def test_all_gpu_models_with_a_profile_have_steps() -> None:
    others = {
        "demo": "priced on CPUs",
        "DeepSeek-V4-Pro": "a family that we do not serve",
        **dict.fromkeys(
            ("DeepSeek-V3-NVFP4", "DeepSeek-R1-FP4", "DeepSeek-R1-0528-FP4"), "a kind of weights that we do not serve"
        ),
    }
    assert packaged_steps() == sorted(set(profile_names("models")) - set(others))


def test_recorded_replicas_are_priced_and_count_as_slots() -> None:
    steps = load_steps("DeepSeek-V3")
    more = KernelRecord("dispatch", "split_replicas", "moe", 58, "bf16", {"step": 1.0}, {"slot": 1e6}, {})
    with_replicas = tuple(replace(step, kernels=(*step.kernels, more)) for step in steps.steps)
    record = replace(steps, steps=with_replicas, redundant=32)
    engine = replace(OURS, steps=record)
    costs = CostModel(H100, load_model_profile("DeepSeek-V3"), Topology(4, 8), engine)
    kernels = kernels_of(costs)
    assert kernels._amounts(DECODE)["slot"] == 288 / 32
    seconds = [each._seconds(DECODE, "dispatch", ("moe",)) for each in (kernels, kernels_of(priced()))]
    assert seconds[0] - seconds[1] == pytest.approx(58 * (engine.launch_s + 9e6 / kernels.hbm))
    assert costs.step(DECODE).total_s > 0


@pytest.mark.parametrize("batch", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_step_takes_the_sum_of_its_parts_and_no_kernel_is_left_out(batch: Batch) -> None:
    costs, seconds = priced(), 0.0
    kernels = kernels_of(costs)
    step = costs.step(batch)
    assert step.total_s == pytest.approx(
        step.attention_s + step.dispatch_s + step.ffn_s + step.combine_s + step.other_s, rel=1e-6
    )
    parts = {kernel.part for kernel in kernels.steps.step(batch.phase, 32).kernels}
    assert parts == {"attention", "gate", "dispatch", "experts", "combine", "mlp", "vocabulary", "other"}
    amounts = kernels._amounts(batch)
    for kernel in kernels.steps.step(batch.phase, 32).kernels:
        seconds += kernel.times * float(kernels._kernel_seconds(kernel, amounts, amounts))
    even = step.total_s + step.shared_s - step.dispatch_s - step.combine_s  # without rows on links
    own = kernels._seconds(batch, "dispatch", ("moe",)) + kernels._seconds(batch, "combine", ("moe",))
    # A step prices whole tiles of experts' rows, and here they are counted one by one.
    assert even + own == pytest.approx(seconds, rel=0.05)


def test_launches_cost_more_than_work_in_small_steps() -> None:
    costs = priced("Qwen3-30B-A3B", 1, 1)
    small = costs.step(Batch("decode", 1, 16)).total_s
    no_launches = CostModel(H100, costs.model, costs.topology, replace(OURS, launch_s=1e-12)).step(
        Batch("decode", 1, 16)
    )
    launched = sum(
        kernel.times * kernel.launches["step"] for kernel in kernels_of(costs).steps.step("decode", 1).kernels
    )
    assert small - no_launches.total_s == pytest.approx(launched * OURS.launch_s, rel=1e-3)


def test_the_host_bounds_small_prefills_and_never_decodes_which_are_graphs() -> None:
    kernels = kernels_of(priced())
    assert kernels.host_s(DECODE) == 0
    small = Batch("prefill", 256, 256)
    assert priced().step(small).total_s == kernels.host_s(small) > 0
    assert priced().step(PREFILL).total_s > kernels.host_s(PREFILL)


def test_the_busiest_rank_sets_the_pace_of_recorded_experts() -> None:
    costs = priced()
    even = np.full((1, 288), 128 * 32 * 8 / 288)
    skewed = even.copy()
    skewed[0, :9] *= 4
    assert costs.moe_layer(skewed, DECODE).ffn_s > 1.1 * costs.moe_layer(even, DECODE).ffn_s
    idle = even.copy()
    idle[0, 9:] = 0
    assert costs.moe_layer(idle, DECODE).ffn_s == pytest.approx(costs.moe_layer(even, DECODE).ffn_s)


def test_units_grow_with_the_batch_as_they_say() -> None:
    kernels = kernels_of(priced(ranks_per_node=4, nodes=2))
    decode = kernels._amounts(Batch("decode", 96, 4095))
    assert decode["key"] == 96 * 4096 == decode["pair"]
    assert (decode["token"], decode["sequence"], decode["row"], decode["rank"]) == (96, 96, 768, 8)
    assert 32 * (1 - np.exp(-768 / 32)) < decode["expert"] <= 32
    cached = kernels._amounts(Batch("prefill", 6144, 2048, cache_hit=0.25))
    assert cached["sequence"] == 4
    assert (cached["key"], cached["pair"], cached["square"]) == (4 * 2048, 6144 * 2048, 6144 * 1536)
    assert total({}, cached) == 0
    assert total({"step": 3.0, "token": 2.0}, cached) == 3 + 2 * 6144


def test_a_file_of_steps_prices_as_the_packaged_ones(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(to_json(load_steps("DeepSeek-V3")))
    assert load_steps(path) == load_steps("deepseek-v3")
    engine = load_engine(path)
    assert (engine.name, engine.launch_s) == ("moe_serve", OURS.launch_s)
    own = CostModel(H100, load_model_profile("DeepSeek-V3"), Topology(4, 8), engine)
    assert own.step(DECODE) == priced().step(DECODE)
    with pytest.raises(ConfigError, match="num_logical 256 and 384"):
        CostModel(H100, load_model_profile("Kimi-K2"), Topology(4, 8), engine)


def test_models_without_steps_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no steps of 'demo' are recorded.*moe-serve roofline FOLDER --save"):
        priced("demo")


def _first(raw: dict[str, Any]) -> dict[str, Any]:
    return raw["steps"][0]["kernels"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(format="other"),
        lambda raw: raw.pop("steps"),
        lambda raw: raw.update(more=1),
        lambda raw: _first(raw).update(rate="fp4"),
        lambda raw: _first(raw)["num_bytes"].update(moons=1.0),
        lambda raw: _first(raw)["num_bytes"].update(step="many"),
        lambda raw: _first(raw).pop("flops"),
        lambda raw: raw.update(steps=[3]),
    ],
)
def test_a_broken_file_of_steps_is_one_line(change: Any, tmp_path: Path) -> None:
    raw = json.loads(to_json(load_steps("DeepSeek-V3")))
    change(raw)
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"is no record of steps.*moe-serve roofline FOLDER --save FILE"):
        load_engine(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is no record of steps"):
        load_steps(path)
