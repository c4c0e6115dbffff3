"""Typed access to a config.json: every mistake in one raises a ModelError. Torch-free."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_serve.errors import ModelError


class HfConfig:
    """A config.json whose missing and ill-typed entries raise ModelErrors that name the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def size(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """Returns the whole number under the first of `keys` that is present."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ModelError(f"{self.where}: {key} is {value!r}, expected a whole number of at least {minimum}")
            return value
        if default is None:
            raise ModelError(
                f"{self.where}: {keys[0]} is missing; is this the folder of a {self.get('model_type')} model?"
            )
        return default

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.where}: {key} is {value!r}, expected a number")
        return float(value)

    def refuse(self, feature: str) -> ModelError:
        return ModelError(
            f"{self.where}: {feature} is not supported for {self.get('model_type')}; "
            "serve a model without it, or ask for it in an issue"
        )


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ModelError, with the fix, when there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); {fix}") from None
    except ValueError as error:
        raise ModelError(f"{path}: is not valid JSON ({error}); {fix}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: holds a {type(values).__name__}, expected an object; {fix}")
    return values
