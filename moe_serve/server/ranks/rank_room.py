"""Which rank takes a request of a front end next, and whether any has room for one more. Torch-free."""

from collections import Counter
from collections.abc import Collection, Mapping

from moe_serve.attention_dp.request_router import RequestRouter
from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import Status
from moe_serve.server.requests.open_request import OpenRequest

_AHEAD = 2  # requests beyond those that a rank runs, at least; they start without a round trip


def ranks_to_choose_from(num_requests: Mapping[int, int], slots: int, most: int) -> list[int]:
    """Returns the ranks that a request may go to: those with a free slot; where none has one, those with room.

    So no prefix or session draws a request to a rank where it would wait while another rank would run it at once.

    num_requests: by rank, that it has now;  slots: requests that a rank runs;  most: requests that it may have
    """
    with_slot = [rank for rank, number in num_requests.items() if number < slots]
    return with_slot or [rank for rank, number in num_requests.items() if number < most]


class RankRoom:
    """How many requests each rank has, and the router that chooses among those with room.

    A rank gets as many requests as it can run and a few more, so that it never idles between two of them. Front ends
    do not know of each other's requests, so each of several takes its share of a rank's slots for those that are free.
    """

    def __init__(self, config: ServeConfig):
        self._config = config
        self._num_sent: Counter[int] = Counter()  # requests that a rank has now
        running = config.engine.max_running_requests
        self._most_sent = running + max(_AHEAD, running // 8)
        self._slots = -(-running // config.server.api_workers)
        self._router = self._new_router(config.cache.block_size)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that requests are sent to."""
        return self._router.ranks

    def begin_launch(self, block_size: int, masked: Collection[int]) -> None:
        """All ranks are new and have no requests. block_size: of their caches, in tokens;  masked: are lost already"""
        self._router = self._new_router(block_size)
        self._num_sent.clear()
        self.lose(masked)

    def lose(self, ranks: Collection[int]) -> None:
        """Sends nothing more to these ranks."""
        for rank in ranks:
            self._router.mark_lost(rank)

    def regain(self, ranks: Collection[int]) -> None:
        """Sends to these ranks again."""
        for rank in ranks:
            self._router.mark_back(rank)

    def has_room(self, rank: int | None) -> bool:
        """Returns whether a request may be sent to this rank. rank: None, or one that is lost: to any"""
        asked = (rank,) if rank in self._router.ranks else self._router.ranks
        return any(self._num_sent[each] < self._most_sent for each in asked)

    def send(self, request: OpenRequest, may_choose: bool) -> int:
        """Returns the rank that a request goes to, and counts it there. may_choose: that of its caller, if it serves"""
        spec, output = request.spec, request.matcher.output_ids
        # The load of a rank that the caller chose shows in that rank's own reports.
        if may_choose and spec.rank is not None and spec.rank in self._router.ranks:
            rank = spec.rank
        else:
            rank = self._router.route(
                [*spec.prompt_ids, *output],
                spec.session_id,
                spec.salt,
                request_id=request.request_id,
                max_new_tokens=spec.params.max_new_tokens - len(output),
                among=ranks_to_choose_from(
                    {each: self._num_sent[each] for each in self._router.ranks}, self._slots, self._most_sent
                ),
                group=spec.group,
            )
        self._num_sent[rank] += 1
        return rank

    def free(self, rank: int, request_id: str) -> None:
        """A request has left its rank."""
        self._num_sent[rank] -= 1
        self._router.finished(request_id)

    def started(self, request_id: str) -> None:
        """The first token of a request has come."""
        self._router.started(request_id)

    def update(self, status: Status) -> None:
        """Takes a rank's report of its load."""
        self._router.update(status.rank, status.pending_tokens)

    def forget_prompts(self) -> None:
        """Forgets which prompts each rank may have in its cache."""
        self._router.forget_prompts()

    def _new_router(self, block_size: int) -> RequestRouter:
        return RequestRouter(
            self._config.parallel.num_ranks, load_gap=self._config.server.routing_load_gap, block_size=block_size
        )
