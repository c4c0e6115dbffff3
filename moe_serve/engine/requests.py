"""The open requests of one rank, from `Submit` to the last token, an abort, or the moment the rank is masked.

`OpenRequests` holds them. `StepEvents` turns the logits of a step into tokens, log probabilities and failures of its
requests, and into the events that tell the front end.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import msgspec
import torch
from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.scheduler import ScheduledChunk, Scheduler
from moe_serve.engine.output.changed_choices import ChangedCounts
from moe_serve.engine.output.grammars import Grammars
from moe_serve.engine.output.routed_experts import KeptExperts
from moe_serve.engine.output.row_logprobs import LogprobScorer, ProjectRows, joined
from moe_serve.engine.output.sampler import Sampler, draws_alike, has_finite_best
from moe_serve.engine.protocol.messages import (
    Expect,
    ExpertsBlock,
    LogprobBlock,
    ModelLimits,
    Submit,
    TokenEvent,
    front_end_of,
)
from moe_serve.engine.status import EngineCounters
from moe_serve.errors import RequestError
from moe_serve.kernels.part_clock import OTHER, SAMPLE, PartClock
from moe_serve.kernels.sampling import NONE_LEFT
from moe_serve.log import get_logger

log = get_logger(__name__)


class OpenRequests:
    """Requests by id. They change between steps only; the scheduler decides when each one runs."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: ModelLimits,
        counters: EngineCounters,
        grammars: Grammars,
        kept: KeptExperts | None = None,
        changed: ChangedCounts | None = None,
    ):
        """kept: the experts of tokens;  changed: of them, how many the capacity changed; None: they are not kept"""
        self._changed = changed
        self._kept = kept
        self._scheduler = scheduler
        self.grammars = grammars
        self._limits = limits
        self._counters = counters
        self._open: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, message: Submit) -> TokenEvent | None:
        """Adds a request, replacing its earlier attempt; returns the event that refuses it, None if it was added.

        One whose grammar is to be compiled first is scheduled by `schedule_compiled`.
        """
        earlier = self._open.get(message.request_id)
        if earlier is not None:
            if earlier.attempt >= message.attempt:
                return None  # a repeated or late message
            self._remove(earlier)
        request = message.to_request()
        request.arrived_s = time.monotonic()
        try:
            if self.grammars.prepare(request):
                self._scheduler.add(request)
        except RequestError as error:
            return _refusal(request, error)
        self._open[message.request_id] = request
        return None

    def expect(self, message: Expect) -> None:
        """Takes pages of a prompt that a prefill rank computes, until its request is submitted or aborted."""
        if message.request_id not in self._open:
            prompt = Request(message.request_id, 0, message.prompt_ids, [], SamplingParams(), 0, message.salt)
            self._scheduler.blocks.expect(prompt, message.handover)

    def begin(self, prefills: Sequence[ScheduledChunk]) -> None:
        """Notes the waiting times of requests that now get their first chunk."""
        for chunk in prefills:
            request = chunk.request
            if request.arrived_s:
                request.queued_us = max(1, int(1e6 * (time.monotonic() - request.arrived_s)))
                request.arrived_s = 0.0

    @property
    def awaits_grammar(self) -> bool:
        """Whether the grammar of an open request is being compiled."""
        return self.grammars.has_work

    def schedule_compiled(self) -> list[TokenEvent]:
        """Schedules requests whose grammars have been compiled; returns the events of those that are refused."""
        refused = []
        for request, failure in self.grammars.compiled():
            if self._open.get(request.request_id) is not request:
                continue  # it has left meanwhile
            try:
                if failure is not None:
                    raise failure
                self._scheduler.add(request)
            except RequestError as error:
                del self._open[request.request_id]
                refused.append(_refusal(request, error))
        return refused

    def abort(self, request_id: str) -> None:
        """Drops a request, if it is still open."""
        request = self._open.get(request_id)
        if request is not None:
            self._remove(request)
            self._counters.num_aborted += 1
        else:
            self._scheduler.blocks.end_expected(request_id)

    def flush_cache(self) -> tuple[bool, str]:
        """Empties the prefix cache unless requests are open. Returns whether it did, and the result or the reason."""
        if self._open:
            return False, f"{len(self._open)} requests are open; flush the cache when they have ended"
        return True, f"{self._scheduler.blocks.flush()} blocks"

    def drop_all_of(self, front_end: int | None) -> None:
        """Drops the requests of one of several front ends; None: of all."""
        for request in list(self._open.values()):
            if front_end is None or front_end_of(request.request_id) == front_end:
                self._remove(request)
        for request_id in self._scheduler.blocks.expected:
            if front_end is None or front_end_of(request_id) == front_end:
                self._scheduler.blocks.end_expected(request_id)

    def drop_all(self) -> int:
        """Drops all requests, which other ranks serve from now on. Returns how many they were."""
        num_open = len(self._open)
        self.drop_all_of(None)
        return num_open

    def extended(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: LogprobBlock | None = None,
        prompt_logprobs: LogprobBlock | None = None,
        embedding: bytes | None = None,
    ) -> TokenEvent:
        """Returns the event for a request's newest tokens, and closes the request if the last one ends it."""
        finish, matched_id = self.finish_of(request, token_ids[-1])
        experts = None
        if request.params.return_routed_experts and self._kept is not None:
            experts = self._kept.next_of(request, is_last=finish is not None)
        changed = None if self._changed is None else self._changed.of(request)
        if finish is not None:
            self._scheduler.finish(request.request_id)
            del self._open[request.request_id]
            self._counters.num_finished += 1
        # By position: there is one for each running request in each step, and names take twice the time.
        index, cached = len(request.output_ids) - len(token_ids), request.num_cached_prompt
        queued_us, request.queued_us = request.queued_us, 0
        numbers = logprobs, prompt_logprobs, queued_us, experts, changed, embedding
        return TokenEvent(
            request.request_id, request.attempt, index, token_ids, finish, matched_id, cached, None, None, *numbers
        )

    def scored(self, request: Request, prompt_logprobs: LogprobBlock) -> TokenEvent:
        """Returns the event for log probabilities of a prompt that is not computed to its end yet."""
        cached = request.num_cached_prompt
        return _event(request, num_cached_prompt=cached, prompt_logprobs=prompt_logprobs)

    def fail(self, request: Request, none_left: bool = False) -> TokenEvent:
        """Ends a request for which no token can be chosen, and returns the event that says so. Other requests go on.

        none_left: its own parameters leave no token; otherwise its logits are not finite
        """
        self._scheduler.discard(request.request_id)
        del self._open[request.request_id]
        index = len(request.output_ids)
        if none_left:  # its client's mistake: no line, since a client could send thousands
            message = request.why_none_left or (
                f"the parameters of this request leave no token for output token {index}; allow more tokens"
            )
        else:
            self._counters.num_failed += 1
            log.error("request %s ends: its logits are not finite", request.request_id)
            message = (
                f"the logits of this request are NaN or infinite at output token {index}, so no token can be chosen; "
                "other requests go on. Weights were finite when they were read; where experts are quantised or "
                "bfloat16 overflows, set model.expert_weights: dense or model.dtype: float32"
            )
        return _event(request, finish="error", message=message, field="sampling_params" if none_left else None)

    def _remove(self, request: Request) -> None:
        self._scheduler.abort(request.request_id)
        del self._open[request.request_id]

    def finish_of(self, request: Request, token_id: int) -> tuple[str | None, int | None]:
        """Returns why a request ends with its newest token, this one, and the id that ended it; (None, None) while it
        continues."""
        params, limits = request.params, self._limits
        num_output = len(request.output_ids)
        is_eos = not params.ignore_eos and token_id in limits.eos_token_ids
        is_complete = is_eos and params.constraint is not None
        may_stop = num_output > params.min_new_tokens or is_complete
        if may_stop and (is_eos or token_id in params.stop_token_ids):
            return "stop", token_id
        if num_output >= params.max_new_tokens or len(request.prompt_ids) + num_output >= limits.max_model_len:
            return "length", None
        return None, None


