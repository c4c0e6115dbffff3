from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.attention_dp import request_router
from moe_serve.attention_dp.request_router import FETCH_COST, PageSharing, RequestRouter, RoutedPrompt, Source
from moe_serve.errors import CapacityError


def prompt(first: int, length: int = 64) -> list[int]:
    return list(range(first, first + length))


def route(
    router: RequestRouter, prompt_ids: list[int], session_id: str | None = None, salt: str = "", **options: Any
) -> int:
    return router.route(RoutedPrompt(prompt_ids, salt), session_id, **options)


def test_requests_without_history_spread_over_idle_ranks():
    router = RequestRouter(4)
    assert sorted(route(router, prompt(1000 * i)) for i in range(4)) == [0, 1, 2, 3]


def test_unacknowledged_work_counts_at_once():
    router = RequestRouter(2)
    first = route(router, prompt(0, 1000), request_id="long")
    for i in range(5):
        assert route(router, prompt(2000 + 100 * i), request_id=str(i)) == 1 - first


def test_tokens_to_produce_count_until_the_request_is_finished():
    router = RequestRouter(2)
    rank = route(router, prompt(0), request_id="a", max_new_tokens=500)
    assert router.load(rank) == 564
    router.started("a")
    router.started("a")
    assert router.load(rank) == 500
    router.finished("a")
    router.finished("a")
    assert router.load(rank) == 0


def test_a_prompt_follows_its_beginning_to_the_rank_that_has_it():
    router = RequestRouter(4, block_size=16)
    system = prompt(0, 160)
    rank = route(router, system + prompt(5000, 10), request_id="a")
    router.finished("a")
    for i in range(8):
        assert route(router, system + prompt(6000 + 100 * i, 10)) == rank


def test_cached_tokens_are_not_counted_as_work():
    router = RequestRouter(2, block_size=16)
    rank = route(router, prompt(0, 64), request_id="a")
    router.finished("a")
    assert route(router, prompt(0, 65), request_id="b") == rank
    assert router.load(rank) == 1


def test_a_full_last_block_is_expected_to_be_computed_again():
    router = RequestRouter(2, block_size=16)
    rank = route(router, prompt(0, 64), request_id="a")
    router.finished("a")
    assert route(router, prompt(0, 64), request_id="b") == rank
    assert router.load(rank) == 16


def test_other_salt_has_no_affinity():
    router = RequestRouter(2)
    rank = route(router, prompt(0), salt="x")
    assert route(router, prompt(0), salt="y") == 1 - rank


def test_sessions_of_one_name_but_other_salts_are_different_sessions():
    one, two = RequestRouter(8), RequestRouter(8)
    ranks = {salt: route(one, [1], "session", salt) for salt in map(str, range(50))}
    assert {salt: route(two, [2], "session", salt) for salt in ranks} == ranks, "front ends agree"
    assert set(ranks.values()) == set(range(8))


@pytest.mark.parametrize("session_id", [None, "s"])
def test_affinity_yields_above_the_load_gap(session_id):
    router = RequestRouter(2, load_gap=512, block_size=16)
    rank = route(router, prompt(0, 2048), session_id, request_id="a")
    router.finished("a")
    router.update(rank, 512)
    assert route(router, prompt(0, 2048), session_id) == rank
    router.update(rank, 513)
    assert route(router, prompt(0, 2048), session_id) == 1 - rank


def test_the_load_of_other_front_ends_is_what_our_own_requests_do_not_explain():
    router = RequestRouter(1)
    route(router, prompt(0, 100), request_id="a", max_new_tokens=50)
    router.update(0, 300)
    assert router.load(0) == 350
    route(router, prompt(1000, 10), request_id="b", max_new_tokens=5)
    assert router.load(0) == 365
    router.finished("a")
    assert router.load(0) == 215
    router.update(0, 0)
    assert router.load(0) == 15


def test_two_front_ends_send_a_session_to_the_same_rank():
    one, two = RequestRouter(8), RequestRouter(8)
    route(one, prompt(0))
    for i in range(50):
        assert route(one, prompt(i), f"session-{i}") == route(two, prompt(9 * i), f"session-{i}")


def test_when_a_rank_is_lost_only_its_own_sessions_move():
    router = RequestRouter(8, load_gap=1e9)
    before = {f"s{i}": route(router, [1], f"s{i}") for i in range(200)}
    router.mark_lost(3)
    router.mark_lost(3)
    after = {session: route(router, [1], session) for session in before}
    assert all(after[session] == rank for session, rank in before.items() if rank != 3)
    moved = Counter(after[session] for session, rank in before.items() if rank == 3)
    assert 3 not in moved
    assert len(moved) > 1, "the sessions of the lost rank are spread, not dumped on one"


def test_a_lost_rank_gets_nothing_and_forgets_its_requests():
    router = RequestRouter(2)
    rank = route(router, prompt(0, 320), request_id="a", max_new_tokens=7)
    router.mark_lost(rank)
    router.update(rank, 5)
    for i in range(4):
        assert route(router, prompt(0, 320), request_id=str(i)) == 1 - rank
    router.started("a")
    router.finished("a")
    assert router.ranks == (1 - rank,)


