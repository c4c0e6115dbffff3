"""The front end's table of ranks: which are attached, ready, masked or lost, and when each was last heard from.

Pure state: no socket, and time is an argument. `RankLink` feeds it messages and acts on its answers. Torch-free.

An *epoch* is one life of all ranks together. It is over when a rank is lost that the others cannot spare; ranks that
attach with a higher epoch number begin the next one. Within an epoch ranks may be masked and rejoin: the ranks agree on
that among themselves and report it (`Members`). Until then, a launcher's report of a dead rank, or a rank's report of
its own failure, is a suspicion.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moe_serve.engine.messages import Hello, Members, ModelLimits, Progress, Pulse, Ready, Status


@dataclass
class RankView:
    """One rank, as far as it has reported. identity: its socket's name at our ROUTER.

    mask_reason:  why it is masked; None while it takes part
    suspicion:    (since when, why) it is presumed lost; its peers are about to report that they go on, or that they end
    times_masked: how often it was masked
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
    status: Status | None = None
    ended: bool = False
    mask_reason: str | None = None
    suspicion: tuple[float, str] | None = None
    times_masked: int = 0
    pulse_s: float | None = None
    last_phase: str = "its phase is not known"

    @property
    def is_ready(self) -> bool:
        return self.limits is not None and not self.ended

    @property
    def serves(self) -> bool:
        """Whether it takes requests, as far as is known here."""
        return self.is_ready and self.mask_reason is None and self.suspicion is None

    @property
    def can_be_spared(self) -> bool:
        """Whether this rank and its peers are set up to go on without each other."""
        return self.info.get("on_lost_rank") == "mask"


@dataclass(frozen=True)
class Regrouped:
    """What a new group changes. A rank may be in both lists: it rejoined before we heard that it was masked.

    masked: their requests must move; ended: those of them whose process has ended, the others are late
    """

    masked: list[int]
    rejoined: list[int]
    ended: list[int]


