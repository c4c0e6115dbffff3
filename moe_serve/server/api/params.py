"""Sampling parameters and forms of outputs, in the fields of each API, made `SamplingParams`; and a model's defaults.

Whether a schema or grammar is sound, `GrammarCheck.checked` says later (grammar_check.py), which `start_call` asks for
every request.

As in SGLang (`--sampling-defaults model`) and vLLM (`--generation-config auto`) the model's defaults hold for OpenAI's
routes and for `LLM` without parameters. `/generate` has SGLang's defaults.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from moe_serve.attention_dp.constraint import MAX_CHARS, Constraint
from moe_serve.attention_dp.sampling_params import (
    MAX_ALLOWED,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_STOP_REGEXES,
    MAX_STOPS,
    SamplingParams,
    plain,
)
from moe_serve.config import ServeConfig, model_dir
from moe_serve.errors import ModelError, RequestError
from moe_serve.models.model_files import read_json
from moe_serve.server.edge.body import Body, Count, OnlyEmpty, OnlyFalse, OnlyOne, OnlyZero, TokenId, read_values, show
from moe_serve.structured.json_schema import lenient, names_white_space, undescribed, with_options

MAX_CHOICES = 10_000
ANY_OBJECT = '{"type":"object"}'
_PATTERN = "guided_whitespace_pattern"
_SGLANG_ANY = "$$ANY$$"  # SGLang's json_schema for any object

Text = Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]
JsonSchema = Annotated[dict[str, Any] | Text | bool, Meta(extra={"expected": "a JSON schema"})]
Tag = Annotated[
    dict[str, Any] | Text, Meta(description="SGLang's", extra={"expected": "an object with structures and triggers"})
]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)]


class SglangForm(Body):
    """The form of an output in SGLang's names: at most one of these fields."""

    json_schema: JsonSchema | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: Tag | None = None


class StructuredOutputs(Body):
    """The form of an output in vLLM's names: at most one of the first six fields."""

    json: JsonSchema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Tag | None = None
    whitespace_pattern: Annotated[str, Meta(min_length=1)] | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: OnlyFalse | None = None


# OpenAI's, vLLM's guided_* and SGLang's; their types stand in `OpenAiCall`.
ResponseFormat = Annotated[
    dict[str, Any],
    Meta(
        description="type: text, json_object, json_schema or structural_tag",
        extra={"expected": "an object with type text, json_object, json_schema or structural_tag"},
        extra_json_schema={"required": ["type"]},
    ),
]


def sglang_constraint(given: SglangForm, prefix: str = "") -> Constraint | None:
    """Returns the constraint in SGLang's fields; None if none is given. prefix: of field names in errors

    Raises RequestError if there are several, or if one is too long.
    """
    return _the_only(_sglang_forms(given, prefix), prefix)


def openai_constraint(given: Any) -> Constraint | None:
    """Returns the constraint of a call of OpenAI's routes; None = any text, also for response_format {"type": "text"}.

    It comes from one of: OpenAI's response_format; vLLM's structured_outputs, guided_json, guided_regex, guided_choice
    and guided_grammar; SGLang's four. vLLM's guided_whitespace_pattern goes with a JSON schema. Raises RequestError.
    """
    found = {
        "response_format": _of_response_format("response_format", given.response_format),
        "structured_outputs": _of_structured_outputs(given.structured_outputs),
        "guided_json": _of_schema("guided_json", given.guided_json),
        "guided_regex": _of_text("regex", "guided_regex", given.guided_regex),
        "guided_choice": _of_choices("guided_choice", given.guided_choice),
        "guided_grammar": _of_text("grammar", "guided_grammar", given.guided_grammar),
        **_sglang_forms(given, ""),
    }
    constraint, pattern = _the_only(found, ""), given.guided_whitespace_pattern
    return constraint if pattern is None else _with_white_space(constraint, _PATTERN, pattern)


def schema_constraint(schema: dict[str, Any] | bool, path: str) -> Constraint:
    """Returns the constraint of a JSON schema. path: the client's field that holds it, for errors"""
    text = json.dumps(undescribed(schema), ensure_ascii=False, separators=(",", ":"))
    return Constraint("json_schema", text, path=path)


