"""Finds and changes the schemas within a JSON schema, and leaves alone what only looks like one."""

import json
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

_OPTIONS = "x-guidance"  # of a schema, in llguidance's words
_WHITE_SPACE = ("whitespace_pattern", "whitespace_flexible")  # of them
_BRANCHES = ("properties", "anyOf", "oneOf")  # words of a schema whose values say what may come at one place
DATA = ("const", "enum", "default", "examples")  # words of a schema whose values are no schemas
DEFINITIONS = ("$defs", "definitions")
DESCRIPTIONS = ("title", "description", "markdownDescription", "default", "examples", "deprecated", "$comment")
# Words whose values hold schemas, or properties, by name.
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "dependentRequired", "dependencies", *DEFINITIONS)


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
        if key in BY_NAME and isinstance(part, dict):
            found[key] = {own: rewritten(each, change) for own, each in part.items()}
        else:
            found[key] = part if key in DATA else rewritten(part, change)
    return change(found)


def names_white_space(schema: Any) -> bool:
    """Returns whether a schema decides itself about white space between the parts of JSON.

    Options that are no object count as if it did: they go on to the compiler, which refuses them.
    """
    options = schema.get(_OPTIONS) if isinstance(schema, dict) else None
    return any(name in options for name in _WHITE_SPACE) if isinstance(options, dict) else options is not None


def with_options(schema: Schema | bool, options: Schema) -> Schema:
    """Returns a schema with more of llguidance's options; its own of the same name stay."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    own = schema.get(_OPTIONS)
    if own is not None and not isinstance(own, dict):
        return schema
    return {**schema, _OPTIONS: {**options, **(own or {})}}


# Options of llguidance by which it leaves out words that it cannot hold, and takes oneOf for anyOf.
LENIENT = {"lenient": True, "coerce_one_of": True}


def is_lenient(schema: Any) -> bool:
    """Returns whether words of a schema that llguidance cannot hold are left out."""
    options = schema.get(_OPTIONS) if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("lenient") is True


def undescribed(schema: Schema | bool) -> Schema | bool:
    """Returns a schema without its descriptions, which hold nothing.

    They may be most of its characters, and beside a reference to a schema around it llguidance refuses any.
    """

    def change(part: Schema) -> Schema:
        for word in DESCRIPTIONS:  # an object may be a schema of this name, in a group of definitions
            if isinstance(part.get("$ref"), str) or not isinstance(part.get(word), dict):
                part.pop(word, None)
        return part

    result: Schema | bool = rewritten(schema, change)
    return result


def lenient(schema: Schema | bool) -> Schema:
    """Returns a schema whose words that llguidance cannot hold are left out, instead of refused.

    So are references to other documents, which nobody fetches. They become $dynamicRef, a word that llguidance leaves
    out and names.
    """
    own: set[str] = set()

    def note(part: Schema) -> Schema:
        own.update(part[key] for key in ("$id", "id") if isinstance(part.get(key), str))
        return part

    def change(part: Schema) -> Schema:
        reference = part.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#") and reference.partition("#")[0] not in own:
            part["$dynamicRef"] = part.pop("$ref")
        return part

    rewritten(schema, note)
    return with_options(rewritten(schema, change), LENIENT)


def moved(schema: Schema, name: str) -> Any:
    """Returns a schema that stands under a name in `$defs`: references count from the root."""

    def change(part: Schema) -> Schema:
        reference = part.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            part["$ref"] = f"#/$defs/{name}{reference.removeprefix('#')}"
        return part

    return rewritten(schema, change)


def largest_parts(schema: Any, least: int, most: int) -> list[tuple[Schema, str]]:
    """Returns schemas of a value and those within it that have many properties or alternatives, the largest first.

    With each comes how its text may begin: an object with its first property, after which the most may follow. Objects
    have no properties that are not named, so that texts drawn at random come to those that are.

    least: properties or alternatives of a part;  most: parts
    """
    sizes: dict[str, int] = {}  # by JSON pointer (RFC 6901)
    seen, waiting = {""}, [("", schema)]
    while waiting:
        pointer, part = waiting.pop()
        for inner_pointer, each in inner(part, pointer):
            branches = [each[key] for key in _BRANCHES if isinstance(each.get(key), dict | list)]
            sizes[inner_pointer] = max(map(len, branches), default=0)
            reference = each.get("$ref")
            if isinstance(reference, str) and reference.startswith("#/") and reference[1:] not in seen:
                seen.add(reference[1:])
                waiting.append((reference[1:], at(schema, reference[1:])))
    large = sorted((pointer for pointer in sizes if sizes[pointer] >= least), key=lambda each: -sizes[each])[:most]
    if not large:
        return []
    whole, options = moved(schema, "whole"), {key: schema[key] for key in (_OPTIONS,) if key in schema}
    parts = []
    for pointer in large:
        part, begin = at(whole, pointer), ""
        if part.get("properties"):
            part["additionalProperties"] = False
            begin = "{" + json.dumps(next(iter(part["properties"])), ensure_ascii=False) + ":"
        parts.append(({"$defs": {"whole": whole}, "$ref": f"#/$defs/whole{pointer}", **options}, begin))
    return parts


def inner(schema: Any, pointer: str, definitions: bool = False) -> Iterator[tuple[str, Schema]]:
    """Yields the schemas within a schema with their pointers, itself too.

    definitions: also those that others refer to
    """
    if isinstance(schema, list):
        for index, part in enumerate(schema):
            yield from inner(part, f"{pointer}/{index}", definitions)
    if isinstance(schema, dict):
        yield pointer, schema
        for key, part in schema.items():
            if key in BY_NAME and isinstance(part, dict):
                for own, each in part.items() if definitions or key not in DEFINITIONS else ():
                    step = own.replace("~", "~0").replace("/", "~1")
                    yield from inner(each, f"{pointer}/{key}/{step}", definitions)
            elif key not in DATA:
                yield from inner(part, f"{pointer}/{key}", definitions)


def at(schema: Any, pointer: str) -> Any:
    """Returns the part of a schema that a pointer names; None where there is none."""
    for key in pointer.split("/")[1:]:
        if isinstance(schema, list):
            schema = schema[int(key)] if key.isdecimal() and int(key) < len(schema) else None
        else:
            name = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema
