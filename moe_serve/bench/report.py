"""Numbers of a run: latencies, throughput, goodput, errors, and how well the load was kept. Keys as vLLM's results."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_serve.bench.client import Outcome
from moe_serve.bench.drafts import Drafts
from moe_serve.bench.run import Ran

PERCENTILES = (50, 90, 99)
BEHIND_S = 0.02  # p99 of what requests were sent late, from where on an open loop was not the one that was asked for
BUSY = 0.8  # share of a core that the tool took, from where on its own times are doubtful


@dataclass(frozen=True)
class Spread:
    """The values of one kind of latency, in milliseconds, sorted."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        return float(np.mean(self.values)) if self.values else None

    def percentile(self, percent: int) -> float | None:
        return float(np.percentile(self.values, percent)) if self.values else None


@dataclass(frozen=True)
class Report:
    """The results of a run. Latencies, tokens and rates are those of complete requests; seconds: of the whole run."""

    seconds: float
    outcomes: Sequence[Outcome]
    latencies: dict[str, Spread]  # ttft, tpot, itl, e2el
    routes: dict[str, dict[str, Spread]]  # the same of requests that began on one route; {} where servers say none
    errors: dict[str, int]
    examples: dict[str, str]  # of each kind of error, what the server said
    num_complete: int
    num_prompt: int
    num_output: int
    num_cached: int | None  # None where the server does not say it
    num_good: int | None  # None without an SLO
    late: Spread
    cpu_share: float
    longest_retry_after_s: float | None
    drafts: Drafts | None  # None where the server does not say that it makes some
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns all of it, with a row for each request."""
        found: dict[str, Any] = {
            "duration": self.seconds,
            "completed": self.num_complete,
            "failed": sum(self.errors.values()),
            "errors": self.errors,
            "error_examples": self.examples,
            "longest_retry_after_s": self.longest_retry_after_s,
            "total_input_tokens": self.num_prompt,
            "total_cached_tokens": self.num_cached,
            "total_output_tokens": self.num_output,
            "request_throughput": self.rate(self.num_complete),
            "request_goodput": None if self.num_good is None else self.rate(self.num_good),
            "output_throughput": self.rate(self.num_output),
            "total_token_throughput": self.rate(self.num_prompt + self.num_output),
            "client_cpu_share": self.cpu_share,
            "warnings": self.warnings,
        }
        found |= _numbers((self.latencies | {"sent_late": self.late}).items())
        found["routes"] = {
            route: {"completed": len(latencies["e2el"].values)} | _numbers(latencies.items())
            for route, latencies in self.routes.items()
        }
        if self.drafts is not None:
            found["drafts"] = self.drafts.as_json()
        found["requests"] = [_row(outcome) for outcome in self.outcomes]
        return found

    def rate(self, count: int) -> float:
        """Returns so many per second of the run."""
        return count / self.seconds if self.seconds else 0.0


def report_of(ran: Ran, slo: Mapping[str, float], is_paced: bool, drafts: Drafts | None = None) -> Report:
    """Returns the numbers of a run. is_paced: requests were due at times of a finite rate"""
    complete = [outcome for outcome in ran.outcomes if outcome.error is None]
    failed = [outcome for outcome in ran.outcomes if outcome.error is not None]
    cached = [outcome.num_cached for outcome in complete if outcome.num_cached is not None]
    retries = [outcome.retry_after_s for outcome in failed if outcome.retry_after_s is not None]
    routes = sorted({outcome.route for outcome in complete if outcome.route is not None})
    late = _spread([outcome.sent_s - outcome.due_s for outcome in ran.outcomes])
    cpu_share = ran.cpu_s / ran.seconds if ran.seconds else 0.0
    return Report(
        seconds=ran.seconds,
        outcomes=ran.outcomes,
        latencies=_latencies(complete),
        routes={route: _latencies([each for each in complete if each.route == route]) for route in routes},
        errors=dict(Counter(str(outcome.error) for outcome in failed).most_common()),
        examples={str(outcome.error): outcome.detail for outcome in reversed(failed)},
        num_complete=len(complete),
        num_prompt=sum(outcome.num_prompt or 0 for outcome in complete),
        num_output=sum(outcome.num_output for outcome in complete),
        num_cached=sum(cached) if cached else None,
        num_good=sum(is_good(outcome, slo) for outcome in complete) if slo else None,
        late=late,
        cpu_share=cpu_share,
        longest_retry_after_s=max(retries, default=None),
        drafts=drafts,
        warnings=tuple(_warnings(ran, complete, late, cpu_share, is_paced)),
    )


def _latencies(complete: Sequence[Outcome]) -> dict[str, Spread]:
    gaps = [b - a for outcome in complete for a, b in zip(outcome.chunk_s, outcome.chunk_s[1:], strict=False)]
    return {
        "ttft": _spread([outcome.ttft_s for outcome in complete]),
        "tpot": _spread([tpot_s for outcome in complete if (tpot_s := outcome.tpot_s) is not None]),
        "itl": _spread(gaps),
        "e2el": _spread([outcome.e2e_s for outcome in complete]),
    }


def _numbers(spreads: Iterable[tuple[str, Spread]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, spread in spreads:
        found[f"mean_{name}_ms"] = spread.mean
        found |= {f"p{percent}_{name}_ms": spread.percentile(percent) for percent in PERCENTILES}
    return found


def is_good(outcome: Outcome, slo: Mapping[str, float]) -> bool:
    """Whether a complete request kept to all bounds. An output of one token has no time per token to miss."""
    found = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.e2e_s}
    return all(1e3 * found[name] <= bound for name, bound in slo.items())


def _warnings(ran: Ran, complete: list[Outcome], late: Spread, cpu_share: float, is_paced: bool) -> list[str]:
    said = []
    if ran.was_interrupted:
        said.append("the run was interrupted; these are the requests that it had sent")
    p99_ms = late.percentile(99)
    if is_paced and p99_ms is not None and p99_ms > 1e3 * BEHIND_S:
        said.append(
            f"the load fell behind: requests were sent up to {late.values[-1]:.0f} ms late (p99 {p99_ms:.0f} ms), "
            "so that this is not the rate that was asked for; lower --request-rate, raise --max-concurrency, or free "
            "a core"
        )
    if cpu_share > BUSY:
        said.append(f"this tool took {cpu_share:.0%} of a core: its times include its own waiting; lower the load")
    if any(not outcome.is_counted for outcome in complete):
        said.append("the server gives no usage: chunks are counted as output tokens, and prompt tokens are missing")
    return said


def _spread(seconds: list[float]) -> Spread:
    return Spread(tuple(sorted(1e3 * value for value in seconds)))


def _row(outcome: Outcome) -> dict[str, Any]:
    ended = outcome.error is None
    return {
        "number": outcome.number,
        "domain": outcome.domain,
        "due_s": outcome.due_s,
        "sent_s": outcome.sent_s,
        "end_s": outcome.end_s,
        "ttft_ms": 1e3 * outcome.ttft_s if ended else None,
        "tpot_ms": 1e3 * outcome.tpot_s if ended and outcome.tpot_s is not None else None,
        "chunk_s": outcome.chunk_s,
        "prompt_tokens": outcome.num_prompt,
        "cached_tokens": outcome.num_cached,
        "route": outcome.route,
        "output_tokens": outcome.num_output,
        "error": outcome.error,
        "detail": outcome.detail,
    }


_LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "between chunks (ITL)",
    "e2el": "whole request (E2E)",
}


def table_of(report: Report) -> str:
    """Returns all figures, then latencies in milliseconds, then what went wrong."""
    num_failed = sum(report.errors.values())
    rows = [
        ("requests complete / failed", f"{report.num_complete} / {num_failed}"),
        ("duration", f"{report.seconds:.2f} s"),
        ("prompt tokens", f"{report.num_prompt}{_mean(report.num_prompt, report.num_complete)}"),
        ("output tokens", f"{report.num_output}{_mean(report.num_output, report.num_complete)}"),
        ("requests per second", f"{report.rate(report.num_complete):.2f}"),
        ("output tokens per second", f"{report.rate(report.num_output):.1f}"),
        ("all tokens per second", f"{report.rate(report.num_prompt + report.num_output):.1f}"),
    ]
    if report.num_cached is not None and report.num_prompt:
        share = report.num_cached / report.num_prompt
        rows.insert(3, ("of them from the prefix cache", f"{report.num_cached} ({share:.0%})"))
    if report.num_good is not None:
        rows.append(("requests per second within the SLO", f"{report.rate(report.num_good):.2f} ({report.num_good})"))
    rows += [] if report.drafts is None else report.drafts.rows()
    late_ms = report.late.percentile(99)
    rows.append(("sent late, p99", "–" if late_ms is None else f"{late_ms:.1f} ms"))
    rows.append(("CPU of this tool", f"{report.cpu_share:.0%} of a core"))
    lines = [f"{name:<36}{value:>20}" for name, value in rows]
    heads = ["mean", *(f"p{percent}" for percent in PERCENTILES)]
    lines += ["", f"{'milliseconds':<32}" + "".join(f"{head:>12}" for head in heads)]
    lines += [_line(words, report.latencies[name]) for name, words in _LATENCIES.items()]
    for route, latencies in report.routes.items():
        lines += ["", f"began by route {route}: {len(latencies['e2el'].values)} requests"]
        lines += [_line(_LATENCIES[name], latencies[name]) for name in ("ttft", "itl")]
    if report.errors:
        lines.append("")
        lines += [f"{count} × {kind}: {report.examples[kind]}" for kind, count in report.errors.items()]
        if report.longest_retry_after_s is not None:
            lines.append(f"refusals asked to wait up to {report.longest_retry_after_s:g} s (Retry-After)")
    return "\n".join([*lines, *(f"warning: {text}" for text in report.warnings)])


def _line(words: str, spread: Spread) -> str:
    values = [spread.mean, *(spread.percentile(percent) for percent in PERCENTILES)]
    return f"{words:<32}" + "".join("           –" if v is None else f"{v:>12.2f}" for v in values)


def _mean(total: int, count: int) -> str:
    return f" ({total / count:.1f} each)" if count else ""
