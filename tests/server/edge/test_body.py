"""Bodies: their sizes, how many bytes all of them hold, and where they are parsed."""

import asyncio
import json
import os
import platform
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest

from moe_serve.errors import RequestError
from moe_serve.server.api import native
from moe_serve.server.api.native import parse_generate
from moe_serve.server.edge import body as edge_body
from moe_serve.server.edge.body import MAX_DEPTH, read_body
from moe_serve.server.edge.keys import API_KEY_VARIABLE
from moe_serve.server.requests.prompts import GenerateRequest
from tests.conftest import _descendants
from tests.server.raw_client import RawClient, header
from tests.server.served import Served, in_event_loop, serving, until

FIVE = {"max_new_tokens": 5, "sampling_seed": 10}
PROMPTS = [[5, 6, 7] * 60] * 40
LARGE = json.dumps({"input_ids": PROMPTS, "sampling_params": FIVE}).encode()
assert len(LARGE) > 1 << 14  # parsed in a thread


async def post(served: Served, content: bytes) -> httpx.Response:
    return await served.client.post("/generate", content=content, headers={"content-type": "application/json"})


REPEATED = [
    (b'{"text": "a", "text": "b"}', "text is given twice"),
    (b'{"text": "a", "t\\u0065xt": "b"}', "text is given twice"),
    (b'{"text": "a", "sampling_params": {"n": 1, "n": 2}}', "n is given twice"),
    (b'{"text": "a", "sampling_params": {"json_schema": {"x": [[{"y": 1, "z": 1, "y": 1}]]}}}', "y is given twice"),
    (b'{"input_ids": [%s1], "rid": "a", "rid": "b"}' % (b"1, " * 100), "rid is given twice"),
]


@pytest.mark.parametrize(("body", "message"), REPEATED)
def test_a_key_that_is_given_twice_is_named(body, message):
    with pytest.raises(RequestError, match=message) as caught:
        parse_generate(body, max_prompts=4)
    assert caught.value.field == message.split()[0]


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_nesting_has_a_limit(opening, closing):
    read_body((opening * MAX_DEPTH + "1" + closing * MAX_DEPTH).encode(), Any)
    for depth in (MAX_DEPTH + 1, 500, 100_000):
        with pytest.raises(RequestError, match="nested deeper"):
            read_body((opening * depth + "1" + closing * depth).encode(), Any)


NOT_JSON = [
    b"NaN", b"[Infinity]", b"-Infinity", b'"\xff"', b'"\\ud800"', b"\xff\xfe1\x00", b"\xef\xbb\xbf1", b"1" * 5000,
    b"[1e999]", b"1 2", b"'a'", b"{a: 1}", b"01", b"1.", b"+1", b"\x00", b"// a\n1",
]  # fmt: skip


@pytest.mark.parametrize("body", NOT_JSON)
def test_what_only_some_parsers_take_is_refused(body):
    with pytest.raises(RequestError, match="not valid JSON"):
        read_body(body, Any)


def test_a_whole_number_may_be_written_as_5_0_and_a_row_of_numbers_may_be_a_key():
    body = b'{"text": "a", "sampling_params": {"max_new_tokens": 5.0, "stream_interval": null}}'
    assert parse_generate(body, 4).prompts[0].params.max_new_tokens == 5
    keys = {f"[{', '.join(['1'] * 40)}, {last}": 1 for last in "ab"}  # these differ in nothing else
    read_body(json.dumps({"x": [1] * 100, "y": keys}).encode(), dict)


TOO_MANY = [
    (b'{"input_ids":[' + b"[]," * 300_000 + b"[]]}", "lists and objects"),
    (b'{"text":[' + b'"",' * 300_000 + b'""]}', "strings"),
]


@pytest.mark.parametrize(("body", "what"), TOO_MANY, ids=["lists", "strings"])
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(body, what, monkeypatch):
    monkeypatch.setattr(edge_body, "_decoder", None)
    with pytest.raises(RequestError, match=f"the body has more than .* {what}; send fewer"):
        parse_generate(body, 4)


def test_brackets_and_quotes_in_a_text_are_not_counted():
    text = '[{"' * 200_000
    assert parse_generate(json.dumps({"text": text}).encode(), 4).prompts[0].text == text


@in_event_loop
async def test_a_large_body_starts_no_process_and_a_wrong_one_names_its_field():
    async with serving() as served:
        before = set(_descendants(os.getpid()))
        answer = await post(served, LARGE)
        assert answer.status_code == 200
        assert [one["output_ids"] for one in answer.json()] == [[12, 13, 14, 15, 16]] * 40
        assert served.workers[0].submitted[0].prompt_ids == PROMPTS[0]
        wrong = await post(served, LARGE.replace(b"5, 6", b'5, "a"', 1))
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input_ids[0][1]")
        assert set(_descendants(os.getpid())) == before


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


def test_large_bodies_are_never_parsed_in_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    threads = []

    def parse(body: bytes, max_prompts: int) -> GenerateRequest:
        threads.append((len(body), threading.current_thread() is loop_thread))
        return parse_generate(body, max_prompts)

    loop_thread = threading.current_thread()
    monkeypatch.setattr(native, "parse_generate", parse)

    @in_event_loop
    async def check():
        async with serving() as served:
            answers = await asyncio.gather(*[post(served, TOO_MANY[0][0]) for _ in range(10)], post(served, LARGE))
            assert (await served.generate(text="a", sampling_params=FIVE)).status_code == 200
        assert [answer.status_code for answer in answers] == [400] * 10 + [200]

    check()
    assert len(threads) == 12
    assert all(in_loop == (size <= 1 << 14) for size, in_loop in threads)


# Memory of large bodies goes back to the kernel.


WHERE_A_LARGE_BLOCK_IS = """
import ctypes, sys
from moe_serve.server.edge.body import give_large_blocks_back
if sys.argv[1] == "bounded":
    assert give_large_blocks_back()
largest = bytearray(20 << 20)
del largest
block = bytearray(8 << 20)
address = ctypes.addressof((ctypes.c_char * 1).from_buffer(block))
for line in open("/proc/self/maps"):
    first, last = (int(part, 16) for part in line.split()[0].split("-"))
    if first <= address < last:
        print("heap" if "[heap]" in line else "its own")
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the bound is glibc's")
@pytest.mark.parametrize(("mode", "place"), [("bounded", "its own"), ("as it is", "heap")])
def test_a_large_block_is_outside_the_heap_after_a_larger_one_was_freed(mode, place):
    command = [sys.executable, "-c", WHERE_A_LARGE_BLOCK_IS, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == place
