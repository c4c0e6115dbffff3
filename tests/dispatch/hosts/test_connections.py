"""Connections between hosts that are cut, reset or stalled are made anew, and nothing false is read."""

import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.hosts.handshake import VOTES, listen
from moe_serve.dispatch.hosts.link import _GUARD_WORD, HostLink, Hosts, Int64Array, Space
from moe_serve.dispatch.hosts.stand_in import ANSWER_HEAD, StandIn
from moe_serve.dispatch.votes import Kind, Vote
from moe_serve.errors import ReplacedError
from tests.dispatch.hosts.relay import Relay, relay
from tests.dispatch.hosts.test_link import KEY, join, until
from tests.dispatch.shm.regions import empty_log

SIZE = 1 << 23


class Scene:
    """Two ranks on two pretended hosts; rank 1 dials rank 0 through a relay. Byte 0 of each region begins a flag."""

    def __init__(self, between: Relay, listeners: Sequence[socket.socket], quiet_s: float):
        self.between, self._quiet_s = between, quiet_s
        self.addresses = [between.address, listeners[1].getsockname()[:2]]
        self.links = [HostLink(rank, Hosts.of([0, 1]), KEY, listeners[rank], quiet_s) for rank in range(2)]
        self.regions = [self._new_regions() for _ in self.links]
        self.spaces = [link.share(mine) for link, mine in zip(self.links, self.regions, strict=True)]
        assert join(self.links, self.addresses) == [None, None]

    def _new_regions(self) -> list[Tensor]:
        return [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]

    def write(self, source: int, flag: int, size: int = 8) -> None:
        """Writes bytes that all are the flag's lowest one into the other rank's region, and the flag."""
        data = torch.full((size,), flag % 256, dtype=torch.uint8)
        self.spaces[source].write(1 - source, 1 << (1 - source), 64, data.data_ptr(), size, 0, flag)

    def flag(self, rank: int) -> int:
        """Returns the flag in a rank's region."""
        return int(self.regions[rank][rank][:8].view(torch.int64))

    def arrives(self, source: int, flag: int, size: int = 8) -> None:
        """Writes, and waits until all of it is there."""
        self.write(source, flag, size)
        until(lambda: self.flag(1 - source) == flag)
        assert bool((self.regions[1 - source][1 - source][64 : 64 + size] == flag % 256).all())

    def begin(self, epoch: int) -> None:
        """Begins an epoch on both ranks, once they are connected."""
        until(lambda: not any(link.down() for link in self.links))
        for link in self.links:
            link.begin_epoch(epoch, [0, 1])

    def renew(self, rank: int, number: int = 1) -> HostLink:
        """Puts a new process in the place of a rank; returns the old one, which still runs."""
        old, listener, other = self.links[rank], listen("127.0.0.1"), self.links[1 - rank]
        before = other.generation(rank)
        self.addresses[rank] = listener.getsockname()[:2]
        self.links[rank] = HostLink(rank, Hosts.of([0, 1]), KEY, listener, self._quiet_s, number)
        self.regions[rank] = self._new_regions()
        self.spaces[rank] = self.links[rank].share(self.regions[rank])
        self.links[rank].connect(dict(enumerate(self.addresses)), 5.0, is_replacement=True)
        until(lambda: other.generation(rank) > before)
        return old


def unsent(link: HostLink) -> int | None:
    """Returns the rank at the other end of a connection that has not taken all that was given to it."""
    return link.unsent(link.posted)


@contextlib.contextmanager
def two_hosts(quiet_s: float = 10.0) -> Iterator[Scene]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    with relay(listeners[0].getsockname()[:2]) as between:
        scene = Scene(between, listeners, quiet_s)
        try:
            yield scene
        finally:
            for link in scene.links:
                link.close()


def test_a_connection_that_was_reset_is_made_anew_and_both_ends_know_that_frames_may_be_lost() -> None:
    with two_hosts() as scene:
        scene.arrives(0, 5)
        assert [link.broken() for link in scene.links] == [{}, {}]
        for epoch in (1, 2, 3):
            scene.between.reset()
            until(lambda: all(link.broken() for link in scene.links))
            assert [list(link.broken()) for link in scene.links] == [[1], [0]]
            scene.begin(epoch)
            assert [link.broken() for link in scene.links] == [{}, {}]
            scene.arrives(0, 10 * epoch)
            scene.arrives(1, 10 * epoch + 1, 100_000)
        assert [link.generation(1 - rank) for rank, link in enumerate(scene.links)] == [4, 4]


