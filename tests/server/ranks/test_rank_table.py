"""RankTable: the front end's state of its ranks."""

from moe_serve.attention_dp.request_router import PageSharing
from moe_serve.engine.protocol.messages import Apart, Hello, Members, ModelLimits, Progress, Ready
from moe_serve.server.ranks.rank_table import GONE_S, Arrival, RankTable, Regrouped


def hello(rank: int, num_ranks: int = 2, launch_id: int = 0, **more: object) -> Hello:
    return Hello(rank, num_ranks, launch_id, pid=100 + rank, host="h", **more)  # type: ignore[arg-type]


def limits(max_prompt_len: int = 10) -> ModelLimits:
    return ModelLimits("m", 100, 20, max_prompt_len, [1], 4)


def attached(*ranks: int, num_ranks: int = 2) -> RankTable:
    table = RankTable(num_ranks)
    for rank in ranks:
        assert table.attach(b"socket%d" % rank, hello(rank, num_ranks), now_s=0.0) == Arrival()
    return table


def make_ready(table: RankTable, *max_prompt_lens: int) -> None:
    for view, length in zip(table, max_prompt_lens, strict=True):
        table.ready(view, Ready(view.rank, 0, limits(length), {}))


def test_ready_means_that_every_rank_is():
    table = attached(0, 1)
    assert not table.is_ready
    table.ready(table.by_identity(b"socket1"), Ready(1, 0, limits(), {}))
    assert not table.is_ready
    assert table.limits is None
    make_ready(table, 10, 10)
    assert table.is_ready


def test_requests_must_respect_the_tightest_rank():
    table = attached(0, 1)
    make_ready(table, 10, 6)
    assert table.limits.max_prompt_len == 6


def test_what_the_start_waits_for_is_named():
    table = attached(1, num_ranks=4)
    table.progress(table.by_identity(b"socket1"), Progress(1, 0, "reading weights", 0.5))
    assert table.missing() == "rank 1: reading weights; rank 0, 2, 3: not attached"


def test_a_rank_of_another_world_is_refused():
    table = attached(0)
    assert "4 ranks but this front end serves 2" in table.attach(b"x", hello(1, num_ranks=4), 0.0).refusal
    assert "not one of 0 to 1" in table.attach(b"x", hello(2), 0.0).refusal


def test_a_second_process_with_the_same_rank_is_refused_and_the_first_is_named():
    assert "process 100 on h" in attached(0).attach(b"x", hello(0), 0.0).refusal


def test_another_launch_begins_once_this_one_is_lost_whatever_its_id_and_the_old_one_is_refused():
    table = attached(0, 1)
    make_ready(table, 10, 10)
    table.end_launch("rank 1 died", 1)
    assert not table.is_ready
    assert "a launch that is over (rank 1 died)" in table.attach(b"y", hello(0), 0.0).refusal
    assert table.attach(b"new0", hello(0, launch_id=-7), 5.0) == Arrival()
    assert (table.loss, table.began_s) == (None, 5.0)
    assert [view.identity for view in table] == [b"new0"]
    assert table.by_identity(b"socket0") is None
    assert "a launch that is over" in table.attach(b"z", hello(1), 0.0).refusal


def test_ranks_of_another_launch_wait_and_are_refused_only_when_this_one_serves_beside_them():
    table = attached(0, 1)
    assert table.attach(b"new0", hello(0, launch_id=9), 1.0).waits
    assert table.attach(b"new0", hello(0, launch_id=9, is_ready=True), 1.0).waits, "one of the two may still be lost"
    make_ready(table, 10, 10)
    assert table.attach(b"new0", hello(0, launch_id=9), 1.0).waits
    assert "process 100 on h" in table.attach(b"new0", hello(0, launch_id=9, is_ready=True), 1.0).refusal


