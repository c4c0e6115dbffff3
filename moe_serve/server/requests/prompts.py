"""Turns a checked prompt into what a rank gets: token ids, parameters that fit the model, a seed. Torch-free.

Used by the HTTP server and by `LLM`.
"""

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moe_serve.attention_dp.request import MAX_SEED, SamplingParams
from moe_serve.attention_dp.sampling_params import MAX_BAD_WORD_TOKENS
from moe_serve.engine.output.stop_regex import MAX_OF_A_CALL, compile_stop_regex
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer, check_unicode
from moe_serve.server.requests.logprob_limits import fit_logprobs

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
        raise RequestError(f"text needs a tokenizer, but {NO_TOKENIZER}; send input_ids", field="text")
    text = prompt.text or ""
    if len(text) > limits.max_prompt_len * tokenizer.longest_token:
        raise RequestError(
            f"text has {len(text)} characters, more than any prompt of {limits.max_prompt_len} tokens; shorten it",
            field="text",
        )
    return tokenizer.encode(text, prompt.add_special_tokens)


def check_num_expressions(prompts: Sequence[Prompt]) -> None:
    """Raises RequestError where the prompts of one call have too many different stop_regex."""
    num = len({pattern for prompt in prompts for pattern in prompt.params.stop_regex})
    if num > MAX_OF_A_CALL:
        raise RequestError(
            f"stop_regex: {num} different expressions in one call, at most {MAX_OF_A_CALL} are taken; send fewer",
            field="stop_regex",
        )


def with_bad_words(prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> list[Prompt]:
    """Returns prompts whose bad_words are token ids: of each word as it stands at the beginning, and after a space.

    Raises RequestError where there is no tokenizer, and for a word of too many tokens.
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
    field = "text" if prompt.token_ids is None else "input_ids"
    if not prompt_ids:
        raise RequestError(f"{field} has no tokens; send at least one", field=field)
    longest = min(limits.max_prompt_len, limits.max_model_len - 1)  # before what is in it: a million ids take a while
    if len(prompt_ids) > longest:
        raise RequestError(
            f"{field} has {len(prompt_ids)} tokens, at most {longest} are served; shorten it", field=field
        )
    if min(prompt_ids) < 0 or max(prompt_ids) >= limits.vocab_size:
        wrong = next(i for i, token in enumerate(prompt_ids) if not 0 <= token < limits.vocab_size)
        raise RequestError(
            f"{field}[{wrong}] is {prompt_ids[wrong]}, outside the vocabulary; expected 0 to {limits.vocab_size - 1}",
            field=field,
        )
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
