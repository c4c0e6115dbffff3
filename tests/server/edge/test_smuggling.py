"""A request whose end two parsers could see at different places gets one answer, and nothing behind it runs.

Each form is sent to the real server with a second request behind it, to an admin route that notes its calls. Where a
proxy passes the form on, what the proxy takes for a body is what this second request stands for.
"""

import asyncio
import contextlib
import re
from collections.abc import Iterator

import h11
import pytest

from moe_serve.server.edge import connection
from moe_serve.server.edge.http_parser import BoundedParser
from tests.server.raw_client import RawClient
from tests.server.served import Served, in_event_loop, serving, until

CANARY = b"GET /flush_cache HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"


def post(
    *lines: str, body: bytes = b"", version: str = "1.1", target: str = "/generate", host: str = "localhost"
) -> bytes:
    """A request with these header lines; the first of them is the host's, unless there is none."""
    head = [f"POST {target} HTTP/{version}", f"Host: {host}", "Content-Type: application/json", *lines, "", ""]
    return "\r\n".join(head).encode("latin1") + body


def chunked(body: bytes = CHUNKS, field: str = "Transfer-Encoding: chunked", version: str = "1.1") -> bytes:
    return post(field, body=body, version=version)


def both(method: str, version: str, te_first: bool, length: int, body: bytes) -> bytes:
    fields = ["Transfer-Encoding: chunked", f"Content-Length: {length}"]
    lines = fields if te_first else fields[::-1]
    return "\r\n".join([f"{method} /generate HTTP/{version}", "Host: localhost", *lines, "", ""]).encode() + body


# Two framings in one header: by the length the proxy's body ends behind the canary, or in the middle of the chunks.
TWO_FRAMINGS = {
    f"{method} {'TE, CL' if te_first else 'CL, TE'} {version}, {kind}": both(method, version, te_first, length, body)
    for method in ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE")
    for te_first in (True, False)
    for version in ("1.0", "1.1")
    for kind, length, body in (("CL.TE", len(CHUNKS + CANARY), CHUNKS), ("TE.CL", 4, CHUNKS), ("0", 0, b"0\r\n\r\n"))
}

CODINGS = {
    f"transfer-encoding {name}": chunked(field=field)
    for name, field in {
        "of another name": "Transfer-Encoding: xchunked",
        "with white space before the colon": "Transfer-Encoding : chunked",
        "with a tab before the colon": "Transfer-Encoding\t: chunked",
        "behind a vertical tab": "Transfer-Encoding: \x0bchunked",
        "before a vertical tab": "Transfer-Encoding: chunked\x0b",
        "before a form feed": "Transfer-Encoding: chunked\x0c",
        "before NUL": "Transfer-Encoding: chunked\0",
        "in Latin-1 white space": "Transfer-Encoding: chunked\xa0",
        "chunked, identity": "Transfer-Encoding: chunked, identity",
        "identity, chunked": "Transfer-Encoding: identity, chunked",
        "gzip, chunked": "Transfer-Encoding: gzip, chunked",
        "chunked twice in a list": "Transfer-Encoding: chunked, chunked",
        "with an empty element": "Transfer-Encoding: ,chunked",
        "in two fields": "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "in two fields, the last unknown": "Transfer-Encoding: chunked\r\nTransfer-Encoding: cow",
        "in two fields, the first unknown": "Transfer-Encoding: identity\r\ntransfer-encoding: chunked",
        "identity": "Transfer-Encoding: identity",
        "gzip": "Transfer-Encoding: gzip",
        "empty": "Transfer-Encoding:",
        "in quotes": 'Transfer-Encoding: "chunked"',
        "with a parameter": "Transfer-Encoding: chunked;q=1",
        "on a folded line": "Transfer-Encoding:\r\n chunked",
        "in the fold of another field": "X: a\r\n Transfer-Encoding: chunked",
        "in the fold of another field, by a tab": "X: a\r\n\tTransfer-Encoding: chunked",
        "behind a bare LF": "X: a\nTransfer-Encoding: chunked",
        "behind a bare CR": "X: a\rTransfer-Encoding: chunked",
        "in HTTP/1.0": "Transfer-Encoding: chunked\r\nConnection: keep-alive",
    }.items()
}
CODINGS["transfer-encoding in HTTP/1.0"] = chunked(version="1.0")

