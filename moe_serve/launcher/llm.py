"""Offline generation from Python: the same ranks and the same bridge as the server, without HTTP. Torch-free.

    with LLM("demo", num_ranks=2) as llm:
        for output in llm.generate(["def fibonacci("], SamplingParams(temperature=0)):
            print(output.text)

The ranks are child processes and end with this one (`background.py`). On SIGTERM what runs finishes (`orderly_end.py`).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from rich.progress import Progress as ProgressBar

from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.config import ServeConfig, load_config
from moe_serve.errors import RequestError
from moe_serve.launcher.background import BackgroundRanks
from moe_serve.launcher.llm_output import Output, output_of
from moe_serve.launcher.llm_requests import Params, Prompts, Requests, params_of_each, requests_of
from moe_serve.launcher.llm_settings import merged
from moe_serve.launcher.local import WORKER
from moe_serve.launcher.orderly_end import OrderlyEnd
from moe_serve.launcher.preflight import load_tokenizer, look_for_files
from moe_serve.server.api.sampling_fields import model_defaults
from moe_serve.server.ranks.balance import BalanceBook
from moe_serve.server.requests.open_request import Changes, OpenRequest, RequestSpec
from moe_serve.server.requests.prompts import best_of_each, share_prompt_logprobs

_CAPACITY_POLL_S = 0.01  # how often a caller looks for capacity while other callers hold all of it


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
        self._begin(load_config(base=merged(base, overrides)), progress, WORKER)

    @classmethod
    def from_config(cls, config: ServeConfig, progress: bool = False, worker: str = WORKER) -> "LLM":
        """Returns an LLM with the settings of a server; its ports are not used. worker: the module that is one rank."""
        llm = cls.__new__(cls)
        llm._begin(config, progress, worker)
        return llm

    def _begin(self, config: ServeConfig, progress: bool, worker: str) -> None:
        look_for_files(config)
        self._progress = progress
        self._tokenizer = load_tokenizer(config)
        self._default_params = SamplingParams(**model_defaults(config))
        self._ranks = BackgroundRanks(config, self._tokenizer, progress, worker)
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
        """Returns the outputs of each prompt that are asked for. advance: called whenever a request has ended"""
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
                while waiting and self._bridge.num_open < self._bridge.capacity and not self._bridge.is_restarting:
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
                self._bridge.abort(request)
