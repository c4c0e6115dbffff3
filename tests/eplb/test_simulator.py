"""Simulations: every combination runs, sizes are checked first, and what does not fit says so."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moe_serve.eplb.cost.kernels import Batch
from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_engine, load_hardware, load_model_profile
from moe_serve.eplb.load import LoadTrace
from moe_serve.eplb.replay.costs import ProfileCosts, Serving
from moe_serve.eplb.replay.simulator import (
    Simulation,
    Sweep,
    best_case,
    simulate,
    sweep_curves,
    sweep_to_json,
    sweep_to_table,
    sweep_verdict,
)
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.errors import ConfigError, TraceError
from moe_serve.topology import Topology

SMALL = Simulation(
    load_model_profile("Mixtral-8x7B"),
    load_hardware("H100"),
    Sweep(nodes=(1, 2), redundant=(0, 8), window_steps=(10,)),
    load=SyntheticLoad(num_windows=3),
    policies=("greedy",),
)


def swept(
    nodes: tuple[int, ...] = (1, 2), slots: tuple[int, ...] = (), redundant: tuple[int, ...] = (0, 8), **more: Any
) -> Simulation:
    return replace(SMALL, sweep=Sweep(nodes, slots, redundant, window_steps=(10,)), **more)


def test_every_combination_runs_in_order() -> None:
    ticks: list[tuple[float, int]] = []
    cases = simulate(SMALL, lambda done, of: ticks.append((done, of)))
    shapes = [(case.topology.num_ranks, case.num_slots) for case in cases]
    assert shapes == [(8, 8), (8, 16), (16, 16)]  # on 16 ranks, 0 and 8 redundant both round up to 16
    assert ticks[-1] == (3, 3)
    assert sorted({done for done, _ in ticks}) == pytest.approx([window / 3 for window in range(1, 10)])
    assert SMALL.sweep.num_cases == 4  # an upper bound, for the progress bar


def test_the_same_simulation_gives_the_same_rows() -> None:
    one, two = (sweep_to_json(simulate(SMALL)) for _ in range(2))
    assert one["best"].pop("timings").keys() == two["best"].pop("timings").keys()
    assert one == two


def test_what_prefill_ranks_hand_over_is_said_by_node_and_of_its_network() -> None:
    prefill = replace(swept(nodes=(2,), redundant=(0,)), serving=Serving(phase="prefill"), tokens_per_rank=8192)
    (case,) = simulate(prefill)
    row = next(case.rows())
    token = 32 * 2 * 8 * 128 * 2  # layers, keys and values, heads, values, bytes
    assert row["handed_over_bytes_per_s"] == pytest.approx(row["tokens_per_s"] / 2 * token)
    assert row["handed_over_of_network"] == pytest.approx(row["handed_over_bytes_per_s"] / 400e9)
    assert any("of its network, sent while layers compute" in sentence for sentence in sweep_verdict([case]))
    slow = prefill.hardware.scaled(nic_bytes_per_s=0.01, node_nic_bytes_per_s=0.01)
    (case,) = simulate(replace(prefill, sweep=Sweep((1,), (), (0,), (10,)), hardware=slow))
    assert any("of its network, for which it would wait" in sentence for sentence in sweep_verdict([case]))
    (decodes,) = simulate(swept(nodes=(2,), redundant=(0,)))
    assert next(decodes.rows())["handed_over_bytes_per_s"] == 0


def test_memory_that_does_not_fit_is_marked() -> None:
    # Mixtral in bf16: 32 layers x 352 MB an expert; 8 slots on one rank are 90 GB.
    cases = simulate(swept(nodes=(1, 2), redundant=(0,), ranks_per_node=1))
    assert [case.fits for case in cases] == [False, True]
    assert cases[0].memory_bytes == 8 * 32 * cases[0].report.expert_bytes  # type: ignore[operator]
    assert best_case(cases) is cases[1]
    assert any("do not fit (!)" in sentence for sentence in sweep_verdict(cases))
    assert "!" in sweep_to_table(cases)


def test_slots_are_checked_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="12 slots on 8 ranks for 8 experts; use a multiple of 8 from 8 on"):
        simulate(swept(slots=(16, 12)))


def test_a_curve_needs_two_points_and_follows_what_was_swept() -> None:
    cases = simulate(SMALL)
    assert sweep_curves(cases[:1]) is None
    curve = sweep_curves(cases)
    assert curve is not None
    assert curve["xLabel"] in ("ranks", "slots")
    assert {line["role"] for line in curve["series"]} == {"floor", "policy", "ceiling"}


def test_more_ranks_serve_more_tokens() -> None:
    cases = simulate(swept(nodes=(1, 4), redundant=(8,), policies=()))
    rates = [row["tokens_per_s"] for case in cases for row in case.rows() if row["policy"] == "perfect"]
    assert rates[1] > rates[0]


def test_a_simulated_step_is_split_as_a_server_splits_it() -> None:
    load = SyntheticLoad(num_windows=3, num_sources=16)
    one_step = replace(SMALL, load=load, sweep=Sweep(nodes=(2,), slots=(32,), window_steps=(1,)))
    rows: dict[str, dict[str, Any]] = {}
    for split in ("even", "nearest", "exact"):
        report = simulate(replace(one_step, split=split))[0].report
        rows[split] = report.summary(report.results[1])
    assert rows["exact"]["served_mean"] >= rows["even"]["served_mean"]
    assert rows["nearest"]["off_node"] < rows["even"]["off_node"]
    with pytest.raises(TraceError, match="--window 1 --sources"):
        simulate(replace(one_step, split="nearest", load=SyntheticLoad(num_windows=3)))


def recorded(topk: int | None = None, idle: range = range(0)) -> LoadTrace:
    """Returns a trace of Mixtral's size; no step has tokens in the windows `idle`."""
    load = SyntheticLoad(num_windows=4, num_layers=32, num_logical=8, topk=2, tokens_per_step=256, steps_per_window=10)
    records = [
        replace(record, tokens=np.zeros_like(record.tokens), per_step=None, num_forwards=0)
        if number in idle
        else record
        for number, record in enumerate(synthetic_trace(load))
    ]
    return LoadTrace.of(records, topk=topk)


