"""The open requests of a front end: which rank serves each, and how it moves to another one when that rank is lost.

A request is a value, and its output so far is known here. So a lost rank costs its requests only time: they are
submitted to other ranks, with the output so far and the next attempt number. Events of earlier attempts are dropped.
Torch-free.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from moe_serve.attention_dp.request_router import RequestRouter
from moe_serve.config import ServeConfig
from moe_serve.engine.incremental_decoder import Decoder
from moe_serve.engine.messages import Abort, Message, Status, Tokens
from moe_serve.server.open_request import Changes, OpenRequest, RequestSpec, UnavailableError
from moe_serve.server.workers import Regrouped

MAX_LOSSES = 3  # ranks that may end while they serve one request, without a token in between


class RequestBook:
    """All open requests, the router that chooses their ranks, and counters.

    send: sends a message to a rank, without waiting
    """

    def __init__(self, config: ServeConfig, tokenizer: Decoder | None, send: Callable[[int, Message], None]):
        self.counters = {
            "num_requests": 0, "num_finished": 0, "num_aborted": 0, "num_failed": 0, "num_refused": 0, "num_moved": 0,
        }  # fmt: skip
        self.num_events: Counter[int] = Counter()  # by rank
        self._config = config
        self._tokenizer = tokenizer
        self._send = send
        self._open: dict[str, OpenRequest] = {}
        self._numbers = itertools.count()
        self._router = self._new_router(config.cache.block_size)

    def __len__(self) -> int:
        return len(self._open)

    def begin_epoch(self, block_size: int) -> None:
        """Starts with an empty router: all ranks are new. block_size: of their caches, in tokens"""
        self._router = self._new_router(block_size)

    def open(self, prefix: str, spec: RequestSpec, eos_token_ids: Sequence[int], changes: Changes) -> OpenRequest:
        """Sends a new request to a rank. prefix: makes its id unique among front ends"""
        request_id = f"{prefix}-{next(self._numbers)}"
        rank = spec.rank  # the load of a rank that the caller chose shows in that rank's own reports
        if rank is None:
            rank = self._router.route(
                spec.prompt_ids,
                spec.session_id,
                spec.salt,
                request_id=request_id,
                max_new_tokens=spec.params.max_new_tokens,
            )
        request = OpenRequest(request_id, spec, rank, self._tokenizer, eos_token_ids, changes)
        self._open[request_id] = request
        self.counters["num_requests"] += 1
        self._send(rank, request.submit_message())
        return request

    def abort(self, request: OpenRequest) -> None:
        """Ends a request that nobody waits for any more."""
        if request.request_id in self._open:
            self.counters["num_aborted"] += 1
            self._send(request.rank, Abort(request.request_id))
            self._forget(request)

    def take(self, message: Tokens) -> None:
        """Hands tokens to their requests; drops those of requests that the rank no longer serves."""
        self.num_events[message.rank] += len(message.events)
        for event in message.events:
            request = self._open.get(event.request_id)
            if request is None or request.rank != message.rank or event.attempt != request.attempt:
                continue
            if not request.has_started:
                request.has_started = True
                self._router.started(event.request_id)
            request.apply(event)
            if request.is_done:
                self.counters["num_failed" if request.failure else "num_finished"] += 1
                if event.finish is None:  # a stop string, which ranks do not know
                    self._send(request.rank, Abort(request.request_id))
                self._forget(request)

    def take_status(self, status: Status) -> None:
        self._router.update(status.rank, status.pending_tokens)

    def fail_all(self, reason: str) -> None:
        """Ends all requests with an error."""
        for request in list(self._open.values()):
            self._fail(request, reason)

    def suspect(self, rank: int) -> None:
        """Sends nothing new to a rank; its requests stay until it is known to be masked."""
        self._router.mark_lost(rank)

    def regroup(self, change: Regrouped) -> int:
        """Moves the requests of masked ranks to others; returns how many moved.

        A request fails when MAX_LOSSES ranks have ended with it and the next one ends, too: then it may be the reason.
        A late rank is not counted, and a new token shows that the request was not the reason.
        """
        for rank in change.masked:
            self._router.mark_lost(rank)
        for rank in change.rejoined:
            self._router.mark_back(rank)
        requests = [request for request in self._open.values() if request.rank in change.masked]
        num_moved = 0
        for request in requests:
            self._send(request.rank, Abort(request.request_id))  # a late rank still holds it
            num_losses = request.count_loss() if request.rank in change.ended else 0
            if num_losses > MAX_LOSSES:
                self._fail(
                    request,
                    f"{num_losses} ranks were lost while they served this request, the last one was rank "
                    f"{request.rank}; it is not tried again",
                )
            else:
                self._move(request)
                num_moved += 1
        self.counters["num_moved"] += num_moved
        return num_moved

    def _move(self, request: OpenRequest) -> None:
        spec, output = request.spec, request.matcher.output_ids
        rank = self._router.route(
            [*spec.prompt_ids, *output],
            spec.session_id,
            spec.salt,
            request_id=request.request_id,
            max_new_tokens=spec.params.max_new_tokens - len(output),
        )
        request.move_to(rank)
        self._send(rank, request.submit_message())

    def _fail(self, request: OpenRequest, reason: str) -> None:
        request.fail(UnavailableError(reason))
        self.counters["num_failed"] += 1
        self._forget(request)

    def _forget(self, request: OpenRequest) -> None:
        del self._open[request.request_id]
        self._router.finished(request.request_id)

    def _new_router(self, block_size: int) -> RequestRouter:
        return RequestRouter(
            self._config.parallel.num_ranks, load_gap=self._config.server.routing_load_gap, block_size=block_size
        )
