"""Receives the bodies of requests and reads their JSON into typed structs; a refusal names the field.

The size of each body is bounded, and so are the bytes that the bodies of one client, and of all, hold. A route declares
each field once, in a subclass of `Body`: msgspec parses by the declaration, and openapi.py makes the schema from it.
When msgspec refuses a body, this module looks for the fault once more, to say what is, what is needed and what to do. A
field that is null counts as left out.

No body takes long to parse, so none needs a process of its own: the lists, objects and strings of a large one are
counted before, and a list of numbers is cheap (16 MiB of token ids take 0.2 s of a core).
"""

import ctypes
import difflib
import functools
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, ClassVar, TypeVar, overload

import msgspec
from fastapi import Request
from msgspec import Meta, inspect

from moe_serve.attention_dp.request import MAX_SEED
from moe_serve.config import ServerConfig
from moe_serve.errors import QueueFullError, RequestError

_FREE_BYTES = 1 << 16  # of each body: small bodies must pass even when large ones hold all they may


class BodyTooLarge(RequestError):
    """A request body beyond server.max_body_mib."""


class Bodies:
    """The bodies that are being received and parsed.

    num_bytes: held by them, without the first 64 KiB of each;  by_client: the same for each client with such a body
    """

    def __init__(self, server: ServerConfig):
        self._max_bytes = int(server.max_body_mib * 2**20)
        self._max_all_bytes = int(server.max_bodies_mib * 2**20)
        self._max_own_bytes = int((server.max_bodies_mib_per_client or server.max_bodies_mib / 2) * 2**20)
        self._max_own_bytes = max(self._max_own_bytes, self._max_bytes)
        self.num_bytes = 0
        self.by_client: Counter[str] = Counter()

    @asynccontextmanager
    async def read(self, request: Request, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """Yields the body of a request, whose bytes count until the block ends. max_bytes: a lower bound on its size

        Raises BodyTooLarge as soon as the size is known, QueueFullError if too many bytes are held already. The
        connection bounds how long a client may take.
        """
        client = str(request.state.client)
        most = self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
        announced = request.headers.get("content-length", "")
        if announced.isdigit():
            self._check(int(announced), most, client)
        body = bytearray()
        counted = 0
        try:
            async for part in request.stream():
                body += part
                self._check(len(body), most, client, counted)
                if len(body) > _FREE_BYTES:
                    self._count(client, len(body) - _FREE_BYTES - counted)
                    counted = len(body) - _FREE_BYTES
            yield bytes(body)
        finally:
            self._count(client, -counted)

    def _count(self, client: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.by_client[client] += num_bytes
        if not self.by_client[client]:
            del self.by_client[client]

    def _check(self, size: int, most: int, client: str, counted: int = 0) -> None:
        """Raises an error if a body of this size is too large, or too much. counted: bytes counted already"""
        if size > most:
            why = "server.max_body_mib" if most == self._max_bytes else "no more are of use here"
            raise BodyTooLarge(f"the body has {size} bytes or more, at most {most} are allowed ({why}); send less")
        own_bytes = self.by_client[client]
        if size > _FREE_BYTES and own_bytes - counted + size - _FREE_BYTES > self._max_own_bytes:
            raise QueueFullError(
                f"other large bodies of {client} hold {own_bytes - counted >> 20} MiB, at most "
                f"{self._max_own_bytes >> 20} are held of one client "
                "(server.max_bodies_mib_per_client); try again later"
            )
        if size > _FREE_BYTES and self.num_bytes - counted + size - _FREE_BYTES > self._max_all_bytes:
            raise QueueFullError(
                f"large bodies of other requests hold {self.num_bytes >> 20} MiB, at most "
                f"{self._max_all_bytes >> 20} are held at a time (server.max_bodies_mib); try again later"
            )


_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE_BYTES = 1 << 20


def give_large_blocks_back() -> bool:
    """Makes malloc take every block of a megabyte or more from the kernel, so that freeing gives it back.

    By default glibc raises that bound to the largest block freed so far: after one body of 16 MiB later ones come from
    the heap, and four at a time left 50 MiB there. Returns False if malloc has no such bound (not glibc).
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
    except (AttributeError, OSError):
        return False


MAX_DEPTH = 64  # of lists and objects in a body: a JSON schema may be one of its values
MAX_CONTAINERS = 1 << 17  # lists and objects in a body; msgspec takes 0.25 us for one
MAX_STRINGS = 1 << 18  # keys included
MAX_VALUES = 1 << 16  # nested in one field that a client defines
MAX_NAME_CHARS = 256  # of the names that clients choose: rid, session_id, cache_salt, extra_key

Count = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
# An id's vocabulary is checked later, and so are the ids of a prompt below 0.
TokenId = Annotated[int, Meta(extra={"noun": "token id"}, extra_json_schema={"minimum": 0})]

T = TypeVar("T")


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a JSON object; others are refused.

    other_words: names of the same fields in other APIs, for hints;  example: a valid body; None: the body is optional
    """

    other_words: ClassVar[Mapping[str, str]] = {}
    example: ClassVar[Mapping[str, Any] | None] = None


class Only:
    """The values of an unsupported field that ask for nothing; any other value is refused.

    A field that takes only null is declared as None.
    """

    values: ClassVar[tuple[Any, ...]] = ()

    @classmethod
    def of(cls, value: Any) -> "Only":
        """Returns an instance for one of the values. Raises ValueError for another one; in JSON, 0 and false differ."""
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in cls.values):
            return cls()
        raise ValueError


class OnlyFalse(Only):
    values = (False,)


class OnlyOne(Only):
    values = (1,)


class OnlyZero(Only):
    values = (0,)


class OnlyEmpty(Only):
    values = ([], {}, "")


# What a router of SGLang or vLLM adds, for servers that compute prompts and outputs apart.
FromPrefillServer = Annotated[
    None,
    Meta(
        extra={
            "instead": "send the call without it, to this server alone: its ranks compute prompts and outputs, and "
            "session_id (/generate) or routed_dp_rank takes calls to the rank that has their prompt cached"
        }
    ),
]


@overload
def read_body(body: bytes, form: type[T], path: str = "", may_be_empty: bool = False) -> T: ...
@overload
def read_body(body: bytes, form: Any, path: str = "", may_be_empty: bool = False) -> Any: ...
def read_body(body: bytes, form: Any, path: str = "", may_be_empty: bool = False) -> Any:
    """Returns the value in a JSON body. path: of the value, for errors;  may_be_empty: no bytes mean {}

    Raises RequestError if it is not JSON or not of this form, too large or nested too deeply, and for an object with a
    repeated key: parsers differ in which value they take, and a proxy before this server may have checked the other.
    """
    if may_be_empty and not body.strip():
        body = b"{}"
    _check_shape(body, path)
    try:
        value = _decoder(form).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        value = _mended(body, form, path)
    _refuse_repeated_keys(body)
    return value


def read_values(values: Mapping[str, Any], form: type[T]) -> T:
    """Returns parsed JSON values as a struct. Raises RequestError if they are not of this form."""
    kind: Any = form  # which mypy does not take for the key of a cache
    return msgspec.convert(_fitted("", dict(values), _type_of(kind)), form, dec_hook=_only)


def check_free_form(path: str, value: Any) -> None:
    """Checks JSON that a client defines, such as documents. path: of the field

    Raises RequestError where lists and objects hold too many values, or one is beyond the 64 bits of MessagePack.
    """
    if not value:
        return
    num, waiting = 0, [value]
    while waiting and num <= MAX_VALUES:
        inner = waiting.pop()
        if isinstance(inner, dict | list):
            num += len(inner)
            waiting.extend(inner.values() if isinstance(inner, dict) else inner)
        elif type(inner) is int and abs(inner) >= 2**63:
            raise RequestError(f"{path} holds a whole number beyond 64 bits; send a smaller one", field=path)
    if num > MAX_VALUES:
        raise RequestError(f"{path} has more than {MAX_VALUES} values in lists and objects; send fewer", field=path)


def show(value: Any) -> str:
    """Returns a short view of a client's value for an error message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    text = msgspec.json.encode(value).decode() if not isinstance(value, int) or abs(value) < 2**63 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."


@functools.cache
def _decoder(form: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(form, dec_hook=_only)


@functools.cache
def _type_of(form: Any) -> inspect.Type:
    return inspect.type_info(form)


def _only(kind: type, value: Any) -> Only:
    assert issubclass(kind, Only)
    return kind.of(value)


# How much a body holds, and how deep.

_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))


def _check_shape(body: bytes, path: str) -> None:
    """Raises RequestError for JSON with too many values, or nested too deeply, before it is parsed."""
    name = path or "the body"
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets <= MAX_DEPTH and len(body) <= MAX_STRINGS:
        return
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:  # of a string's quotes at most one is behind a \
        raise RequestError(f"{name} has more than {MAX_STRINGS} strings; send fewer", field=path or None)
    if num_brackets <= MAX_DEPTH:
        return
    outside = body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]  # of strings
    brackets = b"".join(outside).translate(_AS_LISTS, _NO_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise RequestError(f"{name} has more than {MAX_CONTAINERS} lists and objects; send fewer", field=path or None)
    for _ in range(MAX_DEPTH):
        outer = brackets.replace(b"[]", b"")  # without the innermost ones
        if len(outer) in (0, len(brackets)):  # or they do not match, which the parser says
            return
        brackets = outer
    raise RequestError(f"{name} is nested deeper than {MAX_DEPTH} levels; send a flatter one", field=path or None)


# A run of numbers without its last one. JSON without them is still JSON, with the same keys, unless they are in a key.
_NUMBERS = re.compile(rb"([\[,])[-+.0-9eE\s,]{32,},")


def _refuse_repeated_keys(body: bytes) -> None:
    """Raises RequestError for an object with a key twice. body: of valid JSON"""
    if body.count(b",") > len(body) // 10:  # as in token ids
        try:
            _KEYS.decode(_NUMBERS.sub(rb"\1", body).decode())
        except RequestError:
            pass  # the keys may differ in numbers
        else:
            return
    _KEYS.decode(body.decode())


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    """Raises RequestError for an object with a key twice. Returns nothing, so that this pass keeps no objects."""
    if len(dict(pairs)) < len(pairs):
        names = set(dict(pairs))
        for name, _ in pairs:
            if name not in names:
                raise RequestError(f"{name[:MAX_NAME_CHARS]} is given twice; send it once", field=name[:MAX_NAME_CHARS])
            names.remove(name)


_KEYS = json.JSONDecoder(object_pairs_hook=_check_keys)

# What msgspec refuses, in words. Meta.extra of a field may say: "expected", what is needed, in place of what follows
# from its type; "noun", what a value is called; "missing", what to send; "instead", what to send instead.


def _mended(body: bytes, form: Any, path: str) -> Any:
    """Returns what a body holds, whole numbers also where they are written as 5.0. Raises RequestError."""
    try:
        values = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if not body.strip():
            raise RequestError("the body is empty, expected a JSON object") from None
        name = path or "the body"
        raise RequestError(f"{name} is not valid JSON: {str(error)[:200]}", field=path or None) from None
    return msgspec.convert(_fitted(path, values, _type_of(form)), form, dec_hook=_only)


def _fitted(path: str, value: Any, kind: inspect.Type) -> Any:
    """Returns a value with whole numbers where its type has them. Raises RequestError where it does not fit."""
    extra, bare = _bare(kind)
    if isinstance(bare, inspect.UnionType):
        member = next((each for each in bare.types if _takes(each, value)), None)
        if member is None:
            raise _refusal(path, value, extra.get("expected") or _words(bare))
        return _fitted(path, value, member)
    if not _takes(bare, value):
        if isinstance(bare, inspect.NoneType):
            do = extra.get("instead", "leave it out")
            raise RequestError(f"{path} is {show(value)}, but this is not supported; {do}", field=path)
        raise _refusal(path, value, extra.get("expected") or _words(kind))
    match bare:
        case inspect.StructType():
            return _fitted_struct(path, value, bare)
        case inspect.DictType():
            _check_length(path, value, bare)
            for key in value:
                if isinstance(bare.key_type, inspect.StrType | inspect.Metadata) and not _fits(key, bare.key_type):
                    raise RequestError(f"{path} has the key {show(key)}, expected {_plural(bare.key_type)}", field=path)
            plain = _plain_types(bare.value_type)
            others = [key for key, each in value.items() if not _is_plain(each, plain)]
            return {**value, **{key: _fitted(f"{path}.{key}", value[key], bare.value_type) for key in others}}
        case inspect.ListType() | inspect.VarTupleType():
            _check_length(path, value, bare)
            plain = _plain_types(bare.item_type)  # prompts have millions of them
            free = {name for name, span in plain.items() if span is None}
            others = [i for i, each in enumerate(value) if type(each) not in free and not _is_plain(each, plain)]
            for i in others:
                value[i] = _fitted(f"{path}[{i}]", value[i], bare.item_type)
            return value
        case inspect.StrType():
            _check_length(path, value, bare, extra.get("expected"))
        case inspect.IntType() | inspect.FloatType():
            return _fitted_number(path, value, bare, extra.get("expected"))
        case inspect.LiteralType() if value not in bare.values:
            raise _refusal(path, value, extra.get("expected") or _words(bare))
        case inspect.CustomType():
            try:
                _only(bare.cls, value)
            except ValueError:
                raise RequestError(
                    f"{path} is {show(value)}, but this is not supported; leave it out", field=path
                ) from None
    return value


def _fitted_struct(path: str, value: dict[str, Any], kind: inspect.StructType) -> dict[str, Any]:
    fields = {field.encode_name: field for field in kind.fields}
    fitted = dict(value)
    for name, each in value.items():
        here = f"{path}.{name}" if path else name
        if name in fields and (each is not None or not fields[name].required):
            fitted[name] = _fitted(here, each, fields[name].type)
        elif name not in fields and kind.forbid_unknown_fields:
            close = difflib.get_close_matches(name[:MAX_NAME_CHARS], fields, n=1)
            near = getattr(kind.cls, "other_words", {}).get(name) or next(iter(close), None)
            near = near if near in fields else None
            hint = f"; did you mean {near}?" if near else f"; known here: {', '.join(sorted(fields))}"
            raise RequestError(f"{here[:MAX_NAME_CHARS]} is not a field{hint}", field=here[:MAX_NAME_CHARS])
    for name, field in fields.items():
        if field.required and value.get(name) is None:
            here = f"{path}.{name}" if path else name
            what = _bare(field.type)[0].get("missing")
            needed = f"; {what}" if what else f", expected {_words(field.type)}"
            raise RequestError(f"{here} is missing{needed}", field=here)
    return fitted


def _fitted_number(path: str, value: Any, kind: inspect.IntType | inspect.FloatType, expected: str | None) -> Any:
    try:
        number = int(value) if isinstance(kind, inspect.IntType) else float(value)
    except OverflowError:
        number = math.inf
    if number in (math.inf, -math.inf) or (kind.le is not None and number > max(kind.le, MAX_SEED - 1)):
        most = f"; expected at most {kind.le}" if kind.le is not None else " for a number"
        raise RequestError(f"{path} is {show(value)}, too large{most}", field=path)
    is_outside = (
        (kind.ge is not None and number < kind.ge)
        or (kind.gt is not None and number <= kind.gt)
        or (kind.le is not None and number > kind.le)
    )
    if is_outside:
        raise _refusal(path, value, expected or _span(kind))
    return number


def _check_length(path: str, value: Any, kind: Any, expected: str | None = None) -> None:
    """Raises RequestError for a string, list or object that is too long or too short."""
    is_text, least, most = isinstance(kind, inspect.StrType), kind.min_length or 0, kind.max_length or math.inf
    if len(value) > most and not (is_text and most <= MAX_NAME_CHARS):
        what, do = ("characters", "shorten it") if is_text else ("entries", "send fewer")
        raise RequestError(f"{path} has {len(value)} {what}, at most {most} are taken; {do}", field=path)
    if is_text and not _fits(value, kind):
        raise _refusal(path, value, expected or _words(kind))
    if len(value) < least:
        raise _refusal(path, value, f"at least one {_noun(kind.item_type)}")


def _refusal(path: str, value: Any, expected: str) -> RequestError:
    return RequestError(f"{path or 'the body'} is {show(value)}, expected {expected}", field=path or None)


def _bare(kind: inspect.Type) -> tuple[Mapping[str, str], inspect.Type]:
    """Returns what is said of a type, and the type."""
    extra: dict[str, str] = {}
    while isinstance(kind, inspect.Metadata):
        extra, kind = {**(kind.extra or {}), **extra}, kind.type
    return extra, kind


def _takes(kind: inspect.Type, value: Any) -> bool:
    """Returns whether a value is of a type, whatever it holds and how large it is."""
    _, bare = _bare(kind)
    match bare:
        case inspect.AnyType():
            return True
        case inspect.CustomType():
            return value is not None
        case inspect.UnionType():
            return any(_takes(each, value) for each in bare.types)
        case inspect.NoneType():
            return value is None
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType():
            is_whole = isinstance(value, float) and value.is_integer()
            return is_whole or (isinstance(value, int) and not isinstance(value, bool))
        case inspect.FloatType():
            return isinstance(value, int | float) and not isinstance(value, bool)
        case inspect.StrType() | inspect.LiteralType():
            return isinstance(value, str)
        case inspect.ListType() | inspect.VarTupleType():
            return isinstance(value, list)
        case inspect.DictType() | inspect.StructType():
            return isinstance(value, dict)
    return False


def _fits(text: str, kind: inspect.Type) -> bool:
    """Returns whether a string is as long and looks as its type says."""
    _, bare = _bare(kind)
    if not isinstance(bare, inspect.StrType):
        return True
    return (
        (bare.min_length is None or len(text) >= bare.min_length)
        and (bare.max_length is None or len(text) <= bare.max_length)
        and (bare.pattern is None or re.search(bare.pattern, text) is not None)
    )


def _plain_types(kind: inspect.Type) -> dict[type, tuple[float, float] | None]:
    """Returns the types of values that fit as they are, each with its least and largest value; None: any value."""
    _, bare = _bare(kind)
    match bare:
        case inspect.UnionType():
            return {name: span for each in bare.types for name, span in _plain_types(each).items()}
        case inspect.IntType(gt=None, ge=None, le=None):
            return {int: None}
        case inspect.IntType(gt=None) | inspect.FloatType(gt=None):
            span = (-MAX_SEED if bare.ge is None else bare.ge, MAX_SEED if bare.le is None else bare.le)
            return {int: span} if isinstance(bare, inspect.IntType) else {int: span, float: span}
        case inspect.StrType(min_length=None, max_length=None, pattern=None):
            return {str: None}
    return {}


def _is_plain(value: Any, plain: Mapping[type, tuple[float, float] | None]) -> bool:
    if type(value) not in plain:
        return False
    span = plain[type(value)]
    return span is None or span[0] <= value <= span[1]


def _words(kind: inspect.Type) -> str:
    """Returns what a value of a type is, in words."""
    extra, bare = _bare(kind)
    if "expected" in extra:
        return extra["expected"]
    match bare:
        case inspect.UnionType():
            words = [_words(each) for each in bare.types if not isinstance(each, inspect.NoneType)]
            return " or ".join(dict.fromkeys(words))
        case inspect.LiteralType():
            *most, last = [str(value) for value in bare.values if value is not None]
            return f"{', '.join(most)} or {last}" if most else last
        case inspect.BoolType():
            return "true or false"
        case inspect.ListType() | inspect.VarTupleType():
            return f"a list of {_plural(bare.item_type)}"
        case inspect.StrType(min_length=1, max_length=int(most)) if most <= MAX_NAME_CHARS:
            return f"a string of 1 to {most} characters"
        case inspect.StrType(min_length=1):
            return "a string that is not empty"
    noun = _noun(kind)
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _noun(kind: inspect.Type) -> str:
    extra, bare = _bare(kind)
    if "noun" in extra:
        return extra["noun"]
    match bare:
        case inspect.UnionType():
            return " or ".join(dict.fromkeys(_noun(each) for each in bare.types if not _takes(each, None)))
        case inspect.IntType():
            return "whole number"
        case inspect.FloatType():
            return "number"
        case inspect.StrType():
            return "string"
        case inspect.DictType() | inspect.StructType():
            return "object"
        case inspect.ListType() | inspect.VarTupleType():
            return f"list of {_plural(bare.item_type)}"
    return "value"


def _plural(kind: inspect.Type) -> str:
    nouns = _noun(kind).split(" or ")
    return " or ".join(f"lists{noun[4:]}" if noun.startswith("list of") else f"{noun}s" for noun in nouns)


def _span(kind: inspect.IntType | inspect.FloatType) -> str:
    low, high = kind.ge, kind.le
    if kind.gt is not None:
        return f"a number above {kind.gt:g}" + ("" if high is None else f" and at most {high:g}")
    if high is None or high >= MAX_SEED:
        return f"at least {low:g}"
    return f"{low:g} to {high:g}"
