"""Reads and writes placements: ours and those of other engines, recognised by content.

Our placement file is JSON: {"format": "moe_serve.placement", "num_logical", "num_ranks", "moe_layer_ids", "version",
"physical_to_logical_map": [[expert of each slot] per MoE layer]}; -1 = empty slot. Those of others lie in one file per
engine beside this one. Errors name the file and the key of a row, so that a wrong file is not mistaken for a wrong
placement; `Placement` checks the rest (every expert somewhere). Shape words: L = rows of the file, P = slots.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.files import sglang, tensorrt, vllm
from moe_serve.eplb.files.untrusted import (
    BYTE_ORDER_MARK,
    MAX_TABLE,
    MAX_TORCH_BYTES,
    check_layer_ids,
    is_torch_file,
    load_torch_file,
    read_json,
)
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError

_MAX_BYTES = 1 << 26  # 64 MiB: a placement of 1,000 layers x 10,000 slots
PLACEMENT_FORMAT = "moe_serve.placement"

# Counts [L, E] and the number of ranks -> the expert of each slot [L, P].
PlanCounts = Callable[[NDArray[np.int64], int], NDArray[np.int32]]


def read_placement(
    path: str | Path,
    num_ranks: int | None = None,
    num_logical: int | None = None,
    moe_layer_ids: Sequence[int] = (),
    *,
    plan_counts: PlanCounts | None = None,
    max_torch_bytes: int = MAX_TORCH_BYTES,
) -> Placement:
    """Returns the placement in a file: ours, SGLang's (json or .pt), TensorRT-LLM's YAML or a vllm-ascend map.

    num_ranks, num_logical, moe_layer_ids: of the model and system that will use it; checked against the file. None or
    empty: what the file says (SGLang and TensorRT-LLM do not say the number of ranks).
    plan_counts: plans a placement for a file that holds counts ("logical_count") instead; None: such a file is refused.
    Raises PlacementError with the file, the key, what was expected and what was found.
    """
    path = Path(path)
    if not os.path.isfile(path):  # not Path.is_file, which raises on a name that is too long
        raise PlacementError(f"placement file {path} does not exist; give the path of a placement, or 'trivial'")
    moe_layer_ids = tuple(int(layer) for layer in moe_layer_ids)
    content = _parse(path, max_torch_bytes)

    if vllm.is_expert_map(content):
        rows, devices = vllm.expert_map_rows(content, path)
        table, num_logical = slot_rows(rows, path, "layer_list", num_logical)
        return make_placement(table, path, num_logical, _same_ranks(num_ranks, devices, path), moe_layer_ids)
    if tensorrt.is_balancer_yaml(content):
        rows, layers = tensorrt.assignment_rows(content, path)
        table, num_logical = slot_rows(rows, path, "initial_global_assignments", num_logical)
        if moe_layer_ids and layers != moe_layer_ids:
            raise PlacementError(
                f"{path}: layers {list(layers)}, expected {list(moe_layer_ids)} (the model's MoE layers)"
            )
        return make_placement(table, path, num_logical, _known_ranks(num_ranks, path), layers)
    if not isinstance(content, dict) or not content.keys() & {"physical_to_logical_map", "logical_count"}:
        found = f"keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else type(content).__name__
        raise PlacementError(
            f"{path}: not a placement; expected 'physical_to_logical_map', 'logical_count', 'layer_list' or "
            f"'initial_global_assignments', found {found}"
        )
    if "physical_to_logical_map" not in content:
        return _from_counts(content, path, _known_ranks(num_ranks, path), num_logical, moe_layer_ids, plan_counts)
    version = 0
    if content.get("format") == PLACEMENT_FORMAT:
        num_ranks = _same_ranks(num_ranks, _number(content, "num_ranks", path), path)
        stated = _number(content, "num_logical", path)
        if num_logical is not None and stated != num_logical:
            raise PlacementError(f"{path}, key num_logical: {stated} experts, expected {num_logical} (the model's)")
        num_logical = stated
        version = _number(content, "version", path)
        own_layers = _layer_ids(content, path)
        if moe_layer_ids and own_layers and own_layers != moe_layer_ids:
            raise PlacementError(
                f"{path}, key moe_layer_ids: {list(own_layers)}, expected {list(moe_layer_ids)} "
                "(the model's MoE layers)"
            )
        moe_layer_ids = moe_layer_ids or own_layers
    table, num_logical = slot_rows(sglang.location_rows(content), path, "physical_to_logical_map", num_logical)
    return make_placement(table, path, num_logical, _known_ranks(num_ranks, path), moe_layer_ids, version)


def write_placement(
    placement: Placement, path: str | Path, target: str = "moe_serve", *, num_model_layers: int | None = None
) -> None:
    """Writes a placement for an engine. target: moe_serve, sglang, tensorrt_llm, vllm or vllm_ascend.

    vLLM itself reads no placement: its file has our form, and `adapters.vllm` installs it at the first rebalance.
    num_model_layers: for sglang, all layers of the model, dense ones included (None: up to the last MoE layer).
    Raises PlacementError when the target cannot express the placement (an empty slot).
    """
    if target not in TARGETS:
        raise PlacementError(f"placement target {target!r} is not known; use one of {', '.join(TARGETS)}")
    reader, write = TARGETS[target]
    if reader:
        refuse_empty_slots(placement, reader)
    write(placement, Path(path), num_model_layers)


class _Target(NamedTuple):
    """The form of placements for an engine. reader: reads them, and takes no empty slot; "" = it takes them"""

    reader: str
    write: Callable[[Placement, Path, int | None], None]


def _write_ours(placement: Placement, path: Path, num_model_layers: int | None) -> None:
    path.write_text(json.dumps(placement_to_json(placement)) + "\n", encoding="utf-8")


TARGETS = {
    "moe_serve": _Target("", _write_ours),
    "sglang": _Target("SGLang's --init-expert-location", sglang.write_location),
    "tensorrt_llm": _Target(
        "TensorRT-LLM's initial_global_assignments", lambda it, path, _: tensorrt.write_balancer_yaml(it, path)
    ),
    "vllm": _Target("vLLM's EPLB", _write_ours),
    "vllm_ascend": _Target("vllm-ascend's expert map", lambda it, path, _: vllm.write_expert_map(it, path)),
}


def placement_to_json(placement: Placement) -> dict[str, Any]:
    """Returns our placement file's content."""
    return {
        "format": PLACEMENT_FORMAT,
        "num_logical": placement.num_logical,
        "num_ranks": placement.num_ranks,
        "moe_layer_ids": list(placement.moe_layer_ids),
        "version": placement.version,
        "physical_to_logical_map": placement.physical_to_logical.tolist(),
    }