def test_a_second_attempt_is_counted_once():
    router = RequestRouter(2)
    lost = route(router, prompt(0), request_id="a", max_new_tokens=10)
    router.mark_lost(lost)
    rank = route(router, prompt(0), request_id="a", max_new_tokens=10)
    route(router, prompt(0), request_id="a", max_new_tokens=10)
    router.finished("a")
    assert router.load(rank) == 0


def test_without_ranks_the_error_says_what_to_do():
    router = RequestRouter(1)
    router.mark_lost(0)
    with pytest.raises(CapacityError, match="restart"):
        route(router, [1])


def test_the_affinity_table_is_bounded_and_keeps_what_was_used_last(monkeypatch):
    monkeypatch.setattr(request_router, "MAX_KEYS", 50)
    router = RequestRouter(4, block_size=4)
    rank = route(router, prompt(0, 40), request_id="a")
    router.finished("a")
    for i in range(100):
        assert route(router, prompt(0, 41)) == rank
        route(router, prompt(1000 * (i + 1), 40))
    route(router, prompt(10**6, 4000))
    assert len(router._ranks_of) <= 50


@given(st.lists(st.tuples(st.sampled_from(["route", "started", "finished", "lost"]), st.integers(0, 5)), max_size=60))
def test_own_load_is_the_sum_of_unfinished_requests_whatever_happens(events):
    router = RequestRouter(3, block_size=2)
    sent: dict[str, list[int]] = {}  # id -> rank, prefill, new tokens
    for event, number in events:
        name = str(number)
        if event == "route" and router.ranks:
            before = {rank: router.load(rank) for rank in router.ranks}
            old = sent.pop(name, None)
            if old is not None and old[0] in before:
                before[old[0]] -= old[1] + old[2]
            rank = route(router, list(range(3 * number)), request_id=name, max_new_tokens=number)
            prefill = router.load(rank) - before[rank] - number
            assert 0 <= prefill <= 3 * number
            sent[name] = [rank, prefill, number]
        elif event == "started":
            router.started(name)
            if name in sent:
                sent[name][1] = 0
        elif event == "finished":
            router.finished(name)
            sent.pop(name, None)
        elif event == "lost":
            router.mark_lost(number)
        for rank in router.ranks:
            own = sum(prefill + new for where, prefill, new in sent.values() if where == rank)
            assert router.load(rank) == own


def test_a_rank_that_is_back_has_nothing_and_gets_its_sessions_again():
    router = RequestRouter(3)
    sessions = [str(number) for number in range(30)]
    before = {session: route(router, [1, 2], session) for session in sessions}
    ranks = [route(router, [5], request_id=str(i), max_new_tokens=50) for i in range(6)]
    router.mark_lost(1)
    for i, rank in enumerate(ranks):
        if rank == 1:
            assert route(router, [5, 6], request_id=str(i), max_new_tokens=49) != 1
    router.mark_back(1)
    router.mark_back(1)
    assert router.load(1) == 0
    assert {session: route(router, [1, 2], session) for session in sessions} == before
    for i in range(6):
        router.finished(str(i))
    assert [router.load(rank) for rank in range(3)] == [0, 0, 0]


def test_outputs_of_one_prompt_go_to_the_rank_that_computes_it_until_another_has_less_to_do():
    router = RequestRouter(3, load_gap=100)
    ids = prompt(0, 1000)
    ranks = [
        route(router, ids, request_id=str(i), max_new_tokens=300, group="g") for i in range(6)
    ]  # the prompt on a second rank costs 1,000 tokens, a fifth output there saves 1,200
    assert ranks[:4] == [ranks[0]] * 4
    assert ranks[4] != ranks[0]


def test_outputs_of_a_prompt_whose_rank_is_lost_or_whose_first_has_ended_go_anywhere():
    router = RequestRouter(2)
    first = route(router, prompt(0), request_id="a", group="g")
    router.mark_lost(first)
    assert route(router, prompt(0), request_id="b", group="g") == 1 - first
    for name in "ab":
        router.finished(name)
    router.mark_back(first)
    assert router._first_of == {}
    assert route(router, prompt(3000), request_id="c", max_new_tokens=9, group="g") in (0, 1)


def test_a_prompt_that_a_sibling_can_fetch_goes_where_there_is_less_work():
    """With 1,024 tokens that one rank has, fetching them on its sibling costs as much as computing 102."""
    routers = [RequestRouter(4, sharing=sharing) for sharing in (None, PageSharing(("a", "a", "b", "b")))]
    alone, shared = routers
    for router in routers:
        rank = route(router, prompt(0, 1025), request_id="a")
        router.finished("a")
        router.update(rank, 100)
        assert route(router, prompt(0, 1025)) == rank
        router.update(rank, 110)
    assert route(alone, prompt(0, 1025)) == 0
    assert route(shared, prompt(0, 1025)) == 1, "not to 2 or 3, which are on another host"
    assert (
        shared.cached(RoutedPrompt(prompt(0, 1025), "")) == alone.cached(RoutedPrompt(prompt(0, 1025), "")) == (1024, 0)
    )
    assert route(shared, prompt(0, 1025), request_id="b") in (0, 1)