class WorkerTable:
    """All ranks of the current epoch.

    loss:      why the epoch is over, naming the rank; None while it lives
    lost_rank: the rank that is held responsible; None where that is unknown
    """

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.epoch = -1  # nobody has attached yet
        self.loss: str | None = None
        self.lost_rank: int | None = None
        self.group_epoch = 0  # counts the groups of ranks within an epoch
        self._ranks: dict[int, RankView] = {}

    def __iter__(self) -> Iterator[RankView]:
        """Yields the attached ranks in rank order."""
        return iter([self._ranks[rank] for rank in sorted(self._ranks)])

    def by_identity(self, identity: bytes) -> RankView | None:
        """Returns the rank with this socket; None for strangers and ranks of epochs that are over."""
        return next((view for view in self._ranks.values() if view.identity == identity), None)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served: all ranks are attached, and all that are not masked take requests."""
        has_all = self.loss is None and len(self._ranks) == self.num_ranks
        return has_all and all(view.serves or view.mask_reason or view.suspicion for view in self)

    @property
    def limits(self) -> ModelLimits | None:
        """What a request must respect on every rank; None until all are ready."""
        known = [view.limits for view in self if view.limits is not None]
        if len(known) < self.num_ranks:
            return None
        return min(known, key=lambda limits: (limits.max_prompt_len, limits.max_model_len))

    @property
    def info(self) -> dict[str, Any]:
        """Facts about the model, which are the same on every rank; {} until one is ready."""
        return next((view.info for view in self if view.is_ready), {})

    def attach(self, identity: bytes, hello: Hello, now_s: float) -> str | None:
        """Adds a rank; returns why it is refused, None if it is not. A higher epoch replaces the current one."""
        if hello.num_ranks != self.num_ranks:
            return (
                f"rank {hello.rank} belongs to {hello.num_ranks} ranks but this front end serves {self.num_ranks}; "
                "give both the same configuration"
            )
        if not 0 <= hello.rank < self.num_ranks:
            return f"rank {hello.rank} is not one of 0 to {self.num_ranks - 1}"
        if hello.epoch < self.epoch or (hello.epoch == self.epoch and self.loss is not None):
            return f"rank {hello.rank} comes from epoch {hello.epoch}, which is over"
        if hello.epoch == self.epoch and hello.rank in self._ranks:
            other = self._ranks[hello.rank]
            return (
                f"rank {hello.rank} is attached already, as process {other.pid} on {other.host}; end one of the two, "
                "or give the second system another server.worker_port"
            )
        if hello.epoch > self.epoch:
            self.epoch, self.loss, self.lost_rank = hello.epoch, None, None
            self.group_epoch = 0
            self._ranks.clear()
        self._ranks[hello.rank] = RankView(hello.rank, identity, hello.pid, hello.host, now_s)
        return None

    def pulse(self, message: Pulse, now_s: float) -> None:
        """Notes that the process of a rank lives, and what it is doing."""
        view = self._ranks.get(message.rank)
        if view is not None and message.epoch == self.epoch:
            view.pulse_s = now_s
            if message.phase:
                view.last_phase = f"last seen in {message.phase} of step {message.step}"

    def progress(self, view: RankView, message: Progress) -> None:
        view.phase, view.fraction = message.phase, message.fraction

    def ready(self, view: RankView, message: Ready) -> None:
        view.phase, view.fraction = "ready", 1.0
        view.limits, view.info = message.limits, message.info

    def story(self, view: RankView) -> list[Progress | Ready]:
        """Returns what a rank has reported so far, for a listener that attaches later."""
        reported: list[Progress | Ready] = [Progress(view.rank, self.epoch, view.phase, view.fraction)]
        if view.limits is not None:
            reported.append(Ready(view.rank, self.epoch, view.limits, view.info))
        return reported

    @property
    def goes_on(self) -> bool:
        """Whether the ranks have reported at their start that they go on without a lost one if they can."""
        return self.is_ready and all(view.can_be_spared for view in self)

    def can_spare(self, rank: int) -> bool:
        """Returns whether the peers of a rank may go on without it; they report themselves whether they do."""
        return self.goes_on and any(view.serves for view in self if view.rank != rank)

    def suspect(self, rank: int, reason: str, now_s: float) -> None:
        """Notes that a rank is presumed lost."""
        view = self._ranks[rank]
        if view.mask_reason is not None:
            view.mask_reason = reason  # how its process ended is the better reason
        elif view.suspicion is None:
            view.suspicion = (now_s, reason)

    def regroup(self, message: Members) -> Regrouped:
        """Takes a rank's report of its group and returns what is new in it."""
        ended = [view.rank for view in self if view.suspicion is not None or view.rank in message.ended]
        gone: list[RankView] = []
        back: list[RankView] = []
        speaker = self._ranks[message.rank]
        if speaker.times_masked < message.times_masked:
            gone.append(speaker)
            back.append(speaker)
        if message.group_epoch > self.group_epoch:
            self.group_epoch = message.group_epoch
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

    @property
    def masked(self) -> dict[int, str]:
        """The masked ranks, and why."""
        return {view.rank: view.mask_reason for view in self if view.mask_reason is not None}

    def long_suspected(self, now_s: float, patience_s: float) -> RankView | None:
        """Returns a rank that has been suspected for longer than patience_s, without a report from its peers."""
        return next((view for view in self if view.suspicion and now_s - view.suspicion[0] > patience_s), None)

    def end_epoch(self, reason: str, lost_rank: int | None) -> None:
        """Notes that the epoch is over. A report that names the rank replaces an earlier one that does not."""
        if self.loss is None or (self.lost_rank is None and lost_rank is not None):
            self.loss, self.lost_rank = reason, lost_rank

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
    return {name: getattr(status, name) for name in status.__struct_fields__ if name not in ("rank", "epoch")}
