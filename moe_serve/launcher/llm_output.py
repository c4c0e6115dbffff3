"""What `LLM` gives back for a prompt. Torch-free."""

import math
from dataclasses import dataclass

from moe_serve.engine.output.logprobs import Logprob, TokenLogprobs
from moe_serve.server.requests.open_request import OpenRequest


@dataclass(frozen=True)
class Output:
    """One output of a prompt. text and token_ids exclude the prompt's.

    finish_reason: "length", or "stop" with `matched`, the stop string, stop_regex or id that ended it; None while
                   it runs
    output_entries, prompt_entries: log probabilities that SamplingParams asked for, which the properties show
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    matched: int | str | None
    num_cached_tokens: int  # of the prompt, from the prefix cache
    rank: int | None  # None: it ended before a rank had it
    output_entries: TokenLogprobs | None = None
    prompt_entries: TokenLogprobs | None = None
    prompt_logprobs_start: int = 0

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """What is known of each output token, by token id: itself first, then the likeliest ones and those asked for.
        None: `SamplingParams.logprobs` asked for nothing. engine/output/logprobs.py says which ones they are.
        """
        entries = self.output_entries
        return None if entries is None else [entries.at(i, token) for i, token in enumerate(self.token_ids)]

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """The same of the prompt's tokens from `prompt_logprobs_start` on, None for the first one."""
        entries, begin = self.prompt_entries, self.prompt_logprobs_start
        if entries is None:
            return None
        ids = self.prompt_token_ids[begin + 1 : begin + 1 + len(entries)]
        return [None, *(entries.at(i, token) for i, token in enumerate(ids))]

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of the whole output; None: `SamplingParams.logprobs` asked for nothing."""
        entries = self.output_entries
        return None if entries is None else math.fsum(entries.logprob(i) for i in range(len(self.token_ids)))


def output_of(request: OpenRequest) -> Output:
    """Returns the output of a request as it is now."""
    reason = request.matcher.finish_reason
    return Output(
        prompt_token_ids=request.spec.prompt_ids,
        token_ids=list(request.matcher.output_ids),
        text=request.matcher.text,
        finish_reason=None if reason is None else reason.kind,
        matched=None if reason is None else reason.matched,
        num_cached_tokens=request.num_cached,
        rank=request.rank,
        output_entries=request.output_logprobs if request.spec.shows_logprobs else None,
        prompt_entries=request.prompt_logprobs,
        prompt_logprobs_start=request.spec.params.prompt_logprobs_start,
    )
