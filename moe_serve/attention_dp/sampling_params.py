"""The sampling parameters of a request and their checks. Names and defaults follow SGLang."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.errors import RequestError

MAX_SEED = 2**63 - 1  # the sampler's philox key is one int64
MAX_STOPS = 64  # stop strings, and stop token ids, of one request
MAX_SAMPLES = 128  # outputs of one prompt
MAX_LOGPROB_IDS = 64  # token ids whose log probabilities come at each place
MAX_STOP_REGEXES = 4
MAX_BIASES = 1024  # entries of logit_bias
MAX_ALLOWED = 16_384  # allowed_token_ids
MAX_BAD_WORDS = 128  # of one request, as strings and again as token ids
MAX_BAD_WORD_TOKENS = 64  # of one word
MAX_BIAS = 100  # of one token, as in OpenAI's API
_PENALTIES = {  # the least and the largest: OpenAI's; no logit overflows by a repetition penalty
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


class DefaultLength(int):
    """The max_new_tokens of a caller in Python who has named none. `plain` turns it into a plain number."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters that choose tokens and end the output. Names and defaults follow SGLang."""

    max_new_tokens: int = DefaultLength(128)  # 0 = compute the prompt only, so that its prefix is cached
    min_new_tokens: int = 0  # no end-of-sequence, stop token or stop string before this many tokens
    temperature: float = 1.0  # 0 = greedy
    top_k: int = -1  # -1 = all
    top_p: float = 1.0
    min_p: float = 0.0  # the least probability of a token, as a share of the likeliest one's; after top_k and top_p
    seed: int | None = None  # None: the front end draws one
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()  # of a part of Python's syntax; a match ends the output as a stop string does
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False  # the text ends with the matched stop string, or the text of the stop token
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time that the output has it
    presence_penalty: float = 0.0  # subtracted from the logit of each token that the output has
    repetition_penalty: float = 1.0  # divides the logits above 0 of tokens in prompt or output, multiplies the others
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these token ids, first
    bad_words: tuple[str, ...] = ()  # the front end adds their tokens, each with and without a space before, to:
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not hold
    allowed_token_ids: tuple[int, ...] = ()  # no others may be drawn; () = all
    # Log probabilities (engine/output/logprobs.py). None: no; else how many of the likeliest tokens stand beside each
    logprobs: int | None = None  # of output tokens
    prompt_logprobs: int | None = None  # of prompt tokens behind the one at prompt_logprobs_start
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()  # whose log probabilities come, too, at each place asked for
    return_routed_experts: bool = False  # the experts of every token of prompt and output, in all MoE layers
    return_embedding: bool = False  # the row of the prompt's last token that is projected to logits
    constraint: Constraint | None = None  # the form of the whole output; None = any
    # The front end makes a request of each output (server/requests/prompts.py); a rank sees 1 and None.
    n: int = 1  # outputs of the prompt
    best_of: int | None = None  # so many are generated, and the likeliest n of them per token are shown; None: n

    @property
    def names_length(self) -> bool:
        """Whether the caller has named max_new_tokens, which is then never changed to fit."""
        return not isinstance(self.max_new_tokens, DefaultLength)

    @property
    def num_samples(self) -> int:
        """Number of outputs that are generated."""
        return self.best_of or self.n

    @property
    def chooses(self) -> bool:
        """Whether more outputs are generated than are shown."""
        return self.num_samples > self.n

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed after min_new_tokens, too."""
        return bool(self.has_penalties or self.logit_bias or self.bad_words_ids or self.allowed_token_ids)

    def validate(self) -> None:
        """Raises RequestError naming the first field that is out of range, the value, and the range."""
        _check_int("max_new_tokens", self.max_new_tokens, 0)
        _check_int("min_new_tokens", self.min_new_tokens, 0)
        if self.names_length and self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens} but max_new_tokens is {self.max_new_tokens}; "
                "lower min_new_tokens or raise max_new_tokens",
                field="min_new_tokens",
            )
        _check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise RequestError(f"temperature is {self.temperature}, expected 0 (greedy) or more", field="temperature")
        _check_int("top_k", self.top_k, -1)
        if self.top_k == 0:
            raise RequestError("top_k is 0, expected -1 (all tokens) or at least 1", field="top_k")
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}, expected a number above 0 and at most 1", field="top_p")
        _check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p is {self.min_p}, expected a number from 0 (all tokens) to 1", field="min_p")
        if self.changes_logits or self.bad_words:
            self._check_changes()
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        _check_texts("stop", self.stop, MAX_STOPS)
        _check_texts("stop_regex", self.stop_regex, MAX_STOP_REGEXES)
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOPS)
        for name in ("ignore_eos", "skip_special_tokens", "no_stop_trim", "return_routed_experts", "return_embedding"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}, expected true or false", field=name)
        self._check_samples()
        self._check_logprobs()
        self._check_constraint()

    def _check_samples(self) -> None:
        for name in ("n", "best_of"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1, MAX_SAMPLES)
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(
                f"best_of is {self.best_of} but n is {self.n}; the best {self.n} come from at least as many", "best_of"
            )

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0)
        _check_int("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        _check_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_IDS)

    def _check_constraint(self) -> None:
        if self.constraint is None:
            return
        if not isinstance(self.constraint, Constraint):
            raise RequestError(f"constraint is {self.constraint!r:.60}, expected a Constraint", field="constraint")
        self.constraint.validate()
        if self.ignore_eos:
            raise RequestError(
                f"ignore_eos is true but an output of {self.constraint.kind} ends where its form is complete; leave "
                "ignore_eos out",
                field="ignore_eos",
            )

    def _check_changes(self) -> None:
        for name, (low, high) in _PENALTIES.items():
            _check_number(name, getattr(self, name))
            if not low <= getattr(self, name) <= high:
                raise RequestError(f"{name} is {getattr(self, name)}, expected {low:g} to {high:g}", field=name)
        self._check_logit_bias()
        self._check_bad_words()
        _check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED)

    def _check_logit_bias(self) -> None:
        name = "logit_bias"
        if not isinstance(self.logit_bias, dict):
            raise RequestError(f"{name} is {self.logit_bias!r}, expected token ids with numbers", field=name)
        _check_size(name, self.logit_bias, MAX_BIASES)
        for token_id, bias in self.logit_bias.items():
            _check_int(name, token_id, 0)
            _check_number(f"{name} of {token_id}", bias, name)
            if abs(bias) > MAX_BIAS:
                raise RequestError(f"{name} of {token_id} is {bias}, expected -{MAX_BIAS} to {MAX_BIAS}", field=name)

    def _check_bad_words(self) -> None:
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        if not all(word.strip() for word in self.bad_words):
            raise RequestError("bad_words holds a string of spaces alone; leave it out", field="bad_words")
        name = "bad_words_ids"
        _check_size(name, self.bad_words_ids, MAX_BAD_WORDS)
        for word in self.bad_words_ids:
            _check_ids(name, word, MAX_BAD_WORD_TOKENS)
            if not word:
                raise RequestError(f"{name} holds an empty list, expected at least one token id", field=name)


def plain(params: SamplingParams) -> SamplingParams:
    """Returns valid parameters in Python's own types, which messages need; a caller may have given numpy's numbers."""
    numbers: dict[str, Any] = {
        name: float(getattr(params, name)) for name in ("temperature", "top_p", "min_p", *_PENALTIES)
    }
    length = params.max_new_tokens if params.names_length else max(int(params.max_new_tokens), params.min_new_tokens)
    logit_bias = {int(key): float(bias) for key, bias in params.logit_bias.items()}
    return replace(params, **numbers, max_new_tokens=length, logit_bias=logit_bias)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}, expected a whole number", field=name)
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {value}, expected {span}", field=name)


def _check_number(name: str, value: object, field: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}, expected a finite number", field=field or name)


def _check_texts(name: str, value: object, most: int) -> None:
    for text in _check_size(name, value, most):
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name} holds {text!r}, expected non-empty strings", field=name)


def _check_ids(name: str, value: object, most: int) -> None:
    for token_id in _check_size(name, value, most):
        _check_int(name, token_id, 0)


def _check_size(name: str, value: object, most: int) -> Collection[object]:
    """Returns a collection that is not too large."""
    if not isinstance(value, (tuple, dict)):
        raise RequestError(f"{name} is {value!r}, expected a list", field=name)
    if len(value) > most:
        raise RequestError(f"{name} has {len(value)} entries, at most {most} are taken; send fewer", field=name)
    return value
