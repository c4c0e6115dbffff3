"""Files of vLLM and vllm-ascend: expert loads as load traces, and the expert map of the latter in and out.

ADRS:  {"load_history": [{"logical_expert_load": [[E] per layer]}, …]}, which ADRS / OpenEvolve published; the file has
       224 MB and is streamed.
dumps: .json or .jsonl objects with "logical_expert_load" [L, E] (or [steps, L, E]), or with "physical_expert_load"
       [L, P] and "physical_to_logical_map" [L, P]; "step" where they say it. The schema of vLLM's
       expert_load_dump_dir is not documented: anything else is refused by its keys.
map:   {"moe_layer_count", "layer_list": [{"layer_id", "device_count", "device_list": [{"device_id", "device_expert":
       […]}]}]}; `layer_id` counts MoE layers from 0, not layers of the model. Devices hold equally many experts, and
       none of their slots is empty.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.untrusted import (
    ByteProgress,
    check_table_size,
    json_lines,
    naming,
    parse_json,
    read_json,
    whole_counts,
)
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError, TraceError

_LOGICAL = "logical_expert_load"
_PHYSICAL = ("physical_expert_load", "expert_load", "expert_load_pass")
_MAP = "physical_to_logical_map"
_CHUNK = 1 << 20
_MAX_ELEMENT = 1 << 28  # 256 MiB: an element larger than this is not a record, but a file of another kind
_STRUCTURE = re.compile(rb'["\[\]{}]')
_STRING_END = re.compile(rb'["\\]')


def is_dump(content: Any) -> bool:
    """Returns whether a parsed JSON object is one window of expert load."""
    return isinstance(content, dict) and (
        _LOGICAL in content or (_MAP in content and any(k in content for k in _PHYSICAL))
    )


def read_history(path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in a `load_history` file."""

    def windows(report: ByteProgress | None) -> Iterator[tuple[str, Any]]:
        for index, entry in enumerate(_iter_array(path, "load_history", report)):
            yield f"{path}, key load_history[{index}]", entry

    return _trace(windows, progress, f"{path} (ADRS load_history)", path)


