"""Watches one launch: which ranks are ready, masked or dead, which are replaced, and whether the launch is lost.

The front end passes on what the ranks report; how processes end is seen here. The ranks decide whether they go on
without a lost one; their decision is printed.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import (
    SUPERVISOR,
    Apart,
    Exited,
    Fatal,
    ForFrontEnds,
    Members,
    Message,
    Progress,
    Ready,
    ToFrontEnd,
)
from moe_serve.launcher.facts import Fact
from moe_serve.launcher.local import Death, Replacements, Restarts, left_out

_EXIT_SEEN_S = 0.3  # peers may miss a process this long before its parent knows how it ended
_OWN_REPORT_S = 1.0  # a rank that exits by itself has reported why; wait so long for that report


@dataclass(frozen=True)
class Loss:
    """Why a launch is over. cause: the process that ended first; None: all still run, but cannot go on

    others_run: ranks that are left do not end by themselves
    had_served: whether the lost ranks had served; otherwise their start failed
    """

    cause: Death | None
    reported: str | None
    others_run: bool = False
    had_served: bool = True

    def __str__(self) -> str:
        reported = self.reported if self.cause is None or self.reported != str(self.cause) else None
        return ": ".join(str(part) for part in (self.cause, reported) if part is not None)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of the process, where the report does not explain its end."""
        explains = self.cause is None or not (self.cause.was_killed or self.reported in (None, str(self.cause)))
        return () if explains or self.cause is None else self.cause.last_lines

    @property
    def is_setting(self) -> bool:
        """Whether a setting must be corrected first: another start would end in the same way."""
        return self.cause is not None and self.cause.code == 2


@dataclass(frozen=True)
class _Masked:
    """A rank that the others serve without. serving: which ranks go on, or wait, in words"""

    since_s: float
    reason: str
    serving: str


class Display(Protocol):
    """Shows a launch to people."""

    def phase(self, rank: int, phase: str, fraction: float) -> None:
        """Shows what a rank does. fraction: 0..1 of it"""

    def note(self, text: str, style: str = "") -> None:
        """Prints a line."""


class Ranks(Protocol):
    """The ranks of a launch, as LocalRanks has them."""

    launch_id: int

    def deaths(self) -> list[Death]:
        """Returns the ranks that ended since the last call."""

    def finish(self, rank: int) -> None:
        """Ends what is left of a rank."""

    def replace(self, rank: int) -> None:
        """Starts a new process for one rank, after `finish`, beside the others."""


