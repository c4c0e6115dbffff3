"""Turns a constraint into a grammar, and a grammar into the tokens that may come next, by llguidance.

The tokens that may come next are a pure function of grammar, vocabulary and tokens so far. All limits below
count operations, not seconds, so that a request fails on every machine or on none.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.errors import RequestError
from moe_serve.structured.json_schema import (
    Schema,
    is_lenient,
    names_white_space,
    rewritten,
    told_exactly,
    with_options,
)
from moe_serve.structured.other_words import REPEATED, TOO_MUCH, in_known_words
from moe_serve.structured.vocabulary import Vocabulary

_MAX_TAGS = 256  # structures of a structural tag
_SHOWN = 300  # characters of a compiler's message
# JSON on one line, as json.dumps writes it. Were white space free, a small model would go on with blanks until its
# length ends, as other servers' users know. Any: llguidance exports no name for the type.
_WHITE_SPACE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # of strings, that llguidance knows
# Words of which told_exactly may change something.
_TOLD_WRONG = re.compile(r'"(?:pattern|patternProperties|exclusiveMinimum|exclusiveMaximum)"')
_DELETE = "\x7f"  # which Lark's lexer takes escaped only
_OF_URIS = "%/:?#@!$&'()*+,;=~"  # beside letters and digits: RFC 3986, without a host's brackets


@dataclass(frozen=True)
class _Limits:
    """Limits of llguidance for one form, and for one mask of it, by its own names.

    max_items_in_row, step_max_items: of rules that apply at one place, and in one mask. They bound no time where rules
                      are ambiguous: `s: s s | s s s | "a"` takes 12 ms with 5,000, and 200 ms with 50,000
    max_lexer_states: 0.5 to 1 kB each, for every request
    """

    max_items_in_row: int = 500
    initial_lexer_fuel: int = 500_000
    step_lexer_fuel: int = 50_000
    step_max_items: int = 5_000
    max_lexer_states: int = 20_000
    max_grammar_size: int = 100_000


# A client's own rules may be ambiguous. Those of the other forms are not, and an object with 498 optional properties
# takes 25,000 items and 10 ms with vocabularies of 130,000 to 151,000 words.
_OF_RULES, _OF_OTHERS = _Limits(), _Limits(max_items_in_row=2_000, step_max_items=50_000)
_TRIED = 0.75  # of what a mask may take: a form that keeps to this on some outputs keeps to all of it on others
# What a compiler's message means, where it does not say so: a pattern, the reason with the pattern's groups, the limit,
# "" where words of a schema have none.
_WAY_OUT = (
    'leave that out, or "strict": true, and the answer says what is not held; where a field has no strict, put '
    '"x-guidance": {"lenient": true, "coerce_one_of": true} into the schema'
)
_REASONS = (
    (r"Unimplemented keys: \[(.*?)\]", "its {} cannot be held to the letter", ""),
    (REPEATED, 'its "minProperties" cannot be held to the letter, since names may repeat', ""),
    (TOO_MUCH, 'to hold its "not", "oneOf" and the like takes more than one schema may take', ""),
    (r"oneOf constraints are not supported", 'options of a "oneOf" in it may hold together', ""),
    (r"Current row has (\d+) items", "at one place of an output {} items of its rules apply", "max_items_in_row"),
    (r"Too many items", "to say what may come at one place of an output takes too many items of its rules",
     "step_max_items"),
    (r"too many states", "its regular expressions have too many states", "max_lexer_states"),
    (r"too many expressions constructed", "its regular expressions take too much work at one place of an output",
     "step_lexer_fuel"),
    (r"grammar size \(number of symbols\) too big", "it has too many symbols", "max_grammar_size"),
    (r"initial lexer configuration|checking relevance of lexemes|lexer precomputation",
     "its regular expressions take too much work to compile", "initial_lexer_fuel"),
)  # fmt: skip


class FormTooComplex(RequestError):
    """A form needs more work than one may take, be it for a mask or for compiling."""


def _limits_of(kind: str, tries: bool) -> _Limits:
    limits = _OF_RULES if kind == "grammar" else _OF_OTHERS
    if not tries:
        return limits
    return replace(
        limits,
        step_lexer_fuel=int(_TRIED * limits.step_lexer_fuel),
        step_max_items=int(_TRIED * limits.step_max_items),
        max_lexer_states=int(_TRIED * limits.max_lexer_states),
    )


def to_grammar(constraint: Constraint) -> str:
    """Returns a constraint in llguidance's own form. Raises RequestError that names the mistake.

    May take long for hostile texts, and deep recursion: call it where that harms nobody
    (server/workers/grammar_check.py).
    """
    from llguidance import LLMatcher

    text = constraint.text
    if constraint.is_compiled:
        return text
    try:
        match constraint.kind:
            case "json_schema":
                schema = json.loads(text)
                read = _as_llguidance_reads(schema, text)
                if read is not schema:
                    schema, text = read, json.dumps(read, ensure_ascii=False)
                if schema is True:
                    schema, text = {}, "{}"  # the same, and takes options
                ours = isinstance(schema, dict) and not names_white_space(schema)
                return LLMatcher.grammar_from_json_schema(text, defaults=_WHITE_SPACE if ours else None)
            case "regex":
                return LLMatcher.grammar_from_regex(text)
            case "choice":  # one regular expression: as alternatives of a rule, each word costs time in each mask
                words = " | ".join(map(json.dumps, _words(text, constraint.name)))
                return LLMatcher.grammar_from_lark(f"start: WORD\nWORD: {words}")
            case "grammar":
                from llguidance.gbnf_to_lark import any_to_lark

                return LLMatcher.grammar_from_lark(any_to_lark(text).replace(_DELETE, r"\u007f"))
            case "structural_tag":
                return LLMatcher.grammar_from_lark(_tags_to_lark(text, constraint.name))
            case _:
                raise AssertionError(f"{constraint.kind!r} is no kind of constraint")
    except RequestError:
        raise
    except Exception as error:  # of the converters: ValueError, RecursionError, their own bare Exception
        raise _refused(
            constraint.name, str(error) or type(error).__name__, _limits_of(constraint.kind, False)
        ) from None


def _as_llguidance_reads(schema: Any, text: str) -> Any:
    """Returns a JSON schema in words that llguidance knows, without formats that it does not, such as pydantic's path.

    A lenient one keeps its words, so that it costs what it did: llguidance leaves out what it does not know.

    By JSON Schema 2020-12 (validation, section 7.2.3) a format that is not known is an annotation, and no error.
    References are URIs: what may not stand in one is escaped, such as RowCol<Title>.

    text: of the schema; where it has no word to change, the schema itself is returned
    """

    def change(schema: Schema) -> Schema:
        kind = schema.get("format")
        if isinstance(kind, str) and kind not in _FORMATS:
            del schema["format"]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            schema["$ref"] = quote(reference, safe=_OF_URIS)
        return schema

    known = rewritten(schema, change) if '"format"' in text or '"$ref"' in text else schema
    known = known if is_lenient(known) else in_known_words(text, known)
    return told_exactly(known) if known is not schema or _TOLD_WRONG.search(text) else known


def _words(text: str, field: str) -> list[str]:
    words = json.loads(text)
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise RequestError(f"{field} is no list of texts; send at least one", field=field)
    if any(re.search(r"[\ud800-\udfff]", word) for word in words):
        raise RequestError(f"{field} has half of a surrogate pair, which is no text; leave it out", field=field)
    return words


def _tags_to_lark(text: str, field: str) -> str:
    """Returns free text in which each trigger begins one of the structures: SGLang's first form of structural tags."""
    from llguidance import StructTag

    value = json.loads(text)
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise RequestError(f"{field} has no structures or no triggers; newer forms of it are not served", field=field)
    if len(structures) > _MAX_TAGS:
        raise RequestError(f"{field} has {len(structures)} structures, at most {_MAX_TAGS} are taken", field=field)
    tags = []
    for each in structures:
        given: dict[str, Any] = each if isinstance(each, dict) else {}
        begin, end, schema = (given.get(name) for name in ("begin", "end", "schema"))
        if not isinstance(begin, str) or not isinstance(end, str) or not all(isinstance(t, str) for t in triggers):
            raise RequestError(f"{field} needs texts in triggers, and as begin and end of each structure", field=field)
        if not isinstance(schema, dict | bool | None):
            raise RequestError(f"{field} has a schema that is neither an object nor true or false", field=field)
        schema = {} if schema is None else _as_llguidance_reads(schema, text)
        trigger = next((word for word in triggers if word and begin.startswith(word)), None)
        if trigger is None:
            raise RequestError(f"{field}: no trigger begins {begin!r:.60}; add one to triggers", field=field)
        if not names_white_space(schema):
            schema = with_options(schema, _WHITE_SPACE)
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


