"""Megatron's router trace, as a load trace: which experts each token of each rank and layer chose.

Lines of {"step", "stage", "block", "layer", "rank", "num_tokens", "topk", "top_indices": [[topk ids] per token]},
sorted by step. The number of experts is not in the file: it is the highest id + 1 unless it is given.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.untrusted import MAX_LAYER_ID, ByteProgress, check_table_size, json_lines, whole_counts
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError


def is_router_line(content: Any) -> bool:
    """Returns whether a parsed line is one of Megatron's."""
    return isinstance(content, dict) and "top_indices" in content and "layer" in content


def read_megatron(path: Path, progress: ByteProgress | None = None, num_logical: int | None = None) -> LoadTrace:
    """Returns the trace, one record per step, with the counts of each source rank."""
    layers: set[int] = set()
    num_ranks, highest, topk, steps = 1, 0, 0, 0
    last: int | None = None
    for where, line in _lines(path, None):
        layers.add(line["layer"])
        num_ranks = max(num_ranks, line["rank"] + 1)
        ids = line["ids"]
        highest = max(highest, int(ids.max(initial=0)))
        topk = max(topk, ids.shape[1] if ids.size else 0)
        if last is not None and line["step"] < last:
            raise TraceError(f"{where}: step {line['step']} after step {last}; sort the lines by step")
        steps += line["step"] != last
        last = line["step"]
    if last is None:
        raise TraceError(f"{path} has no lines; expected a router trace")
    if num_logical is not None and highest >= num_logical:
        raise TraceError(f"{path}: expert {highest} is chosen, expected ids below {num_logical} (--experts)")
    experts = num_logical or highest + 1
    check_table_size(len(layers) * num_ranks, experts, f"{path}, {num_ranks} ranks")
    seen = "" if num_logical else f", {experts} experts: the highest id + 1"
    row_of = {layer: row for row, layer in enumerate(sorted(layers))}

    def records() -> Iterator[LoadRecord]:
        for step, lines in groupby(_lines(path, progress), key=lambda line: int(line[1]["step"])):
            source = np.zeros((len(row_of), num_ranks, experts), dtype=np.int64)
            for _, line in lines:
                ids = line["ids"]
                source[row_of[line["layer"]], line["rank"]] += np.bincount(ids[ids >= 0], minlength=experts)
            yield LoadRecord(step, 1, "mixed", source.sum(axis=1), by_source=source if num_ranks > 1 else None)

    return LoadTrace(
        records,
        experts,
        tuple(row_of),
        topk or None,
        source=f"{path} (Megatron router{seen})",
        num_records=steps,
    )


def _lines(path: Path, progress: ByteProgress | None) -> Iterator[tuple[str, dict[str, Any]]]:
    total = path.stat().st_size
    for number, done, line in json_lines(path):
        where = f"{path} line {number}"
        if not is_router_line(line):
            raise TraceError(f"{where}: expected 'layer' and 'top_indices', found {line!r:.60}")
        ids = whole_counts(line["top_indices"], f"{where}, key top_indices")
        if ids.ndim != 2 and (ids.size or ids.ndim == 0):
            raise TraceError(f"{where}, key top_indices: expected ids [tokens, topk], -1 = none, found {ids.shape}")
        stated = line.get("num_tokens", len(ids))
        if stated != len(ids):
            raise TraceError(f"{where}, key top_indices: {len(ids)} tokens, expected {stated} (num_tokens)")
        numbers = {name: line.get(name, 0) for name in ("step", "layer", "rank")}
        for name, value in numbers.items():
            limit = 2**63 if name == "step" else MAX_LAYER_ID
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
                raise TraceError(f"{where}, key {name}: expected a whole number from 0, found {value!r}")
        yield where, {**numbers, "ids": ids.reshape(len(ids), -1) if ids.size else ids.reshape(len(ids), 0)}
        if progress is not None:
            progress(done, total)
