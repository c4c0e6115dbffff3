"""What requests may ask of log probabilities, so that no answer takes more memory than a front end has. Torch-free."""

from collections.abc import Sequence
from dataclasses import replace

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.output.logprobs import MAX_ENTRIES
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import RequestError
from moe_serve.server.requests.open_request import OpenRequest, RequestSpec

MAX_STREAMED = 2**24  # numbers in a stream whose events each have all again
MAX_STREAMED_PROMPT = 2**16  # those of prompts come in one event


def fit_logprobs(params: SamplingParams, num_prompt: int, limits: ModelLimits) -> SamplingParams:
    """Returns the parameters with at most the vocabulary as likeliest tokens. num_prompt: tokens

    Raises RequestError where more likeliest tokens are asked for than this server gives, the first prompt token that is
    meant is not in the prompt, or the answer could have more numbers than MAX_ENTRIES.
    """
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > limits.max_logprobs:
            raise RequestError(
                f"{name} is {count}, but at most {limits.max_logprobs} likeliest tokens are given; ask for fewer, or "
                "serve with a larger engine.max_logprobs (--max-logprobs)",
                field=name,
            )
        if count is not None:
            params = replace(params, **{name: min(count, limits.vocab_size)})
    if params.prompt_logprobs is not None and params.prompt_logprobs_start >= num_prompt:
        raise RequestError(
            f"prompt_logprobs_start is {params.prompt_logprobs_start}, but the prompt has {num_prompt} tokens; "
            "send a smaller one",
            field="prompt_logprobs_start",
        )
    entries = num_entries(params, num_prompt)
    if entries > MAX_ENTRIES:
        name = "logprobs" if params.prompt_logprobs is None else "prompt_logprobs"
        raise RequestError(
            f"{name} for {num_prompt} prompt and up to {params.max_new_tokens} new tokens may bring {entries} log "
            f"probabilities, but one answer has at most {MAX_ENTRIES}; ask for fewer likeliest tokens, for fewer "
            "positions of the prompt, or for fewer new tokens",
            field=name,
        )
    return params


def check_call(specs: Sequence[RequestSpec], streams: bool, incremental: bool) -> None:
    """Raises RequestError for a call whose answer, or any event of it, could hold too many log probabilities.

    incremental: the events of its stream hold only what is new; otherwise each has all again
    """
    counts = [num_entries(spec.params, len(spec.prompt_ids)) for spec in specs]
    if sum(counts) > MAX_ENTRIES:
        _refuse(sum(counts), "one answer", MAX_ENTRIES, "ask for fewer, or for fewer outputs at once")
    if not streams:
        return
    of_output = [replace(spec.params, prompt_logprobs=None) for spec in specs]
    outputs = [num_entries(params, 0) for params in of_output]
    prompts = sum(counts) - sum(outputs)
    if prompts > MAX_STREAMED_PROMPT:
        _refuse(prompts, "the first event of a stream", MAX_STREAMED_PROMPT, "ask for fewer, or send stream: false")
    if incremental:
        return
    again = sum(
        (count - output // 2) * spec.params.max_new_tokens
        for spec, count, output in zip(specs, counts, outputs, strict=True)
    )
    if again > MAX_STREAMED:
        fix = "send stream_options: {incremental: true}, so that each event has only what is new, or ask for fewer"
        _refuse(again, "a stream whose events each have all again", MAX_STREAMED, fix)


def _refuse(count: int, what: str, most: int, fix: str) -> None:
    raise RequestError(
        f"logprobs: {what} may have {count} log probabilities, but at most {most} are given; {fix}", field="logprobs"
    )


def num_logprobs(request: OpenRequest) -> int:
    """Returns how many log probabilities a request has."""
    both = request.output_logprobs, request.prompt_logprobs
    return sum(len(each) * (1 + each.num_top + len(each.token_ids)) for each in both if each is not None)


def num_entries(params: SamplingParams, num_prompt: int) -> int:
    """Returns how many log probabilities a request may bring. num_prompt: tokens"""
    others = 1 + len(params.logprob_token_ids)
    output = 0 if params.logprobs is None else params.max_new_tokens * (others + params.logprobs)
    if params.prompt_logprobs is None:
        return output
    return output + max(0, num_prompt - params.prompt_logprobs_start) * (others + params.prompt_logprobs)
