"""How often lost ranks are restarted, which are replaced alone, and when all are restarted instead."""

import os

from moe_serve.config import LauncherConfig, load_config
from moe_serve.dispatch.hosts.handshake import listen
from moe_serve.engine.protocol.messages import Members
from moe_serve.launcher import local
from moe_serve.launcher.local import Death, Launch, LocalRanks, Replacements, Restarts
from moe_serve.launcher.rank_start import Elsewhere, Handover, HostMemory
from moe_serve.links.link import Link
from tests.clock import Clock
from tests.launcher.running import eventually
from tests.launcher.test_children import parent_of

CONFIG = load_config(overrides=["parallel.num_ranks=3", "server.attach_deadline_s=10", "launcher.max_restarts=2"])


def test_restarts_count_within_the_window_and_the_report_says_what_was_lost(monkeypatch):
    clock = Clock(monkeypatch, 0.0, local)
    restarts = Restarts(LauncherConfig(max_restarts=2, restart_window_s=10))
    assert restarts.note_loss("rank 0 died")
    clock.now_s = 5.0
    assert restarts.note_loss("rank 1 died")
    assert restarts.describe() == "restart 2 of 2 within 10 s"
    clock.now_s = 12.0  # the first is forgotten
    assert restarts.note_loss("rank 2 died")
    clock.now_s = 13.0
    assert not restarts.note_loss("rank 3 died")
    report = restarts.report()
    assert report[0] == "the ranks were lost 3 times within 10 s:"
    assert [line[-11:] for line in report[1:-1]] == ["rank 1 died", "rank 2 died", "rank 3 died"]
    assert "launcher.max_restarts" in report[-1]


def test_what_served_is_started_again_at_once_and_what_ends_at_its_start_after_ever_longer_pauses():
    restarts = Restarts(LauncherConfig(max_restarts=100))
    pauses = []
    for had_served in (True, True, False, False, False, False, False, False, True, False):
        restarts.note_loss("rank 0 died", had_served)
        pauses.append(restarts.pause_s)
    assert pauses == [0, 0, 5, 10, 20, 40, 60, 60, 0, 5]


def test_without_restarts_the_first_loss_is_the_end():
    restarts = Restarts(LauncherConfig(max_restarts=0))
    assert not restarts.note_loss("rank 0 died")
    assert restarts.report() == ["launcher.max_restarts is 0: the ranks are not started again"]


def killed(rank: int) -> Death:
    return Death(rank, 100 + rank, -9, ())


def group(epoch: int, *members: int, waits: bool = False) -> Members:
    return Members(members[0], 7, epoch, list(members), "rank 1 died", waits=waits)


def test_the_ranks_of_a_host_that_is_back_listen_where_the_others_know_them(tmp_path, monkeypatch):
    """Also those that only learn of them from what a rank had left before the host was lost."""
    of_hosts = ("launcher.nnodes=2", "launcher.node_rank=1", "launcher.dist_init_addr=127.0.0.1:20000")
    config = load_config(overrides=["parallel.num_ranks=2", *of_hosts])
    with listen("127.0.0.1") as before:
        address = before.getsockname()
    elsewhere = Elsewhere([0, 1], ["a", "b"], {1: address}, [])
    memory = HostMemory(Handover(7, os.getpid(), {}, "", [], elsewhere), {})
    monkeypatch.setattr(local, "WORKER", "tests.launcher.no_such_worker")
    ranks = LocalRanks(config, lambda who, line: None, tmp_path, Link(token="t" * 32))
    ranks.join(Launch(7, "127.0.0.1", 1), memory, {1: 0})
    try:
        assert ranks._listeners[1].getsockname() == address
    finally:
        ranks.end(0.0)


def test_a_rank_is_replaced_from_the_process_that_the_others_are_forked_from_and_a_new_launch_has_a_new_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(local, "WORKER", "tests.launcher.forked")
    ranks = LocalRanks(CONFIG, lambda *line: None, tmp_path, Link(token="t" * 32))
    ranks.start()
    try:
        assert eventually(lambda: all(child.last_lines for child in ranks.children))
        parents = {parent_of(child.pid) for child in ranks.children}
        assert len(parents) == 1
        before = ranks.children[1]
        ranks.finish(1)
        ranks.replace(1)
        assert eventually(lambda: ranks.children[1].pid)
        assert ranks.children[1].pid != before.pid
        assert parent_of(ranks.children[1].pid) in parents
        ranks.end(0.0)
        assert all(child.code is not None for child in ranks.children)
        ranks.start()
        assert eventually(lambda: all(child.pid for child in ranks.children))
        assert not {parent_of(child.pid) for child in ranks.children} & parents
    finally:
        ranks.end(0.0)


