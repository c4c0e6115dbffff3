"""Health checks: is this process alive, does it take requests, do tokens come out?

Each is for another caller. A supervisor restarts a process whose `/health` fails, so a lost rank must not fail it. A
load balancer sends requests where `/ready` is 200. A person, or a slow probe, asks `/health_generate`.
"""

import asyncio
import time

from fastapi import FastAPI, Response

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import ServeConfig
from moe_serve.server.edge.errors import error_response, json_response
from moe_serve.server.edge.guard import OPEN
from moe_serve.server.observe.eplb import summary_json
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.open_request import Changes, RequestSpec, UnavailableError

_LOOK_S = 0.02  # between two looks for tokens


def add_health(app: FastAPI, config: ServeConfig, bridge: Bridge) -> None:
    """Adds /health, /ping, /ready, /readyz and /health_generate."""
    probe = TokenProbe(bridge, config.server.health_deadline_s)

    @app.get("/health", tags=[OPEN])
    @app.get("/ping", tags=[OPEN])
    async def health() -> Response:
        """200 while this process answers. The body says whether it serves, and what the balancer does."""
        return json_response(
            {"status": bridge.problem() or "ready", "balancer": summary_json(bridge.balance, time.time())}
        )

    @app.get("/ready", tags=[OPEN])
    @app.get("/readyz", tags=[OPEN])
    async def ready() -> Response:
        """200 while new requests are accepted; 503 says why not, and names the rank."""
        problem = bridge.problem()
        return json_response({"status": "ready"}) if problem is None else error_response(UnavailableError(problem))

    @app.get("/health_generate", tags=[OPEN])
    async def health_generate() -> Response:
        """200 when a token has come out of every rank that serves since this call; 503 names the ranks without one."""
        try:
            return json_response({"status": "ready", "seconds": await probe.run()})
        except UnavailableError as error:
            return error_response(error)


class TokenProbe:
    """Asks every rank for a token. Callers that come during a probe share its result, so asking costs little."""

    def __init__(self, bridge: Bridge, deadline_s: float):
        self._bridge = bridge
        self._deadline_s = deadline_s
        self._running: asyncio.Task[dict[str, float]] | None = None

    async def run(self) -> dict[str, float]:
        """Returns the seconds until a token of each rank. Raises UnavailableError naming ranks without one in time."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._ask())
        return await asyncio.shield(self._running)

    async def _ask(self) -> dict[str, float]:
        bridge = self._bridge
        problem = bridge.problem()
        if problem is not None:
            raise UnavailableError(problem)
        ranks = [view.rank for view in bridge.workers if view.serves]
        before = dict(bridge.book.num_events)
        one = SamplingParams(max_new_tokens=1, temperature=0.0)
        requests = [bridge.ask_rank(RequestSpec([0], one, seed=0, rank=rank), Changes()) for rank in ranks]
        took_s: dict[str, float] = {}
        started_s = time.monotonic()
        try:
            # A token of any request will do: a rank that is busy with others need not get to ours.
            while len(took_s) < len(ranks):
                now_s = time.monotonic()
                for rank in ranks:
                    if bridge.book.num_events.get(rank, 0) > before.get(rank, 0):
                        took_s.setdefault(str(rank), round(now_s - started_s, 3))
                if now_s - started_s > self._deadline_s or bridge.problem() is not None:
                    break
                await asyncio.sleep(_LOOK_S)
        finally:
            for request in requests:
                bridge.book.abort(request)
        silent = [str(rank) for rank in ranks if str(rank) not in took_s]
        if silent:
            raise UnavailableError(
                bridge.problem()
                or f"no token came out of rank {', '.join(silent)} within server.health_deadline_s = "
                f"{self._deadline_s:g} s; see /server_info and the log of that rank"
            )
        return took_s
