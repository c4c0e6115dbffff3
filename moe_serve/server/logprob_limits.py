"""What requests may ask of log probabilities, so that no answer takes more memory than a front end has. Torch-free."""

from dataclasses import replace

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.logprobs import MAX_ENTRIES
from moe_serve.engine.messages import ModelLimits
from moe_serve.errors import RequestError


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


def num_entries(params: SamplingParams, num_prompt: int) -> int:
    """Returns how many log probabilities a request may bring. num_prompt: tokens"""
    others = 1 + len(params.logprob_token_ids)
    output = 0 if params.logprobs is None else params.max_new_tokens * (others + params.logprobs)
    if params.prompt_logprobs is None:
        return output
    return output + max(0, num_prompt - params.prompt_logprobs_start) * (others + params.prompt_logprobs)
