"""A new process takes the place of a rank that was killed, beside the others: they serve on or wait, and every token is
the one it would have been."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe_serve.engine.model.expert_sources import CHECKPOINT, NEAR
from moe_serve.engine.protocol.messages import NEXT_STEP, Wake
from moe_serve.engine.recovery.recovery import MaskingRecovery, Rank
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PeerError
from tests.engine.losing import Outcome, serve_and_lose
from tests.engine.strikes import Fault
from tests.engine.test_recovery import check_trace, model, requests, settings_of, tokens_without_fault

__all__ = ["model"]  # the fixture


def check(model: Path, num_ranks: int, victim: int, outcomes: dict[int, Outcome], tokens: dict[str, list[int]]) -> None:
    right = tokens_without_fault(model)
    assert tokens == right | {"extra": right["0"]}, "it serves again once it has joined"
    all_ranks = list(range(num_ranks))
    assert sorted(outcomes) == all_ranks
    others = [rank for rank in all_ranks if rank != victim]
    for rank, outcome in outcomes.items():
        assert outcome.error == ""
        assert outcome.groups == ([all_ranks] if rank == victim else [others, all_ranks])
        assert outcome.ended == ([[]] if rank == victim else [[victim], []])
        assert (outcome.step, outcome.version) == (outcomes[0].step, outcomes[0].version)
        assert outcome.num_told == int(rank == victim), "it alone is told where experts are"


def check_counts(outcomes: dict[int, Outcome], trace: list, victim: int, num_ranks: int) -> None:
    """What the dead process had reported is in the trace, and so is all that the new one has computed."""
    other = next(outcome for rank, outcome in outcomes.items() if rank != victim)
    outcomes[min(outcomes)].reported_by_victim = other.reported_by_victim
    check_trace(trace, outcomes, -1, num_ranks)


@pytest.mark.parametrize(
    ("victim", "phase", "step", "moves"),
    [(1, "dispatch receive", 4, "none"), (0, "window", 7, "written"), (2, "exchange", 6, "carried")],
)
def test_the_others_serve_on_and_a_new_process_joins_them(model, victim, phase, step, moves):
    fault = Fault(victim, phase, step, anew=True)
    outcomes, tokens, trace = serve_and_lose(3, requests(), settings_of(model, 20), fault, moves)
    check(model, 3, victim, outcomes, tokens)
    named = set(outcomes[victim].experts_from)
    if moves == "none":
        assert named == {NEAR}, "every expert has a replica there"
    else:
        assert named <= {NEAR, CHECKPOINT}, "what moves while it is sent is read from the checkpoint: all, at times"
        assert named
    check_counts(outcomes, trace, victim, 3)


@pytest.mark.parametrize(("victim", "phase", "step", "moves"), [(1, "dispatch receive", 4, "carried")])
def test_a_new_process_maps_the_weights_that_the_others_share(model, victim, phase, step, moves):
    overrides = [*settings_of(model, 20), "model.weight_cache=memory"]
    fault = Fault(victim, phase, step, anew=True)
    outcomes, tokens, trace = serve_and_lose(3, requests(), overrides, fault, moves)
    check(model, 3, victim, outcomes, tokens)
    assert outcomes[victim].experts_from == {}, "none is read"
    check_counts(outcomes, trace, victim, 3)


@pytest.mark.parametrize(("victim", "phase", "step"), [(1, "combine send", 4), (0, "counts receive", 6)])
def test_where_experts_lack_the_other_waits_with_its_requests_until_a_new_process_joins(model, victim, phase, step):
    overrides = [*settings_of(model, 20), "eplb.num_redundant_experts=0"]
    outcomes, tokens, trace = serve_and_lose(2, requests(), overrides, Fault(victim, phase, step, anew=True))
    check(model, 2, victim, outcomes, tokens)
    assert set(outcomes[victim].experts_from) == {CHECKPOINT}
    check_counts(outcomes, trace, victim, 2)


def test_two_ranks_are_replaced_one_after_the_other(model):
    overrides = [*settings_of(model, 20), "eplb.num_redundant_experts=0"]
    fault = Fault(1, "counts receive", 4, anew=True, then=Fault(2, "combine send", 4, anew=True))
    outcomes, tokens, _ = serve_and_lose(4, requests(), overrides, fault)
    right = tokens_without_fault(model)
    assert {name: tokens[name] for name in right} == right
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert [outcome.groups[-1] for outcome in outcomes.values()] == [[0, 1, 2, 3]] * 4
    assert all(outcome.error == "" for outcome in outcomes.values())


@pytest.mark.parametrize("deadline_s", [None, 0.0, 1000.0])
def test_ranks_that_lack_experts_wait_until_the_deadline_and_not_at_all_where_nobody_starts_the_lost_one(deadline_s):
    served = SimpleNamespace(
        placement=Placement.trivial(1, 4, 2),
        windows=SimpleNamespace(begin_step=lambda plan: None, placement=None),
        void_step=lambda: None,
    )
    membership = SimpleNamespace(
        masked=[1], members=[0], epoch=1, suspect_after_s=None, is_void=True, is_masked=False, is_apart=False,
        regroup=lambda joining: None,
    )  # fmt: skip
    sent: list[Any] = []
    exchange, mailbox = SimpleNamespace(dead_peers=lambda: [1]), SimpleNamespace(send=sent.append)
    own = Rank(0, 5, cast(Any, exchange), cast(Any, mailbox), lambda: 0)
    recovery = MaskingRecovery(own, cast(Any, served), cast(Any, membership), 3.0, deadline_s)
    lost = PeerError("rank 1 died", 1, "dispatch", 3)
    needed = "rank 1 cannot be spared: the 1 rank that is left has 2 slots per layer for 4 experts"
    if deadline_s is None:
        with pytest.raises(PeerError, match=needed):
            recovery.recover(lost, lambda: True)
        return
    assert recovery.recover(lost, lambda: True)
    assert recovery.waits
    assert [(each.members, each.waits) for each in sent] == [([0], True)], "the front end hears of it"
    assert served.windows.placement is served.placement, "its records have slots for all experts"
    step = cast(Any, SimpleNamespace(rejoining=()))
    if deadline_s == 0.0:
        with pytest.raises(PeerError, match=needed):
            recovery.begin_step(step)
    else:
        recovery.begin_step(step)


def test_a_rank_that_waits_to_rejoin_wakes_the_others_which_may_sleep():
    membership = SimpleNamespace(
        masked=[], members=[0, 1], epoch=3, suspect_after_s=None, is_void=True, is_masked=True, is_apart=False,
        ask_to_rejoin=lambda: None, try_rejoin=lambda: bool(woken),
    )  # fmt: skip
    served = SimpleNamespace(placement=Placement.trivial(1, 4, 2), activate=lambda placement: None)
    woken: list[Any] = []
    exchange = SimpleNamespace(dead_peers=list)
    mailbox = SimpleNamespace(send=lambda message: None, wake_peers=woken.append)
    own = Rank(1, 5, cast(Any, exchange), cast(Any, mailbox), lambda: 0)
    recovery = MaskingRecovery(own, cast(Any, served), cast(Any, membership), 3.0)
    assert recovery.recover(PeerError("rank 1 is masked", 1, "exchange", 3), lambda: True)
    assert woken == [Wake(5, NEXT_STEP)]