def _refusal(request: Request, error: RequestError) -> TokenEvent:
    return _event(request, finish="error", message=str(error), field=error.field)


def _event(request: Request, **fields: Any) -> TokenEvent:
    """Returns an event without a token. fields: of TokenEvent"""
    return TokenEvent(request.request_id, request.attempt, len(request.output_ids), [], **fields)


@dataclass(frozen=True)
class StepEvents:
    """Completes the chunks of a step.

    project: returns logits of more rows of the last step;  clock: of its parts
    rows:    returns the rows of the last step that are projected to logits, [num_tokens or more, H]
    check:   raises PeerError where the step is void, as AllToAll.check_step
    """

    scheduler: Scheduler
    requests: OpenRequests
    scorer: LogprobScorer
    project: ProjectRows
    rows: Callable[[], Tensor]
    clock: PartClock
    check: Callable[[], None]

    def of(
        self, chunks: Sequence[ScheduledChunk], batch: ForwardBatch, logits: Tensor, sampler: Sampler
    ) -> list[TokenEvent]:
        """Returns the events of a step, whose chunks have run. Raises PeerError where it is void: no request changed.

        logits: [num_chunks + num_drafts, vocab], of the chunks that sample, then of the others, then of drafts
        """
        sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
        others = [index for index, chunk in enumerate(chunks) if not chunk.samples]
        asking = [chunks[index].request for index in sampling]
        self.clock.turn(SAMPLE)
        of_prompts, not_finite = self.scorer.of_prompts(batch, chunks, self.project, logits.shape[1])
        num_rows = logits.shape[0]
        rows = logits[: len(sampling)] if num_rows > len(sampling) else logits
        raw = self.scorer.keep(rows, asking)
        token_ids = sampler(rows, asking)
        self.check()  # on a GPU, whose sampling is queued behind the step: one wait tells tokens and lost peers
        embeddings = self._embeddings(batch, asking)
        of_tokens = self.scorer.of_tokens(raw, asking, token_ids)
        self.clock.turn(OTHER)
        events: list[TokenEvent] = []
        for row, (index, token_id) in enumerate(zip(sampling, token_ids, strict=True)):
            chunk = chunks[index]
            if token_id < 0 or index in not_finite:
                events.append(self.requests.fail(chunk.request, none_left=token_id == NONE_LEFT))
                continue
            self.scheduler.complete(chunk, token_id)
            own = of_tokens.get(row), of_prompts.get(index), embeddings.get(row)
            events.append(self.requests.extended(chunk.request, [token_id], *own))
        if num_rows > len(chunks):
            events += self._verify([chunks[index] for index in sampling], logits[len(chunks) :], events, sampler)
        if others:
            for index, is_finite in zip(others, has_finite_best(logits[len(sampling) : len(chunks)]), strict=True):
                chunk = chunks[index]
                if not is_finite or index in not_finite:
                    events.append(self.requests.fail(chunk.request))
                    continue
                self.scheduler.complete(chunk)
                if index in of_prompts:
                    events.append(self.requests.scored(chunk.request, of_prompts[index]))
        return events

    def _embeddings(self, batch: ForwardBatch, asking: Sequence[Request]) -> dict[int, bytes]:
        """Returns the row behind the first token of each request that asks for it, by its index."""
        wanted = [row for row, request in enumerate(asking) if request.params.return_embedding]
        wanted = [row for row in wanted if not asking[row].output_ids]
        if not wanted:
            return {}
        rows = self.rows()[batch.logit_rows[wanted]].float().numpy().astype("<f4")
        return {row: each.tobytes() for row, each in zip(wanted, rows, strict=True)}

    def _verify(
        self, chunks: Sequence[ScheduledChunk], logits: Tensor, events: list[TokenEvent], sampler: Sampler
    ) -> list[TokenEvent]:
        """Goes on with requests whose drafts are the tokens that were drawn: a row behind such a draft is that of the
        next step, and draws what that step would. Returns the events of failures.

        Where tokens before it change neither logits nor what is told of them, or by a form alone, all rows of a request
        draw at once, those behind a wrong draft for nobody. Of the others each round draws one more token.

        chunks: those that sample;  logits: [num_drafts, vocab];  events: of these chunks; tokens are added to them
        """
        failures: list[TokenEvent] = []
        starts = accumulate([len(chunk.drafts) for chunk in chunks], initial=0)
        going = [(index, chunk, start) for index, (chunk, start) in enumerate(zip(chunks, starts, strict=False))]
        at_once = [each for each in going if draws_alike(each[1].request)]
        depths = [(chunk.request, depth) for _, chunk, _ in at_once for depth in range(len(chunk.drafts))]
        if depths:
            self.clock.turn(SAMPLE)
            rows = logits
            if len(depths) < len(logits):
                numbers = [range(start, start + len(chunk.drafts)) for _, chunk, start in at_once]
                rows = _rows_at(logits, [row for each in numbers for row in each])
            drawn = iter(sampler.again(rows, [request for request, _ in depths], [depth for _, depth in depths]))
            self.clock.turn(OTHER)
            for index, chunk, _ in at_once:
                own = list(islice(drawn, len(chunk.drafts)))
                self._accept(chunk.request, chunk.drafts, own, events, index, failures)
            going = [each for each in going if not draws_alike(each[1].request)]
        going = self._verify_forms(going, logits, events, sampler, failures)
        for depth in range(max((len(chunk.drafts) for _, chunk, _ in going), default=0)):
            going = [each for each in going if self._goes_on(events[each[0]], each[1].drafts, depth)]
            if not going:
                break
            self.clock.turn(SAMPLE)
            rows, asking = _rows_at(logits, [each[2] + depth for each in going]), [each[1].request for each in going]
            raw = self.scorer.keep(rows, asking)
            token_ids = sampler.again(rows, asking, [0] * len(asking))
            of_tokens = self.scorer.of_tokens(raw, asking, token_ids)
            self.clock.turn(OTHER)
            for row, ((index, chunk, _), token_id) in enumerate(zip(going, token_ids, strict=True)):
                drafts = chunk.drafts[depth : depth + 1]
                self._accept(chunk.request, drafts, [token_id], events, index, failures, of_tokens.get(row))
        speculator = self.scheduler.speculator
        assert speculator is not None, "it has made the drafts"
        for chunk, event in zip(chunks, events, strict=True):
            if chunk.drafts:
                speculator.verified(chunk.request, len(chunk.drafts), max(0, len(event.token_ids) - 1))
        return failures

    def _verify_forms(
        self,
        going: list[tuple[int, ScheduledChunk, int]],
        logits: Tensor,
        events: list[TokenEvent],
        sampler: Sampler,
        failures: list[TokenEvent],
    ) -> list[tuple[int, ScheduledChunk, int]]:
        """Draws at once for requests of which only a form depends on the tokens before: what it takes behind each draft
        is known. Returns the other ones. Arguments as in `_verify`."""
        others, asking, changes = [], [], []
        numbers, depths = list[int](), list[int]()  # rows of logits, and behind how many drafts each is
        at_once: list[tuple[int, ScheduledChunk, int]] = []  # and how many rows
        for index, chunk, start in going:
            if not self._goes_on(events[index], chunk.drafts, 0):
                continue
            of_form = sampler.behind(chunk.request, chunk.drafts)
            if not of_form:
                others.append((index, chunk, start))
                continue
            numbers += range(start, start + len(of_form))
            asking += [chunk.request] * len(of_form)
            depths += range(len(of_form))
            changes += of_form
            at_once.append((index, chunk, len(of_form)))
        if not asking:
            return others
        self.clock.turn(SAMPLE)
        rows = logits if len(numbers) == len(logits) else _rows_at(logits, numbers)
        drawn = iter(sampler.again(rows, asking, depths, changes))
        self.clock.turn(OTHER)
        for index, chunk, num_rows in at_once:
            self._accept(chunk.request, chunk.drafts, list(islice(drawn, num_rows)), events, index, failures)
        return others

    def _accept(
        self,
        request: Request,
        drafts: Sequence[int],
        drawn: Sequence[int],
        events: list[TokenEvent],
        index: int,
        failures: list[TokenEvent],
        logprobs: LogprobBlock | None = None,
    ) -> None:
        """Adds the tokens that the rows of right drafts have drawn to their request's event, events[index].

        drafts: the first one follows what is known;  drawn: behind each, as far as rows have drawn
        """
        if events[index].finish is not None:
            return
        taken, newest, failed = list[int](), events[index].token_ids[-1], 0
        for draft, token_id in zip(drafts, drawn, strict=False):
            if draft != newest:
                break
            if token_id < 0:
                failed = token_id
                break
            self.scheduler.accept(request, token_id)
            taken.append(token_id)
            newest = token_id
            if self.requests.finish_of(request, token_id)[0] is not None:
                break
        if taken:
            events[index] = _joined(events[index], self.requests.extended(request, taken, logprobs))
        if failed:
            failures.append(self.requests.fail(request, none_left=failed == NONE_LEFT))

    def _goes_on(self, event: TokenEvent, drafts: tuple[int, ...], depth: int) -> bool:
        """Returns whether a request runs on, and the draft behind its row at this depth is what was drawn there.

        Behind a row that has drawn no token there is none at its depth.
        """
        return event.finish is None and depth < len(drafts) and event.token_ids[depth:][:1] == [drafts[depth]]


def _rows_at(logits: Tensor, rows: list[int]) -> Tensor:
    """Returns some rows of logits."""
    return logits[rows] if logits.is_cuda else torch.from_numpy(logits.numpy()[rows])  # torch takes 0.1 ms


def _joined(event: TokenEvent, more: TokenEvent) -> TokenEvent:
    """Returns two events of one request, of which the second follows the first, as one."""
    blocks = [each.logprobs for each in (event, more) if each.logprobs is not None]
    return msgspec.structs.replace(
        more,
        index=event.index,
        token_ids=event.token_ids + more.token_ids,
        logprobs=joined(blocks) if blocks else None,
        prompt_logprobs=event.prompt_logprobs,
        queued_us=event.queued_us,
        experts=_one_block(event.experts, more.experts),
    )


def _one_block(first: ExpertsBlock | None, more: ExpertsBlock | None) -> ExpertsBlock | None:
    if first is None or more is None:
        return first or more
    return msgspec.structs.replace(first, rows=first.rows + more.rows)
