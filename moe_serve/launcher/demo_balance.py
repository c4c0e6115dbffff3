"""`moe-serve demo-balance`: a live server whose clients change from code to prose, and the balancer that follows.

Threads keep as many requests open as the ranks take. Each closed window of load is compared with what the placement at
the start would have made of the same tokens, so that what moving brings is seen on the load that was really served.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from types import TracebackType
from typing import Self

import numpy as np

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.bench.domains import DOMAINS, prompts_of
from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import WindowReport
from moe_serve.eplb.load import balancedness, rank_load
from moe_serve.eplb.placement import Placement
from moe_serve.launcher.balance_picture import Timeline, TimelinePoint
from moe_serve.launcher.llm import LLM
from moe_serve.server.ranks.balance import BalanceBook

_CLIENTS = 4
_PROMPTS_PER_CALL = 12
_POLL_S = 0.05
_NUM_COMPARED = 4  # windows in each figure of the summary


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


@dataclass
class Story:
    """What happened. shift_s: when the domain changed;  moves: (begin, end)"""

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

    def timeline(self) -> Timeline:
        """Returns the picture's content."""
        marks = [(self.shift_s, f"clients change from {DOMAINS[0]} to {DOMAINS[1]}")]
        return Timeline("Balancedness while clients change their domain", self.points, self.moves, marks)


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
