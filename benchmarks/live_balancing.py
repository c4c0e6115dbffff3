"""What moving experts costs and brings while the demo model serves: real ranks, real front end, real clients.

    python -m benchmarks.live_balancing [--ranks 2 4] [--pairs 40] [--windows 24] [--picture docs/live-balancing.svg]

Five parts for each number of ranks:
- gain: tokens per second in a placement planned for the load, over those in the one at the start, in pairs;
- latency: every second, a migration is asked for or not, in pairs; p99 of the time between tokens with over without;
- activation: the longest pause of a rank at the activation of a round, beside the median step;
- shift: clients change from code to prose; balancedness over time, beside what the placement at the start would give;
- loss (4 ranks): a rank is killed; how long until every expert is on two ranks again; then a second kill.
"""

import argparse
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import conditions, save
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import ServeConfig, load_config
from moe_serve.engine.messages import SetPlacement
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.planner import plan
from moe_serve.launcher.balance_picture import timeline_svg
from moe_serve.launcher.demo_balance import run_demo
from moe_serve.launcher.domains import prompts_of
from moe_serve.launcher.llm import LLM
from moe_serve.topology import Topology

_NUM_STREAMS = 4
_PAIR_HALF_S = 1.0
_EXPERTS = 32  # of the demo model
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=40, help="pairs of seconds with and without a migration")
    parser.add_argument("--windows", type=int, default=24, help="windows of load in each domain")
    parser.add_argument("--picture", type=Path, help="write the picture of the shift here, of the last number of ranks")
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("pyzmq")
    rows: list[Row] = []
    for num_ranks in args.ranks:
        rows += measure_latency(num_ranks, args.pairs)
        rows += measure_gain(num_ranks, args.pairs)
        rows += measure_shift(num_ranks, args.windows, args.picture)
    if 4 in args.ranks:
        rows += measure_loss()
    notes = (
        f"Demo model ({_EXPERTS} experts, top 4, 4 MoE layers), one thread per rank; ranks, front end, clients share "
        f"the machine's cores. Latency: {_NUM_STREAMS} client threads; interval: 95 %, bootstrap over "
        f"pairs. Load average at the end: {os.getloadavg()[0]:.2f}. {args.note}"
    )
    print(save("live_balancing", "Experts move while the server serves", rows, facts, notes))


def settings(num_ranks: int, redundant: int, *overrides: str) -> ServeConfig:
    return load_config(
        overrides=[
            f"parallel.num_ranks={num_ranks}", f"eplb.num_redundant_experts={redundant}", "eplb.mode=dynamic",
            "cache.memory_gib=0.2", "engine.max_running_requests=16", *overrides,
        ]
    )  # fmt: skip


