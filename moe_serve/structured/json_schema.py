"""Finds and changes the schemas within a JSON schema, and leaves alone what only looks like one."""

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

_OPTIONS = "x-guidance"  # of a schema, in llguidance's words
_WHITE_SPACE = ("whitespace_pattern", "whitespace_flexible")  # of them
_BRANCHES = ("properties", "anyOf", "oneOf")  # words of a schema whose values say what may come at one place
DATA = ("const", "enum", "default", "examples")  # words of a schema whose values are no schemas
DEFINITIONS = ("$defs", "definitions")
DESCRIPTIONS = ("title", "description", "markdownDescription", "default", "examples", "deprecated", "$comment")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # of a list, in a pointer; int() raises at thousands of digits
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


_LEAST = 1e-45  # of the numbers above 0 where they end at a fraction: the form of a smaller bound is too deep
# In a pattern, what may have all control characters: \P{..}, [^.., \x00-..; and pairs that only look so.
_ALL_CONTROLS = re.compile(r"\\\\|\\\[|\\P(\{[^}]*\}|\w)|\[\^(\](?!-)|-*)|\\(?:x00|u0000)-")


def told_exactly(schema: Any) -> Any:
    """Returns a schema whose patterns and bounds of numbers llguidance holds, which two of its faults would break.

    In JSON texts it takes a character class with all control characters, such as `[^"]`, for one that has the quotation
    mark and the backslash too. So NUL leaves such classes. And between a whole number that is excluded and a fraction
    before the next whole number, as in 1 < x <= 1.5, it takes the whole number: the bound becomes the next float.
    """
    has_fraction = False

    def find(part: Schema) -> Schema:
        nonlocal has_fraction
        bounds = (part.get(word) for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
        has_fraction = has_fraction or any(isinstance(each, float) and each % 1 != 0 for each in bounds)
        return part

    def change(part: Schema) -> Schema:
        if isinstance(part.get("pattern"), str):
            part["pattern"] = without_nul(part["pattern"])
        patterns = part.get("patternProperties")
        if isinstance(patterns, dict):
            part["patternProperties"] = {without_nul(name): each for name, each in patterns.items()}
        if has_fraction:
            for word, old, away in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
                word = old if part.get(word) is True else word  # draft 4 says of the other bound that it is excluded
                if _is_whole(bound := part.get(word)):
                    part[word] = math.nextafter(bound, away * math.inf) if bound else away * _LEAST
        return part

    rewritten(schema, find)
    return rewritten(schema, change)


def without_nul(pattern: str) -> str:
    """Returns a regular expression whose character classes have not all control characters."""

    def change(found: re.Match[str]) -> str:
        if found[1] is not None:
            return f"[^\\p{found[1]}\\x00]"
        if found[2] is not None:  # what stands first in a class is itself
            return "[^" + re.escape(found[2]) + r"\x00"
        return r"\x01-" if found[0] in (r"\x00-", r"\u0000-") else found[0]

    return _ALL_CONTROLS.sub(change, pattern)


def _is_whole(value: Any) -> bool:
    """Returns whether a value is a whole number with fractions of float64 beside it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**52 and value % 1 == 0


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
    """Returns the part of a schema that a JSON pointer (RFC 6901) names; None where there is none."""
    for key in pointer.split("/")[1:]:
        if isinstance(schema, list):
            schema = schema[int(key)] if _INDEX.fullmatch(key) and int(key) < len(schema) else None
        else:
            name = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema
