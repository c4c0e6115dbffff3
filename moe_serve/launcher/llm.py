"""Offline generation from Python: the same ranks and the same bridge as the server, without HTTP.

    with LLM("demo", num_ranks=2) as llm:
        for output in llm.generate(["def fibonacci("], SamplingParams(temperature=0)):
            print(output.text)

The ranks are child processes and end with this one (`background.py`). On SIGTERM, calls that run finish first.
"""

import asyncio
import difflib
import math
import operator
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.progress import Progress as ProgressBar

from moe_serve.attention_dp.sampling_params import SamplingParams, plain
from moe_serve.config import ServeConfig, load_config
from moe_serve.engine.output.logprobs import Logprob, TokenLogprobs
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import ConfigError, RequestError
from moe_serve.launcher.background import BackgroundRanks, OrderlyEnd
from moe_serve.launcher.preflight import load_tokenizer, look_for_files, refusal
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.api.embeddings import unit_vector
from moe_serve.server.api.params import model_defaults
from moe_serve.server.ranks.balance import BalanceBook
from moe_serve.server.requests.open_request import Changes, OpenRequest, RequestSpec
from moe_serve.server.requests.prompts import (
    Prompt,
    best_of_each,
    draw_seed,
    encode_prompt,
    fit_to_model,
    samples_of,
    share_prompt_logprobs,
    with_bad_words,
)

Prompts = Sequence[str] | Sequence[list[int]]
Params = SamplingParams | Sequence[SamplingParams] | None
_CAPACITY_POLL_S = 0.01  # how often a caller looks for capacity while other callers hold all of it


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
    # [tokens, MoE layers, experts of a token], logical ids of prompt and output but for its last token, which was only
    # drawn; None: `SamplingParams.return_routed_experts` is false
    routed_experts: np.ndarray | None = None
    embedding: np.ndarray | None = None  # [H] float32 of length 1; None: `SamplingParams.return_embedding` is false

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """The log probabilities at each output token, by token id: its own first, the likeliest, those asked for.

        None: `SamplingParams.logprobs` asked for nothing. engine/output/logprobs.py says which ones they are.
        """
        entries = self.output_entries
        return None if entries is None else [entries.at(i, token) for i, token in enumerate(self.token_ids)]

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """The log probabilities of the prompt's tokens from `prompt_logprobs_start` on; None for the first one."""
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


@dataclass(frozen=True)
class Requests:
    """The requests of one call. specs: of all prompts in order;  groups: as in `best_of_each`"""

    specs: list[RequestSpec]
    groups: list[tuple[int, int]]