class Matcher:
    """The tokens that may come next in a growing output."""

    def __init__(self, inner: Any, vocabulary: Vocabulary, name: str, limits: _Limits):
        self._inner = inner
        self._vocabulary = vocabulary
        self.name = name
        self._limits = limits

    @classmethod
    def compiled(cls, constraint: Constraint, vocabulary: Vocabulary, tries: bool = False) -> Self:
        """Returns the matcher of an empty output. Other threads run meanwhile. Raises RequestError.

        tries: its masks may take three quarters of what they may otherwise
        """
        from llguidance import LLMatcher, LLParserLimits

        limits, name, grammar = _limits_of(constraint.kind, tries), constraint.name, to_grammar(constraint)
        theirs = LLParserLimits(**asdict(limits), verbose_errors=False)
        inner = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=theirs)
        if inner.is_error():
            raise _refused(name, inner.get_error(), limits)
        return cls(inner, vocabulary, name, limits)

    @property
    def not_held(self) -> str:
        """What of a lenient schema is left out, in words; "" = nothing."""
        return "; ".join(self._inner.get_grammar_warnings())

    def copy(self, name: str | None = None) -> "Matcher":
        """Returns a copy in the same state, which shares nothing with this one. name: None: the same"""
        return Matcher(self._inner.deep_copy(), self._vocabulary, name or self.name, self._limits)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that have come. Raises RequestError where they do not fit, or the grammar is too complex."""
        if token_ids and not self._inner.consume_tokens(list(token_ids)):
            raise _refused(self.name, self._inner.get_error(), self._limits)

    def takes(self, token_id: int) -> bool:
        """Takes a token if it may come next, and returns whether it does. Raises RequestError where the grammar is too
        complex behind it."""
        if self._inner.try_consume_tokens([token_id]):
            return True
        if self._inner.is_error():
            raise _refused(self.name, self._inner.get_error(), self._limits)
        return False

    def go_back(self, num_tokens: int) -> bool:
        """Forgets the newest tokens; returns whether that was possible."""
        return bool(self._inner.rollback(num_tokens)) and not self._inner.is_error()

    @property
    def may_end(self) -> bool:
        return bool(self._inner.is_accepting())

    @property
    def must_end(self) -> bool:
        """Whether the output is complete and nothing else may follow."""
        return bool(self._inner.is_stopped()) and not self._inner.is_error()

    def forced(self) -> list[int]:
        """Returns tokens of the text that must come next, as far as it is known; others of the same text may come."""
        found: list[int] = self._inner.compute_ff_tokens()
        return found

    def mask(self) -> NDArray[np.int32]:
        """Returns [ceil(vocab_size / 32)] int32: token i may come next where bit i % 32 of word i // 32 is set.

        End-of-sequence tokens may come where the output is complete. Raises RequestError where the grammar is too
        complex.
        """
        bits = np.empty(-(-self._vocabulary.size // 32), np.int32)
        self._inner.unsafe_compute_mask_ptr(bits.__array_interface__["data"][0], bits.nbytes)
        if self._inner.is_error():
            raise _refused(self.name, self._inner.get_error(), self._limits)
        return bits


def _refused(name: str, reason: str, limits: _Limits) -> RequestError:
    """Returns the error of a form, in words that its client can act on. reason: a compiler's message"""
    for pattern, said, limit in _REASONS:
        if (found := re.search(pattern, reason)) is not None:
            said = said.format(*found.groups())
            if not limit:
                return RequestError(f"{name} cannot be served: {said}; {_WAY_OUT}", field=name)
            said = f"{said}, and llguidance's limit {limit} is {getattr(limits, limit)}"
            return FormTooComplex(f"{name} cannot be served: {said}; send a simpler one", field=name)
    said = " ".join(reason.replace("<non-verbose/>", "").split())[:_SHOWN]
    if said == "NoExtensionBias":  # llguidance's
        said = (
            "no token of this model may come next and the output is not complete, so nothing has this form, or a part "
            "of it refers to itself without an end"
        )
    return RequestError(f"{name} cannot be served: {said}; send a simpler or a corrected one", field=name)
