"""Whether this uvicorn and this h11 have the internals that our connections, their parser and our server build on.

They are no public interface: a release may change them, which is why pyproject.toml bounds the versions from above.
Raise a bound when this test and tests/server pass with the new one.
"""

import asyncio
from unittest.mock import Mock

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from tests.server.served import in_event_loop

PROTOCOL = (
    "conn", "cycle", "scope", "flow", "transport", "scheme", "loop", "logger", "timeout_keep_alive", "data_received",
    "handle_events", "on_response_complete", "send_400_response", "shutdown", "_unset_keepalive_if_required",
)  # fmt: skip
CYCLE = (
    "disconnected", "keep_alive", "message_event", "more_body", "response_complete", "response_started", "scope",
)  # fmt: skip
FLOW = ("write_paused", "resume_reading")
BUFFER = ("_data", "_multiple_lines_search", "maybe_extract_lines", "maybe_extract_next_line")
SERVER = (
    "lifespan", "server_state", "servers", "started", "should_exit", "force_exit", "shutdown", "capture_signals",
)  # fmt: skip


def missing(names: tuple[str, ...], of: object) -> list[str]:
    """What a future uvicorn no longer has, in words."""
    return [
        f"uvicorn {uvicorn.__version__} has no {type(of).__name__}.{name}: adapt "
        "moe_serve/server/edge/connection.py and http.py, or lower the bound of uvicorn in pyproject.toml"
        for name in names
        if not hasattr(of, name)
    ]


@in_event_loop
async def test_uvicorn_has_the_internals_that_we_build_on():
    async def app(scope: object, receive: object, send: object) -> None:
        await asyncio.sleep(10)

    config = uvicorn.Config(app, http="h11", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[])
    protocol = H11Protocol(config, ServerState(), {})
    transport = Mock(spec=asyncio.Transport)
    transport.get_extra_info.return_value = None
    transport.is_closing.return_value = False
    protocol.connection_made(transport)
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n")
    found = [*missing(PROTOCOL, protocol), *missing(FLOW, protocol.flow), *missing(SERVER, server)]
    assert not found, found
    found = missing(CYCLE, protocol.cycle)
    assert not found, found
    assert protocol.cycle.more_body
    assert not protocol.cycle.response_started
    for task in protocol.tasks:
        task.cancel()


def test_h11_reads_all_lines_through_the_buffer_that_we_replace():
    parser = h11.Connection(h11.SERVER)
    buffer = parser._receive_buffer
    found = [name for name in BUFFER if not hasattr(buffer, name)]
    assert not found, f"h11 {h11.__version__} has no ReceiveBuffer.{found}: adapt http_parser.py, or lower the bound"
    called: list[str] = []

    class Seen(type(buffer)):  # type: ignore[misc]
        def maybe_extract_lines(self):
            called.append("lines")
            return super().maybe_extract_lines()

        def maybe_extract_next_line(self):
            called.append("line")
            return super().maybe_extract_next_line()

    parser._receive_buffer = Seen()
    parser.receive_data(b"GET / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")
    while parser.their_state is not h11.DONE:
        parser.next_event()
    assert called == ["lines", "line", "lines"]
