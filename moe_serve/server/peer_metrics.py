"""The metrics of the ranks under the names of SGLang or vLLM, for boards and routers made for these. Torch-free.

Only names that these engines export, and that mean the same here. (vLLM 0.33 exports nothing about its balancer.)
"""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from moe_serve.engine.messages import Status
from moe_serve.server.balance import BalanceBook
from moe_serve.server.workers import WorkerTable

PEERS = ("sglang", "vllm")

_GAUGES = {
    "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
}
_FORWARD_MODE = {"prefill": "extend"}  # SGLang's word for a phase, where it is another one
_RANK_LABEL = {"sglang": "dp_rank", "vllm": "engine"}


class PeerMetrics(Collector):
    """Requests, cache and balancedness by the names of one engine. peer: one of PEERS"""

    def __init__(self, peer: str, workers: WorkerTable, book: BalanceBook, model_name: str):
        self._peer = peer
        self._workers = workers
        self._book = book
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", _RANK_LABEL[self._peer])
        running, waiting, used = (
            GaugeMetricFamily(name, text, labels=labels)
            for name, text in zip(
                _GAUGES[self._peer],
                ("Requests that run.", "Requests that wait.", "Share of the cache in use."),
                strict=True,
            )
        )
        for view in self._workers:
            if view.status is not None:
                of_rank = (self._model_name, str(view.rank))
                running.add_metric(of_rank, view.status.num_running)
                waiting.add_metric(of_rank, view.status.num_waiting)
                used.add_metric(of_rank, _share_in_use(view.status))
        yield from (running, waiting, used)
        if self._peer == "sglang":
            yield self._balancedness()

    def _balancedness(self) -> Metric:
        family = SummaryMetricFamily(
            "sglang:eplb_balancedness",
            "Balancedness of MoE in expert parallelism: mean over layers, one observation a window.",
            labels=("model_name", "forward_mode"),
        )
        for phase, (count, total) in sorted(self._book.by_phase.items()):
            labels = (self._model_name, _FORWARD_MODE.get(phase, phase))
            family.add_metric(labels, count_value=count, sum_value=total)
        return family


def _share_in_use(status: Status) -> float:
    return 1 - status.num_free_blocks / status.num_blocks if status.num_blocks else 0.0
