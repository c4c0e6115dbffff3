"""Meets the other ranks through the store of the launch, before any process group exists.

Groups of ranks with different settings would wait for each other without end. Here every rank writes what it is, reads
what the others are, and compares; a rank that does not come is named.
"""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from moe_serve.dispatch.peer_calls import reason_of
from moe_serve.errors import ConfigError, LaunchError, MoeServeError
from moe_serve.launcher.facts import Fact, first_difference
from moe_serve.launcher.local import new_launch_id
from moe_serve.launcher.rank_env import RankEnv
from moe_serve.log import get_logger
from moe_serve.server.edge.ports import open_port

log = get_logger(__name__)
_POLL_S = 0.02
_FAILED = "failed"  # under this key a rank says that it will not come
_MOST_SAID = 2000  # characters
_WARN_S = 5.0  # a rank that is not there by then is named in the log, and again whenever the wait has doubled
_LEAVE_S = 5.0  # how long rank 0 waits for the others to have read


def open_store(env: RankEnv, deadline_s: float) -> Store:
    """Returns the store of the launch: a file of our own launcher, rank 0's, or that of torchrun's agent.

    Rank 0's listens at the master's address alone, not at all addresses of its machine.
    Raises LaunchError where it cannot be reached in time.
    """
    if env.num_ranks == 1:
        return HashStore()
    if env.launch_files:
        store = FileStore(env.store_path, env.num_ranks)
        store.set_timeout(timedelta(seconds=deadline_s))
        return store
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = env.rank == 0 and not of_agent
    listener = open_port(env.master_addr, env.master_port, "MASTER_ADDR", "MASTER_PORT") if is_master else None
    try:
        return TCPStore(
            env.master_addr,
            env.master_port,
            env.num_ranks,
            is_master=is_master,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,  # `gather` waits for them, and names who is missing
            multi_tenant=not of_agent,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {env.rank} of {env.num_ranks} could not reach the store of the launch at "
            f"{env.store} within {deadline_s:g} s ({reason_of(error)}); check that "
            "rank 0 was started, and that this address is reachable from here"
        ) from None


def agree_on_launch(store: Store, env: RankEnv, deadline_s: float) -> int:
    """Returns the id of this launch: drawn by rank 0, unless the launcher has given one. The same on all ranks.

    torchrun keeps its store when it starts ranks again, and its agents count restarts each for themselves. So what lies
    in the store may be left of an earlier launch, and nothing but fresh random numbers tells: every rank writes one,
    rank 0 answers with the id and the numbers that it has read, and a rank believes an answer that has its own number.
    Raises LaunchError naming the ranks that have not come in time.
    """
    if env.launch_id or env.num_ranks == 1:
        return env.launch_id or new_launch_id()
    at = PrefixStore("moe_serve/launch", store)
    try:
        return _lead(at, env, deadline_s) if env.rank == 0 else _follow(at, env, deadline_s)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(_lost_store(env, error)) from None


def store_of_launch(store: Store, launch_id: int) -> Store:
    """Returns the part of the store in which nothing of another launch lies."""
    return PrefixStore(f"moe_serve/{launch_id}", store)


def _lead(at: Store, env: RankEnv, deadline_s: float) -> int:
    launch_id, others = new_launch_id(), range(1, env.num_ranks)
    told = ""
    wait = _Wait(env, "joined", deadline_s)
    while True:
        come = [rank for rank in others if at.check([f"number {rank}"])]
        answer = msgspec.json.encode((launch_id, {rank: at.get(f"number {rank}").decode() for rank in come})).decode()
        if answer != told:
            at.set("answer", answer)
            told = answer
        missing = [rank for rank in others if _text(at, f"agreed {rank}") != str(launch_id)]
        if not missing:
            at.set("go", str(launch_id))
            return launch_id
        wait.for_ranks(missing)


def _follow(at: Store, env: RankEnv, deadline_s: float) -> int:
    number = secrets.token_hex(8)
    at.set(f"number {env.rank}", number)
    wait = _Wait(env, "joined", deadline_s)
    agreed = 0
    while True:
        answer = _text(at, "answer")
        launch_id, numbers = msgspec.json.decode(answer, type=tuple[int, dict[int, str]]) if answer else (0, {})
        if numbers.get(env.rank) == number and launch_id != agreed:
            agreed = launch_id
            at.set(f"agreed {env.rank}", str(agreed))
        if agreed and _text(at, "go") == str(agreed):
            return agreed
        wait.for_ranks([0])  # which waits for the others, and names them