LENGTHS = {
    f"content-length {name}": post(*lines, body=b"{}   ")
    for name, lines in {
        "in a list": ["Content-Length: 5, 5"],
        "in a list that differs": ["Content-Length: 5, 6"],
        "given twice": ["Content-Length: 5", "Content-Length: 5"],
        "given twice, in another case": ["Content-Length: 5", "content-length: 5"],
        "given twice, differing": ["Content-Length: 5", "Content-Length: 0"],
        "with a sign": ["Content-Length: +5"],
        "below zero": ["Content-Length: -5"],
        "in hexadecimal": ["Content-Length: 0x5"],
        "with an underscore": ["Content-Length: 0_5"],
        "with a point": ["Content-Length: 5.0"],
        "with an exponent": ["Content-Length: 5e0"],
        "with white space inside": ["Content-Length: 5 5"],
        "with white space before the colon": ["Content-Length : 5"],
        "empty": ["Content-Length:"],
        "in other digits": ["Content-Length: \xb2"],
        "beyond 64 bits, where it is 5": [f"Content-Length: {2**64 + 5}"],
        "beyond 63 bits": [f"Content-Length: {2**63}"],
        "of a thousand digits": ["Content-Length: " + "0" * 999 + "5"],
        "on a folded line": ["Content-Length:\r\n 5"],
        "before a vertical tab": ["Content-Length: 5\x0b"],
    }.items()
}

LINES = {
    "bare LF throughout": chunked().replace(b"\r\n", b"\n"),
    "bare LF at the end of the header": post("Content-Length: 0")[:-2] + b"\n",
    "bare LF after the request line": post("Content-Length: 0").replace(b"1.1\r\n", b"1.1\n"),
    "two bare LF inside a header": post("X: a\n\nGET /flush_cache HTTP/1.1", "Content-Length: 0"),
    "bare CR in a value": post("X: a\rb", "Content-Length: 0"),
    "CR twice": post("X: a\r", "Content-Length: 0"),
    "bare CR as the end of the header": post("Content-Length: 0").replace(b"\r\n\r\n", b"\r\n\r\r\n"),
    "NUL in a value": post("X: a\0b", "Content-Length: 0"),
    "NUL in a name": post("X\0Y: a", "Content-Length: 0"),
    "DEL in a value": post("X: a\x7fb", "Content-Length: 0"),
    "an escape sequence in a value": post("X: \x1b[2J", "Content-Length: 0"),
    "a folded line": post("X: a", " b", "Content-Length: 0"),
    "a folded line that is empty": post("X: a", "\t", "Content-Length: 0"),
    "white space before the first field": post("Content-Length: 0").replace(b"Host", b" Host"),
    "white space before the colon": post("X : a", "Content-Length: 0"),
    "a line without a colon": post("X", "Content-Length: 0"),
    "a name that is empty": post(": a", "Content-Length: 0"),
    "a name in brackets": post("X(a): b", "Content-Length: 0"),
    "a name beyond ASCII": post("Content-Length\xad: 5", body=b"{}   "),
    "an empty line before the request": b"\r\n" + post("Content-Length: 0"),
}

