"""The worker: one rank of a serving engine. The same under `moe-serve serve`, torchrun and mpirun.

    torchrun --nproc-per-node 2 -m moe_serve.launcher.serve --config configs/demo-cpu.yaml
    mpirun -n 2 python -m moe_serve.launcher.serve --config configs/demo-cpu.yaml

A front end (`moe-serve frontend`, started for you by `moe-serve serve`) must listen at server.worker_host:worker_port.
Exits with 0 when asked to end, 1 when the launch was lost (a peer or the front end is gone, a step failed) or the
front end refused this rank, 2 for a setting to correct.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from moe_serve.config import ServeConfig, load_config
from moe_serve.engine.mailbox import ZmqMailbox
from moe_serve.engine.messages import Fatal, Goodbye, Hello, Progress, Pulse, Ready
from moe_serve.engine.watchdog import Watchdog, WatchLimits
from moe_serve.errors import ConfigError, LostConnectionError, MoeServeError, PeerError
from moe_serve.kernels.cpu.library import build_cpu_library
from moe_serve.launcher.facts import facts_of, front_end_facts
from moe_serve.launcher.preflight import look_where_to_write
from moe_serve.launcher.rank_env import RankEnv, check_num_ranks, read_rank_env
from moe_serve.links.link import find_link
from moe_serve.links.newcomers import shut_out_newcomers
from moe_serve.log import configure_logging, get_logger

if TYPE_CHECKING:
    from moe_serve.engine.engine import Engine
    from moe_serve.launcher.groups import Groups

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
        configure_logging(who=f"rank {env.rank}")
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


def run_worker(config: ServeConfig, env: RankEnv) -> int:
    """Joins the other ranks, loads the model and serves; returns the exit code."""
    limit_threads(config, env)
    build_kernels_early(config)
    try:
        mailbox = ZmqMailbox(find_link(config.server), env.rank, _own_address(config.server.worker_host))
    except MoeServeError as error:
        log.error("%s", error)
        return 2
    engine: Engine | None = None
    start = _Start(config, env, mailbox)
    code = 0
    try:
        engine = start.run()
        engine.run()
        mailbox.send(Goodbye(env.rank, start.env.launch_id))
        engine.close()
        if engine.refusal is not None:
            log.error("the front end refused this rank: %s", engine.refusal)
        code = 1 if engine.lost_front_end or engine.refusal is not None else 0
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

    Returns the thread that waits for the compiler, None where the kernels will not serve. A build that fails is said
    later, by whoever needs it.
    """
    if config.parallel.device == "cuda" or config.engine.cpu_kernels == "torch" or config.model.dtype == "bfloat16":
        return None

    def build() -> None:
        with contextlib.suppress(ConfigError):
            build_cpu_library()

    thread = threading.Thread(target=build, name="build of the CPU kernels", daemon=True)
    thread.start()
    return thread


