"""Records of a served load against the log of the scheduler: whose tokens, of which phase, and nothing else."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.engine import Engine
from moe_serve.engine.model.load_windows import LoadWindows
from moe_serve.engine.step.plan import StepPlan
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from tests.engine.offline import Served, prompts_with_shared_beginnings, serve, submits_of
from tests.ranks import run_ranks

TOPK = 4  # of the demo model
PARAMS = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)


def check_against_the_scheduler(served: Served, num_ranks: int) -> None:
    """Every record holds the rows that each rank's scheduler committed in its steps, topk times in every layer."""
    assert sum(record.num_steps for record in served.records) == served.num_steps
    for record in served.records:
        steps = range(record.first_step, record.first_step + record.num_steps)
        rows = [[served.rows[rank].get(step, (0, 0)) for step in steps] for rank in range(num_ranks)]
        assert record.by_source is not None
        assert record.by_source.shape == (4, num_ranks, 32)
        for rank in range(num_ranks):
            assert (record.by_source[:, rank].sum(1) == TOPK * np.sum(rows[rank])).all(), (steps, rank)
        assert np.array_equal(record.tokens, record.by_source.sum(1))
        decodes, prefills = np.array(rows).sum(0).T
        phases = {
            "mixed" if decode and prefill else "decode" if decode else "prefill"
            for decode, prefill in zip(decodes, prefills, strict=True)
            if decode or prefill
        }
        assert record.phase == (phases.pop() if len(phases) == 1 else "mixed")
        assert (record.step_time_s is None) == (not record.tokens.any())
        assert record.num_forwards == np.count_nonzero(np.sum(rows, axis=(0, 2)))


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        (1, ("eplb.record_window_steps=1",)),
        (2, ("dispatch.backend=low_latency", "dispatch.max_tokens_per_rank=6")),
        (2, ("dispatch.backend=collective", "eplb.num_redundant_experts=4")),
    ],
    ids=["one rank", "a transport that gathers", "a process group"],
)
def test_records_are_what_the_schedulers_ran(num_ranks: int, overrides: Sequence[str]) -> None:
    requests = submits_of(prompts_with_shared_beginnings(10, 2048, 30), PARAMS)
    served = serve(num_ranks, requests, ["eplb.record_window_steps=3", *overrides], stagger=7)
    check_against_the_scheduler(served, num_ranks)
    phases = {record.phase for record in served.records}
    assert phases == {"decode", "prefill", "mixed"} if num_ranks == 1 else "decode" in phases


def test_an_idle_rank_and_idle_steps_count_nothing() -> None:
    requests = submits_of([[5, 6, 7], [8]], replace(PARAMS, max_new_tokens=9))
    served = serve(2, requests[:1], ["eplb.record_window_steps=1"])
    check_against_the_scheduler(served, 2)
    assert all(not record.by_source[:, 1].any() for record in served.records if record.by_source is not None)
    last = served.records[-1]  # of the step in which the engine stops
    assert (last.phase, last.step_time_s, int(last.tokens.sum())) == ("mixed", None, 0)


def nothing_counts(engine: Engine) -> None:
    served = engine.served
    assert served.recorder is None
    assert served.trace is None


def test_mode_off_counts_nothing_and_closes_no_window() -> None:
    requests = submits_of(prompts_with_shared_beginnings(4, 2048, 20), PARAMS)
    overrides = ["eplb.record_window_steps=3", "eplb.num_redundant_experts=4"]
    recorded = serve(2, requests, overrides)
    served = serve(2, requests, [*overrides, "eplb.mode=off"], prepare=nothing_counts)
    assert served.records == []
    assert served.tokens == recorded.tokens
    assert recorded.records


def plan(step: int, phase: str = "decode", **fields: Any) -> StepPlan:
    idle = phase == "idle"
    defaults: dict[str, Any] = {"max_tokens": int(not idle), "num_chunks": 1, "overlap": False, "hold_prefill": False}
    defaults |= {"close_window": False, "sleep": idle, "stop": False}
    return StepPlan(step=step, phase=phase, **(defaults | fields))


def windows_of_one_rank(records: list[LoadRecord]) -> tuple[LoadWindows, LoadRecorder]:
    recorder = LoadRecorder(1, 4, EpGroup(0, 1, torch.device("cpu")))
    windows = LoadWindows(recorder, Placement.trivial(1, 4, 1, 4), "m")
    windows.listeners.append(records.append)
    return windows, recorder


def run_step(windows: LoadWindows, recorder: LoadRecorder, plan: StepPlan, step_s: float = 0.01) -> None:
    windows.begin_step(plan)
    if plan.runs_forward:
        recorder.row(0).add_(torch.tensor([1, 0, 0, 0]))
        recorder.step_done()
    windows.end_step(plan, step_s)


def test_a_record_that_is_dropped_goes_on_with_its_phase_and_its_counts() -> None:
    records: list[LoadRecord] = []
    windows, recorder = windows_of_one_rank(records)
    run_step(windows, recorder, plan(0, "prefill"))
    run_step(windows, recorder, plan(1, "prefill", close_window=True))
    recorder.void_step()  # before the exchange of step 2 has ended
    windows.void()
    run_step(windows, recorder, plan(2, "decode", close_window=True))
    run_step(windows, recorder, plan(3, "decode", close_window=True, stop=True))
    assert [(r.first_step, r.num_steps, r.phase, int(r.tokens.sum())) for r in records] == [
        (0, 3, "mixed", 3),
        (3, 1, "mixed", 0),
    ]


