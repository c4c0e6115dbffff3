"""The first hour on a GPU, without one: parts fail, hang and crash alone, and what they would launch is recorded."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from benchmarks import gpu
from benchmarks.gpu import Outcome, Part
from tests.test_layering import GPU_MACHINE_LACKS

HERE = {"lacks": {"nvshmem": "nvshmem4py is not installed"}, "gpus": [{"name": "NVIDIA H100 80GB HBM3"}]}
ROW = {"name": "rate", "value": 3.0, "unit": "GB/s", "goal": ">= 2", "met": True, "conditions": "a | b",
       "of_sheet": 0.5, "of_nccl": 1.25}  # fmt: skip


def part(name: str, code: str, limit_s: float = 60.0, needs: tuple[str, ...] = ()) -> Part:
    return Part(name, ("-c", code, "ROWS", "TESTS"), limit_s, needs)


def writes(*rows: object) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return f"import sys; open(sys.argv[1], 'a').write({text!r}); "


def test_a_part_that_fails_hangs_or_crashes_ends_alone_and_the_report_has_what_each_found(tmp_path: Path) -> None:
    grandchild = tmp_path / "grandchild"
    hangs = (
        f"import subprocess, time; child = subprocess.Popen(['sleep', '300']); "
        f"open({str(grandchild)!r}, 'w').write(str(child.pid)); time.sleep(300)"
    )
    parts = [
        part("good", writes(ROW)),
        part("raises", writes({**ROW, "met": False}) + "print('before'); raise ValueError('no kernel')"),
        part("hangs", writes(ROW) + hangs, limit_s=3),
        part("crashes", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        part("lacks", writes(ROW), needs=("nvshmem",)),
        part("after", writes(ROW)),
    ]
    outcomes = {outcome.name: outcome for outcome in gpu.run(parts, HERE, tmp_path, minutes=5)}
    states = {name: (outcome.state, outcome.reason) for name, outcome in outcomes.items()}
    assert states == {
        "good": ("passed", ""),
        "raises": ("failed", "exit code 1"),
        "hangs": ("out of time", "it did not end within 3 s"),
        "crashes": ("failed", "signal SIGSEGV"),
        "lacks": ("left out", "nvshmem4py is not installed"),
        "after": ("passed", ""),
    }
    assert [len(outcome.rows) for outcome in outcomes.values()] == [1, 1, 1, 0, 0, 1]
    assert "ValueError: no kernel" in outcomes["raises"].tail
    assert gone(int(grandchild.read_text())), "children of a part are ended with it"
    record = json.loads((tmp_path / "report.json").read_text())
    assert [each["name"] for each in record["parts"]] == list(outcomes)
    text = (tmp_path / "report.md").read_text()
    for words in (
        "# 1 x NVIDIA H100 80GB HBM3",
        "| raises | failed | 0 | exit code 1; goals not met: rate |",
        "| lacks | left out | 0 | nvshmem4py is not installed |",
        "| rate | 3.0 | GB/s | >= 2 | yes | 50% | 1.25 x | a \\| b |",
        "## Last output of raises",
    ):
        assert words in text.replace("| failed | 1 |", "| failed | 0 |")


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_what_does_not_fit_into_the_minutes_is_not_begun_and_the_report_says_so(tmp_path: Path) -> None:
    outcomes = gpu.run([part("first", writes(ROW)), part("second", "")], HERE, tmp_path, minutes=0.1)
    assert [(outcome.state, outcome.reason) for outcome in outcomes] == [
        ("not begun", "0.1 minutes are over; run it by --parts")
    ] * 2


def test_a_report_is_there_while_later_parts_still_run(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    look = f"import sys, shutil; shutil.copy({str(tmp_path / 'report.json')!r}, {str(seen)!r})"
    gpu.run([part("first", writes(ROW)), part("second", look)], HERE, tmp_path, minutes=5)
    assert [each["name"] for each in json.loads(seen.read_text())["parts"]] == ["first"]


def test_failed_tests_are_named_in_the_report(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text("def test_one():\n    pass\n\ndef test_two():\n    assert 1 == 2\n")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", "TESTS", "-c", os.devnull, str(tests))
    [outcome] = gpu.run([Part("tests", command, 120.0, ())], HERE, tmp_path, minutes=5)
    assert (outcome.state, outcome.reason) == ("failed", "1 of 2 tests failed")
    assert (outcome.tests["passed"], [name.rpartition("::")[2] for name in outcome.tests["names"]]) == (1, ["test_two"])
    assert "test_two`" in gpu.to_markdown(HERE, [outcome])


def test_rows_of_a_part_that_was_ended_in_the_middle_of_one_are_kept(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW)[:20])
    assert gpu._rows(rows) == [ROW]
    assert gpu._rows(tmp_path / "none") == []


def test_the_command_without_a_gpu_leaves_each_part_out_with_its_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)], cwd=gpu.ROOT, capture_output=True, text=True,
        timeout=280, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads((tmp_path / "report.json").read_text())
    assert [each["name"] for each in record["parts"]] == [part.name for part in gpu.parts()]
    for each in record["parts"]:
        assert each["state"] == "left out"
        assert each["reason"].startswith("no CUDA device: torch ")
    assert record["facts"]["packages"]["torch"]


def test_a_machine_that_cannot_be_looked_at_leaves_all_parts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.sys, "executable", "/bin/false")
    assert gpu.look()["lacks"]["cuda"].startswith("looking at the machine failed")
    sleeps = SimpleNamespace(run=lambda *_, **__: (_ for _ in ()).throw(subprocess.TimeoutExpired("look", 3)))
    monkeypatch.setattr(gpu.subprocess, "run", sleeps.run)
    assert gpu.look(3)["lacks"]["cuda"] == "looking at the machine did not end within 3 s"


def test_parts_fit_a_machine_that_is_lent_for_half_an_hour() -> None:
    parts = gpu.parts()
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    order = ["ceilings", "kernel tests", "attention", "sampling", "step", "graphs", "cuda_ipc", "nvshmem", "nccl",
             "serving", "other tests"]  # fmt: skip
    assert [name for name in names if name in order] == order
    assert all(part.limit_s <= 7.5 * 60 for part in parts), "a command of ten minutes has room for the longest"
    files = [word for part in parts for word in part.command if word.startswith("tests/")]
    some = {"tests/kernels/test_attention_triton.py", "tests/dispatch/gpu/test_ipc.py", "tests/ep/test_gate.py"}
    assert some <= {*files}


def test_measurements_load_with_torch_numpy_and_triton_alone() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    lacks = [*GPU_MACHINE_LACKS, "pytest", "hypothesis", "transformers"]
    names = ["gpu", "gpu_environment", "gpu_kernels", "gpu_attention", "gpu_model", "gpu_ranks"]
    code = (
        f"import importlib, sys\nfor name in {lacks!r}: sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(f'benchmarks.{{name}}')\n"
        "from benchmarks import gpu_environment, gpu_model, gpu_timing\n"
        "assert gpu_timing.sheet_of('NVIDIA H100 80GB HBM3').name == 'H100'\n"
        "assert 'server' in gpu_environment.facts()['lacks']['serving']\n"
        "assert 'pytest' in gpu_environment.facts()['lacks']['pytest']\n"
        "step = gpu_model.RankStep(gpu_model.spec_of(gpu_model.SMALL['grouped queries']), 2, 40)\n"
        "sheet = gpu_timing.sheet_of('NVIDIA H200')\n"
        "assert gpu_model.least_us(step, gpu_timing.Ceilings(1.0, 1.0, 1.0, sheet)) > 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_a_wrong_name_of_a_part_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--parts", "kernels", "speeds"], cwd=gpu.ROOT, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no part is called speeds; use ceilings, kernel tests, attention" in done.stderr


# ---- What the measurements launch, recorded on tensors without memory, with a stand-in for CUDA's clock.


class Event:
    """A tick takes a millisecond."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        return

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Graph:
    def replay(self) -> None:
        return


