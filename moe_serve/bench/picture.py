"""A run as one SVG document that needs nothing else: latencies, throughput over time, and a bar for each request."""

import html
import math
from collections.abc import Callable, Sequence

import numpy as np

from moe_serve.bench.client import Outcome
from moe_serve.bench.report import Report

_WIDTH, _LEFT, _RIGHT, _PANEL = 900, 64, 16, 190
_MOST_BARS = 160
_STYLE = """
text{font:13px system-ui,sans-serif;fill:#57606a}
.title{font-size:15px;font-weight:600;fill:#24292f}
.grid{stroke:#d0d7de;stroke-width:1}
.ttft{stroke:#0969da;fill:none}.itl{stroke:#9a6700;fill:none}.e2el{stroke:#8250df;fill:none}
polyline{stroke-width:2;stroke-linejoin:round}
.late{fill:#d0d7de}.first{fill:#9ec5f4}.tokens{fill:#0969da}.failed{fill:#cf222e}
@media(prefers-color-scheme:dark){
text{fill:#9198a1}.title{fill:#f0f6fc}.grid{stroke:#3d444d}
.ttft{stroke:#4493f8}.itl{stroke:#d29922}.e2el{stroke:#ab7df8}
.late{fill:#3d444d}.first{fill:#274a78}.tokens{fill:#4493f8}.failed{fill:#f85149}
}
"""
_NAMES = {"ttft": "to the first token", "itl": "between chunks", "e2el": "whole request"}
Scale = Callable[[float], float]


def picture_of(report: Report, title: str) -> str:
    """Returns the SVG document."""
    parts = [f'<text class="title" x="{_LEFT}" y="22">{html.escape(title)}</text>']
    parts += _latencies(report, 50)
    parts += _throughput(report, 50 + _PANEL + 60)
    bars, height = _requests(report, 50 + 2 * (_PANEL + 60))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    )
    return "\n".join([head, *parts, *bars, "</svg>", ""])


def _latencies(report: Report, top: int) -> list[str]:
    """Share of values below each latency, on a logarithmic axis."""
    spreads = {name: report.latencies[name].values for name in _NAMES if report.latencies[name].values}
    lowest = min((max(values[0], 0.01) for values in spreads.values()), default=1.0)
    highest = max((values[-1] for values in spreads.values()), default=10.0)
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(max(highest, lowest * 1.01)))
    parts = [f'<text x="{_LEFT}" y="{top - 6}">share of values that are at most so large</text>']

    def x(milliseconds: float) -> float:
        share = (math.log10(max(milliseconds, 10.0**first)) - first) / (last - first)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    y = _y_scale(top, 1.0)
    for share in (0.0, 0.5, 0.9, 1.0):
        parts += _grid_line(y(share), f"{share:.0%}")
    for power in range(first, last + 1):
        parts.append(f'<line class="grid" x1="{x(10**power)}" x2="{x(10**power)}" y1="{top}" y2="{top + _PANEL}"/>')
        anchor = "end" if power == last else "middle"
        parts.append(f'<text x="{x(10**power)}" y="{top + _PANEL + 16}" text-anchor="{anchor}">{10**power:g} ms</text>')
    for number, (name, values) in enumerate(spreads.items()):
        shown = np.percentile(values, np.linspace(0, 100, min(len(values), 200)))
        points = [(x(float(value)), y(index / max(len(shown) - 1, 1))) for index, value in enumerate(shown)]
        parts.append(_line(name, points))
        left = _LEFT + 300 + 190 * number
        parts.append(f'<line class="{name}" x1="{left}" x2="{left + 22}" y1="{top - 10}" y2="{top - 10}"/>')
        parts.append(f'<text x="{left + 28}" y="{top - 6}">{_NAMES[name]}</text>')
    return parts


