"""Our histogram says what Prometheus' own would."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from moe_serve.server.observe.metrics import one_histogram
from moe_serve.server.requests.request_stats import Histogram

VALUES = {
    "none": [],
    "one": [0.3],
    "on the bounds": [0.1, 0.5, 1.0],
    "outside": [-1.0, 0.0, 1e9, float("inf")],
    "many": [i / 97 for i in range(300)],
}


@pytest.mark.parametrize("name", VALUES)
def test_its_buckets_are_those_of_prometheus(name: str) -> None:
    bounds, registry = (0.1, 0.5, 1, 2.5), CollectorRegistry()
    reference, ours = Reference("x", "text", buckets=bounds, registry=registry), Histogram(bounds)
    for value in VALUES[name]:
        reference.observe(value)
        ours.observe(value)
    (expected,) = registry.collect()
    found = {(s.name, s.labels.get("le")): s.value for s in one_histogram("x", "text", ours).samples}
    wanted = {(s.name, s.labels.get("le")): s.value for s in expected.samples if not s.name.endswith("_created")}
    assert found == pytest.approx(wanted)


def test_several_at_once_are_several() -> None:
    once, several = Histogram([1, 2]), Histogram([1, 2])
    for _ in range(3):
        once.observe(1.5)
    several.observe(1.5, 3)
    assert (once.counts, once.total) == (several.counts, several.total)