def test_ranks_that_are_not_siblings_of_those_with_the_prompt_compute_it_all():
    router = RequestRouter(2, sharing=PageSharing(("a", "b")))
    first = route(router, prompt(0, 513), request_id="a", max_new_tokens=8)
    other = route(router, prompt(0, 513), request_id="b", among=[1 - first])
    assert router.load(other) == 513


def test_a_session_leaves_its_rank_sooner_where_others_can_fetch_its_pages():
    router = RequestRouter(2, sharing=PageSharing(("a", "a")))
    rank = route(router, prompt(0, 512), "s")
    router.update(rank, 51)
    assert route(router, prompt(0, 512), "s") == rank
    router.update(rank, 103)
    assert route(router, prompt(0, 512), "s") == 1 - rank
    router.mark_lost(rank)
    assert router.cached(RoutedPrompt(prompt(0, 513), ""))[0] == 512, "pages outlive the rank that computed them"


@pytest.mark.parametrize("sharing", [None, PageSharing(("a", "b"))], ids=["no tiers", "tiers of two hosts"])
def test_a_prompt_and_a_session_stay_up_to_the_load_gap_where_nobody_can_fetch_their_pages(
    sharing: PageSharing | None,
) -> None:
    router = RequestRouter(2, load_gap=512, sharing=sharing)
    rank = route(router, prompt(0, 2049), "s")
    for session in ("s", None):
        router.update(rank, 512)
        assert route(router, prompt(0, 2049), session) == rank
        router.update(rank, 513)
        assert route(router, prompt(0, 2049), session) == 1 - rank
        router.forget_prompts()
        router.update(rank, 0)
        route(router, prompt(0, 2049), among=[rank])


HOSTS = PageSharing(("a", "a", "b", "b"), between_hosts=True)


def of_two_hosts(*costs: float) -> RequestRouter:
    """Returns a router whose ranks 0 and 1 share a host, of which 0 was sent 1,024 tokens. costs: of pages, by rank"""
    router = RequestRouter(4, sharing=HOSTS)
    route(router, prompt(0, 1025), among=[0])
    for rank, cost in enumerate(costs):
        router.update(rank, 0, cost)
    return router


@pytest.mark.parametrize("cost", [0.25, 0.5, 1.0, 3.0])
def test_a_token_on_another_host_counts_as_what_ranks_have_measured(cost: float) -> None:
    router = of_two_hosts(cost, cost, cost, cost)
    missed = (min(1.0, cost) - FETCH_COST) * 1024  # on the other host, beyond what a sibling pays
    for rank in (0, 1):
        router.update(rank, int(missed - 1))
    assert route(router, prompt(0, 1025)) in (0, 1)
    for rank in (0, 1):
        router.update(rank, int(missed + FETCH_COST * 1024 + 2))
    assert route(router, prompt(0, 1025)) in (2, 3)


def test_a_page_of_another_host_is_never_cheaper_than_one_of_the_same() -> None:
    router = of_two_hosts(0.001, 0.001, 0.001, 0.001)
    router.update(0, 52)
    assert route(router, prompt(0, 1025)) == 0


@pytest.mark.parametrize(
    ("costs", "where"),
    [((), "slow"), ((0.5,), "other_host"), ((0.5, 0.7, 2.0, 0.6), "other_host"), ((0.5, 2.0), "slow")],
    ids=["not known", "one knows", "all know", "slow on average"],
)
def test_the_rank_of_another_host_with_most_of_a_prompt_is_named(costs: tuple[float, ...], where: str) -> None:
    router = of_two_hosts(*costs)
    route(router, prompt(0, 2049), among=[1])

    def source(rank: int, length: int) -> Source:
        router.finished("r")
        assert route(router, prompt(0, length), request_id="r", among=[rank], is_ahead=True) == rank
        return router.source_of("r")

    assert source(2, 2049) == Source(where, 1)
    assert source(0, 2049) == Source("host"), "a sibling is not asked: its pages are in memory here"
    assert source(0, 1025) == Source("own")
    assert route(router, prompt(7000), request_id="new", among=[3]) == 3
    assert router.source_of("new") == Source("none")
    router.mark_lost(1)
    assert source(3, 2049).holder == 0, "which has the tiers of its host, too"
    router.mark_lost(0)
    assert source(3, 2049).holder is None, "no rank of that host is left that could be asked"


def test_a_session_leaves_its_host_as_its_pages_are_cheap_to_fetch() -> None:
    router = RequestRouter(2, load_gap=512, sharing=PageSharing(("a", "b"), between_hosts=True))
    rank = route(router, prompt(0, 512), "s")
    for each in (0, 1):
        router.update(each, 0, 0.25)
    router.update(rank, 128)
    assert route(router, prompt(0, 512), "s") == rank
    router.update(rank, 400)
    assert route(router, prompt(0, 512), "s") == 1 - rank
