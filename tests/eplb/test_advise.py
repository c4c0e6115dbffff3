"""Advice: served as a replay serves, memory as models publish it, confidence that follows noise, usable commands."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.config.reading import load_config
from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.files.windows import cut_stretches
from moe_serve.eplb.load import LoadTrace
from moe_serve.eplb.policies.make import plan
from moe_serve.eplb.replay.advice_page import advice_to_html
from moe_serve.eplb.replay.advise import (
    IN_ORDER,
    LEAST_BLOCKS,
    ONCE,
    AdviseSettings,
    Choice,
    Memory,
    advice_to_json,
    advice_to_table,
    advise,
    blocks_of,
    commands,
    joined,
    low_latency_bytes,
    memory_of,
    served_range,
    weigh,
)
from moe_serve.eplb.replay.costs import ProfileCosts, Serving
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.errors import ConfigError, TraceError
from moe_serve.topology import Topology
from tests.browser import BROWSER, browser_page

DEMO, H800, TOPOLOGY = load_model_profile("demo"), load_hardware("H800"), Topology(1, 8)
LOAD = SyntheticLoad("lognormal", 12, DEMO.num_moe_layers, DEMO.num_logical, DEMO.topk, 1, 1.0, rho=0.9,
                     tokens_per_step=4096, steps_per_window=10)  # fmt: skip


def settings_of(intervals=(1, 3), context=64.0, drafts=0, acceptance=0.0, **more):
    serving = Serving(context=context, drafts=drafts, acceptance=acceptance)
    costs = ProfileCosts(CostModel(H800, DEMO, TOPOLOGY), serving)
    replayed = ReplaySettings(TOPOLOGY, TOPOLOGY.num_ranks, intervals=intervals, costs=costs)
    return AdviseSettings(replayed, H800, **{"policies": ("incremental",), "redundant": (0, 8), **more})


@pytest.fixture(scope="module")
def advice():
    return advise(synthetic_trace(LOAD), settings_of(gpu_hour_price=2.0))


@pytest.mark.parametrize(
    "name, billions", [("DeepSeek-V3", 671), ("Kimi-K2", 1026), ("Mixtral-8x7B", 46.7), ("Qwen3-235B-A22B", 235),
                       ("Qwen3-30B-A3B", 30.5)]
)  # fmt: skip
def test_weights_of_a_rank_are_the_parameters_that_models_publish(name, billions):
    model = replace(load_model_profile(name), weight_bytes=2.0)
    experts = model.num_moe_layers * model.num_logical * model.expert_bytes
    assert (experts + model.other_bytes) / 2e9 == pytest.approx(billions, rel=0.005)


def test_memory_that_is_published_elsewhere():
    assert load_model_profile("DeepSeek-V3").kv_token_bytes == pytest.approx(576 * 61 * 2, rel=0.001)
    assert low_latency_bytes(288, 128, 7168) == pytest.approx(2.15e9, rel=0.005)  # DeepEP's size hint


def test_each_choice_serves_what_a_replay_of_the_same_windows_serves(advice):
    records = tuple(synthetic_trace(LOAD))
    trace = LoadTrace.of(records, topk=DEMO.topk)
    start = plan(records[0].tokens, TOPOLOGY, 40).placement
    costs = settings_of().replay.costs
    again = replay(trace, ["incremental"], ReplaySettings(TOPOLOGY, 40, start, intervals=(3,), costs=costs))
    choice = next(c for c in advice.choices if (c.policy, c.interval, c.num_slots) == ("incremental", 3, 40))
    assert choice.summary == again.summary(again.policies[0]) | {"policy": choice.summary["policy"]}
    assert choice.seconds.sum() == pytest.approx(again.total_seconds(again.policies[0]))


def test_every_choice_is_there_and_more_slots_take_memory_from_the_cache(advice):
    kinds = [(IN_ORDER, None), (ONCE, None), ("incremental", 1), ("incremental", 3)]
    assert [(c.policy, c.interval) for c in advice.choices] == kinds + kinds[1:]
    few, many = advice.choices[1].memory, advice.choices[-1].memory
    assert many.redundant == DEMO.num_moe_layers * DEMO.expert_bytes
    lost = many.experts - few.experts + many.buffers - few.buffers
    assert few.kv_tokens - many.kv_tokens == pytest.approx(lost / DEMO.kv_token_bytes, abs=1)
    served = {(c.policy, c.interval, c.num_slots): c.summary["served_mean"] for c in advice.choices}
    assert served[IN_ORDER, None, 32] < served["incremental", 1, 32] < served["incremental", 1, 40]


def test_an_interval_longer_than_the_trace_is_left_out():
    found = advise(synthetic_trace(replace(LOAD, num_windows=4)), settings_of(intervals=(1, 3, 4), redundant=(8,)))
    assert {each.interval for each in found.choices} == {None, 1, 3}


def test_money_is_ranks_times_hours(advice):
    row = advice_to_json(advice, "load.npz", "demo")["advised"]
    assert row["price_per_million_tokens"] == pytest.approx(2 * row["gpu_hours_per_million_tokens"])
    assert row["gpu_hours_per_million_tokens"] == pytest.approx(1e6 / row["tokens_per_s_per_rank"] / 3600)


def test_a_request_with_drafts_gets_more_tokens_and_takes_the_cache_once_for_all_its_rows():
    trace, few = synthetic_trace(replace(LOAD, num_windows=4)), {"intervals": (1,), "redundant": (0,)}
    rows = LOAD.tokens_per_step / TOPOLOGY.num_ranks  # of a rank in each step: a request has 1 or 4 of them
    memory = memory_of(settings_of(), DEMO, 32, 32, rows)
    few["context"] = 0.99 * memory.kv_tokens / (rows / 4)
    plain, drafted = (advise(trace, settings_of(**few, drafts=drafts, acceptance=0.5)) for drafts in (0, 3))
    assert (plain.advised.fits, drafted.advised.fits) == (False, True)
    assert drafted.advised.memory == memory, "buffers have room for all rows"
    row = advice_to_json(drafted, "load.npz", "demo")["advised"]
    tokens = 1 + 0.5 + 0.25 + 0.125
    assert row["tokens_per_s_per_request"] == pytest.approx(tokens / row["step_s"])
    assert row["tokens_per_s_per_rank"] == pytest.approx(row["tokens_per_s_per_request"] * rows / 4, rel=0.01)


def test_the_report_is_json_and_a_table_of_the_same_choices(advice):
    found = json.loads(json.dumps(advice_to_json(advice, "load.npz", "demo"), allow_nan=False))
    table = advice_to_table(advice, "load.npz", "demo")
    assert len(found["choices"]) == len(advice.choices)
    assert all(sentence in table for sentence in found["verdict"])
    assert all(line in table for lines in found["commands"].values() for line in lines)


@pytest.fixture(scope="module")
def sure():
    """Of enough windows for confidence."""
    return advise(synthetic_trace(replace(LOAD, num_windows=8)), settings_of(intervals=(1,), gpu_hour_price=2.0))


def data_of(page):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def test_the_page_holds_the_numbers_of_the_json_report(sure):
    page = advice_to_html(sure, "load.npz", "demo")
    data, found = data_of(page), json.loads(json.dumps(advice_to_json(sure, "load.npz", "demo")))
    assert data["conditions"] == [list(pair) for pair in found.pop("conditions").items()]
    assert {name: data[name] for name in found} == found
    best, rows = found["advised"], [dict(zip(data["columns"], cells, strict=True)) for cells in data["rows"]]
    assert [row["policy"] for row in rows] == [row["policy"] for row in found["choices"]]
    shown = rows[data["kinds"].index("advised")]
    assert shown["redundant"] == str(best["num_redundant"])
    assert best["served_low"] < best["served_mean"] < best["served_high"]
    assert shown["90 %"] == f"{best['served_low']:.3f} to {best['served_high']:.3f}"
    assert shown["KV lost"] == f"{best['kv_tokens_lost']:,}"
    assert float(shown["price/M"]) == pytest.approx(best["price_per_million_tokens"], rel=0.01)
    values = [card["value"] for card in data["cards"]]
    assert values[:3] == [str(best["num_redundant"]), f"{best['served_mean']:.3f}", f"{found['gain']['mean']:+.1%}"]
    assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest", page)
    unpriced = data_of(advice_to_html(replace(sure, gpu_hour_price=None, confidence=None), "load.npz", "demo"))
    assert "price/M" not in unpriced["columns"]
    assert unpriced["cards"][-1]["value"] == "n/a"
    still = data_of(advice_to_html(replace(sure, advised=sure.baseline), "load.npz", "demo"))
    assert "experts in order" not in str(still["cards"])


def test_a_page_of_an_advice_cannot_be_broken_out_of(sure):
    evil = replace(sure, conditions={"trace": "</script><script>alert(1)</script>"})
    page = advice_to_html(evil, "<b>{{data}}.npz", "<script>alert(2)</script>")
    assert "<script>alert" not in page
    assert "<title>Advice for &lt;b&gt;{{data}}.npz</title>" in page
    assert "<script>alert(2)</script>" in data_of(page)["commands"]["moe-serve"][-1]


@pytest.mark.slow
def test_a_browser_draws_an_advice_and_copies_a_command(sure, tmp_path: Path):
    trace, model = f"{'long_name' * 8}.npz", "a & <b>"
    (tmp_path / "page.html").write_text(advice_to_html(sure, trace, model), encoding="utf-8")
    command = "\n".join(advice_to_json(sure, trace, model)["commands"]["SGLang"])

    async def look() -> None:
        allowed = {"permissions": ["clipboard-read", "clipboard-write"]}
        async with browser_page((tmp_path / "page.html").as_uri(), width=400, **allowed) as page:
            await page.shows("#verdict", f"Take {sure.advised.num_redundant} redundant experts")
            assert await page.page.locator("#choices tbody tr").count() == len(sure.choices)
            assert await page.page.locator("#served svg circle").count() == len(sure.choices)
            assert await page.page.locator("#served .interval").count() == 2, "one for each number of slots"
            assert await page.page.locator("#speed svg circle").count() == len(sure.choices)
            assert await page.page.evaluate("document.documentElement.scrollWidth") == 400
            await page.page.click("#commands .command:has-text('SGLang') button")
            await page.shows("#commands .command:has-text('SGLang')", "copied")
            assert await page.page.evaluate("navigator.clipboard.readText()") == command
            assert page.problems == []

    BROWSER.run(look())


def test_the_range_of_what_is_served_follows_its_noise():
    blocks = [np.arange(2 * i, 2 * i + 2) for i in range(20)]
    noise = np.random.default_rng(1).standard_normal(40)
    assert served_range(np.full(40, 0.75), blocks) == (0.75, 0.75)
    ranges = [served_range(0.7 + scale * noise, blocks) for scale in (0.01, 0.1)]
    assert all(low < 0.7 + scale * noise.mean() < high for (low, high), scale in zip(ranges, (0.01, 0.1), strict=True))
    assert np.diff(ranges[1]) == pytest.approx(10 * np.diff(ranges[0]))
    assert served_range(noise, blocks[: LEAST_BLOCKS - 1]) is None


def choice(seconds, slots=32, fits=True, moves=0, policy="incremental", interval=3):
    memory = Memory(1000, 100, 0, 100, 0, 1)
    return Choice(slots, slots - 32, policy, interval, {"moves": moves}, np.asarray(seconds, float), None, memory, fits)


def test_the_smallest_choice_near_the_best_one_is_advised_and_noise_lowers_confidence():
    blocks = [np.array([i]) for i in range(40)]
    even = np.ones(40)
    base, small, large = choice(even * 1.2), choice(even * 0.904, 32), choice(even * 0.9, 64)
    assert weigh([base, small, large], blocks)[0] is small
    clear = choice(even * 0.8, 64)
    best, sure, (gain, low, high) = weigh([base, small, clear], blocks)
    assert (best, sure) == (clear, 1.0)
    assert (gain, low, high) == pytest.approx((0.5, 0.5, 0.5))
    noisy = choice(0.9 + 0.4 * np.random.default_rng(0).standard_normal(40), 64)
    assert weigh([base, small, noisy], blocks)[1] < 0.9
    assert weigh([base, small, clear], blocks[: LEAST_BLOCKS - 1])[1] is None


def test_what_does_not_fit_is_not_advised():
    even = np.ones(4)
    blocks = [np.arange(4)]
    small = choice(even, 32)
    assert weigh([choice(even * 2), small, choice(even * 0.5, 64, fits=False)], blocks)[0] is small


def test_requests_without_room_in_the_cache_are_named():
    found = advise(synthetic_trace(LOAD), settings_of(context=1e7))
    assert not any(each.fits for each in found.choices)
    words = advice_to_table(found, "load.npz", "demo")
    rows = LOAD.tokens_per_step / TOPOLOGY.num_ranks
    assert f"No choice leaves room for the requests of the trace, which need {rows * 1e7:,.0f} tokens" in words
    assert "do not fit (!)" not in words, "nothing else fits either"


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 200), st.integers(1, 64), st.integers(1, 16))
def test_stretches_are_neighbours_spread_over_the_trace(total, num_windows, length):
    records = tuple(
        replace(record, first_step=i) for i, record in enumerate([next(iter(synthetic_trace(LOAD)))] * total)
    )
    stretches = cut_stretches(LoadTrace.of(records), num_windows, length)
    firsts = [[record.first_step for record in stretch] for stretch in stretches]
    assert all(steps == list(range(steps[0], steps[0] + len(steps))) for steps in firsts)
    assert len({len(steps) for steps in firsts}) == 1
    assert [steps[0] for steps in firsts] == sorted({steps[0] for steps in firsts})
    assert len(firsts) == 1 or (firsts[0][0] == 0 and firsts[-1][-1] == total - 1)
    assert sum(len(steps) - 1 for steps in firsts) <= max(num_windows, length)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 16))
def test_blocks_are_neighbours_of_one_stretch_and_hold_every_window_once(scored, length):
    blocks = blocks_of(scored, length)
    assert np.concatenate(blocks).tolist() == list(range(sum(scored)))
    stretch_of = np.repeat(np.arange(len(scored)), scored)
    assert all(len(set(stretch_of[block])) == 1 for block in blocks)
    assert all(len(block) < 2 * length for block in blocks)


def test_stretches_are_joined_window_by_window():
    trace = synthetic_trace(LOAD)
    parts = [LoadTrace.of(tuple(trace)[a:b], topk=DEMO.topk) for a, b in ((0, 5), (5, 12))]
    reports = [replay(part, ["greedy"], ReplaySettings(TOPOLOGY, 40)) for part in parts]
    whole = joined(reports)
    assert joined(reports[:1]).summary(reports[0].best) == reports[0].summary(reports[0].best)
    served = [report.policies[0].served for report in reports]
    assert np.array_equal(whole.policies[0].served, np.concatenate(served))
    assert whole.policies[0].received.sum() == whole.policies[0].moves.sum()
    assert whole.tokens.sum() == sum(report.tokens.sum() for report in reports)


@pytest.mark.parametrize("policy", ["deepseek", "incremental", ONCE])
def test_commands_are_what_engines_take(advice, policy):
    advised = next(c for c in advice.choices if c.num_slots == 40 and c.policy in (policy, "incremental"))
    advised = replace(advised, policy=policy, interval=None if policy == ONCE else 3)
    found = commands(replace(advice, advised=advised), "load.npz", "/models/m")
    vllm, sglang, ours = (shlex.split(found[name][-1]) for name in ("vLLM", "SGLang", "moe-serve"))
    config = json.loads(vllm[vllm.index("--eplb-config") + 1])
    assert config["num_redundant_experts"] == 8
    assert set(config) == {"num_redundant_experts", "window_size", "step_interval"}
    assert ("MOE_SERVE_EPLB=incremental" in vllm) == (policy != "deepseek")
    assert sglang[sglang.index("--ep-num-redundant-experts") + 1] == "8"
    assert vllm[vllm.index("--data-parallel-size") + 1] == "8"
    assert [sglang[sglang.index(f"--{size}-size") + 1] for size in ("tp", "dp", "ep")] == ["8", "8", "8"]
    on_two_nodes = commands(replace(advice, advised=advised, num_nodes=2), "load.npz", "/models/m")
    assert "--ranks 8 --nodes 2 --slots 40" in on_two_nodes["TensorRT-LLM"][0]
    if policy != ONCE:
        assert config["step_interval"] == 30
        assert sglang[sglang.index("--eplb-rebalance-num-iterations") + 1] == "30"
    assert ours[:6] == ["moe-serve", "serve", "--model", "/models/m", "--ep", "8"]
    overrides = [ours[i + 1] for i, word in enumerate(ours) if word == "--set"]
    served = load_config(None, [*overrides, "parallel.num_ranks=8"])
    assert served.eplb.num_redundant_experts == (0 if policy == ONCE else 8)
    for lines in found.values():
        for line in lines:
            assert not re.search(r"\bNone\b|\bnan\b", line)


@pytest.mark.parametrize("policy", ["incremental", ONCE])
def test_commands_have_the_split_that_was_asked_for_and_others_say_that_they_have_none(advice, policy):
    advised = next(c for c in advice.choices if c.num_slots == 40 and c.policy in (policy, "incremental"))
    advised = replace(advised, policy=policy, interval=None if policy == ONCE else 3)
    for split in ("window", "even", "exact", "time"):
        found = commands(replace(advice, advised=advised, split=split), "load.npz", "/models/m")
        own = split in ("exact", "time")
        assert (f"--set eplb.split={split}" in found["moe-serve"][-1]) == own
        assert ("--planned-split exact" in found["moe-serve"][0]) == (own and policy == ONCE)
        for name in ("vLLM", "SGLang", "TensorRT-LLM"):
            assert found[name][0].startswith("# shares tokens evenly over replicas") == own


def test_without_a_gain_eplb_stays_off(advice):
    assert "leave EPLB off" in commands(replace(advice, advised=advice.baseline), "a", "b")["any engine"][0]


def test_what_cannot_be_is_refused():
    with pytest.raises(TraceError, match="at least 3"):
        advise(synthetic_trace(replace(LOAD, num_windows=2)), settings_of())
    with pytest.raises(ConfigError, match="milp"):
        settings_of(policies=("milp",))
    with pytest.raises(ConfigError, match="the profile demo"):
        advise(synthetic_trace(replace(LOAD, num_logical=16)), settings_of())
    with pytest.raises(ConfigError, match="use fewer"):
        advise(synthetic_trace(LOAD), settings_of(redundant=(100_000,)))
