"""Whether this uvicorn has the internals that our connections and our server build on.

They are no public interface: a release may change them, which is why pyproject.toml bounds the version from above.
Raise the bound when this test and tests/server pass with the new one.
"""

import asyncio
from unittest.mock import Mock

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
SERVER = (
    "lifespan", "server_state", "servers", "started", "should_exit", "force_exit", "shutdown", "capture_signals",
)  # fmt: skip


def missing(names: tuple[str, ...], of: object) -> list[str]:
    """What a future uvicorn no longer has, in words."""
    return [
        f"uvicorn {uvicorn.__version__} has no {type(of).__name__}.{name}: adapt "
        "moe_serve/server/connections/connection.py and http.py, or lower the bound of uvicorn in pyproject.toml"
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
