"""A picture of balancedness over time as SVG: what was served, what the placement at the start would have served."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 900, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 56, 44
_STYLE = """
text{font:13px system-ui,sans-serif;fill:#57606a}
.title{font-size:15px;font-weight:600;fill:#24292f}
.grid{stroke:#d0d7de;stroke-width:1}
.served{fill:none;stroke:#0969da;stroke-width:2.5;stroke-linejoin:round}
.kept{fill:none;stroke:#9a6700;stroke-width:2;stroke-dasharray:5 4;stroke-linejoin:round}
.stale{fill:none;stroke:#8250df;stroke-width:2;stroke-dasharray:2 3;stroke-linejoin:round}
.mark{stroke:#cf222e;stroke-width:1.5}
.move{fill:#0969da;fill-opacity:.14}
@media(prefers-color-scheme:dark){
text{fill:#9198a1}
.title{fill:#f0f6fc}
.grid{stroke:#3d444d}
.served{stroke:#4493f8}
.kept{stroke:#d29922}
.stale{stroke:#ab7df8}
.mark{stroke:#f85149}
.move{fill:#4493f8;fill-opacity:.22}
}
"""


@dataclass(frozen=True)
class TimelinePoint:
    """One window: mean balancedness of the layers with the same tokens, in placements of different age.

    at_s: its end;  served: in the placement in use;  kept: in the one at the start;  stale: in the one in use when the
    clients changed; None before
    """

    at_s: float
    served: float
    kept: float
    stale: float | None = None


@dataclass(frozen=True)
class Timeline:
    """points: at least two, in order;  moves: (begin, end) in seconds;  marks: (time, words) of what happened"""

    title: str
    points: Sequence[TimelinePoint]
    moves: Sequence[tuple[float, float]] = ()
    marks: Sequence[tuple[float, str]] = ()


def timeline_svg(timeline: Timeline) -> str:
    """Returns the picture as an SVG document."""
    points = timeline.points
    begin, end = points[0].at_s, points[-1].at_s
    stale = [(point.at_s, point.stale) for point in points if point.stale is not None]
    lowest = min([*(min(point.served, point.kept) for point in points), *(value for _, value in stale)])
    floor = max(0.0, (int(lowest * 20) - 1) / 20)

    def x(at_s: float) -> float:
        share = (min(max(at_s, begin), end) - begin) / max(end - begin, 1e-9)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_TOP + (1 - value) / (1 - floor) * (_HEIGHT - _TOP - _BOTTOM), 1)

    def line(kind: str, values: Sequence[tuple[float, float]]) -> str:
        path = " ".join(f"{x(at_s)},{y(value)}" for at_s, value in values)
        return f'<polyline class="{kind}" points="{path}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{html.escape(timeline.title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="20">{html.escape(timeline.title)}</text>',
    ]
    num_lines = round((1 - floor) / 0.05)
    for number in range(0, num_lines + 1, max(1, num_lines // 5)):
        value = 1 - number * 0.05
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:.2f}</text>')
    bottom = _HEIGHT - _BOTTOM
    for start_s, end_s in timeline.moves:
        width = max(x(end_s) - x(start_s), 2)
        parts.append(f'<rect class="move" x="{x(start_s)}" y="{_TOP}" width="{width}" height="{bottom - _TOP}"/>')
    for at_s, words in timeline.marks:
        parts.append(f'<line class="mark" x1="{x(at_s)}" x2="{x(at_s)}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(at_s) + 5}" y="{bottom - 8}">{html.escape(words)}</text>')
    parts.append(line("kept", [(point.at_s, point.kept) for point in points]))
    parts.append(line("stale", stale))
    parts.append(line("served", [(point.at_s, point.served) for point in points]))
    for seconds in range(0, int(end - begin) + 1, max(1, int((end - begin) / 6))):
        parts.append(f'<text x="{x(begin + seconds)}" y="{bottom + 18}" text-anchor="middle">{seconds} s</text>')
    keys = (
        ("served", "served"),
        ("kept", "placement at the start, same tokens"),
        ("stale", "placement before the change, same tokens"),
        ("move", "experts move"),
    )
    left = _LEFT
    for kind, words in keys:
        parts.append(
            f'<rect class="{kind}" x="{left}" y="34" width="22" height="8"/>'
            if kind == "move"
            else f'<line class="{kind}" x1="{left}" x2="{left + 22}" y1="38" y2="38"/>'
        )
        parts.append(f'<text x="{left + 28}" y="43">{words}</text>')
        left += 48 + 7 * len(words)
    parts.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">mean / max rank load, mean of layers</text>'
    )
    return "\n".join([*parts, "</svg>", ""])
