"""Counts by name: {"python_code": [[E] per layer], "python_docs": …}, one window per domain of text.

The count files beside the demo model are of this kind; so is anything a notebook writes with json.dump.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError


def is_named_counts(content: Any) -> bool:
    """Returns whether parsed JSON maps names to lists of lists of numbers."""
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(v, list) and v and isinstance(v[0], list) for v in content.values())
    )


def read_named(path: Path) -> LoadTrace:
    """Returns the trace, one record per name, in the order of the file."""
    counts = named_counts(path)
    records = [LoadRecord(index, 1, "mixed", table) for index, table in enumerate(counts.values())]
    return LoadTrace.of(records, source=f"{path} (counts by name: {', '.join(counts)})")


def named_counts(path: Path) -> dict[str, np.ndarray]:
    """Returns {name: [L, E] int64}."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as problem:
        raise TraceError(f"{path} line {problem.lineno}: not JSON ({problem.msg}); is the file cut off?") from None
    if not is_named_counts(content):
        raise TraceError(f"{path}: expected an object of names and counts [layers, experts], found {content!r:.60}")
    tables: dict[str, np.ndarray] = {}
    shape: tuple[int, ...] | None = None
    for name, value in content.items():
        try:
            table = np.array(value, dtype=np.float64)
        except (ValueError, TypeError):
            raise TraceError(f"{path}, key {name}: lists of different lengths; expected [layers, experts]") from None
        shape = shape or table.shape
        if table.shape != shape or table.ndim != 2 or not np.isfinite(table).all() or table.min() < 0:
            raise TraceError(
                f"{path}, key {name}: counts of shape {list(table.shape)}, expected {list(shape)} numbers of at least 0"
            )
        tables[name] = np.rint(table).astype(np.int64)
    return tables
