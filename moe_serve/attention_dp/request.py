"""One generation request as a rank sees it: its parameters, its output so far, and how much of it is in the cache.

What a rank computes for a request is a pure function of (prompt ids, output ids so far, parameters, seed). So
preemption, crash recovery and hand-over between engines are one operation: submit again, with the output so far.
Torch-free: the HTTP front end and `LLM` build these types too.
"""

import math
from dataclasses import dataclass, field

from moe_serve.errors import RequestError

MAX_SEED = 2**63 - 1  # the sampler's philox key is one int64
MAX_STOPS = 64  # stop strings, and stop token ids, of one request


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Names and defaults follow SGLang."""

    max_new_tokens: int = 128  # 0 = compute the prompt only, so that its prefix is cached
    min_new_tokens: int = 0  # no end-of-sequence, stop token or stop string before this many tokens
    temperature: float = 1.0  # 0 = greedy
    top_k: int = -1  # -1 = all
    top_p: float = 1.0
    min_p: float = 0.0  # the least probability of a token, as a share of the likeliest one's; after top_k and top_p
    seed: int | None = None  # None: the front end draws one
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def validate(self) -> None:
        """Raises RequestError naming the first field that is out of range, the value, and the range."""
        _check_int("max_new_tokens", self.max_new_tokens, 0)
        _check_int("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
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
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        _check_stops("stop", self.stop)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop holds {text!r}, expected non-empty strings", field="stop")
        _check_stops("stop_token_ids", self.stop_token_ids)
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}, expected true or false", field=name)


def check_length(
    num_prompt: int, num_output: int, max_new_tokens: int, max_model_len: int, max_cached_tokens: int
) -> None:
    """Raises RequestError when a request of this length can never run on a rank.

    num_prompt, num_output: tokens of the prompt, and produced before this submit
    max_model_len:          tokens of the model's context, prompt and output together
    max_cached_tokens:      tokens that the rank's whole KV cache holds; the last output token needs no slot
    """
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens, needs at least one; send some text or ids", field="input_ids")
    if num_output >= max_new_tokens:
        raise RequestError(
            f"the request brings {num_output} output tokens and max_new_tokens is {max_new_tokens}, so nothing is left "
            "to produce; raise max_new_tokens",
            field="max_new_tokens",
        )
    total = num_prompt + max_new_tokens
    if total > max_model_len:
        field, fix = _shorten(num_prompt, max_model_len - num_prompt)
        raise RequestError(
            f"the prompt has {num_prompt} tokens and max_new_tokens is {max_new_tokens}, together {total}, but the "
            f"model takes {max_model_len}; {fix}",
            field=field,
        )
    if total - 1 > max_cached_tokens:
        field, fix = _shorten(num_prompt, max_cached_tokens + 1 - num_prompt)
        raise RequestError(
            f"the prompt has {num_prompt} tokens and max_new_tokens is {max_new_tokens}, but the KV cache of a rank "
            f"holds {max_cached_tokens}; {fix}, or serve with a larger cache.num_blocks or cache.memory_gib",
            field=field,
        )


def _shorten(num_prompt: int, max_output: int) -> tuple[str, str]:
    """Returns the field to change and how, for a prompt that leaves space for `max_output` tokens."""
    if max_output >= 1:
        return "max_new_tokens", f"lower max_new_tokens to {max_output} or shorten the prompt"
    return "input_ids", f"shorten the prompt to {num_prompt + max_output - 1} tokens or fewer"


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}, expected a whole number", field=name)
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {value}, expected {span}", field=name)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}, expected a finite number", field=name)


def _check_stops(name: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise RequestError(f"{name} is {value!r}, expected a list", field=name)
    if len(value) > MAX_STOPS:
        raise RequestError(f"{name} has {len(value)} entries, at most {MAX_STOPS} are taken; send fewer", field=name)


@dataclass(slots=True, eq=False)
class Request:
    """A request on its rank. Only the scheduler changes the fields below `salt`; the sampler reads `output_ids`.

    The *known* tokens are prompt_ids + output_ids; their KV is computed from left to right, `num_computed` of them so
    far.
    """

    request_id: str
    attempt: int
    prompt_ids: list[int]
    output_ids: list[int]  # produced before this submit, then extended by Scheduler.complete()
    params: SamplingParams
    seed: int
    salt: str = ""  # prompts share cached blocks only within one salt

    arrival: int = -1  # order of add(); a preempted request keeps its place
    block_ids: list[int] = field(default_factory=list)  # cache block i holds tokens i*block_size .. (i+1)*block_size
    table_row: int = -1  # of BlockTables, which keeps block_ids as an array too; -1 while it holds no blocks
    num_computed: int = 0  # tokens whose KV is in the cache
    num_cached_prompt: int = 0  # prompt tokens that the prefix cache supplied at first admission
    block_keys: list[bytes] = field(
        default_factory=list
    )  # prefix-cache keys of the leading full blocks, as far as known
    num_published: int = 0  # leading blocks that came from, or were published to, the prefix cache
    was_preempted: bool = False
    num_lost: int = 0  # tokens that were computed when it was preempted

    @property
    def num_known(self) -> int:
        """Returns the number of prompt and output tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Returns known tokens start..end."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : end - num_prompt]
        return self.prompt_ids[start:] + self.output_ids[: end - num_prompt]
