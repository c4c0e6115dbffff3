"""Which rank takes a request: affinity to a prefix or a session, and the slots that ranks have."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest

from moe_serve.attention_dp import request_router
from moe_serve.attention_dp.request_router import PageSharing
from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.server.ranks.request_book import PrefillLaunch, RankCapacity, ranks_to_choose_from
from moe_serve.server.requests.open_request import Changes, OpenRequest, RequestSpec
from tests.server.served import fake_config

SHARED = list(range(400))  # a prefix of 25 blocks


@pytest.mark.parametrize(
    "num_requests, ranks",
    [
        ({0: 0, 1: 0}, [0, 1]),
        ({0: 7, 1: 0}, [0, 1]),  # a slot of rank 0 is free: whoever likes it may go there
        ({0: 8, 1: 0}, [1]),  # it would wait there
        ({0: 8, 1: 7, 2: 9}, [1]),
        ({0: 8, 1: 8}, [0, 1]),  # it waits anywhere
        ({0: 10, 1: 9}, [1]),  # rank 0 takes no more
        ({0: 10, 1: 10}, []),
        ({}, []),
    ],
    ids=str,
)
def test_a_full_rank_is_left_out_while_another_has_a_free_slot(num_requests: dict[int, int], ranks: list[int]):
    assert ranks_to_choose_from(num_requests, slots=8, most=10) == ranks


def capacity_of(num_ranks: int = 2, *overrides: str) -> RankCapacity:
    capacity = RankCapacity(fake_config(num_ranks, "engine.max_running_requests=8", *overrides))
    capacity.begin_launch(16, ())
    return capacity


def request(number: int, session_id: str | None = None) -> OpenRequest:
    spec = RequestSpec([*SHARED, 5000 + number], SamplingParams(max_new_tokens=4), 1, session_id=session_id)
    return OpenRequest(str(number), spec, None, (), Changes())


def send(capacity: RankCapacity, number: int, **fields: str | None) -> int:
    """Sends a request, whose prompt is computed at once."""
    rank = capacity.send(request(number, **fields), may_choose=True)
    capacity.started(rank, str(number))
    return rank


@pytest.mark.parametrize("session_id", [None, "one for all"])
def test_of_16_requests_with_one_prefix_8_go_to_each_of_two_ranks_with_8_slots(session_id: str | None):
    capacity = capacity_of()
    ranks = [send(capacity, number, session_id=session_id) for number in range(16)]
    assert Counter(ranks) == {ranks[0]: 8, 1 - ranks[0]: 8}
    assert ranks[:8] == [ranks[0]] * 8, "as long as its slots are free, a prefix stays where it is cached"


def test_a_prefix_stays_with_its_rank_while_slots_are_free():
    capacity = capacity_of()
    first = send(capacity, 0)
    for number in range(1, 65):
        assert send(capacity, number) == first
        if number >= 7:
            capacity.free(first, str(number - 7))


def test_two_front_ends_that_do_not_know_of_each_other_do_not_fill_one_rank():
    """Each sent all 32 of its requests to rank 0, where eight waited while rank 1 was idle."""
    rooms = [capacity_of(2, "server.api_workers=2") for _ in range(2)]
    ranks = Counter(send(capacity, number) for capacity in rooms for number in range(8))
    assert ranks == {0: 8, 1: 8}


def test_where_all_slots_are_taken_requests_go_ahead_to_any_rank_with_room():
    capacity = capacity_of()
    ranks: dict[int, int] = {}
    while capacity.has_room(None):
        ranks[len(ranks)] = send(capacity, len(ranks))
    assert Counter(ranks.values()) == {0: 10, 1: 10}
    assert not capacity.has_room(0)
    capacity.free(1, str(next(number for number, rank in ranks.items() if rank == 1)))
    assert (capacity.has_room(0), capacity.has_room(1), capacity.has_room(None)) == (False, True, True)


def test_a_rank_that_is_lost_offers_no_slot():
    capacity = capacity_of()
    capacity.lose([0])
    assert Counter(send(capacity, number) for number in range(10)) == {1: 10}
    assert capacity.has_room(0) is capacity.has_room(None) is False, "who chose rank 0 may go to any"
    capacity.regain([0])
    assert send(capacity, 10) == 0


@pytest.mark.parametrize(("state_pages", "route"), [(5, "prefill"), (6, "pages_full")])
def test_a_state_on_its_way_counts_beside_the_pages_of_its_prompt(state_pages: int, route: str):
    capacity = capacity_of(1, "parallel.num_prefill_ranks=1")
    capacity.begin_prefill(16, ())
    capacity.prefill_launch = PrefillLaunch(7, 30, state_pages)
    capacity.send(request(0), may_choose=True)  # of 25 pages
    assert capacity.routes == {route: 1}


@pytest.mark.parametrize("is_prefill", [False, True], ids=["decode", "prefill"])
def test_a_request_names_the_rank_of_another_host_that_has_its_prefix(is_prefill: bool):
    sharing = PageSharing(("a", "b"), between_hosts=True)
    capacity = RankCapacity(
        fake_config(2, "engine.max_running_requests=1", f"parallel.num_prefill_ranks={2 * is_prefill}")
    )
    capacity.begin_launch(16, (), sharing)
    if is_prefill:
        capacity.begin_prefill(16, (), sharing)
        capacity.prefill_launch = PrefillLaunch(7, 1000, state_pages=0)
    requests = [request(0), request(1)]
    ranks = [capacity.send(each, may_choose=True) for each in requests]
    assert [capacity.is_prefill(rank) for rank in ranks] == [is_prefill] * 2
    assert sorted(rank % 2 for rank in ranks) == [0, 1], "the first one's slot is taken"
    holders = [each.submit_message(prefill=is_prefill).pages_at for each in requests]
    assert holders == [None, ranks[0] % 2], "by its number among those that reach it"
    assert capacity.sources == {"none": 1, "slow": 1}, "no rank has measured the way yet"
    capacity.free(ranks[1], "1")
    capacity.lose([ranks[0]])
    assert capacity.send(requests[1], may_choose=True) == ranks[1]
    assert requests[1].pages_at is None


def test_routers_hash_a_prompt_once_on_its_way_through_a_prefill_rank():
    capacity = capacity_of(2, "parallel.num_prefill_ranks=1")
    capacity.begin_prefill(16, ())
    capacity.prefill_launch = PrefillLaunch(7, 1000, state_pages=0)
    first, sample, salted = request(0), request(0), request(0)
    sample.request_id = "sample"
    salted.spec = replace(salted.spec, salt="other")
    with mock.patch.object(request_router, "block_keys", wraps=request_router.block_keys) as hashes:
        assert capacity.is_prefill(capacity.send(first, may_choose=True))
        assert capacity.expect(first) is not None
        capacity.send(sample, may_choose=True)
        assert hashes.call_count == 1
        capacity.send(salted, may_choose=True)
        assert hashes.call_count == 2
        capacity.begin_launch(32, ())
        capacity.send(salted, may_choose=True)
        assert hashes.call_args.args[2] == 32, "the blocks of its new ranks are larger"
