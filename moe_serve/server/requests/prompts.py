"""Turns a checked prompt into requests: token ids, parameters within the limits of the model, a seed for each sample.

The HTTP server and `LLM` use it. Each sample is a request of its own, with a seed derived from the prompt's. Samples of
a prompt are sent together, so that a rank computes its blocks once; the first brings the prompt's logprobs.
"""

import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moe_serve.attention_dp.request import MAX_SEED
from moe_serve.attention_dp.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from moe_serve.engine.output.logprobs import MAX_ENTRIES
from moe_serve.engine.output.routed_experts import check_experts
from moe_serve.engine.output.stop_regex import MAX_OF_A_CALL, compile_stop_regex
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer, check_unicode
from moe_serve.server.requests.open_request import OpenRequest, RequestSpec

NO_TOKENIZER = (
    "this server has none (model.skip_tokenizer is set, or the model folder has no tokenizer.json, which can be added)"
)


@dataclass(frozen=True)
class Prompt:
    """One prompt: text or token ids; the other is None."""

    text: str | None
    token_ids: list[int] | None
    params: SamplingParams
    explicit_length: bool  # the client set max_new_tokens, so it is not reduced to the model's limit
    rid: str | None
    session_id: str | None
    add_special_tokens: bool = True  # those that the tokenizer puts around a text
    name: str | None = None  # of its field, for errors; None: text or input_ids

    @property
    def field(self) -> str:
        return self.name or ("text" if self.token_ids is None else "input_ids")


@dataclass(frozen=True)
class GenerateRequest:
    """One call of `/generate`. is_batch: the answer is a list."""

    prompts: tuple[Prompt, ...]
    stream: bool
    is_batch: bool
    salt: str
    rank: int | None  # the client chose the rank
    priority: int
    timeout_s: float | None
    incremental: bool | None  # whether events of a stream hold only what is new; None: as the server is set
    logprob_texts: bool = False  # log probabilities come with the text of each token


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, limits: ModelLimits) -> list[int]:
    """Returns the token ids of a prompt.

    Raises RequestError for text or stop strings without a tokenizer, text that is too long, invalid Unicode, and a
    stop_regex that is not supported.
    """
    if tokenizer is None and (prompt.params.stop or prompt.params.stop_regex):
        raise RequestError(
            f"stop needs a tokenizer, but {NO_TOKENIZER}; send stop_token_ids", field="sampling_params.stop"
        )
    for stop in prompt.params.stop:
        check_unicode("stop", stop)
    for pattern in prompt.params.stop_regex:
        compile_stop_regex(pattern)
    if prompt.token_ids is not None:
        return prompt.token_ids
    if tokenizer is None:
        raise RequestError(f"{prompt.field} needs a tokenizer, but {NO_TOKENIZER}; send input_ids", field=prompt.field)
    text = prompt.text or ""
    check_num_chars(prompt.field, text, tokenizer, limits)
    return tokenizer.encode(text, prompt.add_special_tokens)


def check_num_chars(field: str, text: str, tokenizer: Tokenizer, limits: ModelLimits) -> None:
    """Raises RequestError for a text that has more tokens than a prompt may have, whatever they are."""
    if len(text) > limits.max_prompt_len * tokenizer.longest_token:
        raise RequestError(
            f"{field} has {len(text)} characters, more than any prompt of {limits.max_prompt_len} tokens; shorten it",
            field=field,
        )