def _sglang_forms(given: SglangForm, prefix: str) -> dict[str, Constraint | None]:
    is_any = given.json_schema == _SGLANG_ANY
    return {
        "json_schema": _of_schema(f"{prefix}json_schema", ANY_OBJECT if is_any else given.json_schema),
        "regex": _of_text("regex", f"{prefix}regex", given.regex),
        "ebnf": _of_text("grammar", f"{prefix}ebnf", given.ebnf),
        "structural_tag": _of_tag(f"{prefix}structural_tag", given.structural_tag),
    }


def _the_only(found: Mapping[str, Constraint | None], prefix: str) -> Constraint | None:
    given = {name: value for name, value in found.items() if value is not None}
    # Clients of vLLM send a form under its new name and its old one.
    if len({(each.kind, each.text) for each in given.values()}) > 1:
        first, second = list(given)[:2]
        raise RequestError(
            f"{prefix}{first} and {prefix}{second} are both given, but an output matches one of them; send one",
            field=prefix + second,
        )
    constraint = next(iter(given.values()), None)
    if constraint is not None and len(constraint.text) > MAX_CHARS:
        name = prefix + next(iter(given))
        raise RequestError(
            f"{name} has {len(constraint.text)} characters, at most {MAX_CHARS} are taken; send a smaller one",
            field=name,
        )
    return constraint


def _of_schema(path: str, given: Any) -> Constraint | None:
    if given is None:
        return None
    if not isinstance(given, str):
        return schema_constraint(given, path)
    if not given.lstrip().startswith(("{", "true", "false")):
        raise RequestError(f"{path} is {show(given)}, expected a JSON schema", field=path)
    return Constraint("json_schema", given, path=path)


def _of_text(kind: str, path: str, given: str | None) -> Constraint | None:
    return None if given is None else Constraint(kind, given, path=path)


def _of_choices(path: str, given: list[str] | None) -> Constraint | None:
    return None if given is None else Constraint("choice", json.dumps(given, ensure_ascii=False), path=path)


def _of_tag(path: str, given: Any) -> Constraint | None:
    if given is None:
        return None
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return Constraint("structural_tag", text, path=path)


def _of_response_format(path: str, given: dict[str, Any] | None) -> Constraint | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_schema", ANY_OBJECT, path=path)
    if kind == "structural_tag":
        return _of_tag(path, {key: item for key, item in given.items() if key != "type"})
    if kind != "json_schema":
        raise RequestError(
            f"{path} is {show(given)}, expected an object with type text, json_object, json_schema or structural_tag",
            field=path,
        )
    inner = given.get("json_schema")
    schema, strict = (inner.get("schema"), inner.get("strict")) if isinstance(inner, dict) else (None, None)
    if schema is None:
        raise RequestError(f"{path}.json_schema has no schema; put the JSON schema there", field=f"{path}.json_schema")
    path = f"{path}.json_schema.schema"
    if not isinstance(schema, dict | bool | str):
        raise RequestError(f"{path} is {show(schema)}, expected a JSON schema", field=path)
    return _of_schema(path, schema if strict or isinstance(schema, str) else lenient(schema))


def _of_structured_outputs(given: StructuredOutputs | None) -> Constraint | None:
    if given is None:
        return None
    prefix = "structured_outputs."
    any_object = Constraint("json_schema", ANY_OBJECT, path=f"{prefix}json_object") if given.json_object else None
    found = {
        "json": _of_schema(f"{prefix}json", given.json),
        "regex": _of_text("regex", f"{prefix}regex", given.regex),
        "choice": _of_choices(f"{prefix}choice", given.choice),
        "grammar": _of_text("grammar", f"{prefix}grammar", given.grammar),
        "json_object": any_object,
        "structural_tag": _of_tag(f"{prefix}structural_tag", given.structural_tag),
    }
    constraint = _the_only(found, prefix)
    if given.whitespace_pattern is not None:
        constraint = _with_white_space(constraint, f"{prefix}whitespace_pattern", given.whitespace_pattern)
    if given.disable_any_whitespace:
        constraint = _with_white_space(constraint, f"{prefix}disable_any_whitespace")
    return constraint


