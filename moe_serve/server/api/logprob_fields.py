"""The fields of `/generate` that ask for log probabilities: SGLang's names, put into SamplingParams."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moe_serve.attention_dp.sampling_params import MAX_LOGPROB_IDS, SamplingParams
from moe_serve.errors import RequestError
from moe_serve.server.api.sampling_fields import ParamNames
from moe_serve.server.edge.json_fields import Fields, boolean, natural_number, show, token_ids, whole_number

Spread = Callable[[str, Callable[[str, Any], Any]], list[Any]]

# What errors about SamplingParams are to name.
LOGPROB_NAMES = ParamNames(
    {
        "logprobs": ("top_logprobs_num",),
        "prompt_logprobs": ("top_logprobs_num",),
        "prompt_logprobs_start": ("logprob_start_len",),
        "logprob_token_ids": ("token_ids_logprob",),
    }
)


@dataclass(frozen=True)
class LogprobFields:
    """What one prompt asks for. start: the first prompt token of the answer; None: of the output alone"""

    wanted: bool
    num_top: int
    start: int | None
    token_ids: tuple[int, ...]

    def added_to(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters with what is asked for."""
        if not self.wanted:
            return params
        return replace(
            params,
            logprobs=self.num_top,
            prompt_logprobs=None if self.start is None else self.num_top,
            prompt_logprobs_start=self.start or 0,
            logprob_token_ids=self.token_ids,
        )


def take_logprob_fields(values: Fields, spread: Spread, num_prompts: int) -> list[LogprobFields]:
    """Takes the fields of all prompts of a body. spread: takes a field that has one value, or one for each prompt

    Raises RequestError with the field, its value and what was expected; also for numbers that nobody would get, since
    return_logprob is not true.
    """
    wanted = [bool(each) for each in spread("return_logprob", _optional(boolean))]
    num_top = [each or 0 for each in spread("top_logprobs_num", _optional(natural_number))]
    starts = spread("logprob_start_len", _optional(_start))
    ids = _ids_of_each(values, num_prompts)
    for name, given in (("top_logprobs_num", num_top), ("token_ids_logprob", ids)):
        if any(each and not asks for each, asks in zip(given, wanted, strict=True)):
            raise RequestError(
                f"{name} is given, but return_logprob is not true; set it, or leave {name} out", field=name
            )
    return [LogprobFields(*each) for each in zip(wanted, num_top, starts, ids, strict=True)]


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _start(name: str, value: Any) -> int | None:
    start = whole_number(name, value)
    if start < -1:
        raise RequestError(f"{name} is {start}, expected -1 (the output alone) or at least 0", field=name)
    return None if start == -1 else start


def _ids_of_each(values: Fields, num_prompts: int) -> list[tuple[int, ...]]:
    """Returns the ids of each prompt, from a list for all or a list of lists."""
    name = "token_ids_logprob"
    given = values.take(name, lambda name, value: value)
    if given is None:
        return [()] * num_prompts
    if not isinstance(given, list):
        raise RequestError(f"{name} is {show(given)}, expected a list of token ids", field=name)
    if not any(item is None or isinstance(item, list) for item in given):
        return [_ids(name, given)] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(f"{name} has {len(given)} lists for {num_prompts} prompts; send one for each", field=name)
    return [() if item is None else _ids(f"{name}[{i}]", item) for i, item in enumerate(given)]


def _ids(name: str, value: Any) -> tuple[int, ...]:
    ids = token_ids(name, value)
    if len(ids) > MAX_LOGPROB_IDS:
        most = f"at most {MAX_LOGPROB_IDS} are taken"
        raise RequestError(f"{name} has {len(ids)} entries, {most}; send fewer", field=name)
    wrong = next((token_id for token_id in ids if token_id < 0), None)
    if wrong is not None:
        raise RequestError(f"{name} holds {wrong}, expected at least 0", field=name)
    return ids
