"""The metrics of a front end in Prometheus' text form, read from existing counts when a scraper asks.

All front ends show the same values of the ranks. Totals restart with a rank's process, as counters may. Labels are
layers, ranks and a few fixed words, never experts, and never layers times ranks, so the number of series is fixed.

`PeerMetrics` adds metrics of SGLang or vLLM that mean the same here, under their names. (vLLM 0.33 exports nothing
about its balancer.)
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from moe_serve.config import served_name
from moe_serve.engine.protocol.messages import STEP_BOUNDS_S, Status
from moe_serve.log import num_logged
from moe_serve.server.edge.client_limits import LIMIT_NAMES, ClientTable
from moe_serve.server.ranks.balance import BalanceBook, summary_of
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.ranks.rank_table import RankTable
from moe_serve.server.requests.admission import Degradation
from moe_serve.server.requests.request_stats import Histogram, cumulative

T = TypeVar("T")
Labels = tuple[tuple[str, str], ...]  # (name, value) that all series of a family carry


def gauges(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Returns a family of gauges. values: (values of the labels, value)"""
    family = GaugeMetricFamily(name, text, labels=labels)
    for of_labels, value in values:
        family.add_metric(of_labels, value)
    return family


def counters(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Returns a family of counters, whose series end in _total. values: (values of the labels, value)"""
    family = CounterMetricFamily(name, text, labels=labels)
    for of_labels, value in values:
        family.add_metric(of_labels, value)
    return family


def histograms(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], Sequence[float], Sequence[int], float]],
) -> Metric:
    """Returns a family of histograms. values: (values of the labels, upper bounds, counts, sum)"""
    family = HistogramMetricFamily(name, text, labels=labels)
    for of_labels, bounds, counts, total in values:
        family.add_metric(of_labels, cumulative(bounds, counts), sum_value=total)
    return family


def one_histogram(name: str, text: str, histogram: Histogram, labels: Labels) -> Metric:
    """Returns a family with one histogram."""
    names, of_labels = _split(labels)
    return histograms(name, text, names, [(of_labels, histogram.bounds, histogram.counts, histogram.total)])


def _split(labels: Labels) -> tuple[Sequence[str], Sequence[str]]:
    return [name for name, _ in labels], [value for _, value in labels]


def _of_front_end(bridge: Bridge) -> Labels:
    number = bridge.api_servers.label
    return () if number is None else (("front_end", str(number)),)


def _beginning(told: Iterable[tuple[T, Status]], begin: str) -> Iterator[tuple[T, str, float]]:
    """Yields the counters of ranks whose names begin so: whose it is, how its name goes on, and its value."""
    for rank, status in told:
        for key, count in sorted(status.counters.items()):
            if key.startswith(begin):
                yield rank, key.removeprefix(begin), count


def make_registry(bridge: Bridge, peer: str | None = None) -> CollectorRegistry:
    """Returns the metrics of one front end. peer: one of PEERS, under whose names metrics are shown as well"""
    registry = CollectorRegistry()
    registry.register(RankMetrics(bridge.workers, None if bridge.prefill is None else bridge.prefill.workers))
    registry.register(RequestMetrics(bridge))
    registry.register(BalanceMetrics(bridge.balance, bridge.workers))
    ProcessCollector(registry=registry)  # process_resident_memory_bytes and its like, of this front end
    if peer is not None:
        registry.register(PeerMetrics(peer, bridge))
    return registry


class RequestMetrics(Collector):
    """Metrics of requests. Each front end counts its own; if there are several, a label `front_end` says which."""

    def __init__(self, bridge: Bridge):
        self._bridge, self._own = bridge, _of_front_end(bridge)

    def collect(self) -> Iterator[Metric]:
        bridge, stats, own = self._bridge, self._bridge.book.stats, self._own
        names, values = _split(own)

        def gauge(name: str, text: str, value: float) -> Metric:
            return gauges(name, text, names, [(values, value)])

        def counter(name: str, text: str, value: float) -> Metric:
            return counters(name, text, names, [(values, value)])

        waiting = bridge.book.num_waiting
        yield gauge("moe_serve_requests_running", "Open requests that a rank has.", len(bridge.book) - waiting)
        yield gauge("moe_serve_requests_waiting", "Open requests that wait here for a rank.", waiting)
        ended = [((reason, *values), count) for reason, count in stats.num_ended.items()]
        yield counters(
            "moe_serve_requests_finished",
            "Requests that have ended: by a stop, by their length, cut short or left by their client, refused after "
            "they began, with an error.",
            ("reason", *names),
            ended,
        )
        yield counter("moe_serve_requests_moved", "Times that a request went to another rank, since its own was lost.",
                      bridge.book.counters["num_moved"])  # fmt: skip
        yield counters(
            "moe_serve_requests_routed",
            "Where requests began that prefill ranks could have had: there, or on a decode rank, and why.",
            ("route", *names),
            [((route, *values), count) for route, count in bridge.book.routes.items()],
        )
        yield counters(
            "moe_serve_requests_prefix",
            "Where the beginnings of prompts were when these were sent, as far as the front end knew: in the cache of "
            "their rank (own), in a tier of its host, on another host, there but slower to fetch than to compute "
            "(slow), or nowhere.",
            ("where", *names),
            [((where, *values), count) for where, count in bridge.book.sources.items()],
        )
        yield counter("moe_serve_prompt_tokens", "Prompt tokens of requests that had a first token.",
                      stats.num_prompt_tokens)  # fmt: skip
        yield counter("moe_serve_cached_prompt_tokens", "Of the prompt tokens, those from a prefix cache.",
                      stats.num_cached_tokens)  # fmt: skip
        yield counter("moe_serve_generation_tokens", "Tokens that came out.", stats.num_output_tokens)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From the request, read and checked, to its first token.",
             stats.first_token_s),
            ("inter_token_latency_seconds", "Between two tokens of a request.", stats.between_tokens_s),
            ("request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.",
             stats.per_output_token_s),
            ("e2e_request_latency_seconds", "From the request, read and checked, to its end; without errors.",
             stats.whole_s),
            ("queue_time_seconds", "Until a rank began with the request: here, and on the rank.", stats.queue_s),
            ("request_prompt_tokens", "Prompt tokens of requests that have ended without an error.",
             stats.prompt_tokens),
            ("request_generation_tokens", "Tokens that came out of requests that have ended without an error.",
             stats.output_tokens),
        ):  # fmt: skip
            yield one_histogram(f"moe_serve_{name}", text, histogram, own)
        yield histograms(
            "moe_serve_handover_seconds",
            "From the first token, of a prefill rank, to the next one: until a decode rank had room, and there.",
            ["part", *names],
            [([part, *values], each.bounds, each.counts, each.total) for part, each in stats.handover_s.items()],
        )
        yield counters(
            "moe_serve_log_lines",
            "Lines of this front end's log.",
            ("level", *names),
            [((level, *values), count) for level, count in num_logged().items()],
        )


_RANK_GAUGES: Sequence[tuple[str, str, Callable[[Status], float]]] = (
    ("moe_serve_rank_requests_running", "Requests that the rank computes.", lambda s: s.num_running),
    ("moe_serve_rank_requests_waiting", "Requests that wait on the rank for KV blocks.", lambda s: s.num_waiting),
    ("moe_serve_rank_pending_tokens", "Tokens still to be prefilled.", lambda s: s.pending_tokens),
    ("moe_serve_rank_kv_blocks_used", "KV blocks that requests hold.", lambda s: s.num_blocks - s.num_free_blocks),
    ("moe_serve_rank_kv_blocks_free", "KV blocks that requests may take; prefixes may lie there.",
     lambda s: s.num_free_blocks),
    ("moe_serve_rank_resident_memory_bytes", "Memory that the rank's process has in RAM.", lambda s: s.resident_bytes),
    ("moe_serve_rank_open_fds", "File descriptors that the rank's process has open.", lambda s: s.num_open_files),
)  # fmt: skip
_RANK_COUNTERS = (
    ("moe_serve_rank_steps", "Steps that the ranks agreed on.", "num_steps"),
    ("moe_serve_rank_voided_steps", "Steps that were given up, since a peer was lost.", "num_voided_steps"),
    ("moe_serve_rank_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prompt_tokens"),
    ("moe_serve_rank_prefix_cache_hits", "Prompt tokens found there.", "num_cached_prompt_tokens"),
    ("moe_serve_rank_preemptions", "Requests that lost their KV blocks to older ones.", "num_preempted"),
    ("moe_serve_rank_recomputed_tokens", "Tokens computed again after that.", "num_recomputed_tokens"),
    ("moe_serve_rank_failed_requests", "Requests whose logits were not finite.", "num_failed"),
)
_DRAFTS = "num_drafts_"  # begins the names of counters, which go on with source and outcome
# Of decode steps with drafts and without, as engine/status.py counts them -> what they are.
_DECODES = {
    "moe_serve_rank_decode_steps": "Decode steps of the rank, with drafts of tokens and without; none that compute "
    "prompts, too.",
    "moe_serve_rank_decode_requests": "Requests in these steps, each once a step: what they would have yielded "
    "without drafts.",
    "moe_serve_rank_decode_tokens": "Tokens that these steps have yielded.",
    "moe_serve_rank_decode_experts": "Experts that the rows of these steps asked for, each once for a layer and step: "
    "what was read for them. On a GPU they are not counted, nor where eplb.mode and speculation.mode are both off.",
}
_TOKENS = (("decode", "num_decode_tokens"), ("prefill", "num_prefill_tokens"), ("output", "num_output_tokens"))


class RankMetrics(Collector):
    """What each rank has reported of itself. The first prefill rank is `prefill 0`.

    A slow rank shows as a peer that every rank waits for. A rank that waits for all peers has less work than they, or a
    faster machine. A transport that does not measure its waits has no series of them.
    """

    def __init__(self, workers: RankTable, prefill: RankTable | None):
        """prefill: None: there are no prefill ranks"""
        self._groups = [("", workers), *([] if prefill is None else [("prefill ", prefill)])]

    def collect(self) -> Iterator[Metric]:
        ranks = [(group, f"{group}{view.rank}", view, table) for group, table in self._groups for view in table]
        yield gauges(
            "moe_serve_rank_serving",
            "Whether a rank takes requests: 1, or 0 while it is masked.",
            ("rank",),
            [((rank,), float(view.serves and table.loss is None)) for _, rank, view, table in ranks],
        )
        told = [(rank, view.status) for _, rank, view, _ in ranks if view.status is not None]
        yield counters(
            "moe_serve_all_to_all_wait_seconds",
            "Seconds that a rank has waited for the rows of a peer, after its first polls.",
            ("rank", "peer"),
            [
                ((rank, f"{group}{peer}"), waited_s)
                for group, rank, view, _ in ranks
                if view.status is not None
                for peer, waited_s in enumerate(view.status.waited_s)
                if peer != view.rank
            ],
        )
        for name, text, value in _RANK_GAUGES:
            yield gauges(name, text, ("rank",), [((rank,), value(status)) for rank, status in told])
        for name, text, key in _RANK_COUNTERS:
            found = [((rank,), status.counters.get(key, 0.0)) for rank, status in told]
            yield counters(name, text, ("rank",), found)
        yield counters(
            "moe_serve_rank_computed_tokens",
            "Rows that the rank ran: of decodes, of prefills; and tokens that came out.",
            ("rank", "kind"),
            [((rank, kind), status.counters.get(key, 0.0)) for rank, status in told for kind, key in _TOKENS],
        )
        yield counters(
            "moe_serve_rank_cache_pages",
            "Pages of the KV cache outside its pool: brought up from memory where this rank or a sibling had put them, "
            "from files, from prefill ranks, from another host; given to one; copied down; or not, and why.",
            ("rank", "fate"),
            [((rank, fate), count) for rank, fate, count in _beginning(told, "num_pages_")],
        )
        yield gauges(
            "moe_serve_rank_page_cost",
            "What fetching a page of the KV cache from another host takes, over computing it, as the rank has "
            "measured; none where it asks no other host, or does not know yet.",
            ("rank",),
            [((rank,), status.page_cost) for rank, status in told if status.page_cost is not None],
        )
        yield counters(
            "moe_serve_rank_drafts",
            "Drafts of tokens that steps have verified, by their source: the text of the request itself, that of "
            "another one, the form that its output must have, or a layer for multi-token prediction (mtp); right: the "
            "token was drawn.",
            ("rank", "source", "outcome"),
            [((rank, *of_drafts.split("_")), count) for rank, of_drafts, count in _beginning(told, _DRAFTS)],
        )
        yield gauges(
            "moe_serve_rank_speculation_saved_seconds",
            "Time that drafts have saved the rank, by the times of steps without; negative: they have cost it.",
            ("rank",),
            [
                ((rank,), status.counters["speculation_saved_seconds"])
                for rank, status in told
                if "speculation_saved_seconds" in status.counters
            ],
        )
        for name, text in _DECODES.items():
            what = name.removeprefix("moe_serve_rank_decode_")
            yield counters(
                name,
                text,
                ("rank", "drafts"),
                [
                    ((rank, drafts), status.counters.get(f"num_decodes_{kind}_{what}", 0.0))
                    for rank, status in told
                    for kind, drafts in (("with_drafts", "with"), ("without", "without"))
                ],
            )
        phases = [(rank, *item) for rank, status in told for item in sorted(status.phases.items())]
        yield histograms(
            "moe_serve_rank_step_seconds",
            "Time of a step with rows, from its exchange to its end.",
            ("rank", "phase"),
            [
                ((rank, phase), STEP_BOUNDS_S, times.buckets, times.seconds)
                for rank, phase, times in phases
                if len(times.buckets) == len(STEP_BOUNDS_S) + 1
            ],
        )
        yield counters(
            "moe_serve_rank_step_part_seconds",
            "Time of these steps by part, on the rank's main thread; a part that waits for peers has that wait, and "
            "where halves of a step overlap, what travels meanwhile is not seen. On a GPU parts are not known.",
            ("rank", "phase", "part"),
            [((rank, phase, part), s) for rank, phase, times in phases for part, s in sorted(times.parts.items())],
        )
        yield counters(
            "moe_serve_rank_log_lines",
            "Lines of the rank's log.",
            ("rank", "level"),
            [((rank, level), count) for rank, status in told for level, count in sorted(status.log_lines.items())],
        )


_MODES = ("off", "static", "dynamic")
_STATES = ("off", "watching", "planning", "moving")

# Totals of the leader, see engine/balancing/balancer.py -> what they count.
_BALANCE_TOTALS = {
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
_BALANCE_GAUGES = {
    "longest_plan_seconds": "Seconds of the longest plan.",
    "longest_move_seconds": "Seconds of the longest round.",
    "longest_pause_seconds": "Longest pause at the activation of a round.",
    "predicted_gain_seconds": "What the moves so far had promised for the windows in which they were measured.",
    "realised_gain_seconds": "What the moves so far have gained in these windows; negative: lost.",
}


class BalanceMetrics(Collector):
    """moe_serve_eplb_…: the load of the newest window, the placement, decisions, moves, and ages of reports."""

    def __init__(self, book: BalanceBook, workers: RankTable):
        self._book = book
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._placement()
        yield from self._work()
        yield from self._totals()
        yield self._outcomes(
            "splits",
            "Batches of the exact split, or of the split by time: proven optimal, proven after repair, or not proven.",
        )
        yield self._outcomes(
            "choices_over_capacity",
            "Choices of gates beyond the capacity of an expert: moved to another expert of the token, or dropped.",
        )

    def _load(self) -> Iterator[Metric]:
        window = self._book.window
        balance = window.balancedness if window is not None else []
        layers = self._workers.info.get("moe_layer_ids", [])
        yield _one_label_gauges(
            "balancedness",
            "Mean over max of the load of the ranks, in the newest window.",
            "layer",
            zip(layers, balance, strict=False),
        )
        for name, value in zip(("min", "p50", "mean"), summary_of(balance) if balance else (), strict=False):
            yield _gauge(f"balancedness_{name}", f"Balancedness of the newest window: {name} over layers.", value)
        if window is not None:
            yield _gauge("window_step_seconds", "Mean time of a step in the newest window.", window.step_time_s)
        yield _one_label_counters(
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
        yield _one_label_gauges("mode", "eplb.mode: 1 for the one in use.", "mode", _one_of(_MODES, book.mode))
        yield _one_label_gauges(
            "state", "What the balancer does: 1 for its state.", "state", _one_of(_STATES, book.state)
        )
        yield _gauge(
            "alarm", "1: the balancer has switched itself off, /eplb/status says why.", float(bool(book.alarm))
        )
        yield _one_label_counters("decisions", "Decisions of the balancer.", "kind", sorted(book.decisions.items()))
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
        for name, text in _BALANCE_TOTALS.items():
            if name in totals:
                yield CounterMetricFamily(f"moe_serve_eplb_{name.removeprefix('num_')}", text, value=totals[name])
        for name, text in _BALANCE_GAUGES.items():
            if name in totals:
                yield _gauge(name, text, totals[name])

    def _outcomes(self, name: str, text: str) -> Metric:
        """Returns what ranks count of something, by its outcome: each of their counters that begins with its first
        word, as num_splits_... (engine/status.py)."""
        begin = f"num_{name.partition('_')[0]}_"
        told = [(str(view.rank), view.status) for view in self._workers if view.status is not None]
        found = [((rank, outcome), count) for rank, outcome, count in _beginning(told, begin)]
        return counters(f"moe_serve_eplb_{name}", text, ("rank", "outcome"), found)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"moe_serve_eplb_{name}", text, value=value)


def _one_label_gauges(name: str, text: str, label: str, values: Iterable[tuple[object, float]]) -> Metric:
    return gauges(f"moe_serve_eplb_{name}", text, (label,), (((str(key),), value) for key, value in values))


def _one_label_counters(name: str, text: str, label: str, values: Iterable[tuple[object, float]]) -> Metric:
    return counters(f"moe_serve_eplb_{name}", text, (label,), (((str(key),), value) for key, value in values))


def _one_of(names: Iterable[str], current: str) -> list[tuple[str, float]]:
    return [(name, float(name == current)) for name in names]


class AdmissionMetrics(Collector):
    """moe_serve_requests_refused_total{reason}, moe_serve_degraded_calls_total{step}, moe_serve_degradation_steps.

    Each front end counts for itself: where there are several, a label `front_end` says which.
    """

    def __init__(self, bridge: Bridge, clients: ClientTable, degradation: Degradation):
        self._bridge = bridge
        self._clients = clients
        self._degradation = degradation

    def collect(self) -> Iterator[Metric]:
        names, own = _split(_of_front_end(self._bridge))
        refused = {"queue": self._bridge.book.counters["num_refused"]}
        refused |= {name: self._clients.refused[name] for name in LIMIT_NAMES}
        yield counters(
            "moe_serve_requests_refused",
            "Requests that were refused: the queue was full, or a client had reached this limit of its own.",
            ("reason", *names),
            [((reason, *own), count) for reason, count in refused.items()],
        )
        yield counters(
            "moe_serve_degraded_calls",
            "Calls that a step of server.degrade has changed or refused.",
            ("step", *names),
            [((step, *own), count) for step, count in self._degradation.counts.items()],
        )
        active = self._degradation.num_active(self._bridge.book.queue.share)
        text = "How many steps of server.degrade are taken now."
        yield gauges("moe_serve_degradation_steps", text, names, [(own, active)])


PEERS = ("sglang", "vllm")

_OF_RANKS = {
    "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
}
_QUEUE_NAME = {"sglang": "sglang:queue_time_seconds", "vllm": "vllm:request_queue_time_seconds"}
_FORWARD_MODE = {"prefill": "extend"}  # SGLang's word for a phase, where it is another one
_RANK_LABEL = {"sglang": "dp_rank", "vllm": "engine"}


class PeerMetrics(Collector):
    """Requests, tokens, times, cache and balancedness by the names of one engine. peer: one of PEERS

    Counts of the front end have no label of a rank: they are about requests, which may move.
    """

    def __init__(self, peer: str, bridge: Bridge):
        self._peer = peer
        self._bridge = bridge
        self._model = (("model_name", served_name(bridge.config.model)),)
        self._own: Labels = (*self._model, *_of_front_end(bridge))

    def collect(self) -> Iterator[Metric]:
        yield from self._ranks()
        yield from self._both()
        yield from self._sglang() if self._peer == "sglang" else self._vllm()

    def _ranks(self) -> Iterator[Metric]:
        labels = ("model_name", _RANK_LABEL[self._peer])
        told = self._told()
        running, waiting, used = _OF_RANKS[self._peer]
        yield gauges(running, "Requests that run.", labels, [(of, status.num_running) for of, status in told])
        yield gauges(waiting, "Requests that wait.", labels, [(of, status.num_waiting) for of, status in told])
        yield gauges(used, "Share of the cache in use.", labels, [(of, _share_in_use(status)) for of, status in told])

    def _told(self) -> list[tuple[tuple[str, str], Status]]:
        views, model = self._bridge.workers, self._model[0][1]
        return [((model, str(view.rank)), view.status) for view in views if view.status is not None]

    def _both(self) -> Iterator[Metric]:
        stats, peer = self._bridge.book.stats, self._peer
        yield self._count(f"{peer}:prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens)
        yield self._count(f"{peer}:generation_tokens", "Tokens that came out.", stats.num_output_tokens)
        for name, text, histogram in (
            (f"{peer}:time_to_first_token_seconds", "Time to the first token.", stats.first_token_s),
            (f"{peer}:inter_token_latency_seconds", "Time between two tokens.", stats.between_tokens_s),
            (f"{peer}:request_time_per_output_token_seconds", "Mean of a request.", stats.per_output_token_s),
            (f"{peer}:e2e_request_latency_seconds", "Time to the end.", stats.whole_s),
            (_QUEUE_NAME[peer], "Time until a rank began.", stats.queue_s),
        ):
            yield one_histogram(name, text, histogram, self._own)

    def _sglang(self) -> Iterator[Metric]:
        stats = self._bridge.book.stats
        labels, told = ("model_name", "dp_rank"), self._told()
        drafting = [
            (of, status, *_drafts_of(status)) for of, status in told if status.counters.get("num_draft_proposals")
        ]
        yield gauges(
            "sglang:spec_accept_length",
            "Tokens that a step with drafts yields of a request, mean since the start.",
            labels,
            [(of, 1 + right / status.counters["num_draft_proposals"]) for of, status, _, right in drafting],
        )
        yield gauges(
            "sglang:spec_accept_rate",
            "Share of the drafts that were drawn, since the start.",
            labels,
            [(of, right / verified) for of, _, verified, right in drafting],
        )
        yield self._count("sglang:cached_tokens", "Prompt tokens from a prefix cache.", stats.num_cached_tokens)
        yield self._count("sglang:num_requests", "Requests that have ended.", sum(stats.num_ended.values()))
        yield self._count("sglang:num_aborted_requests", "Requests cut short.", stats.num_ended["abort"])
        family = SummaryMetricFamily(
            "sglang:eplb_balancedness",
            "Balancedness of MoE in expert parallelism: mean over layers, one observation a window.",
            labels=("model_name", "forward_mode"),
        )
        for phase, (count, total) in sorted(self._bridge.balance.by_phase.items()):
            labels = (self._model[0][1], _FORWARD_MODE.get(phase, phase))
            family.add_metric(labels, count_value=count, sum_value=total)
        yield family

    def _vllm(self) -> Iterator[Metric]:
        stats, told = self._bridge.book.stats, self._told()
        for name, text, key in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", "num_prompt_tokens"),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", "num_cached_prompt_tokens"),
            ("vllm:num_preemptions", "Requests preempted.", "num_preempted"),
            (
                "vllm:spec_decode_num_drafts",
                "Requests whose drafts a step has verified, each once a step.",
                "num_draft_proposals",
            ),
        ):
            found = [(of, status.counters.get(key, 0.0)) for of, status in told]
            yield counters(name, text, ("model_name", "engine"), found)
        for name, text, index in (
            ("vllm:spec_decode_num_draft_tokens", "Drafts verified.", 0),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts drawn.", 1),
        ):
            drafts = [(of, _drafts_of(status)[index]) for of, status in told]
            yield counters(name, text, ("model_name", "engine"), drafts)
        yield counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts drawn, by their place among those that a step has verified of a request.",
            ("model_name", "engine", "position"),
            [((*of, place), count) for of, place, count in _beginning(told, "num_accepted_at_")],
        )
        names, values = _split(self._own)
        ended = [((*values, reason), count) for reason, count in stats.num_ended.items()]
        yield counters("vllm:request_success", "Requests that have ended.", (*names, "finished_reason"), ended)
        yield one_histogram("vllm:request_prompt_tokens", "Of a request.", stats.prompt_tokens, self._own)
        yield one_histogram("vllm:request_generation_tokens", "Of a request.", stats.output_tokens, self._own)

    def _count(self, name: str, text: str, value: float) -> Metric:
        names, values = _split(self._own)
        return counters(name, text, names, [(values, value)])


def _drafts_of(status: Status) -> tuple[float, float]:
    """Returns how many drafts a rank has verified, and how many of them were drawn."""
    found = list(_beginning([((), status)], _DRAFTS))
    return sum(count for _, _, count in found), sum(count for _, which, count in found if which.endswith("_right"))


def _share_in_use(status: Status) -> float:
    return 1 - status.num_free_blocks / status.num_blocks if status.num_blocks else 0.0
