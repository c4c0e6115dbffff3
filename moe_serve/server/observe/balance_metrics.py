"""The Prometheus metrics of the balancer, read from the `BalanceBook`. Torch-free.

Labels are layers, ranks and a few fixed words; never experts, and never layers times ranks.
"""

import time
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_serve.server.ranks.balance import BalanceBook, summary_of
from moe_serve.server.ranks.workers import WorkerTable

_OUTCOMES = ("proven", "repaired", "unproven")
_MODES = ("off", "static", "dynamic")
_STATES = ("off", "watching", "planning", "moving")

# Totals of the leader, see engine/balancing/balancer.py -> what they count.
_TOTALS = {
    "num_plans": "Plans that were asked for.",
    "num_failures": "Plans and moves that failed; the placement in use stayed.",
    "num_rounds": "Rounds of moves that went live.",
    "num_experts_moved": "Experts that were copied into a slot.",
    "num_bytes_moved": "Bytes of expert weights that were copied.",
    "plan_seconds": "Seconds that the planner has planned.",
    "move_seconds": "Seconds from the start of a round until it was live.",
    "pause_seconds": "Seconds that steps were held up by the activation of rounds.",
}
# Largest values, and sums that may go down.
_GAUGES = {
    "longest_plan_seconds": "Seconds of the longest plan.",
    "longest_move_seconds": "Seconds of the longest round.",
    "longest_pause_seconds": "Longest pause at the activation of a round.",
    "predicted_gain_seconds": "What the moves so far had promised for the windows in which they were measured.",
    "realised_gain_seconds": "What the moves so far have gained in these windows; negative: lost.",
}


class BalanceMetrics(Collector):
    """moe_serve_eplb_…: the load of the newest window, the placement, decisions, moves, and whether all that works."""

    def __init__(self, book: BalanceBook, workers: WorkerTable):
        self._book = book
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._placement()
        yield from self._work()
        yield from self._totals()
        yield self._splits()

    def _load(self) -> Iterator[Metric]:
        window = self._book.window
        balance = window.balancedness if window is not None else []
        layers = self._workers.info.get("moe_layer_ids", [])
        yield _gauges(
            "balancedness",
            "Mean over max of the load of the ranks, in the newest window.",
            "layer",
            zip(layers, balance, strict=False),
        )
        for name, value in zip(("min", "p50", "mean"), summary_of(balance) if balance else (), strict=False):
            yield _gauge(f"balancedness_{name}", f"Balancedness of the newest window: {name} over layers.", value)
        if window is not None:
            yield _gauge("window_step_seconds", "Mean time of a step in the newest window.", window.step_time_s)
        yield _counters(
            "rank_tokens", "Tokens computed by the experts of a rank.", "rank", enumerate(self._book.rank_tokens)
        )

    def _placement(self) -> Iterator[Metric]:
        book, now_s = self._book, time.time()
        yield _gauge("placement_version", "Version of the placement in use.", book.version)
        for name, since_s, text in (
            ("placement_age_seconds", book.version_since_s, "Age of the placement in use."),
            ("report_age_seconds", book.heard_s, "Age of the leader's newest report."),
            ("progress_age_seconds", book.progress_s, "Seconds since a window, a decision or a new placement."),
        ):
            if since_s is not None:
                yield _gauge(name, text, max(now_s - since_s, 0.0))

    def _work(self) -> Iterator[Metric]:
        book = self._book
        yield _gauges("mode", "eplb.mode: 1 for the one in use.", "mode", _one_of(_MODES, book.mode))
        yield _gauges("state", "What the balancer does: 1 for its state.", "state", _one_of(_STATES, book.state))
        yield _gauge(
            "alarm", "1: the balancer has switched itself off, /eplb/status says why.", float(bool(book.alarm))
        )
        yield _counters("decisions", "Decisions of the balancer.", "kind", sorted(book.decisions.items()))
        move = book.moves.last_done
        if move is None:
            return
        decision = move.decision
        yield _gauge("last_move_predicted_gain_seconds", "Newest move: gain over the horizon.", decision.gain_s)
        yield _gauge("last_move_predicted_cost_seconds", "Newest move: cost.", decision.cost_s)
        if move.before is not None and move.after is not None:
            gain = move.after - move.before
            yield _gauge("last_move_balancedness_gain", "Newest move: mean balancedness after less before.", gain)

    def _totals(self) -> Iterator[Metric]:
        totals = self._book.totals
        for name, text in _TOTALS.items():
            if name in totals:
                yield CounterMetricFamily(f"moe_serve_eplb_{name.removeprefix('num_')}", text, value=totals[name])
        for name, text in _GAUGES.items():
            if name in totals:
                yield _gauge(name, text, totals[name])

    def _splits(self) -> Metric:
        family = CounterMetricFamily(
            "moe_serve_eplb_splits",
            "Batches of the exact split: proven optimal, proven after repair, or not proven.",
            labels=("rank", "outcome"),
        )
        for view in self._workers:
            counters = view.status.counters if view.status is not None else {}
            for outcome in _OUTCOMES:
                if f"num_splits_{outcome}" in counters:
                    family.add_metric((str(view.rank), outcome), counters[f"num_splits_{outcome}"])
        return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"moe_serve_eplb_{name}", text, value=value)


def _gauges(name: str, text: str, label: str, values: Iterable[tuple[object, float]]) -> Metric:
    family = GaugeMetricFamily(f"moe_serve_eplb_{name}", text, labels=(label,))
    for key, value in values:
        family.add_metric((str(key),), value)
    return family


def _counters(name: str, text: str, label: str, values: Iterable[tuple[object, float]]) -> Metric:
    family = CounterMetricFamily(f"moe_serve_eplb_{name}", text, labels=(label,))
    for key, value in values:
        family.add_metric((str(key),), value)
    return family


def _one_of(names: Iterable[str], current: str) -> list[tuple[str, float]]:
    return [(name, float(name == current)) for name in names]
