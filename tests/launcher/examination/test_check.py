"""`moe-serve check`: sizes as the ranks compute them, and what prevents a start, without starting anything."""

import re
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from moe_serve import c_library
from moe_serve.attention_dp.text_index import TextIndex, index_library
from moe_serve.config import load_config, model_dir
from moe_serve.engine.model import model_plan
from moe_serve.engine.rank_memory import lasting_memory, page_memory
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu.library import find_cpu_library
from moe_serve.launcher.examination import check
from moe_serve.launcher.examination.check import Report, examine, print_check
from moe_serve.launcher.preflight import look_for_files
from moe_serve.models.decoder.gqa import RopeTable
from moe_serve.models.families.registry import read_spec
from tests.engine.offline import tiny_model
from tests.models.mxfp4_checkpoint import write_mxfp4_config
from tests.models.predicting import make_predicting

WAITS = "the others wait until it is started again (moe-serve serve, LLM), or all are (torchrun, mpirun)"
SURVIVORS = "low_latency (shared memory) or low_latency (shared memory, TCP between hosts)"
GO_ON = f"{SURVIVORS} with engine.exchange shm can go on"


def checked(*overrides: str) -> Report:
    free = ("server.port=0", "server.worker_port=0", "parallel.device=cpu", "engine.cpu_kernels=torch")
    return examine(load_config(overrides=[*free, *overrides]))


def sizes(report: Report) -> dict[str, int]:
    return {memory.name: memory.num_bytes for memory in report.memory}


def test_the_demo_model_can_run_and_its_memory_is_explained():
    report = checked("parallel.num_ranks=2", "cache.num_blocks=100")
    assert report.problems == []
    bytes_of = sizes(report)
    assert bytes_of["expert slots"] == 16 * 4 * (3 * 192 * 64) * 4
    assert bytes_of["KV cache"] == 100 * 16 * 5 * (48 + 16) * 4
    assert report.memory_bytes == sum(bytes_of.values())


