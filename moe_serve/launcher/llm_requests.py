"""The requests of a call of `LLM`: for each prompt those of its outputs, as HTTP calls have them. Torch-free."""

import operator
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_serve.attention_dp.sampling_params import SamplingParams, plain
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.requests.open_request import RequestSpec
from moe_serve.server.requests.prompts import Prompt, draw_seed, encode_prompt, fit_to_model, samples_of, with_bad_words

Prompts = Sequence[str] | Sequence[list[int]]
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True)
class Requests:
    """Those of one call. specs: of all prompts in order;  groups: as in `samples.best_of_each`"""

    specs: list[RequestSpec]
    groups: list[tuple[int, int]]


def params_of_each(prompts: Prompts, params: Params, default: SamplingParams) -> list[SamplingParams]:
    """Returns the parameters of each prompt. default: where there are none

    Raises RequestError for a single prompt, and another number of params.
    """
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        raise RequestError("prompts is a single prompt; put it into a list", field="prompts")
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * len(prompts)
    if len(params) != len(prompts):
        raise RequestError(f"{len(params)} params for {len(prompts)} prompts; give one, or one each", field="params")
    return list(params)


def requests_of(
    prompts: Prompts,
    params: Sequence[SamplingParams],
    tokenizer: Tokenizer | None,
    limits: ModelLimits,
    compiled: Callable[[SamplingParams], SamplingParams],
) -> Requests:
    """Returns the requests of all prompts. Raises RequestError that names the prompt.

    params:   of each prompt
    compiled: returns parameters with their constraint as ranks take it
    """
    requests = Requests([], [])
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        try:
            ids, fitted = _fitted(prompt, each, tokenizer, limits)
            fitted = fitted if fitted.constraint is None else compiled(fitted)
        except RequestError as error:
            raise RequestError(f"prompts[{index}]: {error}", field=error.field) from None
        group = uuid.uuid4().hex if fitted.num_samples > 1 else None
        asks = fitted.logprobs is not None
        requests.specs.extend(
            RequestSpec(ids, own, seed, group=group, shows_logprobs=asks)
            for own, seed in samples_of(fitted, draw_seed() if each.seed is None else each.seed)
        )
        requests.groups.append((fitted.num_samples, fitted.n))
    return requests


def _fitted(
    given: Any, params: SamplingParams, tokenizer: Tokenizer | None, limits: ModelLimits
) -> tuple[list[int], SamplingParams]:
    """Returns the token ids of a prompt, and its parameters as they fit the model."""
    params = replace(
        params,
        stop=_as_tuple(params.stop),
        stop_regex=_as_tuple(params.stop_regex),
        stop_token_ids=tuple(params.stop_token_ids),
        bad_words=_as_tuple(params.bad_words),
        bad_words_ids=tuple(map(tuple, params.bad_words_ids)),
        allowed_token_ids=tuple(params.allowed_token_ids),
        logprob_token_ids=tuple(params.logprob_token_ids),
    )
    params.validate()
    (prompt,) = with_bad_words([_prompt(given, params)], tokenizer)
    ids = encode_prompt(prompt, tokenizer, limits)
    return ids, fit_to_model(prompt, ids, limits)


def _prompt(given: Any, params: SamplingParams) -> Prompt:
    """Returns a prompt from text or token ids, which may be numpy's. Raises RequestError for anything else."""
    text, ids = None, None
    try:
        if isinstance(given, str):
            text = given
        else:
            ids = [operator.index(token) for token in given]
    except TypeError:
        raise RequestError(f"{given!r:.60} is no prompt; give text or token ids", field="prompts") from None
    return Prompt(text, ids, plain(params), explicit_length=params.names_length, rid=None, session_id=None)


def _as_tuple(stop: Any) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)