def test_a_rank_is_replaced_once_it_has_ended_and_the_others_go_on():
    for events in ((0, 1), (1, 0)):
        replacements = Replacements(CONFIG, Restarts(CONFIG.launcher))
        assert replacements.due(0.0) == []
        for event in events:
            replacements.ended(killed(1), 0.0) if event else replacements.regrouped(group(1, 0, 2))
        assert replacements.due(0.0) == [killed(1)]
        assert replacements.due(0.0) == []


def test_a_rank_that_is_only_late_is_not_replaced():
    replacements = Replacements(CONFIG, Restarts(CONFIG.launcher))
    replacements.regrouped(group(1, 0, 2))
    assert replacements.due(0.0) == []
    replacements.regrouped(group(2, 0, 1, 2))
    replacements.ended(killed(1), 0.0)
    assert replacements.due(0.0) == [], "the others do not know yet"
    replacements.regrouped(group(1, 0, 2))
    assert replacements.due(0.0) == [], "old news"
    replacements.regrouped(group(3, 0, 2, waits=True))
    assert replacements.others_wait
    assert replacements.due(0.0) == [killed(1)]


def test_a_rank_is_back_once_it_takes_part_and_may_be_lost_again():
    replacements = Replacements(CONFIG, Restarts(CONFIG.launcher))
    for epoch in (1, 3):
        replacements.ended(killed(1), 0.0)
        replacements.regrouped(group(epoch, 0, 2, waits=True))
        assert len(replacements.due(0.0)) == 1
        replacements.started(1, now_s=100.0 * epoch)
        replacements.regrouped(group(epoch + 1, 0, 1, 2))
        assert not replacements.others_wait
        assert replacements.failed(now_s=1000.0) is None


def test_all_are_started_again_where_the_others_wait_for_a_new_process_that_ends_or_is_late():
    replacements = Replacements(CONFIG, Restarts(CONFIG.launcher))
    replacements.regrouped(group(1, 0, 2, waits=True))
    replacements.started(1, now_s=5.0)
    assert replacements.failed(now_s=15.0) is None
    assert "within server.attach_deadline_s = 10 s" in replacements.failed(now_s=15.1)
    replacements.ended(killed(1), now_s=6.0)
    assert "was killed by SIGKILL before it took part again" in replacements.failed(now_s=6.0)


def test_a_new_process_that_ends_is_tried_again_after_ever_longer_pauses_where_the_others_serve():
    replacements = Replacements(CONFIG, Restarts(CONFIG.launcher))
    replacements.regrouped(group(1, 0, 2))
    now_s = 0.0
    assert replacements.ended(killed(1), now_s) is None
    for pause_s in (0, 5, 10, 20, 40, 60, 60):
        assert replacements.due(now_s + pause_s - 0.1) == [] or not pause_s
        now_s += pause_s
        if pause_s:
            assert replacements.due(now_s) == [killed(1)]
        replacements.started(1, now_s)
        said = replacements.ended(killed(1), now_s)
        assert "before it took part again; the next start is due in" in said
        assert replacements.failed(now_s) is None
    replacements.regrouped(group(2, 0, 1, 2))
    replacements.regrouped(group(3, 0, 2))
    assert replacements.ended(killed(1), now_s) is None
    assert replacements.due(now_s) == [killed(1)], "it served meanwhile"


def test_a_new_process_that_is_late_is_named_for_those_who_serve_on():
    replacements = Replacements(CONFIG, Restarts(CONFIG.launcher))
    replacements.regrouped(group(1, 0, 2))
    replacements.started(1, now_s=5.0)
    assert replacements.late(now_s=15.0) == {}
    assert replacements.late(now_s=15.1).keys() == {1}
    assert replacements.failed(now_s=15.1) is None
