"""Says words of a JSON schema that llguidance does not know in words that it knows, where both take the same values.

`not`, `if`, `oneOf` of options that overlap, dependent words, `propertyNames`, `uniqueItems` of few values, references
to dynamic anchors, `unevaluatedProperties` of what has no alternatives, and one property at least or at most become
alternatives and closed objects. Complements of schemas are taken word by word (De Morgan), those of texts by a trie.
A word that has no such form stays as it is, and llguidance refuses it by name.
"""

import itertools
import json
import math
import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from moe_serve.structured.json_schema import BY_NAME, DATA, DEFINITIONS, DESCRIPTIONS, Schema, at, inner

_Any = Schema | bool  # what may stand where a schema does
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MOST_PARTS = 50_000  # that are looked at and written for one schema
_PER_PART = 100  # characters of a text, and pairs of options, that count as one
_MOST_DEPTH = 24  # of references and of schemas in one another that a complement follows
_MOST_ORDERS = 120  # of the items of an array whose items differ
_SAY_NOTHING_WITHOUT = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_WORDS = (
    "not", "if", "then", "else", "oneOf", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames",
    "uniqueItems", "unevaluatedProperties", "minProperties", "maxProperties", "$dynamicRef", "$dynamicAnchor",
    "$recursiveRef", "$recursiveAnchor", "minContains", "maxContains",
)  # fmt: skip
_SAID_BY_NOBODY = frozenset(
    {*DESCRIPTIONS, *DEFINITIONS, "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "readOnly",
     "writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "x-guidance", "then", "else", "minContains",
     "maxContains", "$vocabulary"}
)  # fmt: skip
_OWN_TYPE = {
    "pattern": "string", "minLength": "string", "maxLength": "string", "format": "string", "minimum": "number",
    "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number", "multipleOf": "number",
    "items": "array", "prefixItems": "array", "additionalItems": "array", "minItems": "array", "maxItems": "array",
    "uniqueItems": "array", "contains": "array", "unevaluatedItems": "array", "properties": "object",
    "required": "object", "patternProperties": "object", "additionalProperties": "object", "minProperties": "object",
    "maxProperties": "object", "propertyNames": "object", "dependentRequired": "object", "dependentSchemas": "object",
    "dependencies": "object", "unevaluatedProperties": "object",
}  # fmt: skip


REPEATED = "names that a schema leaves open may repeat"  # and count once; llguidance counts each
TOO_MUCH = "a schema in words that are known takes too many parts"


class _NoForm(Exception):
    """A word has no form in words that llguidance knows."""


def in_known_words(text: str, schema: Any) -> Any:
    """Returns a JSON schema that takes the same values, in words that llguidance knows, as far as there are any.

    text: the schema, which need not be read where it has no such word

    Raises ValueError: REPEATED where minProperties may be reached by one name that comes several times, TOO_MUCH
    where that takes more work than one schema may, and where a word has a value of another kind than it takes.
    """
    if not isinstance(schema, dict) or not any(f'"{word}"' in text for word in _WORDS):
        return schema
    try:
        return _Reading(schema).said(schema)
    except RecursionError:
        raise ValueError(TOO_MUCH) from None