REQUEST_LINES = {
    name: post("Content-Length: 0").replace(b"POST /generate HTTP/1.1", line)
    for name, line in {
        "a space in the target": b"GET /ping HTTP/1.1 HTTP/1.1",
        "a space in the path": b"GET /pi ng HTTP/1.1",
        "a tab in the path": b"GET /pi\tng HTTP/1.1",
        "a tab between the parts": b"GET\t/ping\tHTTP/1.1",
        "two spaces": b"GET  /ping HTTP/1.1",
        "a space in front": b" GET /ping HTTP/1.1",
        "a space behind": b"GET /ping HTTP/1.1 ",
        "bytes beyond ASCII in the path": b"GET /p\xefng HTTP/1.1",
        "a path without a slash": b"GET ping HTTP/1.1",
        "no path": b"GET HTTP/1.1",
        "an asterisk for GET": b"GET * HTTP/1.1",
        "a URL of another host": b"GET http://elsewhere/ping HTTP/1.1",
        "a URL of another user": b"GET http://localhost@elsewhere/ping HTTP/1.1",
        "a URL with a name in front": b"GET http://x@localhost/ping HTTP/1.1",
        "a URL of another scheme": b"GET file:///etc/passwd HTTP/1.1",
        "a fragment in a URL": b"GET http://localhost/ping#a HTTP/1.1",
        "CONNECT": b"CONNECT localhost:80 HTTP/1.1",
        "CONNECT to a path": b"CONNECT /ping HTTP/1.1",
        "HTTP/0.9": b"GET /ping",
        "HTTP/0.9 by number": b"GET /ping HTTP/0.9",
        "HTTP/1.2": b"GET /ping HTTP/1.2",
        "HTTP/2.0": b"PRI * HTTP/2.0",
        "HTTP/1.10": b"GET /ping HTTP/1.10",
        "a version without a point": b"GET /ping HTTP/11",
        "http in small letters": b"GET /ping http/1.1",
        "another protocol": b"GET /ping HTTPS/1.1",
    }.items()
}

HOSTS = {
    "no host": post("Content-Length: 0").replace(b"Host: localhost\r\n", b""),
    "two hosts": post("Host: elsewhere", "Content-Length: 0"),
    "the same host twice": post("Host: localhost", "Content-Length: 0"),
    "two hosts in HTTP/1.0": post("Host: elsewhere", "Content-Length: 0", version="1.0"),
    **{
        f"the host {host!r}": post("Content-Length: 0", host=host)
        for host in (
            "a b", "localhost, elsewhere", "a@localhost", "localhost/ping", "localhost:80:80", "localhost:x", "[::1",
            "\xe4",
        )
    },
    "two keys": post("Authorization: Bearer a", "Authorization: Bearer b", "Content-Length: 0"),
    "two content types": post("Content-Type: text/plain", "Content-Length: 0"),
    "two content codings": post("Content-Encoding: br", "Content-Encoding: identity", "Content-Length: 0"),
    "two origins": post("Origin: http://elsewhere", "Origin: http://localhost", "Content-Length: 0"),
}  # fmt: skip

