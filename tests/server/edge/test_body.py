"""Bodies: their sizes, how many bytes all of them hold, and where they are parsed."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from moe_serve.errors import RequestError
from moe_serve.server import app
from moe_serve.server.api import body_parser
from moe_serve.server.api.body_parser import GENERATE_BODY, SMALL_BYTES, BodyKind, BodyParser
from moe_serve.server.api.schemas import parse_generate
from moe_serve.server.edge.json_fields import MAX_DEPTH, parse_json
from moe_serve.server.edge.keys import API_KEY_VARIABLE
from moe_serve.server.requests.prompts import GenerateRequest
from tests.conftest import _descendants
from tests.server.raw_client import RawClient, header
from tests.server.served import Served, in_event_loop, serving, until

FIVE = {"max_new_tokens": 5, "sampling_seed": 10}
PROMPTS = [[5, 6, 7] * 60] * 40
LARGE = json.dumps({"input_ids": PROMPTS, "sampling_params": FIVE}).encode()
assert len(LARGE) > SMALL_BYTES


async def post(served: Served, content: bytes) -> httpx.Response:
    return await served.client.post("/generate", content=content, headers={"content-type": "application/json"})


REPEATED = [
    (b'{"text": "a", "text": "b"}', "text is given twice"),
    (b'{"text": "a", "t\\u0065xt": "b"}', "text is given twice"),
    (b'{"text": "a", "sampling_params": {"n": 1, "n": 2}}', "n is given twice"),
    (b'{"text": "a", "x": [[{"y": 1, "z": 1, "y": 1}]]}', "y is given twice"),
]


@pytest.mark.parametrize(("body", "message"), REPEATED)
def test_a_key_that_is_given_twice_is_named(body, message):
    with pytest.raises(RequestError, match=message) as caught:
        parse_generate(body, max_prompts=4)
    assert caught.value.field == message.split()[0]


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_nesting_has_a_limit(opening, closing):
    parse_json((opening * MAX_DEPTH + "1" + closing * MAX_DEPTH).encode(), "")
    for depth in (MAX_DEPTH + 1, 500, 100_000):
        with pytest.raises(RequestError, match="nested deeper"):
            parse_json((opening * depth + "1" + closing * depth).encode(), "")


NOT_JSON = [
    b"NaN", b"[Infinity]", b"-Infinity", b'"\xff"', b'"\\ud800"', b"\xff\xfe1\x00", b"\xef\xbb\xbf1", b"1" * 5000,
    b"[1e999]", b"1 2", b"'a'", b"{a: 1}", b"01", b"1.", b"+1", b"\x00", b"// a\n1",
]  # fmt: skip


@pytest.mark.parametrize("body", NOT_JSON)
def test_what_only_some_parsers_take_is_refused(body):
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_json(body, "")


@in_event_loop
async def test_a_large_body_is_parsed_in_a_process_and_a_wrong_one_names_its_field():
    async with serving() as served:
        before = set(_descendants(os.getpid()))
        answer = await post(served, LARGE)
        assert answer.status_code == 200
        assert [one["output_ids"] for one in answer.json()] == [[12, 13, 14, 15, 16]] * 40
        assert served.workers[0].submitted[0].prompt_ids == PROMPTS[0]
        assert len(set(_descendants(os.getpid())) - before) == 1
        wrong = await post(served, LARGE.replace(b"5, 6", b'5, "a"', 1))
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input_ids[0][1]")
        small = await served.generate(text="a", sampling_params=FIVE)
        assert small.status_code == 200
    assert set(_descendants(os.getpid())) == before


@in_event_loop
async def test_a_body_whose_parser_is_killed_gets_another_one_and_fails_where_that_is_killed_too():
    parser = BodyParser()
    known = set(_descendants(os.getpid()))

    async def stop_new_one() -> int:
        await until(lambda: set(_descendants(os.getpid())) - known)
        (pid,) = set(_descendants(os.getpid())) - known
        known.add(pid)
        os.kill(pid, signal.SIGSTOP)
        return pid

    try:
        await parser.parse(LARGE, 100, GENERATE_BODY)
        first = await stop_new_one()
        waiting = asyncio.create_task(parser.parse(LARGE, 100, GENERATE_BODY))
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        assert (await waiting).prompts[0].token_ids == PROMPTS[0]
        second = await stop_new_one()
        waiting = asyncio.create_task(parser.parse(LARGE, 100, GENERATE_BODY))
        await asyncio.sleep(0.05)
        os.kill(second, signal.SIGKILL)
        os.kill(await stop_new_one(), signal.SIGKILL)
        with pytest.raises(RequestError, match="send a simpler one"):
            await waiting
        assert (await parser.parse(LARGE, 100, GENERATE_BODY)).prompts[0].token_ids == PROMPTS[0]
    finally:
        await parser.close()


@in_event_loop
async def test_a_parser_is_kept_also_where_its_parent_is_large():
    parser, held = BodyParser(), bytearray(300 << 20)
    before = set(_descendants(os.getpid()))
    try:
        await parser.parse(LARGE, 100, GENERATE_BODY)
        first = set(_descendants(os.getpid())) - before
        await parser.parse(LARGE, 100, GENERATE_BODY)
        assert len(first) == 1
        assert set(_descendants(os.getpid())) - before == first
    finally:
        await parser.close()
        del held


@in_event_loop
async def test_a_cancelled_caller_does_not_leave_its_answer_to_the_next():
    parser = BodyParser()
    try:
        first = json.dumps({"input_ids": [[1] * 10] * 3000}).encode()
        gone = asyncio.create_task(parser.parse(first, 5000, GENERATE_BODY))
        await asyncio.sleep(0.3)  # the process is there, or nearly
        gone.cancel()
        assert len((await parser.parse(LARGE, 5000, GENERATE_BODY)).prompts) == 40
    finally:
        await parser.close()


def test_a_body_that_takes_much_memory_is_refused_and_the_memory_is_given_back():
    @in_event_loop
    async def check():
        parser = BodyParser()
        try:
            pids = set(_descendants(os.getpid()))
            for _ in range(2):
                with pytest.raises(RequestError, match="3000001 prompts"):
                    await parser.parse(b'{"text":[' + b"[]," * 3_000_000 + b"[]]}", 100, GENERATE_BODY)
                await parser.parse(LARGE, 100, GENERATE_BODY)  # is not told that it was the other one
            for pid in set(_descendants(os.getpid())) - pids:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                assert pages * os.sysconf("SC_PAGE_SIZE") < 200 << 20
        finally:
            await parser.close()

    check()


@in_event_loop
async def test_bytes_in_flight_are_bounded_and_small_bodies_pass():
    async with serving(2, "server.max_body_mib=1", "server.max_bodies_mib=1") as served:
        holder = await RawClient.connect(served)
        await holder.send(header("POST /generate", "content-length: 1000000\r\n"), b" " * 900_000)
        await until(lambda: served.app.state.bodies.num_bytes > 800_000)
        announced, growing = await RawClient.connect(served), await RawClient.connect(served)
        await announced.send(header("POST /generate", "content-length: 900000\r\n"))
        await growing.send(header("POST /generate", "transfer-encoding: chunked\r\n"), b"61a80\r\n" + b" " * 400_000)
        for client in (announced, growing):
            answer = await client.answer()
            assert answer.status == 429
            assert answer.headers["retry-after"]
            assert "server.max_bodies_mib" in answer.message
        assert (await served.generate(text="a", sampling_params=FIVE)).status_code == 200
        await holder.close()
        await until(lambda: served.app.state.bodies.num_bytes == 0)
        assert (await post(served, LARGE)).status_code == 200


def test_one_client_holds_its_share_of_the_bytes_in_flight(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "first second")

    @in_event_loop
    async def check():
        async with serving(1, "server.max_body_mib=1", "server.max_bodies_mib=3") as served:
            clients = [await RawClient.connect(served) for _ in range(4)]
            for number, client in enumerate(clients):
                key = "first" if number < 3 else "second"
                head = header("POST /generate", f"content-length: 1000000\r\nauthorization: Bearer {key}\r\n")
                await client.send(head, b" " * 700_000)
                if number == 1:
                    await until(lambda: served.app.state.bodies.num_bytes > 1_200_000)
            answer = await clients[2].answer()
            assert answer.status == 429
            assert "the key key-1 hold 1 MiB, at most 1 are held of one client" in answer.message
            await until(lambda: served.app.state.bodies.num_bytes > 1_800_000)  # those of the other client are taken
            for client in clients:
                await client.close()
            await until(lambda: served.app.state.bodies.num_bytes == 0)
            assert not served.app.state.bodies.by_client

    check()


def test_large_hostile_bodies_are_never_parsed_in_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    hostile = b'{"input_ids":[' + b"[]," * 300_000 + b"[]]}"

    def parse(body: bytes, max_prompts: int) -> GenerateRequest:
        assert len(body) <= SMALL_BYTES
        return parse_generate(body, max_prompts)

    guarded = BodyKind(parse, GenerateRequest)
    monkeypatch.setattr(app, "GENERATE_BODY", guarded)
    monkeypatch.setattr(body_parser, "KINDS", (guarded,))

    @in_event_loop
    async def check():
        async with serving() as served:
            answers = await asyncio.gather(*[post(served, hostile) for _ in range(10)])
            assert (await served.generate(text="a", sampling_params=FIVE)).status_code == 200
        assert {answer.status_code for answer in answers} == {400}
        assert "300001 prompts" in answers[0].json()["error"]["message"]

    check()
