"""TensorRT-LLM's files: the YAML of its MoE load balancer, and the expert statistics it collects.

YAML: `num_slots`, `layer_updates_per_iter`, `initial_global_assignments: {model layer id: [expert] * num_slots}`.
Statistics folder: `meta_info.json` (num_experts, num_experts_per_token) and `rank*.safetensors` with one tensor
"{iteration}_{layer}" of counts [E] per key, to be summed over the rank files; or `rank*_raw.safetensors` with the
chosen experts [tokens, topk] instead. Layers are layers of the model.
Layout learned from examples/wide_ep/ep_load_balancer of TensorRT-LLM.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moe_serve.eplb.files.untrusted import ByteProgress, check_table_size, counted, read_json
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError, TraceError

_TABLES = "initial_global_assignments"
_KEY = re.compile(r"(\d{1,18})_(\d{1,6})")  # of a tensor: iteration and layer
_DEEPEST = 20  # lists and objects within each other; a placement has three


def is_balancer_yaml(content: Any) -> bool:
    """Returns whether parsed YAML is a load balancer configuration with a placement in it."""
    return isinstance(content, dict) and _TABLES in content


def assignment_rows(content: dict[Any, Any], path: Path) -> tuple[list[Any], tuple[int, ...]]:
    """Returns (one list of experts per layer, the model layer ids), ascending by layer."""
    assignments = content[_TABLES]
    if not isinstance(assignments, dict) or not all(isinstance(layer, int) for layer in assignments):
        raise PlacementError(
            f"{path}, key {_TABLES}: expected {{layer id: [experts]}}, found {type(assignments).__name__}"
        )
    layers = sorted(assignments)
    num_slots = content.get("num_slots")
    for layer in layers:
        slots = assignments[layer]
        if num_slots is not None and isinstance(slots, Sequence) and len(slots) != num_slots:
            raise PlacementError(
                f"{path}, key {_TABLES}.{layer}: {len(slots)} slots, expected {num_slots} (num_slots of the same file)"
            )
    return [assignments[layer] for layer in layers], tuple(layers)


def write_balancer_yaml(placement: Placement, path: Path) -> None:
    """Writes the `moe_load_balancer` file; its layer_updates_per_iter 0 keeps the placement as it is (offline mode)."""
    lines = [f"num_slots: {placement.num_slots}", "layer_updates_per_iter: 0", f"{_TABLES}:"]
    for layer, slots in zip(placement.moe_layer_ids, placement.physical_to_logical.tolist(), strict=True):
        lines.append(f"  {layer}: {slots}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_yaml(path: Path) -> Any:
    """Returns parsed YAML; the error names the line."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is ten times as fast, where libyaml is there
    try:
        text = path.read_text(encoding="utf-8")
        _check_depth(yaml.parse(text, Loader=loader), path)
        return yaml.load(text, Loader=loader)
    except UnicodeDecodeError:
        raise PlacementError(f"{path} is not text; give a placement file") from None
    except yaml.reader.ReaderError as problem:
        raise PlacementError(f"{path}: not YAML text ({problem.reason}); give a placement file") from None
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else "?"
        raise PlacementError(f"{path} line {line}: not YAML ({problem.problem}); is the file complete?") from None


def _check_depth(events: Iterable[yaml.Event], path: Path) -> None:
    """Refuses deeper nesting than any placement has: the composer recurses, and libyaml's ends the process."""
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise PlacementError(f"{path}: nested too deeply; give a placement file")


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
    in_order = [files[rank] for rank in sorted(files)]

    def records() -> Iterator[LoadRecord]:
        with ExitStack() as stack:
            opened = [(stack.enter_context(_open(path)), path) for path in in_order]
            for iteration in counted(iterations, len(iterations), progress):
                keys = [f"{iteration}_{layer}" for layer in layers]
                source = np.stack(
                    [[_tokens(file, path, key, num_experts, raw) for key in keys] for file, path in opened], axis=1
                )  # [L, R, E]
                differ = (source != source[:, :1]).any()
                yield LoadRecord(iteration, 1, "mixed", source.sum(axis=1), by_source=source if differ else None)

    return LoadTrace(
        records,
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


def _tokens(file: Any, path: Path, key: str, num_experts: int, raw: bool) -> np.ndarray:
    """Returns the counts [E] under a key; raw: of the chosen experts that it holds instead."""
    values = np.asarray(file.get_tensor(key))
    if raw:
        ids = values[(values >= 0) & (values < num_experts)].astype(np.int64)
        return np.bincount(ids, minlength=num_experts)
    if values.shape != (num_experts,):
        raise TraceError(f"{path}, key '{key}': shape {list(values.shape)}, expected [{num_experts}] as in meta_info")
    return values.astype(np.int64)
