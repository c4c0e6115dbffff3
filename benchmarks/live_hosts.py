"""Latency and shift rows of benchmarks/live_balancing.py over several hosts, which are network namespaces."""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.fault_hosts import PORT, HostsSystem
from benchmarks.fault_streams import stream
from benchmarks.live_changes import rows_of_shift
from benchmarks.live_clients import Row, swapped
from benchmarks.live_moves import PAIR_HALF_S, rows_of_latency
from moe_serve.bench.domains import DOMAINS, prompts_of
from moe_serve.eplb.files.trace_jsonl import read_events, read_jsonl
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.replay.run import LiveRun
from moe_serve.launcher.cli.demo_balance import Story, TimelinePoint
from moe_serve.launcher.cli.replay import server_replay
from tests.launcher.hosts import set_rate

NODE_MOVES = 2
_STREAMS = 16
_TOKENS = 100
_REDUNDANT = 8
_START_S, _STILL_S = 180.0, 60.0


@dataclass(frozen=True)
class Network:
    """rate: of each host's cable, as `tc` writes it; "": as fast as the machine is"""

    num_hosts: int
    rate: str = ""

    def __str__(self) -> str:
        return f"{self.num_hosts} hosts{' at ' if self.rate else ''}{self.rate}"


class Clients:
    """Streams of one domain's prompts that go on until `end`. gaps: (when, seconds since the token before)"""

    def __init__(self, system: HostsSystem):
        self.domain = DOMAINS[0]
        self.gaps: list[tuple[float, float]] = []
        self._system, self._goes_on = system, True
        self._running = [asyncio.create_task(self._client(number)) for number in range(_STREAMS)]

    async def end(self) -> None:
        self._goes_on = False
        await asyncio.gather(*self._running)

    async def _client(self, number: int) -> None:
        prompts = {domain: prompts_of(domain, number) for domain in DOMAINS}
        params = {"temperature": 0.8, "max_new_tokens": _TOKENS, "ignore_eos": True}
        while self._goes_on:
            call = {"text": next(prompts[self.domain]), "sampling_params": params, "stream": True}
            times: list[float] = []
            status, tokens, _ = await stream(self._system.connect, json.dumps(call).encode(), heard=times.append)
            assert status == 200, f"a stream ended with status {status}"
            assert tokens is not None, "a stream was cut"
            self.gaps += [(now_s, now_s - last_s) for last_s, now_s in pairwise(times)]