def _parse(path: Path, max_torch_bytes: int) -> Any:
    if is_torch_file(path):
        return load_torch_file(path, PlacementError, max_torch_bytes)
    with path.open("rb") as file:
        first = file.read(256).removeprefix(BYTE_ORDER_MARK).lstrip()[:1]
    if first not in (b"{", b"[") and path.suffix in (".yaml", ".yml"):
        return tensorrt.read_yaml(path)
    return read_json(path, PlacementError, "a placement file", _MAX_BYTES)


def _from_counts(
    content: dict[str, Any],
    path: Path,
    num_ranks: int,
    num_logical: int | None,
    moe_layer_ids: tuple[int, ...],
    plan_counts: PlanCounts | None,
) -> Placement:
    counts = sglang.location_counts(content, path, num_logical)
    if moe_layer_ids and len(counts) != len(moe_layer_ids):
        if len(counts) <= max(moe_layer_ids):
            raise PlacementError(
                f"{path}, key logical_count: {len(counts)} layers, expected {len(moe_layer_ids)} or at least "
                f"{max(moe_layer_ids) + 1}; are these the counts of another model?"
            )
        counts = counts[list(moe_layer_ids)]
    if plan_counts is None:
        raise PlacementError(f"{path} holds counts, not a placement; make one from them with moe-serve plan")
    return Placement(plan_counts(counts, num_ranks), counts.shape[1], num_ranks, moe_layer_ids)


def _number(content: dict[str, Any], key: str, path: Path) -> int:
    value = content.get(key)
    least = 0 if key == "version" else 1
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise PlacementError(f"{path}, key {key}: expected a whole number from {least}, found {value!r:.60}")
    return value


def _layer_ids(content: dict[str, Any], path: Path) -> tuple[int, ...]:
    ids = content.get("moe_layer_ids") or []
    if not isinstance(ids, list):
        raise PlacementError(f"{path}, key moe_layer_ids: expected a list of layer ids, found {ids!r:.60}")
    check_layer_ids(ids, f"{path}, key moe_layer_ids", PlacementError)
    return tuple(ids)


def _same_ranks(wanted: int | None, found: int, path: Path) -> int:
    if wanted is not None and wanted != found:
        raise PlacementError(
            f"{path} places experts on {found} ranks, expected {wanted}; plan for {wanted}, or start {found} ranks"
        )
    return found


def _known_ranks(num_ranks: int | None, path: Path) -> int:
    if num_ranks is None:
        raise PlacementError(f"{path} does not say over how many ranks its slots are spread; give the number (--ranks)")
    return num_ranks