class LLM:
    """A model on this machine, ready to generate. Use it in a `with` block, or call close().

    model:     a Hugging Face model folder, or "demo"
    num_ranks: processes; experts and requests are spread over them
    dtype:     "float32", "bfloat16" or "auto"
    progress:  show the start, and a bar while generating, on stderr
    overrides: more settings: a section with its settings (`engine={"numerics": "batch_invariant"}`), or a setting
               whose name only one section has (`max_running_requests=8`)

    Raises a MoeServeError when the settings cannot work or the ranks do not start.
    """

    def __init__(
        self, model: str = "demo", num_ranks: int = 2, dtype: str = "float32", progress: bool = False, **overrides: Any
    ):
        base: dict[str, dict[str, Any]] = {
            "model": {"path": str(model), "dtype": dtype},
            "parallel": {"num_ranks": num_ranks},
        }
        self._begin(load_config(base=with_overrides(base, overrides)), progress)

    @classmethod
    def from_config(cls, config: ServeConfig, progress: bool = False) -> "LLM":
        """Returns an LLM with the settings of a server; its ports are not used."""
        llm = cls.__new__(cls)
        llm._begin(config, progress)
        return llm

    def _begin(self, config: ServeConfig, progress: bool) -> None:
        look_for_files(config)
        self._progress = progress
        self._tokenizer = load_tokenizer(config)
        self._default_params = SamplingParams(**model_defaults(config))
        self._ranks = BackgroundRanks(config, self._tokenizer, progress)
        self._bridge = self._ranks.bridge
        self._end = OrderlyEnd(self._give_up, config.server.drain_deadline_s)

    def _give_up(self) -> None:
        self._ranks.give_up("the process was asked to end (SIGTERM), and the call took longer than drain_deadline_s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
    ) -> list[Output]:
        """Returns one output for each prompt, in order. params: one for all, one for each, or None: what the model's
        generation_config.json recommends (`server.sampling_defaults`).

        A prompt whose params ask for `n` has n outputs, one after the other. The first has the prompt's seed, the
        others have seeds derived from it, as in the server. With `best_of` they are the n likeliest of so many, the
        best one first.

        A max_new_tokens that params leave out is reduced to what fits behind the prompt.

        Raises RequestError for a prompt or a max_new_tokens that cannot be served, and UnavailableError when a rank is
        lost.
        """
        with self._end.call():
            return self._generate(prompts, params)

    def _generate(self, prompts: Prompts, params: Params) -> list[Output]:
        requests = self._requests(prompts, params)
        with ProgressBar(disable=not self._progress) as bar:
            task = bar.add_task("generating", total=len(requests.specs))
            return self._ranks.call(self._all(requests, lambda: bar.advance(task)))

    def stream(
        self,
        prompts: Prompts,
        params: Params = None,
    ) -> Iterator[tuple[int, Output]]:
        """Yields (index, output so far) as tokens arrive; the last one of an index has a finish_reason.

        index: of the output in the list that `generate` would return; without `n` above 1 that is the prompt's

        Raises RequestError as generate does, and where `best_of` is larger than `n`.
        """
        with self._end.call():
            requests = self._requests(prompts, params)
            if any(num_shown < num for num, num_shown in requests.groups):
                raise RequestError(
                    "best_of is larger than n, so the outputs are known at the end only; call generate", "best_of"
                )
            yield from self._news(requests.specs)

    @property
    def balance(self) -> BalanceBook:
        """What the balancer has reported so far; it grows while requests run, in another thread."""
        return self._bridge.balance

    def close(self) -> None:
        """Ends the ranks. Safe to call again."""
        self._end.close()
        self._ranks.close()

    # --- from prompts to requests -------------------------------------------------------------------------------------

    def _requests(self, prompts: Prompts, params: Params) -> Requests:
        each = params_of_each(prompts, params, self._default_params)
        self._ranks.call(self._bridge.wait_for_restart())
        limits = self._bridge.limits

        def compiled(params: SamplingParams) -> SamplingParams:
            return self._ranks.call(self._bridge.grammars.checked(params, limits))

        return requests_of(prompts, each, self._tokenizer, limits, compiled)

    def _news(self, specs: Sequence[RequestSpec]) -> Iterator[tuple[int, Output]]:
        source = self._outputs(specs)
        try:
            while (news := self._ranks.call(anext(source, None))) is not None:
                yield news
        finally:
            self._ranks.call(source.aclose())

    async def _all(self, requests: Requests, advance: Callable[[], None]) -> list[Output]:
        """Returns the outputs that each prompt asks for. advance: called whenever a request has ended"""
        found: dict[int, OpenRequest] = {}
        async with aclosing(self._run(requests.specs, Changes(ends_only=True))) as ended:
            async for index, request in ended:
                found[index] = request
                advance()
        in_order = [found[index] for index in range(len(found))]
        return [output_of(in_order[index]) for index in best_of_each(in_order, requests.groups)]

    async def _outputs(self, specs: Sequence[RequestSpec]) -> AsyncGenerator[tuple[int, Output], None]:
        async with aclosing(self._run(specs, Changes())) as changed:
            async for index, request in changed:
                yield index, output_of(request)

    async def _run(
        self, specs: Sequence[RequestSpec], changes: Changes
    ) -> AsyncGenerator[tuple[int, OpenRequest], None]:
        """Yields requests that have changed, with the index of their spec.

        Keeps as many requests open as the ranks take; aborts the open ones when its reader stops early.
        """
        waiting = list(enumerate(specs))[::-1]
        index_of: dict[str, int] = {}
        open_requests: dict[str, OpenRequest] = {}
        first_of: dict[str, OpenRequest] = {}  # by the group of a prompt's outputs
        try:
            while waiting or open_requests:
                if not open_requests:
                    await self._bridge.wait_for_restart()
                while (
                    waiting and len(self._bridge.book) < self._bridge.book.capacity and not self._bridge.is_restarting
                ):
                    index, spec = waiting.pop()
                    (request,) = self._bridge.submit([spec], changes)
                    if spec.group is not None:
                        share_prompt_logprobs(first_of.setdefault(spec.group, request), request)
                    open_requests[request.request_id] = request
                    index_of[request.request_id] = index
                if not open_requests:  # other callers hold all capacity, and nothing signals when that ends
                    await asyncio.sleep(_CAPACITY_POLL_S)
                    continue
                request = await changes.next()
                if request.failure is not None:
                    raise request.failure
                if request.is_done:
                    del open_requests[request.request_id]
                yield index_of[request.request_id], request
        finally:
            for request in open_requests.values():
                self._bridge.book.abort(request)


