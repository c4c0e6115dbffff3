"""A rank's part of a profile: steps and parts of real engines, and its bounds."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.attention_dp.scheduler import Proposal
from moe_serve.engine.profiler import Profiler
from moe_serve.engine.protocol.messages import STEP_WORDS, Answer, Profile
from moe_serve.engine.step.plan import StepPlan
from moe_serve.kernels.part_clock import ATTENTION, BETWEEN, EXCHANGE, PARTS, PartClock
from tests.engine.offline import serve, submits_of, tiny_model

PLAN = StepPlan(7, "decode", 1, 1, False, False, False, False, False)


def add(profiler: Profiler, clock: PartClock) -> None:
    began_ns = clock.turn(EXCHANGE)
    agreed_ns = clock.turn(ATTENTION)
    profiler.add(PLAN, (began_ns, agreed_ns, clock.turn(BETWEEN)), Proposal(), 0.5)


def stopped(profiler: Profiler) -> tuple[Any, Any, dict[str, Any]]:
    answer = profiler.command(Profile(2, "stop"))
    assert answer.ok
    steps = np.frombuffer(answer.facts["steps"], np.int64).reshape(-1, STEP_WORDS)
    return steps, np.frombuffer(answer.facts["turns"], np.int64).reshape(-1, 2), answer.facts


def test_a_profile_ends_at_its_bounds() -> None:
    clock = PartClock()
    profiler = Profiler(0, 0, clock)
    assert profiler.command(Profile(1, "start", 60, most_steps=3, most_turns=8)).ok
    assert not profiler.command(Profile(1, "start", 60, 3, 8)).ok, "one at a time"
    for _ in range(5):
        add(profiler, clock)
    steps, turns, facts = stopped(profiler)
    assert (len(steps), len(turns), facts["num_left_out"], facts["turns_full"]) == (3, 8, 2, True)
    assert [PARTS[part] for part in turns[:4, 1]] == ["exchange", "attention", "between", "exchange"]
    assert (turns[::3, 0][:3] == steps[:3, 2]).all(), "a step begins with its exchange"
    assert not profiler.command(Profile(3, "stop")).ok, "it has been told"
    assert not profiler.is_on


def test_after_its_time_a_profile_is_kept_until_it_is_asked_for() -> None:
    clock = PartClock()
    profiler = Profiler(0, 0, clock)
    profiler.command(Profile(1, "start", 0.03, 100, 100))
    add(profiler, clock)
    time.sleep(0.04)
    add(profiler, clock)
    assert not profiler.is_on
    num_turns = len(clock.turns())
    add(profiler, clock)
    assert len(clock.turns()) == num_turns, "nothing is written any more"
    steps, turns, _ = stopped(profiler)
    assert len(steps) == 1
    assert len(turns) >= 6 // 2
    profiler.command(Profile(1, "start", 60, 100, 100))
    assert profiler.is_on, "and another may begin"


def test_without_a_start_there_is_nothing_to_stop() -> None:
    assert "start_profile" in Profiler(0, 0, PartClock()).command(Profile(1, "stop")).text


def start_now(engine: Any) -> None:
    engine.profiler.command(Profile(0, "start", 60, 1000, 100_000))
    end = engine.close

    def stop_first() -> None:
        engine.mailbox.send(engine.profiler.command(Profile(9, "stop")))
        end()

    engine.close = stop_first


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_real_ranks_leave_an_exchange_together_and_parts_fill_their_steps(num_ranks: int, tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "qwen3_moe")
    submits = submits_of([[5] * 30, [7, 8, 9], [4] * 50], SamplingParams(max_new_tokens=5, ignore_eos=True))
    settings = [f"model.path={model}", "model.load_format=dummy", "model.skip_tokenizer=true"]
    served = serve(num_ranks, submits, settings, prepare=start_now)
    answers: list[Answer] = served.answers
    assert len(answers) == num_ranks
    agreed = []
    for answer in answers:
        steps = np.frombuffer(answer.facts["steps"], np.int64).reshape(-1, STEP_WORDS)
        turns = np.frombuffer(answer.facts["turns"], np.int64).reshape(-1, 2)
        agreed.append(dict(zip(steps[:, 0].tolist(), steps[:, 3].tolist(), strict=True)))
        assert (steps[:, 2] <= steps[:, 3]).all()
        assert (steps[:, 3] <= steps[:, 4]).all()
        begins = turns[:, 0]
        for row in steps.tolist():
            inside = turns[(begins >= row[2]) & (begins < row[4])]
            assert PARTS[inside[0][1]] == "exchange"
            if row[1] >= 0 and row[5] + row[6]:
                assert {"attention", "experts"} <= {PARTS[part] for part in inside[:, 1]}
    common = set.intersection(*map(set, agreed))
    assert len(common) >= 5
    spread_ns = [max(each[step] for each in agreed) - min(each[step] for each in agreed) for step in common]
    assert np.median(spread_ns) < 50e6, "one host, one clock"
