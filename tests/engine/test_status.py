"""The report of a rank: its totals under their own names, and the times of its steps by phase and part."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Scheduler
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_engine
from moe_serve.engine.protocol.messages import STEP_BOUNDS_S, PhaseTimes
from moe_serve.engine.recovery.recovery import Recovery
from moe_serve.engine.status import EngineCounters, StepTimes, totals_of
from moe_serve.engine.step.exchange import make_exchange
from moe_serve.kernels.part_clock import ATTENTION, PartClock
from tests.engine.offline import ScriptedMailbox, submits_of, tiny_model
from tests.ranks import run_ranks


def test_the_outcomes_of_the_exact_split_are_told_where_it_serves() -> None:
    blocks = RequestBlocks(num_blocks=4, block_size=2, prefix_cache=False)
    scheduler = Scheduler(blocks, max_running=2, max_batch_tokens=4, max_model_len=8)
    served = cast(Any, SimpleNamespace(placement=None))
    counters, recovery = EngineCounters(num_forwards=3), Recovery(served, "there is one rank")
    without = totals_of(counters, recovery, scheduler, [])
    assert (without["num_forwards"], without["num_voided_steps"]) == (3, 0)
    assert not [name for name in without if name.startswith("num_splits")]
    totals = totals_of(counters, recovery, scheduler, [5, 2, 1])
    told = {name: total for name, total in totals.items() if name.startswith("num_splits")}
    assert told == {"num_splits_proven": 5, "num_splits_repaired": 2, "num_splits_unproven": 1}


OF_MOE = {"attention", "gate", "dispatch", "experts", "combine"}


def test_voided_and_idle_steps_do_not_count() -> None:
    clock = PartClock()
    times = StepTimes(clock, has_parts=True)
    times.begin()
    clock.turn(ATTENTION)
    times.begin()  # the step before was void
    times.end("idle")
    assert times.report() == {}
    times.begin()
    times.end("decode")
    (report,) = times.report().values()
    assert sum(report.buckets) == 1
    assert len(report.buckets) == len(STEP_BOUNDS_S) + 1
    assert report.parts["attention"] == 0
    assert sum(report.parts.values()) == pytest.approx(report.seconds)


def test_where_the_host_sees_no_parts_nothing_is_said_of_them() -> None:
    times = StepTimes(PartClock(), has_parts=False)
    times.begin()
    times.end("mixed")
    assert times.report()["mixed"].parts == {}


def times_of_engine(rank: int, group: EpGroup, settings: list[str], meeting: str) -> dict[str, PhaseTimes]:
    submits = submits_of([[5] * 30, [7, 8, 9], [4] * 50, [6]], SamplingParams(max_new_tokens=6, ignore_eos=True))
    mailbox = ScriptedMailbox([(i, submit) for i, submit in enumerate(submits)], rank, group.num_ranks, Path(meeting))
    config = load_config(overrides=settings)
    exchange = make_exchange(config.engine.exchange, group.process_group, True, 60.0)
    engine = build_engine(config, group, exchange, mailbox)
    engine.run()
    engine.close()
    return engine.times.report()


@pytest.mark.parametrize(
    ("num_ranks", "extra"),
    [(1, []), (2, []), (2, ["engine.numerics=fast"]), (2, ["eplb.num_redundant_experts=4"])],
    ids=["one rank", "one C call a layer", "torch", "replicas"],
)
def test_every_part_of_a_step_is_seen(num_ranks: int, extra: list[str], tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "qwen3_moe")
    settings = [f"parallel.num_ranks={num_ranks}", f"model.path={model}", "model.load_format=dummy",
                "model.skip_tokenizer=true", "cache.num_blocks=64", "engine.heartbeat_s=0.02", *extra]  # fmt: skip
    for report in run_ranks(num_ranks, times_of_engine, settings, str(tmp_path)):
        assert set(report) >= {"decode"}
        for phase in report.values():
            assert sum(phase.parts.values()) == pytest.approx(phase.seconds), "no time is lost or counted twice"
            seen = {name for name, seconds in phase.parts.items() if seconds > 0}
            assert seen >= OF_MOE | {"other", "exchange", "vocabulary", "sample"} - (
                {"sample"} if num_ranks > 1 else set()
            )


def test_a_shared_expert_is_a_part_of_its_own(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "deepseek_v3")
    settings = ["parallel.num_ranks=1", f"model.path={model}", "model.load_format=dummy", "model.skip_tokenizer=true",
                "cache.num_blocks=64", "engine.heartbeat_s=0.02"]  # fmt: skip
    (report,) = run_ranks(1, times_of_engine, settings, str(tmp_path))
    assert report["decode"].parts["mlp"] > 0


def test_parts_go_to_the_phase_of_their_steps_whatever_comes_between() -> None:
    clock = PartClock()
    times = StepTimes(clock, has_parts=True)
    for phase in ("decode", "decode", "idle", "prefill", None, "decode", "decode"):
        times.begin()
        clock.turn(ATTENTION)
        time.sleep(0.001 if phase else 0.05)
        if phase is not None:  # else the step is void
            times.end(phase)
        if phase == "prefill":
            early = times.report()
        time.sleep(0.002)
    report = times.report()
    assert set(report) == {"decode", "prefill"}
    assert early["prefill"] == report["prefill"]
    for phase, num_steps in (("decode", 4), ("prefill", 1)):
        assert sum(report[phase].buckets) == num_steps
        assert sum(report[phase].parts.values()) == pytest.approx(report[phase].seconds)
        assert report[phase].parts["attention"] >= 0.001 * num_steps
    assert sum(early["decode"].buckets) == 2
