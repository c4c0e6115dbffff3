"""What is decided before weights are read: the class of numerics and the kernels, and the context of a model."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from moe_serve.attention_dp.kv_cache import state_bytes
from moe_serve.config import load_config
from moe_serve.engine.build import use_threads
from moe_serve.engine.model import model_plan
from moe_serve.engine.model.model_plan import ModelPlan, NumericsChoice, choose_numerics, num_draft_states
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu.library import CpuLibrary
from moe_serve.kernels.numerics import COMPILED, FAST, Numerics
from moe_serve.models.decoder.moe_decoder import state_shapes
from moe_serve.models.families.registry import read_spec
from tests.models.families import FAMILIES
from tests.models.published import PHI_35_MOE


class FakeCalls:
    """Stands for the compiled kernels on a machine with or without AMX."""

    def __init__(self, has_amx: bool):
        self.has_amx, self.uses = has_amx, 0

    def use_tiles(self, wanted: int) -> int:
        self.uses = int(self.has_amx and wanted)
        return self.uses

    def uses_tiles(self) -> int:
        return self.uses


LIBRARY = CpuLibrary(FakeCalls(False), "/usr/bin/cc", "avx2")  # type: ignore[arg-type]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def choose(
    monkeypatch: pytest.MonkeyPatch, *overrides: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32,
    library: CpuLibrary | None = LIBRARY,
) -> NumericsChoice:  # fmt: skip
    monkeypatch.setattr(model_plan, "find_cpu_library", lambda: library)
    return choose_numerics(load_config(overrides=overrides), device, dtype)


@pytest.mark.parametrize("setting", ["fast", "batch_invariant"])
def test_float32_on_cpu_is_compiled_whatever_the_setting_says(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose(monkeypatch, f"engine.numerics={setting}", "parallel.threads_per_rank=2")
    assert (choice.numerics, choice.library, choice.name) == (COMPILED, LIBRARY, "batch_invariant")
    assert choice.kernels == "compiled for this CPU (avx2)"
    assert "/usr/bin/cc" in choice.why


@pytest.mark.parametrize(
    ("overrides", "has_amx", "form", "why"),
    [
        ([], True, "amx", ""),
        (["engine.cpu_kernels=no_amx"], True, "avx512", "; without AMX: engine.cpu_kernels is no_amx"),
        (
            [],
            False,
            "avx512",
            "; without AMX, which takes gcc 11 or clang 12 and Linux 5.16: /usr/bin/cc or this system",
        ),
    ],
)
def test_amx_is_used_where_it_is_and_else_the_reason_is_said(
    overrides: list[str], has_amx: bool, form: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_plan, "processor_features", lambda: "flags : avx512f amx_bf16 amx_tile")
    library = CpuLibrary(FakeCalls(has_amx), "/usr/bin/cc", "avx512")  # type: ignore[arg-type]
    choice = choose(monkeypatch, *overrides, library=library)
    assert choice.kernels == f"compiled for this CPU ({form})"
    assert why in choice.why
    assert ("AMX" in choice.why) == bool(why)


@pytest.mark.parametrize(
    ("overrides", "options", "why"),
    [
        (["engine.cpu_kernels=torch"], {}, "engine.cpu_kernels is torch"),
        ([], {"dtype": torch.bfloat16}, "compute in bfloat16"),
        ([], {"library": None}, "no compiled CPU kernels"),
        ([], {"device": GPU, "dtype": torch.bfloat16}, "for cuda"),
    ],
)
def test_elsewhere_the_setting_chooses_the_class(
    overrides: list[str], options: dict, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = choose(monkeypatch, *overrides, **options)
    assert (choice.numerics, choice.library, choice.name) == (FAST, None, "fast")
    assert why in choice.why
    tiled = choose(monkeypatch, *overrides, "engine.numerics=batch_invariant", "engine.row_tile=8", **options)
    assert (tiled.numerics, tiled.name) == (Numerics(row_tile=8), "batch_invariant")


def test_batch_invariant_by_torch_on_cpu_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["engine.numerics=batch_invariant", "parallel.threads_per_rank=2"]
    with pytest.raises(ConfigError, match=r"threads_per_rank is 2 but .* is torch; set .*threads_per_rank: 1"):
        choose(monkeypatch, *overrides, "engine.cpu_kernels=torch")
    assert choose(monkeypatch, *overrides, device=GPU).numerics == Numerics(row_tile=4)


class CountingLibrary:
    """Hears how many threads the kernels are given."""

    num_threads = 0

    def set_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_go_to_what_computes(threads: int) -> None:
    config = load_config(overrides=[f"parallel.threads_per_rank={threads}"])
    library, before = CountingLibrary(), torch.get_num_threads()
    try:
        assert use_threads(config, NumericsChoice(COMPILED, library, "", "")) == threads  # type: ignore[arg-type]
        assert (library.num_threads, torch.get_num_threads()) == (threads, 1)
        assert use_threads(config, NumericsChoice(FAST, None, "", "")) == threads == torch.get_num_threads()
        assert use_threads(config, NumericsChoice(Numerics(row_tile=4), None, "", "")) == 1 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("given", "context", "divisor"), [(None, 4096, 1.0), (4096, 4096, 1.0), (4097, 4097, 64.02)])
def test_the_longest_context_chooses_the_rotations(
    given: int | None, context: int, divisor: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PHI_35_MOE))
    overrides = [f"model.path={tmp_path}", "model.load_format=dummy"]
    config = load_config(overrides=[*overrides, *([f"model.max_model_len={given}"] if given else [])])
    plan = ModelPlan.of(config, read_spec(tmp_path), torch.device("cpu"))
    assert (plan.max_model_len, plan.spec.max_position) == (context, context)
    assert plan.spec.rope.divisors[-1] == divisor


def plan_of(folder: Path, keys: dict[str, object], *overrides: str, device: torch.device = CPU) -> ModelPlan:
    (folder / "config.json").write_text(json.dumps(keys))
    given = [
        f"model.path={folder}",
        "model.load_format=dummy",
        "cache.memory_gib=0.2",
        *overrides,
    ]
    return ModelPlan.of(load_config(overrides=given), read_spec(folder), device)


def test_the_same_memory_holds_more_tokens_in_8_bits(tmp_path: Path) -> None:
    auto = plan_of(tmp_path, PHI_35_MOE)
    assert auto.cache_dtype == torch.float32
    for name, dtype in (("int8", torch.int8), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8", torch.float8_e4m3fn)):
        plan = plan_of(tmp_path, PHI_35_MOE, f"cache.dtype={name}")
        assert (plan.cache_dtype, plan.dtype) == (dtype, torch.float32)
        assert 3.5 < plan.num_blocks / auto.num_blocks <= 4


def test_sparse_attention_and_old_gpus_have_no_cache_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, keys = FAMILIES["deepseek_v32"]
    with pytest.raises(ConfigError, match=r"sparse attention of deepseek_v32 .* set cache\.dtype: auto"):
        plan_of(tmp_path, keys | {"model_type": model_type}, "cache.dtype=int8")
    monkeypatch.setattr(model_plan, "has_e4m3", lambda device: False)
    with pytest.raises(ConfigError, match=r"older than sm_89.* set cache\.dtype: int8 or auto"):
        plan_of(tmp_path, PHI_35_MOE, "cache.dtype=fp8_e4m3", device=GPU)
    assert plan_of(tmp_path, PHI_35_MOE, "cache.dtype=int8", device=GPU).cache_dtype == torch.int8


def test_cpu_ranks_split_by_time_unless_told_otherwise_and_gpus_never(tmp_path: Path) -> None:
    assert plan_of(tmp_path, PHI_35_MOE).split == "time"
    assert plan_of(tmp_path, PHI_35_MOE, device=GPU).split == "even"
    assert plan_of(tmp_path, PHI_35_MOE, "eplb.split=nearest").split == "nearest"
    with pytest.raises(ConfigError, match=r"eplb.split time is for CPU ranks; set eplb.split: exact"):
        plan_of(tmp_path, PHI_35_MOE, "eplb.split=time", device=GPU)


@pytest.mark.parametrize(("override", "why"), [
    ("cache.host_gb=1 cache.snapshot_gib=0", r"or leave cache\.host_gb and cache\.disk_gb out"),
    ("parallel.num_prefill_ranks=1 cache.prefix_cache=false", r"there are none; set cache\.prefix_cache: true"),
    ("parallel.num_prefill_ranks=1 cache.snapshot_gib=0", r"and cache\.snapshot_gib to 2.\d+e-05 at least"),
    (None, "computes on cuda; they run on CPUs alone"),
])  # fmt: skip
def test_what_does_not_go_with_states_of_requests_is_refused(override: str | None, why: str, tmp_path: Path) -> None:
    model_type, keys = FAMILIES["qwen3_next"]
    overrides, device = ([], GPU) if override is None else (override.split(), CPU)
    with pytest.raises(ConfigError, match=f"qwen3_next has layers that keep a state of each request.* {why}"):
        plan_of(tmp_path, keys | {"model_type": model_type}, *overrides, device=device)


def test_experts_that_give_back_what_they_take_are_refused_on_gpus_and_with_a_capacity(tmp_path: Path) -> None:
    model_type, keys = FAMILIES["longcat_flash"]
    config = keys | {"model_type": model_type}
    with pytest.raises(ConfigError, match=r"longcat_flash has experts that give back .*: serve on CPU ranks"):
        plan_of(tmp_path, config, device=GPU)
    with pytest.raises(ConfigError, match=r"no capacity limits; leave engine\.expert_capacity out"):
        plan_of(tmp_path, config, "engine.expert_capacity=1.5")


def test_streams_entries_and_choices_by_id_are_refused_where_they_are_not_built(tmp_path: Path) -> None:
    model_type, keys = FAMILIES["deepseek_v4"]
    config = keys | {"model_type": model_type, "rope_theta": 10000.0, "routed_scaling_factor": 1.5}
    with pytest.raises(ConfigError, match=r"deepseek_v4 has several residual streams.* serve on CPU ranks"):
        plan_of(tmp_path, config, device=GPU)
    with pytest.raises(ConfigError, match=r"chooses its experts, which no capacity limits; leave engine\.expert_capac"):
        plan_of(tmp_path, config, "engine.expert_capacity=1.5")
    with pytest.raises(ConfigError, match=r"deepseek_v4 makes entries of rows of the cache.* set cache\.dtype: auto"):
        plan_of(tmp_path, config, "cache.dtype=int8")
    with pytest.raises(ConfigError, match=r"prediction of deepseek_v4 are not built; set speculation\.mode: lookup"):
        plan_of(tmp_path, config, "speculation.mode=mtp")


def test_snapshots_are_as_many_as_their_memory_holds_and_none_without_a_prefix_cache(tmp_path: Path) -> None:
    model_type, keys = FAMILIES["qwen3_next"]
    config = keys | {"model_type": model_type}
    size = state_bytes(state_shapes(plan_of(tmp_path, config).spec))
    assert size == 3 * 4 * (3 * 112 + 4 * 16 * 32), "of three layers, heads of 12 columns padded to 32"
    for override, number in ((f"cache.snapshot_gib={3.5 * size / 2**30}", 3), ("cache.snapshot_gib=0", 0)):
        assert plan_of(tmp_path, config, override).num_snapshots == number
    assert plan_of(tmp_path, config, "cache.prefix_cache=false").num_snapshots == 0
    assert plan_of(tmp_path, PHI_35_MOE).num_snapshots == 0


@pytest.mark.parametrize("tier", ["host_gb", "disk_gb"])
def test_a_tier_with_room_for_less_than_two_states_is_refused(tier: str, tmp_path: Path) -> None:
    model_type, keys = FAMILIES["qwen3_next"]
    own = ["cache.block_size=4", *([f"cache.path={tmp_path}"] if tier == "disk_gb" else [])]
    for size_gb, is_refused in ((1e-4, False), (5e-5, True)):
        with contextlib.ExitStack() as stack:
            if is_refused:
                stack.enter_context(pytest.raises(ConfigError, match=f"{tier} .* with the state behind it, twice over"))
            plan_of(tmp_path, keys | {"model_type": model_type}, *own, f"cache.{tier}={size_gb}")


def test_drafts_take_more_states_only_where_fewer_than_16_requests_may_run() -> None:
    for running, number in ((1, 15), (12, 4), (16, 0), (64, 0)):
        overrides = ["speculation.mode=lookup", f"engine.max_running_requests={running}"]
        assert num_draft_states(load_config(overrides=overrides)) == number
        assert num_draft_states(load_config(overrides=overrides[1:])) == 0


@pytest.mark.parametrize(("overrides", "why"), [
    (["engine.attention_backend=flashinfer"], "not installed; pip install flashinfer-python"),
    (["engine.attention_backend=flashmla"], "not installed; pip install sgl-flash-mla"),
])  # fmt: skip
def test_packages_that_are_not_there_are_named(
    overrides: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_plan, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=why):
        plan_of(tmp_path, PHI_35_MOE, *overrides, device=GPU)
    with pytest.raises(ConfigError, match="this rank computes on cpu; set engine"):
        plan_of(tmp_path, PHI_35_MOE, *overrides)


def test_a_gpu_is_refused_where_values_are_narrower_than_keys(tmp_path: Path) -> None:
    model_type, keys = FAMILIES["mimo_v2_flash"]
    with pytest.raises(ConfigError, match="values narrower than keys, for which there is no GPU kernel; serve on CPU"):
        plan_of(tmp_path, keys | {"model_type": model_type}, device=GPU)


@pytest.mark.parametrize(("family", "overrides", "why"), [
    ("gpt_oss", [], "gpt_oss has attention sinks"),
    ("llama4_text", [], "llama4_text attends within chunks of positions"),
    ("laguna", [], "windowed layers of laguna have heads of their own"),
    ("deepseek_v3", [], r"latents of 512 \+ 64 columns alone"),
    ("qwen3_moe", ["cache.dtype=int8"], "reads bfloat16 alone here"),
    ("qwen3_moe", ["engine.numerics=batch_invariant"], "set engine.numerics: fast"),
    ("qwen3_moe", ["engine.attention_backend=flashmla"], "attends latents alone"),
])  # fmt: skip
def test_what_packages_do_not_cover_is_refused(
    family: str, overrides: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_plan, "find_spec", lambda name: name)
    model_type, keys = FAMILIES[family]
    given = ["engine.attention_backend=flashinfer", *overrides]
    with pytest.raises(ConfigError, match=why):
        plan_of(tmp_path, keys | {"model_type": model_type}, *given, device=GPU)
    model_type, keys = FAMILIES["qwen3_moe"]
    assert plan_of(tmp_path, keys | {"model_type": model_type}, given[0], device=GPU).dtype == torch.bfloat16
