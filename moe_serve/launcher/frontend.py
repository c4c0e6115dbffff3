"""The front end's process: HTTP on one side, the ranks on the other.

`moe-serve serve` starts it beside the ranks; beside torchrun or mpirun it is one more command, with the ranks' own
configuration file: `moe-serve frontend --config …`.
"""

import asyncio
import gc
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moe_serve.config import ServeConfig, load_config
from moe_serve.engine.protocol.messages import Ready, ToFrontEnd
from moe_serve.errors import ConfigError, FolderError, MoeServeError
from moe_serve.launcher.facts import front_end_difference, front_end_facts
from moe_serve.links.link import Link, check_front_ends, find_link
from moe_serve.log import configure_logging, get_logger
from moe_serve.server.edge.ports import open_port

log = get_logger(__name__)
app = typer.Typer(add_completion=False)
# Of gc.set_threshold. Looking for cycles through all that 1,000 open streams hold stops the front end for 50 ms. By
# default it does so four times while they come; now once in some 20,000 requests, which leave few cycles.
_COLLECT_AFTER = 700, 10, 300


@app.command()
def main(
    config: Annotated[Path | None, typer.Option(help="YAML file; the same as the ranks'")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="section.key=value", help="override one setting; repeatable")
    ] = None,
    http_fd: Annotated[int | None, typer.Option(hidden=True, help="a listening socket from the parent")] = None,
    clients_fd: Annotated[int | None, typer.Option(hidden=True, help="what front ends here count of clients")] = None,
    worker: Annotated[int, typer.Option(hidden=True, help="its number among all front ends")] = 0,
) -> None:
    """Runs the HTTP front end; ranks attach to it at server.worker_host:worker_port."""
    configure_logging(who="front end")
    try:
        settings = load_config(config, overrides or ())
        who = f"front end {worker}" if settings.num_front_ends > 1 else "front end"
        configure_logging(who=who, form=settings.server.log_format)
        run_front_end(settings, http_fd, worker, clients_fd)
    except MoeServeError as error:
        print(f"moe-serve: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, FolderError) else 2) from None


def run_front_end(
    config: ServeConfig, http_fd: int | None = None, worker: int = 0, clients_fd: int | None = None
) -> None:
    """Serves until SIGINT or SIGTERM.

    http_fd:    a listening socket; None: open server.port
    clients_fd: memory in which all front ends of a host count what clients use; None: this is the only one there

    Raises LaunchError when a port is taken, ModelError when the tokenizer cannot be read, ConfigError for several front
    ends without a launcher that starts all of them.
    """
    link = replace(find_link(config.server), worker=worker)
    check_front_ends(config, link)
    config = share_of_front_end(config)
    listener = (
        socket.socket(fileno=http_fd) if http_fd is not None else open_port(config.server.host, config.server.port)
    )
    with listener:
        asyncio.run(_serve(config, listener, link, clients_fd))


async def _serve(config: ServeConfig, listener: socket.socket, link: Link, clients_fd: int | None) -> None:
    from moe_serve.launcher.preflight import load_tokenizer
    from moe_serve.server.app import make_app
    from moe_serve.server.edge.body import give_large_blocks_back
    from moe_serve.server.edge.client_limits import ClientTable, Ledger
    from moe_serve.server.edge.guard import is_loopback
    from moe_serve.server.edge.http import HttpServer
    from moe_serve.server.edge.keys import KeyRing
    from moe_serve.server.ranks.bridge import Bridge

    tokenizer = load_tokenizer(config)
    own, differs = front_end_facts(config), asyncio.get_running_loop().create_future()

    def observe(message: ToFrontEnd) -> None:
        match message:
            case Ready(rank=rank, info=info):
                difference = front_end_difference(own, rank, info.get("shared_with_front_end"))
                if difference is not None and not differs.done():
                    differs.set_result(difference)

    bridge = Bridge(config, tokenizer, observe, link)
    await bridge.start()
    try:
        num = config.server.api_workers
        ledger = None if clients_fd is None else Ledger.shared(clients_fd, num, link.worker % num)
        app = make_app(config, bridge, tokenizer, ClientTable(ledger), starts_helpers=True)
        server = HttpServer(app, bridge)
        if not is_loopback(config.server.host) and not KeyRing.load(config.server).has_api_keys:
            log.warning("no API key is set: whoever reaches %s is served (server.api_key_file)", config.server.host)
        host, port = listener.getsockname()[:2]
        log.info("HTTP on %s:%d, ranks attach at %s", host, port, bridge.link.front_end)
        give_large_blocks_back()
        gc.freeze()  # what was imported stays: no reason to look through it in every collection
        gc.set_threshold(*_COLLECT_AFTER)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait((serving, differs), return_when=asyncio.FIRST_COMPLETED)
        if differs.done():
            server.should_exit = True
            await serving
            raise ConfigError(differs.result())
        await serving
    finally:
        await bridge.close()


def share_of_front_end(config: ServeConfig) -> ServeConfig:
    """Returns the configuration of one of several front ends: with its share of what all may hold together.

    What takes memory, connections and bodies, is shared by those of a host; what waits for ranks, by all.
    """
    server, num, num_of_all = config.server, config.server.api_workers, config.num_front_ends
    own = {
        "max_connections": -(-server.max_connections // num),
        "max_bodies_mib": max(server.max_body_mib, server.max_bodies_mib / num),
        "max_waiting_tokens": -(-server.max_waiting_tokens // num_of_all),
    }
    if server.max_connections_per_client is not None:
        own["max_connections_per_client"] = -(-server.max_connections_per_client // num)
    if server.max_bodies_mib_per_client is not None:
        own["max_bodies_mib_per_client"] = max(server.max_body_mib, server.max_bodies_mib_per_client / num)
    queued = -(-config.engine.max_queued_requests // num_of_all)
    return config.model_copy(
        update={
            "server": server.model_copy(update=own),
            "engine": config.engine.model_copy(update={"max_queued_requests": queued}),
        }
    )


if __name__ == "__main__":
    app()
