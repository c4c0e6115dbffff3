"""All Prometheus metrics of a front end, read when they are asked for; nothing is counted here. Torch-free."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_serve.server.observe.balance_metrics import BalanceMetrics
from moe_serve.server.observe.peer_metrics import PeerMetrics
from moe_serve.server.observe.rank_metrics import RankMetrics
from moe_serve.server.observe.request_metrics import RequestMetrics
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.ranks.workers import WorkerTable


class WaitMatrix(Collector):
    """How long each rank has waited for each peer: moe_serve_all_to_all_wait_seconds_total{rank, peer}.

    A slow rank shows as a peer that every rank waits for. A rank that waits for all peers has less work than they, or a
    faster machine. A transport that does not measure its waits has no series. The totals restart with a launch, as
    counters may.
    """

    def __init__(self, workers: WorkerTable):
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "moe_serve_all_to_all_wait_seconds",
            "Seconds that a rank has waited for the rows of a peer, after its first polls.",
            labels=("rank", "peer"),
        )
        for view in self._workers:
            for peer, waited_s in enumerate(view.status.waited_s if view.status else ()):
                if peer != view.rank:
                    family.add_metric((str(view.rank), str(peer)), waited_s)
        yield family


class ServingRanks(Collector):
    """Which ranks take requests: moe_serve_rank_serving{rank}, 0 for a rank that is masked, lost or not ready."""

    def __init__(self, workers: WorkerTable):
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "moe_serve_rank_serving", "Whether a rank takes requests: 1, or 0 while it is masked.", labels=("rank",)
        )
        for view in self._workers:
            family.add_metric((str(view.rank),), float(view.serves and self._workers.loss is None))
        yield family


def make_registry(bridge: Bridge, peer: str | None = None) -> CollectorRegistry:
    """Returns the metrics of one front end. peer: also under the names of this engine, one of PEERS"""
    registry = CollectorRegistry()
    registry.register(WaitMatrix(bridge.workers))
    registry.register(ServingRanks(bridge.workers))
    registry.register(RankMetrics(bridge.workers))
    registry.register(RequestMetrics(bridge))
    registry.register(BalanceMetrics(bridge.balance, bridge.workers))
    ProcessCollector(registry=registry)  # process_resident_memory_bytes and its like, of this front end
    if peer is not None:
        registry.register(PeerMetrics(peer, bridge))
    return registry
