"""What drafts of tokens did for a server during a run, from its metrics before and after.

Of a server of ours with speculation.mode on; its ranks report once a second.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

REPORTED_S = 1.3  # after which a scrape has what ranks had done before
_SERIES = re.compile(
    r"^moe_serve_rank_(drafts|decode_\w+?|speculation_saved_seconds)(?:_total)?\{([^}]*)\} (\S+)$", re.M
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Drafts:
    """Totals of all ranks during a run.

    sources: right and verified drafts by source
    decodes: steps, requests, tokens and experts of decode steps, "with" drafts and "without", as the metrics have them
    saved_s: time of ranks that drafts have saved; None: the server does not know, as where all drafts are verified
    """

    sources: dict[str, tuple[float, float]]
    decodes: dict[str, dict[str, float]]
    saved_s: float | None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of a request in a decode step; None where there was none."""
        requests = sum(each["requests"] for each in self.decodes.values())
        return sum(each["tokens"] for each in self.decodes.values()) / requests if requests else None

    def experts_per_token(self, drafts: str) -> float | None:
        """Experts read for a token of steps "with" or "without" drafts; None where none are counted."""
        found = self.decodes[drafts]
        return found["experts"] / found["tokens"] if found["experts"] and found["tokens"] else None

    def as_json(self) -> dict[str, Any]:
        return {
            "sources": {name: {"right": right, "verified": all_} for name, (right, all_) in self.sources.items()},
            "decode_steps": self.decodes,
            "tokens_per_step": self.tokens_per_step,
            "experts_per_token": {drafts: self.experts_per_token(drafts) for drafts in self.decodes},
            "saved_s": self.saved_s,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Returns lines of a table."""
        rows = [
            (f"drafts of {_SOURCES.get(name, name)}, right", f"{right:.0f} of {verified:.0f} ({right / verified:.0%})")
            for name, (right, verified) in self.sources.items()
            if verified
        ]
        if self.tokens_per_step is not None:
            rows.append(("tokens of a request in a step", f"{self.tokens_per_step:.2f}"))
        experts = [self.experts_per_token(drafts) for drafts in ("with", "without")]
        if any(experts):
            words = ["–" if each is None else f"{each:.1f}" for each in experts]
            rows.append(("experts for a token, with / without", " / ".join(words)))
        if self.saved_s is not None:
            rows.append(("time of ranks that drafts saved", f"{self.saved_s:.2f} s"))
        return rows


_SOURCES = {"own": "own text", "shared": "other texts", "form": "forms", "mtp": "the layer"}


def drafts_between(before: str, after: str) -> Drafts | None:
    """Returns what was done between two texts of /metrics.

    None where the ranks of the second look for no drafts, or have begun to count anew.
    """
    begin, end = _totals(before), _totals(after)
    grown = {key: value - begin.get(key, 0.0) for key, value in end.items()}
    of_drafts = [value for (name, *_), value in grown.items() if name == "drafts"]
    if not of_drafts or min(of_drafts) < 0:
        return None
    sources: dict[str, tuple[float, float]] = {}
    decodes: dict[str, dict[str, float]] = {drafts: defaultdict(float) for drafts in ("with", "without")}
    for (name, first, second), value in grown.items():
        if name == "drafts":
            right, verified = sources.get(first, (0.0, 0.0))
            sources[first] = right + (value if second == "right" else 0.0), verified + value
        elif name.startswith("decode_") and first in decodes:
            decodes[first][name.removeprefix("decode_")] += value
    saved_s = grown.get(("speculation_saved_seconds", "", ""))
    return Drafts(sources, {drafts: dict(each) for drafts, each in decodes.items()}, saved_s)


def _totals(text: str) -> dict[tuple[str, str, str], float]:
    """Returns sums over ranks, by name and labels: source and outcome, or with or without drafts."""
    found: dict[tuple[str, str, str], float] = defaultdict(float)
    for name, labels, value in _SERIES.findall(text):
        given: dict[str, str] = dict(_LABEL.findall(labels))
        found[name, given.get("source") or given.get("drafts", ""), given.get("outcome", "")] += float(value)
    return dict(found)