class TokenClock:
    """Clients that stream tokens without a pause, and when each token came."""

    def __init__(self, llm: LLM):
        self.gaps: list[tuple[float, float]] = []  # (when, seconds since the token before it)
        self.failure: BaseException | None = None
        self._llm = llm
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(_NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        prompts = prompts_of("code", number)
        params = SamplingParams(max_new_tokens=100, temperature=0.8, ignore_eos=True)
        try:
            while not self._end.is_set():
                last: dict[int, float] = {}
                for index, _ in self._llm.stream(list(islice(prompts, 4)), params):
                    now_s = time.monotonic()
                    if index in last:
                        self.gaps.append((now_s, now_s - last[index]))
                    last[index] = now_s
        except BaseException as failure:
            self.failure = failure

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        if self.failure is not None:
            raise self.failure


def measure_latency(num_ranks: int, num_pairs: int) -> list[Row]:
    """Pairs of equal stretches, with and without experts that move, in random order."""
    draw, table_draw = random.Random(0), np.random.default_rng(0)
    halves: list[tuple[bool, float, float]] = []
    # The balancer itself is kept quiet, so that only the migrations asked for here run.
    with LLM.from_config(settings(num_ranks, 8, "eplb.record_window_steps=200", "eplb.trigger=0")) as llm:
        clock = TokenClock(llm)
        time.sleep(2.0)
        for _ in range(num_pairs):
            for moves in draw.sample([True, False], 2):
                begin_s = time.monotonic()
                if moves:
                    _ask_for_moves(llm, num_ranks, table_draw)
                time.sleep(max(0.0, _PAIR_HALF_S - (time.monotonic() - begin_s)))
                halves.append((moves, begin_s, time.monotonic()))
                _wait_until_still(llm)
        clock.close()
        totals = llm.balance.totals
        steps = _step_seconds(llm)
    gaps = np.array(clock.gaps)

    def p99(begin_s: float, end_s: float) -> float:
        return float(np.quantile(gaps[(gaps[:, 0] >= begin_s) & (gaps[:, 0] < end_s), 1], 0.99))

    with_moves = [p99(begin, end) for moves, begin, end in halves if moves]
    without = [p99(begin, end) for moves, begin, end in halves if not moves]
    ratios = np.array(with_moves) / np.array(without)
    low, high = _bootstrap(ratios)
    pause_s = totals.get("longest_pause_seconds", 0.0)
    return [
        {
            "ranks": num_ranks,
            "what": "p99 between tokens, experts moving / not moving (goal ≤ 1.1)",
            "value": f"{np.median(ratios):.3f} × ({low:.3f} … {high:.3f})",
            "detail": f"{1e3 * statistics.median(with_moves):.2f} / {1e3 * statistics.median(without):.2f} ms, "
            f"{num_pairs} pairs, {int(totals.get('num_experts_moved', 0)):,} experts moved",
        },
        {
            "ranks": num_ranks,
            "what": "longest pause at an activation (goal ≤ 1 step)",
            "value": f"{pause_s / steps:.2f} steps" if steps else "n/a",
            "detail": f"{1e3 * pause_s:.2f} ms of {int(totals.get('num_rounds', 0)):,} rounds; a step takes "
            f"{1e3 * steps:.2f} ms",
        },
    ]


def measure_gain(num_ranks: int, num_pairs: int) -> list[Row]:
    """Pairs of equal stretches in two placements, in random order: is a balanced one faster here?"""
    draw = random.Random(0)
    with LLM.from_config(settings(num_ranks, 8, "eplb.record_window_steps=60", "eplb.trigger=0")) as llm:
        clock = TokenClock(llm)
        _wait_for(lambda: llm.balance.num_windows >= 2)
        window, start = llm.balance.window, np.array(llm.balance.placement)
        assert window is not None
        current = Placement(start, _EXPERTS, num_ranks)
        planned = plan(window.tokens, Topology(1, num_ranks), start.shape[1], current=current).placement
        tables = {"planned": planned.physical_to_logical, "start": start}
        rates: dict[str, list[float]] = {name: [] for name in tables}
        for _ in range(num_pairs):
            for name in draw.sample(sorted(tables), 2):
                _move_to(llm, tables[name])
                begin_s, before = time.monotonic(), len(clock.gaps)
                time.sleep(_PAIR_HALF_S)
                rates[name].append((len(clock.gaps) - before) / (time.monotonic() - begin_s))
        clock.close()
    ratios = np.array(rates["planned"]) / np.array(rates["start"])
    low, high = _bootstrap(ratios)
    balance = [float(balancedness(rank_load(np.array(window.tokens), p)).mean()) for p in (current, planned)]
    return [
        {
            "ranks": num_ranks,
            "what": "tokens per second, planned placement / placement at the start",
            "value": f"{np.median(ratios):.3f} × ({low:.3f} … {high:.3f})",
            "detail": f"{statistics.median(rates['planned']):.0f} / {statistics.median(rates['start']):.0f} tok/s, "
            f"balancedness {balance[1]:.3f} / {balance[0]:.3f}, {num_pairs} pairs",
        }
    ]


def _move_to(llm: LLM, table: np.ndarray) -> None:
    if (np.array(llm.balance.placement) != table).any():
        llm._ranks.call(llm._bridge.command(SetPlacement(0, table.tolist())))
        _wait_for(lambda: bool((np.array(llm.balance.placement) == table).all()))


def _ask_for_moves(llm: LLM, num_ranks: int, draw: np.random.Generator) -> None:
    """Asks for a placement with a few experts in other slots in every layer."""
    table = np.array(llm.balance.placement)
    for row in table:
        for _ in range(4):
            a, b = draw.choice(len(row), 2, replace=False)
            row[[a, b]] = row[[b, a]]
    llm._ranks.call(llm._bridge.command(SetPlacement(0, table.tolist())))


def _wait_until_still(llm: LLM) -> None:
    deadline_s = time.monotonic() + 30
    while llm.balance.state == "moving" and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _step_seconds(llm: LLM) -> float:
    return llm.balance.window.step_time_s if llm.balance.window is not None else 0.0


def _bootstrap(ratios: np.ndarray) -> tuple[float, float]:
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(ratios, (2000, len(ratios))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def measure_shift(num_ranks: int, num_windows: int, picture: Path | None) -> list[Row]:
    """Clients change their domain; what was served beside what the placement at the start would have served."""
    config = settings(num_ranks, 8, "eplb.record_window_steps=60")
    story = run_demo(config, num_windows, lambda domain, point, news: None)
    if picture is not None:
        picture.write_text(timeline_svg(story.timeline()))
    rows = [
        {
            "ranks": num_ranks,
            "what": f"balancedness, {words}",
            "value": f"{served:.3f}",
            "detail": f"none: {kept:.3f}" + ("" if stale is None else f", static (placed for code): {stale:.3f}"),
        }
        for words, served, kept, stale in story.summary()
    ]
    after = story.points[story.num_before_shift :]
    settled = statistics.fmean(point.served for point in after[-4:])
    recovered = next((n for n, point in enumerate(after) if n and point.served >= settled - 0.01), None)
    rows.append(
        {
            "ranks": num_ranks,
            "what": "windows until balanced again after the change (goal ≤ 2)",
            "value": str(recovered),
            "detail": f"{story.num_experts} experts moved in {len(story.moves)} moves, all windows",
        }
    )
    return rows


def measure_loss() -> list[Row]:
    """Every expert is on two of four ranks, with slots to spare; one rank is killed, then another."""
    config = settings(4, 56, "eplb.record_window_steps=60", "engine.step_deadline_s=10")
    rows: list[Row] = []
    with LLM.from_config(config) as llm:
        clock = TokenClock(llm)
        _wait_for(lambda: llm.balance.placement is not None)
        time.sleep(2.0)
        for victim in (3, 2):
            assert llm._ranks.ranks is not None
            llm._ranks.ranks.children[victim].signal(signal.SIGKILL)
            killed_s = time.monotonic()
            live = range(victim)
            needed = 2 if victim > 2 else 1
            _wait_for(lambda live=live, needed=needed: _least_ranks(llm, live) >= needed)  # type: ignore[misc]
            took_s = time.monotonic() - killed_s
            what = "every expert is on two ranks again (goal ≤ 5 s)" if needed == 2 else "the other two serve on"
            rows.append(
                {"ranks": 4, "what": f"rank {victim} killed: {what}", "value": f"{took_s:.2f} s", "detail": "88 slots"}
            )
            time.sleep(1.0)
        num_before = len(clock.gaps)
        time.sleep(1.0)
        alive = len(clock.gaps) > num_before and clock.failure is None
        clock.close()
    rows.append({"ranks": 4, "what": "tokens still come after two kills", "value": str(alive), "detail": ""})
    return rows


def _least_ranks(llm: LLM, live: range) -> int:
    """Returns on how many live ranks the expert with the fewest is; 0 while the placement still names others."""
    table = np.array(llm.balance.placement).reshape(4, 4, -1)  # layers, ranks, slots
    if (table[:, len(live) :] >= 0).any():
        return 0
    return int(min((layer == expert).any(axis=1).sum() for layer in table for expert in range(_EXPERTS)))


def _wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the ranks did not get there")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