def test_the_speed_of_the_network_is_measured_beside_the_rows(caplog: pytest.LogCaptureFixture) -> None:
    with two_hosts() as scene:
        fast = scene.links[1].measure(5.0)
        scene.between.delay_s = 0.005
        slow = scene.links[1].measure(5.0)
        assert fast is not None
        assert slow is not None
        assert 0 < fast.delay_s < 0.005 <= slow.delay_s < 0.05
        assert fast.bytes_per_s > slow.bytes_per_s > 0
        scene.arrives(0, 3)
        scene.between.refuses = True
        assert scene.links[1].measure(5.0) is None
        assert "rank 1 cannot measure the network towards rank 0" in caplog.text


def test_what_waits_for_a_slow_network_is_known_though_the_kernel_has_taken_it() -> None:
    with two_hosts() as scene:
        link, piece = scene.links[0], 1 << 16
        scene.arrives(0, 3)
        until(lambda: not link.queued(1))
        scene.between.stalls = True
        for number in range(1000):  # 64 MB: more than the buffers of the way hold
            if link.queued(1):
                break
            scene.write(0, 100 + number, piece)
        assert 0 < link.queued(1) < 2 * piece
        assert unsent(link) is None, "the kernel takes more"
        scene.between.stalls = False
        until(lambda: not link.queued(1))


@pytest.mark.parametrize("where", [0, 30, 56, 57, 100_000, (1 << 20) + 55])
def test_a_frame_that_was_cut_raises_no_flag_and_does_not_spoil_the_next_connection(where: int) -> None:
    with two_hosts() as scene:
        scene.arrives(1, 5)
        sent = scene.links[1].sent_bytes
        scene.between.most_bytes = scene.between.carried + where
        scene.write(1, 6, 1 << 20)
        assert scene.links[1].sent_bytes >= sent
        until(lambda: scene.links[0].broken())
        scene.between.most_bytes = None
        assert scene.flag(0) == 5
        scene.begin(1)
        scene.arrives(0, 8, 10)
        scene.arrives(1, 7, 1 << 20)


def test_a_cable_that_swallows_one_direction_is_noticed_and_mended() -> None:
    with two_hosts(quiet_s=1.0) as scene:
        scene.between.refuses = True
        scene.between.stalls = True
        for number in range(20):  # more than the buffers of the way hold: the relay's kernel acknowledges the rest
            scene.write(0, 100 + number, SIZE - 64)
        until(lambda: scene.links[0].down())
        assert scene.links[0].down() == {1: "Connection timed out"}
        scene.between.refuses = scene.between.stalls = False
        scene.between.reset()
        scene.begin(1)
        scene.arrives(0, 3)


def test_rows_of_a_later_call_need_not_be_sent_before_those_of_an_earlier_one_are_the_callers_again() -> None:
    with two_hosts() as scene:
        link, earlier, later = scene.links[0], 0, 0
        scene.between.stalls = True
        while unsent(link) is None:  # the buffers on the way take tens of megabytes
            earlier, later = later, link.posted
            scene.write(0, 3, SIZE - 64)
        scene.write(0, 4)
        assert [link.unsent(number) for number in (earlier, later, later + 1, later + 2)] == [None, None, 1, 1]
        scene.between.stalls = False
        until(lambda: unsent(link) is None)


def test_what_is_told_over_a_connection_without_progress_is_bounded() -> None:
    with two_hosts() as scene:
        scene.between.stalls = True
        words = torch.zeros(1 << 17, dtype=torch.int64)
        sent_at_most = 200 * words.nbytes
        for number in range(200):
            words.fill_(number)
            scene.spaces[0].tell(1, 0b10, 0, words.data_ptr(), words.nbytes)
        assert scene.links[0].sent_bytes < sent_at_most // 4
        scene.between.stalls = False
        until(lambda: unsent(scene.links[0]) is None)
        assert scene.links[0].sent_bytes < sent_at_most // 2
        words.fill_(200)
        scene.spaces[0].tell(1, 0b10, 0, words.data_ptr(), words.nbytes)
        until(lambda: scene.flag(1) == 200)


