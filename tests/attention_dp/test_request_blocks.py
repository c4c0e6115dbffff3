"""Blocks shared by equal beginnings, evicted and withdrawn, seen through the chunks that a scheduler proposes."""

import pytest

from moe_serve.attention_dp.request import Request, SamplingParams
from tests.attention_dp.steps import make_request, make_scheduler, run_step, shape


def test_an_equal_prompt_reuses_all_blocks_that_end_before_its_last_token():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=10, max_new_tokens=1))
    run_step(scheduler)
    again = make_request("b", num_prompt=10, max_new_tokens=1)
    scheduler.add(again)
    assert shape(run_step(scheduler).prefills) == [("b", 8, 2, True)]
    assert again.num_cached_prompt == 8
    assert scheduler.stats.num_cached_prompt_tokens == 8


def test_a_fully_cached_prompt_computes_its_last_token_again_in_a_block_of_its_own():
    scheduler = make_scheduler()
    a, b = make_request("a", num_prompt=8, max_new_tokens=9), make_request("b", num_prompt=8)
    scheduler.add(a)
    run_step(scheduler)
    scheduler.add(b)
    proposal = run_step(scheduler)
    assert shape(proposal.prefills) == [("b", 4, 4, True)]
    assert a.block_ids[0] == b.block_ids[0]
    assert a.block_ids[1] != b.block_ids[1]


def test_blocks_written_by_decode_are_reused_by_the_next_turn_of_a_conversation():
    scheduler = make_scheduler()
    first = make_request("a", num_prompt=6, max_new_tokens=7)
    scheduler.add(first)
    while scheduler.has_work:
        run_step(scheduler)
    # 13 known tokens, 12 of them computed: three full blocks.
    turn = Request("b", 0, first.prompt_ids + first.output_ids + [7, 8], [], SamplingParams(max_new_tokens=4), seed=0)
    scheduler.add(turn)
    assert shape(run_step(scheduler).prefills) == [("b", 12, 3, True)]


def test_of_equal_prompts_that_come_together_one_is_computed_and_its_blocks_shared_after_the_step():
    scheduler = make_scheduler(max_batch_tokens=32)
    a, b = make_request("a", num_prompt=9), make_request("b", num_prompt=9)
    scheduler.add(a)
    scheduler.add(b)
    assert shape(run_step(scheduler).prefills) == [("a", 0, 9, True)]
    assert not set(a.block_ids) & set(b.block_ids)
    assert shape(run_step(scheduler).prefills) == [("b", 8, 1, True)]
    assert a.block_ids[:2] == b.block_ids[:2]


def test_a_prompt_that_waits_beside_an_equal_one_takes_over_its_blocks():
    scheduler = make_scheduler(max_batch_tokens=8)
    a, b = make_request("a", num_prompt=18), make_request("b", num_prompt=20)
    scheduler.add(a)
    run_step(scheduler)
    scheduler.add(b)
    assert shape(run_step(scheduler).prefills) == [("a", 8, 8, False)]  # b was admitted with a's first two blocks
    assert len(b.block_ids) == 5
    assert shape(run_step(scheduler).prefills) == [("a", 16, 2, True), ("b", 16, 4, True)]
    assert a.block_ids[:4] == b.block_ids[:4]
    assert b.num_cached_prompt == scheduler.stats.num_cached_prompt_tokens == 16


@pytest.mark.parametrize("other", [{"salt": "x"}, {"first": 1}])
def test_other_salt_or_tokens_share_nothing(other):
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=9, max_new_tokens=1))
    run_step(scheduler)
    scheduler.add(make_request("b", num_prompt=9, **other))
    assert shape(run_step(scheduler).prefills) == [("b", 0, 9, True)]


def test_without_prefix_cache_nothing_is_shared():
    scheduler = make_scheduler(prefix_cache=False)
    for name in "ab":
        scheduler.add(make_request(name, num_prompt=9, max_new_tokens=1))
        assert shape(run_step(scheduler).prefills) == [(name, 0, 9, True)]


def test_the_least_recently_used_prefix_is_evicted_first():
    scheduler = make_scheduler(num_blocks=6)
    for name, first in (("a", 0), ("b", 100)):
        scheduler.add(make_request(name, num_prompt=8, first=first, max_new_tokens=1))
        run_step(scheduler)
    scheduler.add(make_request("c", num_prompt=16, first=200, max_new_tokens=1))  # 4 blocks: 2 unused, then a's
    run_step(scheduler)
    scheduler.add(make_request("b2", num_prompt=9, first=100, max_new_tokens=1))
    assert shape(run_step(scheduler).prefills) == [("b2", 8, 1, True)]
    scheduler.add(make_request("a2", num_prompt=9, first=0, max_new_tokens=1))
    assert shape(run_step(scheduler).prefills) == [("a2", 0, 9, True)]


def test_the_tail_of_a_prefix_is_evicted_before_its_beginning():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("a", num_prompt=12, max_new_tokens=1))
    run_step(scheduler)
    scheduler.add(make_request("b", num_prompt=5, first=100, max_new_tokens=1))  # the unused block, and one of a's
    run_step(scheduler)
    scheduler.add(make_request("a2", num_prompt=13, max_new_tokens=1))
    assert shape(run_step(scheduler).prefills) == [("a2", 8, 5, True)]


def test_no_block_of_a_discarded_request_is_reused_also_not_one_that_it_shared():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=10, max_new_tokens=4))
    run_step(scheduler)
    scheduler.add(make_request("b", num_prompt=10, max_new_tokens=4))
    assert shape(run_step(scheduler).prefills) == [("b", 8, 2, True)]
    scheduler.discard("b")
    scheduler.check()
    scheduler.add(make_request("c", num_prompt=10))
    assert shape(run_step(scheduler).prefills) == [("c", 0, 10, True)]


def test_a_discarded_request_leaves_its_neighbours_blocks_to_them():
    scheduler = make_scheduler()
    a = make_request("a", num_prompt=10, max_new_tokens=4)
    scheduler.add(a)
    run_step(scheduler)
    scheduler.add(make_request("b", num_prompt=10))
    run_step(scheduler)
    blocks = list(a.block_ids)
    scheduler.discard("b")
    while scheduler.has_work:
        assert a.block_ids[: len(blocks)] == blocks
        run_step(scheduler)
    assert scheduler.blocks.num_free == 16
