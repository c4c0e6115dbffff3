"""A whole served system: the real front end with fake ranks behind it, in one process."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import httpx
from fastapi import FastAPI

from moe_serve.config import ServeConfig, load_config, model_dir
from moe_serve.links.link import find_link
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.app import make_app
from moe_serve.server.edge.client_limits import ClientTable
from moe_serve.server.edge.http import HttpServer
from moe_serve.server.edge.ports import open_port
from moe_serve.server.ranks.bridge import Bridge
from tests.server.fake_worker import FakeWorker


@functools.cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(model_dir(load_config().model))


@dataclass
class Served:
    """A served system: HTTP client, bridge and fake ranks."""

    client: httpx.AsyncClient
    bridge: Bridge
    workers: list[FakeWorker]
    tasks: list[asyncio.Task[None]]
    server: HttpServer
    app: FastAPI

    async def generate(self, **fields: object) -> httpx.Response:
        return await self.client.post("/generate", json=fields)

    def hold(self) -> None:
        """Keeps the ranks from producing tokens, until `go_on`."""
        for worker in self.workers:
            worker.go.clear()

    def go_on(self) -> None:
        for worker in self.workers:
            worker.go.set()

    def kill(self, rank: int) -> None:
        """Ends a rank without a word."""
        self.tasks[rank].cancel()


def bridge_over_tcp(config: ServeConfig, tokenizer: Tokenizer | None = None) -> Bridge:
    """Returns a front end to which ranks attach as beside torchrun."""
    return Bridge(config, tokenizer, None, find_link(config.server))


class _InTest(HttpServer):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are pytest's


@contextlib.asynccontextmanager
async def serving(
    num_ranks: int = 2,
    *overrides: str,
    tokenizer: bool | Tokenizer = True,
    start: bool = True,
    clients: ClientTable | None = None,
    **worker_fields: object,
) -> AsyncIterator[Served]:
    """A front end with fake ranks behind it; ready when start is true. clients: None: nobody shares what they used"""
    config = fake_config(num_ranks, *overrides)
    text = tokenizer if isinstance(tokenizer, Tokenizer) else demo_tokenizer() if tokenizer else None
    bridge = bridge_over_tcp(config, text)
    await bridge.start()
    listener = open_port("127.0.0.1", 0)
    app = make_app(config, bridge, text, clients)
    server = _InTest(app, bridge)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    workers = [
        FakeWorker(rank, num_ranks, bridge.link.port, **worker_fields)  # type: ignore[arg-type]
        for rank in range(num_ranks)
    ]
    tasks: list[asyncio.Task[None]] = []
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=address, timeout=60, trust_env=False, verify=False) as client:
        try:
            if start:
                tasks += [asyncio.create_task(worker.run()) for worker in workers]
                await bridge.wait_until_ready()
            yield Served(client, bridge, workers, tasks, server, app)
        finally:
            server.stop()
            await http
            await bridge.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            listener.close()


def end_without_a_word(bridge: Bridge) -> None:
    """Ends a front end as a kill of its process does: nobody is told."""
    if bridge._socket is not None:
        bridge._socket.close()
        bridge._socket = None
        for task in bridge._tasks:
            task.cancel()


def fake_config(num_ranks: int, *overrides: str) -> ServeConfig:
    return load_config(
        overrides=[f"parallel.num_ranks={num_ranks}", "server.port=0", "server.worker_port=0", *overrides]
    )


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test, with a deadline."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(150):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


async def until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    """Waits until something is true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
