"""The leaderboard as one self-contained HTML page, and as Markdown."""

import html
from collections.abc import Iterable
from statistics import fmean

from benchmarks.leaderboard.instances import Instance
from benchmarks.leaderboard.score import Row

COLUMNS = (
    ("plan_ms", "plan, CPU ms", "{:,.1f}"),
    ("now", "balance now", "{:.4f}"),
    ("served", "next window", "{:.4f}"),
    ("worst", "its worst layer", "{:.3f}"),
    ("moves", "slots moved", "{:.1%}"),
    ("node_gib", "between nodes, GiB", "{:,.1f}"),
    ("step_ms", "predicted step, ms", "{:.2f}"),
    ("duplicates", "duplicates", "{}"),
)
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#666666", "#b8a800")  # Okabe and Ito's
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1060px;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:.5rem 0 1rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right}
th:first-child,td:first-child{text-align:left}
.failed{color:#a33;text-align:left}
.note{color:#666} h2{margin-top:2.2rem} svg{max-width:640px;display:block}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181b}th,td{border-color:#3a3d41}svg{background:#fff}}
"""


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of one instance, the shortest predicted step first; failed ones last."""
    return sorted(rows, key=lambda row: (bool(row.failed), row.step_ms, row.moves, row.entry))


def overall(rows: list[Row]) -> list[dict[str, str]]:
    """Returns a line for each planner that ended all instances, best first; others last, with what is missing.

    Step time: mean over instances of the step with this planner over the step with the best planner there.
    """
    instances = {row.instance for row in rows}
    best = {
        name: min((row.step_ms for row in rows if row.instance == name and not row.failed), default=0.0)
        for name in instances
    }
    lines = []
    for entry in dict.fromkeys(row.entry for row in rows):
        done = [row for row in rows if row.entry == entry and not row.failed]
        if len(done) < len(instances):
            lines.append((float("inf"), {"planner": entry, "step over best": f"{len(done)} of {len(instances)} ended"}))
            continue
        ratio = fmean(row.step_ms / best[row.instance] for row in done)
        lines.append(
            (
                ratio,
                {
                    "planner": entry,
                    "step over best": f"{ratio:.4f}",
                    "balance, next window": f"{fmean(row.served for row in done):.4f}",
                    "slots moved": f"{fmean(row.moves for row in done):.1%}",
                    "between nodes, GiB": f"{fmean(row.node_gib for row in done):,.0f}",
                    "plan, CPU ms": f"{fmean(row.plan_ms for row in done):,.1f}",
                },
            )
        )
    names = ("planner", "step over best", "balance, next window", "slots moved", "between nodes, GiB", "plan, CPU ms")
    return [{name: line.get(name, "") for name in names} for _, line in sorted(lines, key=lambda one: one[0])]


def to_html(rows: list[Row], instances: Iterable[Instance], where: str) -> str:
    """Returns the page. where: machine and date."""
    colours = dict(zip(dict.fromkeys(row.entry for row in rows), COLOURS * len(rows), strict=False))
    parts = [
        "<!doctype html><meta charset=utf-8><title>Leaderboard of expert placement planners</title>",
        f"<style>{STYLE}</style><h1>Leaderboard of expert placement planners</h1>",
        f"<p class=note>{html.escape(where)}</p><h2>All instances</h2>",
        _table(list(overall(rows)[0]), [list(line.values()) for line in overall(rows)]),
        "<p class=note>Step over best: predicted step time over that of the best planner of an instance, mean over "
        "instances. A step does not contain the time of moves; see slots moved and bytes between nodes.</p>",
    ]
    for instance in instances:
        own = ranked(row for row in rows if row.instance == instance.name)
        parts.append(f"<h2>{html.escape(instance.name)}</h2><p class=note>{html.escape(instance.words)}</p>")
        parts.append(_table(["planner", *(label for _, label, _ in COLUMNS)], [_cells(row) for row in own]))
        parts.append(_scatter([row for row in own if not row.failed], colours))
    return "\n".join(parts) + "\n"


def _cells(row: Row) -> list[str]:
    if row.failed:
        return [row.entry, row.failed]
    return [row.entry, *(form.format(getattr(row, name)) for name, _, form in COLUMNS)]


def _table(head: list[str], lines: list[list[str]]) -> str:
    out = ["<table><tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"]
    for line in lines:
        cells = [f"<td>{html.escape(cell)}</td>" for cell in line]
        if len(line) == 2 < len(head):
            cells[1] = f'<td class=failed colspan="{len(head) - 1}">{html.escape(line[1])}</td>'
        out.append("<tr>" + "".join(cells) + "</tr>")
    return "".join(out) + "</table>"


def _scatter(rows: list[Row], colours: dict[str, str]) -> str:
    """A point per planner: slots moved to the right, balance of the next window upwards; numbers are those of ranks."""
    if not rows:
        return ""
    width, height, left, bottom, right = 640, 260, 60, 40, 200
    low, high = min(row.served for row in rows), max(row.served for row in rows)
    low, high = low - 0.05 * (high - low) - 1e-4, high + 0.05 * (high - low) + 1e-4
    out = [f'<svg viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" role="img">']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + share * (width - left - right)
        out.append(f'<path d="M{x:.0f} 10V{height - bottom}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{x:.0f}" y="{height - bottom + 15}" text-anchor="middle">{share:.0%}</text>')
    for part in (0.0, 0.5, 1.0):
        y = height - bottom - part * (height - bottom - 10)
        out.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{low + part * (high - low):.3f}</text>')
    at: list[tuple[float, float, list[str]]] = []  # where points lie, and the numbers of those that lie together
    for index, row in enumerate(rows, start=1):
        x = left + min(row.moves, 1.0) * (width - left - right)
        y = height - bottom - (row.served - low) / (high - low) * (height - bottom - 10)
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colours[row.entry]}" fill-opacity=".85"/>')
        near = next((numbers for px, py, numbers in at if abs(px - x) < 12 and abs(py - y) < 10), None)
        if near is None:
            at.append((x, y, near := []))
        near.append(str(index))
        line = 1 + 17 * index
        out.append(f'<circle cx="{width - right + 20}" cy="{line - 4}" r="5" fill="{colours[row.entry]}"/>')
        out.append(f'<text x="{width - right + 32}" y="{line}">{index} {html.escape(row.entry)}</text>')
    for x, y, numbers in at:
        beside, anchor = (8, "start") if x < width / 3 else (-8, "end")
        place = f'x="{x + beside:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}"'
        out.append(f'<text {place} font-size="9">{", ".join(numbers)}</text>')
    middle = (left + width - right) / 2
    out.append(f'<text x="{middle:.0f}" y="{height - 6}" text-anchor="middle">slots moved at each plan</text>')
    up = (height - bottom + 10) / 2
    out.append(f'<text transform="translate(12 {up:.0f}) rotate(-90)" text-anchor="middle">balance, next window</text>')
    out.append("</svg>")
    return "".join(out)
