"""What one rank says and does about moves, step by step, without processes."""

from types import SimpleNamespace
from typing import Any, cast

from moe_serve.engine.balancing.balancing import Balancing
from moe_serve.engine.balancing.split_choice import SplitChoice
from moe_serve.engine.step import StepPlan
from moe_serve.eplb.placement import Placement
from tests.engine.moving import RestlessLeader

PLACEMENT = Placement.trivial(2, 4, 2, 2)


class Rank:
    """The lowest of two ranks, whose leader wants to move at once. Its model and its mover do nothing."""

    def __init__(self) -> None:
        self.leader = RestlessLeader(PLACEMENT, num_rounds=5)
        self.recovery = SimpleNamespace(members=[0, 1], regrouped=0, waits=False, reload_lost_experts=lambda plan: None)
        self.closed: list[str] = []
        self.balancing = Balancing(
            rank=0,
            launch_id=0,
            served=cast(Any, SimpleNamespace(placement=PLACEMENT)),
            recovery=cast(Any, self.recovery),
            mover=cast(Any, SimpleNamespace(staged=0, cancel=lambda: None, close=lambda: self.closed.append("mover"))),
            split_choice=SplitChoice("even", has_replicas=True),
            make_leader=lambda step: self.leader,
            send=lambda message: None,
            on_event=lambda name, step, **fields: None,
        )


def step(**facts: Any) -> StepPlan:
    wanted: dict[str, Any] = {
        "step": 3, "phase": "decode", "max_tokens": 1, "num_chunks": 1, "overlap": False, "hold_prefill": False,
        "close_window": False, "sleep": False, "stop": False,
    }  # fmt: skip
    return StepPlan(**(wanted | facts))


def test_a_round_that_was_announced_before_a_rank_was_lost_is_not_announced_to_the_new_group() -> None:
    rank = Rank()
    assert rank.balancing.announce() == 1
    rank.recovery.regrouped = 1  # the step was void before the round was told
    assert rank.balancing.announce() == 0, "the leader does not know yet which ranks are left"
    rank.recovery.regrouped = 0
    rank.balancing.begin_step(step(regrouped=True))
    assert len(rank.leader.groups) == 1
    assert rank.balancing.announce() == 1


def test_nobody_leads_while_ranks_wait_for_a_lost_one_without_which_experts_lack() -> None:
    rank = Rank()
    rank.recovery.waits = True
    rank.balancing.begin_step(step(regrouped=True))
    assert not rank.balancing.leads
    rank.recovery.waits = False
    rank.balancing.begin_step(step(regrouped=True))
    assert rank.balancing.leads
