from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.engine.step.plan import (
    MOVE_FAULTS,
    ROW_LENGTH,
    MoveCancelled,
    MovePlan,
    RankState,
    StepSettings,
    mask_of,
    plan_step,
    ranks_of,
)
from moe_serve.errors import PeerError

SETTINGS = StepSettings(max_tokens_per_rank=8, prefill_hold_steps=3, record_window_steps=10)
counts = st.integers(0, 40)
states = st.builds(
    lambda **known: RankState(**known),  # by itself hypothesis would make up the other fields
    launch_id=st.just(1),
    step=st.just(7),
    decode_tokens=counts,
    prefill_tokens=counts,
    held_steps=st.integers(0, 4),
    has_work=st.integers(0, 1),
    wants_stop=st.integers(0, 1),
)


def test_a_state_survives_its_row() -> None:
    state = RankState(*range(1, ROW_LENGTH + 1))
    row = state.to_row()
    assert row.shape == (ROW_LENGTH,)
    assert RankState.from_row(row) == state


@given(st.lists(states, min_size=1, max_size=5))
def test_the_plan_covers_every_rank(ranks: list[RankState]) -> None:
    plan = plan_step(ranks, SETTINGS)
    rows = [state.decode_tokens + (0 if plan.hold_prefill else state.prefill_tokens) for state in ranks]
    assert plan.max_tokens == max(rows)
    assert plan.num_chunks * 8 >= max(rows) > (plan.num_chunks - 1) * 8 or plan.num_chunks == max(rows) == 0
    assert plan.stop == any(state.wants_stop for state in ranks)
    assert not (plan.sleep and plan.stop)
    assert plan.runs_forward == (max(rows) > 0 and not plan.stop and not plan.sleep)
    if plan.hold_prefill:
        assert plan.phase in ("decode", "idle")


@given(st.lists(states, min_size=1, max_size=5), st.integers(1, 50))
def test_overlap_is_decided_by_the_largest_rank(ranks: list[RankState], overlap_from_tokens: int) -> None:
    plain = plan_step(ranks, SETTINGS)
    plan = plan_step(ranks, replace(SETTINGS, overlap_from_tokens=overlap_from_tokens))
    assert not plain.overlap
    assert plan.overlap == (plan.max_tokens >= overlap_from_tokens)
    if plan.overlap:
        half = (plan.max_tokens + 1) // 2
        assert plan.num_chunks * 8 >= half > (plan.num_chunks - 1) * 8
    assert plan._replace(overlap=False, num_chunks=plain.num_chunks) == plain


def test_everybody_sleeps_only_when_nobody_has_work() -> None:
    idle = RankState(launch_id=0, step=3)
    assert plan_step([idle, idle], SETTINGS).sleep
    assert not plan_step([idle, idle._replace(has_work=1)], SETTINGS).sleep
    assert not plan_step([idle, idle._replace(wants_stop=1)], SETTINGS).sleep


def test_a_lone_prefill_waits_for_company_but_not_for_long() -> None:
    decoding = RankState(launch_id=0, step=3, decode_tokens=4, has_work=1)
    prefilling = RankState(launch_id=0, step=3, prefill_tokens=6, has_work=1)
    assert plan_step([decoding, prefilling], SETTINGS).hold_prefill
    assert not plan_step([decoding, prefilling._replace(held_steps=3)], SETTINGS).hold_prefill
    both = decoding._replace(prefill_tokens=5)
    assert not plan_step([both, prefilling], SETTINGS).hold_prefill
    assert not plan_step([RankState(0, 3), prefilling], SETTINGS).hold_prefill, "no rank decodes: waiting gains nothing"


@pytest.mark.parametrize("field", ["launch_id", "step", "placement_version"])
def test_a_rank_that_lost_the_thread_is_named(field: str) -> None:
    state = RankState(launch_id=2, step=5, placement_version=1)
    with pytest.raises(PeerError, match=f"rank 2 is at {field}") as caught:
        plan_step([state, state, state._replace(**{field: 9})], SETTINGS)
    assert caught.value.rank == 2


def test_the_window_closes_by_the_step_number_alone() -> None:
    closes = [plan_step([RankState(0, step)], SETTINGS).close_window for step in range(20)]
    assert [step for step, close in enumerate(closes) if close] == [9, 19]
    assert plan_step([RankState(0, 3, wants_stop=1), RankState(0, 3)], SETTINGS).close_window, "the end ends a window"


def test_a_new_group_goes_on_with_the_highest_step_and_only_then_may_steps_differ() -> None:
    ahead = RankState(0, 8, regrouped=1, masked=0b10, has_work=1)
    behind = ahead._replace(step=7, decode_tokens=2)
    plan = plan_step([behind, ahead], SETTINGS, ranks=[0, 2])
    assert (plan.step, plan.regrouped, plan.phase) == (8, True, "decode")
    with pytest.raises(PeerError, match="rank 2 is at step 8 and rank 0 at 7"):
        plan_step([behind._replace(regrouped=0), ahead._replace(regrouped=0)], SETTINGS, ranks=[0, 2])
    with pytest.raises(PeerError, match="rank 2 is at masked 6"):
        plan_step([behind, ahead._replace(masked=0b110)], SETTINGS, ranks=[0, 2])


