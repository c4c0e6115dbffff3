"""Snapshots of states: where they are kept, what they make of a cached prefix, and what a void step leaves."""

from collections.abc import Iterable, Sequence

import pytest

from moe_serve.attention_dp.pages import Fetch, PageTiers
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Scheduler
from moe_serve.attention_dp.speculation import Speculator
from moe_serve.attention_dp.state_slots import StateSlots
from tests.attention_dp.steps import next_token, run_step


def scheduler_of(num_snapshots: int = 8, interval: int = 16) -> Scheduler:
    """Returns a scheduler of a model with states, over blocks of 4 tokens."""
    blocks = RequestBlocks(64, 4, states=StateSlots(4, 12, num_snapshots, interval))
    return Scheduler(blocks, max_running=4, max_batch_tokens=64, max_model_len=256)


def request_of(name: str, prompt: list[int], max_new_tokens: int = 2) -> Request:
    return Request(name, 0, prompt, [], SamplingParams(max_new_tokens=max_new_tokens), seed=0)


def serve(scheduler: Scheduler, *requests: Request) -> list[list[tuple[str, int, int]]]:
    """Runs requests to their end; returns the chunks of each step: name, start and length."""
    for request in requests:
        scheduler.add(request)
    steps = []
    while scheduler.has_work:
        proposal = run_step(scheduler)
        steps.append([(chunk[0].request_id, *chunk[1:3]) for chunk in (*proposal.decodes, *proposal.prefills)])
    return steps


def test_an_equal_prompt_goes_on_behind_its_last_whole_block() -> None:
    scheduler, prompt = scheduler_of(), list(range(11))
    assert serve(scheduler, request_of("a", prompt))[0] == [("a", 0, 11)]
    assert serve(scheduler, request_of("b", prompt))[0] == [("b", 8, 3)]
    longer = [*prompt[:10], 77, 78, 79]  # shares two blocks, with a snapshot behind the second
    assert serve(scheduler, request_of("c", longer))[0] == [("c", 8, 5)]


