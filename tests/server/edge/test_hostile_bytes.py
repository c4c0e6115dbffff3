"""Every parser of what clients send either takes it or refuses it with its own error, whatever bytes were changed."""

import contextlib
import json

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.config import ServerConfig
from moe_serve.errors import RequestError
from moe_serve.server.api.native import parse_generate
from moe_serve.server.edge.errors import error_body, json_bytes
from moe_serve.server.edge.guard import _is_json, _secret, is_foreign_page, is_served_host
from moe_serve.server.edge.http_parser import BoundedParser
from moe_serve.server.edge.keys import KeyRing
from moe_serve.server.observe.dashboard import Seen
from moe_serve.server.observe.eplb import PlacementShape, parse_placement

BODIES = [
    json.dumps({"text": ["a", "b\u00e9"], "sampling_params": [{"n": 2, "stop": ["x"]}, {"temperature": 0.5}]}).encode(),
    json.dumps({"input_ids": [[1, 2], [3]], "rid": ["a", "b"], "stream": True, "cache_salt": "s"}).encode(),
    json.dumps({"text": "a", "sampling_params": {"sampling_seed": 2**63 - 1, "stop_token_ids": [1]}}).encode(),
]
PLACEMENTS = [
    b"[[0, 1, 2, 3, 0, 1, 2, 3], [3, 2, 1, 0, 3, 2, 1, 0]]",
    b'{"physical_to_logical_map": [[0, 1, 2, 3, 0, 1, 2, 3], [3, 2, 1, 0, 3, 2, 1, 0]], "num_ranks": 2, "version": 4}',
]
REQUESTS = [
    b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\nabcde",
    b"POST /generate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
]
PIECES = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\r\n",
    b"[[[[[[[[[[",
    b'":',
    b"1e999",
    b"-",
    b"9" * 30,
    b"\\ud800",
    b"null",
    b",",
]


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A seed with some of its bytes replaced, dropped, repeated or preceded by something."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 8)))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=4) | st.just(data[start:end] * 2))
        data = data[:start] + piece + data[end:]
    return data


def examples(number: int):
    """The default suite tries a few hundred; `pytest -m slow` a hundred thousand."""
    many = pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])  # minutes, on a busy machine more
    return pytest.mark.parametrize("number", [number, many])


def run(number: int, strategy: st.SearchStrategy, check) -> None:
    settings(max_examples=number, deadline=None, database=None)(given(strategy)(check))()


@examples(400)
def test_mutated_bodies_are_parsed_or_refused(number):
    def check(body: bytes) -> None:
        with contextlib.suppress(RequestError):
            parse_generate(body, max_prompts=8)

    run(number, mutated(BODIES), check)


@examples(300)
def test_mutated_placements_are_parsed_or_refused(number):
    shape = PlacementShape(num_ranks=2, num_logical=4, num_slots=8, moe_layer_ids=(1, 3))

    def check(body: bytes) -> None:
        with contextlib.suppress(RequestError):
            assert len(parse_placement(body, shape)) == 2

    run(number, mutated(PLACEMENTS), check)


@examples(400)
def test_a_refusal_can_always_be_sent(number):
    def check(body: bytes) -> None:
        try:
            parse_generate(body, max_prompts=2)
        except RequestError as error:
            sent = json_bytes(error_body(str(error), 400, error.field))
            assert len(sent) < 8192
            json.loads(sent)

    run(number, mutated(BODIES), check)


@examples(400)
def test_mutated_requests_are_events_or_a_refusal(number):
    def check(data: bytes) -> None:
        parser = BoundedParser(4096)
        parser.receive_data(data)
        for _ in range(len(data) + 4):
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError:
                status, message = parser.refusal
                assert status in (400, 431)
                assert message
                return
            if event in (h11.NEED_DATA, h11.PAUSED):
                return
        raise AssertionError("the parser goes on for ever")

    run(number, mutated(REQUESTS), check)


@examples(300)
def test_any_text_in_a_header_or_a_query_is_understood_or_refused(number):
    keys = KeyRing.load(ServerConfig(), {"MOE_SERVE_API_KEY": "sk-longer than what mutations guess"})

    def check(text: str) -> None:
        is_served_host(text, "127.0.0.1", ("a.example",))
        is_foreign_page({"host": text, "origin": text, "sec-fetch-site": text}, (text[:1],))
        assert keys.identify(_secret(text)) is None
        _is_json(text)
        with contextlib.suppress(RequestError):
            Seen.from_query({"windows": text, "start": text})

    headers = mutated([b"http://[::1]:8/", b"Basic a2V5OmtleQ==", b"Bearer x"]).map(lambda data: data.decode("latin1"))
    run(number, st.text(st.characters(max_codepoint=255), max_size=60) | headers, check)
