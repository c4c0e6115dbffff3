"""What an idle system costs, and how long a request takes to wake it: two ranks of the demo model, the real engine.

    python -m benchmarks.idle [--idle-s 20] [--wakes 50] [--note TEXT]

A process plays the front end. The share of a core is each rank's CPU time over an idle stretch; a wake ends when both
ranks have entered the exchange of the request's step.
"""

import argparse
import os
import statistics
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from benchmarks.conditions import conditions, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--wakes", type=int, default=50)
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("pyzmq")
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        router = zmq.Context().socket(zmq.ROUTER)
        router.bind(f"ipc://{folder}/front_end")
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [context.Process(target=_rank, args=(rank, folder, pipes[rank][1])) for rank in range(2)]
        for rank in ranks:
            rank.start()
        sent = _play_front_end(router, args.idle_s, args.wakes)
        noted: list[list[tuple[float, float]]] = [pipe.recv() for pipe, _ in pipes]
        for rank in ranks:
            rank.join(30)
    shares = [_share_of_a_core(entered, until_s=sent[0]) for entered in noted]
    wakes_ms = [1000 * max(min(s for s, _ in entered if s > at) - at for entered in noted) for at in sent]
    rows = [
        {"what": "share of a core, rank 0 and rank 1", "value": ", ".join(f"{share:.1%}" for share in shares)},
        {"what": "wake of both ranks, median", "value": f"{statistics.median(wakes_ms):.2f} ms"},
        {"what": "wake of both ranks, 90 % within", "value": f"{statistics.quantiles(wakes_ms, n=10)[-1]:.2f} ms"},
    ]
    notes = (
        f"Demo model, 2 ranks, engine.heartbeat_s at its default; {args.idle_s:g} s idle, then {args.wakes} requests "
        f"to a sleeping system, one at a time. Load average at the end: {os.getloadavg()[0]:.2f}. {args.note}"
    )
    print(save("idle", "An idle system, and its wake", rows, facts, notes))


def _share_of_a_core(noted: list[tuple[float, float]], until_s: float) -> float:
    """noted: (monotonic time, CPU time of the process) at each exchange"""
    idle = [note for note in noted if note[0] < until_s]
    (first_s, first_cpu_s), (last_s, last_cpu_s) = idle[0], idle[-1]
    return (last_cpu_s - first_cpu_s) / (last_s - first_s)


def _play_front_end(router: "zmq.Socket[bytes]", idle_s: float, num_wakes: int) -> list[float]:
    """Returns when each request was sent."""
    from moe_serve.attention_dp.request import SamplingParams
    from moe_serve.engine.protocol.messages import Alive, Hello, Shutdown, Submit, Tokens, decode_to_front_end, encode

    names: dict[int, bytes] = {}
    while len(names) < 2:
        name, data = router.recv_multipart()
        message = decode_to_front_end(data)
        if isinstance(message, Hello):
            names[message.rank] = name
    time.sleep(idle_s)
    params = SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True)
    sent = []
    for number in range(num_wakes):
        for name in names.values():
            router.send_multipart([name, encode(Alive())])
        time.sleep(0.1)  # the ranks are asleep again
        sent.append(time.monotonic())
        router.send_multipart([names[number % 2], encode(Submit(str(number), 0, [5, 6, 7], params, seed=0))])
        while True:
            message = decode_to_front_end(router.recv_multipart()[1])
            if isinstance(message, Tokens):
                break
    router.send_multipart([names[0], encode(Shutdown())])
    return sent


def _rank(rank: int, folder: str, answer: Connection) -> None:
    """Sends (monotonic time, CPU time of the process) at each exchange, once the engine has ended."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from moe_serve.config import load_config
    from moe_serve.dispatch.base import EpGroup
    from moe_serve.dispatch.peer_calls import gather_bytes
    from moe_serve.engine.build import build_engine
    from moe_serve.engine.protocol.mailbox import ZmqMailbox
    from moe_serve.engine.protocol.messages import Hello
    from moe_serve.engine.step.exchange import make_exchange
    from moe_serve.links.link import Link

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 2), rank=rank, world_size=2)
    world = dist.group.WORLD
    assert world is not None
    mailbox = ZmqMailbox(Link(folder=Path(folder)), rank, "127.0.0.1")
    addresses = gather_bytes(mailbox.wake_address.encode(), world)
    mailbox.connect_peers([addresses[1 - rank].decode()])
    exchange = make_exchange("shm", world, True, 30.0)
    config = load_config(overrides=["parallel.num_ranks=2", "cache.num_blocks=256"])
    engine = build_engine(config, EpGroup(rank, 2, torch.device("cpu"), world), exchange, mailbox)
    engine.served.warm_up()
    noted: list[tuple[float, float]] = []
    gather = exchange.gather

    def noting_gather(*args: Any) -> Any:
        noted.append((time.monotonic(), time.process_time()))
        return gather(*args)

    exchange.gather = noting_gather  # type: ignore[method-assign]
    mailbox.send(Hello(rank, 2, 0, os.getpid(), ""))
    engine.run()
    mailbox.close()
    answer.send(noted)


if __name__ == "__main__":
    main()
