"""Offline generation from Python: the same ranks and the same bridge as the server, without HTTP. Torch-free.

    with LLM("demo", num_ranks=2) as llm:
        for output in llm.generate(["def fibonacci("], SamplingParams(temperature=0)):
            print(output.text)

The bridge lives in an event loop of its own thread; the ranks are child processes and end with it.
"""

import asyncio
import atexit
import difflib
import operator
import threading
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.progress import Progress as ProgressBar

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import ServeConfig, load_config
from moe_serve.engine.messages import Progress, Ready, ToFrontEnd
from moe_serve.errors import ConfigError, RequestError
from moe_serve.launcher.display import StartDisplay
from moe_serve.launcher.local import WORKER, LocalRanks, new_token
from moe_serve.launcher.preflight import load_tokenizer, look_for_files
from moe_serve.server.bridge import Bridge
from moe_serve.server.open_request import Changes, OpenRequest, RequestSpec
from moe_serve.server.prompts import draw_seed, encode_prompt, fit_to_model
from moe_serve.server.schemas import Prompt

T = TypeVar("T")
Prompts = Sequence[str] | Sequence[list[int]]
Params = SamplingParams | Sequence[SamplingParams] | None
_WATCH_S = 0.1  # how often the processes are looked at
_ROOM_POLL_S = 0.01  # how often a caller without any place looks for one
_OWN_WORDS_S = 1.0  # a rank that exits by itself has said why to the bridge; its exit code says less
_END_GRACE_S = 3.0