def read_dumps(paths: list[Path], progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in dump files, in the order of their names."""

    def windows(report: ByteProgress | None) -> Iterator[tuple[str, Any]]:
        for number, path in enumerate(paths):
            yield from _objects(path)
            if report is not None:
                report(number + 1, len(paths))

    return _trace(windows, progress, f"{paths[0] if len(paths) == 1 else paths[0].parent} (vLLM dump)", paths[0])


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".json":
        content = read_json(path, TraceError, "a load trace, or .jsonl with one window per line")
        entries = content if isinstance(content, list) else [content]
        yield from ((f"{path}[{index}]", entry) for index, entry in enumerate(entries))
        return
    yield from ((f"{path} line {number}", content) for number, _, content in json_lines(path))


def _trace(
    windows: Callable[[ByteProgress | None], Iterator[tuple[str, Any]]],
    progress: ByteProgress | None,
    source: str,
    path: Path,
) -> LoadTrace:
    first = next(windows(None), None)
    if first is None:
        raise TraceError(f"{path}: no windows in it; expected objects with {_LOGICAL!r}")
    _, num_layers, num_experts = window_counts(first[1], first[0]).shape

    def records() -> Iterator[LoadRecord]:
        step = 0
        for where, entry in windows(progress):
            counts = window_counts(entry, where)  # [steps, L, E]
            if counts.shape[1:] != (num_layers, num_experts):
                raise TraceError(
                    f"{where}: {counts.shape[1]} layers x {counts.shape[2]} experts, expected {num_layers} x "
                    f"{num_experts} (as in the first window)"
                )
            stated = entry.get("step")
            step = stated if isinstance(stated, int) and stated >= 0 else step
            with naming(where):
                record = LoadRecord(
                    step, len(counts), "mixed", counts.sum(axis=0), per_step=counts if len(counts) > 1 else None
                )
            yield record
            step += len(counts)

    return LoadTrace(records, num_experts, tuple(range(num_layers)), source=source)


def window_counts(entry: Any, where: str) -> np.ndarray:
    """Returns [steps, L, E] int64, the logical counts of one window."""
    if not is_dump(entry):
        found = f"keys {sorted(map(str, entry))[:6]}" if isinstance(entry, dict) else repr(entry)[:60]
        raise TraceError(f"{where}: expected {_LOGICAL!r}, or {_PHYSICAL[0]!r} with {_MAP!r}, found {found}")
    key = _LOGICAL if _LOGICAL in entry else next(k for k in _PHYSICAL if k in entry)
    counts = whole_counts(entry[key], f"{where}, key {key}")
    counts = counts[None] if counts.ndim == 2 else counts
    if counts.ndim != 3:
        raise TraceError(f"{where}, key {key}: {counts.ndim} dimensions, expected [layers, experts] or steps of them")
    if key == _LOGICAL:
        return counts
    table = whole_counts(entry[_MAP], f"{where}, key {_MAP}")
    if table.shape != counts.shape[1:] or table.min(initial=0) < -1:
        raise TraceError(f"{where}, key {_MAP}: shape {list(table.shape)}, expected {list(counts.shape[1:])} as {key}")
    check_table_size(len(table), int(table.max(initial=0)) + 1, f"{where}, key {_MAP}")
    # The last column takes the empty slots.
    logical = np.zeros((len(counts), len(table), int(table.max(initial=-1)) + 2), dtype=np.int64)
    rows = np.arange(len(table))[:, None]
    for step, physical in zip(logical, counts, strict=True):
        np.add.at(step, (rows, table), physical)
    return logical[:, :, :-1]


def _iter_array(path: Path, key: str, progress: ByteProgress | None = None) -> Iterator[Any]:
    """Yields the elements of the array under a key of the file's outermost object, in bounded memory.

    Only the structure is scanned (brackets, braces and quotes); each element is then parsed as ordinary JSON, so memory
    is needed for the largest element only.
    Elements must be objects or arrays. Raises TraceError naming the file, the key and the element.
    """
    total = path.stat().st_size
    with path.open("rb") as file:
        buffer = _skip_to_array(file.read, path, key)
        index = 0
        depth = 0
        start = position = 0
        while True:
            match = _STRUCTURE.search(buffer, position)
            if match is None:
                position = len(buffer)
                if depth == 0:  # only commas and white space lie between elements
                    buffer, position = b"", 0
                elif len(buffer) - start > _MAX_ELEMENT:
                    raise TraceError(
                        f"{path}, key {key}[{index}]: more than {_MAX_ELEMENT >> 20} MiB; not a load record"
                    )
                else:
                    buffer, position, start = buffer[start:], position - start, 0
                chunk = file.read(_CHUNK)
                if not chunk:
                    raise TraceError(f"{path} ends inside {key}[{index}]; expected ']' and '}}': the file is cut off")
                buffer += chunk
                continue
            character = match.group()
            position = match.end()
            if character == b'"':
                while True:  # to the closing quote; an escape takes the next byte with it
                    quote = _STRING_END.search(buffer, position)
                    if quote is None or (quote.group() == b"\\" and quote.end() == len(buffer)):
                        if len(buffer) > _MAX_ELEMENT:
                            raise TraceError(f"{path}: a text of more than {_MAX_ELEMENT >> 20} MiB in {key}[{index}]")
                        chunk = file.read(_CHUNK)
                        if not chunk:
                            raise TraceError(f"{path} ends inside a text in {key}[{index}]: the file is cut off")
                        buffer += chunk
                        continue
                    position = quote.end() + (quote.group() == b"\\")
                    if quote.group() == b'"':
                        break
            elif character in b"[{":
                if depth == 0:
                    start = match.start()
                depth += 1
            elif depth == 0:
                return  # the ']' of the array itself
            else:
                depth -= 1
                if depth == 0:
                    yield parse_json(buffer[start:position], f"{path}, key {key}[{index}]")
                    index += 1
                    if progress is not None:
                        progress(file.tell() - len(buffer) + position, total)
                    if position > _CHUNK:
                        buffer, position = buffer[position:], 0


def _skip_to_array(read: Callable[[int], bytes], path: Path, key: str) -> bytes:
    """Returns the buffer that begins right behind the '[' of the key's array."""
    opening = re.compile(rb'"' + re.escape(key.encode()) + rb'"\s*:\s*(.?)', re.DOTALL)
    buffer = b""
    while len(buffer) < 16 * _CHUNK:
        chunk = read(_CHUNK)
        buffer += chunk
        match = opening.search(buffer)
        if match and match.group(1):
            if match.group(1) != b"[":
                raise TraceError(f"{path}, key {key}: expected a list of records, found {match.group(1)!r}…")
            return buffer[match.end() :]
        if not chunk:
            break
    raise TraceError(f"{path}: key {key} not found; expected {{{key!r}: [...]}}")


def is_expert_map(content: Any) -> bool:
    """Returns whether parsed JSON is such a map."""
    return isinstance(content, dict) and "layer_list" in content


def expert_map_rows(content: dict[str, Any], path: Path) -> tuple[list[list[int]], int]:
    """Returns (experts by slot of each layer, number of devices)."""
    layers = content["layer_list"]
    if not isinstance(layers, list) or not layers:
        raise PlacementError(f"{path}, key layer_list: expected one entry per MoE layer, found none")
    stated = content.get("moe_layer_count", len(layers))
    if stated != len(layers):
        raise PlacementError(f"{path}, key layer_list: {len(layers)} layers, expected {stated} (moe_layer_count)")
    rows: list[list[int]] = []
    num_devices = 0
    for index, layer in enumerate(layers):
        where = f"{path}, key layer_list[{index}].device_list"
        devices = layer.get("device_list") if isinstance(layer, dict) else None
        if not isinstance(devices, list) or not devices:
            raise PlacementError(f"{where}: expected the devices of the layer, found none")
        if layer.get("layer_id", index) != index:
            raise PlacementError(f"{path}, key layer_list[{index}].layer_id: {layer['layer_id']}, expected {index}")
        if not all(isinstance(device, dict) and type(device.get("device_id", 0)) is int for device in devices):
            raise PlacementError(f"{where}: expected objects with device_id and device_expert, found {devices!r:.60}")
        num_devices = num_devices or len(devices)
        if len(devices) != num_devices:
            raise PlacementError(f"{where}: {len(devices)} devices, expected {num_devices} (as in layer 0)")
        slots: list[int] = []
        for number, device in enumerate(sorted(devices, key=lambda entry: entry.get("device_id", 0))):
            experts = device.get("device_expert")
            if not isinstance(experts, list) or len(experts) != len(devices[0].get("device_expert") or ()):
                raise PlacementError(
                    f"{where}[{number}].device_expert: expected a list of {len(devices[0].get('device_expert') or ())} "
                    f"experts (as device 0 has), found {experts!r:.60}"
                )
            slots += experts
        rows.append(slots)
    return rows, num_devices


def write_expert_map(placement: Placement, path: Path) -> None:
    """Writes the map for vllm-ascend's `expert_map_path`."""
    per_device = placement.slots_per_rank
    layers = [
        {
            "layer_id": row,
            "device_count": placement.num_ranks,
            "device_list": [
                {"device_id": rank, "device_expert": slots[rank * per_device : (rank + 1) * per_device]}
                for rank in range(placement.num_ranks)
            ],
        }
        for row, slots in enumerate(placement.physical_to_logical.tolist())
    ]
    path.write_text(json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n", encoding="utf-8")