def slot_rows(rows: Any, path: Path, key: str, num_logical: int | None) -> tuple[np.ndarray, int]:
    """Returns ([L, P] int32 expert of each slot, number of experts); -1 = empty slot.

    num_logical None: one more than the largest expert in the file.
    """
    if not isinstance(rows, Sequence) and not isinstance(rows, np.ndarray):
        raise PlacementError(
            f"{path}, key {key}: expected a list with one list of experts per layer, found {_kind(rows)}"
        )
    if len(rows) == 0:
        raise PlacementError(f"{path}, key {key}: no layers; expected one list of experts per layer")
    width: int | None = None
    for row, slots in enumerate(rows):
        if isinstance(slots, np.ndarray):
            slots = slots.tolist()
        if not isinstance(slots, Sequence) or isinstance(slots, str):
            raise PlacementError(f"{path}, key {key}[{row}]: expected a list of experts, found {_kind(slots)}")
        width = len(slots) if width is None else width
        if len(rows) * width > MAX_TABLE:  # aliases in a YAML file make a small file long
            raise PlacementError(f"{path}, key {key}: {len(rows)} layers x {width} slots; no model has so many")
        if len(slots) != width or not width:
            raise PlacementError(f"{path}, key {key}[{row}]: {len(slots)} slots, expected {width} (as in row 0)")
        for slot, expert in enumerate(slots):
            if isinstance(expert, bool) or not isinstance(expert, int | np.integer):
                raise PlacementError(f"{path}, key {key}[{row}][{slot}]: expected an expert id, found {expert!r}")
            if expert < -1 or (num_logical is not None and expert >= num_logical) or expert >= 2**31:
                limit = "" if num_logical is None else f" below {num_logical}, the experts of the model"
                raise PlacementError(
                    f"{path}, key {key}[{row}][{slot}]: expert {expert}, expected an id{limit} (-1 = empty slot)"
                )
    table = np.asarray(rows, dtype=np.int32)
    num_logical = int(table.max()) + 1 if num_logical is None else num_logical
    if num_logical > table.shape[1]:
        raise PlacementError(
            f"{path}: {table.shape[1]} slots in key {key} for {num_logical} experts; every expert needs at least one"
        )
    return table, num_logical


def make_placement(
    table: np.ndarray, path: Path, num_logical: int, num_ranks: int, moe_layer_ids: Sequence[int], version: int = 0
) -> Placement:
    """Returns the placement of the given model layers from a file's rows, one per MoE layer or one per model layer."""
    if table.shape[1] % num_ranks:
        raise PlacementError(
            f"{path}: {table.shape[1]} slots do not divide over {num_ranks} ranks; "
            f"use a placement made for {num_ranks} ranks, or start with a number of ranks that divides {table.shape[1]}"
        )
    rows = table
    if moe_layer_ids and len(table) != len(moe_layer_ids):
        if len(table) <= max(moe_layer_ids):
            raise PlacementError(
                f"{path}: {len(table)} layers, expected {len(moe_layer_ids)} (one per MoE layer) or at least "
                f"{max(moe_layer_ids) + 1} (one per layer of the model); is this the placement of another model?"
            )
        rows = table[list(moe_layer_ids)]
    try:
        return Placement(rows, num_logical, num_ranks, tuple(moe_layer_ids), version)
    except PlacementError as problem:
        raise PlacementError(f"{path}: {problem}") from None


def filled_in_place(placement: Placement) -> Placement:
    """Returns the placement with every empty slot filled where that moves no load from one rank to another.

    An empty slot takes the lowest expert whose replicas all lie on the slot's rank: split evenly over its replicas, its
    tokens stay there. A slot of a rank without such an expert stays empty.
    """
    table = placement.physical_to_logical.copy()
    by_rank = table.reshape(placement.by_rank.shape)
    for row, rank in np.unique(np.argwhere(by_rank < 0)[:, :2], axis=0).tolist():
        held = by_rank[row, rank]
        here = np.bincount(held[held >= 0], minlength=placement.num_logical)
        alone = np.flatnonzero((here > 0) & (here == placement.replica_count[row]))
        if len(alone):
            held[held < 0] = alone[0]
    return replace(placement, physical_to_logical=table)


def refuse_empty_slots(placement: Placement, target: str) -> None:
    """Raises when a placement has empty slots and the target format cannot express them."""
    empty = np.argwhere(placement.physical_to_logical < 0)
    if len(empty):
        row, slot = (int(i) for i in empty[0])
        raise PlacementError(
            f"{len(empty)} slots are empty (the first: layer {placement.moe_layer_ids[row]}, slot {slot}) and {target} "
            f"cannot express that; plan with --for, which fills them, or write our own json"
        )


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "nothing"}.get(type(value), repr(value)[:40])
