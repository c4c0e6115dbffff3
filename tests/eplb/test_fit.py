"""`moe-serve simulate --fit`: step times in, the engine's factor out; the lines of engines' logs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_engine, load_hardware, load_model_profile
from moe_serve.eplb.files.step_times import StepTime, read_step_times
from moe_serve.eplb.load import LoadTrace, Phase
from moe_serve.eplb.policies.make import plan
from moe_serve.eplb.replay.costs import ProfileCosts, Serving
from moe_serve.eplb.replay.fit import OVERLAPS, Group, Guess, fit, grouped, step_seconds, to_table
from moe_serve.eplb.replay.synthetic import SyntheticLoad, popularity, synthetic_trace
from moe_serve.errors import ConfigError, TraceError
from moe_serve.launcher.cli.app import add_balancer_commands
from moe_serve.topology import Topology

VLLM = """\
(EngineCore_DP0 pid=20) INFO 12-22 21:44:40 [core.py:349] Iteration(515): 0 context requests, 0 context tokens, \
20 generation requests, 20 generation tokens, iteration elapsed time: 10.99 ms
(EngineCore_DP0 pid=20) INFO 12-22 21:44:40 [core.py:349] Iteration(516): 1 context requests, 900 context tokens, \
20 generation requests, 20 generation tokens, iteration elapsed time: 80.10 ms
(EngineCore_DP0 pid=20) INFO 12-22 21:44:40 [core.py:349] Iteration(517): 2 context requests, 8192 context tokens, \
0 generation requests, 0 generation tokens, iteration elapsed time: 212.5 ms
"""
# vLLM 0.32.0 on a CPU, a random Qwen3-MoE of 8 layers (`LLM(…, enable_logging_iteration_details=True,
# disable_log_stats=False)`): lines as it wrote them.
VLLM_0_32 = """\
(MainProcess pid=4203) INFO 11-28 19:46:56 [loggers.py:199] Engine 000: \
Iteration(229): 1 context requests, 1000 context tokens, 0 generation requests, 0 generation tokens, \
iteration elapsed time: 1882.07 ms, CPU KV cache usage: 0.0%
(MainProcess pid=4203) INFO 11-28 19:46:30 [loggers.py:199] Engine 000: \
Iteration(91): 7 context requests, 112 context tokens, 1 generation requests, 1 generation tokens, \
iteration elapsed time: 204.35 ms, CPU KV cache usage: 1.6%
(MainProcess pid=4203) INFO 11-28 19:46:44 [loggers.py:199] Engine 000: \
Iteration(185): 0 context requests, 0 context tokens, 64 generation requests, 64 generation tokens, \
iteration elapsed time: 364.06 ms, CPU KV cache usage: 12.5%
"""
SGLANG = """\
[2026-04-05 20:02:51 DP0 TP0] Decode batch, #running-req: 32, #token: 11200, token usage: 0.08, cuda graph: True, \
gen throughput (token/s): 9999.0, #queue-req: 0
[2026-04-05 20:02:51 DP1 TP1] Decode batch, #running-req: 30, #token: 9000, token usage: 0.08, cuda graph: True, \
gen throughput (token/s): 1500.0, #queue-req: 0
[2026-04-05 20:02:52 DP0 TP0] Decode batch, #running-req: 32, #token: 12800, token usage: 0.08, accept len: 1.5, \
accept rate: 0.5, cuda graph: True, gen throughput (token/s): 1600.0, #queue-req: 0
[2026-04-05 20:02:52] INFO:     127.0.0.1:40086 - "POST /v1/chat/completions HTTP/1.1" 200 OK
[2026-04-05 20:02:53 DP0 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, token usage: 0.08, \
#running-req: 31, #queue-req: 3, cuda graph: True, input throughput (token/s): 0.14
[2026-04-05 20:02:53 DP0 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, token usage: 0.08, \
#running-req: 31, #queue-req: 3, cuda graph: True, input throughput (token/s): 16384.0
[2026-04-05 20:02:53 DP0 TP0] Prefill batch, #new-seq: 1, #new-token: 100, #cached-token: 0, token usage: 0.08, \
#running-req: 31, #queue-req: 3, cuda graph: True, input throughput (token/s): 16000.0
[2026-04-05 20:02:54 DP0 TP0] Decode batch, #running-req: 32, #token: 12800, token usage: 0.08, cuda graph: True, \
gen throughput (token/s): 300.0, #queue-req: 0
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "measured"
    file.write_text(text, encoding="utf-8")
    return file


def test_vllms_iterations_count_those_of_prompts_and_answers_at_once_too(tmp_path: Path) -> None:
    found = read_step_times(written(tmp_path, VLLM))
    assert found == [
        StepTime("decode", 20, pytest.approx(0.01099)),
        StepTime("mixed", 920, pytest.approx(0.0801), decoding=20),
        StepTime("prefill", 8192, pytest.approx(0.2125)),
    ]


def test_sglangs_lines_count_where_nothing_else_came_between(tmp_path: Path) -> None:
    found = read_step_times(written(tmp_path, SGLANG))
    assert found == [StepTime("decode", 32, pytest.approx(0.03), 400.0), StepTime("prefill", 8192, 0.5)]


def test_lines_that_a_vllm_of_today_wrote_are_read(tmp_path: Path) -> None:
    assert read_step_times(written(tmp_path, VLLM_0_32)) == [
        StepTime("prefill", 1000, pytest.approx(1.88207)),
        StepTime("mixed", 113, pytest.approx(0.20435), decoding=1),
        StepTime("decode", 64, pytest.approx(0.36406)),
    ]


def test_a_csv_is_read_with_and_without_context(tmp_path: Path) -> None:
    text = "phase,tokens,step_s,context\ndecode,128,0.04,3000\nprefill,8192,0.5,\n"
    found = read_step_times(written(tmp_path, text))
    assert found == [StepTime("decode", 128, 0.04, 3000.0), StepTime("prefill", 8192, 0.5)]


@pytest.mark.parametrize(
    ("row", "says"),
    [("decode,x,0.1", "line 2: invalid"), ("both,1,0.1", "phase is 'both'"), ("decode,0,0.1", "0 tokens"),
     ("mixed,1,0.1", "0 tokens of 1 in a mixed"),
     ("decode," + 100 * "9" + ",0.1", "100 digits"), ("decode," + 5000 * "9" + ",0.1", "line 2"),
     ("decode,8,nan", "8 tokens in nan"), ("decode", "line 2"), ("decode\0", "measured"), ("", "no step times")],
)  # fmt: skip
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, row: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        read_step_times(written(tmp_path, f"phase,tokens,step_s\n{row}\n"))


@pytest.mark.parametrize(
    "line",
    [VLLM.replace("10.99", "1.2.3").splitlines()[0], VLLM.replace(" 20 gen", " " + 5000 * "9" + " gen").splitlines()[0],
     SGLANG.replace("1600.0", "1.6.3").replace("300.0", "3" * 400).replace("16384.0", "1.6.384")],
)  # fmt: skip
def test_numbers_of_a_log_that_are_none_are_no_steps(tmp_path: Path, line: str) -> None:
    with pytest.raises(TraceError, match="no step times"):
        read_step_times(written(tmp_path, line))


def test_a_full_stop_behind_a_number_is_no_part_of_it(tmp_path: Path) -> None:
    log = written(tmp_path, SGLANG.replace("1600.0, #queue", "1600.0. #queue"))
    assert read_step_times(log) == read_step_times(written(tmp_path, SGLANG))


CLUSTER, SLOTS = Topology(1, 8), 136
QWEN = load_model_profile("Qwen3-30B-A3B")
SIZES = [("decode", tokens, 2000.0, 0) for tokens in (16, 64, 256, 512)] + [("prefill", 8192, 4096.0, 0)]
PROMPTS = [("prefill", tokens, context, 0) for tokens, context in ((4096, 512.0), (8192, 4096.0), (16384, 16384.0))]


def costs_of(model) -> ProfileCosts:
    return ProfileCosts(CostModel(load_hardware("H200"), model, CLUSTER, load_engine("ideal")), Serving())


def engine_steps(factor: float, guess: Guess, sizes=SIZES, model=QWEN) -> list[StepTime]:
    """Returns steps of an engine that takes factor times the model, with 2 % noise and a slow step of each size."""
    rng, steps, costs = np.random.default_rng(0), [], costs_of(model)
    load = SyntheticLoad(guess.family, 2, model.num_moe_layers, model.num_logical, model.topk, model.num_groups)
    before, served = popularity(replace(load, skew=guess.skew))
    placement = plan(before * 1e9, CLUSTER, SLOTS).placement
    for phase, tokens, context, decoding in sizes:
        group = Group(phase, tokens, context, 0.0, 1, decoding / tokens)
        times = step_seconds(group, costs, placement, served, guess.spread)
        time = factor * times[OVERLAPS.index(guess.overlap)]
        noisy = time * (1 + 0.02 * rng.standard_normal(9))
        steps += [StepTime(phase, tokens, float(one), context, decoding) for one in (*noisy, 9 * time)]
    return steps


def is_or_is_like(guess: Guess, found) -> bool:
    return guess in (found.best, *(other for other, _ in found.alike))


def test_a_known_engine_is_found_again() -> None:
    factor, true = 1.4, Guess("lognormal", 0.9, 0.0, "two-batch")
    found = fit(engine_steps(factor, true), costs_of(QWEN), SLOTS, 0.98)
    assert found.factor == pytest.approx(factor, rel=0.03)
    assert found.low <= found.factor <= found.high
    assert found.best.overlap == "two-batch"
    assert is_or_is_like(true, found)
    assert np.abs(found.errors).max() < 0.06


def test_the_load_of_router_groups_and_the_spread_of_requests_are_found_with_their_confidence() -> None:
    """Few prompts in a step against many show the spread; eight groups on eight ranks show the family."""
    grouped = replace(QWEN, num_groups=8, topk_groups=8)
    factor, true = 1.2, Guess("group", 0.6, 16.0, "none")
    more = [("prefill", 4096, 4096.0, 0), ("mixed", 2048, 512.0, 256)]
    found = fit(engine_steps(factor, true, [*SIZES, *PROMPTS, *more], grouped), costs_of(grouped), SLOTS, 0.98)
    assert found.factor == pytest.approx(factor, rel=0.05)
    assert is_or_is_like(true, found)
    assert found.spreads[0] <= true.spread <= found.spreads[1]
    assert found.spreads[0] >= 2, "that there is a spread is sure"
    assert found.skews[0] <= true.skew <= found.skews[1]
    assert 0 < found.sure <= 1


def test_steps_without_prompts_show_no_spread() -> None:
    found = fit(engine_steps(1.4, Guess("lognormal", 0.9, 0.0, "none"), SIZES[:4]), costs_of(QWEN), SLOTS, 0.98)
    assert found.spreads == (0.0, 0.0)
    assert "steps without prompts do not show the spread" in to_table(found, None)


def test_a_recorded_load_leaves_the_spread_and_the_overlap_to_be_found() -> None:
    load = SyntheticLoad("lognormal", 4, QWEN.num_moe_layers, QWEN.num_logical, QWEN.topk, skew=0.9, rho=1.0)
    trace = synthetic_trace(load)
    steps = engine_steps(1.4, Guess("lognormal", 0.9, 0.0, "none"))
    found = fit(steps, costs_of(QWEN), SLOTS, 0.98, trace)
    assert found.best.family == "recorded"
    assert is_or_is_like(Guess("recorded", 0.0, 0.0, "none"), found)
    assert found.factor == pytest.approx(1.4, rel=0.05)
    assert "--trace FILE" in found.best.options()
    empty = LoadTrace.of([next(iter(trace))], topk=QWEN.topk)
    with pytest.raises(TraceError, match="a half of the trace has no tokens"):
        fit(steps, costs_of(QWEN), SLOTS, 0.98, empty)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_mixed_step_that_is_nearly_all_decodes_costs_what_these_do(drafts: int) -> None:
    costs = replace(costs_of(QWEN), serving=Serving(drafts=drafts, acceptance=0.5))
    shares = np.full((QWEN.num_moe_layers, QWEN.num_logical), 1 / QWEN.num_logical)
    placement = plan(shares * 1e9, CLUSTER, SLOTS).placement

    def seconds(phase: Phase, share: float) -> float:
        return step_seconds(Group(phase, 520, 4096.0, 0.0, 1, share), costs, placement, shares, 0.0)[0]

    alone = seconds("decode", 0.0)
    half, most = (seconds("mixed", decoding / 520) for decoding in (260, 512))
    assert most == pytest.approx(alone, rel=0.05)
    assert half < most, "fewer decodes read less of the cache"


def test_steps_that_all_but_one_token_decode_are_grouped_and_fitted() -> None:
    """The medians of (16 of 15) and (17 of 16) tokens would round to 16 of 16."""
    steps = [StepTime("mixed", tokens, 0.01, 4096.0, tokens - 1) for tokens in (16, 17)]
    (group,) = grouped(steps, 4096.0)
    assert group.decode_share == pytest.approx((15 / 16 + 16 / 17) / 2)


def test_steps_of_one_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="of 1 sizes, and a fit needs 3"):
        fit(engine_steps(1.0, Guess("lognormal", 0.0, 0.0, "none"))[:5], costs_of(QWEN), SLOTS, 0.98)


def test_the_command_writes_an_engine_that_simulate_takes(tmp_path: Path) -> None:
    app = typer.Typer()
    add_balancer_commands(app)
    steps = engine_steps(1.4, Guess("lognormal", 0.6, 0.0, "two-batch"))
    rows = [f"{step.phase},{step.tokens},{step.step_s},{step.context}" for step in steps]
    measured = written(tmp_path, "\n".join(["phase,tokens,step_s,context", *rows]))
    engine = tmp_path / "mine.yaml"
    cluster = ["--model", "Qwen3-30B-A3B", "--hardware", "H200", "--nodes", "1", "--redundant", "8"]
    result = CliRunner().invoke(
        app, ["simulate", *cluster, "--fit", str(measured), "--save-engine", str(engine), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert load_engine(engine).step_factor == pytest.approx(json.loads(result.stdout)["step_factor"], abs=1e-4)
    assert load_engine(engine).step_factor == pytest.approx(1.4, rel=0.03)
    assert "fitted on 50 steps of measured" in load_engine(engine).sources["step_factor"]
    again = CliRunner().invoke(
        app, ["simulate", *cluster, "--engine", str(engine), "--windows", "2", "--json", "--jobs", "1"]
    )
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["rows"][0]["tokens_per_s"] > 0
