"""The ranks as the front end sees them: the state of each and of their launch, and which of them live.

Pure state: no socket, and time is an argument. `Bridge` feeds it messages and acts on its answers.

A *launch* is all ranks that started together. It is over when a rank is lost that the others cannot spare; the first
rank that attaches with another launch id then begins the next one. Ranks of another launch that come while this one
lives wait: they repeat their hello until this one is lost, or are refused. Within a launch ranks may be masked and
rejoin: they agree on that among themselves and report it (`Members`). Until then a launcher's report of a dead rank, or
a rank's report of its own failure, is a suspicion. A table may begin in the middle of a launch: ranks that have not
attached to it yet may serve all the same.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from moe_serve.attention_dp.request_router import PageSharing
from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import (
    ALIVE_PERIOD_S,
    Apart,
    Exited,
    Hello,
    Members,
    ModelLimits,
    Progress,
    Pulse,
    Ready,
    Status,
)
from moe_serve.log import RareWarnings, get_logger

log = get_logger(__name__)


@dataclass
class RankView:
    """What one rank has reported. identity: its socket's name at our ROUTER

    mask_reason:  why it is masked; None while it takes part
    suspicion:    (since when, why) it is presumed lost; its peers will report whether they go on
    times_masked: how often it was masked
    masked_before: how often it had been when a new process in its place first said hello; None: none has
    computes:     as in `Ready`
    pulse_s:      when its process last showed that it lives; None: not yet
    last_phase:   what it was doing then
    """

    rank: int
    identity: bytes
    pid: int
    host: str
    heard_s: float
    phase: str = "attached"
    fraction: float = 0.0
    limits: ModelLimits | None = None  # known once it is ready
    info: dict[str, Any] = field(default_factory=dict)
    computes: list[tuple[str, str, str]] = field(default_factory=list)
    status: Status | None = None
    ended: bool = False
    mask_reason: str | None = None
    suspicion: tuple[float, str] | None = None
    times_masked: int = 0
    masked_before: int | None = None
    pulse_s: float | None = None
    last_phase: str = "its phase is not known"
    num_reconnects: int = 0
    num_before: int = 0
    restarts_left: int = 0

    @property
    def is_ready(self) -> bool:
        return self.limits is not None and not self.ended

    @property
    def serves(self) -> bool:
        """Whether it takes requests, as far as this front end knows."""
        return self.limits is not None and self.may_serve

    @property
    def may_serve(self) -> bool:
        """Whether nothing known keeps it from serving, even if it has not said here that it serves."""
        return not self.ended and self.mask_reason is None and self.suspicion is None

    @property
    def can_be_spared(self) -> bool:
        """Whether this rank and its peers are set up to go on without each other."""
        return self.info.get("on_lost_rank") == "mask"

    def replaced_by(self, identity: bytes, hello: Hello, now_s: float) -> Self:
        """Returns the replacement of this rank, masked until the others say that it takes part."""
        view = type(self)(hello.rank, identity, hello.pid, hello.host, now_s, limits=self.limits, info=self.info)
        view.computes = self.computes
        view.num_reconnects, view.num_before = hello.num_reconnects, hello.num_before
        view.restarts_left, view.mask_reason = hello.restarts_left, self.mask_reason
        return view


GONE_S = 5.0  # a launch that was silent for so long is gone when another one says hello


@dataclass(frozen=True)
class Regrouped:
    """The changes of a new group. A rank that rejoined before we heard that it was masked is in both lists.

    masked: their requests must move;  ended: masked ranks whose process has ended; the others are late
    """

    masked: list[int]
    rejoined: list[int]
    ended: list[int]


@dataclass(frozen=True)
class Arrival:
    """The outcome of a `Hello`.

    refusal:      why the rank is not taken; None: it is, or it waits
    waits:        it may say hello again later
    was_cut:      its connection was cut, and it has dropped its requests
    """

    refusal: str | None = None
    waits: bool = False
    was_cut: bool = False


class RankTable:
    """All ranks of the current launch.

    launch_id: -1 before any rank has attached
    began_s:   when its first rank attached; before that, when the front end began to wait for one
    loss:      why the launch is over, naming the rank; None while it lives
    lost_rank: the rank that is held responsible; None where that is unknown
    apart:     why ranks that are heard here may not serve: they do not reach the others; None: they may
    """

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.launch_id = -1
        self.began_s = 0.0
        self.loss: str | None = None
        self.lost_rank: int | None = None
        self.group_epoch = 0  # counts the groups of ranks within a launch
        self.apart: str | None = None
        self._ranks: dict[int, RankView] = {}
        self._next_is_here = False  # ranks of another launch have shown that this one is gone
        self._over: deque[int] = deque(maxlen=64)  # ids of launches that were lost

    def __iter__(self) -> Iterator[RankView]:
        """Yields the attached ranks in rank order."""
        return iter([self._ranks[rank] for rank in sorted(self._ranks)])

    def by_identity(self, identity: bytes) -> RankView | None:
        """Returns the rank with this socket; None for unauthenticated peers and ranks of launches that are over."""
        return next((view for view in self._ranks.values() if view.identity == identity), None)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served: all ranks are attached, and all that are not masked take requests."""
        has_all = self.loss is None and len(self._ranks) == self.num_ranks
        has_all = has_all and any(view.limits is not None for view in self)
        return has_all and all(view.serves or view.mask_reason or view.suspicion for view in self)

    @property
    def limits(self) -> ModelLimits | None:
        """What a request must respect on every rank; None until all are ready, or masked."""
        known = [view.limits for view in self if view.limits is not None]
        if not known or len(self._ranks) < self.num_ranks or any(not (v.limits or v.mask_reason) for v in self):
            return None
        return min(known, key=lambda limits: (limits.max_prompt_len, limits.max_model_len))

    @property
    def sharing(self) -> PageSharing:
        """Which ranks take pages of each other's prompts."""
        infos = [view.info for view in self]
        if not any(info.get("pages") for info in infos):
            return PageSharing()
        names = [f"{view.host} {each}" if (each := view.info.get("pages")) else str(view.rank) for view in self]
        between_hosts = all(info.get("asks_other_hosts") and info.get("pages") for info in infos if info)
        return PageSharing(names, between_hosts)

    @property
    def info(self) -> dict[str, Any]:
        """Facts about the model, which are the same on every rank; {} until one is ready."""
        return next((view.info for view in self if view.is_ready), {})

    @property
    def computes(self) -> list[tuple[str, str]]:
        """What decides about values, by name, which is the same on every rank; [] until one is ready."""
        found = next((view.computes for view in self if view.is_ready), [])
        return [(name, value) for name, value, _ in found]

    def attach(self, identity: bytes, hello: Hello, now_s: float) -> Arrival:
        """Adds a rank, unless it is here already. If this launch is over, a rank of another one begins that one."""
        if hello.num_ranks != self.num_ranks:
            return Arrival(
                f"rank {hello.rank} belongs to {hello.num_ranks} ranks but this front end serves {self.num_ranks}; "
                "give both the same configuration"
            )
        if not 0 <= hello.rank < self.num_ranks:
            return Arrival(f"rank {hello.rank} is not one of 0 to {self.num_ranks - 1}")
        if hello.launch_id in self._over or (hello.launch_id == self.launch_id and self.loss is not None):
            return Arrival(f"rank {hello.rank} belongs to a launch that is over ({self.loss or 'another one serves'})")
        if hello.launch_id != self.launch_id and self._ranks and self.loss is None:
            return self._wait_or_refuse(hello)
        known = self._ranks.get(hello.rank) if hello.launch_id == self.launch_id else None
        if known is not None and known.pid and hello.num_before > known.num_before:
            if known.masked_before is None:
                known.masked_before = known.times_masked
            if known.mask_reason is None and known.times_masked == known.masked_before:
                return Arrival(waits=True)  # the others are about to say that the process before it is lost
            self._ranks[hello.rank] = known.replaced_by(identity, hello, now_s)
            return Arrival()
        if known is not None and known.pid and (known.identity != identity or known.pid != hello.pid):
            return Arrival(_taken(hello, known))
        if known is not None and known.pid:
            was_cut = hello.num_reconnects != known.num_reconnects
            known.num_reconnects, known.heard_s = hello.num_reconnects, now_s
            return Arrival(was_cut=was_cut)
        if hello.launch_id != self.launch_id:
            self._begin(hello.launch_id, now_s)
        view = RankView(hello.rank, identity, hello.pid, hello.host, now_s)
        view.num_reconnects, view.restarts_left = hello.num_reconnects, hello.restarts_left
        view.num_before = hello.num_before
        view.mask_reason = None if known is None else known.mask_reason
        if hello.num_before and not self.group_epoch:
            view.mask_reason = "it was started again, and the others have not said here that it takes part"
        self._ranks[hello.rank] = view
        return Arrival()

    def never_begin(self, launch_id: int) -> None:
        """Refuses the ranks of a launch that is over before any of them has attached."""
        self._over.append(launch_id)

    def _begin(self, launch_id: int, now_s: float) -> None:
        if self._ranks:
            self._over.append(self.launch_id)
        self.launch_id, self.began_s = launch_id, now_s
        self.loss, self.lost_rank = None, None
        self._next_is_here = False
        self.group_epoch, self.apart = 0, None
        self._ranks.clear()

    def _wait_or_refuse(self, hello: Hello) -> Arrival:
        """Lets a rank of another launch wait; refuses it once both it and this launch are ready."""
        known = self._ranks.get(hello.rank)
        if hello.is_ready and self.is_ready and known is not None:
            return Arrival(_taken(hello, known))
        return Arrival(waits=True)

    def find_replaced_by(self, hello: Hello, now_s: float) -> bool:
        """Returns whether a rank of another launch shows that this one is gone, since all of its ranks are silent.

        Starting ranks may be silent for long, so until this launch is ready only a rank that is ready shows it.
        """
        if self.loss is not None or not self._ranks or hello.launch_id in (self.launch_id, *self._over):
            return False
        silent_s = now_s - max(max(view.heard_s, view.pulse_s or 0.0) for view in self)
        self._next_is_here = silent_s > GONE_S and (self.is_ready or hello.is_ready)
        return self._next_is_here

    def pulse(self, message: Pulse, now_s: float) -> None:
        """Notes that the process of a rank lives, and its phase."""
        view = self._ranks.get(message.rank)
        if view is not None and message.launch_id == self.launch_id:
            view.pulse_s = now_s
            if message.phase:
                view.last_phase = f"last seen in {message.phase} of step {message.step}"

    def excuse(self, late_s: float, now_s: float) -> None:
        """Does not hold against the ranks the time in which this process itself did not run just now."""
        self.began_s = min(now_s, self.began_s + late_s)
        for view in self:
            view.heard_s = min(now_s, view.heard_s + late_s)
            if view.pulse_s is not None:
                view.pulse_s = min(now_s, view.pulse_s + late_s)
            if view.suspicion is not None:
                view.suspicion = min(now_s, view.suspicion[0] + late_s), view.suspicion[1]

    def progress(self, view: RankView, message: Progress) -> None:
        view.phase, view.fraction = message.phase, message.fraction

    def ready(self, view: RankView, message: Ready) -> None:
        view.phase, view.fraction = "ready", 1.0
        view.limits, view.info, view.computes = message.limits, message.info, message.computes

    def story(self, view: RankView) -> list[Progress | Ready]:
        """Returns the reports of a rank so far, for a listener that attaches later."""
        reported: list[Progress | Ready] = [Progress(view.rank, self.launch_id, view.phase, view.fraction)]
        if view.limits is not None:
            reported.append(Ready(view.rank, self.launch_id, view.limits, view.info, view.computes))
        return reported

    def has_process(self, exited: Exited) -> bool:
        """Returns whether an ended process is the attached one of its rank. The ranks report about all others."""
        view = self._ranks.get(exited.rank) if exited.launch_id == self.launch_id else None
        return view is not None and view.pid > 0 and view.num_before == exited.num_before

    @property
    def goes_on(self) -> bool:
        """Whether the ranks are set up to go on without a lost one, as they have said when they were ready.

        One rank's word holds for all: none is ready before all are.
        """
        known = [view for view in self if view.limits is not None]
        return self.loss is None and bool(known) and all(view.can_be_spared for view in known)

    def can_spare(self, rank: int) -> bool:
        """Returns whether the peers of a rank may go on without it. They report themselves whether they do."""
        peers = [self._ranks.get(peer) for peer in range(self.num_ranks) if peer != rank]
        return self.goes_on and any(peer is None or peer.may_serve for peer in peers)

    def suspect(self, rank: int, reason: str, now_s: float) -> None:
        """Notes that a rank is presumed lost."""
        view = self._ranks[rank]
        if view.mask_reason is not None:
            view.mask_reason = reason  # how its process ended is the better reason
        elif view.suspicion is None:
            view.suspicion = (now_s, reason)

    def set_apart(self, message: Apart) -> bool:
        """Takes a rank's word that it reaches too few others; returns whether that is news: no group has gone on."""
        is_news = self.apart is None and message.group_epoch >= self.group_epoch
        if is_news:
            self.group_epoch, self.apart = message.group_epoch, message.reason
        return is_news

    def regroup(self, message: Members) -> Regrouped:
        """Takes a rank's report of its group and returns what is new in it."""
        ended = [view.rank for view in self if view.suspicion is not None or view.rank in message.ended]
        self._add_unattached(message)
        gone: list[RankView] = []
        back: list[RankView] = []
        reporter = self._ranks[message.rank]
        if reporter.times_masked < message.times_masked:
            gone.append(reporter)
            back.append(reporter)
        if message.group_epoch > self.group_epoch:
            self.group_epoch, self.apart = message.group_epoch, None
            for view in self:
                if view.mask_reason is None and view.rank not in message.members:
                    view.mask_reason, view.suspicion = view.suspicion[1] if view.suspicion else message.reason, None
                    gone.append(view)
                elif view.mask_reason is not None and view.rank in message.members:
                    view.mask_reason = None
                    back.append(view)
        for view in gone:
            view.times_masked += 1
        masked = [view.rank for view in gone]
        return Regrouped(masked, [view.rank for view in back], [rank for rank in masked if rank in ended])

    def _add_unattached(self, message: Members) -> None:
        """Adds the ranks that the others masked before they could attach to this front end."""
        for rank in range(self.num_ranks):
            if rank not in self._ranks and rank not in message.members:
                self._ranks[rank] = RankView(rank, b"", 0, "unknown host", 0.0)

    @property
    def masked(self) -> dict[int, str]:
        """The masked ranks, and why."""
        return {view.rank: view.mask_reason for view in self if view.mask_reason is not None}

    def host_of(self, rank: int) -> str:
        """Returns the host of a rank, as it has said itself."""
        view = self._ranks.get(rank)
        return "an unknown host" if view is None else view.host

    def long_suspected(self, now_s: float, patience_s: float) -> RankView | None:
        """Returns a rank that has been suspected for longer than patience_s, without a report from its peers."""
        return next((view for view in self if view.suspicion and now_s - view.suspicion[0] > patience_s), None)

    def end_launch(self, reason: str, lost_rank: int | None) -> bool:
        """Notes that the launch is over; returns whether that was not known.

        A report that names the rank replaces an earlier one that does not.
        """
        is_news = self.loss is None or (self.lost_rank is None and lost_rank is not None)
        if is_news:
            self.loss, self.lost_rank = reason, lost_rank
        return is_news

    @property
    def is_restarted(self) -> bool:
        """Whether the launcher starts all ranks again when this launch is lost, as far as it has said."""
        return self._next_is_here or any(view.restarts_left > 0 for view in self)

    def missing(self) -> str:
        """Returns the ranks that the start waits for, as text."""
        absent = [str(rank) for rank in range(self.num_ranks) if rank not in self._ranks]
        parts = [f"rank {view.rank}: {view.phase}" for view in self if not view.is_ready]
        if absent:
            parts.append(f"rank {', '.join(absent)}: not attached")
        return "; ".join(parts)

    def describe(self, now_s: float) -> list[dict[str, Any]]:
        """Returns one JSON object for each attached rank, for /server_info."""
        return [
            {
                "rank": view.rank,
                "host": view.host,
                "pid": view.pid,
                "phase": "ended" if view.ended else "out" if view.mask_reason else view.phase,
                "out": view.mask_reason,
                "heard_s_ago": round(now_s - view.heard_s, 3),
                "info": view.info,
                "status": None if view.status is None else _status_json(view.status),
            }
            for view in self
        ]