def check_ids(field: str, token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Raises RequestError for more ids than a prompt may have, and for one outside the vocabulary."""
    longest = min(limits.max_prompt_len, limits.max_model_len - 1)  # before what is in it: a million ids take a while
    if len(token_ids) > longest:
        raise RequestError(
            f"{field} has {len(token_ids)} tokens, at most {longest} are served; shorten it", field=field
        )
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= limits.vocab_size):
        wrong = next(i for i, token in enumerate(token_ids) if not 0 <= token < limits.vocab_size)
        raise RequestError(
            f"{field}[{wrong}] is {token_ids[wrong]}, outside the vocabulary; expected 0 to {limits.vocab_size - 1}",
            field=field,
        )


def check_num_expressions(prompts: Sequence[Prompt]) -> None:
    """Raises RequestError if the prompts of one call have too many different stop_regex."""
    num = len({pattern for prompt in prompts for pattern in prompt.params.stop_regex})
    if num > MAX_OF_A_CALL:
        raise RequestError(
            f"stop_regex: {num} different expressions in one call, at most {MAX_OF_A_CALL} are taken; send fewer",
            field="stop_regex",
        )


def with_bad_words(prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> list[Prompt]:
    """Returns the prompts with bad_words as token ids: of each word at the beginning of a text, and after a space.

    Raises RequestError if there is no tokenizer, or if a word has too many tokens.
    """
    every = {prompt.params.bad_words for prompt in prompts}
    ids_of = {words: _ids_of_bad_words(words, tokenizer) for words in every}  # a batch may share them

    def in_ids(params: SamplingParams) -> SamplingParams:
        return replace(params, bad_words=(), bad_words_ids=(*params.bad_words_ids, *ids_of[params.bad_words]))

    return [replace(each, params=in_ids(each.params)) if each.params.bad_words else each for each in prompts]


def _ids_of_bad_words(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError(f"bad_words needs a tokenizer, but {NO_TOKENIZER}; send bad_words_ids", field="bad_words")
    every: dict[tuple[int, ...], None] = {}
    for word in words:
        check_unicode("bad_words", word)
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words holds a word of {len(ids)} tokens, at most {MAX_BAD_WORD_TOKENS} are taken; shorten it",
                    field="bad_words",
                )
            every[ids] = None
    return tuple(ids for ids in every if ids)


def fit_to_model(prompt: Prompt, prompt_ids: Sequence[int], limits: ModelLimits) -> SamplingParams:
    """Returns the parameters of a prompt, checked against a model's limits; a default length is reduced to them.

    Raises RequestError for ids outside the vocabulary and lengths that cannot be served.
    """
    if not prompt_ids:
        raise RequestError(f"{prompt.field} has no tokens; send at least one", field=prompt.field)
    check_ids(prompt.field, prompt_ids, limits)
    # The cache of a rank may hold fewer: max_prompt_len + 1 tokens; the last output token is not cached.
    max_tokens = min(limits.max_model_len, limits.max_prompt_len + 2)
    params, num_free = prompt.params, max_tokens - len(prompt_ids)
    if params.max_new_tokens > num_free:
        if prompt.explicit_length:
            raise RequestError(
                f"max_new_tokens is {params.max_new_tokens} and the prompt has {len(prompt_ids)} tokens, together more "
                f"than the {max_tokens} that are served; ask for at most {num_free}",
                field="max_new_tokens",
            )
        if params.min_new_tokens > num_free:
            raise RequestError(
                f"min_new_tokens is {params.min_new_tokens} but only {num_free} tokens fit after this prompt",
                field="min_new_tokens",
            )
        params = replace(params, max_new_tokens=num_free)
    _check_vocabulary("stop_token_ids", params.stop_token_ids, limits)
    _check_vocabulary("logit_bias", params.logit_bias, limits)
    _check_vocabulary("allowed_token_ids", params.allowed_token_ids, limits)
    for word in params.bad_words_ids:
        _check_vocabulary("bad_words_ids", word, limits)
    _check_vocabulary("logprob_token_ids", params.logprob_token_ids, limits)
    params = fit_logprobs(params, len(prompt_ids), limits)
    if params.return_routed_experts:
        check_experts(len(prompt_ids) + params.max_new_tokens, limits.expert_id_bytes)
    if params.return_embedding and not limits.embedding_size:
        raise RequestError(
            "embeddings are served by ranks on CPUs, and these compute on GPUs", field="return_embedding"
        )
    if params.top_k >= limits.vocab_size:
        params = replace(params, top_k=-1)
    return params


def _check_vocabulary(field: str, token_ids: Iterable[int], limits: ModelLimits) -> None:
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        raise RequestError(
            f"{field} holds {largest}, outside the vocabulary; expected 0 to {limits.vocab_size - 1}", field=field
        )


def draw_seed() -> int:
    """Returns a random seed for a request without one."""
    return secrets.randbelow(MAX_SEED + 1)


def derived_seed(seed: int, sample: int) -> int:
    """Returns the seed of one of `n` samples: the request's own for the first, a hash for each other one."""
    if sample == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


MAX_STREAMED = 2**24  # numbers in a stream whose events repeat all earlier ones
MAX_STREAMED_PROMPT = 2**16  # those of prompts come in one event


def fit_logprobs(params: SamplingParams, num_prompt: int, limits: ModelLimits) -> SamplingParams:
    """Returns the parameters with at most a vocabulary of likeliest tokens. num_prompt: tokens

    Raises RequestError if more likeliest tokens are asked for than this server gives, if the start is not in the
    prompt, or if the answer could have more numbers than MAX_ENTRIES.
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

    incremental: the events of its stream hold only what is new; otherwise each repeats all
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


MAX_EMBEDDED = 2**21  # numbers in the embeddings of a call: 8 MB here, and about 40 MB of JSON


def check_embeddings(specs: Sequence[RequestSpec], limits: ModelLimits) -> None:
    """Raises RequestError for a call whose embeddings could have more numbers than MAX_EMBEDDED together."""
    num = sum(spec.params.return_embedding for spec in specs)
    if num * limits.embedding_size > MAX_EMBEDDED:
        raise RequestError(
            f"return_embedding: {num} embeddings of {limits.embedding_size} numbers are asked for, and at most "
            f"{MAX_EMBEDDED // limits.embedding_size} are given in one call; send fewer at once",
            field="return_embedding",
        )


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


def samples_of(params: SamplingParams, seed: int) -> list[tuple[SamplingParams, int]]:
    """Returns the parameters and the seed of each output of a prompt. seed: the prompt's"""
    if params.num_samples == 1:
        return [(params, seed)]
    logprobs = 0 if params.chooses and params.logprobs is None else params.logprobs
    first = replace(params, n=1, best_of=None, logprobs=logprobs)
    other = replace(first, prompt_logprobs=None)
    rest = [(other, derived_seed(seed, sample)) for sample in range(1, params.num_samples)]
    return [(first, seed), *rest]


def link_samples(requests: Sequence[OpenRequest], groups: Sequence[tuple[int, int]]) -> None:
    """Makes the outputs of each prompt share its log probabilities. groups: as in `generate.Call`"""
    first = 0
    for count, _ in groups:
        for other in requests[first : first + count]:
            share_prompt_logprobs(requests[first], other)
        first += count


def share_prompt_logprobs(first: OpenRequest, other: OpenRequest) -> None:
    """Gives another output of a prompt the prompt's log probabilities of the first."""
    if other is not first and first.prompt_logprobs is not None:
        other.take_prompt_logprobs_of(first)


def best_of_each(requests: Sequence[OpenRequest], groups: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the indices of the requests in the answer. groups: as in `generate.Call`

    Of each prompt these are the likeliest per token, best first, as for OpenAI's best_of; equal ones, and a group that
    is in the answer as a whole, stay in their order.
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
