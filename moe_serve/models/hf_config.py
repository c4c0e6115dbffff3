"""Typed access to a config.json: every mistake in one raises a ModelError."""

import math
from collections.abc import Mapping
from typing import Any

from moe_serve.errors import ModelError
from moe_serve.models.model_files import shown

# The folder may be hostile: nothing is allocated or counted through before its sizes are within these.
LARGEST_SIZE = 1 << 24  # of any one size; vocabularies and contexts of real models are below
LONGEST_CONTEXT = 1 << 22  # tokens; the table of rotations takes up to 1 KB for each
_MOST_LAYERS = 4096


class HfConfig:
    """A config.json whose missing and ill-typed entries raise ModelErrors that name the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def size(self, *keys: str, default: int | None = None, minimum: int = 1, largest: int = LARGEST_SIZE) -> int:
        """Returns the whole number under the first of `keys` that is present."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if type(value) is not int or value < minimum:
                raise self.wrong(key, value, f"a whole number of at least {minimum}")
            if value > largest:
                raise self.wrong(key, value, f"at most {largest}")
            return value
        if default is None:
            raise self._missing(keys[0])
        return default

    @property
    def num_layers(self) -> int:
        return self.size("num_hidden_layers", largest=_MOST_LAYERS)

    def _missing(self, key: str) -> ModelError:
        return ModelError(
            f"{self.where}: {key} is missing; is this the folder of a {shown(self.get('model_type'))} model?"
        )

    def require(self, *keys: str) -> None:
        """Raises ModelError for the first of `keys` that is not there; null is there."""
        for key in keys:
            if key not in self.values:
                raise self._missing(key)

    def positive(self, key: str, default: float | None = None) -> float:
        """Returns the finite number above 0 under a key."""
        value = self.get(key, default)
        if value is None:
            raise self._missing(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_positive(value):
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns the boolean under a key."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, *keys: str) -> str | None:
        """Returns the text under the first of `keys` that is present; None without one."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                if not isinstance(value, str):
                    raise self.wrong(key, value, "a text")
                return value
        return None

    def sizes(self, key: str, below: int) -> frozenset[int]:
        """Returns the list of whole numbers from 0 to `below` - 1 under a key; empty without one."""
        values = self.get(key, [])
        if not isinstance(values, list) or not all(type(value) is int and 0 <= value < below for value in values):
            raise self.wrong(key, values, f"a list of whole numbers below {below}")
        return frozenset(values)

    def wrong(self, key: str, value: object, expected: str) -> ModelError:
        """Returns the error that a value is not what is expected."""
        return ModelError(f"{self.where}: {key} is {shown(value)}, expected {expected}")

    def only(self, key: str, wanted: object) -> None:
        """Raises ModelError for another value than the one that is supported; a missing one is that."""
        if (value := self.get(key, wanted)) != wanted:
            raise self.refuse(f"{key} {shown(value)} (only {shown(wanted)} is)")

    def refuse(self, feature: str) -> ModelError:
        """Returns the error that a model of this family asks for a feature that is not implemented."""
        return ModelError(
            f"{self.where}: {feature} is not supported for {shown(self.get('model_type'))[1:-1]}; "
            "serve a model without it, or ask for it in an issue"
        )


def is_positive(value: float) -> bool:
    """Returns whether a number is finite and above 0. Whole numbers that no float can hold are not."""
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:
        return False
