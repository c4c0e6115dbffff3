import pytest

from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.scheduler import Proposal, ScheduledChunk, Scheduler
from moe_serve.errors import ConfigError, RequestError


def make_scheduler(num_blocks=16, block_size=4, max_running=4, max_batch_tokens=16, max_model_len=64, **options):
    return Scheduler(num_blocks, block_size, max_running, max_batch_tokens, max_model_len, **options)


def make_request(request_id, num_prompt=5, max_new_tokens=4, output_ids=(), first=0, salt=""):
    prompt = list(range(first, first + num_prompt))
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Request(request_id, 0, prompt, list(output_ids), params, seed=0, salt=salt)


def next_token(request):
    """The 'model': the next token is a pure function of the known tokens."""
    return 1000 + request.num_known


def run_step(scheduler, hold_prefill=False) -> Proposal:
    """One step in which every sampled request gets one token and finishes at its limit."""
    proposal = scheduler.propose()
    scheduler.check()
    for chunk in scheduler.commit(proposal, hold_prefill):
        scheduler.complete(chunk, [next_token(chunk.request)] if chunk.samples else [])
        if len(chunk.request.output_ids) == chunk.request.params.max_new_tokens:
            scheduler.finish(chunk.request.request_id)
    scheduler.check()
    return proposal


def shape(chunks: tuple[ScheduledChunk, ...]):
    return [(chunk.request.request_id, chunk.start, chunk.length, chunk.samples) for chunk in chunks]


def test_a_request_is_prefilled_and_then_decoded_to_its_end():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=5, max_new_tokens=3))
    assert shape(run_step(scheduler).prefills) == [("a", 0, 5, True)]
    assert shape(run_step(scheduler).decodes) == [("a", 5, 1, True)]
    assert shape(run_step(scheduler).decodes) == [("a", 6, 1, True)]
    assert not scheduler.has_work
    assert scheduler.num_free_blocks == 16
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


def test_nobody_overtakes_a_large_prompt_at_the_head_of_the_queue():
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
        (make_request("r", max_new_tokens=0), "max_new_tokens", "at least 1"),
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
    scheduler.add(make_request("r", num_prompt=30, max_new_tokens=3))  # 32 cached tokens and one that needs no room
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
    scheduler.add(make_request("a", num_prompt=8, max_new_tokens=9))
    run_step(scheduler)
    scheduler.add(make_request("b", num_prompt=8))
    proposal = run_step(scheduler)
    assert shape(proposal.prefills) == [("b", 4, 4, True)]
    a, b = scheduler.get("a"), scheduler.get("b")
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


def test_blocks_are_not_shared_before_their_step_has_run():
    scheduler = make_scheduler(max_batch_tokens=32)
    scheduler.add(make_request("a", num_prompt=9))
    scheduler.add(make_request("b", num_prompt=9))
    assert shape(run_step(scheduler).prefills) == [("a", 0, 9, True), ("b", 0, 9, True)]
    assert not set(scheduler.get("a").block_ids) & set(scheduler.get("b").block_ids)


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


def test_the_head_of_the_queue_is_admitted_as_soon_as_enough_blocks_are_free():
    scheduler = make_scheduler(num_blocks=6, max_batch_tokens=64)
    scheduler.add(make_request("short", num_prompt=8, max_new_tokens=2))
    scheduler.add(make_request("long", num_prompt=8, max_new_tokens=6, first=100))
    run_step(scheduler)
    scheduler.add(make_request("next", num_prompt=10, max_new_tokens=1, first=200))
    assert not run_step(scheduler).prefills  # 2 free blocks, 3 needed; then short ends
    assert shape(run_step(scheduler).prefills) == [("next", 0, 10, True)]
    assert scheduler.get("long") is not None


def test_a_flush_hides_everything_computed_before_also_by_running_requests():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=9, max_new_tokens=12))
    run_step(scheduler)
    scheduler.flush_prefix_cache()
    for _ in range(4):
        run_step(scheduler)  # a's fourth block is full now, but rests on blocks from before the flush
    known = scheduler.get("a").token_ids(0, 13)
    scheduler.add(Request("b", 0, known[:9], [], SamplingParams(max_new_tokens=1), seed=0))
    assert shape(run_step(scheduler).prefills) == [("b", 0, 9, True)]
    scheduler.add(Request("c", 0, known, [], SamplingParams(max_new_tokens=4), seed=0))
    assert shape(run_step(scheduler).prefills) == [("c", 8, 5, True)]  # b's two blocks, not a's third


