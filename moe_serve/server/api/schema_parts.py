"""Parts of JSON schemas that several bodies share. Pure data, torch-free."""

from collections.abc import Mapping
from typing import Any

from moe_serve.server.edge.json_fields import MAX_NAME_CHARS

Schema = dict[str, Any]

NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
RANK: Schema = {"type": "integer", "minimum": 0}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def or_null(schema: Schema) -> Schema:
    """Returns the schema of a value that may also be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def neutral(values: Mapping[str, tuple[Any, ...]]) -> dict[str, Schema]:
    """Returns the schemas of fields that may only ask for nothing."""
    return {name: {"enum": [None, *allowed]} for name, allowed in values.items()}
