"""Reads the JSON report of an earlier replay, to compare with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_serve.eplb.files.json_text import read_json
from moe_serve.eplb.replay.result import CEILING, FLOOR
from moe_serve.errors import ConfigError

FORMAT = "moe_serve.replay_report"
NUMBERS = ("served_mean", "served_min", "moves", "stall_s", "step_s", "tokens_per_s")
_NEVER_MISSING = ("served_mean", "served_min", "moves")
_LARGEST = 1e18


@dataclass(frozen=True)
class EarlierReport:
    """What a comparison takes from a report.

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


def read_report(path: Path) -> EarlierReport:
    """Returns what `moe-serve replay --json` wrote. Raises ConfigError for anything else; the error names the key."""
    try:
        content = read_json(path, ConfigError, "what moe-serve replay --json wrote")
    except OSError as problem:
        raise _wrong(path, f"cannot be read ({problem.strerror})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise _wrong(path, f"has format {found!r}, expected {FORMAT!r}")
    try:
        return _report(path.name, content)
    except _Broken as problem:
        raise _wrong(path, f"has a wrong {problem}") from None


class _Broken(Exception):
    """The message is the key."""


def _report(name: str, content: dict[str, Any]) -> EarlierReport:
    conditions, policies, windows = (content.get(key) for key in ("conditions", "policies", "windows"))
    if not isinstance(conditions, dict) or not all(isinstance(words, str) for words in conditions.values()):
        raise _Broken("conditions")
    if not isinstance(policies, list) or not all(isinstance(row, dict) for row in policies):
        raise _Broken("policies")
    if not isinstance(windows, dict) or not isinstance(windows.get("policies"), dict):
        raise _Broken("windows")
    rows = {}
    for row in policies:
        if not isinstance(row.get("policy"), str):
            raise _Broken("policies: policy")
        rows[row["policy"]] = {key: _number(row.get(key), key) for key in NUMBERS}
        if any(rows[row["policy"]][key] is None for key in _NEVER_MISSING):
            raise _Broken(f"policies: {row['policy']}: one of {', '.join(_NEVER_MISSING)} is missing")
    first_steps = [int(value) for value in _numbers(windows.get("first_step"), "windows: first_step")]
    served = {}
    for policy in rows:
        series = windows["policies"].get(policy)
        key = f"windows: {policy}: served_mean"
        served[policy] = _numbers(series.get("served_mean") if isinstance(series, dict) else None, key)
        if len(served[policy]) != len(first_steps):
            raise _Broken(key)
    return EarlierReport(name, conditions, rows, first_steps, served)


def _numbers(values: object, key: str) -> list[float]:
    if not isinstance(values, list):
        raise _Broken(key)
    out = []
    for value in values:
        number = _number(value, key)
        if number is None:
            raise _Broken(key)
        out.append(number)
    return out


def _number(value: object, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:  # NaN, too
        raise _Broken(key)
    return float(value)


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"--against {path} {what}; give what moe-serve replay --json wrote")
