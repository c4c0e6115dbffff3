"""Long prompts beside short ones: how soon each has its first token, whatever else arrives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.scheduler import ScheduledChunk, Scheduler, share_budget
from tests.attention_dp.steps import make_request, make_scheduler, next_token

MAX_RUNNING, MAX_BATCH_TOKENS = 6, 24
SMALLEST_HALF = (MAX_BATCH_TOKENS - MAX_RUNNING) // 2  # of the budget, beside as many decodes as can run


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=8), st.integers(1, 60))
def test_shares_use_the_budget_and_give_the_oldest_half_of_it(num_left: list[int], budget: int) -> None:
    shares = share_budget(num_left, [None] * len(num_left), budget)
    assert sum(shares) == min(budget, sum(num_left))
    assert all(0 <= share <= left for share, left in zip(shares, num_left, strict=True))
    if num_left:
        assert shares[0] >= min(num_left[0], (budget + 1) // 2)


def test_of_prefills_that_compute_the_same_block_one_does() -> None:
    keys = [b"x", b"y", b"x", b"y", None, None]
    assert share_budget([100, 20, 10, 10, 9, 9], keys, 100) == [72, 0, 0, 10, 9, 9]


def test_prompts_that_begin_alike_compute_their_beginning_once() -> None:
    scheduler = make_scheduler(num_blocks=500, max_running=8, max_batch_tokens=32, max_model_len=500)
    for i in range(6):
        request = make_request(str(i), num_prompt=200, max_new_tokens=1)
        request.prompt_ids += [1000 + i]
        scheduler.add(request)
    num_computed = 0
    while scheduler.has_work:
        num_computed += sum(chunk.length for chunk in _step(scheduler))
    assert num_computed == 200 + 6


def test_a_short_prompt_behind_long_ones_has_its_first_token_at_once() -> None:
    scheduler = make_scheduler(num_blocks=100_000, max_batch_tokens=512, max_model_len=200_000)
    scheduler.add(make_request("long", num_prompt=120_000, max_new_tokens=1))
    _step(scheduler)
    scheduler.add(make_request("other long", num_prompt=119_000, max_new_tokens=1, first=1))
    short = make_request("short", num_prompt=10, first=7)
    scheduler.add(short)
    _step(scheduler)
    assert len(short.output_ids) == 1


def test_a_long_prompt_takes_at_most_twice_its_steps_however_many_short_ones_arrive() -> None:
    scheduler = make_scheduler(num_blocks=2000, max_running=8, max_batch_tokens=64, max_model_len=4000)
    long = make_request("long", num_prompt=3000, max_new_tokens=1)
    scheduler.add(long)
    for number in range(-(-3000 // 32)):
        for i in range(8):
            scheduler.add(make_request(f"{number}.{i}", num_prompt=30, max_new_tokens=1, first=1000 * number + 31 * i))
        _step(scheduler)
    assert long.output_ids


arrivals = st.lists(st.lists(st.one_of(st.integers(1, 12), st.integers(60, 400)), max_size=3), max_size=12)


@settings(deadline=None, max_examples=50)
@given(arrivals, st.integers(1, 5), st.booleans())
def test_the_first_token_comes_within_the_stated_steps(
    arrivals: list[list[int]], max_new_tokens: int, prefix_cache: bool
) -> None:
    """The bound of `share_budget`, for each request from the step that admits it."""
    num_blocks = 110 * MAX_RUNNING  # blocks of 4 tokens for all that run, so that none is preempted
    scheduler = make_scheduler(num_blocks, MAX_RUNNING, MAX_BATCH_TOKENS, 500, prefix_cache)
    work: dict[str, int] = {}  # tokens that may be computed before the first token of each prefill, its own included
    steps: dict[str, int] = {}
    started: dict[str, int] = {}
    left: dict[str, Request] = {}
    turn = 0
    while turn < len(arrivals) or scheduler.has_work:
        for i, num_prompt in enumerate(arrivals[turn] if turn < len(arrivals) else []):
            request = make_request(f"{turn}.{i}", num_prompt, max_new_tokens, first=1000 * turn + i)
            left[request.request_id] = request
            scheduler.add(request)
        waiting = [name for name, request in left.items() if request.table_row < 0]
        proposal = scheduler.propose()
        assert scheduler.stats.num_preempted == 0
        prefilling = {name: r for name, r in left.items() if r.table_row >= 0 and not r.output_ids}
        for name in [name for name in waiting if left[name].table_row >= 0]:
            started[name] = turn
            _record_admitted(name, prefilling, work)
        for chunk in scheduler.commit(proposal):
            scheduler.complete(chunk, next_token(chunk.request) if chunk.samples else None)
            name = chunk.request.request_id
            if name in prefilling and chunk.request.output_ids:
                steps[name] = turn + 1 - started[name]
            if len(chunk.request.output_ids) == max_new_tokens:
                scheduler.finish(name)
                del left[name]
        scheduler.check()
        turn += 1
    assert steps.keys() == work.keys()
    for name, num_steps in steps.items():
        assert num_steps <= -(-work[name] // SMALLEST_HALF), f"{name}: {num_steps} steps for {work[name]} tokens"


def _record_admitted(name: str, prefilling: dict[str, Request], work: dict[str, int]) -> None:
    """A request is admitted: it may come before longer ones, and those that have fewer tokens left before it."""
    num_left = {other: request.num_known - request.num_computed for other, request in prefilling.items()}
    work[name] = num_left[name]
    for other in prefilling.keys() & work.keys() - {name}:
        if num_left[name] < num_left[other]:
            work[other] += num_left[name]
        else:
            work[name] += num_left[other]


def _step(scheduler: Scheduler) -> tuple[ScheduledChunk, ...]:
    chunks = scheduler.commit(scheduler.propose())
    for chunk in chunks:
        scheduler.complete(chunk, next_token(chunk.request) if chunk.samples else None)
        if len(chunk.request.output_ids) == chunk.request.params.max_new_tokens:
            scheduler.finish(chunk.request.request_id)
    return chunks