class LaunchWatch:
    """One launch, from its start to its loss.

    restarts: counts replacements of one rank, and restarts of all
    tell:     sends a message to every front end, one that is being started too
    computes: what decides about the values of its ranks, from `facts_of_values`; []: not known
    """

    def __init__(
        self,
        config: ServeConfig,
        display: Display,
        ranks: Ranks,
        restarts: Restarts,
        tell: Callable[[Message], None],
    ):
        self._num_ranks = config.parallel.num_ranks
        self._display = display
        self._ranks = ranks
        self._restarts = restarts
        self._tell = tell
        self._replacements = Replacements(config, restarts)
        self._not_replaced: Death | None = None  # of a rank that the others cannot serve without
        self._ready: set[int] = set()
        self.computes: list[Fact] = []
        self._joins = False
        self._fatal: str | None = None  # why the launch is over, as the front end reports it
        self._blamed: int = SUPERVISOR  # the rank that ended it; SUPERVISOR: not known
        self._deaths: list[Death] = []  # of ranks that the others do not serve without
        self._masked: set[int] = set()
        self._unprinted: dict[int, _Masked] = {}
        self._may_go_on = True  # whether every rank goes on without a lost one where it can
        self._lost_at_s: float | None = None  # when the loss was first noticed
        self._apart_epoch = -1  # of the last group of which a rank has said that it does not reach the hosts of most

    @property
    def is_ready(self) -> bool:
        """Whether all ranks have been ready."""
        return len(self._ready) == self._num_ranks

    @property
    def has_served(self) -> bool:
        """Whether all ranks have been ready, maybe before this launcher was there."""
        return self.is_ready or self._joins

    @property
    def _has_members(self) -> bool:
        """Whether a rank lives that takes part: without one, nobody is left to say that the launch is over."""
        gone = self._masked | {death.rank for death in self._deaths}
        return len(gone) < self._num_ranks

    def take(self, message: ToFrontEnd) -> None:
        """Shows what a rank has reported; drops what an earlier launch said."""
        if isinstance(message, ForFrontEnds) or message.launch_id != self._ranks.launch_id:
            return
        match message:
            case Progress():
                self._display.phase(message.rank, message.phase, message.fraction)
            case Ready():
                self._display.phase(message.rank, "ready", 1.0)
                self._may_go_on &= message.info.get("on_lost_rank") == "mask"
                self.computes = [Fact(*each) for each in message.computes]
                self._ready.add(message.rank)
            case Members() if self._replacements.regrouped(message):
                self._regroup(message)
            case Apart():
                self._apart_epoch = message.group_epoch
            case Fatal():
                self._fatal, self._blamed = message.message, message.lost_rank

    @property
    def is_apart(self) -> bool:
        """Whether no ranks are known to serve: those that are left do not reach the hosts of most."""
        return self._apart_epoch >= self._replacements.group_epoch

    @property
    def goes_on(self) -> bool:
        """Whether ranks take part that go on without others, and take replacements back."""
        return self.has_served and self._may_go_on and self._fatal is None and self._has_members

    def join(self, ranks: Iterable[int]) -> None:
        """Notes that the ranks of this host are started beside others that have served before."""
        self._joins = True
        self._masked.update(ranks)
        self.replaced(ranks)

    def replaced(self, ranks: Iterable[int]) -> None:
        """Notes that ranks of a host that is back are started beside the others."""
        for rank in ranks:
            self._replacements.started(rank, time.monotonic())

    def lose(self, reason: str) -> None:
        """Notes that this launch cannot go on, for a reason that no rank reports."""
        if self._fatal is None:
            self._fatal = reason
            self._tell_end(reason, SUPERVISOR)

    def find_loss(self) -> Loss | None:
        """Returns why this launch is over, once that is known as well as it will be; None while it lives."""
        self._notice_deaths()
        failed = self._replacements.failed(time.monotonic())
        if self._fatal is None and failed is not None:
            self._tell_end(failed, SUPERVISOR)
            return Loss(None, failed, others_run=True, had_served=False)
        if self._fatal is None and self._not_replaced is not None:
            self._tell_end(str(self._not_replaced), SUPERVISOR)
            return Loss(self._not_replaced, None, others_run=True)
        if self.goes_on:
            return None
        if not (self._deaths or self._fatal):
            return None
        now_s = time.monotonic()
        if self._lost_at_s is None:
            self._lost_at_s = now_s
        # Ranks that end because of a lost one may be gone before it does, so the blamed rank comes first.
        cause = min(
            self._deaths,
            key=lambda death: (not death.was_killed, death.rank != self._blamed, death.code != 2),
            default=None,
        )
        blamed_still_there = cause is not None and self._blamed not in (SUPERVISOR, cause.rank)
        half_known = cause is None or self._fatal is None or blamed_still_there
        if half_known and not (cause and cause.was_killed) and now_s - self._lost_at_s < _OWN_REPORT_S:
            return None  # the rest is still to come: the rank's own report, or how it ended
        if self._fatal is None and cause is not None:
            self._tell_end(str(cause), cause.rank)
        return Loss(cause, self._fatal, had_served=self.is_ready)

    def tell_exit(self, death: Death) -> None:
        """Tells the front ends that a rank's process has ended; its peers say what that means."""
        self._tell(Exited(death.rank, self._ranks.launch_id, death.num_before, str(death)))

    def _tell_end(self, reason: str, rank: int) -> None:
        """Tells the front ends that the launch is over. rank: that caused it; SUPERVISOR: none did, or it is said"""
        self._tell(Fatal(SUPERVISOR, self._ranks.launch_id, reason, rank))

    def replace_lost_ranks(self) -> None:
        """Starts replacements of ranks whose processes have ended, beside the others, which have masked them."""
        now_s = time.monotonic()
        for rank, why in self._replacements.late(now_s).items():
            self._display.note(f"{why}; its process is killed", style="yellow")
            self._ranks.finish(rank)
        for death in self._replacements.due(now_s):
            self._print_masked(at_once=True)
            if self._replacements.may_replace(death):
                self._ranks.finish(death.rank)
                self._ranks.replace(death.rank)
                self._replacements.started(death.rank, now_s)
                text = f"rank {death.rank} is started again, alone ({self._restarts.describe()})"
                self._display.note(text, style="yellow")
            elif self._replacements.others_wait:
                self._not_replaced = death
            else:
                self._display.note(left_out(f"rank {death.rank}", death.code), style="red")

    def _regroup(self, message: Members) -> None:
        """Notes which ranks are masked, and prints which rejoin."""
        members = ", ".join(map(str, message.members))
        are_many = len(message.members) > 1
        serving = f"ranks {members} serve" if are_many else f"rank {members} serves"
        goes_on = f"{serving} on with its requests"
        if message.waits:
            goes_on = f"ranks {members} wait for it" if are_many else f"rank {members} waits for it"
        for rank in range(self._num_ranks):
            if rank in self._masked and rank in message.members:
                self._print_masked(at_once=True)
                self._masked.remove(rank)
                self._display.note(f"rank {rank} rejoined; {serving}", style="green")
            elif rank not in self._masked and rank not in message.members:
                self._masked.add(rank)
                self._unprinted[rank] = _Masked(time.monotonic(), message.reason, goes_on)

    def _print_masked(self, at_once: bool = False) -> None:
        """Prints which ranks are masked, and how they ended; peers may notice a loss before this process does."""
        for rank, masked in list(self._unprinted.items()):
            ends = [str(death) for death in self._deaths if death.rank == rank]
            if not ends and time.monotonic() - masked.since_s < _EXIT_SEEN_S and not at_once:
                continue
            del self._unprinted[rank]
            self._deaths = [death for death in self._deaths if death.rank != rank]
            reason = ends[0] if ends else f"rank {rank} is masked ({masked.reason})"
            self._display.note(f"{reason}; {masked.serving}", style="yellow")

    def _notice_deaths(self) -> None:
        for death in self._ranks.deaths():
            failed_start = self._replacements.ended(death, time.monotonic())
            if failed_start is not None:
                if not self._replacements.others_wait:  # else all are started again, which is said there
                    self._display.note(failed_start, style="yellow")
                continue
            if death.rank in self._masked and death.rank not in self._unprinted:
                self._display.note(f"{death}; it was masked already", style="yellow")
                continue
            self._deaths.append(death)
            if self.is_ready and self._may_go_on:  # the answer is Members or Fatal, within the ranks' deadlines
                self.tell_exit(death)
        self._print_masked()