def _throughput(report: Report, top: int) -> list[str]:
    """Output tokens per second; a chunk stands for as many tokens as the mean of its request."""
    seconds = max(report.seconds, 1e-9)
    num_bins = min(120, max(20, int(seconds)))
    times = [at_s for outcome in report.outcomes for at_s in outcome.chunk_s]
    weights = [o.num_output / len(o.chunk_s) for o in report.outcomes for _ in o.chunk_s]
    counts, _ = np.histogram(times, bins=num_bins, range=(0, seconds), weights=weights)
    rates = counts * (num_bins / seconds)
    highest = float(rates.max()) or 1.0
    y, x = _y_scale(top, highest), _x_scale(seconds)
    parts = [f'<text x="{_LEFT}" y="{top - 6}">output tokens per second</text>']
    for share in (0.0, 0.5, 1.0):
        parts += _grid_line(y(share * highest), f"{share * highest:.0f}")
    points = [(x((index + 0.5) * seconds / num_bins), y(float(rate))) for index, rate in enumerate(rates)]
    return [*parts, _line("ttft", points), *_seconds_axis(x, seconds, top + _PANEL + 16)]


def _requests(report: Report, top: int) -> tuple[list[str], int]:
    """A bar for each request, in the order in which they were due."""
    every = max(1, math.ceil(len(report.outcomes) / _MOST_BARS))
    shown = list(report.outcomes)[::every]
    height = min(8.0, max(2.0, 2.5 * _PANEL / max(len(shown), 1)))
    x = _x_scale(max(report.seconds, 1e-9))
    which = "each request" if every == 1 else f"one of {every} requests"
    parts = [f'<text x="{_LEFT}" y="{top - 6}">{which}</text>']
    keys = (("late", "due, not sent"), ("first", "until the first token"), ("tokens", "tokens"), ("failed", "failed"))
    for number, (kind, words) in enumerate(keys):
        left = _LEFT + 190 + 160 * number
        parts.append(f'<rect class="{kind}" x="{left}" y="{top - 15}" width="22" height="8"/>')
        parts.append(f'<text x="{left + 28}" y="{top - 6}">{words}</text>')
    for row, outcome in enumerate(shown):
        parts += [_bar(kind, x, begin, end, top + row * height, height) for kind, begin, end in _phases(outcome)]
    bottom = top + math.ceil(len(shown) * height)
    return [*parts, *_seconds_axis(x, report.seconds, bottom + 16)], bottom + 30


def _phases(outcome: Outcome) -> Sequence[tuple[str, float, float]]:
    late = ("late", outcome.due_s, outcome.sent_s)
    if outcome.error is not None:
        return late, ("failed", outcome.sent_s, outcome.end_s)
    return late, ("first", outcome.sent_s, outcome.chunk_s[0]), ("tokens", outcome.chunk_s[0], outcome.end_s)


def _bar(kind: str, x: Scale, begin: float, end: float, top: float, height: float) -> str:
    width = round(max(x(end) - x(begin), 1.5 if kind == "failed" else 0.3), 1)
    return f'<rect class="{kind}" x="{x(begin)}" y="{top:.1f}" width="{width}" height="{height * 0.8:.1f}"/>'


def _x_scale(seconds: float) -> Scale:
    return lambda at_s: round(_LEFT + min(max(at_s / seconds, 0.0), 1.0) * (_WIDTH - _LEFT - _RIGHT), 1)


def _y_scale(top: int, highest: float) -> Scale:
    return lambda value: round(top + (1 - value / highest) * _PANEL, 1)


def _grid_line(y: float, words: str) -> list[str]:
    return [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>',
        f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{words}</text>',
    ]


def _seconds_axis(x: Scale, seconds: float, y: int) -> list[str]:
    return [
        f'<text x="{x(seconds * part / 5)}" y="{y}" text-anchor="{"end" if part == 5 else "middle"}">'
        f"{seconds * part / 5:.3g} s</text>"
        for part in range(6)
    ]


def _line(kind: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