def test_a_rank_rejoins_when_all_see_it_waiting_and_nothing_else_happens_in_that_step() -> None:
    state = RankState(0, 9, masked=0b1010, asking_to_rejoin=0b1010, decode_tokens=3, has_work=1)
    plan = plan_step([state, state._replace(asking_to_rejoin=0b1000)], SETTINGS, ranks=[0, 2])
    assert plan.rejoining == (3,)
    assert not any([plan.runs_forward, plan.close_window, plan.sleep, plan.stop])
    assert plan_step([state, state._replace(asking_to_rejoin=0)], SETTINGS, ranks=[0, 2]).runs_forward
    assert plan_step([state, state._replace(wants_stop=1)], SETTINGS, ranks=[0, 2]).rejoining == ()
    idle = state._replace(decode_tokens=0, has_work=0)
    assert not plan_step([idle, idle], SETTINGS, ranks=[0, 2]).sleep, (
        "the ranks do not sleep in a step in which one rejoins"
    )


@given(st.sets(st.integers(0, 61)))
def test_a_set_of_ranks_survives_its_bits(ranks: set[int]) -> None:
    assert ranks_of(mask_of(ranks)) == tuple(sorted(ranks))


def test_every_field_of_a_state_is_an_int() -> None:
    assert set(RankState.__annotations__.values()) == {int}


def test_a_round_is_activated_once_all_ranks_have_staged_it() -> None:
    staged = RankState(launch_id=0, step=9, placement_version=4, staged=5)
    assert plan_step([staged, staged._replace(staged=0)], SETTINGS).moves.activate == 0
    assert plan_step([staged, staged], SETTINGS).moves.activate == 5
    assert plan_step([staged._replace(staged=4)] * 2, SETTINGS).moves.activate == 0, "an old one is over"


def test_a_new_group_drops_the_running_round_unless_some_rank_has_activated_it() -> None:
    staged = RankState(launch_id=0, step=9, placement_version=4, staged=5, regrouped=1)
    assert plan_step([staged, staged], SETTINGS).moves.activate == 0
    assert plan_step([staged._replace(placement_version=5, staged=0), staged], SETTINGS).moves.activate == 5
    with pytest.raises(PeerError, match="placement_version"):
        plan_step([staged._replace(placement_version=5, regrouped=0), staged._replace(regrouped=0)], SETTINGS)


def test_in_a_new_group_ranks_that_are_behind_are_told_the_newest_placement() -> None:
    known = RankState(launch_id=0, step=9, placement_version=7, regrouped=1)
    behind = known._replace(placement_version=5)
    assert plan_step([behind, known, known], SETTINGS, ranks=[0, 2, 3]).moves.placement_from == 2
    moves = plan_step([behind._replace(staged=6), known], SETTINGS).moves
    assert (moves.placement_from, moves.activate) == (1, 0), "a round for the placement before is not taken for it"
    rejoined = behind._replace(needs_placement=1)
    assert plan_step([rejoined, rejoined._replace(placement_version=6)], SETTINGS).moves.placement_from == 1
    staged = known._replace(placement_version=6, staged=7)
    moves = plan_step([rejoined, staged, known], SETTINGS).moves
    assert (moves.placement_from, moves.activate) == (2, 7), "one that has it before activation, too"


def test_a_rank_that_rejoined_is_told_the_placement_by_one_that_knows_it() -> None:
    known = RankState(launch_id=0, step=9, placement_version=7, regrouped=1)
    moves = plan_step([known._replace(placement_version=3, needs_placement=1), known, known], SETTINGS).moves
    assert (moves.placement_from, moves.activate) == (1, 0)


def test_a_fault_of_one_rank_cancels_the_round_and_is_named() -> None:
    moves = plan_step([RankState(0, 0), RankState(0, 0, fault=1, fault_layer=3)], SETTINGS).moves
    assert moves.cancel == MoveCancelled(1, MOVE_FAULTS[0], 3)


def test_the_plan_says_who_has_a_message() -> None:
    assert plan_step([RankState(0, 0), RankState(0, 0, has_message=1)], SETTINGS).moves.message_from == 1
    assert plan_step([RankState(0, 0)] * 2, SETTINGS).moves == MovePlan()


def test_a_recorder_command_ends_the_window_of_its_step() -> None:
    plan = plan_step([RankState(0, 3, record_command=3), RankState(0, 3)], SETTINGS)
    assert (plan.record, plan.close_window) == ("dump", True)


def test_the_split_of_a_phase_follows_the_lowest_rank() -> None:
    decode = RankState(0, 0, decode_tokens=4, has_work=1, even_phases=1)
    assert plan_step([decode, decode._replace(even_phases=0)], SETTINGS).split_evenly
    mixed = decode._replace(prefill_tokens=3)
    assert not plan_step([mixed, mixed], SETTINGS).split_evenly, "this bit is that of decode steps"
