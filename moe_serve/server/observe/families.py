"""Short ways to make Prometheus' metric families. Torch-free."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from moe_serve.server.requests.histogram import Histogram, cumulative

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


def one_histogram(name: str, text: str, histogram: Histogram, labels: Labels = ()) -> Metric:
    """Returns a family with one histogram."""
    of_labels = [value for _, value in labels]
    values = of_labels, histogram.bounds, histogram.counts, histogram.total
    return histograms(name, text, [label for label, _ in labels], [values])