def test_a_trace_that_does_not_say_its_top_k_takes_it_from_the_model() -> None:
    said, silent = (sweep_to_json(simulate(replace(SMALL, trace=recorded(topk)))) for topk in (2, None))
    assert silent["rows"] == said["rows"]
    assert silent["verdict"] == said["verdict"]
    assert all(row["tokens_per_s"] > 0 for row in silent["rows"])


def test_a_recorded_trace_is_replayed_in_windows_of_each_length_with_each_interval() -> None:
    sweep = Sweep((1,), redundant=(8,), window_steps=(10, 20))
    cases = simulate(replace(SMALL, trace=recorded(), sweep=sweep, intervals=(1, 2)))
    assert [(case.window_steps, case.report.num_steps.tolist()) for case in cases] == [(10, [10] * 3), (20, [20])]
    names = [{result.name for result in case.report.results} for case in cases]
    assert all({"greedy, every 1", "greedy, every 2"} <= each for each in names), names


def test_a_window_without_steps_does_not_hide_the_times_of_the_others() -> None:
    [case] = simulate(swept(nodes=(1,), redundant=(8,), trace=recorded(idle=range(2, 3))))
    floor, _, ceiling = case.report.results
    assert np.isnan(floor.step_s).tolist() == [False, True, False]
    busy = case.report.tokens > 0
    assert case.report.total_seconds(ceiling) == pytest.approx(10 * ceiling.step_s[busy].sum())
    assert all(row["tokens_per_s"] > 0 for row in case.rows())


def test_without_times_no_combination_is_named_the_fastest_and_the_table_says_what_they_need() -> None:
    cases = simulate(replace(SMALL, trace=recorded(idle=range(4))))
    words = sweep_to_table(cases)
    assert "n/a: step time, tokens/s need windows with steps in the trace" in words
    assert "Most tokens per second" not in words
    assert "Times are not known, so no combination is named as the fastest." in words


def perfect(**more: Any) -> dict[str, Any]:
    """Returns the row of perfect balance of a prefill."""
    serving = Serving(phase="prefill", context=2048, **more)
    [case] = simulate(swept(nodes=(2,), redundant=(8,), tokens_per_rank=8192, serving=serving, policies=()))
    return next(row for row in case.rows() if row["policy"] == "perfect")


def test_overlap_by_itself_takes_the_shorter_of_both_steps() -> None:
    steps = {name: perfect(overlap=name)["step_s"] for name in ("none", "two-batch", "auto")}
    assert steps["auto"] == min(steps["none"], steps["two-batch"])
    assert steps["none"] != steps["two-batch"]


def test_ranks_that_wait_serve_less_and_cached_prompts_more() -> None:
    full, half, cached = perfect(), perfect(utilisation=0.5), perfect(cache_hit=0.5)
    assert half["step_s"] == full["step_s"]
    assert half["tokens_per_s"] == pytest.approx(full["tokens_per_s"] / 2)
    assert full["step_s"] < cached["step_s"] < 1.2 * full["step_s"]
    assert cached["tokens_per_s"] == pytest.approx(2 * full["tokens_per_s"] * full["step_s"] / cached["step_s"])


def test_serving_that_cannot_be_is_refused() -> None:
    for wrong, words in (
        ({"overlap": "some"}, "one of auto, none, two-batch"),
        ({"utilisation": 0.0}, "above 0 to 1"),
        ({"cache_hit": 1.0}, "0 to below 1"),
        ({"phase": "both"}, "prefill, decode or mixed"),
        ({"phase": "mixed"}, "tokens of an answer"),
        ({"answer": 512.0}, "tokens of an answer"),
    ):
        with pytest.raises(ConfigError, match=words):
            Serving(**wrong)  # type: ignore[arg-type]