class _Reading:
    """Reads one schema."""

    def __init__(self, root: Schema):
        self._root = root
        self._left = _MOST_PARTS
        draft = str(root.get("$schema", ""))
        self._is_old = re.search(r"draft-0[3-7]", draft) is not None  # words beside a $ref say nothing
        self._lists_items = self._is_old or "2019-09" in draft  # items: a list is what prefixItems is later
        _check(root, "")
        parts = list(inner(root, "", definitions=True))
        # Of one document: a reference counts from the root, and anchors mean one place each.
        self._is_one = not any(
            isinstance(part.get(word), str) and part is not root and not part[word].startswith("#")
            for _, part in parts
            for word in ("$id", "id")
        )
        own_id = root.get("$id", root.get("id"))
        self._id = own_id.rstrip("#") if isinstance(own_id, str) else ""
        self._anchors: dict[str, list[str]] = {}
        for pointer, part in parts:
            for word in ("$anchor", "$dynamicAnchor"):
                if isinstance(part.get(word), str):
                    self._anchors.setdefault(part[word], []).append(pointer)

    def said(self, schema: Any) -> Any:
        """Returns a schema in words that llguidance knows, as far as there are any."""
        self._spend()
        if not isinstance(schema, dict):
            return schema
        own, more = self._with_plain_references(schema), []
        if self._is_old and isinstance(own.get("$ref"), str):
            own = {word: own[word] for word in own if word == "$ref" or word in _SAID_BY_NOBODY - {"$id", "id"}}
        for word, form in (
            ("unevaluatedProperties", self._of_unevaluated),  # first: it asks for words that become alternatives
            ("if", self._of_ifs), ("not", self._of_not), ("oneOf", self._of_one), ("propertyNames", self._of_names),
            ("dependentRequired", self._of_dependent), ("dependentSchemas", self._of_dependent),
            ("dependencies", self._of_dependent), ("uniqueItems", self._of_different),
            ("minProperties", self._of_number),
            ("maxProperties", self._of_number),
        ):  # fmt: skip
            if word in own or (word == "if" and any(_is_if(part) for part in _list(own.get("allOf")))):
                try:
                    own, found = form(dict(own), word)
                except _NoForm:
                    continue
                more += [part for part in found if part is not True]
        for word, needs in _SAY_NOTHING_WITHOUT.items():
            if needs not in schema:
                own.pop(word, None)
        result: Schema = {}
        for word, part in own.items():
            if word in BY_NAME or word not in _OF_SCHEMAS:
                self._spend(len(repr(list(part) if word in BY_NAME else part)) // _PER_PART)
            if word in BY_NAME:
                result[word] = {name: self.said(each) for name, each in part.items()}
            elif isinstance(part, list) and word in _OF_SCHEMAS:
                result[word] = [self.said(each) for each in part]
            elif word in _OF_SCHEMAS or (word not in DATA and _may_be_schema(part)):  # a group of definitions
                result[word] = self.said(part)
            else:
                result[word] = part
        if more:
            result["allOf"] = [*_list(result.get("allOf")), *(self.said(part) for part in more)]
        return result

    # Forms of words: each returns the schema without its word, and what says the same.

    def _with_plain_references(self, schema: Schema) -> Schema:
        """Returns a schema whose references are plain ones: in one document, dynamic ones mean one place each."""
        own = dict(schema)
        if not self._is_one:
            return own
        if schema is self._root and isinstance(own.get("$id"), str):
            del own["$id"]  # llguidance knows some ids as documents of their own
        reference = own.get("$ref")
        if isinstance(reference, str) and self._id and reference.partition("#")[0] == self._id:
            own["$ref"] = f"#{reference.partition('#')[2]}"
        for word in ("$dynamicAnchor", "$recursiveAnchor"):
            if not isinstance(own.get(word), dict | list):
                own.pop(word, None)
        target = own.get("$dynamicRef")
        if isinstance(target, str) and target.startswith("#") and "$ref" not in own:
            places = [target[1:]] if target[1:2] in ("", "/") else self._anchors.get(target[1:], [])
            if len(places) == 1:
                own["$ref"] = f"#{places[0]}"
                del own["$dynamicRef"]
        if own.get("$recursiveRef") == "#" and "$ref" not in own:
            own["$ref"] = own.pop("$recursiveRef")
        return own

    def _of_not(self, own: Schema, word: str) -> tuple[Schema, list[_Any]]:
        return own, [self._complement(own.pop(word))]

    def _of_ifs(self, own: Schema, word: str) -> tuple[Schema, list[_Any]]:
        """Returns forms of `if` and of those in `allOf`: of those that ask one property for its value, together."""
        rest: list[Schema] = []
        rules: list[Schema] = []
        if "if" in own:
            rules.append({key: own.pop(key) for key in ("if", "then", "else") if key in own})
        for part in _list(own.get("allOf")):
            (rules if _is_if(part) else rest).append(part)
        if "allOf" in own:
            own["allOf"] = rest
            if not rest:
                del own["allOf"]
        by_name: dict[str | None, list[Schema]] = {}
        for rule in rules:
            asked = self._asked(rule["if"])
            by_name.setdefault(asked[0] if asked else None, []).append(rule)
        found: list[_Any] = []
        for name, group in by_name.items():
            if name is None or len(group) == 1:
                found += [self._of_if(rule) for rule in group]
            else:
                found.append(self._of_cases(name, group, own.get("type") == "object"))
        return own, found

    def _of_if(self, rule: Schema) -> _Any:
        asked, then, other = rule["if"], rule.get("then", True), rule.get("else", True)
        if then is True and other is True:
            return True
        if other is True:
            return _any_of([self._complement(asked), then])
        if then is True:
            return _any_of([asked, other])
        return _any_of([_all_of([asked, then]), _all_of([self._complement(asked), other])])

    def _asked(self, schema: Any) -> tuple[str, list[Any], bool] | None:
        """Returns the property that a schema asks, its values, and whether it has to be there; None: asks otherwise."""
        words = _words_of(schema)
        properties, required = words.pop("properties", None), words.pop("required", [])
        if words.pop("type", "object") != "object" or words or not isinstance(properties, dict) or len(properties) != 1:
            return None
        ((name, value),) = properties.items()
        values = self._values(value)
        return None if values is None or required not in ([], [name]) else (name, values, bool(required))

    def _of_cases(self, name: str, rules: list[Schema], is_object: bool) -> _Any:
        """Returns a case for each value that rules ask a property for, for its other values, and for its absence."""
        asked = [self._asked(rule["if"]) for rule in rules]
        values = _different(value for each in asked if each for value in each[1])
        keys = [set(map(_key, each[1])) for each in asked if each]
        self._spend(len(values) * len(rules) // _PER_PART)
        cases: list[_Any] = []
        for value in values:
            key = _key(value)
            then = [rule.get("then" if key in each else "else", True) for each, rule in zip(keys, rules, strict=True)]
            cases.append(_all_of([_with_property(name, {"const": value}), *then]))
        others = [rule.get("else", True) for rule in rules]
        cases.append(_all_of([_with_property(name, self._complement({"enum": values})), *others]))
        absent = [
            rule.get("else" if each and each[2] else "then", True) for each, rule in zip(asked, rules, strict=True)
        ]
        cases.append(_all_of([{"type": "object", "properties": {name: False}}, *absent]))
        if not is_object:  # of which properties say nothing, but a type may
            none = [
                rule.get("else" if _words_of(rule["if"]).get("type") == "object" else "then", True) for rule in rules
            ]
            cases.append(_all_of([{"type": [kind for kind in _TYPES if kind != "object"]}, *none]))
        return _any_of(cases)

    def _of_one(self, own: Schema, word: str) -> tuple[Schema, list[_Any]]:
        options = own.pop(word)
        if not isinstance(options, list):
            raise _NoForm
        cases = []
        facts = [self._facts([own, option]) for option in options]
        for index, option in enumerate(options):
            self._spend(len(options) // _PER_PART)
            overlap = [
                each
                for number, each in enumerate(options)
                if number != index
                and not facts[index].exclude(facts[number])
                and not self._apart(_all_of([own, option]), each)
            ]
            within = self._names(_all_of([own, option]))
            cases.append(_all_of([option, *(self._complement(each, within) for each in overlap)]))
        return own, [_any_of(cases)]

    def _of_dependent(self, own: Schema, word: str) -> tuple[Schema, list[_Any]]:
        rules = own.pop(word)
        if not isinstance(rules, dict):
            raise _NoForm
        found = []
        for name, rule in rules.items():
            then = {"required": rule} if isinstance(rule, list) else rule
            found.append(_any_of([{"properties": {name: False}}, then]) if then != {"required": []} else True)
        return own, found

    def _of_names(self, own: Schema, word: str) -> tuple[Schema, list[_Any]]:
        return own, [self._named(own.pop(word))]

    def _named(self, names: Any, depth: int = 0) -> _Any:
        """Returns a schema of objects whose names a schema takes."""
        if isinstance(names, bool):
            return names or {"properties": {}, "additionalProperties": False}
        if depth > _MOST_DEPTH:
            raise _NoForm
        self._spend()
        found: list[_Any] = []
        words = _words_of(names)
        if "$ref" in words:
            found.append(self._named(self._target(words.pop("$ref")), depth + 1))
        kinds = words.pop("type", None)
        if kinds is not None and "string" not in _list(kinds):
            found.append(self._named(False))
        values = self._values({key: words[key] for key in ("const", "enum") if key in words})
        if values is not None:
            words.pop("const", None), words.pop("enum", None)
            found.append({"properties": {each: True for each in values if isinstance(each, str)},
                          "additionalProperties": False})  # fmt: skip
        if "not" in words:
            found.append(self._not_named(words.pop("not")))
        for part in _list(words.pop("allOf", [])):
            found.append(self._named(part, depth + 1))
        least, most = words.pop("minLength", 0), words.pop("maxLength", None)
        if (least, most) != (0, None):
            if not isinstance(least, int) or not isinstance(most, int | None):
                raise _NoForm
            if most is not None and least > most:
                return self._named(False)
            found.append({"patternProperties": {f"^{_ANY}{{{least},{'' if most is None else most}}}$": True},
                          "additionalProperties": False})  # fmt: skip
        if "pattern" in words:
            found.append({"patternProperties": {str(words.pop("pattern")): True}, "additionalProperties": False})
        if words and not set(words) <= {word for word, kind in _OWN_TYPE.items() if kind != "string"}:
            raise _NoForm
        return _all_of(found)

    def _not_named(self, names: Any) -> _Any:
        """Returns a schema of objects none of whose names a schema takes; other names stay free of a pattern."""
        texts = self._values(names)
        if texts is None and set(_words_of(names)) == {"pattern"}:
            texts = _texts_of(names["pattern"])
        if texts is None:
            raise _NoForm
        return {"properties": {each: False for each in texts if isinstance(each, str)}}

    def _of_different(self, own: Schema, word: str) -> tuple[Schema, list[_Any]]:
        different, most = own.pop(word), own.get("maxItems")
        if different is not True or (isinstance(most, int) and most <= 1):
            return own, []
        values = self._values(own.get("items"))
        if values is None or "prefixItems" in own:
            raise _NoForm
        length = min(len(values), most) if isinstance(most, int) else len(values)
        if len(values) > _MOST_ORDERS or math.perm(len(values), length) > _MOST_ORDERS:
            raise _NoForm
        first, then = ("items", "additionalItems") if self._lists_items else ("prefixItems", "items")
        orders: list[_Any] = [
            {"type": "array", first: [{"const": each} for each in order], then: False}
            for order in itertools.permutations(values, length)
        ]
        kinds = _kinds(own.get("type"))
        if kinds != {"array"}:
            orders.append({"type": sorted(kinds - {"array"})})
        return own, [_any_of(orders)]

    def _of_unevaluated(self, own: Schema, word: str) -> tuple[Schema, list[_Any]]:
        names, patterns = self._evaluated(own)
        value = own.pop(word)
        if names is None or value is True:
            return own, []
        closed: Schema = {"properties": dict.fromkeys(names, True), "additionalProperties": value}
        if patterns:
            closed["patternProperties"] = dict.fromkeys(patterns, True)
        return own, [closed]

    def _evaluated(self, schema: Any, depth: int = 0) -> tuple[dict[str, None] | None, dict[str, None]]:
        """Returns the properties and patterns that a schema speaks of, whatever the value; None: of all."""
        self._spend()
        names: dict[str, None] = {}
        patterns: dict[str, None] = {}
        if not isinstance(schema, dict):
            return names, patterns
        if depth > _MOST_DEPTH or {"anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef"} & set(schema):
            raise _NoForm
        if "additionalProperties" in schema or (depth and "unevaluatedProperties" in schema):
            return None, patterns
        names |= dict.fromkeys(schema.get("properties", {}))
        patterns |= dict.fromkeys(schema.get("patternProperties", {}))
        parts = _list(schema.get("allOf"))
        for part in [*parts, self._target(schema["$ref"])] if "$ref" in schema else parts:
            more, more_patterns = self._evaluated(part, depth + 1)
            if more is None:
                return None, patterns
            names |= more
            patterns |= more_patterns
        return names, patterns

    def _of_number(self, own: Schema, word: str) -> tuple[Schema, list[_Any]]:
        """Returns forms of one property at least or at most where some may be absent; llguidance counts none."""
        least, most = own.get("minProperties", 0), own.get("maxProperties")
        is_open = own.get("additionalProperties") is not False or own.get("patternProperties")
        if is_open and isinstance(least, int) and least - len(own.get("required", [])) > 1:
            raise ValueError(REPEATED)
        given = own.get("properties", {}).items()
        optional = [name for name, part in given if part is not False and name not in own.get("required", [])]
        if not optional or least not in (0, 1) or most not in (None, 1):
            raise _NoForm
        own.pop("minProperties", None), own.pop("maxProperties", None)
        if own.get("required"):
            if most is None:
                return own, []  # one is there
            raise _NoForm
        others = dict.fromkeys(optional, False)
        some = {"minProperties": least, **({} if most is None else {"maxProperties": most})}
        cases: list[_Any] = [{"type": "object", "properties": others, **some}]
        for name in optional:
            only = {each: False for each in optional if each != name} if most else {}
            self._spend(1 + len(only))
            cases.append(
                {"type": "object", "properties": only, "required": [name], **({"maxProperties": 1} if most else {})}
            )
        kinds = _kinds(own.get("type")) - {"object"}
        return own, [_any_of([*cases, {"type": sorted(kinds)}] if kinds else cases)]

    # What a schema does not take.

    def _complement(self, schema: Any, within: set[str] | None = None, depth: int = 0) -> _Any:
        """Returns a schema of the values that a schema does not take. Raises _NoForm.

        within: the names that objects may have; None: any
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or depth > _MOST_DEPTH:
            raise _NoForm
        self._spend()
        words = _words_of(self._with_plain_references(schema))
        if self._is_old and "$ref" in words:
            words = {"$ref": words["$ref"]}
        found: list[_Any] = []
        for word, value in words.items():
            if word == "if":
                value = {key: schema[key] for key in ("if", "then", "else") if key in schema}
            found += self._not_of(word, value, words, within, depth + 1)
        return _any_of(found)

    def _not_of(self, word: str, value: Any, words: Schema, within: set[str] | None, depth: int) -> list[_Any]:
        """Returns schemas which together take what a word of a schema does not."""

        def not_of(part: Any) -> _Any:
            return self._complement(part, within, depth)

        def typed(other: str, bound: Any) -> list[_Any]:
            return [{"type": _OWN_TYPE[word], other: bound}]

        match word:
            case "$ref":
                return [not_of(self._target(value))]
            case "type":
                kinds = _kinds(value)
                if "integer" in kinds and "number" not in kinds:  # numbers with a fraction have no form
                    raise _NoForm
                return [{"type": left} for left in [sorted(set(_TYPES) - kinds)] if left]
            case "const" | "enum":
                self._spend(len(repr(value)) // _PER_PART)
                return [_other_than([value] if word == "const" else value)]
            case "not":
                return [value]
            case "allOf":
                return [not_of(part) for part in _list(value)]
            case "anyOf":
                return [_all_of([not_of(part) for part in _list(value)])]
            case "if":
                asked, then, other = value["if"], not_of(value.get("then", True)), not_of(value.get("else", True))
                return [_all_of([asked, then]), other and _all_of([not_of(asked), other])]
            case "oneOf" | "dependentRequired" | "dependentSchemas" | "dependencies":
                form = self._of_one if word == "oneOf" else self._of_dependent
                return [not_of(part) for part in form({word: value}, word)[1]]
            case "required":
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                found = []
                for name, part in value.items():
                    found.append(_with_property(name, self._complement(part, None, depth)))
                return found
            case "additionalProperties" if value is False and within is not None and "patternProperties" not in words:
                return [{"type": "object", "required": [name]} for name in within - set(words.get("properties", {}))]
            case "minLength" | "minItems" | "minProperties" if isinstance(value, int):
                return typed(word.replace("min", "max"), value - 1) if value else []
            case "maxLength" | "maxItems" | "maxProperties" if isinstance(value, int):
                return typed(word.replace("max", "min"), value + 1)
            case "minimum" | "maximum" if not isinstance(words.get(f"exclusiveM{word[1:]}"), bool):
                return typed("exclusiveMaximum" if word == "minimum" else "exclusiveMinimum", value)
            case "exclusiveMinimum" | "exclusiveMaximum" if not isinstance(value, bool):
                return typed("maximum" if word == "exclusiveMinimum" else "minimum", value)
            case "pattern":
                return typed("pattern", _other_pattern(value))
            case "additionalProperties" | "items" | "propertyNames" | "unevaluatedProperties" if value in (True, {}):
                return []
            case "uniqueItems" if value is False:
                return []
        if word in _OWN_TYPE or word in ("$dynamicRef", "$recursiveRef"):
            raise _NoForm
        return []  # a word that is not known says nothing

    # Schemas that have no value in common.

    def _apart(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Returns whether two schemas certainly have no value in common."""
        if one is False or other is False:
            return True
        if one is True or other is True or depth > 8:
            return False
        self._spend()
        first, second = list(self._conjuncts(one)), list(self._conjuncts(other))
        for these, that in ((first, other), (second, one)):
            for each in these:
                for word in ("anyOf", "oneOf"):
                    options = _list(each.get(word))
                    if options and all(self._apart(option, that, depth + 1) for option in options):
                        return True
        kinds = set(_TYPES).intersection(*(self._kinds_of(each) for each in (*first, *second)))
        return all(self._apart_in(kind, first, second, depth + 1) for kind in kinds)

    def _apart_in(self, kind: str, first: list[Schema], second: list[Schema], depth: int) -> bool:
        """Returns whether two lists of schemas, each of which all hold, have no value of a type in common."""
        values = [self._values(each) for each in (*first, *second)]
        known = [set(map(_key, value)) for value in values if value is not None]
        if len(known) > 1 and not set.intersection(*known):
            return True
        if kind == "array":
            least = max((each.get("minItems", 0) for each in (*first, *second)), default=0)
            return least > min((each.get("maxItems", math.inf) for each in (*first, *second)), default=math.inf)
        if kind != "object":
            return False
        required = {name for each in (*first, *second) for name in _list(each.get("required"))}
        self._spend(len(required))
        return any(
            self._apart(a, b, depth)
            for name in sorted(required)
            for a in _of_property(first, name)
            for b in _of_property(second, name)
        )

    def _facts(self, schemas: list[_Any]) -> "_Facts":
        """Returns what is known of the values that schemas, which all hold, take."""
        found = _Facts(set(_TYPES), {}, set())
        for each in (part for schema in schemas for part in self._conjuncts(schema)):
            found.kinds &= self._kinds_of(each)
            found.required.update(_list(each.get("required")))
            asked = {name: self._values(part) for name, part in each.get("properties", {}).items()}
            for name, values in [(None, self._values(each)), *asked.items()]:
                if values is not None:
                    keys = set(map(_key, values))
                    found.values[name] = found.values.get(name, keys) & keys
        return found

    def _kinds_of(self, schema: Schema) -> set[str]:
        values = self._values(schema)
        if values is not None:
            return {_kind_of(value) for value in values}
        kinds = _kinds(schema.get("type"))
        return (kinds - {"integer"}) | {"number"} if "integer" in kinds else kinds

    def _conjuncts(self, schema: Any, depth: int = 0) -> Iterator[Schema]:
        """Yields schemas that all hold where a schema does, with what it refers to."""
        self._spend()
        if not isinstance(schema, dict):
            return
        old_reference = self._is_old and "$ref" in schema
        if not old_reference:
            yield schema
        if depth > 8:
            return
        if "$ref" in schema:
            try:
                target = self._target(schema["$ref"])
            except _NoForm:
                target = True
            yield from self._conjuncts(target, depth + 1)
        for part in () if old_reference else _list(schema.get("allOf")):
            if part is False:
                yield {"enum": []}
            yield from self._conjuncts(part, depth + 1)

    def _names(self, schema: Any) -> set[str] | None:
        """Returns the names that objects of a schema may have; None: any."""
        found: set[str] | None = None
        for each in self._conjuncts(schema):
            if each.get("additionalProperties") is False and not each.get("patternProperties"):
                names = set(each.get("properties", {}))
                found = names if found is None else found & names
        return found

    def _values(self, schema: Any, depth: int = 0) -> list[Any] | None:
        """Returns the values that a schema takes, where they are few and told by name; None: others too."""
        self._spend()
        if schema is False:
            return []
        if not isinstance(schema, dict) or depth > 8:
            return None
        words = _words_of(schema)
        if "$ref" in words and (self._is_old or set(words) == {"$ref"}):
            try:
                return self._values(self._target(words["$ref"]), depth + 1)
            except _NoForm:
                return None
        kinds = _kinds(words.pop("type", None))
        options = [words.pop(word) for word in ("const", "enum", "anyOf", "oneOf") if word in words]
        if words:
            return None
        found: list[Any] | None = None
        if "const" in schema and len(options) == 1:
            found = options
        elif "enum" in schema and len(options) == 1 and isinstance(options[0], list):
            found = options[0]
        elif "anyOf" in schema and len(options) == 1:
            each = [self._values(option, depth + 1) for option in _list(options[0])]
            found = [value for part in each for value in part or []] if None not in each else None
        elif not options and kinds <= {"boolean", "null"}:
            found = [None, True, False]
        if found is None:
            return None
        self._spend(len(found) // _PER_PART)
        return _different(value for value in found if _kind_of(value) in kinds or _is_integer(value, kinds))

    def _target(self, reference: Any) -> Any:
        """Returns the schema that a reference names. Raises _NoForm where it may be another document's."""
        if not isinstance(reference, str) or not self._is_one:
            raise _NoForm
        document, _, fragment = reference.partition("#")
        if document not in ("", self._id):
            raise _NoForm
        pointer = unquote(fragment)
        if pointer and not pointer.startswith("/"):
            places = self._anchors.get(pointer, [])
            if len(places) != 1:
                raise _NoForm
            (pointer,) = places
        target = at(self._root, pointer)
        if not isinstance(target, dict | bool):
            raise _NoForm
        return target

    def _spend(self, parts: int = 1) -> None:
        self._left -= parts
        if self._left < 0:
            raise ValueError(TOO_MUCH)


@dataclass
class _Facts:
    """What is known of the values that a schema takes.

    values: of a property where an object has it, and at None of the whole, as keys
    """

    kinds: set[str]
    values: dict[str | None, set[Hashable]]
    required: set[str]

    def exclude(self, other: "_Facts") -> bool:
        """Returns whether no value can be of both."""
        kinds = self.kinds & other.kinds
        names = self.values.keys() & other.values
        apart = [name for name in names if self.values[name].isdisjoint(other.values[name])]
        if not kinds or None in apart:
            return True
        return kinds == {"object"} and any(name in self.required or name in other.required for name in apart)


_ANY = r"(?:.|\n)"  # one character


def _is_if(schema: Any) -> bool:
    """Returns whether a schema says nothing but if, then and else."""
    return isinstance(schema, dict) and "if" in schema and not set(_words_of(schema)) - {"if"}


def _words_of(schema: Any) -> Schema:
    """Returns the words of a schema that say something by themselves."""
    return (
        {} if not isinstance(schema, dict) else {word: schema[word] for word in schema if word not in _SAID_BY_NOBODY}
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _kinds(value: Any) -> set[str]:
    return set(_TYPES) if value is None else {kind for kind in _list(value) if isinstance(kind, str)}


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds: dict[type, str] = {type(None): "null", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _is_integer(value: Any, kinds: set[str]) -> bool:
    return "integer" in kinds and _kind_of(value) == "number" and value == int(value)


def _key(value: Any) -> Hashable:
    """Returns what two values of JSON have in common where they are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, list):
        return ("array", *map(_key, value))
    if isinstance(value, dict):
        return frozenset((name, _key(each)) for name, each in value.items())
    return (_kind_of(value), value)


def _different(values: Iterable[Any]) -> list[Any]:
    return list({_key(value): value for value in reversed(list(values))}.values())[::-1]


def _any_of(parts: list[_Any]) -> _Any:
    left = [part for part in parts if part is not False]
    if True in [part for part in left if isinstance(part, bool)] or {} in left:
        return True
    if not left:
        return False
    return left[0] if len(left) == 1 else {"anyOf": left}


def _all_of(parts: list[_Any]) -> _Any:
    left = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in left):
        return False
    if not left:
        return True
    return left[0] if len(left) == 1 else {"allOf": left}


def _with_property(name: str, value: _Any) -> _Any:
    if value is False:
        return False
    return {"type": "object", "properties": {name: value}, "required": [name]}


def _of_property(schemas: list[Schema], name: str) -> Iterator[_Any]:
    """Yields what schemas, which all hold, say of a property."""
    for schema in schemas:
        properties = schema.get("properties", {})
        if name in properties:
            yield properties[name]
        elif "patternProperties" not in schema:
            yield schema.get("additionalProperties", True)


def _other_than(values: Any) -> _Any:
    """Returns a schema of all values of JSON but some."""
    if not isinstance(values, list):
        raise _NoForm
    kinds: dict[str, list[Any]] = {}
    for value in values:
        kinds.setdefault(_kind_of(value), []).append(value)
    found: list[_Any] = [{"type": left} for left in [[kind for kind in _TYPES if kind not in kinds]] if left]
    if "string" in kinds:
        found.append({"type": "string", "pattern": f"^{_outside(kinds['string'])}$"})
    if "boolean" in kinds:
        found += [{"const": each} for each in (True, False) if each not in kinds["boolean"]]
    if "number" in kinds:
        bounds = sorted(set(kinds["number"]))
        for low, high in itertools.pairwise([None, *bounds, None]):
            below = {} if high is None else {"exclusiveMaximum": high}
            found.append({"type": "number", **({} if low is None else {"exclusiveMinimum": low}), **below})
    for kind, empty, least in (("array", [], {"minItems": 1}), ("object", {}, {"minProperties": 1})):
        if kind in kinds:
            if any(value != empty for value in kinds[kind]):
                raise _NoForm
            found.append({"type": kind, **least})
    return _any_of(found)


def _outside(words: Iterable[str], beginnings: bool = False) -> str:
    """Returns a regular expression of all texts but some, from a trie of them.

    beginnings: the words, and all that begins with one
    """
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}

    def others(node: dict[str, Any]) -> str | None:
        if beginnings and "" in node:
            return None
        letters = sorted(letter for letter in node if letter)
        ways = [] if "" in node else [""]
        ways += [re.escape(letter) + rest for letter in letters if (rest := others(node[letter])) is not None]
        ways.append(f"[^{''.join(map(re.escape, letters))}]{_ANY}*" if letters else f"{_ANY}+")
        return f"(?:{'|'.join(ways)})"

    found = others(trie)
    if found is None:  # all texts begin with nothing
        raise _NoForm
    return found


_PLAIN = r"(?:[A-Za-z0-9_ :/,=@!<>%&~`'\"#;-]|\\[.\-/+*?$^|()\[\]{}])+"  # a text in a regular expression
_OF_TEXTS = re.compile(rf"\^(?:\((?:\?:)?({_PLAIN}(?:\|{_PLAIN})*)\)|({_PLAIN}))\$")


def _other_pattern(pattern: Any) -> str:
    """Returns a regular expression of the texts in which another, of a few forms, is not found. Raises _NoForm.

    The forms: texts, or beginnings of texts, by name: `^(a|b)$`, `^a`; and a set of characters: `[ab]`.
    """
    if not isinstance(pattern, str):
        raise _NoForm
    if re.fullmatch(r"\[(?!\^)(?:[^\[\]\\]|\\.)+\]", pattern):
        return f"^[^{pattern[1:]}*$"
    texts, beginnings = _texts_of(pattern), _texts_of(pattern + "$")
    if texts is None and beginnings is None:
        raise _NoForm
    return f"^{_outside(texts or beginnings or [], beginnings=texts is None)}$"


def _texts_of(pattern: Any) -> list[str] | None:
    """Returns the texts in which a regular expression such as `^(a|b)$` is found; None: it has another form."""
    found = _OF_TEXTS.fullmatch(pattern) if isinstance(pattern, str) else None
    if found is None:
        return None
    return [re.sub(r"\\(.)", r"\1", text) for text in (found[1] or found[2]).split("|")]


# What a word's value has to be: words, whether a value is one, and how that is called.
_SHAPES = (
    ({"properties", "patternProperties", "dependentSchemas", *DEFINITIONS}, lambda value: _are_schemas(value, dict),
     "an object of schemas"),
    ({"allOf", "anyOf", "oneOf", "prefixItems"}, lambda value: _are_schemas(value, list), "a list of schemas"),
    ({"not", "if", "then", "else", "propertyNames", "additionalProperties", "unevaluatedProperties", "contains",
      "unevaluatedItems", "additionalItems"}, lambda value: isinstance(value, dict | bool), "a schema"),
    ({"items"}, lambda value: isinstance(value, dict | bool) or _are_schemas(value, list), "a schema"),
    ({"required"}, lambda value: _are_texts(value), "a list of names"),
    ({"dependentRequired"}, lambda value: isinstance(value, dict) and all(map(_are_texts, value.values())),
     "an object of lists of names"),
    ({"dependencies"}, lambda value: isinstance(value, dict) and all(
        isinstance(each, dict | bool) or _are_texts(each) for each in value.values()), "an object of schemas or names"),
    ({"enum"}, lambda value: isinstance(value, list), "a list of values"),
    ({"type"}, lambda value: isinstance(value, str) or _are_texts(value), "a type or a list of types"),
    ({"pattern"}, lambda value: isinstance(value, str), "a regular expression"),
    ({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"},
     lambda value: _kind_of(value) == "number" and value >= 0, "a number of at least 0"),
    ({"minimum", "maximum"}, lambda value: _kind_of(value) == "number", "a number"),
    ({"exclusiveMinimum", "exclusiveMaximum"}, lambda value: isinstance(value, int | float), "a number"),
)  # fmt: skip


# Words whose values are schemas, lists of them, or hold them by name.
_OF_SCHEMAS = frozenset().union(*(words for words, _, kind in _SHAPES if "schema" in kind))


def _check(schema: Any, pointer: str) -> None:
    """Raises ValueError where a word of a schema, or of one in it, has a value of another kind than it takes."""
    if not isinstance(schema, dict):
        return
    for words, holds, kind in _SHAPES:
        for word in words & schema.keys():
            if not holds(schema[word]):
                raise ValueError(f'"{word}" at #{pointer} is {json.dumps(schema[word])[:60]}, and has to be {kind}')
    for word in _OF_SCHEMAS & schema.keys():
        part = schema[word]
        inside = part.items() if word in BY_NAME else enumerate(part) if isinstance(part, list) else [(None, part)]
        for name, each in inside:
            _check(each, f"{pointer}/{word}" if name is None else f"{pointer}/{word}/{name}")


def _may_be_schema(value: Any) -> bool:
    """Returns whether what stands in a word that nobody knows may be a schema, to which others may refer."""
    try:
        _check(value, "")
    except ValueError:
        return False
    return isinstance(value, dict)


def _are_schemas(value: Any, container: type) -> bool:
    each = value.values() if isinstance(value, dict) else value
    return isinstance(value, container) and all(isinstance(part, dict | bool) for part in each)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
