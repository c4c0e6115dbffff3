"""SGLang's files: expert locations in and out, and what its expert distribution recorder dumps.

Locations (`--init-expert-location`): an object with "physical_to_logical_map" [model layers, P], used as it is, or with
"logical_count" [model layers, E] or [steps, model layers, E], from which a placement is planned. JSON or .pt by suffix.
SGLang counts every layer of the model, dense ones included; the rows of dense layers mean nothing there.
Layout learned from sglang/srt/eplb/expert_location.py and expert_distribution.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.counts import check_table_size, whole_counts
from moe_serve.eplb.files.placement_rows import refuse_empty_slots
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError


def location_rows(content: dict[str, Any]) -> Any:
    """Returns the nested list or array under "physical_to_logical_map"."""
    rows = content["physical_to_logical_map"]
    return np.asarray(rows.numpy()) if hasattr(rows, "numpy") else rows


def location_counts(content: dict[str, Any], path: Path, num_logical: int | None) -> np.ndarray:
    """Returns [model layers, E] int64, the counts under "logical_count" summed over its steps."""
    raw = content["logical_count"]
    counts = whole_counts(raw, f"{path}, key logical_count", PlacementError)
    if counts.ndim == 3:
        counts = counts.sum(axis=0)
    if counts.ndim != 2 or not counts.size or counts.min() < 0:
        raise PlacementError(
            f"{path}, key logical_count: shape {list(counts.shape)} of {counts.dtype}, "
            f"expected token counts [layers, experts] or [steps, layers, experts]"
        )
    if num_logical is not None and counts.shape[1] != num_logical:
        raise PlacementError(
            f"{path}, key logical_count: {counts.shape[1]} experts, expected {num_logical} (as the model has)"
        )
    check_table_size(len(counts), counts.shape[1], f"{path}, key logical_count", PlacementError)
    return counts


def write_location(placement: Placement, path: Path, num_model_layers: int | None = None) -> None:
    """Writes a file for SGLang's `--init-expert-location`; .pt needs torch, anything else is JSON.

    num_model_layers: all layers of the model (None: up to the last MoE layer); dense ones hold experts in order.
    """
    refuse_empty_slots(placement, "SGLang's --init-expert-location")
    layer_ids: Sequence[int] = placement.moe_layer_ids or range(placement.num_layers)
    rows = max(max(layer_ids) + 1, num_model_layers or 0)
    table = np.tile(np.arange(placement.num_slots, dtype=np.int64) % placement.num_logical, (rows, 1))
    table[list(layer_ids)] = placement.physical_to_logical
    if path.suffix == ".pt":
        try:
            import torch
        except ImportError:
            raise PlacementError(f"writing {path} needs torch; name a .json file instead") from None
        torch.save({"physical_to_logical_map": torch.from_numpy(table)}, path)
    else:
        path.write_text(json.dumps({"physical_to_logical_map": table.tolist()}) + "\n", encoding="utf-8")
