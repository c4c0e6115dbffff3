"""vllm-ascend's expert map: which experts each device holds, layer by layer.

{"moe_layer_count", "layer_list": [{"layer_id", "device_count", "device_list": [{"device_id", "device_expert": […]}]}]}
`layer_id` counts MoE layers from 0, not layers of the model. Devices hold equally many experts; none is empty.
"""

import json
from pathlib import Path
from typing import Any

from moe_serve.eplb.files.placement_rows import refuse_empty_slots
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError


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
    refuse_empty_slots(placement, "vllm-ascend's expert map")
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
