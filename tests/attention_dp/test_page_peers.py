"""Pages that a rank of another host has come whole and right, or they are computed, whatever happens to the stream."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from moe_serve.attention_dp import page_peers, pages
from moe_serve.attention_dp.page_peers import MOST_ASKED, OtherHosts
from moe_serve.attention_dp.page_record import HEADER_BYTES
from moe_serve.attention_dp.pages import Fetch, PageTiers, Price
from tests.attention_dp.connections import Connections, Meddle, cut, pump
from tests.attention_dp.steps import make_request
from tests.attention_dp.test_pages import KEYS, OneRank, in_memory, small_cache, until
from tests.clock import Clock

PAGE_BYTES = small_cache().page_bytes
PAGE = 1 + HEADER_BYTES + PAGE_BYTES  # of an answer, behind the byte that says that pages are named alike


class Network:
    """Connections between ranks of different hosts. meddles: what passes the answers of each new one"""

    def __init__(self) -> None:
        self.meddles: list[Meddle] = []
        self.num_dialled = 0
        self.connections = Connections()
        self._takes: dict[int, Callable[[socket.socket, int], object]] = {}
        self._tiers: list[PageTiers] = []

    def others_of(self, rank: int, names: bytes = b"model", page_s: float | None = None) -> OtherHosts:
        return OtherHosts(partial(self.dial, rank), partial(self._takes.__setitem__, rank), names, page_s)

    def tiers(self, rank: int, names: bytes = b"model", page_s: float | None = None, num_blocks: int = 6) -> PageTiers:
        """Returns the tiers of a rank with a host of its own."""
        cache = small_cache(num_blocks=num_blocks)
        self._tiers.append(PageTiers(cache, in_memory(cache), None, self.others_of(rank, names, page_s)))
        return self._tiers[-1]

    def dial(self, own: int, rank: int) -> socket.socket:
        self.num_dialled += 1
        if rank not in self._takes:
            raise OSError("no route to host")
        meddle = [self.meddles.pop(0)] if self.connections.may_connect and self.meddles else []
        near, far = self.connections.pair(pump, *meddle)
        self._takes[rank](far, own)
        return near

    def take(self, connected: socket.socket, rank: int, source: int) -> None:
        """Hands a connection of `source` to a rank."""
        self._takes[rank](connected, source)

    def close(self) -> None:
        self.connections.cut_all()
        for each in self._tiers:
            each.close()
            assert each._asking is not None
            assert not each._asking.is_alive()
        self.connections.close()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(page_peers, "_REST_S", 0.0)
    monkeypatch.setattr(page_peers, "_QUIET_S", 60.0)  # a loaded machine is none that is lost
    monkeypatch.setattr(pages, "_PATIENCE_S", 60.0)
    with contextlib.closing(Network()) as made:
        yield made


def filled(tiers: PageTiers, num_pages: int = 5) -> PageTiers:
    """Returns tiers that have pages, of which page i is full of i + 1."""
    for block in range(num_pages):
        tiers.keep(KEYS[block], block)
    until(lambda: tiers.counters["down"] == num_pages)
    return tiers


def fetched(tiers: PageTiers, keys: list[bytes] = KEYS[:5], holder: int | None = 1) -> int:
    """Fetches pages, and returns how many have come; each is the one with its key."""
    fetch = tiers.fetch(keys, holder)
    until(lambda: fetch.done)
    for key, page in zip(keys, fetch.pages, strict=False):
        assert page.shape == (tiers.page_bytes,)
        assert page.eq(KEYS.index(key) + 1).all(), "another page"
    num_pages = len(fetch.pages)
    tiers.drop(fetch)
    assert tiers._fetched_bytes == 0
    return num_pages


def reasons(tiers: PageTiers) -> dict[str, int]:
    """Returns why pages of another host did not come, and how often."""
    names = ("late", "slow", "peer_lost", "checksum", "version", "evicted")
    return {name: tiers.counters[name] for name in names if tiers.counters[name]}


@pytest.mark.parametrize("asked_bytes", [1, 2 * PAGE_BYTES, 1 << 20], ids=["one", "two", "all"])
def test_a_rank_goes_on_with_pages_of_another_host(
    network: Network, asked_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_ASKED_BYTES", asked_bytes)
    own, other = filled(network.tiers(0), 2), filled(network.tiers(1))
    assert fetched(own, holder=None) == 2
    assert fetched(own) == 5
    assert (own.counters["from_host"], own.counters["from_other_host"]) == (4, 3)
    assert other.counters["to_other_host"] == 3
    assert fetched(own, [*KEYS[:5], KEYS[6], KEYS[0]]) == 5, "up to the first that it does not have"
    assert fetched(own, [KEYS[6]]) == 0
    assert reasons(own) == {"evicted": 2}
    assert network.num_dialled == 1, "questions one after the other go over one connection"
    assert fetched(other, [KEYS[0]], holder=None) == 1
    assert fetched(other, KEYS[5:], holder=0) == 0


def passing(at: int, change: Callable[[bytes], bytes], then_cut: bool = False) -> Meddle:
    """Passes an answer on, with a change to what comes behind its first `at` bytes."""

    def meddle(source: socket.socket, to: socket.socket) -> None:
        left = at
        while left and (data := source.recv(left)):
            to.sendall(data)
            left -= len(data)
        if then_cut:
            cut(source, to)
        elif data := source.recv(1):
            to.sendall(change(data))
            pump(source, to)

    return meddle


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1])


@pytest.mark.parametrize(
    ("at", "num_pages", "reason"),
    [
        (0, 0, "version"),  # whether pages are named alike
        (1, 0, "evicted"),  # whether there is a page
        (2, 0, "version"),  # the record: its magic, number, attempt, tokens, key
        (2 + 8, 0, "version"),
        (2 + 24, 0, "version"),
        (2 + 36, 0, "version"),
        (2 + HEADER_BYTES - 20, 0, "version"),
        (2 + HEADER_BYTES - 1, 0, "checksum"),
        (2 + HEADER_BYTES, 0, "checksum"),  # the page
        (PAGE, 0, "checksum"),
        (1 + 3 * PAGE, 3, "evicted"),
        (1 + 4 * PAGE + HEADER_BYTES + 50, 4, "checksum"),
    ],
)
def test_a_flipped_bit_is_seen(network: Network, at: int, num_pages: int, reason: str) -> None:
    own, _ = network.tiers(0), filled(network.tiers(1))
    network.meddles = [passing(at, flipped)]
    assert fetched(own) == num_pages
    assert reasons(own) == {reason: 1}
    # What is left of the answer is nothing that was asked for; then there is a new connection.
    assert 5 in [fetched(own) for _ in range(2)]


@pytest.mark.parametrize("at", [0, 1, 2, 1 + HEADER_BYTES, PAGE, 1 + PAGE, 1 + 2 * PAGE + 9, 5 * PAGE])
def test_a_peer_that_is_lost_in_the_middle_costs_the_rest(network: Network, at: int) -> None:
    own, _ = network.tiers(0), filled(network.tiers(1))
    network.meddles = [passing(at, bytes, then_cut=True)]
    assert fetched(own) == max(0, at - 1) // PAGE
    assert reasons(own) == {"peer_lost": 1}
    assert fetched(own) == 5


def test_a_page_that_comes_twice_is_no_other_page(network: Network) -> None:
    own, _ = network.tiers(0), filled(network.tiers(1))

    def twice(source: socket.socket, to: socket.socket) -> None:
        to.sendall(source.recv(1))
        page = source.recv(PAGE, socket.MSG_WAITALL)
        to.sendall(page + page)
        pump(source, to)

    network.meddles = [twice]
    assert fetched(own) == 1
    assert reasons(own) == {"version": 1}
    assert fetched(own) == 5


def test_pages_of_an_earlier_question_are_not_taken_for_a_later_one(network: Network) -> None:
    own, other = network.tiers(0), filled(network.tiers(1))
    is_held, release = threading.Event(), threading.Event()

    def hold(source: socket.socket, to: socket.socket) -> None:
        to.sendall(source.recv(1))
        to.sendall(source.recv(PAGE, socket.MSG_WAITALL))
        is_held.set()
        release.wait(60)
        pump(source, to)

    network.meddles = [hold]
    fetch = own.fetch(KEYS[:5], 1)
    until(lambda: len(fetch.pages) == 1 and is_held.is_set())
    own.drop(fetch)  # its request was aborted
    release.set()
    assert fetched(own, KEYS[2:5]) == 3
    assert own.counters["from_other_host"] == 4
    assert own.counters == dict.fromkeys(pages.COUNTERS, 0) | {"from_other_host": 4}
    assert other.counters["to_other_host"] >= 4


@pytest.mark.parametrize("begins", ["names", "form"])
def test_a_rank_of_other_weights_gives_nothing(network: Network, begins: str, caplog: pytest.LogCaptureFixture) -> None:
    own = network.tiers(0)
    if begins == "names":
        filled(network.tiers(1, b"the model with files of another day"))
    else:
        cache = small_cache(torch.bfloat16)
        network._tiers.append(PageTiers(cache, in_memory(cache), None, network.others_of(1)))
    assert fetched(own) == 0
    assert fetched(own) == 0
    assert reasons(own) == {"version": 2}
    assert len([line for line in caplog.messages if "rsync -t" in line]) == 1


def test_a_rank_that_says_nothing_is_given_up_and_rests(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = network.tiers(0), filled(network.tiers(1))
    monkeypatch.setattr(page_peers, "_QUIET_S", 0.1)
    monkeypatch.setattr(page_peers, "_REST_S", 600.0)
    network.meddles = [lambda source, to: None]
    for _ in range(3):
        assert fetched(own) == 0
    assert reasons(own) == {"peer_lost": 3}
    assert network.num_dialled == 1


def test_a_rank_that_is_not_reached_costs_the_way_alone(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    own, _ = filled(network.tiers(0), 2), filled(network.tiers(1))
    network.connections.may_connect = False
    assert fetched(own) == 2
    assert reasons(own) == {"peer_lost": 1}
    assert "no route to host" in caplog.text
    network.connections.may_connect = True
    assert fetched(own, holder=77) == 2, "nor one that there is not"
    assert fetched(own) == 5


def test_a_prefill_waits_a_while_for_pages_of_another_host(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    network.meddles = [lambda source, to: (release.wait(60), pump(source, to))]
    own, holder = network.tiers(0, num_blocks=8), network.tiers(1, num_blocks=8)
    there, here = OneRank(holder._cache, holder), OneRank(own._cache, own)
    there.run("first", 0)
    until(lambda: holder.counters["down"] == 5)
    request = make_request("again", num_prompt=21, max_new_tokens=2, first=0)
    request.pages_at = 1
    here.scheduler.add(request)
    assert here.scheduler.propose().is_empty, "the step does not wait, nor do others in it"
    assert here.scheduler.awaits_pages
    monkeypatch.setattr(pages, "_PATIENCE_S", 0.0)
    here.go_on(request, 0, 2)
    release.set()
    assert here.computed == {"again": 22}, "all of it, since nothing came in time"
    assert reasons(own) == {"late": 1}


@pytest.mark.parametrize(
    ("page_s", "computing_s", "num_pages"),
    [(0.75, 0.01, 1), (0.75, None, 1), (0.2, 0.05, 6), (0.2, 0.3, 60), (0.01, 0.001, 60), (1.25, 9.0, 0)],
)
def test_all_pages_together_take_a_second_longer_than_computing_at_most(
    page_s: float, computing_s: float | None, num_pages: int, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one of them a second; what a step takes after its page has come does not count."""
    monkeypatch.setattr(pages, "_PATIENCE_S", 1.0)
    own, clock = network.tiers(0), Clock(monkeypatch, 100.0, pages)
    own.computing_s = computing_s
    fetch = Fetch(KEYS[:1] * 60, 1, heard_s=clock.now_s)
    while fetch.num_taken < 60 and own.is_coming(fetch):
        clock.now_s += page_s
        if not own.is_coming(fetch):
            break
        own._add(fetch, torch.zeros(PAGE_BYTES, dtype=torch.uint8), "from_other_host")
        clock.now_s += 0.5  # a step of others
        assert own.take(fetch, [0]) == 1
    assert (fetch.num_taken, reasons(own)) == (num_pages, {"late": 1} if num_pages < 60 else {})
    assert own._fetched_bytes == 0


@pytest.mark.parametrize("goes_on", [True, False])
def test_pages_that_come_too_late_are_counted_once_and_teach_what_the_way_takes(
    network: Network, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, _ = network.tiers(0), filled(network.tiers(1))
    release = threading.Event()

    def hold(source: socket.socket, to: socket.socket) -> None:
        to.sendall(source.recv(1))
        to.sendall(source.recv(PAGE, socket.MSG_WAITALL))
        release.wait(60)
        pump(source, to) if goes_on else cut(source, to)

    network.meddles = [hold]
    fetch = own.fetch(KEYS[:5], 1)
    until(lambda: len(fetch.pages) == 1)
    assert own.take(fetch, [0]) == 1
    monkeypatch.setattr(pages, "_PATIENCE_S", 0.0)
    assert not own.is_coming(fetch)
    release.set()
    assert fetched(own) == 5
    assert reasons(own) == {"late": 1}
    assert own.counters["from_other_host"] == 6
    assert own._of_network.page_s is not None


def test_a_reader_that_takes_little_at_a_time_is_not_given_up(network: Network) -> None:
    filled(network.tiers(1))

    class Narrow(socket.socket):
        def send(self, data: memoryview) -> int:
            return super().send(data[:100])

        def sendall(self, data: bytes) -> None:
            raise TimeoutError("its timeout would be that of all")

    dial = network.dial

    def narrow(own: int, rank: int) -> socket.socket:
        near, far = network.connections.pair()
        network.take(Narrow(fileno=far.detach()), rank, own)
        return near

    network.dial = narrow  # type: ignore[method-assign]
    own = network.tiers(0)
    network.dial = dial  # type: ignore[method-assign]
    assert fetched(own) == 5
    assert reasons(own) == {}


def test_tokens_of_a_prompt_that_another_host_has_are_not_computed_again(network: Network) -> None:
    """Nor here, later: the pages are in the tiers of this host by then."""
    own, holder = network.tiers(0, num_blocks=8), network.tiers(1, num_blocks=8)
    there, here = OneRank(holder._cache, holder), OneRank(own._cache, own)
    there.run("first", 0)
    until(lambda: holder.counters["down"] == 5)
    for name in ("again", "once more"):
        request = make_request(name, num_prompt=21, max_new_tokens=2, first=0)
        request.pages_at = 1
        here.scheduler.add(request)
        here.go_on(request, 0, 2)
        until(lambda: own.counters["down"] >= 5)
        here.run("between", 100)
        here.run("between, too", 200)
    assert (here.computed["again"], here.computed["once more"]) == (2, 2)
    assert own.counters["from_other_host"] == 5
    assert here.scheduler.stats.num_cached_prompt_tokens >= 40
    assert reasons(own) == {}


# ---- a rank that is asked


@pytest.mark.parametrize(
    "says", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", bytes(24), b"", "too many"], ids=["http", "zeros", "nothing", "keys"]
)
def test_a_strange_reader_is_left_within_bounds(
    network: Network, says: bytes | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_peers, "_QUIET_S", 0.2 if says == b"" else 60.0)
    other = filled(network.tiers(1))
    near, far = network.connections.pair()
    network.take(far, 1, 0)
    hello = network.others_of(0).hello(other._cache.page_form)
    near.sendall(hello + page_peers._NUMBER.pack(MOST_ASKED + 1) if isinstance(says, str) else says)
    near.settimeout(60)
    answer = b""
    with contextlib.suppress(ConnectionError):  # which it closes with bytes that it has not read
        while data := near.recv(1 << 16):
            answer += data
    assert len(answer) <= 1
    assert other.counters["to_other_host"] == 0
    monkeypatch.setattr(page_peers, "_QUIET_S", 60.0)
    assert fetched(network.tiers(0)) == 5


def test_the_newest_connection_of_a_rank_counts(network: Network) -> None:
    """So those of processes that were replaced are not kept."""
    filled(network.tiers(1))
    first, far = network.connections.pair()
    network.take(far, 1, 0)
    assert fetched(network.tiers(0)) == 5
    first.settimeout(60)
    assert first.recv(1) == b""


def test_a_connection_that_has_rested_for_long_is_made_again(network: Network) -> None:
    """The other end closes it any time."""
    own, _ = network.tiers(0), filled(network.tiers(1))
    assert fetched(own) == 5
    assert own._peers is not None
    own._peers._streams[1].used_s -= page_peers._IDLE_S
    assert fetched(own) == 5
    assert network.num_dialled == 2
    assert reasons(own) == {}


# ---- what it costs


def test_pages_are_left_out_while_computing_takes_less_time(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SLOW_PAGES", 10)
    own, other = network.tiers(0, page_s=2.0), filled(network.tiers(1))
    own.computing_s = 1.0
    assert own.cost_across == 2.0
    assert [fetched(own), fetched(own)] == [0, 0]
    assert (reasons(own), network.num_dialled) == ({"slow": 10}, 0)
    assert fetched(own) == 5, "one way in so many pages is tried, and takes less than a second a page now"
    assert other.cost_across is None
    assert own.cost_across is not None


def test_a_way_is_worth_it_by_its_delay_and_its_pages() -> None:
    price = Price(page_s=0.1, delay_s=1.0)
    assert [price.is_worth_it(number, 0.3) for number in (1, 4, 5, 6)] == [False, False, True, True]
    assert price.is_worth_it(1, None), "it is not known what computing takes"
    assert Price().is_worth_it(1, 0.001), "nor what the way takes"
    price.learn(10, 7.0)
    assert price.page_s == pytest.approx(0.8 * 0.1 + 0.2 * 0.6)
    price.learn(4, 0.5)
    assert price.page_s == pytest.approx(0.8 * 0.2), "never below nothing"
    price.leave_out(99)
    assert not price.is_worth_it(1, 0.3)
    price.leave_out(1)
    assert price.is_worth_it(1, 0.3), "which may have changed"
    price.learn(1, 1.5)
    assert price.page_s == 0.5
