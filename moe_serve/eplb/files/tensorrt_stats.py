"""TensorRT-LLM's expert statistics (EXPERT_STATISTIC_PATH), as load traces.

A folder with `meta_info.json` {"num_experts", "num_experts_per_token", …} and, for every rank, `rank{r}.safetensors`
with one tensor "{iteration}_{layer}" of counts [E] per key; or `rank{r}_raw.safetensors` with the chosen experts
[tokens, topk] instead. Counts of the ranks add up; layers are layers of the model.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.counts import check_table_size
from moe_serve.eplb.files.json_text import read_json
from moe_serve.eplb.files.trace_meta import ByteProgress
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.errors import TraceError

_KEY = re.compile(r"(\d{1,18})_(\d{1,6})")


def is_statistics_folder(path: Path) -> bool:
    """Returns whether a folder holds TensorRT-LLM statistics."""
    return (path / "meta_info.json").is_file()


def read_tensorrt(path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace of a statistics folder, one record per iteration."""
    meta = read_json(path / "meta_info.json", TraceError, "TensorRT-LLM's statistics")
    num_experts = meta.get("num_experts") if isinstance(meta, dict) else None
    if not isinstance(num_experts, int) or num_experts < 1:
        raise TraceError(f"{path}/meta_info.json, key num_experts: expected a number of experts, found {num_experts!r}")
    raw = False
    files = _rank_files(path, r"rank(\d+)\.safetensors")
    if not files:
        raw, files = True, _rank_files(path, r"rank(\d+)_raw\.safetensors")
    if not files:
        raise TraceError(f"{path}: no rank*.safetensors beside meta_info.json; copy the files of all ranks")
    if sorted(files) != list(range(len(files))):
        raise TraceError(
            f"{path}: statistics of ranks {sorted(files)}, expected 0 to {max(files)}; copy the missing ones"
        )
    keys: set[tuple[int, int]] | None = None
    for rank in sorted(files):
        found = _keys(files[rank])
        if keys is not None and found != keys:
            odd = sorted(found ^ keys)[0]
            raise TraceError(
                f"{files[rank]}: iterations and layers differ from rank 0 (the first: '{odd[0]}_{odd[1]}'); statistics "
                f"of different runs are mixed"
            )
        keys = found
    assert keys is not None
    iterations, layers = sorted({i for i, _ in keys}), sorted({layer for _, layer in keys})
    check_table_size(len(layers) * len(files), num_experts, f"{path}, {len(files)} ranks")
    if len(keys) != len(iterations) * len(layers):
        missing = sorted({(i, layer) for i in iterations for layer in layers} - keys)[0]
        raise TraceError(f"{files[0]}, key '{missing[0]}_{missing[1]}': not there; is the file cut off?")
    topk = meta.get("num_experts_per_token")
    return LoadTrace(
        _Reader(tuple(files[rank] for rank in sorted(files)), iterations, layers, num_experts, raw, progress),
        num_experts,
        tuple(layers),
        topk if isinstance(topk, int) else None,
        source=f"{path} (TensorRT-LLM statistics of {len(files)} ranks)",
        num_records=len(iterations),
    )


def _rank_files(path: Path, pattern: str) -> dict[int, Path]:
    matches = ((re.fullmatch(pattern, file.name), file) for file in sorted(path.iterdir()))
    return {int(match.group(1)): file for match, file in matches if match and file.is_file()}


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as problem:
        raise TraceError(f"{path} is cut off or not a safetensors file ({problem}); copy it again") from None


def _keys(path: Path) -> set[tuple[int, int]]:
    with _open(path) as file:
        found = set()
        for key in file.keys():  # noqa: SIM118  # not a mapping
            match = _KEY.fullmatch(key)
            if match is None:
                raise TraceError(f"{path}, key {key!r}: expected '{{iteration}}_{{layer}}'; not expert statistics")
            found.add((int(match.group(1)), int(match.group(2))))
    if not found:
        raise TraceError(f"{path}: no statistics in it; set EXPERT_STATISTIC_ITER_RANGE to iterations that run")
    return found


@dataclass(frozen=True)
class _Reader:
    files: tuple[Path, ...]
    iterations: list[int]
    layers: list[int]
    num_experts: int
    raw: bool
    progress: ByteProgress | None

    def __call__(self) -> Iterator[LoadRecord]:
        with ExitStack() as stack:
            opened = [stack.enter_context(_open(path)) for path in self.files]
            for index, iteration in enumerate(self.iterations):
                source = np.stack(
                    [
                        [self._counts(file, path, f"{iteration}_{layer}") for layer in self.layers]
                        for file, path in zip(opened, self.files, strict=True)
                    ]
                )  # [R, L, E]
                differ = len(source) > 1 and (source != source[0]).any()
                yield LoadRecord(
                    iteration,
                    1,
                    "mixed",
                    source.sum(axis=0),
                    by_source=source.transpose(1, 0, 2) if differ else None,
                )
                if self.progress is not None:
                    self.progress(index + 1, len(self.iterations))

    def _counts(self, file: Any, path: Path, key: str) -> np.ndarray:
        values = np.asarray(file.get_tensor(key))
        if self.raw:
            ids = values[(values >= 0) & (values < self.num_experts)].astype(np.int64)
            return np.bincount(ids, minlength=self.num_experts)
        if values.shape != (self.num_experts,):
            raise TraceError(
                f"{path}, key '{key}': shape {list(values.shape)}, expected [{self.num_experts}] as in meta_info"
            )
        return values.astype(np.int64)
