"""What goes wrong while no rank is lost: the planner, a byte on its way, a slow move; and ranks with little to do."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.mailbox import Inbound
from moe_serve.engine.protocol.messages import Rebalance, SetPlacement, Submit
from moe_serve.ep.expert_transfer import OutgoingExpert
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.planner_process import PlannerProcess
from tests.engine.losing import check_slots
from tests.engine.moving import DYNAMIC, lead_restlessly, real_balancer
from tests.engine.offline import Served, serve, tiny_model
from tests.engine.test_identity import GREEDY, PLAIN, requests_for, same
from tests.engine.test_live_balancing import count_activations

MODEL = "qwen3_moe"
SMALL = ["engine.max_running_requests=5", "engine.max_batch_tokens=24", "dispatch.max_tokens_per_rank=10"]
NUM_ROUNDS = 20


def requests(max_new_tokens: int = 10, of_rank_1: int | None = None) -> list[Submit]:
    """of_rank_1: new tokens of every second request, which the second of two ranks serves"""
    lengths = [max_new_tokens, max_new_tokens if of_rank_1 is None else of_rank_1]
    return [
        Submit(
            each.request_id, each.attempt, each.prompt_ids, replace(GREEDY, max_new_tokens=lengths[i % 2]), each.seed
        )
        for i, each in enumerate(requests_for(MODEL, "small")[:12])
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("trouble")
    return [*PLAIN, f"model.path={tiny_model(folder, MODEL)}", "model.load_format=dummy"]


def at_the_end(engine: Engine, check: Callable[[], None]) -> None:
    run = engine.run

    def run_and_check() -> None:
        try:
            run()
            check()
        finally:
            engine.balancing.close()

    engine.run = run_and_check  # type: ignore[method-assign]


# --- a round that is given up -----------------------------------------------------------------------------------------


def watch_cancels(engine: Engine, repair: Callable[[], None], reason: str) -> None:
    """Checks that one round is cancelled, at the same step on all ranks, without effect, and all others succeed.

    repair: ends the trouble
    """
    leader = lead_restlessly(engine, NUM_ROUNDS)
    count_activations(engine)
    mover, steps = engine.balancing.mover, []
    assert mover is not None
    cancel = mover.cancel

    def watched() -> None:
        cancel()
        check_slots(engine)
        repair()
        steps.append(engine.step)

    def check() -> None:
        check_slots(engine)
        assert len(steps) == 1
        engine.counters.cancelled_at = steps[0]  # type: ignore[attr-defined]
        if leader is None:
            return
        (cancelled,) = leader.cancellations
        assert cancelled.startswith("rank 1 gives up round ")
        assert f"at step {steps[0]}, layer " in cancelled
        assert cancelled.endswith(reason)

    mover.cancel = watched  # type: ignore[method-assign]
    at_the_end(engine, check)


def damage_a_byte(engine: Engine) -> None:
    """A byte changes in the send buffer of rank 0, after it was summed."""
    read_into = OutgoingExpert.read_into

    def damaged(expert: OutgoingExpert, buffer: Tensor) -> int:
        num_bytes = read_into(expert, buffer)
        buffer[num_bytes // 2] ^= 1
        return num_bytes

    def repair() -> None:
        OutgoingExpert.read_into = read_into  # type: ignore[method-assign]

    if engine.rank == 0:
        OutgoingExpert.read_into = damaged  # type: ignore[method-assign]
    watch_cancels(engine, repair, "an expert arrived with a wrong checksum")


def be_late(engine: Engine) -> None:
    """Rank 1 gives a round no time at all, until one was late."""
    mover = engine.balancing.mover
    assert mover is not None
    settings = mover._settings

    def repair() -> None:
        mover._settings = settings

    if engine.rank == 1:
        mover._settings = replace(settings, deadline_s=0.0)
    watch_cancels(engine, repair, "the experts did not arrive in time")


@pytest.mark.parametrize("trouble", [damage_a_byte, be_late])
def test_a_round_that_one_rank_gives_up_has_no_effect_on_any_and_the_next_ones_succeed(
    model: list[str], trouble: Callable[[Engine], None]
) -> None:
    own = ["model.weight_cache=none", "dispatch.backend=low_latency"]
    overrides = [*model, *SMALL, *DYNAMIC, "eplb.num_redundant_experts=2", *own]
    served = serve(2, requests(), overrides, prepare=trouble)
    same(served, serve(1, requests(), model))
    assert served.counters["num_activations"] == 2 * NUM_ROUNDS
    assert served.counters["cancelled_at"] % 2 == 0, "the sum of two equal steps"


# --- the planner ------------------------------------------------------------------------------------------------------


def hurt_planner(engine: Engine) -> None:
    """Kills the planner process at three plans, stopping it once; then asks for a plan by hand."""
    if not engine.balancing.leads:
        at_the_end(engine, lambda: check_slots(engine))
        return
    balancer = real_balancer(engine)
    planner, journal = balancer.planner, balancer.rebalancer.journal
    assert isinstance(planner, PlannerProcess)
    poll, poll_mailbox = planner.poll, engine.mailbox.poll
    hurt: set[int] = set()
    give_up_s = time.monotonic() + 60
    has_asked = False

    def hurt_and_poll() -> object:
        planner._next_start_s = 0.0  # without the pause after a failure
        asked = planner._open
        if asked is not None and asked.request_id < 3 and asked.request_id not in hurt:
            planner.start()  # before the request is sent: on a busy machine it may be answered by the next poll
            assert planner.pid is not None
            hurt.add(asked.request_id)
            os.kill(planner.pid, signal.SIGSTOP if asked.request_id == 1 else signal.SIGKILL)
            if asked.request_id == 1:
                asked.deadline_s = time.monotonic() + 0.02
        return poll()

    def ask(timeout_s: float) -> list[Inbound]:
        nonlocal has_asked
        if timeout_s == 0 or (has_asked and balancer.rebalancer.state == "watching"):
            return poll_mailbox(timeout_s)
        arrived = poll_mailbox(0.0)
        if journal.alarm and not has_asked:
            has_asked = True
            arrived.append(Rebalance(1))
        assert time.monotonic() < give_up_s, f"state {balancer.rebalancer.state}, {journal.decisions}"
        time.sleep(0.001)
        return arrived

    def check() -> None:
        check_slots(engine)
        kinds = [decision.kind for decision in journal.decisions]
        assert kinds[:7] == ["plan", "failed"] * 3 + ["off"]
        assert kinds[7] == "plan"
        assert kinds[8] in ("move", "keep")
        failed = [decision.reason for decision in journal.decisions if decision.kind == "failed"]
        assert ["SIGKILL" in reason for reason in failed] == [True, False, True]
        assert "eplb.plan_deadline_s" in failed[1]
        assert journal.alarm == ""

    planner.poll = hurt_and_poll  # type: ignore[assignment]
    engine.mailbox.poll = ask  # type: ignore[method-assign]
    at_the_end(engine, check)


def test_a_planner_that_fails_three_times_switches_the_balancer_off_and_serving_goes_on(model: list[str]) -> None:
    overrides = [
        *model,
        *SMALL,
        *DYNAMIC,
        "eplb.num_redundant_experts=2",
        "eplb.trigger=1",
        "eplb.record_window_steps=3",
    ]
    served = serve(2, requests(60), overrides, prepare=hurt_planner)
    same(served, serve(1, requests(60), model))
    assert [answer.ok for answer in served.answers] == [True]


# --- little to do -----------------------------------------------------------------------------------------------------


def reversed_placement(placement: Placement) -> list[list[int]]:
    return placement.physical_to_logical[:, ::-1].tolist()


def place_while_asleep(engine: Engine) -> None:
    table = reversed_placement(engine.served.placement)
    engine.mailbox.script.append((1 << 40, SetPlacement(7, table)))  # type: ignore[attr-defined]

    def check() -> None:
        check_slots(engine)
        assert engine.served.placement.physical_to_logical.tolist() == table
        assert engine.counters.num_sleeps > 1, "asleep before the command, and after the moves"

    at_the_end(engine, check)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_idle_server_moves_experts_where_a_person_wants_them_and_sleeps_again(
    model: list[str], num_ranks: int
) -> None:
    overrides = [*model, *DYNAMIC, "eplb.num_redundant_experts=2"]
    served = serve(num_ranks, [], overrides, prepare=place_while_asleep)
    assert [(answer.call_id, answer.ok) for answer in served.answers] == [(7, True)]
    assert served.counters["num_forwards"] == 0


def move_restlessly(engine: Engine) -> None:
    lead_restlessly(engine, NUM_ROUNDS)
    count_activations(engine)
    at_the_end(engine, lambda: check_slots(engine))


def leave_rank_1_idle(engine: Engine) -> None:
    if engine.rank == 1:
        engine.mailbox.script.clear()  # type: ignore[attr-defined]
    move_restlessly(engine)


def check_counts(served: Served) -> None:
    """The load is that of the rows that the schedulers have committed."""
    rows = sum(sum(counts) for by_step in served.rows for counts in by_step.values())
    topk = 3
    for layer in range(3):
        assert sum(sum(record[layer]) for record in served.load) == topk * rows > 0


@pytest.mark.parametrize(("split", "idle"), [("exact", True), ("even", False)])
def test_experts_move_beside_a_rank_without_requests_or_with_prefills_only(
    model: list[str], split: str, idle: bool
) -> None:
    wanted = requests(of_rank_1=1)
    overrides = [*model, *SMALL, *DYNAMIC, "eplb.num_redundant_experts=2", f"eplb.split={split}"]
    served = serve(2, wanted, overrides, prepare=leave_rank_1_idle if idle else move_restlessly)
    right = serve(1, wanted, model)
    assert len(served.tokens) == (6 if idle else 12)
    assert served.tokens == {name: right.tokens[name] for name in served.tokens}
    assert served.counters["num_activations"] == 2 * NUM_ROUNDS
    check_counts(served)
