"""The requests of a front end as Prometheus metrics: `RequestStats`, and what is open now. Torch-free."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moe_serve.log import num_logged
from moe_serve.server.observe.families import Labels, counters, gauges, one_histogram
from moe_serve.server.ranks.bridge import Bridge


class RequestMetrics(Collector):
    """Each front end counts for itself: where there are several, a label `front_end` says which."""

    def __init__(self, bridge: Bridge):
        self._bridge = bridge
        number = bridge.front_end
        self._own: Labels = () if number is None else (("front_end", str(number)),)

    def collect(self) -> Iterator[Metric]:
        bridge, stats, own = self._bridge, self._bridge.book.stats, self._own
        names, values = [name for name, _ in own], [value for _, value in own]

        def gauge(name: str, text: str, value: float) -> Metric:
            return gauges(name, text, names, [(values, value)])

        def counter(name: str, text: str, value: float) -> Metric:
            return counters(name, text, names, [(values, value)])

        waiting = bridge.book.num_waiting
        yield gauge("moe_serve_requests_running", "Open requests that a rank has.", bridge.num_open - waiting)
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
                      bridge.counters["num_moved"])  # fmt: skip
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
        yield counters(
            "moe_serve_log_lines",
            "Lines of this front end's log.",
            ("level", *names),
            [((level, *values), count) for level, count in num_logged().items()],
        )
