"""From a constraint to a grammar, and from a grammar to the tokens that may come next. By llguidance; torch-free.

What may come next is a pure function of grammar, vocabulary and tokens so far. All limits below count operations, not
seconds, so that a request fails on every machine or on none.
"""

import json
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.errors import RequestError
from moe_serve.structured.json_schema import Schema, rewritten
from moe_serve.structured.vocabulary import Vocabulary

_MAX_TAGS = 256  # structures of a structural tag
_SHOWN = 300  # characters of a compiler's message
# Between the parts of JSON: a space, or a new line with its indentation. Were it free, a small model would go on with
# blanks until its length ends, as other servers' users know. Any: llguidance exports no name for the type.
_WHITE_SPACE: Any = {"whitespace_pattern": r" |\r?\n[ \t]{0,40}"}
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # of strings, that llguidance knows
_OPTIONS = "x-guidance"  # of a schema, in llguidance's words


def to_grammar(constraint: Constraint) -> str:
    """Returns a constraint in llguidance's own form. Raises RequestError with what is wrong with it.

    May take long for hostile texts, and deep recursion: call it where that harms nobody
    (server/helpers/grammar_check.py).
    """
    from llguidance import LLMatcher

    text = constraint.text
    try:
        match constraint.kind:
            case "json_schema":
                if '"format"' in text:
                    text = json.dumps(_with_known_formats(json.loads(text)), ensure_ascii=False)
                grammar = LLMatcher.grammar_from_json_schema(text)
                if not _leaves_white_space_to_us(json.loads(text)):
                    return grammar
                return LLMatcher.grammar_from_json_schema(text, defaults=_WHITE_SPACE)
            case "regex":
                return LLMatcher.grammar_from_regex(text)
            case "choice":
                words = " | ".join(json.dumps(word, ensure_ascii=False) for word in json.loads(text))
                return LLMatcher.grammar_from_lark(f"start: {words}")
            case "grammar":
                from llguidance.gbnf_to_lark import any_to_lark

                return LLMatcher.grammar_from_lark(any_to_lark(text))
            case "structural_tag":
                return LLMatcher.grammar_from_lark(_tags_to_lark(text))
            case _:
                return text
    except RequestError:
        raise
    except Exception as error:  # of the converters: ValueError, RecursionError, their own bare Exception
        raise _refused(constraint.kind, str(error) or type(error).__name__) from None


def _with_known_formats(schema: Any) -> Any:
    """Returns a JSON schema without formats that llguidance does not know, such as pydantic's path and uuid4.

    By JSON Schema 2020-12 (validation, section 7.2.3) a format that is not known is an annotation, and no error.
    """

    def change(schema: Schema) -> Schema:
        kind = schema.get("format")
        if isinstance(kind, str) and kind not in _FORMATS:
            del schema["format"]
        return schema

    return rewritten(schema, change)


def _leaves_white_space_to_us(schema: Any) -> bool:
    return isinstance(schema, dict) and _OPTIONS not in schema


def _tags_to_lark(text: str) -> str:
    """Returns free text in which each trigger begins one of the structures: SGLang's first form of structural tags."""
    from llguidance import StructTag

    field = "structural_tag"
    value = json.loads(text)
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise RequestError(f"{field} has no structures or no triggers; newer forms of it are not served", field=field)
    if len(structures) > _MAX_TAGS:
        raise RequestError(f"{field} has {len(structures)} structures, at most {_MAX_TAGS} are taken", field=field)
    tags = []
    for each in structures:
        begin, end, schema = each["begin"], each["end"], _with_known_formats(each.get("schema", {}))
        trigger = next((word for word in triggers if word and begin.startswith(word)), None)
        if trigger is None:
            raise RequestError(f"{field}: no trigger begins {begin!r:.60}; add one to triggers", field=field)
        if _leaves_white_space_to_us(schema):
            schema = {**schema, _OPTIONS: _WHITE_SPACE}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


class Matcher:
    """Which tokens may come next, while an output grows."""

    def __init__(self, inner: Any, vocabulary: Vocabulary, kind: str):
        self._inner = inner
        self._vocabulary = vocabulary
        self._kind = kind

    @classmethod
    def compiled(cls, grammar: str, vocabulary: Vocabulary, kind: str) -> Self:
        """Returns the matcher of an empty output. Other threads run meanwhile. Raises RequestError."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=500,
            initial_lexer_fuel=500_000,
            step_lexer_fuel=50_000,
            step_max_items=5_000,
            max_lexer_states=20_000,
            max_grammar_size=100_000,
            verbose_errors=False,
        )
        inner = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if inner.is_error():
            raise _refused(kind, inner.get_error())
        return cls(inner, vocabulary, kind)

    def copy(self) -> "Matcher":
        """Returns another one in the same state, which shares nothing with this one."""
        return Matcher(self._inner.deep_copy(), self._vocabulary, self._kind)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that have come. Raises RequestError where they do not fit, or the grammar is too complex."""
        if token_ids and not self._inner.consume_tokens(list(token_ids)):
            raise _refused(self._kind, self._inner.get_error())

    @property
    def may_end(self) -> bool:
        return bool(self._inner.is_accepting())

    @property
    def must_end(self) -> bool:
        """Whether nothing can follow but the end."""
        return bool(self._inner.is_stopped()) and not self._inner.is_error()

    def mask(self) -> NDArray[np.int32]:
        """Returns [ceil(vocab_size / 32)] int32: token i may come next where bit i % 32 of word i // 32 is set.

        End-of-sequence tokens may where the output is complete. Raises RequestError where the grammar is too complex.
        """
        bits = np.empty(-(-self._vocabulary.size // 32), np.int32)
        self._inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._inner.is_error():
            raise _refused(self._kind, self._inner.get_error())
        return bits


def _refused(kind: str, reason: str) -> RequestError:
    said = " ".join(reason.replace("<non-verbose/>", "").split())[:_SHOWN]
    return RequestError(f"{kind} cannot be served: {said}; send a simpler or a corrected one", field=kind)