def test_frames_of_an_epoch_that_was_left_are_ignored_and_what_is_told_is_not() -> None:
    with two_hosts() as scene:
        scene.arrives(0, 5)
        scene.links[1].leave_epoch(1)
        scene.write(0, 6, 100_000)
        told = torch.tensor([77], dtype=torch.int64)
        scene.spaces[0].tell(1, 0b10, SIZE - 8, told.data_ptr(), 8)
        until(lambda: int(scene.regions[1][1][-8:].view(torch.int64)) == 77)
        assert scene.flag(1) == 5
        assert int(scene.regions[1][1][64]) == 5
        scene.links[0].begin_epoch(1, [0, 1])
        scene.arrives(0, 7)
        assert [link.broken() for link in scene.links] == [{}, {}]


def guarded_links() -> tuple[list[HostLink], list[Tensor], list[Space], dict[int, Int64Array]]:
    """Returns links, regions and spaces of rank 0 and of ranks 1 and 2 on another host, and the heads of those two."""
    hosts = Hosts.of([0, 1, 1])
    listeners = [listen("127.0.0.1") for _ in range(3)]
    links = [HostLink(rank, hosts, KEY, listener, 10.0) for rank, listener in enumerate(listeners)]
    regions = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(3)]  # of both hosts: rank 0's is not written
    heads = {rank: np.zeros(512, dtype=np.int64) for rank in (1, 2)}
    spaces = [link.share(regions) for link in links]
    for link in links[1:]:
        link.guard(heads)
    assert join(links, [listener.getsockname()[:2] for listener in listeners]) == [None] * 3
    return links, regions, spaces, heads


def test_a_rank_that_is_masked_takes_in_no_more_frames_for_its_neighbours() -> None:
    links, regions, spaces, _ = guarded_links()
    data = torch.full((1000,), 7, dtype=torch.uint8)
    spaces[0].write(1, 0b100, 64, data.data_ptr(), 1000, 0, 7)  # by rank 1, for rank 2
    until(lambda: int(regions[2][0]) == 7)
    links[2].leave_epoch(1, masked=[1])
    data.fill_(8)
    spaces[0].write(1, 0b100, 64, data.data_ptr(), 1000, 0, 8)
    spaces[0].tell(1, 0b100, 8, data.data_ptr(), 8)
    until(lambda: int(regions[2][8]) == 8)
    assert int(regions[2][0]) == int(regions[2][64]) == 7
    links[0].begin_epoch(1, [0, 2])
    spaces[0].write(1, 0b100, 64, data.data_ptr(), 1000, 0, 9)
    until(lambda: int(regions[2][0]) == 9)
    assert int(regions[2][64]) == 8
    for link in links:
        link.close()


def test_a_masked_rank_that_was_stopped_while_it_took_in_a_frame_is_killed() -> None:
    links, *_, heads = guarded_links()
    with subprocess.Popen(["sleep", "60"]) as stopped:
        links[1].close()
        heads[1][[0, _GUARD_WORD + 1]] = stopped.pid, 1
        links[2].leave_epoch(1, masked=[1])
        assert stopped.wait(60) == -signal.SIGKILL
    links[2].leave_epoch(2, masked=[1])  # it has ended, whatever its guard says
    for link in links[::2]:
        link.close()


def test_frames_of_an_epoch_that_began_without_a_connection_come_with_the_first_one() -> None:
    with two_hosts() as scene:
        scene.between.refuses = True
        scene.between.reset()
        until(lambda: all(link.down() for link in scene.links))
        for link in scene.links:
            link.begin_epoch(1, [0, 1])
        scene.write(0, 9, 100_000)
        scene.write(1, 11)
        assert unsent(scene.links[0]) == 1
        scene.between.refuses = False
        until(lambda: (scene.flag(1), scene.flag(0)) == (9, 11))
        assert unsent(scene.links[0]) is None
        assert [link.broken() for link in scene.links] == [{}, {}]


def test_a_connection_with_a_begun_frame_of_borrowed_memory_is_closed_when_its_epoch_is_left() -> None:
    with two_hosts() as scene:
        scene.between.stalls = True
        rows = torch.full((40 << 20,), 3, dtype=torch.uint8)  # more than the buffers on the way take
        there = torch.zeros_like(rows)
        starts = torch.zeros(8, dtype=torch.int64)
        scene.spaces[0].regions[0] = rows
        scene.links[0]._library.link_region(scene.links[0]._link, 0, 0, rows.data_ptr(), rows.nbytes)
        scene.links[1]._library.link_region(scene.links[1]._link, 0, 0, there.data_ptr(), rows.nbytes)
        facts, block = results_of_one_slot(rows, starts)
        scene.spaces[0].results(1, facts.data_ptr(), 0, 0, 1, block.data_ptr(), 0, 6)
        assert unsent(scene.links[0]) == 1
        assert not scene.links[0].down()
        scene.links[0].leave_epoch(1)
        assert scene.links[0].down() == {1: "Operation canceled"}
        assert unsent(scene.links[0]) is None, "the memory is the caller's again"
        scene.between.stalls = False
        scene.begin(1)
        assert scene.flag(1) == 0
        scene.arrives(0, 7)