@pytest.mark.parametrize("max_batch_tokens", [4, 16])
def test_the_youngest_is_preempted_and_comes_back_before_all_others_with_its_tokens(max_batch_tokens):
    scheduler = make_scheduler(num_blocks=5, max_running=2, max_batch_tokens=max_batch_tokens)
    scheduler.add(make_request("a", num_prompt=7, max_new_tokens=9))
    scheduler.add(make_request("b", num_prompt=7, max_new_tokens=9, first=100))
    scheduler.add(make_request("c", num_prompt=7, max_new_tokens=2, first=200))
    preempted = []
    produced = {}
    requests = {name: scheduler.get(name) for name in "abc"}
    order = []
    while scheduler.has_work:
        proposal = run_step(scheduler)
        preempted += proposal.preempted
        order += [chunk.request.request_id for chunk in proposal.prefills]
        for name in proposal.preempted:
            produced[name] = len(requests[name].output_ids)
    assert preempted == ["b"]
    assert produced["b"] > 0
    assert order.index("c") > len(order) - 1 - order[::-1].index("b")
    for request in requests.values():
        num_prompt = len(request.prompt_ids)
        assert request.output_ids == [1000 + num_prompt + i for i in range(request.params.max_new_tokens)]
    assert scheduler.stats.num_preempted == 1


@pytest.mark.parametrize("num_prompt, num_blocks, max_batch_tokens", [(40, 50, 16), (16, 40, 64)])
def test_under_memory_pressure_a_request_is_preempted_about_once(num_prompt, num_blocks, max_batch_tokens):
    """Admitting preempted requests as soon as their first chunk fits would preempt each of them twice on average."""
    scheduler = make_scheduler(num_blocks, 4, 8, max_batch_tokens, max_model_len=512, prefix_cache=False)
    for i in range(8):
        scheduler.add(make_request(str(i), num_prompt, max_new_tokens=40, first=1000 * i))
    while scheduler.has_work:
        run_step(scheduler)
    assert 0 < scheduler.stats.num_preempted <= 8


def test_drafts_for_a_request_that_is_not_decoding_are_dropped():
    scheduler = make_scheduler()
    request = make_request("a", num_prompt=3, max_new_tokens=20)
    scheduler.add(request)
    request.draft_ids = [1, 2]
    assert shape(scheduler.propose().prefills) == [("a", 0, 3, True)]
    assert request.draft_ids == []


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
    scheduler.complete(chunks[0], [5])
    scheduler.check()
    assert scheduler.num_free_blocks == 16
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
    scheduler.add(make_request("b", num_prompt=6))
    proposal = scheduler.propose()
    held = scheduler.commit(proposal, hold_prefill=True)
    assert shape(held) == [("a", 3, 1, True)]
    scheduler.complete(held[0], [9])
    blocks = list(scheduler.get("b").block_ids)
    assert shape(run_step(scheduler).prefills) == [("b", 0, 6, True)]
    assert scheduler.get("b").block_ids == blocks


def test_a_proposal_that_is_dropped_is_proposed_again():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=6))
    first = scheduler.propose()
    assert scheduler.propose() == first
    scheduler.check()


def test_accepted_drafts_become_output_and_rejected_ones_are_computed_again():
    scheduler = make_scheduler()
    request = make_request("a", num_prompt=3, max_new_tokens=20)
    scheduler.add(request)
    run_step(scheduler)  # output: [1003]
    request.draft_ids = [50, 51, 52]
    proposal = scheduler.propose()
    assert shape(proposal.decodes) == [("a", 3, 4, True)]
    assert request.token_ids(3, 7) == [1003, 50, 51, 52]
    scheduler.complete(scheduler.commit(proposal)[0], [50, 77])  # one accepted, then the model's own token
    scheduler.check()
    assert request.output_ids == [1003, 50, 77]
    assert request.num_computed == 5
    assert shape(run_step(scheduler).decodes) == [("a", 5, 1, True)]


def test_drafts_give_way_to_budget_limits_and_blocks():
    scheduler = make_scheduler(max_batch_tokens=6, max_running=4)
    requests = [make_request(name, num_prompt=2, max_new_tokens=20, first=10 * i) for i, name in enumerate("abc")]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    for request in requests:
        request.draft_ids = [1, 2]
    assert [chunk.length for chunk in scheduler.propose().decodes] == [3, 2, 1]
    last = make_request("z", num_prompt=2, max_new_tokens=2)
    alone = make_scheduler()
    alone.add(last)
    run_step(alone)
    last.draft_ids = [1, 2, 3]
    assert [chunk.length for chunk in alone.propose().decodes] == [1]


def test_a_sampled_row_without_token_is_computed_again():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=8))
    scheduler.complete(scheduler.commit(scheduler.propose())[0], [])
    scheduler.check()
    assert shape(scheduler.propose().prefills) == [("a", 7, 1, True)]


def test_a_resubmitted_request_goes_on_after_its_output():
    scheduler = make_scheduler()
    request = make_request("a", num_prompt=3, max_new_tokens=4, output_ids=[1003, 1004])
    scheduler.add(request)
    assert shape(run_step(scheduler).prefills) == [("a", 0, 5, True)]
    run_step(scheduler)
    assert request.output_ids == [1003, 1004, 1005, 1006]
    assert not scheduler.has_work


def test_pending_tokens_count_what_is_left_to_compute_and_to_produce():
    scheduler = make_scheduler(max_batch_tokens=8)
    scheduler.add(make_request("a", num_prompt=10, max_new_tokens=4))
    scheduler.add(make_request("b", num_prompt=3, max_new_tokens=5))
    assert scheduler.pending_tokens == (13, 9)
    run_step(scheduler)
    assert scheduler.pending_tokens == (5, 9)