def _with_white_space(constraint: Constraint | None, field: str, pattern: str | None = None) -> Constraint:
    """Returns the constraint of a JSON schema with a rule for white space between the parts of JSON.

    field: asks for the rule, for errors;  pattern: a regular expression; None: no white space
    Raises RequestError if there is no schema, or if it has a rule already.
    """
    if constraint is None or constraint.kind != "json_schema":
        raise RequestError(f"{field} is given, but it belongs to a JSON schema and there is none; leave it out", field)
    try:
        schema = json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is given, but the schema is no JSON: {str(error)[:200]}", field) from None
    if names_white_space(schema):
        raise RequestError(f"{field} is given, and so is white space, by x-guidance or another field; send one", field)
    option = {"whitespace_flexible": False} if pattern is None else {"whitespace_pattern": pattern}
    return schema_constraint(with_options(schema, option), constraint.path)


MAX_STOP_CHARS = 1024  # of one stop string, or bad word
SGLANG_DEFAULTS = plain(SamplingParams())


def _shown(name: str) -> Meta:
    """Returns the default of a field of SamplingParams, for the OpenAPI schema."""
    return Meta(extra_json_schema={"default": getattr(SGLANG_DEFAULTS, name)})


_Id = Annotated[TokenId, Meta(ge=0)]
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
_BiasedId = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,9})(?!\n)$", extra={"noun": "token id"})]
_Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2, extra_json_schema={"default": 0.0})]
Length = Annotated[Count, _shown("max_new_tokens")]
LeastLength = Annotated[Count, _shown("min_new_tokens")]
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Samples = Annotated[int, Meta(ge=1, le=MAX_SAMPLES, extra_json_schema={"default": 1})]


Temperature = Annotated[float, Meta(ge=0, extra={"expected": "a number, 0 (greedy) or more"}), _shown("temperature")]
TopP = Annotated[float, Meta(gt=0, le=1), _shown("top_p")]
TopK = Annotated[int, Meta(ge=-1, le=MAX_SEED, description="-1 or 0: all"), _shown("top_k")]
Stops = Annotated[list[_Stop], Meta(max_length=MAX_STOPS)]


class SamplingFields(SglangForm):
    """Sampling parameters that have one name in all APIs."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    min_p: Annotated[float, Meta(ge=0, le=1), _shown("min_p")] | None = None
    top_k: TopK | None = None
    stop: _Stop | Stops | None = None
    stop_regex: (
        Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
        | Annotated[list[_Stop], Meta(max_length=MAX_STOP_REGEXES)]
        | None
    ) = None
    stop_token_ids: Annotated[tuple[_Id, ...], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: Annotated[bool, _shown("ignore_eos")] | None = None
    skip_special_tokens: Annotated[bool, _shown("skip_special_tokens")] | None = None
    no_stop_trim: Annotated[bool, _shown("no_stop_trim")] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100), _shown("repetition_penalty")] | None = None
    logit_bias: (
        Annotated[
            dict[_BiasedId, _Bias],
            Meta(max_length=MAX_BIASES, extra={"expected": "an object of token ids and numbers"}),
        ]
        | None
    ) = None
    bad_words: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_BAD_WORDS)] | None = None
    bad_words_ids: (
        Annotated[
            tuple[Annotated[tuple[_Id, ...], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)], ...],
            Meta(max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[tuple[_Id, ...], Meta(max_length=MAX_ALLOWED)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    # Known in SGLang, and not supported.
    spaces_between_special_tokens: bool | None = None  # of tokenizers in Python; those of Rust have no such spaces
    custom_params: OnlyEmpty | None = None
    stream_interval: OnlyOne | None = None
    typical_p: OnlyOne | None = None  # and of llama.cpp's server
    mirostat: OnlyZero | None = None


OTHER_SGLANG_WORDS: Mapping[str, str] = {  # names of the same fields in other APIs
    "prompt": "text",
    "prompt_ids": "input_ids",
    "token_ids": "input_ids",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
    "stop_ids": "stop_token_ids",
}


class SglangParams(SamplingFields):
    """SGLang's sampling_params."""

    other_words = OTHER_SGLANG_WORDS

    max_new_tokens: Length | None = None
    min_new_tokens: LeastLength | None = None
    sampling_seed: Seed | None = None
    n: Samples | None = None


# Fields of SamplingParams that clients set directly. The others come from fields that each API names differently.
_TAKEN = tuple(each.name for each in fields(SamplingParams) if "logprob" not in each.name and each.name != "constraint")


