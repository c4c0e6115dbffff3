"""What Prometheus sees of the ranks: read from their last status, nothing is counted here. Torch-free."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_serve.server.workers import WorkerTable


class WaitMatrix(Collector):
    """For whom each rank has waited: moe_serve_all_to_all_wait_seconds_total{rank, peer}.

    Whoever is late for all shows as a column, a peer with much on every rank; a rank that waits for everybody has less
    to do than they, or a faster machine. A transport that does not measure its waits has no series. The totals begin
    anew with an epoch, as counters may.
    """

    def __init__(self, workers: WorkerTable):
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "moe_serve_all_to_all_wait_seconds",
            "Seconds that a rank has waited for the rows of a peer, beyond its first looks.",
            labels=("rank", "peer"),
        )
        for view in self._workers:
            for peer, waited_s in enumerate(view.status.waited_s if view.status else ()):
                if peer != view.rank:
                    family.add_metric((str(view.rank), str(peer)), waited_s)
        yield family


def make_registry(workers: WorkerTable) -> CollectorRegistry:
    """Returns what `/metrics` of one front end shows."""
    registry = CollectorRegistry()
    registry.register(WaitMatrix(workers))
    return registry
