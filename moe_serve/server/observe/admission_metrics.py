"""What the front end refuses and gives up, as Prometheus metrics; nothing is counted here. Torch-free."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_serve.server.edge.client_limits import LIMIT_NAMES, ClientTable
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.degrade import Degradation


class AdmissionMetrics(Collector):
    """moe_serve_requests_refused_total{reason}, moe_serve_degraded_calls_total{step}, moe_serve_degradation_steps.

    Each front end counts for itself: where there are several, a label `front_end` says which.
    """

    def __init__(self, bridge: Bridge, clients: ClientTable, degradation: Degradation):
        self._bridge = bridge
        self._clients = clients
        self._degradation = degradation

    def collect(self) -> Iterator[Metric]:
        names, own = ((), ()) if self._bridge.front_end is None else (("front_end",), (str(self._bridge.front_end),))
        refused = CounterMetricFamily(
            "moe_serve_requests_refused",
            "Requests that were refused: the queue was full, or a client had reached this limit of its own.",
            labels=("reason", *names),
        )
        refused.add_metric(("queue", *own), self._bridge.counters["num_refused"])
        for name in LIMIT_NAMES:
            refused.add_metric((name, *own), self._clients.refused[name])
        yield refused
        degraded = CounterMetricFamily(
            "moe_serve_degraded_calls",
            "Calls that a step of server.degrade has changed or refused.",
            labels=("step", *names),
        )
        for step, count in self._degradation.counts.items():
            degraded.add_metric((step, *own), count)
        yield degraded
        active = GaugeMetricFamily(
            "moe_serve_degradation_steps", "How many steps of server.degrade are taken now.", labels=names
        )
        active.add_metric(own, self._degradation.num_active(self._bridge.queue.share))
        yield active
