"""What a step runs: prefills and decodes, admission, preemption, aborts and holds."""

from unittest import mock

import pytest

from moe_serve.attention_dp.prefix_cache import block_keys, root_key
from moe_serve.attention_dp.request import Handover
from moe_serve.errors import ConfigError, RequestError
from tests.attention_dp.steps import make_request, make_scheduler, run_step, shape


def test_a_request_is_prefilled_and_then_decoded_to_its_end():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=5, max_new_tokens=3))
    assert shape(run_step(scheduler).prefills) == [("a", 0, 5, True)]
    assert shape(run_step(scheduler).decodes) == [("a", 5, 1, True)]
    assert shape(run_step(scheduler).decodes) == [("a", 6, 1, True)]
    assert not scheduler.has_work
    assert scheduler.blocks.num_free == 16
    assert run_step(scheduler).is_empty


def test_a_long_prompt_is_cut_into_chunks_and_mixed_with_decodes():
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(make_request("a", num_prompt=3, max_new_tokens=9))
    scheduler.add(make_request("b", num_prompt=20, first=100))
    first = run_step(scheduler)
    assert shape(first.prefills) == [("a", 0, 3, True), ("b", 0, 5, False)]
    assert first.num_tokens == 8
    second = run_step(scheduler)
    assert shape(second.decodes) == [("a", 3, 1, True)]
    assert shape(second.prefills) == [("b", 5, 7, False)]
    run_step(scheduler)
    assert shape(run_step(scheduler).prefills) == [("b", 19, 1, True)]


def test_no_request_overtakes_a_large_prompt_at_the_head_of_the_queue():
    scheduler = make_scheduler(num_blocks=8, max_batch_tokens=64)
    scheduler.add(make_request("old", num_prompt=12, max_new_tokens=6))
    run_step(scheduler)  # holds 3 blocks, soon 4
    scheduler.add(make_request("large", num_prompt=24, first=100))  # 6 blocks: must wait
    scheduler.add(make_request("small", num_prompt=2, first=200))
    admitted = []
    while scheduler.has_work:
        admitted += [chunk.request.request_id for chunk in run_step(scheduler).prefills if chunk.start == 0]
    assert admitted == ["large", "small"]


def test_max_running_bounds_admission():
    scheduler = make_scheduler(max_running=2)
    for name in "abc":
        scheduler.add(make_request(name, num_prompt=2))
    run_step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


@pytest.mark.parametrize(
    "request_, field, words",
    [
        (make_request("r", num_prompt=0), "input_ids", "no tokens"),
        (make_request("r", num_prompt=61, max_new_tokens=4), "max_new_tokens", "lower max_new_tokens to 3"),
        (make_request("r", num_prompt=70, max_new_tokens=4), "input_ids", "shorten the prompt to 63"),
        (
            make_request("r", num_prompt=30, max_new_tokens=4),
            "max_new_tokens",
            "lower max_new_tokens to 3 .*num_blocks",
        ),
        (make_request("r", num_prompt=40, max_new_tokens=4), "input_ids", "shorten the prompt to 32 .*num_blocks"),
        (make_request("r", max_new_tokens=2, output_ids=[1, 2]), "max_new_tokens", "nothing is left"),
        (make_request("r", max_new_tokens=0), "max_new_tokens", "nothing is left to produce; raise max_new_tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_fix(request_, field, words):
    scheduler = make_scheduler(num_blocks=8)
    with pytest.raises(RequestError, match=words) as caught:
        scheduler.add(request_)
    assert caught.value.field == field
    assert not scheduler.has_work


def test_a_request_may_fill_the_whole_cache():
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make_request("r", num_prompt=30, max_new_tokens=3))  # 32 cached tokens and one that needs no slot
    for _ in range(4):
        run_step(scheduler)
    assert not scheduler.has_work


def test_an_id_in_use_is_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("r"))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(make_request("r"))


def test_more_running_requests_than_tokens_in_a_step_are_refused():
    with pytest.raises(ConfigError, match="max_running_requests is 9"):
        make_scheduler(max_running=9, max_batch_tokens=8)


def test_the_head_of_the_queue_is_admitted_as_soon_as_enough_blocks_are_free():
    scheduler = make_scheduler(num_blocks=6, max_batch_tokens=64)
    scheduler.add(make_request("short", num_prompt=8, max_new_tokens=2))
    scheduler.add(make_request("long", num_prompt=8, max_new_tokens=6, first=100))
    run_step(scheduler)
    scheduler.add(make_request("next", num_prompt=10, max_new_tokens=1, first=200))
    assert not run_step(scheduler).prefills  # 2 free blocks, 3 needed; then short ends
    assert shape(run_step(scheduler).prefills) == [("next", 0, 10, True)]
    assert scheduler.num_running == 1, "only short has ended"


def test_a_preempted_request_comes_back_to_the_blocks_of_its_own_salt_alone():
    scheduler = make_scheduler(num_blocks=5, max_running=2)
    a, b = (make_request(name, num_prompt=8, max_new_tokens=9, salt=f"of {name}") for name in "ab")
    scheduler.add(a)
    scheduler.add(b)
    while scheduler.has_work:
        run_step(scheduler)
        assert not set(a.block_ids) & set(b.block_ids), "equal tokens of different salts share no block"
        for request in (a, b):
            root = root_key(b"", request.salt, 4)
            known = [*request.prompt_ids, *request.output_ids]
            assert request.block_keys == block_keys(root, known, 4)[: len(request.block_keys)]
    assert scheduler.stats.num_preempted == 1
    assert b.num_cached_prompt == 0, "a had computed the same prompt"
    assert a.output_ids == b.output_ids


@pytest.mark.parametrize("max_batch_tokens", [4, 16])
def test_the_youngest_is_preempted_and_comes_back_before_all_others_with_its_tokens(max_batch_tokens):
    scheduler = make_scheduler(num_blocks=5, max_running=2, max_batch_tokens=max_batch_tokens)
    requests = {
        "a": make_request("a", num_prompt=7, max_new_tokens=9),
        "b": make_request("b", num_prompt=7, max_new_tokens=9, first=100),
        "c": make_request("c", num_prompt=7, max_new_tokens=2, first=200),
    }
    for request in requests.values():
        scheduler.add(request)
    produced = None
    order = []
    while scheduler.has_work:
        proposal = run_step(scheduler)
        order += [chunk.request.request_id for chunk in proposal.prefills]
        if requests["b"].was_preempted and produced is None:
            produced = len(requests["b"].output_ids)
            order = []
    assert produced
    assert [name for name, request in requests.items() if request.was_preempted] == ["b"]
    assert order.index("b") < order.index("c")
    for request in requests.values():
        num_prompt = len(request.prompt_ids)
        assert request.output_ids == [1000 + num_prompt + i for i in range(request.params.max_new_tokens)]
    assert scheduler.stats.num_preempted == 1


@pytest.mark.parametrize("num_prompt, num_blocks, max_batch_tokens", [(40, 50, 16), (16, 40, 64)])
def test_under_memory_pressure_a_request_is_preempted_about_once(num_prompt, num_blocks, max_batch_tokens):
    """If preempted requests were admitted once their first chunk fits, each would be preempted twice on average."""
    scheduler = make_scheduler(num_blocks, 8, max_batch_tokens, max_model_len=512, prefix_cache=False)
    for i in range(8):
        scheduler.add(make_request(str(i), num_prompt, max_new_tokens=40, first=1000 * i))
    while scheduler.has_work:
        run_step(scheduler)
    assert 0 < scheduler.stats.num_preempted <= 8


def test_an_abort_between_propose_and_commit_removes_the_chunk():
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, num_prompt=3))
    proposal = scheduler.propose()
    assert scheduler.abort("a")
    assert [chunk.request.request_id for chunk in scheduler.commit(proposal)] == ["b"]
    scheduler.check()


