"""Ranks of several CPU hosts: rows over own connections against gloo, a plain TCP stream and shared memory.

    python -m benchmarks.hosts [--rounds 20] [--serve-rounds 5]

Transport: ranks of this machine that take each other for ranks of two hosts, so that rows between them go over TCP on
the loopback interface. Every round runs all variants, one after the other; of a run the slowest rank counts, ratios
are medians over rounds of ratios within a round. A plain stream sends the bytes that a rank sends to the other host
through one connection in each direction at once.

Steps: decode steps of an engine without a front end, so that each rank has a core: on one rank, on two ranks of one
host, and on two that take each other for ranks of two hosts. They take turns.

Serving: the demo model on two network namespaces joined by a cable, each with a /dev/shm of its own (needs root), by
the same connections and by gloo, and on one host over shared memory. Systems are started one after the other.

Delay: decode steps of two ranks on two such namespaces, over a cable with a delay, which a process of the benchmark
makes: without the delay, with it, and with it in two halves that overlap. They take turns.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.bench_model import write_bench_model
from benchmarks.conditions import conditions, save
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import AnyAllToAll, BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.hosts.link import HostLink
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import Submit
from moe_serve.engine.step.exchange import Exchange, OneRankExchange, make_exchange
from moe_serve.kernels.part_clock import PARTS
from tests.dispatch.hosts.pretended import on_hosts
from tests.engine.queue_mailbox import QueueMailbox
from tests.launcher.hosts import Host, can_make_hosts, make_hosts
from tests.launcher.running import eventually
from tests.ranks import run_ranks

NUM_TOKENS, HIDDEN, TOPK, NUM_EXPERTS = 128, 7168, 8, 64
ROW_BYTES = 2 * HIDDEN
STREAMS = "plain stream of its bytes", "plain stream of combine's bytes"
DELAY_S = 0.001
DELAYED = "no delay", "at once", "in halves"
NUM_LAYERS = {"demo": 4, "bench": 8}
Times = dict[str, list[float]]
TOKEN = "0123456789abcdef" * 2
URL = "http://127.0.0.1:30000"
GLOO = ["dispatch.backend=collective", "engine.exchange=gloo"]
Goals = dict[str, dict[int, str]]  # what a system is compared with, and the goals by batch
SYSTEMS: tuple[tuple[str, list[int], list[str], Goals], ...] = (
    ("1 host x 2 ranks", [2], [], {}),
    ("2 hosts x 1 rank, gloo", [1, 1], GLOO, {}),
    ("2 hosts x 1 rank", [1, 1], [], {"2 hosts x 1 rank, gloo": {1: "≥ 8", 16: "≥ 4"}, "1 host x 2 ranks": {}}),
    ("2 hosts x 2 ranks, gloo", [2, 2], GLOO, {}),
    ("2 hosts x 2 ranks", [2, 2], [], {"2 hosts x 2 ranks, gloo": {}}),
)
LAYOUTS = "1 rank", "1 host x 2 ranks", "2 hosts x 1 rank"
STEPS_A_ROUND = 30
STEP_GOALS = {
    ("demo", 1, LAYOUTS[1]): "≥ 0.7",
    ("bench", 16, LAYOUTS[2]): "≥ 0.85",
}  # of the steps a second of the layout before
_CLIENT = """
import json, sys, threading, time, urllib.request
url, num_tokens, batch, rounds = sys.argv[1], *map(int, sys.argv[2:])
def ask(i):
    settings = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = json.dumps({"text": f"def f{i}", "sampling_params": settings}).encode()
    call = urllib.request.Request(url + "/generate", body, {"content-type": "application/json"})
    return json.loads(urllib.request.urlopen(call, timeout=300).read())["output_ids"]