def test_pages_of_a_host_are_of_its_ranks_of_both_roles_and_no_rank_counts_them_alone():
    """A rank, which is told its own role, logs the parts that `check` shows, but for these pages."""
    config = load_config(overrides=["parallel.num_ranks=2", "parallel.num_prefill_ranks=3", "cache.host_gb=0.1"])
    found = [(each.name, each.num_bytes) for each in page_memory(config)]
    assert found == [("pages on their way", 3 * 500_000_000 // 5), ("pages in memory", 20_000_000)]
    plan = model_plan.ModelPlan.of(config, read_spec(model_dir(config.model)), torch.device("cpu"))
    shown = [each.name for each in lasting_memory(config, plan)]
    assert "pages in memory" not in shown
    for role in ("prefill", "decode"):
        assert [each.name for each in lasting_memory(config.of_role(role), plan)] == shown
    alone = checked("cache.host_gb=0.1")
    assert sizes(alone)["pages in memory"] == 100_000_000


def test_a_decode_host_has_a_copy_of_what_every_prefill_rank_sends() -> None:
    hosts = "launcher.nnodes=3", "launcher.dist_init_addr=h:5", "parallel.num_ranks=4", "parallel.num_prefill_ranks=3"
    for node_rank, num_bytes in ((1, 3 * 500_000_000 // 2), (2, 500_000_000)):
        config = load_config(overrides=[*hosts, f"launcher.node_rank={node_rank}"]).of_this_host()
        assert [each.num_bytes for each in page_memory(config)] == [num_bytes]


def test_drafts_take_an_index_and_rows_of_logits():
    plain = checked("engine.max_running_requests=1")
    drafting = checked("engine.max_running_requests=1", "speculation.mode=auto", "speculation.index_mib=32")
    assert sizes(drafting)["index of texts"] == 32 * 2**20
    rows = sizes(drafting)["a step at its largest"] - sizes(plain)["a step at its largest"]
    assert rows >= 15 * 2048 * 4


def test_drafts_from_text_without_a_c_compiler_are_refused_by_check_as_at_the_start(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(c_library, "find_compiler", lambda: None)
    index_library.cache_clear()
    request.addfinalizer(index_library.cache_clear)
    for mode in ("auto", "lookup"):
        settings = "parallel.device=cpu", "engine.cpu_kernels=torch", f"speculation.mode={mode}"
        (problem,) = checked(*settings).problems
        assert problem == (
            "drafts from text have a compiled index: no C compiler for text_index.c; install gcc or clang, or run: pip "
            "install ziglang; or set speculation.mode: off"
        )
        with pytest.raises(ConfigError, match=re.escape(problem)):
            look_for_files(load_config(overrides=list(settings)))
        with pytest.raises(ConfigError, match=re.escape(problem)):
            TextIndex(1 << 20, 8)
    assert checked("speculation.mode=off").problems == []


def test_a_layer_that_cannot_predict_is_refused_before_any_rank_starts() -> None:
    settings = ["speculation.mode=mtp", "engine.return_routed_experts=true"]
    (problem,) = checked(*settings).problems
    assert "speculation.mode is mtp, but the experts of that layer" in problem
    with pytest.raises(ConfigError, match=re.escape(problem)):
        look_for_files(load_config(overrides=settings))


def test_a_layer_that_predicts_counts_like_others(tmp_path):
    folder = make_predicting("glm4_moe", tmp_path)[1]
    paths = f"model.path={folder}", "cache.num_blocks=100"
    plain, predicting = checked(*paths), checked(*paths, "speculation.mode=mtp")
    assert (plain.problems, predicting.problems) == ([], [])
    assert "layer 2" in [line.value for line in predicting.model if line.name == "multi-token prediction"]
    more = {name: num_bytes - sizes(plain).get(name, 0) for name, num_bytes in sizes(predicting).items()}
    assert more["expert slots"] == 8 * 3 * 32 * 64 * 4
    assert more["KV cache"] == 100 * 16 * 2 * 2 * 16 * 4
    matrices = 256 * 64 + 2 * 64 * 64 + (4 + 2 + 2 + 4) * 16 * 64 + 8 * 64 + 3 * 32 * 64  # and norms and biases
    assert 0 <= more["attention, embeddings, shared experts"] - 4 * matrices < 4 * 10 * 64
    without = checked(*paths, "speculation.mode=auto", "cache.host_gb=0.1")
    (line,) = [line for line in without.model if line.name == "multi-token prediction"]
    assert (line.value, "leave out cache.host_gb" in line.why) == ("none", True)


def test_more_ranks_hold_fewer_experts_each_and_replicas_cost_slots():
    one, four = (sizes(checked(f"parallel.num_ranks={n}"))["expert slots"] for n in (1, 4))
    assert one == 4 * four
    report = checked("parallel.num_ranks=4", "eplb.num_redundant_experts=2")
    (slots,) = [line for line in report.model if line.name == "slots"]
    assert slots.value == "9 per rank and layer"  # 34 is rounded up to 36
    assert slots.why.startswith("4 of 36 hold replicas")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: no kernels")
def test_graphs_and_the_workspace_of_flashinfer_which_has_none_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_plan, "find_spec", lambda name: True)  # as if it was installed
    path = f"model.path={tiny_model(tmp_path, 'qwen3_moe')}", "model.load_format=dummy", "parallel.device=cuda"
    ours, theirs = (sizes(checked(*path, f"engine.attention_backend={name}")) for name in ("auto", "flashinfer"))
    graphs = ours.pop("graphs of decode steps")
    assert theirs == ours | {"attention workspace": 128 << 20}
    more = sizes(checked(*path, "engine.max_running_requests=100"))["graphs of decode steps"]
    logits = 4 * 256 * (sum(1 << power for power in range(8)))  # of up to 112 rows
    assert graphs < more > logits
    assert ours["a step at its largest"] > 0


@pytest.mark.skipif(find_cpu_library() is None, reason="no C compiler")
def test_weights_that_ranks_share_are_counted_once_on_a_host() -> None:
    compiled = ("engine.cpu_kernels=auto", "parallel.num_ranks=4", "cache.num_blocks=100", "parallel.cpu_bind=none")
    shared, own = checked(*compiled), checked(*compiled, "model.weight_cache=none")
    assert shared.problems == own.problems == []
    assert sizes(shared)["experts"] == 4 * sizes(own)["expert slots"], "of all ranks"
    assert shared.shared_bytes == sizes(shared)["experts"] + sizes(shared)["attention, embeddings, shared experts"]
    assert shared.host_bytes(4) == shared.shared_bytes + 4 * (shared.memory_bytes - shared.shared_bytes)
    assert own.shared_bytes == 0
    assert own.host_bytes(4) == 4 * own.memory_bytes > shared.host_bytes(4)
    one = checked("engine.cpu_kernels=auto"), checked("engine.cpu_kernels=auto", "model.weight_cache=/tmp/folder")
    assert [report.shared_bytes > 0 for report in one] == [False, True], "one rank shares with later starts alone"


def test_quantised_experts_are_said_and_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_serve.ep import expert_form

    monkeypatch.setattr(expert_form, "has_vnni", lambda: True)
    report = checked("model.expert_weights=int8")
    (said,) = [line for line in report.model if line.name == "expert weights"]
    assert (said.value, said.why) == ("int8", "not the checkpoint's numbers: weights and rows are rounded")
    scales = 4 * (2 * 64 + 192)  # one for each output channel
    assert sizes(report)["expert slots"] == 32 * 4 * (3 * 192 * 64 + scales)


def test_gpt_oss_is_sized_with_its_biases_and_runs_on_gpus_too(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "gpt_oss")
    report = checked(f"model.path={path}", "model.load_format=dummy")
    assert report.problems == []
    (kind,) = [line for line in report.model if line.name == "type"]
    assert kind.value == "gpt_oss"
    assert sizes(report)["expert slots"] == 8 * 3 * (3 * 64 * 48 + 2 * 48 + 64) * 4
    problems = checked(f"model.path={path}", "model.load_format=dummy", "parallel.device=cuda").problems
    assert not any("gpt_oss" in problem for problem in problems), problems


def test_experts_in_mxfp4_are_sized_as_they_are_stored_where_kernels_take_them(tmp_path: Path) -> None:
    path = write_mxfp4_config(tmp_path, hidden_size=128, intermediate_size=192)
    kept, dense, by_torch = (
        checked(f"model.path={path}", "model.load_format=dummy", *more)
        for more in (["engine.cpu_kernels=auto"], ["engine.cpu_kernels=auto", "model.expert_weights=dense"], [])
    )
    (said,) = [line for line in kept.model if line.name == "expert weights"]
    assert (said.value, "widened exactly" in said.why) == ("mxfp4", True)
    elements, biases = 3 * 128 * 192, 4 * (2 * 192 + 128)
    assert sizes(kept)["expert slots"] == 8 * 3 * (elements * 17 // 32 + biases)
    assert sizes(dense)["expert slots"] == 8 * 3 * (elements * 2 + biases)
    assert sizes(by_torch)["expert slots"] == 8 * 3 * (elements * 4 + biases)


def test_the_compiled_kernels_keep_weights_as_they_are_stored() -> None:
    by_torch, compiled = (checked(f"engine.cpu_kernels={kernels}") for kernels in ("torch", "auto"))
    assert 2 * sizes(compiled)["expert slots"] == sizes(by_torch)["expert slots"]
    dense = [sizes(report)["attention, embeddings, shared experts"] for report in (compiled, by_torch)]
    assert dense[1] / 2 < dense[0] < 0.52 * dense[1], "norms are float32"
    (said,) = [line for line in compiled.model if line.name == "expert weights"]
    assert (said.value, said.why) == ("dense", "the checkpoint's numbers in bfloat16")
    choices = {line.name: line for line in compiled.choices}
    assert choices["numerics"].value == "batch_invariant"
    assert choices["kernels"].value.startswith("compiled for this CPU")


def test_a_capacity_of_experts_is_no_batch_invariant_server_and_takes_16_bytes_a_token() -> None:
    plain, limited = checked("cache.num_blocks=64"), checked("cache.num_blocks=64", "engine.expert_capacity=2")
    (said,) = [line for line in limited.choices if line.name == "numerics"]
    assert (said.value, "engine.expert_capacity" in said.why) == ("fast", True)
    assert sizes(limited)["KV cache"] - sizes(plain)["KV cache"] == 64 * 16 * 16


@pytest.mark.parametrize("family", ["deepseek_v3", "llama4_text", "kimi_linear"])
def test_tables_of_rotations_and_logits_of_prompts_are_counted(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family)
    found = sizes(checked(f"model.path={path}", "model.load_format=dummy", "model.max_model_len=100"))
    spec = read_spec(path).in_context(100)
    temperature = getattr(spec.attention, "temperature", None)
    table = RopeTable(spec.ropes, 100, "cpu", temperature)
    scales = 0 if table.query_scales is None else table.query_scales.nbytes
    assert (family == "llama4_text") == (scales > 0)
    assert found["rotations of positions"] == table.tables[0].nbytes + scales
    assert len(table.tables[0]) == (1 if family == "kimi_linear" else 100), "all positions share a row of ones"
    assert (table.tables[0] == 1).all() == (family == "kimi_linear")
    rows = load_config().engine.max_batch_tokens
    assert found["logits of prompts"] == rows * spec.vocab_size * 4, "the words are few, so all rows of a step fit"


def test_one_rank_sends_nothing():
    assert not any("dispatch" in name for name in sizes(checked("parallel.num_ranks=1")))


@pytest.mark.parametrize(
    "overrides, value, why",
    [
        ([], WAITS, "the 2 ranks that are left have 22 slots per layer for 32 experts; to go on, raise"),
        (
            ["launcher.max_restarts=0"],
            "ends serving",
            "the 2 ranks that are left have 22 slots per layer for 32 experts; to go on, raise",
        ),
        (["eplb.num_redundant_experts=16"], "the others serve on without any", "after the loss of any they first read"),
        (["eplb.num_redundant_experts=64"], "the others serve on without any", "every expert has slots on two ranks"),
        (["eplb.num_redundant_experts=64", "engine.on_lost_rank=end"], "ends serving", "engine.on_lost_rank is end"),
        (["eplb.num_redundant_experts=64", "dispatch.backend=collective"], "ends serving", GO_ON),
        (["eplb.num_redundant_experts=64", "engine.exchange=gloo"], "ends serving", GO_ON),
    ],
)
def test_what_a_lost_rank_means_is_said(overrides: list[str], value: str, why: str) -> None:
    (line,) = [line for line in checked("parallel.num_ranks=3", *overrides).model if line.name.startswith("a lost")]
    assert (line.name, line.value) == ("a lost rank", value)
    assert line.why.startswith(why)


def test_what_a_lost_host_means_is_said_where_there_are_several() -> None:
    meet = ("launcher.nnodes=2", "launcher.dist_init_addr=10.0.0.1:20000", "server.worker_port=30001")
    lines = checked("parallel.num_ranks=4", "eplb.num_redundant_experts=32", *meet).model
    (line,) = [line for line in lines if line.name == "a lost host"]
    assert line.value == "the others serve on without node rank 1"
    assert line.why.startswith("every expert has slots on two hosts; without node rank 0 they wait")


def test_buffers_that_steps_cannot_fill_are_not_counted() -> None:
    asked = sizes(checked("parallel.num_ranks=2", "dispatch.max_tokens_per_rank=99999999999"))
    assert asked == sizes(checked("parallel.num_ranks=2", "dispatch.backend=collective"))


def test_choices_say_why():
    choices = {line.name: line for line in checked("parallel.num_ranks=2").choices}
    assert choices["dispatch"].value.startswith("low_latency")
    assert choices["dispatch"].why.startswith("auto: 2 CPU ranks")
    assert choices["compute dtype"].value == "float32"


@pytest.mark.parametrize(
    "override, words",
    [
        ("parallel.device=cuda", "parallel.device is cuda but torch sees no GPU"),
        ("model.path=/nowhere", "no such folder"),
        ("model.max_model_len=5000", "model.max_model_len is 5000"),
        ("cache.num_blocks=900000000", "of memory are available here"),
        ("eplb.init_expert_location=/nowhere.json", "no such file"),
        ("model.expert_weights=fp8", "the checkpoint is not FP8"),
    ],
)
def test_what_prevents_a_start_is_a_problem(override, words):
    if "cuda" in override:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    assert any(words in problem for problem in checked(override).problems)


def test_a_port_in_use_is_a_problem():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (problem,) = checked(f"server.port={port}").problems
    assert problem.startswith(f"port {port} on 127.0.0.1 cannot be opened (Address already in use)")
    assert problem.endswith("end the process that uses it, or choose another port with server.port")


def test_a_host_elsewhere_is_no_problem():
    report = checked("server.worker_host=192.0.2.1")
    assert report.problems == []
    assert any("another machine" in line.why for line in report.machine)


def test_printing_begins_with_the_verdict_and_the_exit_code_says_it_too(capsys):
    settings = ["server.port=0", "server.worker_port=0", "parallel.device=cpu"]
    assert print_check(load_config(overrides=settings)) == 0
    out = capsys.readouterr().out
    assert out.startswith("this configuration can run here\n\nmodel")
    assert re.search(r"together +[\d.]+ MiB", out)
    assert print_check(load_config(overrides=[*settings, "model.path=/nowhere"])) == 1
    assert capsys.readouterr().out.startswith("cannot run: model.path is '/nowhere'")


def test_printed_text_keeps_its_brackets(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "find_spec", lambda module: None)
    folder = tmp_path / "[red]model"
    folder.symlink_to(model_dir(load_config().model))
    settings = ["server.port=0", "server.worker_port=0", "parallel.device=cpu", f"model.path={folder}"]
    assert print_check(load_config(overrides=settings)) == 0
    out = capsys.readouterr().out
    assert "pip install 'moe-serve[gpu]'" in out
    assert "pip install 'moe-serve[mpi]'" in out
    assert "/[red]model" in out


def test_experts_that_move_need_memory_for_those_under_way():
    assert "experts that move" not in sizes(checked("parallel.num_ranks=2"))
    moving = checked("parallel.num_ranks=2", "eplb.mode=dynamic", "eplb.staging_slots=3")
    assert sizes(moving)["experts that move"] == 2 * 3 * (3 * 192 * 64) * 4
    (said,) = [line for line in moving.choices if line.name == "eplb.mode"]
    assert said.value == "dynamic"
