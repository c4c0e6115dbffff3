"""Waits of the front end that no test is about, made short; a deadline that a busy machine may miss, made long."""

import asyncio
from typing import Any

import pytest
import uvicorn.server

from moe_serve.server.ranks import bridge, router_socket
from moe_serve.server.workers import chat_template


class _QuickTurns:
    """asyncio for uvicorn, which sleeps 0.1 s between two looks whether it is to end, and 0.1 s when it ends."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(min(delay_s, 0.01))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.server, "asyncio", _QuickTurns())
    monkeypatch.setattr(bridge, "ALIVE_PERIOD_S", 0.1)  # between two looks for ranks that are silent or late
    monkeypatch.setattr(router_socket, "ALIVE_PERIOD_S", 0.2)
    monkeypatch.setattr(bridge, "_GOODBYE_S", 0.3)  # ranks that a test has killed do not say it
    monkeypatch.setattr(chat_template, "_DEADLINE_S", 45.0)  # of a chat's text, with the start of its process
