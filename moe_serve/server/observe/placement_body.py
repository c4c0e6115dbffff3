"""Parses the body of `POST /eplb/placement`: JSON bytes in, one row of experts per MoE layer out. Torch-free.

Types and sizes are checked here, before a rank sees them; whether the placement is legal is the balancer's to say.
"""

from dataclasses import dataclass
from typing import Any

from moe_serve.errors import RequestError
from moe_serve.server.edge.json_fields import Fields, id_list, natural_number, parse_json, short_name, show

PLACEMENT_FORMAT = "moe_serve.placement"  # of eplb/files/placements.py, which reads what is written here
_MAP = "physical_to_logical_map"


@dataclass(frozen=True)
class PlacementShape:
    """What a placement must fit. moe_layer_ids: of the model, one for each row"""

    num_ranks: int
    num_logical: int
    num_slots: int
    moe_layer_ids: tuple[int, ...]

    @property
    def max_bytes(self) -> int:
        """Returns more than any body with a placement of this shape has, rows of dense layers and indents included."""
        return 2**16 + 32 * self.num_slots * (1 + max(self.moe_layer_ids, default=0))


def placement_json(rows: list[list[int]], version: int, shape: PlacementShape) -> dict[str, Any]:
    """Returns our placement file, which `eplb.init_expert_location` reads and `POST /eplb/placement` takes."""
    return {
        "format": PLACEMENT_FORMAT,
        "num_logical": shape.num_logical,
        "num_ranks": shape.num_ranks,
        "moe_layer_ids": list(shape.moe_layer_ids),
        "version": version,
        _MAP: rows,
    }


def parse_placement(body: bytes, shape: PlacementShape) -> list[list[int]]:
    """Returns [layers][slots] of a body: our placement file, {"physical_to_logical_map": rows}, or the bare rows.

    Rows for every layer of the model, dense ones included, are taken too, as SGLang writes them. Raises RequestError.
    """
    content = parse_json(body, f'{{"{_MAP}": [[expert of each slot] per MoE layer]}}')
    if isinstance(content, dict):
        content = _rows_of(content, shape)
    if not isinstance(content, list):
        raise RequestError(f"{_MAP} is {show(content)}, expected one list for each MoE layer", field=_MAP)
    num_layers = len(shape.moe_layer_ids)
    if len(content) != num_layers:
        if len(content) <= max(shape.moe_layer_ids, default=-1):
            raise RequestError(
                f"{_MAP} has {len(content)} rows, expected {num_layers}, one for each MoE layer of the model",
                field=_MAP,
            )
        content = [content[layer] for layer in shape.moe_layer_ids]
    return [_row(f"{_MAP}[{i}]", row, shape) for i, row in enumerate(content)]


def _rows_of(content: dict[str, Any], shape: PlacementShape) -> Any:
    fields = Fields(content, "", {}, {"placement": _MAP, "map": _MAP})
    rows = fields.take(_MAP, lambda name, value: value)
    fields.take("version", natural_number)  # the ranks count versions themselves
    for name, check, expected in (
        ("format", short_name, PLACEMENT_FORMAT),
        ("num_logical", natural_number, shape.num_logical),
        ("num_ranks", natural_number, shape.num_ranks),
        ("moe_layer_ids", lambda name, value: id_list(name, value, "whole number"), shape.moe_layer_ids),
    ):
        value = fields.take(name, check)
        if value is not None and value != expected:
            shown = list(expected) if isinstance(expected, tuple) else expected
            raise RequestError(f"{name} is {show(content[name])}, expected {shown}, as is served here", field=name)
    fields.refuse_the_rest()
    if rows is None:
        raise RequestError(f"{_MAP} is missing, expected one list of experts for each MoE layer", field=_MAP)
    return rows


def _row(name: str, row: Any, shape: PlacementShape) -> list[int]:
    experts = id_list(name, row, "whole number")
    if len(experts) != shape.num_slots:
        raise RequestError(f"{name} has {len(experts)} slots, expected {shape.num_slots}", field=name)
    wrong = next((i for i, expert in enumerate(experts) if not -1 <= expert < shape.num_logical), None)
    if wrong is not None:
        raise RequestError(
            f"{name}[{wrong}] is {show(experts[wrong])}, expected an expert from 0 to {shape.num_logical - 1}, or -1 "
            "for an empty slot",
            field=f"{name}[{wrong}]",
        )
    return list(experts)
