"""Several outputs of one prompt: `n` of them, or the best of more. Torch-free.

Each is a request of its own, with a seed derived from the prompt's. They are sent together, so that the prompt's blocks
are computed once on a rank; log probabilities of the prompt are asked for once.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.server.requests.open_request import OpenRequest
from moe_serve.server.requests.prompts import derived_seed


def samples_of(params: SamplingParams, seed: int) -> list[tuple[SamplingParams, int]]:
    """Returns the parameters and the seed of each output that a prompt's parameters ask for. seed: the prompt's"""
    if params.num_samples == 1:
        return [(params, seed)]
    logprobs = 0 if params.chooses and params.logprobs is None else params.logprobs
    first = replace(params, n=1, best_of=None, logprobs=logprobs)
    other = replace(first, prompt_logprobs=None)
    rest = [(other, derived_seed(seed, sample)) for sample in range(1, params.num_samples)]
    return [(first, seed), *rest]


def link_samples(requests: Sequence[OpenRequest], groups: Sequence[tuple[int, int]]) -> None:
    """Lets the outputs of one prompt share its log probabilities. groups: as in `generate.Call`"""
    first = 0
    for count, _ in groups:
        for other in requests[first : first + count]:
            share_prompt_logprobs(requests[first], other)
        first += count


def share_prompt_logprobs(first: OpenRequest, other: OpenRequest) -> None:
    """Lets an output of a prompt have the log probabilities that the first one has of it."""
    if other is not first and first.prompt_logprobs is not None:
        other.take_prompt_logprobs_of(first)


def best_of_each(requests: Sequence[OpenRequest], groups: Sequence[tuple[int, int]]) -> list[int]:
    """Returns which requests are in the answer: of each prompt those that are likeliest per token, the best one first
    (as OpenAI's best_of), of equal ones the earlier first; all in their order where all are. groups: as in
    `generate.Call`
    """
    chosen: list[int] = []
    first = 0
    for count, num_best in groups:
        of_prompt = range(first, first + count)
        if num_best < count:
            chosen += sorted(of_prompt, key=lambda index: -_mean_logprob(requests[index]))[:num_best]
        else:
            chosen += of_prompt
        first += count
    return chosen


def _mean_logprob(request: OpenRequest) -> float:
    entries = request.output_logprobs
    return entries.cumulative / len(entries) if entries else -math.inf  # cut short before its first token
