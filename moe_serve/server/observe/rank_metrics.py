"""The ranks as Prometheus metrics, read from what each of them reported last, about a second ago. Torch-free.

Every front end shows the same. Totals restart with a rank's process, as counters may. Series: a fixed number for each
rank.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moe_serve.engine.protocol.messages import STEP_BOUNDS_S, Status
from moe_serve.server.observe.families import counters, gauges, histograms
from moe_serve.server.ranks.workers import WorkerTable

_GAUGES: Sequence[tuple[str, str, Callable[[Status], float]]] = (
    ("moe_serve_rank_requests_running", "Requests that the rank computes.", lambda s: s.num_running),
    ("moe_serve_rank_requests_waiting", "Requests that wait on the rank for KV blocks.", lambda s: s.num_waiting),
    ("moe_serve_rank_pending_tokens", "Tokens still to be prefilled.", lambda s: s.pending_tokens),
    ("moe_serve_rank_kv_blocks_used", "KV blocks that requests hold.", lambda s: s.num_blocks - s.num_free_blocks),
    ("moe_serve_rank_kv_blocks_free", "KV blocks that requests may take; prefixes may lie there.",
     lambda s: s.num_free_blocks),
    ("moe_serve_rank_resident_memory_bytes", "Memory that the rank's process has in RAM.", lambda s: s.resident_bytes),
    ("moe_serve_rank_open_fds", "File descriptors that the rank's process has open.", lambda s: s.num_open_files),
)  # fmt: skip
_COUNTERS = (
    ("moe_serve_rank_steps", "Steps that the ranks agreed on.", "num_steps"),
    ("moe_serve_rank_voided_steps", "Steps that were given up, since a peer was lost.", "num_voided_steps"),
    ("moe_serve_rank_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prompt_tokens"),
    ("moe_serve_rank_prefix_cache_hits", "Prompt tokens found there.", "num_cached_prompt_tokens"),
    ("moe_serve_rank_preemptions", "Requests that lost their KV blocks to older ones.", "num_preempted"),
    ("moe_serve_rank_recomputed_tokens", "Tokens computed again after that.", "num_recomputed_tokens"),
    ("moe_serve_rank_failed_requests", "Requests whose logits were not finite.", "num_failed"),
)
_TOKENS = (("decode", "num_decode_tokens"), ("prefill", "num_prefill_tokens"), ("output", "num_output_tokens"))


class RankMetrics(Collector):
    """What each rank has told of itself."""

    def __init__(self, workers: WorkerTable):
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        told = [(str(view.rank), view.status) for view in self._workers if view.status is not None]
        for name, text, value in _GAUGES:
            yield gauges(name, text, ("rank",), [((rank,), value(status)) for rank, status in told])
        for name, text, key in _COUNTERS:
            found = [((rank,), status.counters.get(key, 0.0)) for rank, status in told]
            yield counters(name, text, ("rank",), found)
        yield counters(
            "moe_serve_rank_computed_tokens",
            "Rows that the rank ran: of decodes, of prefills; and tokens that came out.",
            ("rank", "kind"),
            [((rank, kind), status.counters.get(key, 0.0)) for rank, status in told for kind, key in _TOKENS],
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
            "where rounds overlap, what travels meanwhile is not seen. On a GPU parts are not known.",
            ("rank", "phase", "part"),
            [((rank, phase, part), s) for rank, phase, times in phases for part, s in sorted(times.parts.items())],
        )
        yield counters(
            "moe_serve_rank_log_lines",
            "Lines of the rank's log.",
            ("rank", "level"),
            [((rank, level), count) for rank, status in told for level, count in sorted(status.log_lines.items())],
        )
