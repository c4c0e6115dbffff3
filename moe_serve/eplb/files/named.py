"""Counts by name: {"python_code": [[E] per layer], "python_docs": …}, one window per domain of text.

The count files beside the demo model are of this kind; so is anything a notebook writes with json.dump.
"""

from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.counts import whole_counts
from moe_serve.eplb.files.json_text import read_json
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
    content = read_json(path, TraceError, "counts by name")
    if not is_named_counts(content):
        raise TraceError(f"{path}: expected an object of names and counts [layers, experts], found {content!r:.60}")
    tables: dict[str, np.ndarray] = {}
    shape: tuple[int, ...] | None = None
    for name, value in content.items():
        table = whole_counts(value, f"{path}, key {name}")
        shape = shape or table.shape
        if table.shape != shape or table.ndim != 2 or table.min(initial=0) < 0:
            raise TraceError(
                f"{path}, key {name}: counts of shape {list(table.shape)}, expected {list(shape)} numbers of at least 0"
            )
        tables[name] = table
    return tables