def with_overrides(base: dict[str, dict[str, Any]], overrides: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns base with keyword overrides on top: sections, also by vLLM's name, or names that only one section has.

    Raises ConfigError for a name in no section, or in two.
    """
    sections = ServeConfig.model_fields
    result = {section: dict(values) for section, values in base.items()}
    for name, value in overrides.items():
        section = "speculation" if name == "speculative_config" else name  # as in vLLM's LLM
        if section in sections:
            if not isinstance(value, dict | None):
                raise ConfigError(f"{name} is a section; give its settings as a dict, e.g. {name}={{...}}")
            result.setdefault(section, {}).update(value or {})
            continue
        owners = [section for section, field in sections.items() if name in field.annotation.model_fields]  # type: ignore[union-attr]
        if len(owners) != 1:
            if (words := refusal(f"--{name.replace('_', '-')}", "num_ranks")) is not None:
                raise ConfigError(f"LLM({name}=...) {words}")
            every = {key for field in sections.values() for key in field.annotation.model_fields}  # type: ignore[union-attr]
            near = difflib.get_close_matches(name, every, n=1)
            hint = f"two sections have it: give {owners[0]}={{{name!r}: ...}}" if owners else "no section has it"
            hint += f"; did you mean {near[0]!r}?" if near and not owners else ""
            raise ConfigError(f"LLM({name}=...): {hint}")
        result.setdefault(owners[0], {})[name] = value
    return result


def params_of_each(prompts: Prompts, params: Params, default: SamplingParams) -> list[SamplingParams]:
    """Returns the parameters of each prompt. default: where there are none

    Raises RequestError for a single prompt, and another number of params.
    """
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        raise RequestError("prompts is a single prompt; put it into a list", field="prompts")
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * len(prompts)
    if len(params) != len(prompts):
        raise RequestError(f"{len(params)} params for {len(prompts)} prompts; give one, or one each", field="params")
    return list(params)


def requests_of(
    prompts: Prompts,
    params: Sequence[SamplingParams],
    tokenizer: Tokenizer | None,
    limits: ModelLimits,
    compiled: Callable[[SamplingParams], SamplingParams],
) -> Requests:
    """Returns the requests of all prompts. Raises RequestError that names the prompt.

    params:   of each prompt
    compiled: returns parameters with their constraint as ranks take it
    """
    requests = Requests([], [])
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        try:
            ids, fitted = _fitted(prompt, each, tokenizer, limits)
            fitted = fitted if fitted.constraint is None else compiled(fitted)
        except RequestError as error:
            raise RequestError(f"prompts[{index}]: {error}", field=error.field) from None
        group = uuid.uuid4().hex if fitted.num_samples > 1 else None
        asks = fitted.logprobs is not None
        requests.specs.extend(
            RequestSpec(ids, own, seed, group=group, shows_logprobs=asks)
            for own, seed in samples_of(fitted, draw_seed() if each.seed is None else each.seed)
        )
        requests.groups.append((fitted.num_samples, fitted.n))
    return requests


def _fitted(
    given: Any, params: SamplingParams, tokenizer: Tokenizer | None, limits: ModelLimits
) -> tuple[list[int], SamplingParams]:
    """Returns the token ids of a prompt, and its parameters as they fit the model."""
    params = replace(
        params,
        stop=_as_tuple(params.stop),
        stop_regex=_as_tuple(params.stop_regex),
        stop_token_ids=tuple(params.stop_token_ids),
        bad_words=_as_tuple(params.bad_words),
        bad_words_ids=tuple(map(tuple, params.bad_words_ids)),
        allowed_token_ids=tuple(params.allowed_token_ids),
        logprob_token_ids=tuple(params.logprob_token_ids),
    )
    params.validate()
    (prompt,) = with_bad_words([_prompt(given, params)], tokenizer)
    ids = encode_prompt(prompt, tokenizer, limits)
    return ids, fit_to_model(prompt, ids, limits)


def _prompt(given: Any, params: SamplingParams) -> Prompt:
    """Returns a prompt from text or token ids, which may be numpy's. Raises RequestError for anything else."""
    text, ids = None, None
    try:
        if isinstance(given, str):
            text = given
        else:
            ids = [operator.index(token) for token in given]
    except TypeError:
        raise RequestError(f"{given!r:.60} is no prompt; give text or token ids", field="prompts") from None
    return Prompt(text, ids, plain(params), explicit_length=params.names_length, rid=None, session_id=None)


def _as_tuple(stop: Any) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


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
        routed_experts=None if request.routed_experts is None else request.routed_experts.array(request.num_routed),
        embedding=None if request.embedding is None else unit_vector(request.embedding),
    )
