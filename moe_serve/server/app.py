"""The HTTP routes of a serving system, over a `Bridge`.

Every error, from a wrong path to a lost rank, has the JSON form of `errors.error_body`.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

import moe_serve
from moe_serve.config import ServeConfig, model_dir, served_names
from moe_serve.errors import MoeServeError, RequestError
from moe_serve.log import get_logger
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.api.docs import add_docs
from moe_serve.server.api.generate import RequestPipeline
from moe_serve.server.api.generation_control import add_generation_control
from moe_serve.server.api.native import WEIGHT_VERSION, add_generate
from moe_serve.server.api.openai_routes import add_openai, add_tokenize
from moe_serve.server.api.openapi import BODIES, describe
from moe_serve.server.api.params import model_defaults
from moe_serve.server.api.parsed_output import OutputParsers
from moe_serve.server.edge.body import Bodies, BodyTooLarge
from moe_serve.server.edge.client_limits import ClientTable
from moe_serve.server.edge.errors import error_json, error_response, json_response
from moe_serve.server.edge.gate import AdmissionGate, EarlyRefusal, RequestIds
from moe_serve.server.edge.guard import OPEN, Access, Guard
from moe_serve.server.edge.keys import KeyRing
from moe_serve.server.observe.dashboard import add_dashboard
from moe_serve.server.observe.eplb import PlacementBody, add_eplb, add_recorder
from moe_serve.server.observe.health import add_health
from moe_serve.server.observe.metrics import PEERS, AdmissionMetrics, make_registry
from moe_serve.server.observe.profile import StartProfileBody, add_profile
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.admission import Degradation
from moe_serve.server.workers.chat_template import ChatTemplates
from moe_serve.server.workers.fair_queue import FairQueue

log = get_logger(__name__)


def make_app(
    config: ServeConfig,
    bridge: Bridge,
    tokenizer: Tokenizer | None,
    clients: ClientTable | None = None,
    starts_helpers: bool = False,
) -> FastAPI:
    """Returns the application over a bridge, which the caller starts and closes.

    clients:        limits shared with other front ends; None: this is the only one
    starts_helpers: start the processes that render chats now, while ranks load their weights; otherwise at first use
    Raises ConfigError or ModelError where a file of keys or of a chat template cannot be used.
    """
    bodies, templates = Bodies(config.server), ChatTemplates.load(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        starting = [asyncio.create_task(templates.start())] if starts_helpers and tokenizer is not None else []
        yield
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await templates.close()

    # Not FastAPI's own /docs page, since it loads scripts from other servers: see add_docs. No redirects, since they
    # would repeat a client's Host.
    app = FastAPI(
        title="moe_serve",
        version=moe_serve.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.bodies = bodies
    clients, degradation = clients or ClientTable(), Degradation(config.server.degrade)
    access = Access(config.server, KeyRing.load(config.server))
    app.state.early_refusal = EarlyRefusal(app, access, bridge, clients)
    app.add_middleware(AdmissionGate, bridge=bridge, clients=clients)
    app.add_middleware(Guard, access=access)  # before the gate: unauthenticated peers learn nothing of the queue
    if config.server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.server.cors_origins,
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["authorization", "content-type"],
        )
    app.add_middleware(RequestIds)
    _add_errors(app)
    large_bodies = FairQueue("large bodies", at_once=2)
    long_texts = FairQueue("long texts", at_once=max(1, (os.cpu_count() or 1) // 2))
    pipeline = RequestPipeline(bodies, bridge, tokenizer, degradation, large_bodies, long_texts)
    add_generate(app, pipeline)
    parsers = OutputParsers(config.server, tokenizer)
    add_openai(app, pipeline, templates, parsers, served_names(config.model), model_defaults(config))
    add_tokenize(app, pipeline, templates, served_names(config.model))
    add_health(app, config, bridge)
    _add_information(app, config, bridge, has_tokenizer=tokenizer is not None)
    _add_metrics(app, bridge, AdmissionMetrics(bridge, clients, degradation))
    add_recorder(app, config, bridge)
    add_eplb(app, config, bridge, bodies)
    add_generation_control(app, bridge, bodies)
    add_profile(app, config, bridge, bodies)
    add_dashboard(app, config, bridge)
    document = describe(app, {**BODIES, "/eplb/placement": PlacementBody, "/start_profile": StartProfileBody})
    app.openapi = lambda: document  # type: ignore[method-assign]
    add_docs(app, document)
    return app


def _add_information(app: FastAPI, config: ServeConfig, bridge: Bridge, has_tokenizer: bool) -> None:
    started_s = time.time()
    folder = str(model_dir(config.model))
    names = served_names(config.model)

    def model_object(name: str) -> dict[str, Any]:
        limits = bridge.workers.limits
        return {
            "id": name,
            "object": "model",
            "created": int(started_s),
            "owned_by": "moe_serve",
            "root": folder,
            "parent": None,
            "max_model_len": None if limits is None else limits.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model that is served, by each of its names, as OpenAI lists them."""
        return json_response({"object": "list", "data": [model_object(name) for name in names]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """The model of this name; 404 for any other."""
        if model_id not in names:
            served = " or ".join(map(repr, names))
            raise HTTPException(404, f"there is no model {model_id[:100]!r}; this server serves {served}")
        return json_response(model_object(model_id))

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        """SGLang's facts about the model."""
        return json_response(
            {
                "model_path": folder,
                "tokenizer_path": folder if has_tokenizer else None,
                "served_model_name": names[0],
                "is_generation": True,
                "weight_version": WEIGHT_VERSION,
            }
        )

    @app.get("/version")
    async def version() -> Response:
        """The version of this server."""
        return json_response({"version": moe_serve.__version__})

    @app.get("/load")
    async def load() -> Response:
        """vLLM's number of requests that are running or wait."""
        return json_response({"server_load": len(bridge.book)})

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        """The effective configuration, the limits of requests, and the state of every rank."""
        limits = bridge.workers.limits
        return json_response(
            {
                "version": moe_serve.__version__,
                "model_path": folder,
                "served_model_name": names[0],
                "uptime_s": round(time.time() - started_s, 3),
                "limits": limits,
                "config": config.model_dump(mode="json"),
                **bridge.describe(),
            }
        )


def _add_metrics(app: FastAPI, bridge: Bridge, admission: AdmissionMetrics) -> None:
    registries = {name: make_registry(bridge, name or None) for name in ("", *PEERS)}
    for registry in registries.values():
        registry.register(admission)

    @app.head("/metrics", tags=[OPEN], include_in_schema=False)
    @app.get("/metrics", tags=[OPEN])
    async def metrics(names: str = bridge.config.server.metrics_compat or "") -> Response:
        """The metrics in Prometheus' text format. names: `sglang` or `vllm` adds those with an equal there."""
        if names not in registries:
            raise RequestError(f"names is {names[:100]!r}, expected {' or '.join(PEERS)}, or nothing", field="names")
        return Response(generate_latest(registries[names]), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(MoeServeError)
    async def ours(request: Request, error: MoeServeError) -> Response:
        if isinstance(error, BodyTooLarge):
            return error_json(413, str(error))
        return error_response(error)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody receives it

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = error.detail
        if error.status_code == 404 and message == "Not Found":
            message = f"there is no path {request.url.path[:200]}; /openapi.json lists the paths"
        elif error.status_code == 405:
            message = f"{request.url.path[:200]} does not take {request.method}"
        return error_json(error.status_code, message, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def mistake(request: Request, error: Exception) -> Response:
        # With a handler, Starlette logs nothing itself; it raises the error again after this answer.
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_json(500, "the server failed on this request; see its log")