def test_a_rank_that_rejoins_drops_what_it_had_closed_with_the_group_before() -> None:
    records: list[LoadRecord] = []
    windows, recorder = windows_of_one_rank(records)
    run_step(windows, recorder, plan(0, close_window=True))
    windows.rejoin(50)
    windows.confirm()
    assert records == []
    run_step(windows, recorder, plan(50, close_window=True))
    windows.confirm()
    assert [(record.first_step, record.num_steps) for record in records] == [(50, 1)]


def test_the_time_of_a_step_leaves_out_idle_steps() -> None:
    records: list[LoadRecord] = []
    windows, recorder = windows_of_one_rank(records)
    run_step(windows, recorder, plan(0, "decode"), 0.5)
    run_step(windows, recorder, plan(1, "idle"), 7.0)
    run_step(windows, recorder, plan(2, "decode", close_window=True), 1.5)
    windows.confirm()
    assert [(record.phase, record.step_time_s) for record in records] == [("decode", 1.0)]


def test_listeners_hear_of_a_record_in_order_and_only_once_it_is_final() -> None:
    heard: list[str] = []
    windows, recorder = windows_of_one_rank([])
    windows.listeners += [lambda record: heard.append("trace"), lambda record: heard.append("balancer")]
    windows.at_end.append(lambda: heard.append("end"))
    run_step(windows, recorder, plan(0, close_window=True))
    assert heard == []
    run_step(windows, recorder, plan(1))
    assert heard == ["trace", "balancer"]
    run_step(windows, recorder, plan(2, "idle", close_window=True, stop=True))
    assert heard == ["trace", "balancer"] * 2 + ["end"]


def _gather_counts(rank: int, group: EpGroup) -> list[list[list[list[int]]]]:
    recorder = LoadRecorder(2, 3, group)
    taken = []
    for window in (1, 2):
        recorder.row(1).add_((rank + window) * (torch.arange(3) == rank))
        taken.append(recorder.take().by_source.tolist())
    return taken


def test_the_process_group_brings_the_rows_of_each_rank() -> None:
    for taken in run_ranks(2, _gather_counts):
        for window, counts in enumerate(taken, 1):
            assert counts == [[[0, 0, 0], [0, 0, 0]], [[window, 0, 0], [0, 1 + window, 0]]]


def void_once(engine: Engine) -> None:
    """Voids the third forward behind its gates, which then runs again, and fails where a record is made."""
    served, forward, calls = engine.served, engine.served.forward, [0]

    def voided(batch: ForwardBatch, num_chunks: int, overlap: bool = False) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            assert served.recorder is not None
            served.recorder.row(0).add_(1)
            served.void_step()
        return forward(batch, num_chunks, overlap)

    served.forward = voided  # type: ignore[method-assign]


def test_experts_are_counted_for_drafts_where_no_load_is_recorded() -> None:
    requests = submits_of([[5, 6, 7, 8, 9] * 3, [9, 8, 7] * 5], replace(PARAMS, max_new_tokens=24))
    drafting = ["eplb.record_window_steps=3", "speculation.mode=lookup"]
    recorded = serve(1, requests, drafting)
    served = serve(1, requests, [*drafting, "eplb.mode=off"], prepare=void_once)
    assert (served.tokens, served.records) == (recorded.tokens, [])
    counts = {name: number for name, number in served.counters.items() if name.startswith("num_decodes_")}
    assert counts == {name: recorded.counters[name] for name in counts}
    assert counts["num_decodes_with_drafts_experts"] > 0 < counts["num_decodes_without_experts"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_records_count_the_experts_that_decode_steps_ask_for_with_drafts_and_without(num_ranks: int) -> None:
    prompts = [[5, 6, 7, 8, 9] * 3, [9, 8, 7] * 5, list(range(30, 50))]
    requests = submits_of(prompts, replace(PARAMS, max_new_tokens=24))
    plain, drafted = (
        serve(num_ranks, requests, ["eplb.record_window_steps=1", f"speculation.mode={mode}"])
        for mode in ("off", "lookup")
    )
    assert plain.tokens == drafted.tokens
    for served in (plain, drafted):
        counts = [record.decodes for record in served.records]
        for record, each in zip(served.records, counts, strict=True):
            assert each is not None
            assert record.by_source is not None
            asked = np.count_nonzero(record.by_source) if record.phase == "decode" else 0
            assert each.with_drafts.experts + each.without.experts == asked
            assert each.with_drafts.steps + each.without.steps == (
                record.by_source.any(axis=(0, 2)).sum() if record.phase == "decode" else 0
            )
        decoded = sum(each.with_drafts.tokens + each.without.tokens for each in counts if each is not None)
        assert decoded == sum(map(len, served.tokens.values())) - len(prompts), "the first one is of a prefill"
    assert sum(each.with_drafts.steps for each in (record.decodes for record in plain.records) if each) == 0
    speculative = [each.with_drafts for each in (record.decodes for record in drafted.records) if each]
    assert sum(each.tokens for each in speculative) > sum(each.requests for each in speculative) > 0