BODIES = {
    f"chunks: {name}": chunked(body)
    for name, body in {
        "0x": b"0x2\r\n{}\r\n0\r\n\r\n",
        "a sign": b"+2\r\n{}\r\n0\r\n\r\n",
        "below zero": b"-2\r\n{}\r\n0\r\n\r\n",
        "an underscore": b"0_2\r\n{}\r\n0\r\n\r\n",
        "white space behind the size": b"2 \r\n{}\r\n0\r\n\r\n",
        "a tab behind the size": b"2\t\r\n{}\r\n0\r\n\r\n",
        "white space before the size": b" 2\r\n{}\r\n0\r\n\r\n",
        "white space before an extension": b"2 ;a\r\n{}\r\n0\r\n\r\n",
        "no size": b"\r\n{}\r\n0\r\n\r\n",
        "no size before an extension": b";a\r\n{}\r\n0\r\n\r\n",
        "no digit": b"g\r\n{}\r\n0\r\n\r\n",
        "a size beyond 64 bits, where it is 2": b"10000000000000002\r\n{}\r\n0\r\n\r\n",
        "a size beyond 63 bits": b"ffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        "a size of many zeros": b"0" * 16 + b"2\r\n{}\r\n0\r\n\r\n",
        "other digits": b"\xb2\r\n{}\r\n0\r\n\r\n",
        "bare LF behind the size": b"2\n{}\r\n0\r\n\r\n",
        "bare CR behind the size": b"2\r{}\r\n0\r\n\r\n",
        "bare LF in an extension": b"2;a\n{}\r\n0\r\n\r\n",
        "bare CR in an extension": b"2;a\rb\r\n{}\r\n0\r\n\r\n",
        "NUL in an extension": b"2;a\0\r\n{}\r\n0\r\n\r\n",
        "a long extension": b"2;" + b"a" * 1100 + b"\r\n{}\r\n0\r\n\r\n",
        "a long extension that does not end": b"2;" + b"a" * 5000,
        "long extensions in all": (b"2;" + b"a" * 300 + b"\r\n{}\r\n") * 4 + b"0\r\n\r\n",
        "more data than the size": b"2\r\n{} \r\n0\r\n\r\n",
        "less data than the size": b"9\r\n{}\r\n0\r\n\r\n\r\n",
        "bare LF behind the data": b"2\r\n{}\n0\r\n\r\n",
        "bare CR behind the data": b"2\r\n{}\r0\r\n\r\n",
        "nothing behind the data": b"2\r\n{}0\r\n\r\n",
        "bare LF behind the last size": b"2\r\n{}\r\n0\n\r\n",
        "bare LF at the end": b"2\r\n{}\r\n0\r\n\n",
        "bare LF behind a trailer field": b"2\r\n{}\r\n0\r\nX: a\n\r\n",
        "a folded trailer field": b"2\r\n{}\r\n0\r\nX: a\r\n b\r\n\r\n",
        "white space before the colon of a trailer field": b"2\r\n{}\r\n0\r\nX : a\r\n\r\n",
        "NUL in a trailer field": b"2\r\n{}\r\n0\r\nX: \0\r\n\r\n",
        "a second request as a trailer": b"2\r\n{}\r\n0\r\n" + CANARY,
        "content-length in the trailer": b"2\r\n{}\r\n0\r\nContent-Length: 3\r\n\r\n",
        "transfer-encoding in the trailer": b"2\r\n{}\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
        "host in the trailer": b"2\r\n{}\r\n0\r\nHost: elsewhere\r\n\r\n",
    }.items()
}  # fmt: skip

FAULTY = TWO_FRAMINGS | CODINGS | LENGTHS | LINES | REQUEST_LINES | HOSTS | BODIES

# What is sound: the request ends where every parser says, and the one behind it is the client's own.
SOUND = {
    "a length": post("Content-Length: 2", body=b"{}"),
    "a length among white space": post("Content-Length: \t 2 \t", body=b"{}"),
    "a length with leading zeros": post("Content-Length: 0002", body=b"{}"),
    "chunks": chunked(),
    "chunks in capitals": chunked(field="TRANSFER-ENCODING: CHUNKED"),
    "chunks among white space": chunked(field="Transfer-Encoding: \t chunked \t"),
    "sizes with leading zeros": chunked(b"00000002\r\n{}\r\n000\r\n\r\n"),
    "a size in capitals": chunked(b"A\r\n{}        \r\n0\r\n\r\n"),
    "a short extension": chunked(b'2;a="b c";d\r\n{}\r\n0;e\r\n\r\n'),
    "a trailer": chunked(b"2\r\n{}\r\n0\r\nX: a\r\nY: b\r\n\r\n"),
    "a request as the body": post(f"Content-Length: {len(CANARY)}", body=CANARY),
    "a URL of this host": post("Content-Length: 2", body=b"{}", target="http://LOCALHOST/generate"),
    "an expectation, and the body with it": post("Expect: 100-continue", "Content-Length: 2", body=b"{}"),
    "an upgrade": post(
        "Upgrade: h2c", "Connection: upgrade, http2-settings", "HTTP2-Settings: AAMA", "Content-Length: 2", body=b"{}"
    ),
    "an upgrade to a web socket": post("Upgrade: websocket", "Connection: upgrade", "Content-Length: 2", body=b"{}"),
}  # fmt: skip

