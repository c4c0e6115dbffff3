"""Compares a replay with the JSON report of an earlier one, and says whether the two can be compared at all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from rich.table import Table

from moe_serve.eplb.files.untrusted import read_json
from moe_serve.eplb.replay.report import MISSING, as_number, as_seconds, page_groups, printed, text_console
from moe_serve.eplb.replay.result import CEILING, FLOOR, ReplayReport
from moe_serve.errors import ConfigError

FORMAT = "moe_serve.replay_report"
NUMBERS = ("served_mean", "served_min", "moves", "stall_s", "step_s", "tokens_per_s")
_SAME = 5e-5  # balancedness is shown with four digits
_BALANCE = ("served_mean", "served_min")
_WORDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "served_mean": ("served", as_number),
    "served_min": ("min layer", as_number),
    "moves": ("moves", lambda value: f"{value:,.0f}"),
    "stall_s": ("stall", as_seconds),
    "step_s": ("step time", as_seconds),
    "tokens_per_s": ("tokens/s", lambda value: f"{value:,.0f}"),
}


@dataclass(frozen=True)
class EarlierReport:
    """An earlier report, as far as a comparison needs it.

    name:        of its file
    conditions:  what was replayed, in words
    rows:        policy -> NUMBERS by name; None = not known
    first_steps: first step of each scored window
    served:      policy -> served balancedness of each window, mean over layers
    """

    name: str
    conditions: dict[str, str]
    rows: dict[str, dict[str, float | None]]
    first_steps: list[int]
    served: dict[str, list[float]]

    @property
    def best(self) -> str | None:
        """The policy with most tokens per second, or the best balanced one where times are not known; None = none."""
        rows = {name: row for name, row in self.rows.items() if name not in (FLOOR, CEILING)}
        timed = all(row["tokens_per_s"] is not None for row in rows.values())
        key = "tokens_per_s" if timed else "served_mean"
        return max(rows, key=lambda name: rows[name][key] or 0.0) if rows else None


def against_to_table(report: ReplayReport, earlier: EarlierReport, color: bool = False) -> str:
    """Returns the comparison for a terminal, in a table of at most 160 characters a line."""
    console = text_console(160, color)
    console.print()
    columns, rows = against_cells(report, earlier)
    table = Table(title=f"against {earlier.name} (changes in brackets)", title_justify="left", box=None)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", style="" if number else "bold")
    for cells in rows:
        table.add_row(*cells, style="dim" if cells[0] in (FLOOR, CEILING) else "")
    console.print(table)
    console.print()
    for sentence in against_verdict(report, earlier):
        console.print(sentence, soft_wrap=True)
    return printed(console)


def against_cells(report: ReplayReport, earlier: EarlierReport) -> tuple[list[str], list[list[str]]]:
    """Returns columns and cells: a row for each policy that both replays have, a cell with a number and its change.

    A column that neither replay knows is left out.
    """
    pairs = _pairs(report, earlier)
    known = [key for key in NUMBERS if any(row[key] for _, *rows in pairs for row in rows) or key in _BALANCE]
    rows = [
        [name, *(_cell(now[key], was[key], _WORDS[key][1], relative=key not in _BALANCE) for key in known)]
        for name, now, was in pairs
    ]
    return ["policy", *(_WORDS[key][0] for key in known)], rows


def _cell(now: float | None, was: float | None, words: Callable[[float], str], relative: bool) -> str:
    if now is None or was is None:
        return MISSING if was is None and now is None else f"{_or_missing(now, words)} (was {_or_missing(was, words)})"
    if words(now) == words(was):
        return f"{words(now)} (=)"
    if not relative:
        return f"{words(now)} ({now - was:+.4f})"
    if was <= 0:
        return f"{words(now)} (was {words(was)})"
    change = now / was - 1
    return f"{words(now)} ({change:+.1%})" if abs(change) >= 5e-4 else f"{words(now)} ({change:+.3%})"


def _or_missing(value: float | None, words: Callable[[float], str]) -> str:
    return MISSING if value is None else words(value)


def _pairs(report: ReplayReport, earlier: EarlierReport) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Returns the rows of the policies that both have: (name, now, was)."""
    return [
        (result.name, report.summary(result), earlier.rows[result.name])
        for result in report.results
        if result.name in earlier.rows
    ]


def changed_conditions(report: ReplayReport, earlier: EarlierReport) -> dict[str, list[str | None]]:
    """Returns condition -> [was, is] where the two differ; None = not stated."""
    names = dict.fromkeys([*earlier.conditions, *report.conditions])
    both = {name: [earlier.conditions.get(name), report.conditions.get(name)] for name in names}
    return {name: words for name, words in both.items() if words[0] != words[1]}


