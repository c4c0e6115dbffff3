"""TensorRT-LLM's files: the YAML of its MoE load balancer, and the expert statistics it collects.

YAML: `num_slots`, `layer_updates_per_iter`, `initial_global_assignments: {model layer id: [expert] * num_slots}`.
Statistics folder: `meta_info.json` (num_experts, num_experts_per_token) and `rank*.safetensors` with one tensor
"{iteration}_{layer}" of counts [E] per key, to be summed over the rank files.
Layout learned from examples/wide_ep/ep_load_balancer of TensorRT-LLM.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from moe_serve.eplb.files.placement_rows import refuse_empty_slots
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError

_KEY = "initial_global_assignments"
_DEEPEST = 20  # lists and objects within each other; a placement has three


def is_balancer_yaml(content: Any) -> bool:
    """Returns whether parsed YAML is a load balancer configuration with a placement in it."""
    return isinstance(content, dict) and _KEY in content


def assignment_rows(content: dict[Any, Any], path: Path) -> tuple[list[Any], tuple[int, ...]]:
    """Returns (one list of experts per layer, the model layer ids), ascending by layer."""
    assignments = content[_KEY]
    if not isinstance(assignments, dict) or not all(isinstance(layer, int) for layer in assignments):
        raise PlacementError(
            f"{path}, key {_KEY}: expected {{layer id: [experts]}}, found {type(assignments).__name__}"
        )
    layers = sorted(assignments)
    num_slots = content.get("num_slots")
    for layer in layers:
        slots = assignments[layer]
        if num_slots is not None and isinstance(slots, Sequence) and len(slots) != num_slots:
            raise PlacementError(
                f"{path}, key {_KEY}.{layer}: {len(slots)} slots, expected {num_slots} (num_slots of the same file)"
            )
    return [assignments[layer] for layer in layers], tuple(layers)


def write_balancer_yaml(placement: Placement, path: Path) -> None:
    """Writes the `moe_load_balancer` file; its layer_updates_per_iter 0 keeps the placement as it is (offline mode)."""
    refuse_empty_slots(placement, "TensorRT-LLM's initial_global_assignments")
    layer_ids: Sequence[int] = placement.moe_layer_ids or range(placement.num_layers)
    lines = [f"num_slots: {placement.num_slots}", "layer_updates_per_iter: 0", f"{_KEY}:"]
    for layer, slots in zip(layer_ids, placement.physical_to_logical.tolist(), strict=True):
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
    """Refuses what is nested more deeply than any placement: the composer recurses, and libyaml's ends the process."""
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise PlacementError(f"{path}: nested too deeply; give a placement file")
