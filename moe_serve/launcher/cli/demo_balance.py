"""`moe-serve demo-balance`: a live server whose clients change from code to prose, and the balancer that follows.

Threads keep as many requests open as the ranks take. Each closed window of load is compared with what the placement at
the start would have made of the same tokens, so that what moving brings is seen on the load that was really served.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Self

import numpy as np
import typer

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.bench.domains import DOMAINS, prompts_of
from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import WindowReport
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.launcher.llm import LLM
from moe_serve.server.ranks.balance import BalanceBook

_CLIENTS = 4
_PROMPTS_PER_CALL = 12
_POLL_S = 0.05
_NUM_COMPARED = 4  # windows in each figure of the summary
_BAR = 24
_FLOOR = 0.6  # where a bar begins


def show_demo(config: ServeConfig, num_windows: int, picture: Path | None) -> None:
    """Runs the demo, and prints a line for each window and a summary at the end. picture: an .svg file for the story"""
    number = 0

    def show(domain: str, point: TimelinePoint, news: list[str]) -> None:
        nonlocal number
        if number == 0:
            typer.echo("window  clients  served                            kept placement  the balancer")
        number += 1
        bar = "█" * round(_BAR * max(0.0, point.served - _FLOOR) / (1 - _FLOOR))
        said = "; ".join(news[-2:])
        typer.echo(f"{number:6d}  {domain:7s}  {point.served:.3f} {bar:<{_BAR}}    {point.kept:.3f}           {said}")

    typer.echo(f"starting {config.parallel.num_ranks} ranks of the demo model …", err=True)
    story = run_demo(config, num_windows, show)
    typer.echo(_summary(story))
    if picture is not None:
        picture.write_text(timeline_svg(story), encoding="utf-8")
        typer.echo(f"wrote {picture}", err=True)
    sys.stdout.flush()


def _summary(story: "Story") -> str:
    lines = ["", f"{'balancedness (1 = all ranks equally busy)':42s}  served  placed at the start  placed for code"]
    for words, served, kept, stale in story.summary():
        shown = "" if stale is None else f"{stale:.3f}"
        lines.append(f"{words:42s}  {served:.3f}   {kept:.3f}                {shown}".rstrip())
    times = "time" if len(story.moves) == 1 else "times"
    lines.append(f"{story.num_experts} experts moved, {len(story.moves)} {times}, while requests were served.")
    return "\n".join(lines)


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


@dataclass
class Story:
    """The course of the demo. shift_s: when the domain changed;  moves: (begin, end)"""

    points: list[TimelinePoint] = field(default_factory=list)
    shift_s: float = 0.0
    num_before_shift: int = 0
    moves: list[tuple[float, float]] = field(default_factory=list)
    num_experts: int = 0

    def summary(self) -> list[tuple[str, float, float, float | None]]:
        """Returns (when, balancedness served, kept, stale), means of a few windows: see TimelinePoint."""
        first, second = self.points[: self.num_before_shift], self.points[self.num_before_shift :]
        parts = (
            (f"{DOMAINS[0]}, at the start", first[:_NUM_COMPARED]),
            (f"{DOMAINS[0]}, balanced", first[-_NUM_COMPARED:]),
            (f"{DOMAINS[1]}, right after the change", second[1 : 1 + 2]),
            (f"{DOMAINS[1]}, balanced", second[-_NUM_COMPARED:]),
        )
        return [
            (
                words,
                fmean(p.served for p in part),
                fmean(p.kept for p in part),
                None if part[0].stale is None else fmean(p.stale or 0.0 for p in part),
            )
            for words, part in parts
            if part
        ]


def run_demo(config: ServeConfig, num_windows: int, show: Callable[[str, TimelinePoint, list[str]], None]) -> Story:
    """Serves code for num_windows windows of load, then prose for as many; returns what happened.

    show: called after each window, with the domain, the point and what the balancer did since the last one
    Raises a MoeServeError when the ranks do not start, and what a client met.
    """
    story = Story()
    with LLM.from_config(config) as llm, Clients(llm) as clients:
        book = llm.balance
        start: Placement | None = None
        stale: Placement | None = None
        num_windows_seen = num_events_seen = 0
        waiting = threading.Event()
        while len(story.points) < 2 * num_windows:
            waiting.wait(_POLL_S)
            if clients.failure is not None:
                raise clients.failure
            if start is None and book.placement is not None:
                start = _placement(book, config)
            if start is None or book.window is None or book.num_windows == num_windows_seen:
                continue
            num_windows_seen = book.num_windows
            point = _point(book.points[-1].at_s, book.window, start, stale)
            story.points.append(point)
            news = [event.text for event in list(book.events)[-(book.num_events - num_events_seen) :]]
            show(clients.domain, point, news if book.num_events > num_events_seen else [])
            num_events_seen = book.num_events
            if len(story.points) == num_windows:
                clients.domain, story.shift_s, story.num_before_shift = DOMAINS[1], point.at_s, num_windows
                stale = _placement(book, config)
        story.moves = [(move.decision.at_s, move.ended_s or story.points[-1].at_s) for move in book.moves]
        story.num_experts = sum(move.num_experts for move in book.moves)
    return story


def _placement(book: BalanceBook, config: ServeConfig) -> Placement:
    assert book.placement is not None
    table = np.array(book.placement, dtype=np.int32)
    return Placement(table, int(table.max()) + 1, config.parallel.num_ranks)


def _point(at_s: float, window: WindowReport, start: Placement, stale: Placement | None) -> TimelinePoint:
    tokens = np.array(window.tokens)

    def balance_in(placement: Placement) -> float:
        return float(balancedness(rank_load(tokens, placement)).mean())

    return TimelinePoint(
        at_s, fmean(window.balancedness), balance_in(start), None if stale is None else balance_in(stale)
    )


class Clients:
    """Threads that ask for completions of one domain's prompts, again and again, until the `with` block ends."""

    def __init__(self, llm: LLM):
        self.domain = DOMAINS[0]
        self.failure: BaseException | None = None
        self._llm = llm
        self._has_ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(_CLIENTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        prompts = {domain: prompts_of(domain, number) for domain in DOMAINS}
        params = SamplingParams(max_new_tokens=24, temperature=0.8, ignore_eos=True)
        try:
            while not self._has_ended.is_set():
                self._llm.generate(list(islice(prompts[self.domain], _PROMPTS_PER_CALL)), params)
        except BaseException as failure:
            self.failure = failure


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


_TITLE = "Balancedness while clients change their domain"


def timeline_svg(story: Story) -> str:
    """Returns the picture of a story with at least two points as an SVG document."""
    points = story.points
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
        f"<title>{_TITLE}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="20">{_TITLE}</text>',
    ]
    num_lines = round((1 - floor) / 0.05)
    for number in range(0, num_lines + 1, max(1, num_lines // 5)):
        value = 1 - number * 0.05
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:.2f}</text>')
    bottom = _HEIGHT - _BOTTOM
    for start_s, end_s in story.moves:
        width = max(x(end_s) - x(start_s), 2)
        parts.append(f'<rect class="move" x="{x(start_s)}" y="{_TOP}" width="{width}" height="{bottom - _TOP}"/>')
    shift, words = x(story.shift_s), f"clients change from {DOMAINS[0]} to {DOMAINS[1]}"
    parts.append(f'<line class="mark" x1="{shift}" x2="{shift}" y1="{_TOP}" y2="{bottom}"/>')
    parts.append(f'<text x="{shift + 5}" y="{bottom - 8}">{words}</text>')
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