def against_verdict(report: ReplayReport, earlier: EarlierReport) -> list[str]:
    """Returns a few sentences: is it like with like, what became of the best policy, and in which windows."""
    pairs = {name: (now, was) for name, now, was in _pairs(report, earlier)}
    out = [
        f"Other {name}: {now or 'not stated'}; was {was or 'not stated'}."
        for name, (was, now) in changed_conditions(report, earlier).items()
    ]
    if FLOOR in pairs:
        now, was = (row["served_mean"] for row in pairs[FLOOR])
        if abs(now - was) > _SAME:
            out.append(
                f"The load or the placement at the start differs: doing nothing serves at {now:.4f}, was {was:.4f}. "
                f"Changes of a policy are not its own alone."
            )
    gone = [name for name in earlier.rows if name not in pairs]
    new = [result.name for result in report.results if result.name not in pairs]
    if gone or new:
        parts = ([f"only there: {', '.join(gone)}"] if gone else []) + ([f"only here: {', '.join(new)}"] if new else [])
        out.append(f"Policies {'; '.join(parts)}.")
    best = report.best.name
    if report.policies and earlier.best and best != earlier.best:
        out.append(f"The best policy is {best}; it was {earlier.best}.")
    for name, (now, was) in pairs.items():
        if name not in (FLOOR, CEILING):
            out.append(_sentence(name, now, was) + _windows(report, earlier, name))
    return out


def _sentence(name: str, now: dict[str, Any], was: dict[str, Any]) -> str:
    changes = []
    if abs(now["served_mean"] - was["served_mean"]) > _SAME:
        changes.append(f"serves at {now['served_mean']:.4f} ({now['served_mean'] - was['served_mean']:+.4f})")
    if now["moves"] != was["moves"]:
        changes.append(f"moves {now['moves']:,.0f} experts instead of {was['moves']:,.0f}")
    if now["tokens_per_s"] and was["tokens_per_s"] and abs(now["tokens_per_s"] / was["tokens_per_s"] - 1) >= 5e-4:
        changes.append(f"{now['tokens_per_s'] / was['tokens_per_s'] - 1:+.1%} tokens/s with its moves paid for")
    return f"{name}: {', '.join(changes) or 'as before'}."


def _windows(report: ReplayReport, earlier: EarlierReport, name: str) -> str:
    """Returns in how many windows a policy serves better and worse; "" for other windows, or where all is as before."""
    if earlier.first_steps != report.first_steps.tolist():
        return ""
    served = next(result for result in report.results if result.name == name).served.mean(axis=1)
    change = served - np.array(earlier.served[name])
    better, worse = int((change > _SAME).sum()), int((change < -_SAME).sum())
    if not better and not worse:
        return ""
    text = f" Better in {better} of {len(change)} windows, worse in {worse}"
    if worse:
        lowest = int(change.argmin())
        text += f", most at step {report.first_steps[lowest]:,} ({change[lowest]:+.4f})"
    return text + "."


def against_to_json(report: ReplayReport, earlier: EarlierReport) -> dict[str, Any]:
    """Returns the comparison as plain JSON types; pairs are [was, is]."""
    return {
        "report": earlier.name,
        "conditions": changed_conditions(report, earlier),
        "policies": [
            {"policy": name, **{key: [was[key], now[key]] for key in NUMBERS}}
            for name, now, was in _pairs(report, earlier)
        ],
        "verdict": against_verdict(report, earlier),
    }


def against_page(report: ReplayReport, earlier: EarlierReport) -> dict[str, Any]:
    """Returns what a page draws: the table, and the earlier balancedness of each policy that both have."""
    columns, rows = against_cells(report, earlier)
    groups = page_groups(len(earlier.first_steps))
    return {
        "name": earlier.name,
        "columns": columns,
        "rows": rows,
        "verdict": against_verdict(report, earlier),
        "steps": [earlier.first_steps[group[0]] for group in groups],
        "served": {
            name: [round(float(np.mean([earlier.served[name][i] for i in group])), 5) for group in groups]
            for name, _, _ in _pairs(report, earlier)
        },
    }


def read_report(path: Path) -> EarlierReport:
    """Returns what `moe-serve replay --json` wrote. Raises ConfigError for anything else; the error names the key."""

    def part(content: object, kind: type[Part], key: str) -> Part:
        try:
            return msgspec.convert(content, kind)
        except msgspec.ValidationError as problem:
            raise wrong(f"has a wrong {key} ({problem})") from None

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"--against {path} {what}; give what moe-serve replay --json wrote")

    try:
        content = read_json(path, ConfigError, "what moe-serve replay --json wrote")
    except OSError as problem:
        raise wrong(f"cannot be read ({problem.strerror})") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise wrong(f"has format {found!r}, expected {FORMAT!r}")
    conditions = part(content.get("conditions"), dict[str, str], "conditions")
    rows = {row.policy: row for row in part(content.get("policies"), list[_Row], "policies")}
    windows = part(content.get("windows"), _Windows, "windows")
    served = {}
    for name in rows:
        key = f"windows: {name}: served_mean"
        series = windows.policies.get(name)
        served[name] = part(series.get("served_mean") if isinstance(series, dict) else None, list[_Number], key)
        if len(served[name]) != len(windows.first_step):
            raise wrong(f"has a wrong {key} ({len(served[name])} windows, expected {len(windows.first_step)})")
    numbers = {name: {key: getattr(row, key) for key in NUMBERS} for name, row in rows.items()}
    return EarlierReport(path.name, conditions, numbers, windows.first_step, served)


Part = TypeVar("Part")
_Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]


class _Row(msgspec.Struct):
    """The fields of a policy's row that a comparison needs, by the names of NUMBERS."""

    policy: str
    served_mean: _Number
    served_min: _Number
    moves: _Number
    stall_s: _Number | None = None
    step_s: _Number | None = None
    tokens_per_s: _Number | None = None


class _Windows(msgspec.Struct):
    first_step: list[int]
    policies: dict[str, Any]
