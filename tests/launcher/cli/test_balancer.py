"""The balancer's commands end to end: results on stdout, one line on stderr for a mistake, exit codes 0, 1, 2."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from moe_serve.eplb.cost.step_record import load_steps
from moe_serve.eplb.files.placements import read_placement, write_placement
from moe_serve.eplb.files.traces import read_trace, write_trace
from moe_serve.eplb.load import rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.launcher.cli.app import add_balancer_commands

DEMO = ["example:demo_unbalanced", "--ranks", "8", "--redundant", "8"]


def call(*arguments: object) -> tuple[int, str, str]:
    app = typer.Typer()
    add_balancer_commands(app)
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"TERMINAL_WIDTH": "160", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_replay_prints_a_table_with_floor_and_ceiling() -> None:
    code, out, err = call("replay", *DEMO, "-p", "greedy", "--jobs", 1)
    assert (code, err) == (0, "")
    for words in ("do nothing", "greedy", "perfect", "n/a: off-node needs tokens by source rank", "Age binds"):
        assert words in out
    assert all(len(line) <= 160 or not line.startswith(" ") for line in out.splitlines())


def test_replay_as_json_is_the_same_on_every_run_but_for_timings() -> None:
    reports = [json.loads(call("replay", *DEMO, "-p", "greedy", "-p", "deepseek", "--json")[1]) for _ in range(2)]
    for report in reports:
        assert set(report.pop("timings")) == {"greedy", "deepseek"}
    assert reports[0] == reports[1]
    names = [row["policy"] for row in reports[0]["policies"]]
    assert names == ["do nothing", "greedy", "deepseek", "perfect"]
    assert reports[0]["redundancy"][0]["num_slots"] == 32


def test_replay_writes_one_self_contained_page(tmp_path: Path) -> None:
    code, _, err = call("replay", *DEMO, "-p", "greedy", "--html", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert code == 0
    assert f"wrote {tmp_path / 'r.html'}" in err
    assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest", page)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    content = json.loads(data.group(1))
    assert [policy["name"] for policy in content["policies"]] == ["do nothing", "greedy", "perfect"]
    assert content["verdict"]
    assert "{{" not in page.split("<script>")[0]


def test_replay_of_a_log_shows_what_it_says_and_what_to_record(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(
        "EPLB step: 10 for model m: avg_tokens=50.00, max_tokens=100, balancedness=0.5000, steps until the next\n"
    )
    code, out, _ = call("replay", tmp_path / "server.log")
    assert code == 0
    assert "mean 0.5000" in out
    assert "works 100% over the mean" in out
    assert "record expert counts" in out


def test_fail_below_exits_with_1() -> None:
    code, out, err = call("replay", *DEMO, "-p", "greedy", "--fail-below", "0.99", "--no-curve")
    assert code == 1
    assert "greedy" in out
    assert re.search(r"balancedness 0\.\d+ is below --fail-below 0\.99", err)
    assert call("replay", *DEMO, "-p", "greedy", "--fail-below", "0.1", "--no-curve")[0] == 0


def test_several_intervals_are_runs_of_their_own() -> None:
    rows = json.loads(call("replay", *DEMO, "-p", "greedy", "--interval", "1,2", "--no-curve", "--json")[1])["policies"]
    assert [row["policy"] for row in rows] == ["do nothing", "greedy, every 1", "greedy, every 2", "perfect"]
    assert rows[1]["num_plans"] > rows[2]["num_plans"]


def test_advise_ends_with_what_to_type(tmp_path: Path) -> None:
    advise = ["advise", "example:demo_unbalanced", "--ranks", 8, "--model", "demo", "--gpu", "cpu", "--redundant", 8]
    code, out, err = call(*advise, "--served-model", "my model", "--gpu-hour-price", 2, "--jobs", 1,
                          "--html", tmp_path / "a.html")  # fmt: skip
    assert (code, err) == (0, f"wrote {tmp_path / 'a.html'}\n")
    assert "Made by <code>moe-serve advise</code>" in (tmp_path / "a.html").read_text()
    for words in ("in order", "planned once", "KV tokens", "price/M", "Too few windows", "--ep-num-redundant-experts"):
        assert words in out
    assert "'my model'" in out
    assert call(*advise, "-p", "greedy", "--interval", 4, "--jobs", 1, "--fail-below", "0.99")[0] == 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("advise", "example:demo", "--ranks", "8", "--gpu", "other"), "no hardware profile 'other'"),
        (("advise", "example:demo", "--ranks", "8", "--interval", "0"), "interval is 0 windows"),
        (("advise", "example:demo", "--ranks", "8", "--interval", "x"), "--interval is 'x'; give whole numbers"),
        (("advise", "example:demo", "--ranks", "8", "-p", "series"), "'series' is none that an engine plans with"),
        (("advise", "example:demo", "--ranks", "8", "--memory-share", "0"), "memory share is 0"),
        (("advise", "example:demo", "--ranks", "8", "--html", "."), "--html: . cannot be written (it is a folder)"),
        (("replay", "missing.npz"), "load trace missing.npz does not exist"),
        (("replay", "example:demo", "--ranks", "7", "--nodes", "2"), "7 ranks do not divide over 2 nodes"),
        (("replay", "example:demo", "--ranks", "8", "--slots", "36"), "36 slots do not divide over 8 ranks"),
        (("replay", "example:demo", "--model", "DeepSeek-V3"), "--model and --hardware belong together"),
        (("replay", "example:demo", "--ranks", "8", "-p", "other"), "policy 'other' is unknown"),
        (
            ("replay", "example:demo", "--ranks", "8", "--model", "DeepSeek-V3", "--hardware", "H800"),
            "the trace has 4 MoE layers x 32 experts",
        ),
        (("replay", "example:demo", "--ranks", "8", "--window", "1000"), "has 1 windows"),
        (("replay", "example:demo", "--ranks", "8", "--topk", "3"), "--topk is 3 but the trace says 4"),
        (("simulate", "--nodes", "1,x"), "--nodes is '1,x'; give whole numbers"),
        (("simulate", "--slots", "300"), "300 slots on 32 ranks for 256 experts; use a multiple of 32 from 256 on"),
        (("simulate", "--load", "other"), "load 'other' is not known"),
        (("simulate", "--model", "other"), "no models profile 'other'"),
        (("simulate", "--engine", "other"), "no engines profile 'other'"),
        (("simulate", "--overlap", "other"), "overlap is 'other'; give one of auto, none, two-batch"),
        (("simulate", "--utilisation", "0"), "utilisation is 0; give the share of the time in steps"),
        (("simulate", "--cache-hit", "0.5"), "--cache-hit is a share of prompts; give --phase prefill"),
        (("simulate", "--acceptance", "0.9"), "--acceptance is the chance of drafts; give their number with --drafts"),
        (("simulate", "--over-capacity", "drop"), "--over-capacity is of a capacity; give it with --expert-capacity"),
        (("plan", "example:demo", "--ranks", "8", "-o", "x.json", "--for", "other"), "target 'other' is not known"),
        (("plan", "example:demo", "--ranks", "8", "--max-moves", "4"), "policy refined plans anew"),
        (("plan", "example:demo", "-p", "milp", "--min-gain", "1"), "drop --min-gain"),
        (("plan", "example:demo", "-p", "incremental", "--max-moves-per-rank", "1"), "give it with --current"),
        (("plan", "example:demo", "--ranks", "8", "--only-phase", "decode"), "but 3 prefill windows"),
        (("replay", "example:demo", "--ranks", "8", "--only-phase", "decode"), "but 3 prefill windows"),
        (("plan", "example:demo", "--ranks", "8", "-p", "series", "--by-phase"), "needs windows of two phases"),
        (("convert", "example:demo", "x.npz", "--only-phase", "warm-up"), "phase is 'warm-up'; give one of"),
        (("convert", "example:demo", "x.npz", "--for", "sglang"), "--for sglang is for placements"),
        (("convert", "missing.json", "x.json"), "missing.json does not exist"),
        (("plan", "example:demo", "--ranks", "100000"), "100000 ranks on 1 nodes are more than 65536"),
        (("plan", "example:demo", "--ranks", "8", "--slots", "1000000"), "use at most 256"),
        (("replay", "example:demo", "--ranks", "8", "--redundant", 10**20), "use at most 256"),
        (("simulate", "--nodes", "100000000"), "800000000 ranks on 100000000 nodes are more than 65536"),
        (("simulate", "--redundant", "-300"), "redundant holds -300"),
        (("simulate", "--redundant", 10**20), "lower --redundant"),
        (("simulate", "--window", "0"), "window_steps holds 0"),
        (("simulate", "--window", 10**21), "are more than 2^53"),
        (("simulate", "--tokens-per-rank", 10**18), "are more than 2^53"),
        (("simulate", "--skew", "1000"), "skew is 1000; give a number from 0 to 20"),
        (("simulate", "--skew", "nan"), "skew is nan"),
        (("simulate", "--load", "hot", "--skew", "2"), "skew is 2; give a number from 0 to 1 for load 'hot'"),
        (
            ("simulate", "--html", "nowhere/page.html"),
            "--html: nowhere/page.html cannot be written (there is no folder",
        ),
        (("replay", "example:demo", "--ranks", "8", "--html", "."), "--html: . cannot be written (it is a folder)"),
        (
            ("plan", "example:demo", "--ranks", "8", "-o", "nowhere/p.json"),
            "--output: nowhere/p.json cannot be written",
        ),
        (("replay", "example:demo", "--ranks", "8", "--against", "/dev/zero"), "has more than 256 MiB"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    arguments: tuple[object, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


def test_plan_writes_for_every_engine_and_says_what_it_did(tmp_path: Path) -> None:
    tables = []
    for target, name in [
        ("sglang", "p.json"),
        ("tensorrt_llm", "p.yaml"),
        ("vllm", "v.json"),
        ("vllm_ascend", "m.json"),
    ]:
        code, out, err = call("plan", *DEMO, "-p", "greedy", "-o", tmp_path / name, "--for", target)
        assert code == 0
        assert f"for {target}" in err
        assert "40 slots, 5 a rank, 8 redundant" in out
        tables.append(read_placement(tmp_path / name, 8, 32, (1, 2, 3, 4)).physical_to_logical)
    np.testing.assert_array_equal(tables[0], tables[1])
    np.testing.assert_array_equal(tables[0], tables[2])


def test_plan_links_ranks_for_the_exact_split_where_that_is_asked_for() -> None:
    plans = {}
    for split in ("even", "exact"):
        code, out, _ = call("plan", *DEMO, "--planned-split", split, "--json")
        assert code == 0
        plans[split] = json.loads(out)["placement"]
    assert plans["even"] != plans["exact"]
    code, _, err = call("plan", *DEMO, "-p", "greedy", "--planned-split", "exact")
    assert code == 2
    assert "policy greedy plans for the even split alone; use -p refined or incremental" in err
    code, _, err = call("plan", *DEMO, "--planned-split", "exact", "--for", "vllm")
    assert code == 2
    assert "is for our own server; the engine of --for vllm shares an expert's tokens evenly" in err
    code, _, err = call("plan", *DEMO, "--planned-split", "time")
    assert code == 2
    assert "planned_split is 'time'; give 'even' or 'exact'" in err


def test_plan_from_the_placement_in_use_counts_moves(tmp_path: Path) -> None:
    call("plan", *DEMO, "-o", tmp_path / "now.json")
    last = (*DEMO, "-p", "incremental", "--last", 1, "--current", tmp_path / "now.json", "--json")
    code, out, _ = call("plan", *last, "--max-moves", 4)
    content = json.loads(out)
    assert code == 0
    assert content["windows"] == 1
    assert 0 <= content["num_moves"] <= 4 * 4
    by_rank = [json.loads(call("plan", *last, "--max-moves-per-rank", most)[1])["num_moves"] for most in (0, 1)]
    assert by_rank[0] == 0
    assert 0 < by_rank[1] <= 4 * 8
    assert [layer["layer"] for layer in content["layers"]] == [1, 2, 3, 4]
    assert all(layer["balancedness"] <= layer["bound"] + 1e-9 for layer in content["layers"])


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_reports_keep_the_brackets_of_paths(command: str, tmp_path: Path) -> None:
    call("convert", "example:demo", tmp_path / "[red]t.npz")
    code, out, _ = call(command, tmp_path / "[red]t.npz", "--ranks", 8, "-p", "greedy")
    assert code == 0
    assert "/[red]t.npz" in out


@pytest.mark.parametrize("name", ["t.npz", "t.jsonl", "t.csv"])
def test_convert_round_trips_traces(tmp_path: Path, name: str) -> None:
    code, out, _ = call("convert", "example:demo", tmp_path / name)
    assert code == 0
    assert "3 records, 4 layers x 32 experts" in out
    for a, b in zip(read_trace(tmp_path / name), read_trace("example:demo"), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


def test_convert_changes_the_format_of_a_placement(tmp_path: Path) -> None:
    call("plan", *DEMO, "-o", tmp_path / "p.json", "--for", "sglang")
    code, out, _ = call(
        "convert",
        tmp_path / "p.json",
        tmp_path / "lb.yaml",
        "--for",
        "tensorrt_llm",
        "--ranks",
        8,
        "--moe-layers",
        "1-4",
    )
    assert code == 0
    assert "4 layers x 40 slots on 8 ranks, for tensorrt_llm" in out
    code, _, err = call("convert", tmp_path / "p.json", tmp_path / "lb.yaml", "--for", "tensorrt_llm")
    assert code == 2
    assert "give the number (--ranks)" in err


@pytest.mark.parametrize("target, name", [("tensorrt_llm", "lb.yaml"), ("sglang", "s.json")])
def test_convert_fills_empty_slots_where_no_load_moves(tmp_path: Path, target: str, name: str) -> None:
    placement = Placement(np.array([[0, 1, -1, 1, 2, 3, -1, -1]]), 4, 2, (0,))
    write_placement(placement, tmp_path / "p.json")
    code, out, err = call("convert", tmp_path / "p.json", tmp_path / name, "--for", target)
    assert (code, err) == (0, "")
    assert "3 empty slots took a second replica of an expert of their rank" in out
    filled = read_placement(tmp_path / name, 2)
    assert filled.physical_to_logical.tolist() == [[0, 1, 0, 1, 2, 3, 2, 2]]
    tokens = np.array([[7, 6, 5, 4]])
    np.testing.assert_array_equal(rank_load(tokens, filled), rank_load(tokens, placement))


def test_convert_refuses_an_empty_slot_that_would_move_load(tmp_path: Path) -> None:
    write_placement(Placement(np.array([[0, 1, -1, 0, 1, -1]]), 2, 2, (0,)), tmp_path / "p.json")
    code, _, err = call("convert", tmp_path / "p.json", tmp_path / "lb.yaml", "--for", "tensorrt_llm")
    assert code == 2
    assert "2 slots are empty" in err
    assert "plan with --for, which fills them" in err
    assert not (tmp_path / "lb.yaml").exists()


def test_simulate_sweeps_and_draws(tmp_path: Path) -> None:
    profile = tmp_path / "tiny.yaml"
    from importlib import resources

    text = (resources.files("moe_serve.eplb.cost") / "profiles" / "models" / "Mixtral-8x7B.yaml").read_text()
    profile.write_text(text)
    arguments = ["simulate", "--model", profile, "--hardware", "H100", "--nodes", 1, "--redundant", "0,8",
                 "--windows", 4, "-p", "greedy", "--window", "10,20", "--jobs", 1]  # fmt: skip
    code, out, _ = call(*arguments, "--json")
    content = json.loads(out)
    assert code == 0
    assert len(content["rows"]) == 2 * 2 * 3
    assert {row["num_slots"] for row in content["rows"]} == {8, 16}
    assert all(row["tokens_per_s"] > 0 for row in content["rows"])
    ceiling = [row for row in content["rows"] if row["policy"] == "perfect"]
    floor = [row for row in content["rows"] if row["policy"] == "do nothing"]
    assert all(c["tokens_per_s"] >= f["tokens_per_s"] for c, f in zip(ceiling, floor, strict=True))
    code, out, _ = call(*arguments, "--html", tmp_path / "s.html")
    assert "Most tokens per second and rank" in out
    assert '"sweep":{' in (tmp_path / "s.html").read_text()


def test_simulate_lists_its_loads() -> None:
    code, out, _ = call("simulate", "--list-loads")
    assert code == 0
    assert "bursts" in out


def test_a_recorded_load_can_be_simulated(tmp_path: Path) -> None:
    from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace

    load = SyntheticLoad(num_windows=4, num_layers=32, num_logical=8, topk=2, tokens_per_step=256)
    write_trace(synthetic_trace(load), tmp_path / "[red]t.npz")
    code, out, _ = call("simulate", "--model", "Mixtral-8x7B", "--hardware", "H100", "--nodes", "1", "--trace",
                        tmp_path / "[red]t.npz", "-p", "greedy", "--redundant", "8")  # fmt: skip
    assert code == 0
    assert "[red]t.npz" in out


def test_replay_prices_steps_as_the_ranks_serve(tmp_path: Path) -> None:
    from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace

    load = SyntheticLoad(num_windows=3, num_layers=32, num_logical=8, topk=2, tokens_per_step=65536, phase="prefill")
    write_trace(synthetic_trace(load), tmp_path / "t.npz")
    command = ["replay", tmp_path / "t.npz", "-p", "static", "--model", "Mixtral-8x7B", "--hardware", "H100", "--ranks",
               8, "--phase", "prefill", "--no-curve", "--json"]  # fmt: skip
    whole, part = (
        json.loads(call(*command, *more)[1])
        for more in ([], ["--overlap", "none", "--utilisation", 0.5, "--cache-hit", 0.25, "--engine", "ideal"])
    )
    perfect = [report["policies"][-1] for report in (whole, part)]
    per_step = [row["tokens_per_s"] * row["step_s"] for row in perfect]
    assert per_step[1] == pytest.approx(per_step[0] * 0.5 / 0.75)
    assert part["conditions"]["prices"].endswith("no overlap, steps 50% of the time, 25.0% of prompts cached")
    assert "by ideal" in part["conditions"]["prices"]


def test_replay_takes_the_top_k_that_a_trace_lacks_from_the_model(tmp_path: Path) -> None:
    from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace

    load = SyntheticLoad(num_windows=3, num_layers=32, num_logical=8, topk=2, tokens_per_step=256)
    write_trace(replace(synthetic_trace(load), topk=None), tmp_path / "t.npz")
    code, out, _ = call("replay", tmp_path / "t.npz", "-p", "static", "--model", "Mixtral-8x7B", "--hardware", "H100",
                        "--ranks", 8, "--no-curve", "--json")  # fmt: skip
    report = json.loads(out)
    assert code == 0
    assert report["conditions"]["model"].endswith("top 2")
    assert "tokens/s" not in report["missing"]
    assert all(row["tokens_per_s"] > 0 for row in report["policies"])


@pytest.mark.parametrize("script", ["tools/replay_load.py", "tools/simulate_balancer.py"])
def test_the_script_doors_open_without_torch(script: str) -> None:
    root = Path(__file__).parents[3]
    code = (
        f"import runpy, sys; sys.argv = [{script!r}, '--help']\n"
        f"try: runpy.run_path({script!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--html" in done.stdout


def test_a_replay_is_compared_with_an_earlier_report(tmp_path: Path) -> None:
    _, out, _ = call("replay", *DEMO, "-p", "greedy", "--no-curve", "--json")
    (tmp_path / "before.json").write_text(out)
    again = ["replay", *DEMO, "-p", "greedy", "--no-curve", "--against", tmp_path / "before.json"]
    code, out, _ = call(*again, "--html", tmp_path / "r.html")
    assert code == 0
    assert out.endswith("greedy: as before.\n")
    assert '"against":{"name":"before.json"' in (tmp_path / "r.html").read_text()
    assert json.loads(call(*again, "--json")[1])["against"]["verdict"] == ["greedy: as before."]

    (tmp_path / "before.json").write_text("{}")
    code, out, err = call(*again)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --against {tmp_path / 'before.json'} has format None")


def test_a_log_cannot_be_compared_with_a_report(tmp_path: Path) -> None:
    (tmp_path / "before.json").write_text(call("replay", *DEMO, "-p", "static", "--no-curve", "--json")[1])
    (tmp_path / "server.log").write_text(
        "EPLB step: 10 for model m: avg_tokens=50.00, max_tokens=100, balancedness=0.5000, steps until the next\n"
    )
    code, out, err = call("replay", tmp_path / "server.log", "--against", tmp_path / "before.json")
    assert (code, out) == (2, "")
    assert "is a log; leave --against out" in err


def test_roofline_says_what_bounds_each_kernel_and_its_file_prices_a_simulation(tmp_path: Path) -> None:
    saved = tmp_path / "steps.json"
    code, out, err = call("roofline", "DeepSeek-V3", "--hardware", "H200", "--ranks", 32, "--save", saved)
    assert (code, err) == (0, "")
    for words in ("decode, 128 tokens a rank, 4,096 in the cache, 32 ranks", "grouped_gemm 7168 x 4096", "bound by"):
        assert words in out
    report = json.loads(call("roofline", saved, "--ranks", 32, "--hardware", "H200", "--json")[1])
    assert (report["model"], report["chip"]) == ("DeepSeek-V3", "H200")
    assert len(report["kernels"]) == len(load_steps("DeepSeek-V3").step("decode", 32).kernels)
    longest = [max(each[f"{name}_us"] for name in ("memory", "compute", "launch")) for each in report["kernels"]]
    assert report["step_us"] == pytest.approx(sum(longest))
    attend = next(each for each in report["kernels"] if (each["kernel"], each["times"]) == ("attend", 58))
    assert attend["num_bytes"] == 58 * 128 * (278528 + 4097 * 1152)  # queries and results, and each latent once
    assert attend["memory_us"] == pytest.approx(1e6 * attend["num_bytes"] / 4.8e12)
    prefill = json.loads(call("roofline", "DeepSeek-V3", "--phase", "prefill", "--json")[1])
    assert (prefill["tokens"], prefill["num_ranks"]) == (16384, 8)
    rows = [
        json.loads(call("simulate", "--engine", engine, "--windows", 3, "-p", "greedy", "--jobs", 1, "--json")[1])[
            "rows"
        ]
        for engine in (saved, "moe_serve", "ideal")
    ]
    times = [[row["step_s"] for row in each] for each in rows]
    assert times[0] == times[1] != times[2]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["DeepSeek-V9"], "no steps of 'DeepSeek-V9' are recorded"),
        (["DeepSeek-V3", "--phase", "both"], "give decode or prefill"),
        (["DeepSeek-V3", "--ranks", "300"], "256 experts are spread over at most 256 ranks, not 300"),
        (["DeepSeek-V3", "--hardware", "H900"], "no hardware profile 'H900'"),
        (["DeepSeek-V3", "--save", "/nowhere/steps.json"], "there is no folder /nowhere"),
        (["DeepSeek-V3", "--redundant", "32"], "are recorded already, and --redundant and --cache change what is"),
    ],
)
def test_mistakes_of_roofline_are_one_line(arguments: list[str], words: str) -> None:
    code, out, err = call("roofline", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_roofline_records_a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_serve.roofline import record

    monkeypatch.setattr(record, "STEPS", record.STEPS[:2])  # tests/roofline records prefills
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 256, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 16384, "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    forms = "--redundant", 4, "--cache", "int8", "--save", tmp_path / "steps.json"
    code, out, _ = call("roofline", tmp_path, "--ranks", 2, "--json", *forms)
    assert code == 0
    kernels = {each["kernel"]: each for each in json.loads(out)["kernels"]}
    assert {"grouped_gemm 64 x 192", "dispatch_send", "attend", "mm 64 x 256", "split_replicas"} < kernels.keys()
    assert kernels["split_replicas"]["launches"] == 2  # one in each layer
    of_slot = 2 * 2 * 16 + 2 * 2 * 4  # keys and values of two heads of 16, with their scales
    assert kernels["attend"]["num_bytes"] == 2 * 128 * (2 * 2 * 64 + 4097 * of_slot)
    steps = load_steps(tmp_path / "steps.json")
    assert (steps.redundant, steps.cache, steps.slots_per_rank(2), steps.slots_per_rank(1)) == (4, "int8", 4, 4)
    assert "4 redundant experts, KV cache in int8" in call("roofline", tmp_path / "steps.json", "--ranks", 2)[1]
