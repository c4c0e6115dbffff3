"""Waits of the front end that no test is about, made short; a deadline that a busy machine may miss, made long; what
all applications have alike, made once."""

import asyncio
from typing import Any

import pytest
import uvicorn.server
from fastapi import FastAPI

from moe_serve.server import app
from moe_serve.server.api import docs
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


_describe, _docs_page = app.describe, docs.docs_page
_documents: dict[tuple[str, ...], dict[str, Any]] = {}
_pages: dict[int, str] = {}  # by the id of the document


def _described_once(made: FastAPI, bodies: Any) -> dict[str, Any]:
    routes = tuple(str(getattr(route, "path", "")) for route in made.routes)
    if routes not in _documents:
        _documents[routes] = _describe(made, bodies)
    return _documents[routes]


def _drawn_once(document: dict[str, Any]) -> str:
    if id(document) not in _pages:
        _pages[id(document)] = _docs_page(document)
    return _pages[id(document)]


@pytest.fixture(autouse=True)
def _documents_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The OpenAPI document and its page follow from the routes, and take half of the time of making an application."""
    monkeypatch.setattr(app, "describe", _described_once)
    monkeypatch.setattr(docs, "docs_page", _drawn_once)