# Their client wants no second answer on this connection.
LAST = {
    "HTTP/1.0": post("Content-Length: 2", body=b"{}", version="1.0"),
    "HTTP/1.0 that would go on": post("Connection: keep-alive", "Content-Length: 2", body=b"{}", version="1.0"),
    "HTTP/1.0 without a length": post(version="1.0"),
    "connection: close": post("Connection: close", "Content-Length: 2", body=b"{}"),
}


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LINGER_S", 1.0)


class Canary:
    """Notes the calls of the admin route. calls: how many"""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch):
        self.calls = 0

        async def flush_cache() -> list[object]:
            self.calls += 1
            return []

        monkeypatch.setattr(served.bridge, "flush_cache", flush_cache)


async def statuses(served: Served, *parts: bytes) -> list[int]:
    """Returns the statuses of all answers until the server closes."""
    client = await RawClient.connect(served)
    try:
        await client.send(*parts)
        received = await client.closed()
    finally:
        await client.close()
    return statuses_in(received)


def statuses_in(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


@pytest.mark.parametrize("forms", [TWO_FRAMINGS, CODINGS, LENGTHS, LINES, REQUEST_LINES, HOSTS, BODIES])
def test_a_request_with_an_uncertain_end_gets_one_400_and_nothing_behind_it_runs(forms, monkeypatch):
    @in_event_loop
    async def check():
        async with serving(1) as served:
            canary = Canary(served, monkeypatch)
            for name, data in forms.items():
                assert (name, await statuses(served, data + CANARY)) == (name, [400])
                assert (name, canary.calls) == (name, 0)

    check()


@pytest.mark.parametrize("num_bytes", [1, 7, 100_000])
def test_a_request_is_refused_in_whatever_pieces_it_comes(num_bytes: int):
    for name, data in FAULTY.items():
        parser = BoundedParser(16_384)
        with pytest.raises(h11.RemoteProtocolError):
            for _ in parsed(parser, data + CANARY, num_bytes):
                pass
        assert (name, parser.refusal[0]) == (name, 400)
    for name, data in SOUND.items():
        events = [type(event) for event in parsed(BoundedParser(16_384), data, num_bytes)]
        assert (name, events[0], events[-1]) == (name, h11.Request, h11.EndOfMessage)


def parsed(parser: BoundedParser, data: bytes, num_bytes: int) -> Iterator[h11.Event]:
    """Yields the events of data that comes in pieces, up to the end of the first request."""
    for start in range(0, len(data), num_bytes):
        parser.receive_data(data[start : start + num_bytes])
        while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            yield event


@in_event_loop
async def test_a_request_with_a_certain_end_is_served_and_so_is_the_next_one(monkeypatch):
    async with serving(1) as served:
        canary = Canary(served, monkeypatch)
        for number, (name, data) in enumerate(SOUND.items()):
            found = [status for status in await statuses(served, data + CANARY) if status != 100]
            assert (name, found) == (name, [400, 200])  # the first has no prompt
            assert (name, canary.calls) == (name, number + 1)


@in_event_loop
async def test_a_length_beyond_the_limit_of_bodies_swallows_what_comes_behind_it(monkeypatch):
    async with serving(1) as served:
        canary = Canary(served, monkeypatch)
        for data, expected in (
            (post(f"Content-Length: {10**18 - 1}", body=b"{}"), [413]),
            (chunked(b"fffffffffffffff\r\n{}"), []),  # the rest may yet come: the body's deadline ends it
        ):
            client = await RawClient.connect(served)
            await client.send(data + CANARY)
            client.writer.write_eof()
            assert statuses_in(await client.closed()) == expected
        assert canary.calls == 0


@in_event_loop
async def test_a_body_on_a_route_that_takes_none_is_a_body(monkeypatch):
    async with serving(1) as served:
        canary = Canary(served, monkeypatch)
        for field, body in (
            (f"Content-Length: {len(CANARY)}", CANARY),
            ("Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(CANARY), CANARY)),
        ):
            ping = post(field, body=body).replace(b"POST /generate", b"GET /ping")
            last = CANARY.replace(b"/flush_cache", b"/ping")
            assert await statuses(served, ping + last) == [200, 200]
        assert canary.calls == 0


@in_event_loop
async def test_a_fault_in_a_body_after_its_answer_ends_the_connection_and_the_answer_arrives(monkeypatch):
    async with serving(1) as served:
        canary = Canary(served, monkeypatch)
        client = await RawClient.connect(served)
        await client.send(chunked(b"").replace(b"POST /generate", b"GET /ping"))
        assert (await client.answer()).status == 200
        await client.send(b"2 \r\n{}\r\n0\r\n\r\n" + CANARY)
        assert await client.closed() == b""
        assert canary.calls == 0


@pytest.mark.parametrize("name", LAST)
@in_event_loop
async def test_what_comes_behind_a_last_request_neither_runs_nor_costs_its_answer(name: str, monkeypatch):
    async with serving(1) as served:
        canary = Canary(served, monkeypatch)
        for between in (b"", b"\r\n", b" " * 5000):
            assert await statuses(served, LAST[name] + between + CANARY) == [400]  # no prompt
        client = await RawClient.connect(served)
        served.workers[0].go.clear()
        await client.send(LAST[name].replace(b"{}", b'{"input_ids": [7]}').replace(b"Length: 2", b"Length: 18"))
        if b"{}" in LAST[name]:
            await until(lambda: len(served.bridge.book) == 1)
        await client.send(b"\r\n" + CANARY)
        await asyncio.sleep(0.05)
        served.workers[0].go.set()
        assert (await client.answer()).status == (200 if b"{}" in LAST[name] else 400)
        assert await client.closed() == b""
        assert canary.calls == 0


@in_event_loop
async def test_an_answer_in_the_place_of_100_continue_is_the_last_one(monkeypatch):
    """The client may send the body now, or leave it out: what comes next is a body or a request."""
    async with serving(1, "server.max_body_mib=0.01") as served:
        canary = Canary(served, monkeypatch)
        client = await RawClient.connect(served)
        await client.send(post("Expect: 100-continue", f"Content-Length: {len(CANARY) + 20_000}"))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"], answer.interim) == (413, "close", [])
        with contextlib.suppress(ConnectionError):
            await client.send(CANARY)
        assert await client.closed() == b""
        assert canary.calls == 0


@in_event_loop
async def test_a_refusal_of_a_head_request_has_no_body():
    async with serving(1) as served:
        client = await RawClient.connect(served)
        await client.send(both("HEAD", "1.1", True, 4, CHUNKS))
        received = await client.closed()
        assert received.startswith(b"HTTP/1.1 400 ")
        assert received.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("method", ["POST", "GET", "PUT"])
@pytest.mark.parametrize("coding", ["br", "deflate", "gzip", "gzip, gzip", "x", "identity, gzip", "chunked"])
@in_event_loop
async def test_a_content_coding_is_refused_and_the_answer_names_what_is_taken(method: str, coding: str):
    async with serving(1) as served:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        for path in ("/generate", "/v1/completions", "/v1/models"):
            response = await served.client.request(method, path, json=body, headers={"content-encoding": coding})
            assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
            assert coding in response.json()["error"]["message"]
        for plain in ("identity", "Identity", ""):
            response = await served.client.post("/generate", json=body, headers={"content-encoding": plain})
            assert response.status_code == 200