class Ruler:
    """Asks the front end about the balancer, and tells it where experts should be."""

    def __init__(self, system: HostsSystem):
        self._host = system.hosts[0]

    async def ask(self, route: str, body: Any = None) -> dict[str, Any]:
        data = "" if body is None else json.dumps(body)
        status, text = await asyncio.to_thread(self._host.ask, f"http://127.0.0.1:{PORT}{route}", data)
        assert status == 200, f"{route}: {status} {text}"
        found: dict[str, Any] = json.loads(text)
        return found

    async def table(self) -> np.ndarray:
        return np.array((await self.ask("/eplb/placement"))["physical_to_logical_map"])

    async def num_windows(self) -> int:
        return int((await self.ask("/eplb/status"))["totals"].get("num_windows", 0))

    async def until_still(self) -> None:
        until_s = time.monotonic() + _STILL_S
        while (await self.ask("/eplb/status"))["state"] != "watching" and time.monotonic() < until_s:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _served(
    network: Network, num_ranks: int, **eplb: object
) -> AsyncIterator[tuple[Ruler, Clients, dict[str, Any]]]:
    """Yields a system on several hosts under load, and its settings."""
    settings = {f"eplb.{name}": value for name, value in {"node_moves": NODE_MOVES, **eplb}.items()}
    settings |= {"engine.step_deadline_s": 20, "engine.max_running_requests": 16}
    system = HostsSystem(network.num_hosts, num_ranks // network.num_hosts, _REDUNDANT, settings)
    if network.rate:
        system.prepare = partial(set_rate, bits_per_s=network.rate)
    async with AsyncExitStack() as stack:
        stack.enter_context(system)
        await system.serves_with(num_ranks, _START_S)
        clients = Clients(system)
        await asyncio.sleep(2.0)
        yield Ruler(system), clients, system.settings
        await clients.end()


async def measure_latency_over_hosts(network: Network, num_ranks: int, num_pairs: int) -> list[Row]:
    """As `measure_latency`, with experts that cross the network."""
    draw, table_draw = random.Random(0), np.random.default_rng(0)
    halves: list[tuple[bool, float, float]] = []
    async with _served(network, num_ranks, record_window_steps=200, trigger=0) as (ruler, clients, _):
        for _ in range(num_pairs):
            for moves in draw.sample([True, False], 2):
                begin_s = time.monotonic()
                if moves:
                    table = swapped(await ruler.table(), table_draw)
                    await ruler.ask("/eplb/placement", {"physical_to_logical_map": table.tolist()})
                await asyncio.sleep(max(0.0, PAIR_HALF_S - (time.monotonic() - begin_s)))
                halves.append((moves, begin_s, time.monotonic()))
                await ruler.until_still()
        status = await ruler.ask("/eplb/status")
    totals = status["totals"]
    per_round = totals["num_experts_moved"] / max(totals["num_rounds"], 1)
    rows = rows_of_latency(clients.gaps, halves, totals, status["window"]["step_time_s"])
    rows.append(
        {
            "what": f"experts moved in a round, eplb.node_moves {NODE_MOVES}",
            "value": f"{per_round:.2f}",
            "detail": f"{totals['num_bytes_moved'] / 2**20:.1f} MiB in {totals['num_rounds']:.0f} rounds, "
            f"{totals['move_seconds'] / max(totals['num_rounds'], 1) * 1e3:.0f} ms a round",
        }
    )
    return rows


async def measure_shift_over_hosts(network: Network, num_ranks: int, num_windows: int) -> list[Row]:
    """As `measure_shift`; then the trace of the server is replayed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "load.jsonl"
        async with _served(network, num_ranks, record_window_steps=60, record_path=str(path)) as (
            ruler,
            clients,
            settings,
        ):
            stale, num_before = None, 0
            while (num_seen := await ruler.num_windows()) < 2 * num_windows:
                if stale is None and num_seen >= num_windows:
                    stale, num_before, clients.domain = await ruler.table(), num_seen, DOMAINS[1]
                await asyncio.sleep(0.1)
            await clients.end()
            await ruler.until_still()
            last = await ruler.table()
            status = await ruler.ask("/eplb/status")
        assert stale is not None
        config = Path(folder) / "server.yaml"
        config.write_text(yaml.safe_dump(_nested(settings)))
        story, final = _story(path, config, stale, num_before)
        story.num_experts = int(status["totals"]["num_experts_moved"])
        started = next(event for event in read_events(path) if event["event"] == "balancer_started")
    same = final.physical_to_logical.tolist() == last.tolist()
    return [
        *rows_of_shift(story),
        {
            "what": "a replay of the server's trace ends with its placement",
            "value": str(same),
            "detail": f"{started['num_nodes']} nodes, {started['link_bytes_per_s'] / 1e6:.0f} MB/s, "
            f"{1e6 * started['link_delay_s']:.0f} µs one way",
        },
    ]


def _story(path: Path, config: Path, stale: np.ndarray, num_before: int) -> tuple[Story, Placement]:
    """Returns what was served in each window of a trace, and the last placement of its replay."""
    load = read_jsonl(path)
    server, start = server_replay(config, path, load, nodes=1)
    run, story = LiveRun(start, server, 0), Story(num_before_shift=num_before)
    old = Placement(stale, start.num_logical, start.num_ranks, start.moe_layer_ids)
    for number, record in enumerate(load):
        run.before(record.first_step, record.num_steps)
        run.after(record)
        assert record.placement is not None
        served, kept, then = (
            float(balancedness(rank_load(record.tokens, each)).mean()) for each in (record.placement, start, old)
        )
        story.points.append(TimelinePoint(float(number), served, kept, then if number >= num_before else None))
    story.moves = [(0.0, 0.0) for each in run.decisions if each.kind == "move"]
    return story, run.end()


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return sections