@dataclass(frozen=True)
class Output:
    """What one prompt gave. text and token_ids are the new ones only.

    finish_reason: "length", or "stop" with `matched`, the stop string or id that ended it; None while a stream goes on
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    matched: int | str | None
    num_cached_tokens: int  # of the prompt, from the prefix cache
    rank: int


class LLM:
    """A model on this machine, ready to generate. Use it in a `with` block, or call close().

    model:     a Hugging Face model folder, or "demo"
    num_ranks: processes; experts and requests are spread over them
    dtype:     "float32", "bfloat16" or "auto"
    progress:  show the start, and a bar while generating, on stderr
    overrides: further settings: a section with its settings (`engine={"numerics": "batch_invariant"}`), or the name of
               one setting that only one section has (`max_running_requests=8`)

    Raises a MoeServeError when the settings cannot work or the ranks do not start.
    """

    def __init__(
        self, model: str = "demo", num_ranks: int = 2, dtype: str = "float32", progress: bool = False, **overrides: Any
    ):
        base: dict[str, dict[str, Any]] = {
            "model": {"path": str(model), "dtype": dtype},
            "parallel": {"num_ranks": num_ranks},
        }
        self._begin(load_config(base=_merged(base, overrides)), progress, WORKER)

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
        token = new_token()
        # The ranks' port is chosen by the bridge, and told to the ranks.
        config = config.model_copy(update={"server": config.server.model_copy(update={"worker_port": 0})})
        self._bridge = Bridge(config, self._tokenizer, self._observe, token)
        self._ranks: LocalRanks | None = None
        self._watch: asyncio.Task[None] | None = None
        self._display = StartDisplay(config.parallel.num_ranks) if progress else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="moe_serve bridge", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._closed = False
        try:
            self._call(self._start(config, token, worker))
        except BaseException:
            self.close()
            raise

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
        """Returns one output for each prompt, in their order. params: one for all, or one for each.

        Raises RequestError for a prompt that cannot be served, and UnavailableError when a rank is lost.
        """
        specs = self._specs(prompts, params)
        outputs: list[Output | None] = [None] * len(specs)
        with ProgressBar(disable=not self._progress) as bar:
            task = bar.add_task("generating", total=len(specs))
            for index, output in self._news(specs):
                if output.finish_reason is not None:
                    outputs[index] = output
                    bar.advance(task)
        return [output for output in outputs if output is not None]

    def stream(
        self,
        prompts: Prompts,
        params: Params = None,
    ) -> Iterator[tuple[int, Output]]:
        """Yields (index of the prompt, its output so far) as tokens come; the last of each has a finish_reason."""
        yield from self._news(self._specs(prompts, params))

    def close(self) -> None:
        """Ends the ranks. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._call(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # --- from prompts to requests -------------------------------------------------------------------------------------

    def _specs(self, prompts: Prompts, params: Params) -> list[RequestSpec]:
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            raise RequestError("prompts is a single prompt; put it into a list", field="prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(params)} params for {len(prompts)} prompts; give one, or one each", field="params"
            )
        return [self._spec(i, prompt, each) for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))]

    def _spec(self, index: int, given: Any, params: SamplingParams) -> RequestSpec:
        params = replace(params, stop=_as_tuple(params.stop), stop_token_ids=tuple(params.stop_token_ids))
        try:
            params.validate()
            # numpy's numbers are valid too, but have no form in a message.
            params = replace(params, temperature=float(params.temperature), top_p=float(params.top_p))
            prompt = _prompt(given, params)
            ids = encode_prompt(prompt, self._tokenizer, self._bridge.limits)
            fitted = fit_to_model(prompt, ids, self._bridge.limits)
        except RequestError as error:
            raise RequestError(f"prompts[{index}]: {error}", field=error.field) from None
        return RequestSpec(ids, fitted, draw_seed() if params.seed is None else params.seed)

    def _news(self, specs: Sequence[RequestSpec]) -> Iterator[tuple[int, Output]]:
        source = self._run(specs)
        try:
            while (news := self._call(anext(source, None))) is not None:
                yield news
        finally:
            self._call(source.aclose())

    async def _run(self, specs: Sequence[RequestSpec]) -> AsyncGenerator[tuple[int, Output], None]:
        """Keeps as many requests open as the ranks take; aborts what is open when its reader stops early."""
        changes = Changes()
        waiting = list(enumerate(specs))[::-1]
        index_of: dict[str, int] = {}
        open_requests: dict[str, OpenRequest] = {}
        try:
            while waiting or open_requests:
                while waiting and self._bridge.num_open < self._bridge.capacity:
                    index, spec = waiting.pop()
                    (request,) = self._bridge.submit([spec], changes)
                    open_requests[request.request_id] = request
                    index_of[request.request_id] = index
                if not open_requests:  # other callers hold every place, and nobody tells us when one leaves
                    await asyncio.sleep(_ROOM_POLL_S)
                    continue
                request = await changes.next()
                if request.failure is not None:
                    raise request.failure
                if request.is_done:
                    del open_requests[request.request_id]
                yield index_of[request.request_id], _output(request)
        finally:
            for request in open_requests.values():
                self._bridge.abort(request)

    # --- the ranks' life ----------------------------------------------------------------------------------------------

    def _call(self, work: Awaitable[T]) -> T:
        """Runs work in the bridge's thread; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(_as_coroutine(work), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _start(self, config: ServeConfig, token: str, worker: str) -> None:
        await self._bridge.start()
        server = config.server.model_copy(update={"worker_port": self._bridge.worker_port})
        # Started from this thread: the kernel counts the thread, not the process, as the parent that must live on.
        config = config.model_copy(update={"server": server})
        self._ranks = LocalRanks(config, self._line, token, module=worker)
        if self._display is not None:
            self._display.__enter__()
        try:
            self._ranks.start()
            self._watch = asyncio.create_task(self._watch_ranks(self._ranks))
            await self._bridge.wait_until_ready()
        finally:
            if self._display is not None:
                self._display.stop()

    async def _watch_ranks(self, ranks: LocalRanks) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            for death in ranks.deaths():
                if not death.was_killed:
                    await asyncio.sleep(_OWN_WORDS_S)
                last_words = f"; its last words: {death.last_lines[-1]}" if death.last_lines else ""
                self._bridge.lose_rank(death.rank, f"{death}{last_words}")

    async def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._bridge.close()
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.end, _END_GRACE_S)

    def _observe(self, message: ToFrontEnd) -> None:
        if self._display is None:
            return
        match message:
            case Progress():
                self._display.phase(message.rank, message.phase, message.fraction)
            case Ready():
                self._display.phase(message.rank, "ready", 1.0)

    def _line(self, who: str, line: str) -> None:
        if self._display is not None:
            self._display.line(who, line)


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work  # anext() gives an awaitable that the loop does not take as it is


def _output(request: OpenRequest) -> Output:
    reason = request.matcher.finish_reason
    return Output(
        prompt_token_ids=request.spec.prompt_ids,
        token_ids=list(request.matcher.output_ids),
        text=request.matcher.text,
        finish_reason=None if reason is None else reason.kind,
        matched=None if reason is None else reason.matched,
        num_cached_tokens=request.num_cached,
        rank=request.rank,
    )


def _prompt(given: Any, params: SamplingParams) -> Prompt:
    """Returns a prompt from text or token ids, which may be numpy's. Raises RequestError for anything else."""
    text, ids = (given, None) if isinstance(given, str) else (None, given)
    if ids is not None:
        try:
            ids = [operator.index(token) for token in ids]
        except TypeError:
            raise RequestError(f"{given!r:.60} is no prompt; give text or token ids", field="prompts") from None
    return Prompt(text, ids, params, 1, explicit_length=False, rid=None, session_id=None)


def _as_tuple(stop: Any) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _merged(base: dict[str, dict[str, Any]], overrides: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns nested settings with keyword overrides on top. Raises ConfigError for names in no section, or in two."""
    sections = ServeConfig.model_fields
    merged = {section: dict(values) for section, values in base.items()}
    for name, value in overrides.items():
        if name in sections:
            if not isinstance(value, dict):
                raise ConfigError(f"{name} is a section; give its settings as a dict, e.g. {name}={{...}}")
            merged.setdefault(name, {}).update(value)
            continue
        homes = [section for section, field in sections.items() if name in field.annotation.model_fields]  # type: ignore[union-attr]
        if len(homes) != 1:
            every = {key for field in sections.values() for key in field.annotation.model_fields}  # type: ignore[union-attr]
            near = difflib.get_close_matches(name, every, n=1)
            hint = f"two sections have it: give {homes[0]}={{{name!r}: ...}}" if homes else "no section has it"
            hint += f"; did you mean {near[0]!r}?" if near and not homes else ""
            raise ConfigError(f"LLM({name}=...): {hint}")
        merged.setdefault(homes[0], {})[name] = value
    return merged