def test_chunks_of_long_prompts_end_where_snapshots_are_kept() -> None:
    scheduler, prompt = scheduler_of(), list(range(40))
    steps = serve(scheduler, request_of("a", prompt))
    assert steps[:3] == [[("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)]]
    assert serve(scheduler, request_of("b", [*prompt[:35], 99]))[0] == [("b", 32, 4)]
    assert serve(scheduler, request_of("c", [*prompt[:30], 99]))[0][0] == ("c", 16, 12), "the blocks end behind 28"


def test_the_second_of_a_shared_beginning_leaves_a_snapshot_for_the_third() -> None:
    scheduler, stem = scheduler_of(), list(range(9))
    first, *others = (request_of(name, [*stem, *[50 + n] * 20]) for n, name in enumerate("abc"))
    serve(scheduler, first)
    steps = [serve(scheduler, request)[0] for request in others]
    assert steps == [[("b", 0, 8)], [("c", 8, 8)]], "up to 16, which is a place of every long prompt"


def test_prompts_that_begin_alike_side_by_side_compute_the_beginning_once() -> None:
    scheduler, stem = scheduler_of(interval=64), list(range(20))
    requests = [request_of(name, [*stem, *[50 + n] * (10 + n)]) for n, name in enumerate("abc")]
    steps = serve(scheduler, *requests)
    assert steps[0] == [("a", 0, 20)]
    assert sorted(steps[1]) == [("a", 20, 10), ("b", 20, 11), ("c", 20, 12)]
    assert [request.num_cached_prompt for request in requests] == [0, 20, 20]


def test_the_output_has_one_snapshot_that_moves_on() -> None:
    scheduler, request = scheduler_of(), request_of("a", [1, 2, 3], 45)
    serve(scheduler, request)
    assert request.output_snapshot is None
    known = request.token_ids(0, 45)
    assert serve(scheduler, request_of("b", [*known[:30], 7]))[0][0] == ("b", 0, 16), "that behind 16 is gone"
    assert serve(scheduler, request_of("c", [*known, 7]))[0][0] == ("c", 32, 12)


def test_without_snapshots_no_prefix_counts() -> None:
    scheduler, prompt = scheduler_of(num_snapshots=0), list(range(11))
    for name in "ab":
        assert serve(scheduler, request_of(name, prompt))[0] == [(name, 0, 11)]


@pytest.mark.parametrize("flushed", [False, True])
def test_a_void_step_spoils_the_states_of_its_requests_alone(flushed: bool) -> None:
    scheduler = scheduler_of()
    requests = [request_of("a", list(range(11)), 9), request_of("b", list(range(50, 60)), 9)]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    run_step(scheduler)
    if flushed:
        scheduler.blocks.flush()
    scheduler.commit(scheduler.propose())  # and nothing is completed
    again = scheduler.propose()
    assert [chunk[1] for chunk in again.prefills] == ([0, 0] if flushed else [8, 8])
    scheduler.check()
    assert scheduler.stats.num_preempted == 2


def test_what_was_withdrawn_leaves_no_snapshot() -> None:
    scheduler, prompt = scheduler_of(), list(range(11))
    scheduler.add(request_of("a", prompt))
    run_step(scheduler)
    scheduler.discard("a")  # its values were not finite
    scheduler.check()
    assert serve(scheduler, request_of("b", prompt))[0] == [("b", 0, 11)]


class Tiers(PageTiers):
    """Tiers that have nothing, and note what goes down. looked_at: keys of states that were offered"""

    def __init__(self, bytes_of_state: int | None):
        self.bytes_of_state, self.looked_at = bytes_of_state, list[bytes]()

    def keep_state(self, key: bytes, slot: int) -> int | None:
        self.looked_at.append(key)
        return self.bytes_of_state

    def keep(self, key: bytes, block: int) -> None:
        pass

    def written(self, blocks: Iterable[int]) -> None:
        pass

    def fetch(self, keys: Sequence[bytes], holder: int | None = None) -> Fetch:
        return Fetch(keys, done=True)

    def is_coming(self, fetch: Fetch) -> bool:
        return False

    def drop(self, fetch: Fetch) -> None:
        pass


@pytest.mark.parametrize(("bytes_of_state", "num_steps"), [(16 << 20, 2), (99 << 20, 4), (0, 1)])
def test_a_step_copies_a_bounded_number_of_states_down_and_each_once(bytes_of_state: int, num_steps: int) -> None:
    scheduler, tiers = scheduler_of(), Tiers(bytes_of_state)
    scheduler.blocks.tiers = tiers
    requests = [request_of(name, [index] * 9, 9) for index, name in enumerate("abcd")]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)  # which ends all prompts
    assert len(tiers.looked_at) == -(-4 // num_steps)
    for _ in range(3):
        run_step(scheduler)
        for request in requests:
            scheduler.blocks.keep(request)
    assert len(tiers.looked_at) == len(set(tiers.looked_at)) == 4
    for request in requests:
        scheduler.finish(request.request_id)
    scheduler.check()
    assert len(tiers.looked_at) == 4


def test_states_that_found_no_room_below_are_offered_again() -> None:
    scheduler, tiers = scheduler_of(), Tiers(None)
    scheduler.blocks.tiers = tiers
    serve(scheduler, request_of("a", list(range(9))))
    assert len(tiers.looked_at) == 2, "behind the prompt, and at the end"


class SixDrafts(Speculator):
    """Six drafts of each request."""

    def __init__(self) -> None:
        super().__init__(max_drafts=6, index_bytes=1, shares_text=False, always=True, reads_text=False)

    def draft(self, requests: Sequence[Request], num_rows: int) -> list[tuple[int, ...]]:
        return [(0,) * 6] * len(requests)


class OneByOne(SixDrafts):
    """As many drafts as there may be. num_rows: that were asked for"""

    def draft(self, requests: Sequence[Request], num_rows: int) -> list[tuple[int, ...]]:
        self.num_rows = num_rows
        return [(0,) * len(range(index, num_rows, len(requests))) for index in range(len(requests))]


def test_a_request_goes_on_from_the_state_behind_the_last_draft_that_counts() -> None:
    for num_right in range(4):
        scheduler, request = scheduler_of(interval=64), request_of("a", list(range(5)), 30)
        scheduler.add(request)
        run_step(scheduler)
        scheduler.speculator = SixDrafts()
        (chunk,) = scheduler.commit(scheduler.propose())
        source, to, number, *copies = request.state_row(chunk.start, chunk.length)
        assert (source, number) == (to, -6), "in place, with a copy behind each row but the last"
        assert len({to, *copies}) == 7
        scheduler.complete(chunk, 0)
        for _ in range(num_right):
            scheduler.accept(request, 0)
        scheduler.check()
        scheduler.speculator = None
        (then,) = scheduler.commit(scheduler.propose())
        assert request.state_row(then.start, then.length) == (copies[num_right], copies[num_right], 0, 0)
        scheduler.check()


def test_drafts_that_have_not_run_leave_the_state_alone() -> None:
    scheduler, request = scheduler_of(), request_of("a", list(range(5)), 30)
    scheduler.add(request)
    run_step(scheduler)
    scheduler.speculator = SixDrafts()
    slot = request.state_slot
    for _ in range(20):  # proposals that the ranks do not run
        (chunk,) = scheduler.propose().decodes
        assert request.state_row(chunk.start, chunk.length)[:2] == (slot, slot)
        scheduler.check()
    scheduler.abort("a")
    scheduler.check()


def test_drafts_have_the_slots_that_running_requests_leave() -> None:
    """Each running request has a slot of its own, and one that prefills has no drafts."""
    scheduler = scheduler_of(interval=64)
    decoding = [request_of(name, [index] * 5, 30) for index, name in enumerate("abc")]
    for request in decoding:
        scheduler.add(request)
    run_step(scheduler)
    drafting = scheduler.speculator = OneByOne()
    for number, name in enumerate("d."):
        proposal = scheduler.propose()
        assert drafting.num_rows == [13, 12][number] == sum(len(chunk.drafts) for chunk in proposal.decodes)
        scheduler.check()
        scheduler.add(request_of(name, [number + 7] * 5))


def test_a_step_has_no_more_rows_of_logits_than_memory_is_planned_for() -> None:
    """Each prefill has one, too: it yields a token, or shows whether its values are finite."""
    scheduler = Scheduler(RequestBlocks(128, 4), max_running=20, max_batch_tokens=64, max_model_len=256)
    for index in range(12):
        scheduler.add(request_of(str(index), [index] * 3, 30))
    run_step(scheduler)
    drafting = scheduler.speculator = OneByOne()
    for number, length in enumerate((3, 3, 3, 3, 3, 20)):
        scheduler.add(request_of(f"new {number}", [50 + number] * length, 30))
    proposal = scheduler.propose()
    assert (len(proposal.decodes), len(proposal.prefills), drafting.num_rows) == (12, 6, 2)


def test_drafts_end_in_front_of_the_places_of_snapshots() -> None:
    scheduler, request = scheduler_of(), request_of("a", [1, 2, 3], 45)
    scheduler.speculator = SixDrafts()
    scheduler.add(request)
    lengths = []
    while scheduler.has_work:
        for chunk in scheduler.commit(scheduler.propose()):
            lengths.append(chunk.length)
            scheduler.complete(chunk, next_token(request))
            for _ in chunk.drafts:  # which are right
                scheduler.accept(request, next_token(request))
        scheduler.check()
        if len(request.output_ids) == 45:
            scheduler.finish("a")
    assert lengths == [3, 7, 5, 1, 7, 7, 1, 1, 7, 7, 1]
    scheduler.speculator = None
    later = request_of("b", [*request.token_ids(0, 45), 7])
    assert serve(scheduler, later)[0][0] == ("b", 32, 12), "as without drafts"
