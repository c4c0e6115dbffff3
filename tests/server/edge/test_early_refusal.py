"""A request that is refused by its bytes gets what it would have got by the long way, and nobody else gets anything."""

import asyncio
import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.server.edge.client_limits import ClientTable, Ledger, shared_memory
from moe_serve.server.edge.http_parser import BoundedParser, plain_headers
from moe_serve.server.edge.keys import API_KEY_VARIABLE
from tests.server.edge.test_client_limits import hold_the_lock
from tests.server.edge.test_hostile_bytes import mutated
from tests.server.raw_client import Answer, RawClient, header
from tests.server.served import Served, in_event_loop, serving, until

BODY = json.dumps({"input_ids": [7], "sampling_params": {"max_new_tokens": 5, "sampling_seed": 10}}).encode()
FULL = ("engine.max_running_requests=1", "engine.max_queued_requests=1")


def whole(more: str = "", body: bytes = BODY) -> bytes:
    return header("POST /generate", f"content-length: {len(body)}\r\n{more}") + body


async def fill(served: Served, **headers: str) -> list[asyncio.Task]:
    """Calls that leave no space for another one."""
    served.workers[0].go.clear()
    calls = [asyncio.create_task(served.client.post("/generate", content=BODY, headers={
        "content-type": "application/json", **headers})) for _ in range(2)]  # fmt: skip
    await until(lambda: len(served.bridge.book) == 2)
    return calls


async def ask(served: Served, *parts: bytes) -> Answer:
    """The answer to a request that arrives in these parts."""
    client = await RawClient.connect(served)
    for part in parts:
        await client.send(part)
        await asyncio.sleep(0.02)
    answer = await client.answer()
    await client.close()
    return answer


@contextmanager
def parsing() -> Iterator[list[bytes]]:
    """Gives what the parser gets."""
    parsed: list[bytes] = []
    receive = BoundedParser.receive_data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedParser, "receive_data", lambda self, data: (parsed.append(data), receive(self, data)))
        yield parsed


@in_event_loop
async def test_a_whole_request_is_refused_as_one_in_parts_is_and_the_parser_never_sees_it():
    async with serving(1, *FULL) as served:
        calls = await fill(served)
        with parsing() as parsed:
            request = whole("X-Request-Id: trace-7\r\n")
            early = await ask(served, request)
            assert parsed == []
            late = await ask(served, request[:60], request[60:])
            assert parsed
        assert early.status == 429
        assert (early.status, early.body) == (late.status, late.body)
        for answer in (early, late):
            answer.headers.pop("date", None)
        assert early.headers == late.headers
        assert early.headers["x-request-id"] == "trace-7"
        assert served.bridge.book.counters["num_refused"] == 2
        served.workers[0].go.set()
        assert [(await call).status_code for call in calls] == [200, 200]


@in_event_loop
async def test_a_connection_that_was_refused_is_served_later_and_closed_when_idle():
    async with serving(1, *FULL, "server.idle_deadline_s=0.3") as served:
        calls = await fill(served)
        client = await RawClient.connect(served)
        for _ in range(3):
            await client.send(whole())
            assert (await client.answer()).status == 429
        await client.send(whole() * 2)  # two at once take the long way
        assert [(await client.answer()).status for _ in range(2)] == [429, 429]
        served.workers[0].go.set()
        await asyncio.gather(*calls)
        await client.send(whole())
        assert (await client.answer()).status == 200
        assert await client.closed() == b""
        assert served.bridge.book.counters["num_refused"] == 5


def test_a_full_queue_is_shown_only_to_whom_the_guard_lets_through(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "the-key-of-a-client")

    @in_event_loop
    async def check():
        async with serving(1, *FULL) as served:
            calls = await fill(served, authorization="Bearer the-key-of-a-client")
            key = "authorization: Bearer the-key-of-a-client\r\n"
            assert (await ask(served, whole())).status == 401
            assert (await ask(served, whole("authorization: Bearer the-key\r\n"))).status == 401
            assert (await ask(served, whole(key).replace(b"localhost", b"evil.example"))).status == 421
            assert (await ask(served, whole(key + "origin: http://evil.example\r\n"))).status == 403
            assert (await ask(served, whole(key + "content-type: text/plain\r\n"))).status == 415
            assert served.bridge.book.counters["num_refused"] == 0
            assert (await ask(served, whole(key))).status == 429
            served.workers[0].go.set()
            await asyncio.gather(*calls)

    check()


@in_event_loop
async def test_a_client_beyond_its_limit_is_refused_early_too():
    async with serving(1, "server.rpm_limit=1") as served:
        assert (await ask(served, whole())).status == 200
        early, late = await ask(served, whole()), await ask(served, whole()[:60], whole()[60:])
        assert early.status == late.status == 429
        assert early.headers["x-ratelimit-remaining-requests"] == "0"
        assert set(early.headers) == set(late.headers)
        assert early.body[:60] == late.body[:60]


