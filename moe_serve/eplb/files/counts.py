"""Arrays of token counts and ids from files of others: whole numbers are read, anything else is refused by its key."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import MAX_EXACT
from moe_serve.errors import MoeServeError, TraceError

MAX_TABLE = 1 << 25  # counts of one record and layer ids up to here: 256 MiB of int64, 3,000 layers x 10,000 experts
MAX_LAYER_ID = MAX_EXPERTS = 1 << 16


def as_array(value: Any, where: str, error: type[MoeServeError] = TraceError) -> NDArray[Any]:
    """Returns nested lists, an array or a tensor as an array, without a copy where it is one already.

    Raises `error` that begins with `where`.
    """
    try:
        return np.asarray(value)
    except ValueError:
        raise error(f"{where}: lists of different lengths; is the file mixed up?") from None
    except (TypeError, RuntimeError) as problem:  # a tensor without a numpy type, such as bf16 or a sparse one
        raise error(f"{where}: expected whole numbers ({problem})") from None


def whole_counts(value: Any, where: str, error: type[MoeServeError] = TraceError) -> NDArray[np.int64]:
    """Returns nested lists, an array or a tensor as int64 of any number of dimensions, at least -1 (no expert).

    Fractions are refused: rounding would change what was measured. Raises `error` that begins with `where`.
    """
    array = as_array(value, where, error)
    if array.dtype.kind not in "iuf" and array.size:
        raise error(f"{where}: expected whole numbers, found {value!r:.60}")
    if array.dtype.kind == "f":
        odd = array[~np.isfinite(array) | (array != np.floor(array))]
        if odd.size:
            raise error(
                f"{where}: expected whole numbers, found {odd[0]:g}; a mean is not a count: write the sum over its "
                f"steps"
            )
    if array.size and (array.min() < -1 or array.max() > MAX_EXACT):
        raise error(f"{where}: from {array.min()} to {array.max()}, expected 0 to 2^53; check for overflow")
    return np.asarray(array, dtype=np.int64)


def check_table_size(num_layers: int, num_experts: int, where: str, error: type[MoeServeError] = TraceError) -> None:
    """Refuses layers x experts that no model has, before memory is taken for them."""
    if num_layers * num_experts > MAX_TABLE or num_experts > MAX_EXPERTS:
        raise error(
            f"{where}: {num_layers} layers x {num_experts} experts, expected at most {MAX_EXPERTS} experts and "
            f"{MAX_TABLE} counts a record; is an id in it damaged?"
        )


def check_layer_ids(ids: Iterable[Any], where: str, error: type[MoeServeError] = TraceError) -> None:
    """Refuses what are no ids of layers of a model: other things than numbers, below 0, or beyond any model."""
    for layer in ids:
        if type(layer) is not int or not 0 <= layer < MAX_LAYER_ID:
            raise error(f"{where}: expected layer ids from 0 to {MAX_LAYER_ID - 1}, found {layer!r:.60}")