first = ask(0)
rates = []
for _ in range(rounds):
    started_s = time.perf_counter()
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(batch)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    rates.append(num_tokens * batch / (time.perf_counter() - started_s))
print(json.dumps([rates, first]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serve-rounds", type=int, default=5, help="0: the transport only")
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions()
    rows = [row for hosts in ((0, 1), (0, 0, 1, 1)) for row in transport_rows(hosts, args.rounds)]
    rows += step_rows(args.rounds)
    if args.serve_rounds and can_make_hosts():
        rows += serving_rows(args.serve_rounds) + delayed_rows(args.rounds)
    notes = (
        f"Transport: {NUM_TOKENS} tokens per rank, H={HIDDEN}, K={TOPK}, E={NUM_EXPERTS}, bf16 on the wire, over the "
        "loopback interface; times are medians over rounds, in brackets from the tenth to the ninetieth percentile. "
        f"Steps: medians over rounds of {STEPS_A_ROUND} steps, with a delay of 4; parts are those of rank 0, waits "
        "included. "
        "Serving: demo model, 64 tokens per request, one thread per rank, since all hosts share the cores; "
        "client beside the front end on the first host; medians over rounds of one start. "
        f"{args.note}"
    )
    print(save("hosts", "Ranks of several CPU hosts", rows, facts, notes, per_cpu=True))


def transport_rows(hosts: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Returns the rows of the table for ranks on these hosts."""
    found = run_ranks(len(hosts), measure, hosts, rounds, timeout_s=600)
    times = {name: np.max([each[0][name] for each in found], axis=0) for name in found[0][0]}
    sent, expected = found[0][1], found[0][2]
    layout = f"2 hosts x {len(hosts) // 2} rank{'s' if len(hosts) > 2 else ''}"
    rows = []
    for call, stream in (("dispatch of 128 tokens", STREAMS[0]), ("combine of 128 tokens", STREAMS[1])):
        times[f"{stream}, then over shared memory"] = times[stream] + times[f"{call}, shared memory"]
    for name, yardstick, goal in (
        ("one token there and back", "one token there and back, gloo", "≤ 0.1"),
        ("dispatch of 128 tokens", STREAMS[0], "≤ 1.25"),
        ("dispatch of 128 tokens, shared memory", STREAMS[0], ""),
        ("dispatch of 128 tokens", f"{STREAMS[0]}, then over shared memory", ""),
        ("dispatch of 128 tokens", "dispatch of 128 tokens, gloo", ""),
        ("combine of 128 tokens", STREAMS[1], "≤ 1.25"),
        ("combine of 128 tokens, shared memory", STREAMS[1], ""),
        ("combine of 128 tokens", f"{STREAMS[1]}, then over shared memory", ""),
        ("combine of 128 tokens", "combine of 128 tokens, gloo", ""),
        ("exchange of counts", "exchange of counts, gloo", ""),
    ):
        ratios = times[name] / times[yardstick]
        low, high = np.percentile(ratios, (10, 90))
        rows.append(
            {
                "system": layout,
                "what": name,
                "value": f"{np.median(times[name]) * 1e6:.0f} µs",
                "ratio": f"{np.median(ratios):.3f} ({low:.3f} … {high:.3f}) × {yardstick}",
                "goal": goal,
            }
        )
    share = f"{sent / expected:.4f} × rows x hosts that want them"
    rows.append({"system": layout, "what": "bytes of a dispatch", "value": str(sent), "ratio": share, "goal": "≤ 1.03"})
    return rows


def measure(rank: int, group: EpGroup, hosts: tuple[int, ...], rounds: int) -> tuple[Times, int, int]:
    """Returns the seconds of each call in each round, the bytes of a dispatch, and those of its rows."""
    torch.manual_seed(rank)
    cores = sorted(os.sched_getaffinity(0))
    if len(hosts) <= len(cores):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    linked = on_hosts(group, hosts)
    link, process_group = linked.link, group.process_group
    assert link is not None
    assert process_group is not None
    limits = BufferLimits(NUM_TOKENS, HIDDEN, TOPK, NUM_EXPERTS // group.num_ranks)
    ours = make_all_to_all(linked, TransportRequest("low_latency", limits, torch.bfloat16))
    shared = make_all_to_all(group, TransportRequest("low_latency", limits, torch.bfloat16))
    gloo = make_all_to_all(group, TransportRequest("collective", limits, torch.bfloat16))
    hidden = torch.randn(NUM_TOKENS, HIDDEN).bfloat16()
    ids = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(TOPK, dim=1).indices
    weights = torch.rand(NUM_TOKENS, TOPK)
    there = [sum(hosts[int(slot) // limits.slots_per_rank] != hosts[rank] for slot in row) for row in ids]
    num_rows = sum(each > 0 for each in there)
    before = link.sent_bytes
    arrived = ours.dispatch(hidden, ids, None, weights).wait()
    sent = link.sent_bytes - before
    ours.combine(arrived.rows.x, weights, arrived.handle).wait()
    stream = Stream(link, rank, group)
    times: Times = {}
    together = torch.zeros(1, dtype=torch.int64)

    def timed(name: str, run: Callable[[], Any]) -> Any:
        for _ in range(2):  # gloo's barrier ends hundreds of microseconds apart
            ours.exchange_counts(together).wait()
        started_s = time.perf_counter()
        result = run()
        times.setdefault(name, []).append(time.perf_counter() - started_s)
        return result

    one = hidden[:1].clone(), ids[:1].clone(), weights[:1].clone()
    for _ in range(rounds + 2):
        for name, transport in (("", ours), (", shared memory", shared), (", gloo", gloo)):
            timed(f"exchange of counts{name}", lambda t=transport: t.exchange_counts(torch.ones(1).long()).wait())
            timed(f"one token there and back{name}", lambda t=transport: round_trip(t, *one))
            arrived = timed(
                f"dispatch of 128 tokens{name}", lambda t=transport: t.dispatch(hidden, ids, None, weights).wait()
            )
            out = arrived.rows.x if arrived.out is None else arrived.out.copy_(arrived.rows.x)
            timed(
                f"combine of 128 tokens{name}",
                lambda t=transport, out=out, arrived=arrived: t.combine(out, weights, arrived.handle).wait(),
            )
        timed(STREAMS[0], lambda: stream(num_rows * ROW_BYTES))
        timed(STREAMS[1], lambda: stream(sum(there) * ROW_BYTES))
    dist.barrier(process_group)
    return {name: each[2:] for name, each in times.items()}, sent, num_rows * ROW_BYTES


def round_trip(transport: AnyAllToAll, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Sends rows, and takes them back as results."""
    arrived = transport.dispatch(hidden, ids, None, weights).wait()
    transport.combine(arrived.rows.x, weights, arrived.handle).wait()


class Stream:
    """One TCP connection in each direction with the rank of this number on the other host."""

    def __init__(self, link: HostLink, rank: int, group: EpGroup):
        listener = socket.create_server(("127.0.0.1", 0))
        ports = torch.zeros(group.num_ranks, dtype=torch.int64)
        ports[rank] = listener.getsockname()[1]
        dist.all_reduce(ports, group=group.process_group)
        peer = link.hosts.entry(rank, link.others[0], range(group.num_ranks))
        self._out = socket.create_connection(("127.0.0.1", int(ports[peer])))
        self._out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._in, _ = listener.accept()
        self._sent = memoryview(bytearray(NUM_TOKENS * TOPK * ROW_BYTES))
        self._got = memoryview(bytearray(NUM_TOKENS * TOPK * ROW_BYTES))

    def __call__(self, size: int) -> None:
        """Sends and receives so many bytes at once; both ends pass about the same number."""
        sizes = bytearray(8)
        self._out.sendall(size.to_bytes(8, "little"))
        self._in.recv_into(sizes, 8, socket.MSG_WAITALL)
        sender = threading.Thread(target=self._out.sendall, args=(self._sent[:size],))
        sender.start()
        self._in.recv_into(self._got[: int.from_bytes(sizes, "little")], flags=socket.MSG_WAITALL)
        sender.join()


def step_rows(rounds: int) -> list[dict[str, Any]]:
    """Returns what a decode step takes, and where the time goes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_bench_model(Path(folder))
        for model, path, batch in (("demo", None, 1), ("demo", None, 16), ("bench", folder, 16)):
            times, parts = run_ranks(2, measure_steps, path, batch, rounds, timeout_s=600)[0]
            for before, layout in zip((None, *LAYOUTS), LAYOUTS, strict=False):
                what, value = f"decode step, {model} model, batch {batch}", f"{1e6 * np.median(times[layout]):.0f} µs"
                speed = f"{np.median(np.divide(times[before], times[layout])):.2f} × {before}" if before else ""
                goal = STEP_GOALS.get((model, batch, layout), "")
                rows.append({"system": layout, "what": what, "value": value, "ratio": speed, "goal": goal})
                its = parts[layout]
                told = ", ".join(
                    f"{name} {us:.0f}" for name, us in zip(PARTS, its, strict=True) if us > 0.01 * sum(its)
                )
                rows.append({"system": layout, "what": "its parts, µs", "value": told, "ratio": "", "goal": ""})
    return rows


def measure_steps(
    rank: int, group: EpGroup, model: str | None, batch: int, rounds: int
) -> tuple[Times, dict[str, list[float]]]:
    """Returns the seconds of a step of each layout, by round, and the µs that its parts take here."""
    alone = replace(group, rank=0, num_ranks=1, process_group=None)
    groups = (alone if rank == 0 else None), group, on_hosts(group, (0, 1))
    engines = {
        layout: None if each is None else start_engine(each, model, range(each.rank, batch, each.num_ranks))
        for layout, each in zip(LAYOUTS, groups, strict=True)
    }
    times: Times = {layout: [] for layout in LAYOUTS}
    parts: dict[str, list[Any]] = {layout: [] for layout in LAYOUTS}
    for _ in range(rounds):
        for layout, engine in engines.items():
            dist.barrier(group.process_group)  # who has no engine waits in it, and leaves its core alone
            if engine is None:
                continue
            for _ in range(2):
                engine.run_step()
            before, started_s = np.array(engine.served.clock.sums_ns()), time.perf_counter()
            for _ in range(STEPS_A_ROUND):
                engine.run_step()
            times[layout].append((time.perf_counter() - started_s) / STEPS_A_ROUND)
            parts[layout].append((np.array(engine.served.clock.sums_ns()) - before) / STEPS_A_ROUND / 1e3)
    dist.barrier(group.process_group)
    return times, {layout: list(np.median(each, axis=0)) for layout, each in parts.items() if each}


def start_engine(group: EpGroup, model: str | None, numbers: range, more: Sequence[str] = ()) -> Engine:
    """Returns an engine in the middle of its requests. model: None: the demo model;  more: settings"""
    settings = [f"parallel.num_ranks={group.num_ranks}", "parallel.threads_per_rank=1", "cache.memory_gib=0.3", *more]
    settings += ["engine.max_running_requests=256"]
    config = load_config(overrides=settings + ([f"model.path={model}"] if model else []))
    exchange: Exchange = OneRankExchange()
    if group.process_group is not None:
        exchange = make_exchange("auto", group.process_group, group.link is None, 60.0, link=group.link)
    engine = build_engine(config, group, exchange, QueueMailbox(end_when_idle=False))
    assert engine.recovery.begin(lambda: True)
    for number in numbers:
        params = SamplingParams(max_new_tokens=1000, ignore_eos=True)
        assert engine.requests.submit(Submit(str(number), 0, [5 + number, 17, 33], params, seed=number)) is None
    for _ in range(5):
        engine.run_step()
    return engine


def serving_rows(rounds: int) -> list[dict[str, Any]]:
    """Returns tokens per second of the demo model on one host and on two."""
    os.environ |= {"MOE_SERVE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    rates: dict[tuple[str, int], float] = {}
    answers = set()
    with make_hosts(2) as (a, b):
        for name, per_host, settings, _ in SYSTEMS:
            for batch, (found, answer) in serve((a, b), per_host, settings, rounds).items():
                rates[name, batch] = statistics.median(found)
                answers.add(tuple(answer))
    assert len(answers) == 1, "the same tokens everywhere"
    rows = []
    for name, *_, goals in SYSTEMS:
        for batch in (1, 16):
            rate = rates[name, batch]
            ratios = [f"{rate / rates[other, batch]:.2f} × {other}" for other in goals]
            wanted = ", ".join(goals[other][batch] for other in goals if goals[other])
            value = f"{rate:.0f} tokens/s"
            row = {"what": f"serving, batch {batch}", "value": value, "ratio": ", ".join(ratios), "goal": wanted}
            rows.append({"system": name, **row})
    return rows


def delayed_rows(rounds: int) -> list[dict[str, Any]]:
    """Returns what decode steps over a cable with a delay take."""
    rows = []
    with make_hosts(2, DELAY_S) as hosts, tempfile.TemporaryDirectory() as folder:
        write_bench_model(Path(folder))
        way_s = one_way_s(*hosts)
        for model, batch in (("demo", 1), ("demo", 16), ("demo", 512), ("bench", 256)):
            path = None if model == "demo" else folder
            times = run_ranks(2, measure_delayed_steps, hosts, path, batch, rounds, timeout_s=600)[0]
            ways = 2 * NUM_LAYERS[model] + 1  # rows and results of each layer, and the exchange
            here_s, whole_s, halves_s = (np.array(times[name]) for name in DELAYED)
            least = whole_s / (here_s + ways * way_s)
            told = f"{np.median(least):.2f} × its time without delay and {ways} ways of {1e3 * way_s:.2f} ms"
            for how, each, ratio, goal in (
                ("at once", whole_s, told, ""),
                ("in halves", halves_s, f"{np.median(halves_s / whole_s):.2f} × at once", "< 1" if batch > 16 else ""),
            ):
                what = f"decode step, {model} model, batch {batch}, {1e3 * DELAY_S:g} ms of delay, {how}"
                row = {"system": "2 hosts x 1 rank", "what": what, "value": f"{1e3 * np.median(each):.1f} ms"}
                rows.append(row | {"ratio": ratio, "goal": goal})
    return rows


def measure_delayed_steps(
    rank: int, group: EpGroup, hosts: tuple[Host, Host], model: str | None, batch: int, rounds: int
) -> Times:
    """Returns the seconds of a step without the cable, over it, and over it in halves, by round."""
    numbers = range(rank, batch, group.num_ranks)
    engines = {DELAYED[0]: start_engine(on_hosts(group, (0, 1)), model, numbers)}
    for name, settings in zip(DELAYED[1:], ([], ["dispatch.overlap_from_tokens=2"]), strict=True):
        with hosts[rank].network():  # threads that are started here stay there
            linked = on_hosts(group, (0, 1), hosts[rank].address)
        engines[name] = start_engine(linked, model, numbers, settings)
    times: Times = {name: [] for name in DELAYED}
    for _ in range(rounds):
        for name, engine in engines.items():
            dist.barrier(group.process_group)
            engine.run_step()
            started_s = time.perf_counter()
            for _ in range(4):
                engine.run_step()
            times[name].append((time.perf_counter() - started_s) / 4)
    dist.barrier(group.process_group)
    return times


def one_way_s(a: Host, b: Host) -> float:
    """Returns half of the time that a few bytes take from a host to another and back."""
    with b.network():
        listener = socket.create_server((b.address, 0))
    with listener, a.network(), socket.create_connection(listener.getsockname()) as here, listener.accept()[0] as there:
        for each in (here, there):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(50):
            started_s = time.perf_counter()
            here.sendall(b"x")
            there.sendall(there.recv(1))
            here.recv(1)
            times.append(time.perf_counter() - started_s)
    return statistics.median(times) / 2


def serve(
    hosts: tuple[Host, Host], per_host: list[int], extra: list[str], rounds: int
) -> dict[int, tuple[list[float], list[int]]]:
    """Returns tokens per second of each round, and the first tokens, by batch. per_host: ranks of each host"""
    settings = ["parallel.device=cpu", f"parallel.num_ranks={sum(per_host)}", "parallel.threads_per_rank=1", *extra]
    settings += ["server.attach_deadline_s=60", f"server.worker_host={hosts[0].address}"]
    words = [word for value in settings for word in ("--set", value)]
    join = [f"--nnodes={len(per_host)}", f"--master-addr={hosts[0].address}", "--master-port=29511"]
    with ExitStack() as running:
        front_end = running.enter_context(hosts[0].start("moe_serve", "frontend", *words))
        front_end.wait_for("HTTP on")
        ranks = []
        for number, (host, num_ranks) in enumerate(zip(hosts, per_host, strict=False)):
            here = [*join, f"--nproc-per-node={num_ranks}", f"--node-rank={number}", "-m", "moe_serve.launcher.serve"]
            ranks.append(running.enter_context(host.start("torch.distributed.run", *here, *words)))
        assert eventually(lambda: hosts[0].ask(f"{URL}/ready")[0] == 200, 120), [each.output for each in ranks]
        found = {}
        for batch in (1, 16):
            client = hosts[0].command([sys.executable, "-c", _CLIENT, URL, "64", str(batch), str(rounds)])
            said = subprocess.run(client, capture_output=True, text=True, check=True, timeout=600).stdout
            rates, answer = json.loads(said)
            found[batch] = rates, answer
    return found


if __name__ == "__main__":
    main()
