"""The numbers of a run as text for a terminal."""

from moe_serve.bench.report import PERCENTILES, Report

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
    late_ms = report.late.percentile(99)
    rows.append(("sent late, p99", "–" if late_ms is None else f"{late_ms:.1f} ms"))
    rows.append(("CPU of this tool", f"{report.cpu_share:.0%} of a core"))
    lines = [f"{name:<36}{value:>20}" for name, value in rows]
    heads = ["mean", *(f"p{percent}" for percent in PERCENTILES)]
    lines += ["", f"{'milliseconds':<32}" + "".join(f"{head:>12}" for head in heads)]
    for name, words in _LATENCIES.items():
        spread = report.latencies[name]
        values = [spread.mean, *(spread.percentile(percent) for percent in PERCENTILES)]
        lines.append(f"{words:<32}" + "".join("           –" if v is None else f"{v:>12.2f}" for v in values))
    if report.errors:
        lines.append("")
        lines += [f"{count} × {kind}: {report.examples[kind]}" for kind, count in report.errors.items()]
        if report.longest_retry_after_s is not None:
            lines.append(f"refusals asked to wait up to {report.longest_retry_after_s:g} s (Retry-After)")
    return "\n".join([*lines, *(f"warning: {text}" for text in report.warnings)])


def _mean(total: int, count: int) -> str:
    return f" ({total / count:.1f} each)" if count else ""