def _status_json(status: Status) -> dict[str, Any]:
    return {name: getattr(status, name) for name in status.__struct_fields__ if name not in ("rank", "launch_id")}


def _taken(hello: Hello, known: RankView) -> str:
    return (
        f"rank {hello.rank} is attached already, as process {known.pid} on {known.host}; end one of the two, "
        "or give the second system another server.worker_port"
    )


_WARN_S = 5.0
_REGROUP_GRACE_S = 2.0


class Liveness:
    """Finds ranks that are silent for too long.

    Once a second a rank shows that its process lives (`Pulse`, from a thread of its own), and after each step that it
    makes progress (`Status`, `Tokens`). While its process pulses, a step may take up to its deadline. Time in which
    this front end itself did not run (starved, stopped) does not count.

    limit_s: how long a rank may send nothing about its steps, since one may take so long
    """

    def __init__(self, config: ServeConfig):
        self._alive_s = config.server.worker_deadline_s
        self.limit_s = max(self._alive_s, config.engine.step_deadline_s)
        # The peers of a lost rank see the loss when they next wait for it, at the end of a step at the latest, and
        # agree within two deadlines.
        self._regroup_s = 3 * config.engine.step_deadline_s + _REGROUP_GRACE_S
        self._attach_s = config.server.attach_deadline_s
        self._warnings = RareWarnings(log)
        self._ran_s: float | None = None

    def discount_own(self, workers: RankTable, now_s: float) -> None:
        """Subtracts from the ranks' silence the time by which this process was late. Called every ALIVE_PERIOD_S or
        more often."""
        late_s = 0.0 if self._ran_s is None else max(0.0, now_s - self._ran_s - ALIVE_PERIOD_S)
        self._ran_s = now_s
        workers.excuse(late_s, now_s)
        if late_s > min(_WARN_S, self._alive_s / 2):
            self._warnings.warn(
                "own", "this process did not run for %.0f s: what is heard of ranks is late by as much", late_s
            )

    def look(self, workers: RankTable, now_s: float) -> tuple[str, int] | None:
        """Returns why a rank is lost, and which; None while none is. Warns of ranks that have been silent a while."""
        if workers.apart is not None:
            return None  # the others are not heard here, but they may serve
        suspect = workers.long_suspected(now_s, self._regroup_s)
        if suspect is not None and suspect.suspicion is not None:
            why = f"{suspect.suspicion[1]}; its peers did not report within {self._regroup_s:g} s whether they go on"
            return why, suspect.rank
        extra_s = self._regroup_s if workers.goes_on else 0.0
        also = ", and time for its peers to go on without it" if workers.goes_on else ""
        for view in workers:
            if not view.serves:
                continue
            if view.pulse_s is not None and now_s - view.pulse_s > min(_WARN_S, self._alive_s / 2):
                self._warnings.warn(str(view.rank), "%s", self._silent(view, now_s - view.pulse_s))
            if view.pulse_s is not None and now_s - view.pulse_s > self._alive_s + extra_s:
                limit = f"(at most {self._alive_s + extra_s:g}: server.worker_deadline_s{also})"
                return f"{self._silent(view, now_s - view.pulse_s)} {limit}", view.rank
            if now_s - view.heard_s > self.limit_s + extra_s:
                larger = "the larger of server.worker_deadline_s and engine.step_deadline_s"
                return (
                    f"rank {view.rank} on {view.host} was not heard from for {now_s - view.heard_s:.0f} s (at most "
                    f"{self.limit_s + extra_s:g}: {larger}{also}); it hangs, or its host is gone; {view.last_phase}"
                ), view.rank
        return None

    def late_start(self, workers: RankTable, now_s: float) -> str | None:
        """Returns why the ranks take too long to start; None while they do not."""
        if workers.is_ready or now_s - workers.began_s <= self._attach_s:
            return None
        return (
            f"the ranks were not ready within server.attach_deadline_s = {self._attach_s:g} s ({workers.missing()}); "
            "start the missing ranks, or allow more time"
        )

    def _silent(self, view: RankView, silent_s: float) -> str:
        return (
            f"rank {view.rank} on {view.host} has shown no sign of life for {silent_s:.0f} s ({view.last_phase}); "
            "its process is stopped, or its host is gone"
        )
