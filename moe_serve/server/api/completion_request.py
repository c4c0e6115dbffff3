"""Parses the body of `/v1/completions`: JSON bytes in, checked values out. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_serve.errors import RequestError
from moe_serve.server.api.call_fields import check_num_prompts, ids_or_batch, is_batch, text_or_texts
from moe_serve.server.api.call_options import REST_OF_CONTEXT, CallOptions, fields_of, take_options
from moe_serve.server.api.messages import MAX_DEPTH
from moe_serve.server.edge.json_fields import boolean, natural_number, parse_nested_object, show
from moe_serve.server.requests.prompts import GenerateRequest

_DEFAULT_TOKENS = 16  # OpenAI's, and so vLLM's and SGLang's; null asks for the rest of the context
NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
}


@dataclass(frozen=True)
class CompletionRequest:
    """One call of `/v1/completions`.

    echo:            texts begin with their prompts
    logprobs:        choices have log probabilities;  prompt_logprobs: and those of the prompt in vLLM's form
    """

    call: GenerateRequest
    options: CallOptions
    echo: bool
    logprobs: bool
    prompt_logprobs: bool


def parse_completion(body: bytes, max_prompts: int) -> CompletionRequest:
    """Returns the checked request in a JSON body. max_prompts: a longer batch can never be accepted.

    Raises RequestError with the field, its value and what was expected.
    """
    content = parse_nested_object(body, MAX_DEPTH)
    check_num_prompts("prompt", content.get("prompt"), max_prompts)
    values = fields_of(content, NEUTRAL_FIELDS)
    prompts = values.take("prompt", _prompts)
    if prompts is None:
        raise RequestError("prompt is missing; send a text, a list of texts, or token ids", field="prompt")
    names_length = any(name in content for name in ("max_tokens", "max_completion_tokens"))
    options = take_options(values, REST_OF_CONTEXT if names_length else _DEFAULT_TOKENS, "cmpl-")
    add_special_tokens = values.take("add_special_tokens", boolean)
    echo = bool(values.take("echo", boolean))
    of_output = values.take("logprobs", natural_number)
    of_prompt = values.take("prompt_logprobs", natural_number)
    values.refuse_the_rest()
    counts = [count for count in (of_output if echo else None, of_prompt) if count is not None]
    options = options.with_params(logprobs=of_output, prompt_logprobs=max(counts, default=None))
    call = options.call(prompts, add_special_tokens is not False)
    return CompletionRequest(call, options, echo, of_output is not None, of_prompt is not None)


def _prompts(name: str, value: Any) -> list[tuple[str | None, list[int] | None]]:
    """Checks one prompt or several, each a text or a list of token ids."""
    several = value if is_batch(value) else [value]
    if not several:
        raise RequestError(f"{name} is an empty list, expected at least one prompt", field=name)
    if isinstance(several[0], str):
        text_or_texts(name, value)
        return [(text, None) for text in several]
    if isinstance(several[0], list):
        ids_or_batch(name, value)
        return [(None, ids) for ids in several]
    raise RequestError(
        f"{name} is {show(value)}, expected a string, a list of strings, token ids, or a list of lists of them",
        field=name,
    )
