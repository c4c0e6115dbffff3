"""The worker: one rank of a serving engine. The same under `moe-serve serve`, torchrun and mpirun.

    torchrun --nproc-per-node 2 -m moe_serve.launcher.serve --config configs/demo-cpu.yaml
    mpirun -n 2 python -m moe_serve.launcher.serve --config configs/demo-cpu.yaml

A front end (`moe-serve frontend`, started for you by `moe-serve serve`) must listen at server.worker_host:worker_port.
Exits with 0 when asked to end, 1 when the launch was lost (a peer or the front end is gone, a step failed) or the
front end refused this rank, 2 for a setting to correct.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_serve.child_process import die_with_parent
from moe_serve.config import ServeConfig, load_config
from moe_serve.engine.protocol.mailbox import ZmqMailbox
from moe_serve.engine.protocol.messages import Fatal, Goodbye
from moe_serve.errors import ConfigError, FolderError, LostConnectionError, MoeServeError, PeerError, ReplacedError
from moe_serve.kernels.cpu.library import build_cpu_library
from moe_serve.launcher.cpu_bind import bind_rank
from moe_serve.launcher.preflight import look_where_to_write
from moe_serve.launcher.rank_env import RankEnv, check_num_ranks, own_address, read_rank_env
from moe_serve.launcher.rank_start import RankStart, RefusedError, import_engine, wakes_before
from moe_serve.links.link import check_front_ends, find_link
from moe_serve.log import configure_logging, get_logger

if TYPE_CHECKING:
    from moe_serve.engine.engine import Engine

log = get_logger(__name__)
app = typer.Typer(add_completion=False)


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="YAML file; the same on every rank")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="section.key=value", help="override one setting; repeatable")
    ] = None,
) -> None:
    """Runs one rank of a serving engine until it is asked to end."""
    try:
        settings = load_config(config, overrides or ())
        env = read_rank_env()
        configure_logging(who=f"rank {env.rank}", form=settings.server.log_format)
        check_num_ranks(env, settings.parallel.num_ranks)
        look_where_to_write(settings)
    except MoeServeError as error:
        print(f"moe-serve worker: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # mpirun and torchrun wait for every process; leaving at once also skips destructors that wait for lost peers.
    sys.stderr.flush()
    code = run_worker(settings, env)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare(arguments: Sequence[str]) -> None:
    """Does for all ranks of a host what each would begin with: builds the CPU kernels, imports torch and the engine.

    For launcher/fork_server.py. arguments: --config FILE
    The process ends, with its stack, where that takes longer than server.attach_deadline_s.
    """
    config = load_config(Path(arguments[1]))
    faulthandler.dump_traceback_later(config.server.attach_deadline_s, exit=True)
    parent = os.getpid()
    if not os.fork():  # a thread would be lost in the ranks
        die_with_parent(parent)
        build = build_kernels_early(config)
        if build is not None:
            build.join()
        os._exit(0)
    import_engine()
    faulthandler.cancel_dump_traceback_later()


def run_worker(config: ServeConfig, env: RankEnv) -> int:
    """Joins the other ranks, loads the model and serves; returns the exit code."""
    try:
        node, num_sharing = bind_rank(config.parallel, env.local_rank, env.num_local_ranks)
    except ConfigError as error:
        log.error("%s", error)
        return 2
    if node is not None:
        log.info("bound to NUMA node %d: %d CPUs, for %d ranks", node.number, len(node.cpus), num_sharing)
    limit_threads(config, num_sharing)
    build_kernels_early(config)
    try:
        link = find_link(config.server)
        check_front_ends(config, link)
        address = own_address(config.server.worker_host) or "127.0.0.1"
        mailbox = ZmqMailbox(link, env.rank, address, config.num_front_ends, wakes_before(env))
    except MoeServeError as error:
        log.error("%s", error)
        return 1 if isinstance(error, FolderError) else 2
    engine: Engine | None = None
    start = RankStart(config, env, mailbox)
    code = 0
    try:
        engine = start.run()
        engine.run()
        mailbox.send(Goodbye(env.rank, start.env.launch_id))
        engine.close()
        if engine.refusal is not None:
            log.error("the front end refused this rank: %s", engine.refusal)
        code = 1 if engine.lost_front_end or engine.refusal is not None else 0
    except (RefusedError, ReplacedError) as error:
        log.error("%s", error)
        code = 1
    except LostConnectionError as error:
        lost = _dead_peer(engine)
        code = _launch_lost(mailbox, start.env, loss_message(lost, engine.step if engine else None, error), lost)
    except PeerError as error:
        rank = error.rank if error.rank >= 0 else _dead_peer(engine)
        code = _launch_lost(mailbox, start.env, str(error), rank)
    except MoeServeError as error:
        mailbox.send(Fatal(env.rank, start.env.launch_id, str(error), env.rank))
        log.error("%s", error)
        code = 2
    except Exception as error:
        log.exception("the launch is lost")
        message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        code = _launch_lost(mailbox, start.env, message, env.rank)
    finally:
        mailbox.close()
    return code


def build_kernels_early(config: ServeConfig) -> threading.Thread | None:
    """Starts to build the compiled CPU kernels beside the imports; of the ranks of one machine, one builds.

    Returns the thread that waits for the compiler, None where the kernels will not serve. A failed build is reported
    later, where the kernels are needed.
    """
    if config.parallel.device == "cuda" or config.engine.cpu_kernels == "torch" or config.model.dtype == "bfloat16":
        return None

    def build() -> None:
        with contextlib.suppress(ConfigError):
            build_cpu_library()

    thread = threading.Thread(target=build, name="build of the CPU kernels", daemon=True)
    thread.start()
    return thread


def limit_threads(config: ServeConfig, num_ranks: int) -> int:
    """Returns the CPU threads of this rank, and sets them for OpenMP, which reads them when torch is imported.

    num_ranks: that share the CPUs of this process

    Two ranks with two threads each on two cores run a hundred times slower than with one each.
    """
    cores = len(os.sched_getaffinity(0))
    threads = config.parallel.threads_per_rank
    if threads is None:
        threads = max(1, cores // num_ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def _dead_peer(engine: "Engine | None") -> int:
    """Returns the dead rank that explains a lost connection, -1 = unknown."""
    if engine is not None:
        for _ in range(20):  # a connection breaks a moment before its process is gone
            dead = engine.exchange.dead_peers()
            if dead:
                return dead[0]
            time.sleep(0.01)
    return -1


def loss_message(lost_rank: int, step: int | None, error: LostConnectionError) -> str:
    """Returns the report about a lost rank. lost_rank: -1 = unknown. step: None while the ranks start"""
    who = f"rank {lost_rank}" if lost_rank >= 0 else "a rank"
    when = "while the ranks started" if step is None else f"in the middle of step {step}"
    return f"{who} went away {when} ({error.reason}); look at its last lines, and start the ranks again"


def _launch_lost(mailbox: ZmqMailbox, env: RankEnv, message: str, lost_rank: int) -> int:
    log.error("the launch is lost: %s", message)
    mailbox.send(Fatal(env.rank, env.launch_id, message, lost_rank))
    return 1


if __name__ == "__main__":
    app()