def test_an_abort_while_the_step_runs_ignores_its_result_and_shares_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=9))
    chunks = scheduler.commit(scheduler.propose())
    assert scheduler.abort("a")
    scheduler.complete(chunks[0], 5)
    scheduler.check()
    assert scheduler.blocks.num_free == 16
    scheduler.add(make_request("b", num_prompt=9))
    assert shape(run_step(scheduler).prefills) == [("b", 0, 9, True)]


def test_an_id_aborted_and_sent_again_does_not_revive_the_old_chunk():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=3))
    proposal = scheduler.propose()
    scheduler.abort("a")
    scheduler.add(make_request("a", num_prompt=3))
    assert scheduler.commit(proposal) == ()


def test_abort_of_an_unknown_request_says_so():
    assert not make_scheduler().abort("nobody")


def test_held_prefills_keep_their_blocks_and_run_later():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=3))
    run_step(scheduler)
    waiting = make_request("b", num_prompt=6)
    scheduler.add(waiting)
    proposal = scheduler.propose()
    held = scheduler.commit(proposal, hold_prefill=True)
    assert shape(held) == [("a", 3, 1, True)]
    scheduler.complete(held[0], 9)
    blocks = list(waiting.block_ids)
    assert shape(run_step(scheduler).prefills) == [("b", 0, 6, True)]
    assert waiting.block_ids == blocks


def test_a_proposal_that_is_dropped_is_proposed_again():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=6))
    first = scheduler.propose()
    assert scheduler.propose() == first
    scheduler.check()


def test_a_resubmitted_request_goes_on_after_its_output():
    scheduler = make_scheduler()
    request = make_request("a", num_prompt=3, max_new_tokens=4, output_ids=[1003, 1004])
    scheduler.add(request)
    assert shape(run_step(scheduler).prefills) == [("a", 0, 5, True)]
    run_step(scheduler)
    assert request.output_ids == [1003, 1004, 1005, 1006]
    assert not scheduler.has_work


def test_pending_tokens_count_what_is_left_to_compute():
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(make_request("a", num_prompt=10, max_new_tokens=4))
    scheduler.add(make_request("b", num_prompt=3, max_new_tokens=5))
    assert scheduler.pending_tokens == 13
    run_step(scheduler)  # 5 tokens of a, all of b
    assert scheduler.pending_tokens == 5 + 1


def test_an_expected_prompt_holds_no_request_back():
    scheduler = make_scheduler(num_blocks=10, max_batch_tokens=64)
    blocks = scheduler.blocks
    blocks.receiver = mock.Mock(page_bytes=1)
    scheduler.add(make_request("told", num_prompt=13, max_new_tokens=1))
    run_step(scheduler)  # three blocks of it are free, and found by their prefix
    scheduler.add(make_request("long", num_prompt=13, first=100, max_new_tokens=20))
    scheduler.add(make_request("short", num_prompt=11, first=200, max_new_tokens=2))
    run_step(scheduler)  # with four blocks, and three
    scheduler.add(make_request("head", num_prompt=19, first=300))
    assert shape(run_step(scheduler).prefills) == [], "it needs five blocks, and three were free"
    assert blocks.num_free == 6, "the short one has ended"
    blocks.expect(make_request("later", num_prompt=13), Handover(0, 1, 1))
    assert blocks.num_free == 3
    assert shape(run_step(scheduler).prefills) == [("head", 0, 19, True)], "what was taken early gives way"