@pytest.fixture
def recorded_gpu() -> Iterator[Any]:
    """A GPU whose launches are written down, and none of which computes."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from benchmarks import gpu_attention, gpu_gemm, gpu_kernels, gpu_model, gpu_timing
    from moe_serve.roofline.launches import fake_gpu, recorded

    stream = SimpleNamespace(wait_stream=lambda other: None)
    nothing = mock.Mock(return_value=None)
    with ExitStack() as stack:
        for name, value in {
            "Event": Event, "synchronize": nothing, "_sleep": nothing, "CUDAGraph": Graph, "empty_cache": nothing,
            "graph": mock.MagicMock(), "Stream": lambda: stream, "current_stream": lambda: stream,
            "stream": mock.MagicMock(), "is_current_stream_capturing": lambda: False,
        }.items():  # fmt: skip
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        zeros = lambda tensor: [0.0] * tensor.numel()  # noqa: E731, whatever the device holds
        for module in (gpu_timing, gpu_kernels, gpu_gemm, gpu_attention, gpu_model):
            for name, value in (("check_close", nothing), ("numbers", zeros)):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(fake_gpu())
        recording = stack.enter_context(recorded(takes_copies=True, takes_reads=True))
        yield recording


SHEET = SimpleNamespace(name="H100", memory_gb_s=3350.0, bf16_tflop_s=989.0, fp8_tflop_s=1979.0)


def limits() -> Any:
    from benchmarks.gpu_timing import Ceilings

    return Ceilings(3000.0, 3100.0, 700.0, SHEET)  # type: ignore[arg-type]


MEASURED = {
    "gpu_kernels": ["ceilings", "packed_gemm", "slab_gemm", "low_latency", "small_batches", "small_kernels", "overlap"],
    "gpu_attention": ["decodes", "latent_decodes", "chunks"],
}


@pytest.mark.parametrize("module, name", [(module, name) for module, names in MEASURED.items() for name in names])
def test_what_is_measured_launches_its_kernels(module: str, name: str, recorded_gpu: Any) -> None:
    from importlib import import_module

    measure: Callable[..., Any] = import_module(f"benchmarks.{module}").BENCHMARKS[name]
    rows = list(measure(limits()))
    assert rows
    assert all(row.value >= 0 for row in rows)
    launched = {launch.name for launch in recorded_gpu.launches}
    expected = {"packed_gemm": "grouped_gemm_kernel", "slab_gemm": "grouped_gemm_kernel", "chunks": "attend_kernel",
                "low_latency": "combine_receive_kernel", "overlap": "dispatch_send_kernel", "decodes": "attend_kernel",
                "small_batches": "combine_send_kernel", "small_kernels": "topk_gate_kernel",
                "latent_decodes": "attend_kernel"}  # fmt: skip
    assert expected.get(name) is None or expected[name] in launched


def test_sheets_are_found_by_the_names_that_drivers_give() -> None:
    pytest.importorskip("torch")
    from benchmarks.gpu_timing import sheet_of
    from moe_serve.eplb.cost.profile_files import load_hardware

    names = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA GB200": "GB200", "NVIDIA H20": "H20",
             "NVIDIA A100-SXM4-80GB": "A100", "AMD Instinct MI300X": "MI300X", "NVIDIA B200": "B200"}  # fmt: skip
    for name, of in names.items():
        sheet, profile = sheet_of(name), load_hardware(of)
        assert sheet is not None
        assert sheet.name == of
        assert sheet.memory_gb_s == profile.hbm_bytes_per_s / 1e9
        assert (sheet.bf16_tflop_s, sheet.fp8_tflop_s) == (profile.bf16_flops / 1e12, profile.fp8_flops / 1e12)
    assert sheet_of("NVIDIA GeForce RTX 4090") is None


def test_the_plain_attention_of_the_benchmark_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from benchmarks import gpu_attention
    from moe_serve.kernels.forms import AttendShape

    case = gpu_attention.Case(AttendShape(2, 3, 16, 0.25), num_seqs=2, cached=20, num_new=5)
    with mock.patch.object(gpu_attention, "DEVICE", torch.device("cpu")):
        q, cache, _, rows = gpu_attention.made(case)
        got = gpu_attention.plain(case, q, cache, rows.block_tables, 7)
    slots = (rows.block_tables[1].long()[:, None] * 16 + torch.arange(16)).flatten()[:23]
    keys, values = (cache[slots].float()[:, at].transpose(0, 1) for at in (slice(0, 2), slice(2, 4)))
    expected = torch.nn.functional.scaled_dot_product_attention(q[7].float(), keys, values, scale=0.25)
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.fixture
def model_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks.gpu_model with a CPU in the place of the GPU: plain torch, and graphs that run what they hold."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from benchmarks import gpu_model
    from moe_serve.dispatch.local import LocalAllToAll
    from moe_serve.models.decoder import moe_decoder
    from moe_serve.models.decoder.graphs import GraphRunner

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        run()
        return run

    def times(calls: list[Callable[[], object]], repeats: int = 0) -> float:
        for call in calls:
            call()
        return 1.0

    def on_the_gpu(spec: object, numerics: object, device: Any, backend: str) -> bool:
        return torch.device(device).index == 0

    monkeypatch.setattr(gpu_model, "DEVICE", torch.device("cpu", 0))
    for module in (gpu_model, moe_decoder):
        monkeypatch.setattr(module, "captures_decodes", on_the_gpu)
    monkeypatch.setattr(moe_decoder, "GraphRunner", lambda *parts: GraphRunner(*parts, capture=capture))
    monkeypatch.setattr(LocalAllToAll, "captures", True)
    monkeypatch.setattr(gpu_model, "time_us", times)
    return gpu_model


@pytest.mark.parametrize("name", ["step", "graphs"])
def test_steps_of_small_models_are_near_those_in_float32(name: str, model_on_cpu: Any) -> None:
    rows = list(model_on_cpu.BENCHMARKS[name](limits()))
    errors = [row for row in rows if row.unit == "e-6"]
    assert len(errors) == len(model_on_cpu.SMALL) * (2 if name == "step" else 1)
    for row in errors:
        assert row.met
        assert row.value > 0 or "float32" in row.name or "graphs" in row.name


def test_a_step_that_is_wrong_is_not_timed(model_on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = model_on_cpu.Rank.step

    def wrong(rank: Any, num_tokens: int = 1) -> Any:
        return step(rank, num_tokens) * (1.1 if rank.device.index == 0 and num_tokens == 1 else 1.0)

    monkeypatch.setattr(model_on_cpu.Rank, "step", wrong)
    with pytest.raises(AssertionError, match=r"logits, latents.*: their worst error is 0.1"):
        list(model_on_cpu.BENCHMARKS["step"](limits()))


def test_a_decode_step_stands_beside_its_roofline(model_on_cpu: Any) -> None:
    import torch

    spec = model_on_cpu.spec_of(model_on_cpu.SMALL["grouped queries"])
    share = model_on_cpu.share_of(spec, torch.bfloat16, model_on_cpu.DEVICE)
    rank = model_on_cpu.rank_of(share, model_on_cpu.random_weights(share), 8, 64)
    for batch in (1, 4):
        step = model_on_cpu.RankStep(spec, batch, 40)
        rows = list(model_on_cpu.speed_of("small", rank, step, limits()))
        launches = len(model_on_cpu.record_step(step).launches)
        assert rows[1].value == pytest.approx(1.3 * launches, rel=0.1)  # no kernel here takes longer than its launch
        assert {request.num_computed for request in rank.requests} == {41}


def test_drawn_tokens_are_compared_with_the_plain_sampler(model_on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_on_cpu, "VOCABULARY", 1000)
    rows = list(model_on_cpu.BENCHMARKS["sampling"](limits()))
    assert all("the tokens are the plain sampler's" in row.conditions for row in rows)
    monkeypatch.setattr(model_on_cpu, "sample_rows", lambda logits, rows: logits.argmax(1).tolist())
    with pytest.raises(AssertionError, match=r"temperature: .* of 128 tokens are not the plain sampler's"):
        list(model_on_cpu.BENCHMARKS["sampling"](limits()))


def carried(rank: int, group: Any, spoils: bool) -> list[tuple[str, float]]:
    """Is a rank of benchmarks.gpu_ranks on a CPU, whose transport is that of one host."""
    from benchmarks import gpu_ranks

    def times(calls: list[Callable[[], object]], repeats: int) -> float:
        for call in calls:
            call()
        return 1.0

    there_and_back = gpu_ranks.there_and_back

    def spoilt(*arguments: Any) -> Any:
        return there_and_back(*arguments) * (1.1 if spoils else 1.0)

    with (
        mock.patch.dict(gpu_ranks.BACKENDS, cuda_ipc="low_latency"),
        mock.patch.multiple(gpu_ranks, time_us=times, HIDDEN=64, there_and_back=spoilt),
    ):
        return [(row.name, row.value) for row in gpu_ranks.measured("cuda_ipc", group)]


def test_rows_between_ranks_are_checked_before_they_are_timed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.ranks import run_ranks

    for rows in run_ranks(2, carried, False):
        assert rows == [(f"cuda_ipc: dispatch and combine, {tokens} tokens", 1.0) for tokens in (1, 8, 128)]
    with pytest.raises(AssertionError, match=r"cuda_ipc, 1 tokens is wrong: relative error 0.1"):
        run_ranks(2, carried, True)


@pytest.mark.slow
def test_the_demo_model_is_served_and_compared_with_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("zmq")
    from benchmarks import gpu_serve

    on_cpu = gpu_serve.generated
    monkeypatch.setattr(gpu_serve, "generated", lambda device, dtype, ranks: on_cpu("cpu", "float32", ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["gpu_serve", "--rows", str(tmp_path / "rows")])
    gpu_serve.main()
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["value"] for row in rows if row["unit"] == "%"] == [100.0] * 4, "two ranks say what one says"


def test_outcomes_of_a_part_are_plain_json() -> None:
    assert json.dumps(gpu.asdict(Outcome("a", "passed", rows=[ROW])))
