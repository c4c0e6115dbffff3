"""Over hosts as on one: a lost rank, host or cable costs no more than it must, and no two groups ever go on."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from moe_serve.dispatch.hosts.stand_in import StandIn
from tests.dispatch.hosts import group_faults as hosts
from tests.dispatch.hosts.group_faults import Network, Story, network, until
from tests.dispatch.shm import faults

Fault = Callable[[Network, dict[int, int]], None]
DEADLINE_S = 8.0


def body(rank: int, net: Network) -> Story:
    story = Story()
    transport = hosts.make_transport(rank, net, DEADLINE_S)
    net.show_pid(rank)
    hosts.serve(rank, transport, net, story)
    return story


def body_anew(rank: int, net: Network) -> Story:
    story = Story()
    hosts.serve(rank, hosts.make_transport(rank, net, DEADLINE_S, is_replacement=True), net, story)
    return story


def run(
    host_of: Sequence[int],
    fault: Fault,
    dies: tuple[int, ...] = (),
    anew: Callable[..., Story] | None = None,
    body: Callable[[int, Network], Story] = body,
) -> dict[int, Story]:
    """Returns what each rank went through while a thread of this process made a fault. anew: as in `run_forked`"""
    errors: list[BaseException] = []

    def make_fault(net: Network) -> None:
        try:
            until(lambda: all(net.num_steps(rank) > 2 for rank in range(len(host_of))))
            fault(net, {rank: net.pid(rank) for rank in range(len(host_of))})
        except BaseException as error:
            errors.append(error)
        net.end()

    with network(host_of) as net:
        thread = threading.Thread(target=make_fault, args=(net,))
        thread.start()
        stories: dict[int, Story] = faults.run_forked(len(host_of), body, net, dies=dies, anew=anew)
        thread.join()
    assert not errors, f"{errors[0]}: {stories}"
    epochs: dict[int, list[int]] = {}
    for story in stories.values():
        for epoch, members in story.groups.items():
            assert epochs.setdefault(epoch, members) == members, f"epoch {epoch} has two groups"
    return stories


def go_on(net: Network, ranks: Sequence[int], num_steps: int = 5) -> None:
    """Returns once all these ranks have made so many more steps."""
    before = {rank: net.num_steps(rank) for rank in ranks}
    until(lambda: all(net.num_steps(rank) >= before[rank] + num_steps for rank in ranks))


def reset_links(net: Network, pids: dict[int, int]) -> None:
    for _ in range(3):
        net.set_cables(hosts.RESET)
        go_on(net, range(len(net.host_of)))


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "host_of", [(0, 1, 0), pytest.param((0, 1), marks=slow), pytest.param((0, 0, 1, 1), marks=slow)], ids=str
)
def test_connections_that_are_reset_lose_nobody(host_of: Sequence[int]) -> None:
    for story in run(host_of, reset_links).values():
        assert (story.apart, story.masked) == (0, 0), story.said
        assert max(story.groups) >= 3
        assert all(members == list(range(len(host_of))) for members in story.groups.values())


@pytest.mark.parametrize(
    ("host_of", "winners"),
    [
        pytest.param((0, 1), [0], marks=slow),
        ((0, 0, 1, 1), [0, 1]),
        pytest.param((0, 1, 1), [1, 2], marks=slow),
    ],
    ids=["1+1", "2+2", "1+2"],
)
def test_the_side_with_most_ranks_goes_on_and_the_other_joins_again_when_the_cable_is_back(
    host_of: Sequence[int], winners: list[int]
) -> None:
    losers = [rank for rank in range(len(host_of)) if rank not in winners]

    def cut_and_mend(net: Network, pids: dict[int, int]) -> None:
        net.set_cables(hosts.CUT)
        go_on(net, winners)
        before = [net.num_steps(rank) for rank in losers]
        go_on(net, winners, 50)
        assert before == [net.num_steps(rank) for rank in losers], "both sides go on"
        net.set_cables(hosts.OPEN)
        go_on(net, range(len(host_of)))

    stories = run(host_of, cut_and_mend)
    for rank in winners:
        assert (stories[rank].apart, stories[rank].masked) == (0, 0), stories[rank].said
        assert winners in stories[rank].groups.values()
    for rank in losers:
        assert stories[rank].apart + stories[rank].masked >= 1, stories[rank].said
        assert losers not in stories[rank].groups.values()


def body_unspareable(rank: int, net: Network) -> Story:
    """No rank can be spared, so that late ones are waited for, longer than this test takes."""
    story = Story()
    transport = hosts.make_transport(rank, net, 60.0, is_spareable=False)
    hosts.serve(rank, transport, net, story)
    return story


@pytest.mark.parametrize("cut", [pytest.param(hosts.CUT, marks=slow), hosts.SILENT], ids=["reset", "silent"])
def test_a_side_that_is_cut_off_says_so_soon_where_no_rank_can_be_spared(cut: int) -> None:
    def cut_and_mend(net: Network, pids: dict[int, int]) -> None:
        net.set_cables(cut)
        time.sleep(hosts.SUSPECT_S + 4.0)
        net.set_cables(hosts.OPEN)
        go_on(net, range(2))

    stories = run((0, 1), cut_and_mend, body=body_unspareable)
    assert (stories[0].apart, stories[1].apart) == (0, 1), (stories[0].said, stories[1].said)
    assert all(members == [0, 1] for story in stories.values() for members in story.groups.values())


@slow
@pytest.mark.parametrize(("host_of", "victim"), [((0, 1, 1), 2), ((0, 0, 1), 2), ((0, 1, 2), 1)], ids=str)
def test_ranks_go_on_without_one_that_was_killed_on_another_host(host_of: Sequence[int], victim: int) -> None:
    others = [rank for rank in range(len(host_of)) if rank != victim]

    def kill(net: Network, pids: dict[int, int]) -> None:
        os.kill(pids[victim], signal.SIGKILL)
        go_on(net, others)

    for story in run(host_of, kill, dies=(victim,)).values():
        assert story.groups[max(story.groups)] == others


@slow
@pytest.mark.parametrize(("host_of", "victim"), [((0, 1, 1), 2), ((0, 1, 1), 0)], ids=str)
def test_a_rank_that_was_stopped_is_masked_and_joins_again(host_of: Sequence[int], victim: int) -> None:
    everybody = range(len(host_of))

    def stop(net: Network, pids: dict[int, int]) -> None:
        hosts.stop(pids[victim], for_s=2.5 * hosts.SUSPECT_S)
        go_on(net, everybody)

    stories = run(host_of, stop)
    assert stories[victim].masked >= 1
    assert [rank for rank in everybody if rank != victim] in stories[0 if victim else 1].groups.values()


@slow
def test_a_group_without_any_quorum_waits_and_goes_on_whole() -> None:
    def cut_and_mend(net: Network, pids: dict[int, int]) -> None:
        net.set_cables(hosts.CUT)
        time.sleep(hosts.SUSPECT_S + 4.0)
        steps = [net.num_steps(rank) for rank in range(3)]
        time.sleep(0.5)
        assert steps == [net.num_steps(rank) for rank in range(3)], "a side without most ranks goes on"
        net.set_cables(hosts.OPEN)
        go_on(net, range(3))

    stories = run((0, 1, 2), cut_and_mend)
    assert all(story.apart for story in stories.values())


@pytest.mark.parametrize("host_of", [(0, 1), pytest.param((0, 0, 1), marks=slow)], ids=str)
def test_the_launcher_of_a_host_votes_where_no_rank_of_it_is_left_and_says_so(host_of: Sequence[int]) -> None:
    """The others are no quorum without that vote, and nobody else can say that its ranks have ended."""
    dead = [rank for rank, host in enumerate(host_of) if host == 0]
    left = [rank for rank, host in enumerate(host_of) if host == 1]

    def kill(net: Network, pids: dict[int, int]) -> None:
        stand_in = StandIn(hosts.KEY, dict(enumerate(net.listeners)), net.mappings[0].decisions)
        try:
            for rank in dead:
                os.kill(pids[rank], signal.SIGKILL)
            stand_in.note_ended(dead)
            go_on(net, left)
        finally:
            stand_in.close()

    for story in run(host_of, kill, dies=tuple(dead)).values():
        assert story.groups[max(story.groups)] == left
        assert not story.apart, story.said


@slow
def test_the_launcher_of_a_host_votes_where_its_only_rank_is_stopped() -> None:
    def stop(net: Network, pids: dict[int, int]) -> None:
        stand_in = StandIn(hosts.KEY, {0: net.listeners[0]}, net.mappings[0].decisions)
        try:
            os.kill(pids[0], signal.SIGSTOP)
            go_on(net, [1])
            os.kill(pids[0], signal.SIGCONT)
            go_on(net, [0, 1])
        finally:
            stand_in.close()

    stories = run((0, 1), stop)
    assert stories[0].masked >= 1
    assert stories[1].apart == 0, stories[1].said


@slow
@pytest.mark.parametrize(("host_of", "victim"), [((0, 1, 1), 2), ((0, 1), 0), ((0, 0, 1), 2)], ids=str)
def test_a_rank_that_was_killed_comes_back_as_a_new_process(host_of: Sequence[int], victim: int) -> None:
    """Also the only one of its host, and where the others are no quorum without the vote of that host."""

    def kill(net: Network, pids: dict[int, int]) -> None:
        before = net.num_steps(victim)
        os.kill(pids[victim], signal.SIGKILL)
        until(lambda: net.num_steps(victim) > before + 5)
        go_on(net, range(len(host_of)))

    for story in run(host_of, kill, dies=(victim,), anew=body_anew).values():
        assert story.groups[max(story.groups)] == list(range(len(host_of)))