def test_a_launch_of_which_nothing_is_heard_is_replaced_by_one_that_says_hello():
    table = attached(0, 1)
    ready = hello(0, launch_id=9, is_ready=True)
    assert not table.find_replaced_by(hello(0, launch_id=9), now_s=99.0), "ranks that start are silent"
    assert table.find_replaced_by(ready, now_s=99.0)
    make_ready(table, 10, 10)
    assert not table.find_replaced_by(ready, now_s=GONE_S - 1)
    assert not table.find_replaced_by(hello(0), now_s=99.0), "a rank of this launch"
    assert table.find_replaced_by(hello(0, launch_id=9), now_s=99.0)
    assert table.is_restarted


def test_a_rank_that_says_hello_again_is_known_and_says_whether_its_connection_was_cut():
    table = attached(0, 1)
    assert table.attach(b"socket0", hello(0), 1.0) == Arrival()
    assert table.attach(b"socket0", hello(0, num_reconnects=1), 2.0) == Arrival(was_cut=True)
    assert table.attach(b"socket0", hello(0, num_reconnects=1), 3.0) == Arrival()
    assert table.by_identity(b"socket0").heard_s == 3.0


def test_a_front_end_that_came_later_learns_from_the_others_which_ranks_are_masked():
    table = attached(0, 2, num_ranks=3)
    make_ready(table, 10, 6)
    assert not table.is_ready
    table.regroup(Members(0, 0, 3, [0, 2], "rank 1 died"))
    assert table.masked == {1: "rank 1 died"}
    assert table.is_ready
    assert table.limits.max_prompt_len == 6


def test_the_first_reason_stays_unless_a_later_one_names_the_rank():
    table = attached(0, 1)
    table.end_launch("a rank is lost", None)
    table.end_launch("rank 1 is lost", 1)
    table.end_launch("rank 0 is lost", 0)
    assert (table.loss, table.lost_rank) == ("rank 1 is lost", 1)


def group_of(*infos: str) -> RankTable:
    table = attached(*range(len(infos)), num_ranks=len(infos))
    for view, info in zip(table, infos, strict=True):
        table.ready(view, Ready(view.rank, 0, limits(), {"on_lost_rank": info}))
    return table


def test_a_rank_can_be_spared_where_all_say_so_and_another_one_serves():
    assert not group_of("mask", "end: one of them cannot").can_spare(0)
    table = group_of("mask", "mask")
    assert table.can_spare(0)
    table.suspect(1, "rank 1 was killed", now_s=5.0)
    assert not table.can_spare(0)
    assert table.can_spare(1), "it is known already"
    assert table.is_ready
    assert table.long_suspected(now_s=6.0, patience_s=2.0) is None
    assert table.long_suspected(now_s=8.0, patience_s=2.0).rank == 1


def test_the_newest_group_holds_and_a_suspicion_is_the_better_reason():
    table = group_of("mask", "mask", "mask")
    table.suspect(1, "rank 1 was killed", now_s=5.0)
    assert table.regroup(Members(0, 0, 2, [0, 2], "rank 1 died before exchange 3")) == Regrouped([1], [], ended=[1])
    assert table.masked == {1: "rank 1 was killed"}
    assert table.regroup(Members(2, 0, 2, [0, 2], "rank 0 voided the step")) == Regrouped([], [], ended=[])
    assert table.regroup(Members(2, 0, 1, [1, 2], "old news")) == Regrouped([], [], ended=[])
    assert table.regroup(Members(0, 0, 3, [0, 1, 2], "rank 1 rejoined")) == Regrouped([], [1], ended=[])
    assert table.masked == {}
    assert all(view.serves for view in table)


def test_a_masked_rank_has_ended_where_its_peers_or_its_launcher_say_so():
    table = group_of("mask", "mask", "mask", "mask")
    table.suspect(1, "rank 1 was killed", now_s=5.0)
    message = Members(0, 0, 1, [0], "ranks 1, 2 and 3 did not arrive", ended=[2])
    assert table.regroup(message) == Regrouped([1, 2, 3], [], ended=[1, 2])


