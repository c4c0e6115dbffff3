"""What tests of served tokens see of a machine that holds a rank up for seconds: nothing, or that it was left out."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.engine import Engine
from moe_serve.engine.step.plan import StepPlan
from tests.engine.offline import prompts_with_shared_beginnings, serve, submits_of, tiny_model

HELD_UP_S = 4.5  # longer than engine.suspect_after_s is by default


def hold_rank_0_up(engine: Engine) -> None:
    """Stops rank 0 in the middle of serving, as the core of a virtual machine may that gets no time."""
    run_step = engine.run_step

    def held_up() -> StepPlan:
        if engine.rank == 0 and engine.step == 3:
            engine.run_step = run_step  # type: ignore[method-assign]
            waker = subprocess.Popen(["sh", "-c", f"sleep {HELD_UP_S}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            waker.wait()
        return run_step()

    engine.run_step = held_up  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_rank_that_is_held_up_is_waited_for_or_said_to_be_left_out(tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    submits = submits_of(prompts_with_shared_beginnings(8, 256, max_len=20), params)
    model = [f"model.path={tiny_model(tmp_path, 'mixtral')}", "model.load_format=dummy"]
    spared = [*model, "eplb.num_redundant_experts=6"]  # each rank has every expert
    assert serve(2, submits, spared, prepare=hold_rank_0_up).tokens == serve(1, submits, model).tokens
    with pytest.raises(AssertionError, match=r"was left out(.|\n)*rank 0 gave no sign of life for 0\.5 s"):
        serve(2, submits, [*spared, "engine.suspect_after_s=0.5"], prepare=hold_rank_0_up)