def _text(at: Store, key: str) -> str:
    return at.get(key).decode() if at.check([key]) else ""


def gather(store: Store, env: RankEnv, name: str, data: str, deadline_s: float) -> list[bytes]:
    """Returns every rank's text as bytes, in rank order.

    name: of this exchange; each is used once in a launch
    Raises LaunchError naming the ranks that have not come in time.
    """
    at = PrefixStore(f"moe_serve/{name}", store)
    try:
        at.set(str(env.rank), data)
        _wait_for_all(at, env, "joined", deadline_s)
        gathered = [at.get(str(rank)) for rank in range(env.num_ranks)]
        at.set(f"read {env.rank}", "")
    except RuntimeError as error:
        raise LaunchError(_lost_store(env, error)) from None
    return gathered


def leave(store: Store, env: RankEnv, name: str) -> None:
    """Keeps rank 0, which may hold the store, until all have read what was written in an exchange, or some seconds."""
    at = PrefixStore(f"moe_serve/{name}", store)
    deadline_s = time.monotonic() + _LEAVE_S
    while env.rank == 0 and time.monotonic() < deadline_s:
        if at.check([f"read {rank}" for rank in range(env.num_ranks)]):
            return
        time.sleep(_POLL_S)


def check_facts(store: Store, env: RankEnv, find: Callable[[], Sequence[Fact]], deadline_s: float) -> Sequence[Fact]:
    """Returns the facts that all ranks have in common.

    Raises ConfigError on every rank, naming the first fact in which ranks differ, unless all have the same ones.

    find: returns this rank's facts; where it raises, the other ranks end with its error too, and do not wait
    """
    try:
        facts = find()
    except MoeServeError as error:
        PrefixStore("moe_serve/facts", store).set(_FAILED, f"rank {env.rank} ended: {error}"[:_MOST_SAID])
        raise
    rows = gather(store, env, "facts", msgspec.json.encode(facts).decode(), deadline_s)
    try:
        message = first_difference([msgspec.json.decode(row, type=list[Fact]) for row in rows])
    except (ValueError, RecursionError) as error:
        raise LaunchError(
            f"what a rank wrote into the store of the launch at {env.store} cannot be read "
            f"({error}); are ranks of another version, or another program, using that port?"
        ) from None
    if message is not None:
        leave(store, env, "facts")
        raise ConfigError(message)
    return facts


def _wait_for_all(at: Store, env: RankEnv, what: str, deadline_s: float) -> None:
    wait = _Wait(env, what, deadline_s)
    missing = list(range(env.num_ranks))
    while missing := [rank for rank in missing if not at.check([str(rank)])]:
        if at.check([_FAILED]):
            raise LaunchError(at.get(_FAILED).decode(errors="replace"))
        wait.for_ranks(missing)


class _Wait:
    """One wait for other ranks: each turn pauses a little longer; names who is missing, and ends at the deadline."""

    def __init__(self, env: RankEnv, what: str, deadline_s: float):
        self._env = env
        self._what = what
        self._deadline_s = deadline_s
        self._started_s = time.monotonic()
        self._next_warning_s = _WARN_S

    def for_ranks(self, missing: Sequence[int]) -> None:
        """Pauses before the next look. Raises LaunchError naming the missing ranks once the deadline has passed."""
        env, waited_s = self._env, time.monotonic() - self._started_s
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:8]))}"
        ranks += f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        if waited_s > self._deadline_s:
            raise LaunchError(
                f"{ranks} of {env.num_ranks} had not {self._what} after {self._deadline_s:g} s; look at their last "
                f"lines, check that they were started and reach {env.store}, or raise "
                "server.attach_deadline_s"
            )
        if waited_s > self._next_warning_s:
            self._next_warning_s = 2 * waited_s
            if env.rank == min(set(range(env.num_ranks)) - set(missing), default=0):  # one rank says it for all
                log.warning("not %s after %.0f s: %s", self._what, waited_s, ranks)
        time.sleep(min(_POLL_S * (1 + waited_s), 0.5))


def _lost_store(env: RankEnv, error: Exception) -> str:
    return (
        f"rank {env.rank} lost the store of the launch at {env.store} while the ranks joined "
        f"({reason_of(error)}); look at the last lines of rank 0"
    )
