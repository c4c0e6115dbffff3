"""Changes every schema within a JSON schema, and nothing that only looks like one. Torch-free."""

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_DATA = ("const", "enum", "default", "examples")  # words of a schema whose values are no schemas
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # and those that have some


def rewritten(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Returns a schema as `change` makes it of itself and of each schema within it, inner ones first.

    change: gets a new object that it may edit, and returns it or another one
    """
    if isinstance(schema, list):
        return [rewritten(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found: Schema = {}
    for key, part in schema.items():
        if key in _BY_NAME and isinstance(part, dict):
            found[key] = {own: rewritten(inner, change) for own, inner in part.items()}
        else:
            found[key] = part if key in _DATA else rewritten(part, change)
    return change(found)