@dataclass(frozen=True, eq=False)
class ParamNames:
    """What one API calls the fields of SamplingParams.

    other: names of the fields that differ. Errors show the first name; several names in one body must agree
    """

    other: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, field: str) -> tuple[str, ...]:
        return self.other.get(field, (field,))

    def translated(self, error: RequestError, prefix: str = "") -> RequestError:
        """Returns an error of SamplingParams or of fit_to_model in this API's names. prefix: of its field's path"""

        def shown(match: re.Match[str]) -> str:
            return self.of(match[0])[0]

        fields = "|".join(self.other)
        message = re.sub(rf"(?<![\w-])(?:{fields})\b", shown, str(error)) if fields else str(error)
        return RequestError(prefix + message, field=None if error.field is None else prefix + self.of(error.field)[0])


SGLANG_NAMES = ParamNames({"seed": ("sampling_seed",)})
OPENAI_NAMES = ParamNames(
    {
        "max_new_tokens": ("max_tokens", "max_completion_tokens"),
        "min_new_tokens": ("min_tokens",),
        "no_stop_trim": ("include_stop_str_in_output", "no_stop_trim"),
    }
)  # and vLLM's, which extends OpenAI's


@dataclass(frozen=True)
class TakenParams:
    """The sampling parameters of one prompt.

    given: the fields of SamplingParams that the client set
    """

    params: SamplingParams
    given: frozenset[str] = frozenset()

    @property
    def explicit_length(self) -> bool:
        """Whether the client set max_new_tokens, so that it is not reduced to the model's limit."""
        return "max_new_tokens" in self.given


def sampling_params(
    given: SamplingFields, names: ParamNames, defaults: SamplingParams = SGLANG_DEFAULTS, prefix: str = ""
) -> TakenParams:
    """Returns the sampling parameters in a body. defaults: of fields left out;  prefix: of field names in errors

    Raises RequestError with the field, its value and what was expected, in the client's names.
    """
    taken: dict[str, Any] = {}
    known = _params_of(type(given), names)
    for name, value in zip(given.__struct_fields__, msgspec.structs.astuple(given), strict=True):
        if value is None or value is UNSET or name not in known:
            continue
        param = known[name]
        value = _AS_PARAM[param](value) if param in _AS_PARAM else value
        if taken.setdefault(param, value) != value:
            first, second = [each for each in names.of(param) if getattr(given, each, None) not in (None, UNSET)]
            raise RequestError(
                f"{prefix}{first} is {show(getattr(given, first))} and {second} is {show(getattr(given, second))}, but "
                "they are one field; send one of them",
                field=prefix + first,
            )
    params = SamplingParams(**(vars(defaults) | taken))
    if "max_new_tokens" not in taken and params.min_new_tokens > params.max_new_tokens:
        params = replace(params, max_new_tokens=params.min_new_tokens)
    try:
        params.validate()
    except RequestError as error:
        raise names.translated(error, prefix) from None
    return TakenParams(params, frozenset(taken))


@cache
def _params_of(form: type[SamplingFields], names: ParamNames) -> dict[str, str]:
    """Returns the field of SamplingParams that each field of a form sets; fields that set none are left out."""
    here = set(form.__struct_fields__)
    return {name: param for param in _TAKEN for name in names.of(param) if name in here}


def _texts(given: str | list[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


_AS_PARAM: Mapping[str, Callable[[Any], Any]] = {
    "top_k": lambda given: given or -1,  # 0 is another word for all tokens: vLLM's, and generation_config.json's
    "stop": _texts,
    "stop_regex": lambda given: _texts(given) if given else (),
    "bad_words": _texts,
    "logit_bias": lambda given: {int(token_id): bias for token_id, bias in given.items()},
}


_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_FIX = "correct it, or set server.sampling_defaults: openai"


def model_defaults(config: ServeConfig) -> dict[str, Any]:
    """Returns the model's own defaults for fields of SamplingParams, by name; {} if it has none or they are turned off.

    Raises ModelError for a file that cannot be read, or a value that no request could have.
    """
    path = model_dir(config.model) / "generation_config.json"
    if config.server.sampling_defaults == "openai" or not path.exists():
        return {}
    content = read_json(path, _FIX)
    named = {name: content[name] for name in _NAMES if content.get(name) is not None}
    try:
        params = sampling_params(read_values(named, SglangParams), SGLANG_NAMES).params
    except RequestError as error:
        raise ModelError(f"{path}: {error}; {_FIX}") from None
    usual = SamplingParams()
    return {name: value for name in named if (value := getattr(params, name)) != getattr(usual, name)}