def results_of_one_slot(rows: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns facts and the block of an exchange (row_copy.h): rank 0 sends all rows to rank 1 as one result."""
    facts = torch.zeros(13 + 2 * 11, dtype=torch.int64)
    facts[1], facts[2], facts[4] = 2, 1, rows.nbytes  # ranks, slots, bytes of a result
    facts[13 + 10] = rows.data_ptr()  # rank 0's send buffer
    facts[13 + 11 + 4] = starts.data_ptr()
    block = torch.zeros(64, dtype=torch.int64)
    block[1 + 2 + 1] = 1  # arrived[1][0]
    return facts, block


def test_a_rank_that_is_started_anew_dials_all_and_is_dialled_where_it_listens_now() -> None:
    with two_hosts() as scene:
        scene.arrives(1, 5)
        scene.renew(0).close()
        scene.begin(1)
        scene.arrives(0, 6)
        scene.arrives(1, 7)
        assert scene.links[1].addresses == dict(enumerate(scene.addresses)), "rank 1 knows where the new one listens"
        scene.renew(1).close()
        scene.begin(2)
        scene.arrives(0, 8)
        scene.arrives(1, 9)


@pytest.mark.parametrize("rank", [0, 1], ids=["is dialled", "dials"])
def test_a_process_that_was_replaced_and_wakes_later_is_refused_for_good_and_learns_it(rank: int) -> None:
    """It was stopped, say, and nobody could tell that it is not dead."""
    with two_hosts() as scene:
        scene.arrives(1, 5)
        old = scene.renew(rank)
        try:
            scene.begin(1)
            scene.arrives(0, 6)
            generation = scene.links[1 - rank].generation(rank)
            with pytest.raises(OSError, match=f"process 0 of rank {rank} was replaced"):
                old.dial(1 - rank, VOTES, 5.0)
            with pytest.raises(ReplacedError, match=rf"process 0 of rank {rank} was replaced by a newer one"):
                until(old.check_not_replaced)
            with pytest.raises(ReplacedError):
                old.broken()
            scene.arrives(1, 7)
            assert scene.links[1 - rank].generation(rank) == generation, "it has disturbed nobody"
            newest = scene.renew(rank, number=2)
            until(lambda: newest.down())
            newest.close()
            scene.begin(2)
            scene.arrives(0, 8)
        finally:
            old.close()


def test_a_process_learns_that_it_was_replaced_from_who_dials_it_where_it_listened() -> None:
    with two_hosts() as scene:
        old = scene.renew(1)
        old_address = old.addresses[1]
        scene.links[0]._connections._peers[1].address = old_address
        with contextlib.suppress(OSError):
            scene.links[0].dial(1, VOTES, 5.0).close()
        with pytest.raises(ReplacedError):
            until(old.check_not_replaced)
        old.close()


def test_a_rank_that_is_started_anew_does_not_wait_for_ranks_that_are_dead() -> None:
    with listen("127.0.0.1") as gone:
        addresses = dict.fromkeys(range(2), gone.getsockname()[:2])
    link = HostLink(0, Hosts.of([0, 1]), KEY, listen("127.0.0.1"), 10.0)
    link.connect(addresses, 60.0, is_replacement=True)
    assert list(link.down()) == [1]
    assert "Connection refused" in link.down()[1]
    link.close()


def test_a_rank_of_a_host_that_is_back_listens_where_it_did_unless_the_port_is_taken() -> None:
    with listen("127.0.0.1") as first:
        address = first.getsockname()
        with listen(*address) as other:
            assert other.getsockname()[1] != address[1]
    with listen(*address) as second:
        assert second.getsockname() == address


def test_who_stands_in_for_a_rank_takes_votes_and_no_rows() -> None:
    log = empty_log(num_hosts=2)
    with listen("127.0.0.1") as listener:
        link = HostLink(1, Hosts.of([0, 1]), KEY, listen("127.0.0.1"), 10.0)
        stand_in = StandIn(KEY, {0: listener}, log)
        stand_in.note_ended([0])
        link.connect({0: listener.getsockname()[:2]}, 5.0, is_replacement=True)
        assert link.generation(0) == 0
        asked = Vote(Kind.NEWEST, 0, 0, log.begin)
        with link.dial(0, VOTES, 5.0) as connected:
            connected.sendall(log.format.encode(asked))
            data = connected.recv(1000)
        assert ANSWER_HEAD.unpack_from(data) == (0, 0b1)
        assert list(log.format.decode(data[ANSWER_HEAD.size :])) == [log.answer(asked)]
        for rank in (-1, 1, 2):
            with pytest.raises(OSError, match=f"there is no rank {rank} on another host"):
                link.dial(rank, VOTES, 5.0)
        stand_in.close()
        link.close()


def test_a_connection_for_votes_is_handed_on_with_the_rank_that_dialled() -> None:
    taken: list[tuple[int, bytes]] = []
    done = threading.Event()

    def take(connected: socket.socket, peer: int) -> None:
        with connected:
            connected.settimeout(5)
            taken.append((peer, connected.recv(100)))
            connected.sendall(b"yes")
        done.set()

    with two_hosts() as scene:
        with scene.links[1].dial(0, VOTES, 5.0) as nobody:
            assert nobody.recv(1) == b"", "nobody takes votes yet"
        scene.links[0].take_dialled(VOTES, take)
        with scene.links[1].dial(0, VOTES, 5.0) as connected:
            connected.sendall(b"epoch 3?")
            assert connected.recv(100) == b"yes"
        assert done.wait(60)
        assert [link.generation(1 - rank) for rank, link in enumerate(scene.links)] == [1, 1]
    assert taken == [(1, b"epoch 3?")]


def test_many_silent_connections_keep_nobody_out() -> None:
    with two_hosts() as scene:
        silent = [socket.create_connection(scene.between.target) for _ in range(150)]
        scene.between.reset()
        until(lambda: all(link.broken() for link in scene.links))
        scene.begin(1)
        scene.arrives(0, 6)
        assert scene.links[0].refused >= 80
        for each in silent:
            each.close()


def test_threads_that_send_and_take_in_while_connections_are_reset_read_nothing_false() -> None:
    problems: list[str] = []
    counts = [0, 0]
    epoch, is_void = 0, threading.Event()

    def run(rank: int, scene: Scene) -> None:
        """Answers each flag of this epoch with the next one, until a connection ends."""
        link = scene.links[rank]
        while not is_void.is_set():
            link.poll()
            seen = scene.flag(rank)
            if seen >> 40 == epoch and seen & 1 == rank:
                data = scene.regions[rank][rank][64 : 64 + 50_000]
                if not bool((data == seen % 256).all()):
                    problems.append(f"rank {rank}: flag {seen}, data {data.unique().tolist()}")
                counts[rank] += 1
                scene.write(rank, seen + 1, 50_000)
                while scene.flag(rank) == seen and not is_void.is_set():
                    link.poll()
                    if link.broken():
                        is_void.set()  # as its proposal of the next epoch tells the others
            if link.broken():
                is_void.set()
        link.leave_epoch(epoch + 1)

    with two_hosts() as scene:
        for epoch in range(1, 13):
            is_void.clear()
            before = list(counts)
            scene.begin(epoch)
            threads = [threading.Thread(target=run, args=(rank, scene)) for rank in range(2)]
            for thread in threads:
                thread.start()
            scene.write(0, epoch << 40 | 1, 50_000)
            until(lambda before=before: is_void.is_set() or all(map(int.__gt__, counts, before)))
            scene.between.reset()
            for thread in threads:
                thread.join()
    assert problems == []
    assert min(counts) >= epoch // 2


def test_flags_that_are_raised_later_all_come_also_where_nothing_is_sent_and_those_of_a_left_epoch_do_not() -> None:
    with two_hosts() as scene:
        for flag in range(1, 41):  # more than wait at once
            scene.spaces[0].later(1, 0b10, 0, flag)
        until(lambda: scene.flag(1) == 40)
        scene.between.refuses = True
        scene.between.reset()
        until(lambda: all(link.down() for link in scene.links))
        for flag in range(41, 81):
            scene.spaces[0].later(1, 0b10, 0, flag)
        scene.between.refuses = False
        scene.begin(1)
        scene.arrives(1, 7)
        scene.spaces[0].later(1, 0b10, 8, 9)
        until(lambda: int(scene.regions[1][1][8]) == 9)
        assert scene.flag(1) == 40
