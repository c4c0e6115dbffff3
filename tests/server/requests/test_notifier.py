"""Streams get what has changed from one notifier: once per turn of the loop, in order; a slow client's by its task."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.protocol.messages import TokenEvent
from moe_serve.server.api.generate import Call, CallResponse
from moe_serve.server.edge.connection import CONNECTION
from moe_serve.server.requests import open_request
from moe_serve.server.requests.open_request import Changes, Notifier, OpenRequest, RequestSpec
from tests.server.raw_client import RawClient, header
from tests.server.served import in_event_loop, serving, until

LONG = SamplingParams(max_new_tokens=100)


def opened(changes: Changes) -> OpenRequest:
    return OpenRequest("r", RequestSpec([7], LONG, seed=1), None, [1], changes)


def tokens(request: OpenRequest, *ids: int) -> None:
    request.apply(TokenEvent("r", 0, request.num_output, list(ids)))


@in_event_loop
async def test_what_changes_several_times_in_a_turn_is_handed_over_once():
    notifier, changes, seen = Notifier(), Changes(), []
    first, second = opened(changes), opened(changes)
    changes.notify_by(notifier, lambda request: seen.append((request, request.num_output)) or True)
    tokens(first, 5)
    tokens(second, 5)
    tokens(first, 6)
    assert seen == []
    await asyncio.sleep(0)
    assert seen == [(first, 2), (second, 1)]
    tokens(second, 6, 8)
    await asyncio.sleep(0)
    assert seen[2:] == [(second, 3)]


@in_event_loop
async def test_what_cannot_be_handed_over_waits_for_its_reader():
    notifier, changes = Notifier(), Changes()
    request = opened(changes)
    changes.notify_by(notifier, lambda request: False)
    reader = asyncio.create_task(changes.next())
    tokens(request, 5)
    assert await asyncio.wait_for(reader, 5) is request
    tokens(request, 6)
    assert await asyncio.wait_for(changes.next(), 5) is request


@in_event_loop
async def test_a_turn_has_an_end_and_a_reader_that_fails_keeps_nobody_from_the_rest(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(open_request, "_TURN_S", 0.001)
    notifier, seen = Notifier(), []
    many = [Changes() for _ in range(20)]

    def slow(request: OpenRequest) -> bool:
        time.sleep(0.0004)
        seen.append(request)
        if len(seen) == 3:
            raise ValueError("a mistake")
        return True

    for changes in many:
        changes.notify_by(notifier, slow)
        tokens(opened(changes), 5)
    await asyncio.sleep(0)
    assert 0 < len(seen) < 20
    await until(lambda: len(seen) == 20)
    assert await asyncio.wait_for(many[2].next(), 5) is seen[2], "it is for its reader to end"


@in_event_loop
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_stream_is_the_same_whoever_writes_it(version: str):
    body = b'{"input_ids": [7], "stream": true, "sampling_params": {"max_new_tokens": 40, "sampling_seed": 3}}'
    async with serving(1) as served:
        client = await RawClient.connect(served)
        head = header("POST /generate", f"content-length: {len(body)}\r\n").replace(
            b"HTTP/1.1", f"HTTP/{version}".encode()
        )
        await client.send(head + body)
        answer = await client.answer()
        assert answer.status == 200
        events = answer.body.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert b'"completion_tokens":40' in events[-3]


@dataclass
class OneConnection:
    """A client that takes what is sent, or does not."""

    takes_chunks: bool = True
    got: list[bytes] = field(default_factory=list)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)

    def write_chunk(self, data: bytes) -> None:
        self.got.append(data)

    async def send(self, message: dict) -> None:
        if message.get("body"):
            await self.is_open.wait()
            self.got.append(message["body"])

    async def receive(self) -> dict:
        await asyncio.Event().wait()
        raise AssertionError


class Counts:
    """Answers with the number of tokens so far."""

    ends_at_failure = True

    def event(self, call: Call, index: int) -> bytes:
        return b"%d" % call.requests[index].num_output

    def end(self, call: Call) -> bytes:
        return b"end"


@in_event_loop
async def test_events_that_wait_for_their_client_are_not_overtaken():
    changes, client = Changes(), OneConnection()
    request, bridge = (
        opened(changes),
        SimpleNamespace(notifier=Notifier(), book=SimpleNamespace(abort=lambda request: None)),
    )
    response = CallResponse(Call([request], ["r"], changes), bridge, Counts(), stream=True)
    scope = {"extensions": {CONNECTION: client}}
    client.is_open.set()
    sending = asyncio.create_task(response(scope, client.receive, client.send))
    for number in range(6):
        if number == 2:  # the task sends, and waits
            client.takes_chunks = False
            client.is_open.clear()
        if number == 4:  # the client takes again, but the task has not been woken yet
            client.takes_chunks = True
        tokens(request, 5)
        await asyncio.sleep(0.01)
    client.is_open.set()
    await asyncio.sleep(0.01)
    tokens(request, 5)
    await asyncio.sleep(0.01)
    request.cut_short("enough")
    await asyncio.wait_for(sending, 5)
    assert client.got == [b"1", b"2", b"3", b"6", b"7", b"7", b"end"]


@in_event_loop
async def test_events_of_a_client_that_pauses_are_not_overtaken():
    body = b'{"input_ids": [7], "stream": true, "sampling_params": {"max_new_tokens": 200, "sampling_seed": 3, "n": 8}}'
    async with serving(1) as served:
        for _ in range(3):
            client = await RawClient.connect(served, receive_buffer=4096)
            await client.send(header("POST /generate", f"content-length: {len(body)}\r\n"), body)
            await asyncio.sleep(0.3)  # what is sent does not fit into buffers, so that the stream is paused
            answer = await client.answer()
            assert answer.status == 200, answer.body
            counts: dict[int, list[int]] = {}
            for event in answer.body.split(b"\n\n")[:-2]:
                said = json.loads(event.removeprefix(b"data: "))
                counts.setdefault(said["index"], []).append(said["meta_info"]["completion_tokens"])
            assert sorted(counts) == list(range(8))
            for seen in counts.values():
                assert seen == sorted(set(seen))
                assert seen[-1] == 200, (seen[-5:], answer.body[-3000:])
            await client.close()