def decoding(**more: Any) -> dict[str, Any]:
    """Returns the row of a perfect balance of decode steps of 256 rows a rank."""
    serving = Serving(phase="decode", context=4096, overlap="none", **more)
    cases = simulate(swept(nodes=(1,), redundant=(0,), serving=serving, tokens_per_rank=256))
    return next(row for row in cases[0].rows() if row["policy"] == "perfect")


def test_drafts_serve_the_tokens_that_are_right_and_read_the_cache_of_a_request_once() -> None:
    plain = decoding()
    for drafts, acceptance, tokens in ((1, 0.6, 1.6), (3, 0.5, 1.875), (2, 0.0, 1.0), (2, 1.0, 3.0)):
        drafted = decoding(drafts=drafts, acceptance=acceptance)
        assert drafted["step_s"] < plain["step_s"], "as many rows, of fewer requests"
        per_row = tokens / (1 + drafts)
        assert drafted["tokens_per_s"] * drafted["step_s"] == pytest.approx(
            per_row * plain["tokens_per_s"] * plain["step_s"]
        )


def test_drafts_that_cannot_be_are_refused_and_reports_name_them() -> None:
    for wrong in ({"drafts": -1}, {"drafts": 1, "acceptance": 1.5}, {"acceptance": -0.1}):
        with pytest.raises(ConfigError, match="chance from 0 to 1"):
            Serving(**wrong)  # type: ignore[arg-type]
    assert "2 drafts a request, 50% right: 1.75 tokens a step" in Serving(drafts=2, acceptance=0.5).words()


def test_batches_of_prompts_and_answers_hold_as_many_rows_of_each_as_requests_bring() -> None:
    serving = Serving(phase="mixed", context=3584, answer=512.0, overlap="none")
    assert serving.decode_share == 0.125
    assert "prompts of 3,584 tokens and answers of 512 (12% of the rows decode)" in serving.words()
    drafted = replace(serving, drafts=1, acceptance=0.6, cache_hit=0.5)
    assert drafted.decode_share == pytest.approx(640 / (640 + 1792)), "1.6 tokens for two rows; half of a prompt is new"

    def row(serving: Serving) -> dict[str, Any]:
        swept_once = swept(nodes=(1,), redundant=(0,), serving=serving, tokens_per_rank=2048, policies=())
        return next(row for row in simulate(swept_once)[0].rows() if row["policy"] == "perfect")

    mixed, prompts = row(serving), row(Serving(phase="prefill", context=3584, overlap="none"))
    assert mixed["tokens_per_s"] * mixed["step_s"] == pytest.approx(2048 * 8)
    assert mixed["step_s"] > prompts["step_s"], "decodes read a cache for each of their rows"
    assert mixed["handed_over_bytes_per_s"] == 0
    served = row(drafted)["tokens_per_s"] * row(drafted)["step_s"] / (2048 * 8)
    assert served == pytest.approx(drafted.decode_share * 0.8 + (1 - drafted.decode_share) * 2)
    ours = replace(SMALL, serving=serving, engine=load_engine("moe_serve"))
    with pytest.raises(ConfigError, match="recorded of prompts and of decodes, not of both"):
        simulate(ours)


def test_whole_prompts_are_computed_in_few_steps_beside_all_decodes() -> None:
    serving = Serving(phase="mixed", context=1024, answer=2048.0, overlap="none")
    model = load_model_profile("DeepSeek-V3")
    chunks, whole = (
        ProfileCosts(CostModel(load_hardware("H200"), model, Topology(1, 8), engine), serving)
        for engine in (load_engine("ideal"), replace(load_engine("ideal"), prompts="whole"))
    )

    def tokens(rows: float) -> Any:
        return np.full((model.num_moe_layers, 256), 8 * rows * 8 / 256)

    def seconds(costs: ProfileCosts, rows: float) -> float:
        return costs.step_seconds(tokens(rows), None, 256, 8 * rows, "mixed")

    decodes = Batch("decode", 128, 2048)
    both = Batch("mixed", 1152, 1024, decode_share=1 / 9, decode_context=2048)
    one, other = (whole.seconds_of(batch, tokens(batch.tokens_per_rank), None, 256) for batch in (decodes, both))
    assert seconds(whole, 192) == pytest.approx((15 * one + other) / 16), "a prompt comes every 16 steps"
    assert seconds(whole, 192) > seconds(chunks, 192)
    assert seconds(whole, 3072) == seconds(chunks, 3072), "each step has a prompt"
    with pytest.raises(ConfigError, match="give whole, or leave it out"):
        replace(load_engine("ideal"), prompts="half")
