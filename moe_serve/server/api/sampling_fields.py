"""Fields of sampling, in SGLang's names and OpenAI's, and the defaults that a model's folder sets for them.

A route makes the `Fields` of its JSON object, calls `take_sampling_params` with its names, takes its other fields, and
refuses the rest. As in SGLang (`--sampling-defaults model`) and vLLM (`--generation-config auto`) the model's defaults
hold for OpenAI's routes and for `LLM` without parameters. `/generate` has SGLang's defaults.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from moe_serve.attention_dp.sampling_params import MAX_BIASES, SamplingParams, plain
from moe_serve.config import ServeConfig, model_dir
from moe_serve.errors import ModelError, RequestError
from moe_serve.models.model_files import read_json
from moe_serve.server.edge.json_fields import Fields, boolean, real_number, show, token_ids, whole_number

MAX_STOP_CHARS = 1024  # of one stop string, or bad word
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # as a key of a JSON object

# Fields of SGLang whose features are not supported: null, or one of these values, means "not asked for".
NEUTRAL_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True, False),  # of tokenizers in Python; those of Rust have no such spaces
    "custom_params": (),
    "stream_interval": (1,),
}


@dataclass(frozen=True)
class ParamNames:
    """What one API calls the fields of SamplingParams.

    other: for each field that it names differently, its names there; errors show the first, and of several names in
           one body all must have the same value
    """

    other: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, field: str) -> tuple[str, ...]:
        return self.other.get(field, (field,))

    @cached_property
    def fields(self) -> Mapping[str, str]:
        """The field of SamplingParams that each name of this API means."""
        return {name: field for field in _CHECKS for name in self.of(field)}

    @cached_property
    def checks(self) -> Mapping[str, Callable[[str, Any], Any]]:
        """How the value of each name of this API is checked."""
        return {name: _CHECKS[field] for name, field in self.fields.items()}

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


SGLANG_DEFAULTS = plain(SamplingParams())


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


def take_sampling_params(
    values: Fields,
    names: ParamNames,
    defaults: SamplingParams = SGLANG_DEFAULTS,
) -> TakenParams:
    """Takes the sampling parameters among the fields of a JSON object. defaults: of fields that are absent or null

    Raises RequestError with the field, its value and what was expected, in the client's names.
    """
    taken = _take(values, names)
    params = SamplingParams(**(vars(defaults) | taken))
    if "max_new_tokens" not in taken and params.min_new_tokens > params.max_new_tokens:
        params = replace(params, max_new_tokens=params.min_new_tokens)
    try:
        params.validate()
    except RequestError as error:
        raise names.translated(error, values.prefix) from None
    return TakenParams(params, frozenset(taken))


def _take(values: Fields, names: ParamNames) -> dict[str, Any]:
    """Returns the checked values of the given fields of SamplingParams."""
    given = values.take_all(names.checks)
    taken: dict[str, Any] = {}
    for name, value in given.items():
        field = names.fields[name]
        if taken.setdefault(field, value) != value:
            first, second = [other for other in names.of(field) if other in given][:2]
            raise RequestError(
                f"{values.prefix}{first} is {show(given[first])} and {second} is {show(given[second])}, but they are "
                "one field; send one of them",
                field=values.prefix + first,
            )
    return taken


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} is {show(value)}, expected a string or a list of strings", field=name)
    if any(len(text) > MAX_STOP_CHARS for text in texts):
        raise RequestError(f"{name} holds a string of more than {MAX_STOP_CHARS} characters; shorten it", field=name)
    return tuple(texts)


def _top_k(name: str, value: Any) -> int:
    """Checks top_k; 0 is another word for all tokens: vLLM's, and that of generation_config.json."""
    return whole_number(name, value) or -1


def _bad_words_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise RequestError(f"{name} is {show(value)}, expected a list of lists of token ids", field=name)
    return tuple(token_ids(f"{name}[{i}]", word) for i, word in enumerate(value))


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {show(value)}, expected an object of token ids and numbers", field=name)
    if len(value) > MAX_BIASES:  # before each is looked at
        raise RequestError(f"{name} has {len(value)} entries, at most {MAX_BIASES} are taken; send fewer", field=name)
    wrong = next((key for key in value if not _TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        raise RequestError(f"{name} has the key {show(wrong)}, expected token ids", field=name)
    return {int(key): real_number(f"{name}.{key}", bias) for key, bias in value.items()}


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {  # of each field of SamplingParams
    "max_new_tokens": whole_number,
    "min_new_tokens": whole_number,
    "temperature": real_number,
    "top_p": real_number,
    "min_p": real_number,
    "top_k": _top_k,
    "stop": _texts,
    "stop_token_ids": token_ids,
    "stop_regex": lambda name, value: () if value == "" else _texts(name, value),
    "seed": whole_number,
    "ignore_eos": boolean,
    "skip_special_tokens": boolean,
    "no_stop_trim": boolean,
    "frequency_penalty": real_number,
    "presence_penalty": real_number,
    "repetition_penalty": real_number,
    "logit_bias": _logit_bias,
    "bad_words": _texts,
    "bad_words_ids": _bad_words_ids,
    "allowed_token_ids": token_ids,
    "n": whole_number,
    "best_of": whole_number,
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
        params = take_sampling_params(Fields(named, "", {}, {}), SGLANG_NAMES).params
    except RequestError as error:
        raise ModelError(f"{path}: {error}; {_FIX}") from None
    usual = SamplingParams()
    return {name: value for name in named if (value := getattr(params, name)) != getattr(usual, name)}
