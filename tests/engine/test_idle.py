"""An idle system sleeps: the tests count what its ranks do between heartbeats, and never judge a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
import zmq

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.peer_calls import gather_bytes
from moe_serve.engine.build import build_engine
from moe_serve.engine.protocol.mailbox import Inbound, ZmqMailbox
from moe_serve.engine.protocol.messages import (
    NEXT_STEP,
    Alive,
    Hello,
    Shutdown,
    Status,
    Submit,
    Tokens,
    Wake,
    decode_to_front_end,
    encode,
)
from moe_serve.engine.step.exchange import make_exchange
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from tests.engine.offline import tiny_model
from tests.engine.queue_mailbox import QueueMailbox
from tests.launcher.running import quiet_port
from tests.ranks import run_ranks

NUM_HEARTBEATS, NUM_REQUESTS = 40, 24
AN_HOUR_S = 3600.0  # a rank that only its heartbeat wakes never answers in a test


@dataclass(frozen=True)
class Idle:
    """What one rank has done. naps: polls that were allowed to wait"""

    steps: int
    sleeps: int
    naps: int
    forwards: int


class CountingMailbox(ZmqMailbox):
    naps = 0

    def poll(self, timeout_s: float) -> list[Inbound]:
        self.naps += timeout_s > 0
        return super().poll(timeout_s)


def idle(rank: int, group: EpGroup, model: str, heartbeat_s: float, port: int) -> Idle | None:
    """Rank 2 plays the front end of the two others."""
    engines = dist.new_group([0, 1], backend="gloo")
    link = Link(token="the token of this system", host="127.0.0.1", port=port)
    if rank == 2:
        return play_front_end(link, heartbeats=heartbeat_s < AN_HOUR_S)
    mailbox = CountingMailbox(link, rank, "127.0.0.1")
    addresses = gather_bytes(mailbox.wake_address.encode(), engines)
    mailbox.connect_peers([addresses[1 - rank].decode()])
    settings = [
        "model.load_format=dummy", "parallel.num_ranks=2", "cache.num_blocks=64",
        f"engine.step_deadline_s={2 * AN_HOUR_S}", f"server.worker_deadline_s={2 * AN_HOUR_S}",
    ]  # fmt: skip
    config = load_config(overrides=[f"model.path={model}", f"engine.heartbeat_s={heartbeat_s}", *settings])
    exchange = make_exchange("shm", engines, True, 30.0)
    engine = build_engine(config, EpGroup(rank, 2, group.device, engines), exchange, mailbox)
    engine.served.warm_up()
    mailbox.send(Hello(rank, 2, 0, 0, ""))
    engine.run()
    mailbox.close()
    exchange.close()
    counters = engine.counters
    return Idle(counters.num_steps, counters.num_sleeps, mailbox.naps, counters.num_forwards)


def play_front_end(link: Link, heartbeats: bool) -> None:
    sockets = LinkSockets(link)
    router = sockets.bound(zmq.ROUTER, link.front_end)
    names: dict[int, bytes] = {}
    while len(names) < 2:
        name, data = router.recv_multipart()
        message = decode_to_front_end(data)
        if isinstance(message, Hello):
            names[message.rank] = name
    for name in names.values():
        router.send_multipart([name, encode(Alive())])
    if heartbeats:
        wait_for_heartbeats(router)
    else:
        ask_one_by_one(router, [names[0], names[1]])
    router.send_multipart([names[0], encode(Shutdown())])
    sockets.close()


def wait_for_heartbeats(router: "zmq.Socket[bytes]") -> None:
    sleeps = {0: 0.0, 1: 0.0}
    while min(sleeps.values()) < NUM_HEARTBEATS:
        message = decode_to_front_end(router.recv_multipart()[1])
        if isinstance(message, Status):
            sleeps[message.rank] = message.counters["num_sleeps"]


def ask_one_by_one(router: "zmq.Socket[bytes]", names: Sequence[bytes]) -> None:
    params = SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True)
    for number in range(NUM_REQUESTS):
        router.send_multipart([names[number % 2], encode(Submit(str(number), 0, [5, 6, 7], params, seed=0))])
        while True:
            message = decode_to_front_end(router.recv_multipart()[1])
            if isinstance(message, Tokens) and message.events[0].request_id == str(number):
                break


def test_a_heartbeat_of_an_idle_system_is_one_exchange_and_no_forward(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path, "qwen3_moe"))
    ranks = run_ranks(3, idle, model, 0.02, quiet_port())[:2]
    for did in ranks:
        assert did.sleeps >= NUM_HEARTBEATS
        assert did.forwards == 0
        assert did.steps <= did.sleeps + 1, "one exchange for each sleep, and one to stop"
        # A sleep ends at its heartbeat or by a peer's wake; a late wake, for an exchange that is over, costs one more.
        assert did.naps <= 2 * did.sleeps + 2, "a sleeping rank waits in one call and does not poll"


def test_a_request_to_one_rank_wakes_all_ranks_without_waiting_for_a_heartbeat(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path, "qwen3_moe"))
    ranks = run_ranks(3, idle, model, AN_HOUR_S, quiet_port())[:2]
    for did in ranks:
        assert did.forwards == NUM_REQUESTS, "both ranks take part in each request's one step"
        assert did.steps <= 2 * NUM_REQUESTS + 2, "for each request its step, and the one that sends all to sleep"
        assert did.naps <= 3 * NUM_REQUESTS + 2


class Called(QueueMailbox):
    """A rank is called to its next step before its first one, or in its sleep; in its next sleep it is to end."""

    def __init__(self, called_awake: bool, launch_id: int):
        call = Wake(launch_id, NEXT_STEP)
        super().__init__([call] if called_awake else [], end_when_idle=False)
        self._asleep: list[Inbound] = [Shutdown()] if called_awake else [call, Shutdown()]

    def poll(self, timeout_s: float) -> list[Inbound]:
        return [self._asleep.pop(0)] if timeout_s > 0 else super().poll(timeout_s)


def called(rank: int, group: EpGroup, called_awake: bool, launch_id: int) -> tuple[int, int]:
    settings = ["cache.memory_gib=0.05", "parallel.num_ranks=1", f"engine.heartbeat_s={AN_HOUR_S}"]
    settings += [f"engine.step_deadline_s={2 * AN_HOUR_S}"]
    mailbox = Called(called_awake, launch_id)
    exchange = make_exchange("shm", group.process_group, True, 60)
    engine = build_engine(load_config(overrides=settings), group, exchange, mailbox)
    engine.run()
    engine.close()
    return engine.counters.num_steps, engine.counters.num_sleeps


@pytest.mark.parametrize("called_awake", [True, False])
def test_a_rank_that_is_called_takes_one_more_step_whether_it_slept_or_was_about_to(called_awake: bool) -> None:
    assert run_ranks(1, called, called_awake, 0) == [(3, 2)], "the call's step, and the one in which it ends"
    assert run_ranks(1, called, called_awake, 1) == [(2, 1)], "a call to another launch is none"
