"""Reads and writes placements: ours and those of other engines, recognised by content.

One file per format lies beside this one; here is only the choice. Our placement file is JSON: {"format":
"moe_serve.placement", "num_logical", "num_ranks", "moe_layer_ids", "version", "physical_to_logical_map": [[expert of
each slot] per MoE layer]}; -1 = empty slot.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.files import ascend, sglang, tensorrt
from moe_serve.eplb.files.counts import check_layer_ids
from moe_serve.eplb.files.json_text import BYTE_ORDER_MARK, read_json
from moe_serve.eplb.files.placement_rows import make_placement, refuse_empty_slots, slot_rows
from moe_serve.eplb.files.torch_file import MAX_TORCH_BYTES, is_torch_file, load_torch_file
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError

PlacementTarget = Literal["moe_serve", "sglang", "tensorrt_llm", "vllm", "vllm_ascend"]
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

    if ascend.is_expert_map(content):
        rows, devices = ascend.expert_map_rows(content, path)
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
    path = Path(path)
    match target:
        case "moe_serve":
            path.write_text(json.dumps(placement_to_json(placement)) + "\n", encoding="utf-8")
        case "vllm":
            refuse_empty_slots(placement, "vLLM's EPLB")
            path.write_text(json.dumps(placement_to_json(placement)) + "\n", encoding="utf-8")
        case "sglang":
            sglang.write_location(placement, path, num_model_layers)
        case "tensorrt_llm":
            tensorrt.write_balancer_yaml(placement, path)
        case "vllm_ascend":
            ascend.write_expert_map(placement, path)
        case _:
            known = ", ".join(get_args(PlacementTarget))
            raise PlacementError(f"placement target {target!r} is not known; use one of {known}")


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
