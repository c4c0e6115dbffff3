"""What SGLang's expert distribution recorder dumps (`/dump_expert_distribution_record`), as load traces.

stat, stat_approx: one .pt {"rank", "logical_count": [steps, model layers, E], …}, already summed over ranks.
per_pass:  one .pt per rank {"records": [{"forward_pass_id", "rank", "gatherer_key", "global_physical_count":
           [model layers, P]}], "last_physical_to_logical_map": [model layers, P]}.
per_token: the same with "topk_ids_of_layer" [model layers, tokens, 8] (physical ids, -1 = none) in every record.
SGLang counts dense layers too, as zeros: rows that are zero throughout are left out, the others keep their layer id.
If the placement changed while it recorded, per_pass and per_token dumps name the last map only and mislead: record
between rebalances.
Passes are read in `sglang_passes.py`; several recordings in one folder are kept apart in `sglang_recordings.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.counts import as_array, check_table_size
from moe_serve.eplb.files.sglang_passes import passes_trace
from moe_serve.eplb.files.torch_file import MAX_TORCH_BYTES, load_torch_file
from moe_serve.eplb.files.trace_meta import ByteProgress
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError


def read_sglang(
    paths: list[Path], progress: ByteProgress | None = None, max_torch_bytes: int = MAX_TORCH_BYTES
) -> LoadTrace:
    """Returns the trace in one stat dump, or in the per_pass or per_token dumps of all ranks."""
    contents = [(path, load_torch_file(path, TraceError, max_torch_bytes)) for path in paths]
    kinds = {path: _kind(content, path) for path, content in contents}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{path.name}: {kind}" for path, kind in kinds.items())
        raise TraceError(f"dumps of different recorder modes are mixed ({listed}); give those of one recording")
    if kinds[paths[0]] == "stat":
        if len(contents) > 1:
            raise TraceError(
                f"{paths[0].parent} holds {len(contents)} stat dumps, and each is a recording of its own; give one file"
            )
        return stat_trace(contents[0][1]["logical_count"], paths[0], progress)
    return passes_trace(contents, progress)


def stat_trace(logical_count: Any, path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace of `logical_count` [steps, model layers, E] (or [model layers, E]: one step)."""
    counts = as_array(logical_count, f"{path}, key logical_count")  # a view of the mapped file where it is a tensor
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3 or counts.dtype.kind not in "iuf":
        raise TraceError(
            f"{path}, key logical_count: shape {list(counts.shape)} of {counts.dtype}, expected counts "
            f"[steps, layers, experts]"
        )
    check_table_size(counts.shape[1], counts.shape[2], f"{path}, key logical_count")
    used = np.zeros(counts.shape[1], dtype=bool)
    for step in counts:
        used |= step.any(axis=1)
    layers = np.flatnonzero(used)
    if not len(layers):
        raise TraceError(f"{path}, key logical_count: no tokens in {len(counts)} steps; record while requests run")
    opener = _Steps(counts, layers, path, progress)
    return LoadTrace(
        opener, counts.shape[2], tuple(layers.tolist()), source=f"{path} (SGLang stat)", num_records=len(counts)
    )


@dataclass(frozen=True, eq=False)
class _Steps:
    counts: np.ndarray
    layers: np.ndarray
    path: Path
    progress: ByteProgress | None

    def __call__(self) -> Iterator[LoadRecord]:
        for index, step in enumerate(self.counts):
            try:
                yield LoadRecord(index, 1, "mixed", step[self.layers])
            except TraceError as problem:
                raise TraceError(f"{self.path}, key logical_count[{index}]: {problem}") from None
            if self.progress is not None:
                self.progress(index + 1, len(self.counts))


def _kind(content: Any, path: Path) -> str:
    if isinstance(content, dict) and "logical_count" in content:
        return "stat"
    if isinstance(content, dict) and "records" in content:
        if "last_physical_to_logical_map" not in content:
            raise TraceError(f"{path}, key last_physical_to_logical_map: not there; expected beside 'records'")
        return "per_pass or per_token"
    if isinstance(content, dict) and "physical_to_logical_map" in content:
        raise TraceError(f"{path} is a placement, not a load trace; give it as --current, or convert it")
    found = f"keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else type(content).__name__
    raise TraceError(f"{path}: not an SGLang dump; expected 'logical_count' or 'records', found {found}")
