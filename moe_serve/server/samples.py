"""Several outputs of one prompt: `n` of them, or the best of more. Torch-free.

Each is a request of its own, with a seed derived from the prompt's. They are sent together, so that the prompt's blocks
are computed once on a rank; log probabilities of the prompt are asked for once.
"""

from collections.abc import Sequence
from dataclasses import replace

from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.server.open_request import OpenRequest


def params_of_sample(params: SamplingParams, sample: int, chooses: bool) -> SamplingParams:
    """Returns the parameters of one of several outputs of a prompt. chooses: only the best ones are shown"""
    if chooses and params.logprobs is None:
        params = replace(params, logprobs=0)
    return replace(params, prompt_logprobs=None) if sample else params


def link_samples(requests: Sequence[OpenRequest], groups: Sequence[tuple[int, int]]) -> None:
    """Lets the outputs of one prompt share its log probabilities. groups: as in `generate.Call`"""
    first = 0
    for count, _ in groups:
        leader = requests[first]
        if leader.prompt_logprobs is not None:
            for other in requests[first + 1 : first + count]:
                other.take_prompt_logprobs_of(leader)
        first += count


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
    return entries.cumulative / len(entries) if entries else 0.0