def limit_threads(config: ServeConfig, env: RankEnv) -> int:
    """Returns the CPU threads of this rank, and sets them for OpenMP, which reads them when torch is imported.

    Two ranks with two threads each on two cores run a hundred times slower than with one each.
    """
    cores = len(os.sched_getaffinity(0))
    threads = config.parallel.threads_per_rank
    if threads is None:
        threads = max(1, cores // env.num_local_ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


class _Start:
    """The way of one rank to its first step, phase by phase; each is shown to the front end and watched.

    env: with the id of the launch, once the ranks have met
    """

    def __init__(self, config: ServeConfig, env: RankEnv, mailbox: ZmqMailbox):
        self.env = env
        self._config = config
        self._mailbox = mailbox
        self._watchdog = _start_watchdog(config, env)

    def report(self, phase: str, fraction: float) -> None:
        self._watchdog.enter(phase)
        if self.env.launch_id:  # before the ranks meet, the front end cannot know whose phase this is
            self._mailbox.send(Progress(self.env.rank, self.env.launch_id, phase, fraction))

    def run(self) -> "Engine":
        """Returns the engine, ready to run: groups joined, weights loaded, one empty step done."""
        started_s = time.monotonic()
        if self.env.launch_id:
            self._say_hello()
        self.report("importing torch", 0.0)
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        groups = self._meet()
        engine = _build_engine(self._config, groups, self._mailbox, self.report)
        self.report("waiting for the other ranks", 1.0)
        from moe_serve.dispatch.peer_calls import barrier

        barrier(groups.patient)
        self.report("warming up", 0.0)
        engine.served.warm_up()
        barrier(groups.patient)  # by now every rank has made all connections of its groups, and to the store
        shut_out_newcomers(self._mailbox.wake_ports)
        engine.served.info["start_s"] = round(time.monotonic() - started_s, 3)
        _end_on_signals(engine)
        self._watchdog.leave()
        engine.watchdog.start()
        rank, launch_id = self.env.rank, self.env.launch_id
        self._mailbox.start_pulse(lambda: Pulse(rank, launch_id, engine.step, engine.watchdog.phase))
        self._mailbox.send(Ready(rank, launch_id, engine.served.limits, engine.served.info))
        return engine

    def _meet(self) -> "Groups":
        """Agrees with the other ranks on the launch and on what all must have in common, and joins them."""
        from moe_serve.launcher.groups import device_of, gather_bytes, join_groups
        from moe_serve.launcher.meeting import agree_on_launch, check_facts, open_store, store_of_launch

        self.report("joining the ranks", 0.0)
        config, deadline_s = self._config, self._config.server.attach_deadline_s
        device = device_of(self.env, config)
        store = open_store(self.env, deadline_s)
        launch_id = agree_on_launch(store, self.env, deadline_s)
        if not self.env.launch_id:
            self.env = replace(self.env, launch_id=launch_id)
            self._say_hello()
            self.report("joining the ranks", 0.5)
        env, store = self.env, store_of_launch(store, launch_id)
        check_facts(store, env, lambda: facts_of(config, device.type), deadline_s)
        groups = join_groups(env, config, device, store)
        addresses = gather_bytes(self._mailbox.wake_address.encode(), groups.patient)
        self._mailbox.connect_peers([address.decode() for rank, address in enumerate(addresses) if rank != env.rank])
        return groups

    def _say_hello(self) -> None:
        env = self.env
        hello = Hello(
            env.rank,
            env.num_ranks,
            env.launch_id,
            os.getpid(),
            socket.gethostname(),
            restarts_left=env.restarts_left,
        )
        self._mailbox.send(hello)


def _start_watchdog(config: ServeConfig, env: RankEnv) -> Watchdog:
    """Returns what names a phase of the start that takes long, and ends this rank where one stands still."""

    def give_up(text: str) -> None:
        log.error("%s, longer than server.attach_deadline_s; this rank ends", text)
        os._exit(1)

    # The waits for other ranks end by themselves at the deadline, and say more.
    deadline_s = config.server.attach_deadline_s
    limits = WatchLimits(min(30.0, deadline_s / 4), deadline_s / 2, deadline_s + 10)
    watchdog = Watchdog(f"rank {env.rank}", limits, give_up=give_up)
    watchdog.start()
    return watchdog


def _build_engine(config: ServeConfig, groups: "Groups", mailbox: ZmqMailbox, report: "Report") -> "Engine":
    from moe_serve.engine.build import build_engine
    from moe_serve.engine.exchange import make_exchange

    exchange = make_exchange(config.engine.exchange, groups.control, groups.one_host, config.engine.step_deadline_s)
    engine = build_engine(config, groups.ep, exchange, mailbox, launch_id=groups.env.launch_id, progress=report)
    engine.served.info |= {"exchange": type(exchange).__name__, "launched_by": groups.env.source}
    engine.served.info["shared_with_front_end"] = front_end_facts(config)
    return engine


def _end_on_signals(engine: "Engine") -> None:
    """Makes SIGINT and SIGTERM end all ranks at the next step; a second signal ends this rank at once."""

    def ask(signum: int, frame: FrameType | None) -> None:
        if engine.stopping:
            os._exit(128 + signum)
        engine.request_stop()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)


def _dead_peer(engine: "Engine | None") -> int:
    """Returns the rank whose death explains a lost connection, -1 = unknown."""
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


def _own_address(front_end_host: str) -> str:
    """Returns the address under which the other ranks reach this one: the one that routes to the front end."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((front_end_host, 9))  # UDP: nothing is sent
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return "127.0.0.1"


if TYPE_CHECKING:
    from collections.abc import Callable

    Report = Callable[[str, float], None]

if __name__ == "__main__":
    app()
