"""Fields of sampling, in SGLang's names and OpenAI's, and the defaults that a model's folder sets for them.

As in SGLang (`--sampling-defaults model`) and vLLM (`--generation-config auto`) the model's defaults hold for OpenAI's
routes and for `LLM` without parameters. `/generate` has SGLang's defaults.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any

from msgspec import UNSET, Meta

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
from moe_serve.server.api.constraint_fields import SglangForm
from moe_serve.server.edge.json_body import Count, OnlyOne, TokenId, read_values, show

MAX_STOP_CHARS = 1024  # of one stop string, or bad word
SGLANG_DEFAULTS = plain(SamplingParams())


def _shown(name: str) -> Meta:
    """Returns what the schema says of a field's default."""
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


class SamplingFields(SglangForm):
    """Sampling parameters that have one name in all APIs."""

    temperature: (
        Annotated[float, Meta(ge=0, extra={"expected": "a number, 0 (greedy) or more"}), _shown("temperature")] | None
    ) = None
    top_p: Annotated[float, Meta(gt=0, le=1), _shown("top_p")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1), _shown("min_p")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_SEED, description="-1 or 0: all"), _shown("top_k")] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
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
    custom_params: None = None
    stream_interval: OnlyOne | None = None


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


# Fields of SamplingParams that clients name; the others are made of fields that each API has of its own.
_TAKEN = tuple(each.name for each in fields(SamplingParams) if "logprob" not in each.name and each.name != "constraint")


@dataclass(frozen=True, eq=False)
class ParamNames:
    """What one API calls the fields of SamplingParams.

    other: for each field that it names differently, its names there; errors show the first, and of several names in
           one body all must have the same value
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
    """Returns the sampling parameters of a struct. defaults: of fields that are left out;  prefix: of names in errors

    Raises RequestError with the field, its value and what was expected, in the client's names.
    """
    taken: dict[str, Any] = {}
    for param, own_names in _names_in(type(given), names):
        for name in own_names:
            if (value := getattr(given, name)) is None or value is UNSET:
                continue
            value = _AS_PARAM[param](value) if param in _AS_PARAM else value
            if taken.setdefault(param, value) != value:
                other = own_names[0]
                raise RequestError(
                    f"{prefix}{other} is {show(getattr(given, other))} and {name} is {show(value)}, but they are one "
                    "field; send one of them",
                    field=prefix + other,
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
def _names_in(form: type[SamplingFields], names: ParamNames) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the fields of SamplingParams that a form has, each with its names there."""
    here = set(form.__struct_fields__)
    return [(field, own) for field in _TAKEN if (own := tuple(name for name in names.of(field) if name in here))]


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
    """Returns the fields of SamplingParams that the model recommends, by name; {} where it or the settings name none.

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
