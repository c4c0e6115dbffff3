"""The settings of an `LLM` from keyword arguments: sections, or names that one section alone has. Torch-free."""

import difflib
from typing import Any

from moe_serve.config import ServeConfig
from moe_serve.errors import ConfigError
from moe_serve.launcher.unsupported import refusal


def merged(base: dict[str, dict[str, Any]], overrides: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns base with keyword overrides merged in. Raises ConfigError for a name in no section, or in two."""
    sections = ServeConfig.model_fields
    result = {section: dict(values) for section, values in base.items()}
    for name, value in overrides.items():
        if name in sections:
            if not isinstance(value, dict):
                raise ConfigError(f"{name} is a section; give its settings as a dict, e.g. {name}={{...}}")
            result.setdefault(name, {}).update(value)
            continue
        owners = [section for section, field in sections.items() if name in field.annotation.model_fields]  # type: ignore[union-attr]
        if len(owners) != 1:
            if (words := refusal(f"--{name.replace('_', '-')}", "num_ranks")) is not None:
                raise ConfigError(f"LLM({name}=...) {words}")
            every = {key for field in sections.values() for key in field.annotation.model_fields}  # type: ignore[union-attr]
            near = difflib.get_close_matches(name, every, n=1)
            hint = f"two sections have it: give {owners[0]}={{{name!r}: ...}}" if owners else "no section has it"
            hint += f"; did you mean {near[0]!r}?" if near and not owners else ""
            raise ConfigError(f"LLM({name}=...): {hint}")
        result.setdefault(owners[0], {})[name] = value
    return result
