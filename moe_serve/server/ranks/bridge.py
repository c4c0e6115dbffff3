"""The serving system as the HTTP server and `LLM` see it: is it ready, submit, abort, end.

Every accepted request ends, with tokens or with an error. How ranks attach, report and get lost: `rank_link.py`.
Torch-free.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from moe_serve.config import ServeConfig, model_dir
from moe_serve.engine.output.incremental_decoder import Decoder
from moe_serve.engine.protocol.messages import Answer, FlushCache, ModelLimits, Profile
from moe_serve.errors import QueueFullError, RequestError
from moe_serve.links.link import Link
from moe_serve.server.ranks.commands import Command
from moe_serve.server.ranks.rank_link import RankLink
from moe_serve.server.ranks.request_book import RequestBook
from moe_serve.server.ranks.siblings import What
from moe_serve.server.ranks.supervisors import SUPERVISOR, Observer
from moe_serve.server.requests.admission import Admission, Load, Queue
from moe_serve.server.requests.open_request import Changes, Courier, OpenRequest, RequestSpec, UnavailableError
from moe_serve.server.workers.grammar_check import GrammarCheck

_DEADLINE_LOOK_S = 0.05  # between two looks for requests that have taken too long
_LOOK_S = 0.02  # between two looks whether the last request has ended
_WRITE_S = 60.0  # for what a rank does to carry out a command, such as writing a dump


class Bridge:
    """The ranks, seen from the front end.

    tokenizer: None = ids in, ids out
    observer:  called with what the ranks report while they start and end (Hello, Progress, Ready, Fatal, Goodbye)
    link:      how ranks attach; None: as the environment and the configuration say
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Decoder | None,
        observer: Observer | None = None,
        link: Link | None = None,
    ):
        self.config = config
        self.courier = Courier()
        self.capacity = (
            config.engine.max_running_requests * config.parallel.num_ranks + config.engine.max_queued_requests
        )
        # A rank carries a command out between two steps, and writes a file at most.
        self._command_deadline_s = config.engine.step_deadline_s + _WRITE_S
        self._link = RankLink(config, tokenizer, observer, link)
        self.workers = self._link.workers
        self.balance = self._link.balance
        self._book = self._link.book
        server = config.server
        self._admission = Admission(self.capacity, server.max_waiting_tokens, server.queue_deadline_s)
        self.grammars = GrammarCheck(None if tokenizer is None else str(model_dir(config.model)))
        self._is_finishing = False
        self._deadlines: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Binds the address that ranks attach to. Raises LaunchError when it is taken."""
        self._link.open()
        self._deadlines = asyncio.create_task(self._keep_deadlines())

    @property
    def link(self) -> Link:
        """How ranks attach; over TCP with the real port, also where the configuration says 0."""
        return self._link.link

    async def _keep_deadlines(self) -> None:
        while True:
            await asyncio.sleep(_DEADLINE_LOOK_S)
            self._book.end_overdue(time.monotonic())

    async def finish(self, deadline_s: float) -> int:
        """Takes no more requests, and returns when the open ones have ended, or how many have not by the deadline.

        Ends a pause, since those that it holds would never end.
        """
        self._is_finishing = True
        self._book.go_on()
        end_s = time.monotonic() + deadline_s
        while self.num_open and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_S)
        return self.num_open

    def drain(self, reason: str = "the server is ending") -> None:
        """Takes no more requests, and ends the open ones with an error."""
        self._link.drain(reason)

    async def close(self) -> None:
        """Ends the ranks and closes the socket; returns within a few seconds whatever the ranks do."""
        self.drain()
        if self._deadlines is not None:
            self._deadlines.cancel()
        await self.grammars.close()
        await self._link.close()

    async def wait_until_ready(self) -> ModelLimits:
        """Returns what requests must respect, once all ranks take them.

        Raises UnavailableError when a rank is lost first, or the ranks do not come within server.attach_deadline_s.
        """
        while (problem := self.problem()) is not None:
            if self.workers.loss is not None or self._link.is_draining:
                raise UnavailableError(self.workers.loss or problem)
            await self._link.news.wait(1.0)
        return self.limits

    @property
    def limits(self) -> ModelLimits:
        """What a request must respect. Raises UnavailableError while that is not known."""
        limits = self.workers.limits
        if limits is None:
            raise UnavailableError(self.problem() or "the ranks are starting")
        return limits

    def problem(self) -> str | None:
        """Returns why no request can be served now, naming the rank where one is to blame; None if all is well."""
        if self._link.is_draining or self._is_finishing:
            return "the server is ending"
        if self._link.is_restarting:
            return f"the ranks are being started again: {self.workers.loss}"
        if self.workers.loss is not None:
            return self.workers.loss
        if self._link.rank_drain.reason is not None:
            return self._link.rank_drain.reason
        if not self.workers.is_ready:
            return f"starting: {self.workers.missing()}"
        return None

    @property
    def is_restarting(self) -> bool:
        """Whether the ranks were lost and are started again, or start for the first time."""
        starts = self.workers.loss is None and not self.workers.is_ready and not self._link.is_draining
        return starts or self._link.is_restarting

    async def wait_for_restart(self) -> None:
        """Waits while the ranks are started again, for a caller who prefers that to an UnavailableError."""
        while self.is_restarting:
            await self._link.news.wait(0.2)

    def give_up(self, reason: str) -> None:
        """Ends the open requests with an error: the caller does not start lost ranks again."""
        self._link.restart.give_up()
        self._book.fail_all(reason)

    def report_loss(self, reason: str, rank: int = SUPERVISOR) -> None:
        """Reports the end of a rank's process, for a caller who watches the processes; SUPERVISOR: that of all."""
        self._link.report_loss(reason, rank)

    @property
    def front_end(self) -> int | None:
        """The number of this front end; None where it is the only one."""
        siblings = self._link.siblings
        return siblings.number if siblings.num > 1 else None

    @property
    def num_open(self) -> int:
        return len(self._book)

    @property
    def book(self) -> RequestBook:
        """The open requests, and what has become of the others; for readers."""
        return self._book

    @property
    def counters(self) -> dict[str, int]:
        """What has become of the requests since the start."""
        return self._book.counters

    async def command(self, command: Command) -> Answer:
        """Sends a command to all ranks that take part, and returns the leader's answer. Fills in its call_id.

        Raises UnavailableError when the ranks cannot take it or do not answer, QueueFullError when too many are open.
        """
        return await self._link.commands.call(command, self._serving(), self._command_deadline_s)

    async def flush_cache(self) -> list[Answer]:
        """Empties the prefix caches of the ranks that take part, and returns what each of them has done.

        Raises RequestError while requests are open, and UnavailableError and QueueFullError as `command` does.
        """
        if self.num_open:
            raise RequestError(f"{self.num_open} requests are open; flush the cache when they have ended")
        answers = await self._link.commands.call_each(FlushCache(0), self._serving(), self._command_deadline_s)
        self._book.forget_prompts()
        return answers

    async def profile(self, command: Profile) -> list[Answer]:
        """Tells the ranks that take part to start or to end a profile, and returns what each of them answers.

        Raises as `command` does.
        """
        return await self._link.commands.call_each(command, self._serving(), self._command_deadline_s)

    def _serving(self) -> list[int]:
        """Returns the ranks that take part. Raises UnavailableError when none can serve now."""
        problem = self.problem()
        if problem is not None:
            raise UnavailableError(problem)
        return [view.rank for view in self.workers if view.serves]

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, specs: Sequence[RequestSpec], changes: Changes) -> list[OpenRequest]:
        """Sends requests to their ranks, all or none.

        Raises UnavailableError when no request can be served now, QueueFullError when not all of them fit,
        and RequestError when there never can be.
        """
        problem = self.problem()
        if problem is not None:
            raise UnavailableError(problem)
        if len(specs) > self.capacity:
            raise RequestError(
                f"the call asks for {len(specs)} outputs but at most {self.capacity} requests are held at a time "
                "(engine.max_running_requests x ranks + engine.max_queued_requests); send fewer at once",
                field="sampling_params.n",
            )
        refusal = self.refusal(len(specs), sum(spec.num_tokens for spec in specs))
        if refusal is not None:
            self.count_refused(len(specs))
            raise refusal
        num_ranks = self.workers.num_ranks
        rids = [spec.rid for spec in specs if spec.rid is not None]
        counts = Counter(rids)
        twice = next((rid for rid in rids if self._book.has_rid(rid) or counts[rid] > 1), None)
        if twice is not None:
            raise RequestError(f"rid is {twice!r:.80}, which an open request has; choose another", field="rid")
        for spec in specs:
            if spec.rank is not None and not 0 <= spec.rank < num_ranks:
                raise RequestError(
                    f"routed_dp_rank is {spec.rank}, expected 0 to {num_ranks - 1}", field="routed_dp_rank"
                )
            if spec.rank in self.workers.masked:
                raise UnavailableError(
                    f"routed_dp_rank is {spec.rank}, which is masked now ({self.workers.masked[spec.rank]}); leave "
                    "routed_dp_rank out, or try again later"
                )
        return [self._open(spec, changes) for spec in specs]

    def ask_rank(self, spec: RequestSpec, changes: Changes) -> OpenRequest:
        """Sends a request of the server's own to the rank that the spec names, however many are open."""
        return self._open(spec, changes, at_once=True)

    @property
    def num_events(self) -> Mapping[int, int]:
        """How many events of requests, mostly tokens, each rank has sent so far."""
        return self._book.num_events

    def _open(self, spec: RequestSpec, changes: Changes, at_once: bool = False) -> OpenRequest:
        link = self._link
        prefix = f"{link.siblings.number}:{link.started_s:.6f}"
        return self._book.open(prefix, spec, self.limits.eos_token_ids, changes, at_once)

    def refusal(self, num_requests: int = 1, num_tokens: int = 1) -> QueueFullError | None:
        """Returns why no call may wait now; None where one of this size may."""
        book = self._book
        load = Load(len(book), book.waiting_tokens)
        return self._admission.refusal(load, book.drain_rate.per_s(time.monotonic()), num_requests, num_tokens)

    def count_refused(self, num_requests: int) -> None:
        """Counts requests that were told so."""
        self.counters["num_refused"] += num_requests

    @property
    def queue(self) -> Queue:
        """What waits for a rank. Its share is that of requests or of tokens, whichever is more."""
        book, most_tokens = self._book, self.config.server.max_waiting_tokens
        share = max(book.num_waiting / self.config.engine.max_queued_requests, book.waiting_tokens / most_tokens)
        return Queue(share, book.waiting_tokens, book.drain_rate.per_s(time.monotonic()))

    async def pause(self, abort: bool) -> None:
        """Takes all requests from the ranks, and sends none until `resume`. abort: open ones end with what they have

        This and the next two hold for all front ends. Raises UnavailableError where one of them does not confirm it.
        """
        await self._do_everywhere("abort_and_pause" if abort else "pause", None)

    async def resume(self) -> None:
        """Sends requests to the ranks again."""
        await self._do_everywhere("resume", None)

    async def cut_short(self, rid: str | None) -> None:
        """Ends the open requests that a client knows by this id, with what they have. rid: None = all"""
        await self._do_everywhere("abort", rid)

    async def _do_everywhere(self, what: What, rid: str | None) -> None:
        await self._link.siblings.do_everywhere(what, rid, lambda: [each.rank for each in self.workers if each.serves])

    def abort(self, request: OpenRequest) -> None:
        """Ends a request that nobody waits for any more."""
        self._book.abort(request)

    def describe(self) -> dict[str, Any]:
        """Returns the state of the ranks and of the queue, for /server_info."""
        return {
            "state": self.problem() or "ready",
            "front_end": {"number": self._link.siblings.number, "of": self._link.siblings.num},
            "launch_id": f"{self.workers.launch_id:x}",
            "requests": {
                "open": self.num_open,
                "waiting": self._book.num_waiting,
                "waiting_tokens": self._book.waiting_tokens,
                "capacity": self.capacity,
                **self.counters,
            },
            "ranks_out": {str(rank): reason for rank, reason in self.workers.masked.items()},
            "ranks": self.workers.describe(time.monotonic()),
        }
