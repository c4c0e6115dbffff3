"""Checks the fields of a client's JSON object, without knowing what they mean.

A check gets the field's name and its value (never null). It returns the value, or raises RequestError with the field,
the value and what was expected.
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from moe_serve.attention_dp.request import MAX_SEED
from moe_serve.errors import RequestError

MAX_DEPTH = 8  # of lists and objects in a body
MAX_NAME_CHARS = 256  # of the names that clients choose: rid, session_id, cache_salt, extra_key

_Scalar = bool | int | float | str | None
_Value: Any = _Scalar
for _ in range(MAX_DEPTH):
    _Value = _Scalar | list[_Value] | dict[str, _Value]
_DECODER = msgspec.json.Decoder(_Value)


class Fields:
    """The fields of one JSON object. Each is taken once; those left over at the end are refused by name."""

    def __init__(
        self,
        values: dict[str, Any],
        prefix: str,
        neutral: Mapping[str, tuple[Any, ...]],
        other_words: Mapping[str, str],
    ):
        """
        prefix:      of the names in errors: "" or "sampling_params."
        neutral:     known fields that are not supported, with the values besides null that ask for nothing
        other_words: names of the same field in other APIs, for hints
        """
        self._values = dict(values)
        self.prefix = prefix
        self._neutral = neutral
        self._other_words = other_words
        self._known = set(neutral)

    def take(self, name: str, check: Callable[[str, Any], Any]) -> Any:
        """Returns a field's checked value; None where it is absent or null."""
        self._known.add(name)
        value = self._values.pop(name, None)
        return None if value is None else check(self.prefix + name, value)

    def take_all(self, checks: Mapping[str, Callable[[str, Any], Any]]) -> dict[str, Any]:
        """Returns the checked values of those of these fields that are given and not null, in the order given."""
        self._known.update(checks)
        given = [name for name in self._values if name in checks]
        values = {name: self._values.pop(name) for name in given}
        return {name: checks[name](self.prefix + name, value) for name, value in values.items() if value is not None}

    def refuse_the_rest(self) -> None:
        """Raises RequestError for the first field that was not taken, unless its value asks for nothing."""
        for name, value in self._values.items():
            path = self.prefix + name
            if name not in self._neutral:
                close = difflib.get_close_matches(name[:MAX_NAME_CHARS], self._known, n=1)
                near = self._other_words.get(name) or next(iter(close), None)
                near = near if near in self._known else None
                hint = f"; did you mean {near}?" if near else f"; known here: {', '.join(sorted(self._known))}"
                raise RequestError(f"{path[:MAX_NAME_CHARS]} is not a field{hint}", field=path[:MAX_NAME_CHARS])
            if value is not None and not any(_same(value, neutral) for neutral in self._neutral[name]):
                raise RequestError(f"{path} is {show(value)}, but this is not supported; leave it out", field=path)


def _same(value: Any, neutral: Any) -> bool:
    """Returns whether a value is the neutral one; in JSON, 0 and false differ."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a body."""
    values = parse_json(body, "a JSON object with text or input_ids")
    if not isinstance(values, dict):
        raise RequestError(f"the body is {show(values)}, expected a JSON object")
    return values


def parse_json(body: bytes, expected: str) -> Any:
    """Returns the JSON value in a body. expected: for the error of an empty one

    Raises RequestError for what is no JSON, nested deeper than MAX_DEPTH, or an object with a key twice: parsers differ
    in which value they take, and a proxy before this server may have checked the other one.
    """
    if not body.strip():
        raise RequestError(f"the body is empty, expected {expected}")
    try:
        value = _DECODER.decode(body)
        json.loads(body, object_pairs_hook=_refuse_repeated_keys)
    except msgspec.ValidationError as error:
        if str(error).startswith("Expected"):
            raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels; send a flatter one") from None
        raise RequestError(f"the body is not valid JSON: {error}") from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise RequestError(f"the body is not valid JSON: {str(error)[:200]}") from None
    return value


def parse_nested_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Returns the JSON object in a body that may hold what somebody else defines, such as a JSON schema.

    Raises RequestError as parse_json does, for more levels than max_depth, and for whole numbers beyond 64 bits, which
    MessagePack does not carry.
    """
    try:
        value = msgspec.json.decode(body)
        json.loads(body, object_pairs_hook=_refuse_repeated_keys)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise RequestError(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body is {show(value)}, expected a JSON object")
    level: list[Any] = [value]
    for _ in range(max_depth + 1):
        if any(type(item) is int and abs(item) >= 2**63 for item in level):
            raise RequestError("the body holds a whole number beyond 64 bits; send a smaller one")
        lists = [item for item in level if isinstance(item, list)]
        objects = [item.values() for item in level if isinstance(item, dict)]
        level = [item for items in (*lists, *objects) for item in items]
        if not level:
            return value
    raise RequestError(f"the body is nested deeper than {max_depth} levels; send a flatter one")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> None:
    """Raises RequestError for an object with a key twice. Returns nothing, so that this pass keeps no objects."""
    names = {name for name, _ in pairs}
    if len(names) < len(pairs):
        for name, _ in pairs:
            if name not in names:
                raise RequestError(f"{name[:MAX_NAME_CHARS]} is given twice; send it once", field=name[:MAX_NAME_CHARS])
            names.remove(name)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Checks a list of whole numbers; the vocabulary is checked later."""
    return id_list(name, value, "token id")


def id_list(name: str, value: Any, what: str) -> tuple[int, ...]:
    """Checks a list of whole numbers. what: they are, for errors"""
    if not isinstance(value, list):
        raise RequestError(f"{name} is {show(value)}, expected a list of {what}s", field=name)
    # type() and not isinstance(): true and false are ints in Python, and this loop runs over whole prompts.
    wrong = next((i for i, item in enumerate(value) if type(item) is not int), None)
    if wrong is not None:
        raise RequestError(f"{name}[{wrong}] is {show(value[wrong])}, expected a {what}", field=f"{name}[{wrong}]")
    return tuple(value)


def whole_number(name: str, value: Any) -> int:
    """Checks a whole number, 5 or 5.0, up to the largest seed."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise RequestError(f"{name} is {show(value)}, expected a whole number", field=name)
    if abs(value) > MAX_SEED:
        raise RequestError(f"{name} is {show(value)}, too large; expected at most {MAX_SEED}", field=name)
    return value


def natural_number(name: str, value: Any) -> int:
    """Checks a whole number of at least 0."""
    number = whole_number(name, value)
    if number < 0:
        raise RequestError(f"{name} is {number}, expected at least 0", field=name)
    return number


def real_number(name: str, value: Any) -> float:
    """Checks a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {show(value)}, expected a number", field=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name} is {show(value)}, too large for a number", field=name)
    return number


def boolean(name: str, value: Any) -> bool:
    """Checks for true or false; 0 and 1 are neither."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {show(value)}, expected true or false", field=name)
    return value


def short_name(name: str, value: Any) -> str:
    """Checks a name that the client chose."""
    if not isinstance(value, str) or not value or len(value) > MAX_NAME_CHARS:
        raise RequestError(
            f"{name} is {show(value)}, expected a string of 1 to {MAX_NAME_CHARS} characters", field=name
        )
    return value


def show(value: Any) -> str:
    """Returns a short view of a client's value for an error message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = msgspec.json.encode(value).decode() if not isinstance(value, int) or abs(value) < 2**63 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."
