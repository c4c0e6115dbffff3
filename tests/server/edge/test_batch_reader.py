"""Connections whose calls were refused are read in batches: each is answered, served, ended as any other is."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moe_serve.server.edge import connection as connection_module
from moe_serve.server.edge.connection import BatchReader
from tests.server.edge.test_early_refusal import FULL, fill, whole
from tests.server.raw_client import RawClient
from tests.server.served import Served, in_event_loop, serving, until


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches go on for as long as a test may take."""
    monkeypatch.setattr(connection_module, "_LASTS_S", 60.0)


@asynccontextmanager
async def full(*overrides: str) -> AsyncIterator[tuple[Served, list[asyncio.Task]]]:
    """A system in which nothing more may wait, and the calls that hold it."""
    async with serving(1, *FULL, *overrides) as served:
        calls = await fill(served)
        yield served, calls
        served.workers[0].go.set()
        assert [(await call).status_code for call in calls] == [200, 200]


async def refused(served: Served) -> RawClient:
    client = await RawClient.connect(served)
    await client.send(whole())
    assert (await client.answer()).status == 429
    return client


@in_event_loop
async def test_what_comes_after_a_refusal_is_read_in_a_batch_and_refused_or_served_as_ever():
    async with full() as (served, _):
        clients = [await refused(served) for _ in range(100)]  # more than a turn reads
        assert len(served.server.batches) == 100
        for client in clients:
            await client.send(whole())
        assert [(await client.answer()).status for client in clients] == [429] * 100
        assert len(served.server.batches) == 100
        first, second, third = clients[:3]
        await first.send(whole()[:50])  # a part takes the long way
        await second.send(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await third.send(b"no HTTP\r\n\r\n")
        assert (await second.answer()).status == 200
        assert (await third.answer()).status == 400
        await first.send(whole()[50:])
        assert (await first.answer()).status == 429
        assert served.bridge.book.counters["num_refused"] == 201
        served.workers[0].go.set()
        await until(lambda: len(served.bridge.book) == 0)
        await clients[3].send(whole())
        assert (await clients[3].answer()).status == 200


@in_event_loop
async def test_an_answered_client_waits_for_the_next_batch_too_so_that_it_is_not_always_the_first():
    async with full() as (served, calls):
        other, client = await refused(served), await RawClient.connect(served)
        served.workers[0].go.set()
        await asyncio.gather(*calls)
        assert len(served.server.batches) == 3
        await client.send(whole())
        assert (await client.answer()).status == 200
        await until(lambda: len(served.server.batches) == 4)
        await client.send(whole())
        assert (await client.answer()).status == 200
        await other.close()


@in_event_loop
async def test_a_client_that_leaves_is_forgotten():
    async with full() as (served, _):
        closing, resetting = [await refused(served) for _ in range(2)]
        await until(lambda: len(served.server.batches) == 2)
        await closing.close()
        raw = resetting.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        resetting.writer.transport.abort()
        await until(lambda: len(served.server.batches) == 0)
        await until(lambda: len(served.server.table) == 2)  # those that wait


@in_event_loop
async def test_connections_go_back_into_the_event_loop_when_nothing_was_refused_lately(monkeypatch):
    monkeypatch.setattr(connection_module, "_LASTS_S", 0.1)
    async with full() as (served, _):
        clients = [await refused(served) for _ in range(3)]
        await until(lambda: len(served.server.batches) == 0)
        for client in clients:
            await client.send(whole())
            assert (await client.answer()).status == 429


@in_event_loop
async def test_an_idle_connection_in_a_batch_is_closed_at_its_deadline():
    async with full("server.idle_deadline_s=0.2") as (served, _):
        client = await refused(served)
        assert await client.closed() == b""
        assert len(served.server.batches) == 0


@in_event_loop
async def test_a_draining_server_tells_clients_in_a_batch_that_this_was_their_last_answer():
    async with full() as (served, _):
        client = await refused(served)
        served.server.drain()
        await client.send(whole())
        answer = await client.answer()
        assert answer.status in (429, 503)
        assert answer.headers["connection"] == "close"
        assert await client.closed() == b""


@in_event_loop
async def test_a_client_whose_request_waits_for_the_next_batch_does_not_yield_to_a_new_one(monkeypatch):
    monkeypatch.setattr(connection_module, "_PERIOD_S", 60.0)
    async with full() as (served, _):
        client = await refused(served)
        (connection,) = (each for each in served.server.table if each.phase == "idle")
        assert connection.may_yield
        await client.send(whole())
        await until(lambda: not connection.may_yield)
        await client.close()


@in_event_loop
async def test_new_connections_come_in_batches_while_calls_are_refused(monkeypatch):
    async with full() as (served, _):
        await (await refused(served)).close()
        await until(lambda: len(served.server.table) == 2)
        next_one = asyncio.Event()
        monkeypatch.setattr(served.server.batches, "next_one", next_one.wait)
        clients = [await RawClient.connect(served) for _ in range(5)]
        await asyncio.sleep(0.02)
        assert len(served.server.table) == 2
        next_one.set()
        await until(lambda: len(served.server.table) == 7)
        for client in clients:
            await client.send(whole())
        assert [(await client.answer()).status for client in clients] == [429] * 5


@in_event_loop
async def test_new_connections_wait_for_a_batch_only_while_calls_are_refused(monkeypatch):
    batches = BatchReader()
    monkeypatch.setattr(connection_module, "_PERIOD_S", 60.0)
    await batches.next_one()
    batches.count_refusal()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await batches.next_one()
    batches.close()


class _Paused(asyncio.Transport):
    """The transport of a socket that the event loop does not read."""

    def pause_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return False


class _Connection:
    """A connection on which something has arrived."""

    scheme = "http"

    def __init__(self, order: list["_Connection"]):
        self._own, self._peer = socket.socketpair()
        self._order = order
        self.transport = _Paused()
        self.descriptor = self._own.fileno()
        self._peer.send(b"x")

    def data_received(self, data: bytes) -> None:
        assert data == b"x"
        self._order.append(self)

    def close(self) -> None:
        self._own.close()
        self._peer.close()


@in_event_loop
async def test_a_mistake_with_one_connection_ends_it_alone(monkeypatch):
    failures: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    batches, order = BatchReader(), []
    batches.count_refusal()
    bad, good = _Connection(order), _Connection(order)
    ended: list[_Connection] = []
    monkeypatch.setattr(bad, "data_received", lambda data: 1 // 0)
    monkeypatch.setattr(bad.transport, "abort", lambda: ended.append(bad))
    batches.add(bad)
    batches.add(good)
    await until(lambda: order == [good])
    assert ended == [bad]
    assert [str(failure["exception"]) for failure in failures] == ["integer division or modulo by zero"]
    batches.close()
    bad.close()
    good.close()


@pytest.mark.parametrize("turn_s", [0.0, 1.0])
def test_a_turn_reads_a_few_connections_and_others_have_theirs_in_between(monkeypatch, turn_s: float):
    monkeypatch.setattr(connection_module, "_TURN_S", turn_s)
    monkeypatch.setattr(connection_module, "_TURN_CONNECTIONS", 4)

    @in_event_loop
    async def check():
        batches, order = BatchReader(), []
        batches.count_refusal()
        connections = [_Connection(order) for _ in range(10)]
        for connection in connections:
            batches.add(connection)
        most = 0
        while len(order) < 10:
            before = len(order)
            await asyncio.sleep(0)
            most = max(most, len(order) - before)
        assert most == (4 if turn_s else 1)
        assert order == connections  # each in its turn, however many turns a batch takes
        assert [batches.remove(connections[0]) for _ in range(2)] == [True, False]
        assert len(batches) == 9
        batches.close()
        for connection in connections:
            connection.close()

    check()