def test_a_new_process_takes_the_place_of_a_masked_rank_and_takes_part_once_the_others_say_so():
    table = group_of("mask", "mask")
    new = Hello(1, 2, 0, pid=300, host="h", num_before=1)
    assert table.attach(b"new", new, 5.0).waits, "nobody has said yet that the old one is lost"
    table.suspect(1, "rank 1 was killed", now_s=5.0)
    table.regroup(Members(0, 0, 1, [0], "rank 1 died", waits=True))
    assert table.attach(b"new", new, 6.0) == Arrival()
    assert table.attach(b"new", new, 6.5) == Arrival(), "it may say hello again"
    assert table.masked == {1: "rank 1 was killed"}
    assert table.is_ready
    assert table.by_identity(b"new").pid == 300
    assert table.by_identity(b"socket1") is None, "what the old one said comes too late"
    assert "process 300" in table.attach(b"socket1", hello(1), 7.0).refusal
    assert table.regroup(Members(0, 0, 2, [0, 1], "rank 1 rejoined")) == Regrouped([], [1], ended=[])
    assert table.is_ready, "also before it has said so itself"


def test_a_new_process_that_waited_until_its_rank_was_masked_and_back_is_taken() -> None:
    """On several hosts its vote may be what lets the others mask the one before."""
    table = group_of("mask", "mask")
    new = Hello(1, 2, 0, pid=300, host="h", num_before=1)
    assert table.attach(b"new", new, 5.0).waits
    table.regroup(Members(0, 0, 1, [0], "rank 1 died"))
    table.regroup(Members(0, 0, 2, [0, 1], "rank 1 rejoined"))
    assert table.attach(b"new", new, 8.0) == Arrival()
    assert table.by_identity(b"new").pid == 300
    assert not table.masked


def test_ranks_that_are_cut_off_serve_nothing_until_a_group_goes_on() -> None:
    table = attached(0, 1)
    make_ready(table, 10, 10)
    assert table.set_apart(Apart(1, 0, 3, "rank 1 does not reach the hosts of most ranks"))
    assert not table.set_apart(Apart(0, 0, 3, "rank 0 does not reach the hosts of most ranks"))
    assert table.apart == "rank 1 does not reach the hosts of most ranks"
    table.regroup(Members(0, 0, 3, [0, 1], "old news"))
    assert table.apart is not None
    table.regroup(Members(0, 0, 4, [0], "rank 1 was late"))
    assert table.apart is None
    assert not table.set_apart(Apart(1, 0, 3, "rank 1 does not reach the hosts of most ranks")), "it has not heard yet"


def test_ranks_share_pages_as_they_have_said():
    def sharing(*infos: dict[str, object]) -> PageSharing:
        table = RankTable(len(infos))
        for rank, info in enumerate(infos):
            host = "ab"[rank // 2]
            table.attach(b"socket%d" % rank, Hello(rank, len(infos), 0, 100 + rank, host), 0.0)
            table.ready(table.by_identity(b"socket%d" % rank), Ready(rank, 0, limits(), info))
        return table.sharing

    memory, asks = {"pages": "cache.host_gb"}, {"pages": "cache.host_gb", "asks_other_hosts": True}
    assert sharing({}, {}) == PageSharing()
    assert sharing(memory, memory, memory) == PageSharing(["a cache.host_gb"] * 2 + ["b cache.host_gb"])
    assert sharing(memory, {}) == PageSharing(["a cache.host_gb", "1"])
    of_two_hosts = ["a cache.host_gb", "a cache.host_gb", "b cache.host_gb"]
    assert sharing(asks, asks, asks) == PageSharing(of_two_hosts, between_hosts=True)
    assert sharing(asks, asks, memory) == PageSharing(of_two_hosts), "one that answers nobody"
    alone = {"asks_other_hosts": True}  # each with memory of its own, as torchrun starts them
    assert sharing(alone, alone, alone) == PageSharing()