@in_event_loop
async def test_a_client_whose_limits_another_front_end_has_locked_is_refused_early_and_by_the_long_way_alike():
    fd = shared_memory(3, max_connections=100)
    fork = multiprocessing.get_context("fork")
    held = fork.Event()
    holder = fork.Process(target=hold_the_lock, args=(fd, held))
    holder.start()
    try:
        assert held.wait(60)
        table = ClientTable(Ledger.shared(fd, 3, 0))
        async with serving(1, "server.rpm_limit=1", clients=table) as served:
            early, late = await ask(served, whole()), await ask(served, whole()[:60], whole()[60:])
            assert early.status == late.status == 429
            assert early.body == late.body
            assert b"another front end holds the counts of clients' limits" in early.body
            assert served.workers[0].submitted == []
    finally:
        holder.kill()
        holder.join()
        os.close(fd)


@given(mutated([whole(), whole("x-a: 1\r\nauthorization: Bearer k\r\n"), whole("connection: keep-alive\r\n", b"")]))
def test_what_is_read_as_plain_the_parser_reads_in_the_same_way(data: bytes):
    fields = plain_headers(data)
    if fields is None:
        return
    parser = BoundedParser(16_384)
    parser.receive_data(data)
    try:
        event = parser.next_event()
    except h11.RemoteProtocolError:
        return  # refused in another way
    assert {name.decode(): value.decode() for name, value in event.headers} == fields
    body = b""
    while isinstance(event := parser.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert data.endswith(b"\r\n\r\n" + body)
    assert not parser.has_bytes


@pytest.mark.parametrize(
    "data",
    [
        whole()[:-1],
        whole() + b"x",
        whole("connection: close\r\n"),
        whole("expect: 100-continue\r\n"),
        whole("transfer-encoding: chunked\r\n"),
        whole("x: a\x00b\r\n"),
        whole(" folded: a\r\n"),
        whole("host: localhost\r\n"),
        whole("x-long: " + "a" * 5000 + "\r\n"),
        whole().replace(b"content-length", b"content-size"),
        whole().replace(b"content-length: ", b"content-length: 0"),
        whole().replace(b"\r\n", b"\n"),
    ],
)
def test_anything_unusual_takes_the_long_way(data: bytes):
    assert plain_headers(data) is None


def test_a_plain_request_is_read():
    assert plain_headers(whole("X-A1:  b c \r\n")) == {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(BODY)),
        "x-a1": "b c",
    }


LINES = st.sampled_from(
    [b"Host: b", b"x: 1", b"x:  y z ", b"content-length: 3", b"connection: keep-alive", b"transfer-encoding: chunked",
     b" folded", b"x\n: y", b"no colon", b""]
)  # fmt: skip


@given(
    st.lists(LINES | st.binary(max_size=20), max_size=2),
    st.sampled_from([b"abc", b""]) | st.binary(max_size=5),
    st.sampled_from([0, 0, 1]),
    st.randoms(use_true_random=False),
)
def test_headers_are_plain_only_where_h11_reads_the_same_and_the_whole_body(
    more: list[bytes], body: bytes, missing: int, order: Random
):
    lines = [b"host: a", b"content-length: %d" % (len(body) + missing), *more]
    order.shuffle(lines)
    data = b"\r\n".join([b"POST /generate HTTP/1.1", *lines, b"", body])
    fields = plain_headers(data)
    if fields is None:
        return
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(data)
    request = parser.next_event()
    assert isinstance(request, h11.Request)
    assert [(name.decode(), value.decode()) for name, value in request.headers] == list(fields.items())
    read = b""
    while isinstance(event := parser.next_event(), h11.Data):
        read += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert read == data.partition(b"\r\n\r\n")[2]
    assert parser.trailing_data == (b"", False)


@in_event_loop
async def test_a_header_that_is_known_refuses_its_own_body_and_client_only():
    async with serving(1, *FULL) as served:
        calls = await fill(served)
        with parsing() as parsed:
            for _ in range(2):
                assert (await ask(served, whole())).status == 429
            assert parsed == []
            client = await RawClient.connect(served)
            await client.send(whole()[:-1])  # the last byte is missing: not a whole request
            await until(lambda: parsed)
            await client.send(whole()[-1:])
            assert (await client.answer()).status == 429
            await client.close()
            before = len(parsed)
            early = served.app.state.early_refusal
            assert early.answer(whole(), ("127.0.0.1", 1), []) is not None
            assert early.answer(whole() + b"x", ("127.0.0.1", 1), []) is None
            assert early.answer(whole("origin: http://elsewhere\r\n"), ("127.0.0.1", 1), []) is None
            assert len(parsed) == before
        served.workers[0].go.set()
        await asyncio.gather(*calls)
