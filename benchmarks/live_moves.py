"""Latency and gain rows of benchmarks/live_balancing.py: pairs of stretches that differ in one thing only."""

import random
import statistics
import time
from collections.abc import Mapping

import numpy as np

from benchmarks.live_clients import NUM_EXPERTS, Row, TokenClock, settings, swapped, wait_for
from moe_serve.engine.protocol.messages import SetPlacement
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import plan
from moe_serve.launcher.llm import LLM
from moe_serve.topology import Topology

PAIR_HALF_S = 1.0


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
                    _ask_for_moves(llm, table_draw)
                time.sleep(max(0.0, PAIR_HALF_S - (time.monotonic() - begin_s)))
                halves.append((moves, begin_s, time.monotonic()))
                _wait_until_still(llm)
        clock.close()
        totals = llm.balance.totals
        steps = _step_seconds(llm)
    return rows_of_latency(clock.gaps, halves, totals, steps)


def rows_of_latency(
    token_gaps: list[tuple[float, float]],
    halves: list[tuple[bool, float, float]],
    totals: Mapping[str, float],
    steps: float,
) -> list[Row]:
    """Returns the rows of pairs of stretches.

    token_gaps: (when, seconds since the token before);  halves: (with moves, begin, end);  totals: of the balancer
    steps: seconds of a step, 0: not known
    """
    gaps, num_pairs = np.array(token_gaps), len(halves) // 2

    def p99(begin_s: float, end_s: float) -> float:
        return float(np.quantile(gaps[(gaps[:, 0] >= begin_s) & (gaps[:, 0] < end_s), 1], 0.99))

    with_moves = [p99(begin, end) for moves, begin, end in halves if moves]
    without = [p99(begin, end) for moves, begin, end in halves if not moves]
    ratios = np.array(with_moves) / np.array(without)
    low, high = _bootstrap(ratios)
    pause_s = totals.get("longest_pause_seconds", 0.0)
    return [
        {
            "what": "p99 between tokens, experts moving / not moving (goal ≤ 1.1)",
            "value": f"{np.median(ratios):.3f} × ({low:.3f} … {high:.3f})",
            "detail": f"{1e3 * statistics.median(with_moves):.2f} / {1e3 * statistics.median(without):.2f} ms, "
            f"{num_pairs} pairs, {int(totals.get('num_experts_moved', 0)):,} experts moved",
        },
        {
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
        wait_for(lambda: llm.balance.num_windows >= 2)
        window, start = llm.balance.window, np.array(llm.balance.placement)
        assert window is not None
        current = Placement(start, NUM_EXPERTS, num_ranks)
        planned = plan(window.tokens, Topology(1, num_ranks), start.shape[1], current=current).placement
        tables = {"planned": planned.physical_to_logical, "start": start}
        rates: dict[str, list[float]] = {name: [] for name in tables}
        for _ in range(num_pairs):
            for name in draw.sample(sorted(tables), 2):
                _move_to(llm, tables[name])
                begin_s, before = time.monotonic(), len(clock.gaps)
                time.sleep(PAIR_HALF_S)
                rates[name].append((len(clock.gaps) - before) / (time.monotonic() - begin_s))
        clock.close()
    ratios = np.array(rates["planned"]) / np.array(rates["start"])
    low, high = _bootstrap(ratios)
    balance = [float(balancedness(rank_load(np.array(window.tokens), p)).mean()) for p in (current, planned)]
    return [
        {
            "what": "tokens per second, planned placement / placement at the start",
            "value": f"{np.median(ratios):.3f} × ({low:.3f} … {high:.3f})",
            "detail": f"{statistics.median(rates['planned']):.0f} / {statistics.median(rates['start']):.0f} tok/s, "
            f"balancedness {balance[1]:.3f} / {balance[0]:.3f}, {num_pairs} pairs",
        }
    ]


def _move_to(llm: LLM, table: np.ndarray) -> None:
    if (np.array(llm.balance.placement) != table).any():
        llm._ranks.call(llm._bridge.command(SetPlacement(0, table.tolist())))
        wait_for(lambda: bool((np.array(llm.balance.placement) == table).all()))


def _ask_for_moves(llm: LLM, draw: np.random.Generator) -> None:
    """Asks for a placement with a few experts in other slots in every layer."""
    table = swapped(np.array(llm.balance.placement), draw)
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
