"""Checks rows of slots for the placement readers and writers of all formats.

L = rows of the file, P = slots. Errors name the file and the key of the row, so that a wrong file is not
mistaken for a wrong placement; `Placement` checks the rest (every expert somewhere).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.counts import MAX_TABLE
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError


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
        return Placement(rows, num_logical, num_ranks, tuple(int(layer) for layer in moe_layer_ids), version)
    except PlacementError as problem:
        raise PlacementError(f"{path}: {problem}") from None


def filled_in_place(placement: Placement) -> Placement:
    """Returns the placement with every empty slot filled where that moves no load from one rank to another.

    An empty slot takes the lowest expert whose replicas all lie on the slot's rank: split evenly over its replicas, its
    tokens stay there. A slot of a rank without such an expert stays empty.
    """
    table = placement.physical_to_logical.copy()
    by_rank = table.reshape(placement.num_layers, placement.num_ranks, placement.slots_per_rank)
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
            f"{len(empty)} slots are empty (the first: layer {_layer_ids(placement)[row]}, slot {slot}) and {target} "
            f"cannot express that; plan with --for, which fills them, or write our own json"
        )


def _layer_ids(placement: Placement) -> tuple[int, ...]:
    return placement.moe_layer_ids or tuple(range(placement.num_layers))


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "nothing"}.get(type(value), repr(value)[:40])
