"""Our metrics under the names of SGLang or vLLM, for boards and routers made for these. Torch-free.

Only names that these engines export, and that mean the same here. (vLLM 0.33 exports nothing about its balancer.)
"""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from moe_serve.config import served_name
from moe_serve.engine.protocol.messages import Status
from moe_serve.server.observe.families import Labels, counters, gauges, one_histogram
from moe_serve.server.ranks.bridge import Bridge

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

    What the front end counts has no label of a rank, as it is about requests, which may move.
    """

    def __init__(self, peer: str, bridge: Bridge):
        self._peer = peer
        self._bridge = bridge
        self._model = (("model_name", served_name(bridge.config.model)),)
        number = bridge.front_end
        self._own: Labels = (*self._model, *(() if number is None else (("front_end", str(number)),)))

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
        ):
            found = [(of, status.counters.get(key, 0.0)) for of, status in told]
            yield counters(name, text, ("model_name", "engine"), found)
        names, values = self._split(self._own)
        ended = [((*values, reason), count) for reason, count in stats.num_ended.items()]
        yield counters("vllm:request_success", "Requests that have ended.", (*names, "finished_reason"), ended)
        yield one_histogram("vllm:request_prompt_tokens", "Of a request.", stats.prompt_tokens, self._own)
        yield one_histogram("vllm:request_generation_tokens", "Of a request.", stats.output_tokens, self._own)

    def _count(self, name: str, text: str, value: float) -> Metric:
        names, values = self._split(self._own)
        return counters(name, text, names, [(values, value)])

    @staticmethod
    def _split(labels: Labels) -> tuple[Sequence[str], Sequence[str]]:
        return [name for name, _ in labels], [value for _, value in labels]


def _share_in_use(status: Status) -> float:
    return 1 - status.num_free_blocks / status.num_blocks if status.num_blocks else 0.0
