"""Who takes part: ranks that are late or dead are reported, the others agree on a mask, a late rank rejoins.

A wait that ends without its peer voids the step: nothing is sampled from it. Every remaining rank then calls `regroup`
(a rank that waits anywhere sees within milliseconds that a step was voided). All agree on the ranks to mask, the next
epoch begins with new numbers, and the step runs again with a placement that needs no masked rank. What a masked rank
still writes lies in its own slices with flags of an old epoch, and nobody reads it. It rejoins when the others regroup
with it. A new process in the place of one that died is a masked rank, too, from its start.

Each rank owns a page of words that all others may read: the epoch that it proposes, the ranks that it masks in it, when
it was last seen waiting, whether it wants to rejoin, and its signs of life. Sets of ranks are bit masks.

Proposing: a rank that misses a peer proposes the next epoch without it. A proposal only grows, by what others propose
and by ranks that stay away for two deadlines. A rank goes on when all that it has not masked propose the same.
Agreeing: the first record that is appended to `decisions` defines the epoch, also for ranks that proposed something
else. So two ranks that give each other up at the same moment do not both go on.
Not hanging: each wait is for ranks that are not masked, and those are masked in time; a rank that finds the epoch
decided waits for nobody. A masked rank finds that in `decisions` whenever it comes.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moe_serve.dispatch.capabilities import TRANSPORTS
from moe_serve.dispatch.votes import Decision, Electorate, Log
from moe_serve.errors import PeerError, name_ranks

if TYPE_CHECKING:
    from moe_serve.dispatch.hosts.other_hosts import OtherHosts

Int64Array = npt.NDArray[np.int64]
BEAT_S = 0.25
_PROPOSED, _MASK, _WAITS, _WANTS_REJOIN, _DEAD, _INCARNATION = range(6)  # words of a page
_BEAT = 8  # the word that counts beats, on a cache line of its own: a beat disturbs no flag
_WAITING_NOW_S = 0.03  # a rank that was seen waiting so recently is held up by another one
_PAUSE_S = 0.5  # a waiting process checks every few milliseconds; after such a gap it was suspended
_POLL_S = 0.0002
_LEAST_SHOW_S = 0.005  # how often a page is copied to other hosts, at most, while its rank only waits
_TURN_S = 0.05  # for which a rank leaves it to each lower one to ask the hosts for a decision
_VOTE_S = 3.0  # how long the hosts are asked, at most
_SETTLE_S = 2.0  # how long ranks that reach most hosts again wait for those that they do not hear yet
_SILENT_S = 1.0  # several beats: a rank that is silent for so long does not rejoin now


class Membership:
    """The group as one rank sees it.

    epoch:     counts the groups; the same on all ranks that take part
    others:    the ranks that take part beside this one, ascending
    is_masked: the others go on without this rank, until it rejoins
    suspect_after_s: seconds without a sign of life after which a rank is suspected; None: only the deadlines count
    apart_after_s: seconds without the hosts of most ranks after which this one is apart; None: only where it must vote
    lend_core: entered while this rank waits, where ranks have more threads than cores; None: they have not
    """

    def __init__(
        self,
        rank: int,
        pages: Sequence[Int64Array],
        decisions: Log,
        lives: Callable[[int], bool] | None,
        deadline_s: float,
        hosts: "OtherHosts | None" = None,
    ):
        """pages: of all ranks;  lives: whether the process of a rank lives; None: ranks are threads of one process

        decisions: of this host;  hosts: the other ones; None: all ranks are on this one
        """
        max_ranks = TRANSPORTS["shm"].max_ranks
        assert max_ranks is None or len(pages) <= max_ranks, f"more than {max_ranks} ranks on one host"
        self.epoch = 0
        self.others = [other for other in range(len(pages)) if other != rank]
        self.is_masked = self.is_apart = False
        self.suspect_after_s: float | None = None
        self.apart_after_s: float | None = None
        self.lend_core: Callable[[], AbstractContextManager[None]] | None = None
        self._rank = rank
        self._pages = pages
        self._own = pages[rank]
        self._decisions = decisions
        self._watches_processes = lives is not None
        self._lives = lives or (lambda rank: True)
        self._deadline_s = deadline_s
        self._begin_epoch: Callable[[int, list[int]], None] = lambda epoch, others: None
        self._suspects: set[int] = set()
        self._wish = 0  # to rejoin: 1, or 2 as a new process
        self._hosts = hosts
        self._heartbeat = Heartbeat(rank, pages, None if hosts is None else self._show_life)
        self._waiting: tuple[list[int], str, int] = ([], "", 0)
        self._waited_s = self._shown_s = 0.0  # when this rank was last waiting, and its page was shown
        self._looked_s = self._reached_s = 0.0  # when this rank last looked for the hosts of most, and reached them
        self._returns_s = 0.0  # when a rank that was cut off goes on without those that it does not hear
        self._seen_waits: dict[int, tuple[int, float]] = {}  # by rank: its count, and when that changed
        self._checked_s = self._paused_s = 0.0
        if hosts is not None:
            self._own[_INCARNATION] = decisions.incarnation
            hosts.show_page()

    def on_epoch(self, begin: Callable[[int, list[int]], None]) -> None:
        """Calls this with each new epoch and the other ranks, also where this rank finds itself masked."""
        self._begin_epoch = begin

    @property
    def members(self) -> list[int]:
        """The ranks that take part, this one included, ascending."""
        return sorted([self._rank, *self.others])

    @property
    def masked(self) -> list[int]:
        """The ranks that do not take part, ascending."""
        return [rank for rank in range(len(self._pages)) if rank != self._rank and rank not in self.others]

    @property
    def suspects(self) -> frozenset[int]:
        """The ranks that this one has found late or dead in this epoch."""
        return frozenset(self._suspects)

    @property
    def is_void(self) -> bool:
        """Whether this epoch is over, for this rank or for another one: all must regroup."""
        left = any(self._proposal(rank)[0] > self.epoch for rank in self.others)
        return bool(self._suspects) or left or bool(self._broken())

    def check(
        self, missing: list[int], phase: str, sequence: int, waited_s: float, deadline_s: float | None = None
    ) -> None:
        """Raises PeerError when waiting for these ranks is useless; called every few milliseconds by a waiting rank.

        deadline_s: of this wait; None: the usual one
        """
        deadline_s = deadline_s or self._deadline_s
        self._waiting = (missing, phase, sequence)
        self._note_waits(missing)
        self.check_epoch_stands(phase, sequence)
        dead = [rank for rank in missing if self._is_dead(rank)]
        if dead:
            self._suspects.update(dead)
            raise PeerError(f"{self.named(dead[0])} died before {phase} {sequence}", dead[0], phase, sequence)
        for rank, why in self._broken().items():  # proves nothing of the rank: whoever comes back in time stays in
            text = f"the connection with {self.named(rank)} ended before {phase} {sequence} ({why})"
            raise PeerError(text, rank, phase, sequence)
        silent = [rank for rank in missing if self._is_silent(rank)]
        if silent:
            self._suspects.update(silent)
            raise PeerError(
                f"{self.named(silent[0])} gave no sign of life for {self.suspect_after_s:g} s before {phase} "
                f"{sequence}: its process is stopped, or its machine hangs",
                silent[0],
                phase,
                sequence,
            )
        self._check_reaches_most()
        waited_s -= self._own_pause_s(waited_s)
        if waited_s <= deadline_s or not missing:
            return
        # A peer that is itself waiting is not to blame, unless no other one is found within a second deadline.
        stuck = [rank for rank in missing if not self._is_waiting(rank)]
        if stuck or waited_s > 2 * deadline_s:
            late = stuck or missing[:1]
            self._suspects.update(late)
            raise PeerError(
                f"{self.named(late[0])} did not arrive in {phase} {sequence} within {deadline_s:g} s; if its steps are "
                "really that slow, raise engine.step_deadline_s (dispatch.deadline_s where it is set)",
                late[0],
                phase,
                sequence,
            )

    def begin_heartbeat(self) -> None:
        """Gives signs of life from now on, from a thread, where ranks are processes."""
        if self._watches_processes:
            self._heartbeat.start()

    @property
    def last_wait(self) -> tuple[list[int], str, int]:
        """The ranks that were missing when this one last looked whether a wait is useless, and its phase and number."""
        return self._waiting

    def describe_wait(self) -> str:
        """Returns for whom this rank is waiting, and what it knows of them; for a log line. "": it does not wait"""
        missing, phase, sequence = self._waiting
        if not missing or time.monotonic() - self._waited_s > _PAUSE_S:
            return ""
        silent_s = max(map(self._heartbeat.silent_s, missing))
        state = f"without a sign of life for {silent_s:.1f} s" if silent_s > 1 else "which is alive"
        return f"{phase} {sequence} waits for {self.named(*missing)}, {state}"

    def named(self, *ranks: int) -> str:
        """Returns ranks for people, with their hosts where there are several."""
        return name_ranks(ranks, lambda rank: "") if self._hosts is None else self._hosts.named(*ranks)

    def _check_reaches_most(self) -> None:
        """Raises PeerError where this rank has not reached the hosts of most ranks for `apart_after_s`.

        Whatever it waits for, no step of its epoch ends then, and it can begin no other.
        """
        hosts, now_s = self._hosts, time.monotonic()
        if hosts is None or self.apart_after_s is None:
            return
        if now_s - self._looked_s > _PAUSE_S:
            self._reached_s = now_s  # nobody waited, or this process did not run
        self._looked_s = now_s
        own = {hosts.host_of[self._rank]}
        heard = own | {hosts.host_of[rank] for rank in self.others if not self._is_away(rank)}
        if len(heard) < len(set(hosts.host_of)):
            electorate = Electorate(self._decided(self.epoch), hosts.host_of)
            if not (electorate.is_quorum(heard) or electorate.is_quorum(hosts.catch_up() | own)):
                if now_s - self._reached_s > self.apart_after_s:
                    raise self._cut_off(hosts, self.epoch + 1)
                return
        self._reached_s = now_s

    def check_epoch_stands(self, phase: str, sequence: int) -> None:
        """Raises PeerError when another rank has begun to leave this epoch, so that data just read may be newer."""
        for rank in self.others:
            proposed, masked = self._proposal(rank)
            if proposed > self.epoch:
                raise self._voided(rank, masked, phase, sequence)

    def check_takes_part(self, phase: str, sequence: int) -> None:
        """Raises PeerError when another rank goes on without this one, so that data just read may be newer.

        Where others go on with it, as when a rank rejoins, they overwrite nothing before this one has left the epoch.
        """
        for rank in self.others:
            proposed, masked = self._proposal(rank)
            if proposed > self.epoch and masked >> self._rank & 1:
                raise self._masked_by(f"by rank {rank}", phase, sequence)

    def regroup(self, suspects: Iterable[int] = (), joining: Iterable[int] = ()) -> list[int]:
        """Agrees with all remaining ranks on who takes part, and begins a new epoch; returns its ranks.

        suspects: ranks to mask beside those that `check` found late or dead
        joining:  masked ranks that wait to rejoin, the same on all ranks
        Raises PeerError, naming this rank, when the others have masked it, and where it is cut off from most of them.
        """
        all_ranks = set(range(len(self._pages)))
        members = {self._rank, *self.others, *joining} - ({*suspects, *self._suspects} - {self._rank})
        return self._agree(self.epoch + 1, _mask(all_ranks - members))

    def begin_masked(self) -> None:
        """Begins as a masked rank, in the place of a process that died: what that one proposed last counts no more.

        Raises PeerError where the others have not masked it. Those of several hosts have two deadlines for that, once
        this rank reaches most of them.
        """
        epoch, decided = self._decisions.read().newest() or (0, self._decisions.begin)
        hosts, until_s = self._hosts, time.monotonic() + 2 * self._deadline_s
        while hosts is not None and not decided.masked >> self._rank & 1 and time.monotonic() < until_s:
            answering = hosts.catch_up() | {hosts.host_of[self._rank]}
            if not Electorate(decided, hosts.host_of).is_quorum(answering):
                until_s = time.monotonic() + 2 * self._deadline_s
            epoch, decided = self._decisions.read().newest() or (0, self._decisions.begin)
            time.sleep(_POLL_S)
        masked = decided.masked
        if not masked >> self._rank & 1:
            text = f"rank {self._rank} is started anew, but the others have not masked the one before"
            raise PeerError(text, self._rank, "start", epoch)
        self._wish = self._own[_WANTS_REJOIN] = 0
        self._propose(epoch, masked)
        self._begin(epoch, self.others, is_masked=True)

    def ask_to_rejoin(self, is_new: bool = False) -> None:
        """Shows the others that this rank, which was masked, wants to rejoin. is_new: as a new process

        It has ended all its calls: whatever it wrote in them lies before this word in the order of its stores.
        """
        self._wish = 2 if is_new else 1
        self._show_wish()

    def _show_wish(self) -> None:
        """Shows the wish to rejoin once this rank hears all others: it would want others masked."""
        if self._hosts is not None:
            _, newest = self._decisions.read().newest() or (0, self._decisions.begin)
            heard = [rank for rank in range(len(self._pages)) if newest.masked >> rank & 1 or not self._is_away(rank)]
            wish = self._wish if len(heard) == len(self._pages) else 0
            if not wish and self._wish:
                self._hosts.catch_up()  # they may have masked those that this rank does not hear
        else:
            wish = self._wish
        if wish != self._own[_WANTS_REJOIN]:
            self._own[_WANTS_REJOIN] = wish
            self._show()

    def _is_away(self, rank: int) -> bool:
        """Returns whether this rank does not hear another one now."""
        return rank != self._rank and (self._heartbeat.silent_s(rank) >= _SILENT_S or self._is_dead(rank))

    def try_rejoin(self) -> bool:
        """Returns whether the others have regrouped with this rank; to be called again until they have.

        Raises PeerError when no other rank lives.
        """
        others = [rank for rank in range(len(self._pages)) if rank != self._rank and not self._is_dead(rank)]
        if not others:
            raise PeerError(
                f"rank {self._rank} was masked and no other rank lives; start the ranks again",
                self._rank,
                "rejoin",
                self.epoch,
            )
        self._show_wish()
        for rank in others:
            proposed, masked = self._proposal(rank)
            if proposed > self.epoch and not masked >> self._rank & 1 and self._knows_before(proposed):
                try:
                    self._agree(proposed, masked)
                except PeerError:
                    return False  # some of them have not seen the request yet
                self._wish = 0
                self._show_wish()
                return True
        return False

    def describe_rejoin(self) -> str:
        """Returns what this rank, which waits to rejoin, knows of why it still does; for a log line."""
        _, newest = self._decisions.read().newest() or (0, self._decisions.begin)
        others = [r for r in range(len(self._pages)) if r != self._rank and not newest.masked >> r & 1]
        away = list(filter(self._is_away, others))
        if away:
            return f"it does not hear {self.named(*away)}"
        shown = "see" if self._own[_WANTS_REJOIN] else "were not shown"
        return f"it hears {self.named(*others)}, which {shown} its wish and have not regrouped with it"

    def try_return(self) -> bool:
        """Returns whether this rank, which was cut off from most of the others, knows now how they go on.

        It is masked then, or takes part. To be called again until it does.
        """
        hosts = self._hosts
        assert hosts is not None, "no rank is cut off from others of its host"
        answering = hosts.catch_up() | {hosts.host_of[self._rank]}
        newest = self._decisions.read().newest()
        if newest is not None and newest[0] > self.epoch:
            with contextlib.suppress(PeerError):
                self._enter(*newest)
            return True
        now_s = time.monotonic()
        if not Electorate(self._decided(self.epoch), hosts.host_of).is_quorum(answering):
            self._returns_s = now_s + _SETTLE_S
            return False
        away = set(filter(self._is_away, self.others))
        if away and now_s < self._returns_s:
            return False  # their connections are on the way
        with contextlib.suppress(PeerError):
            self.regroup(away)
        return not self.is_apart

    def waiting_to_rejoin(self) -> list[int]:
        """Returns the masked ranks that want to rejoin."""
        asking = [rank for rank in self.masked if self._pages[rank][_WANTS_REJOIN] and not self._is_dead(rank)]
        # A new process in the place of one that died while it asked is not there yet.
        return [rank for rank in asking if self._heartbeat.silent_s(rank) < _SILENT_S]

    def is_new(self, rank: int) -> bool:
        """Returns whether a rank that waits to rejoin is a new process, in the place of one that died."""
        return int(self._pages[rank][_WANTS_REJOIN]) == 2

    def _agree(self, epoch: int, masked: int) -> list[int]:
        decisions, hosts = self._decisions, self._hosts
        self._propose(epoch, masked)
        deadline_s = time.monotonic() + 2 * self._deadline_s  # a rank sees that the step is void only once it waits
        while decisions.read().decided(epoch) is None:
            waiting_for = []
            is_masked = False  # by another one
            for rank in range(len(self._pages)):
                proposed, theirs = self._proposal(rank)
                is_masked |= proposed >= epoch and bool(theirs >> self._rank & 1)
                if rank == self._rank or masked >> rank & 1 or proposed > epoch:
                    continue
                # A rank that masks this one may have decided so: wait for that, do not copy it.
                if proposed == epoch and not theirs >> self._rank & 1:
                    if theirs & ~masked:
                        masked |= theirs
                        self._propose(epoch, masked)
                    if theirs == masked:
                        continue
                waiting_for.append(rank)
            waiting_for = [rank for rank in waiting_for if not masked >> rank & 1]
            if not waiting_for:
                break
            late = time.monotonic() > deadline_s
            gone = [rank for rank in waiting_for if late or self._is_silent(rank) or self._is_dead(rank)]
            if gone:
                masked |= _mask(gone)
                self._propose(epoch, masked)
            time.sleep(_POLL_S)
            if hosts is not None:
                if set(waiting_for) & set(hosts.broken()):
                    hosts.catch_up()  # a host of which no rank is left says so by its launcher
                hosts.poll()
                self._show_now_and_then()
                self._check_reaches_most()
                if is_masked and self._missed(hosts, epoch):
                    break
        return self._enter(*self._decide(epoch, masked))

    def _missed(self, hosts: "OtherHosts", epoch: int) -> bool:
        """Returns whether the others have decided this epoch, or a later one, without a word to this host."""
        hosts.catch_up()
        newest = self._decisions.read().newest()
        return newest is not None and newest[0] >= epoch

    def _decide(self, epoch: int, masked: int) -> tuple[int, Decision]:
        """Returns who takes part in an epoch, or in a later one that others have begun meanwhile.

        Raises PeerError where the hosts that answer are no quorum.
        """
        hosts, decisions = self._hosts, self._decisions
        if hosts is None:
            return epoch, decisions.decide(epoch, Decision(masked, (0,)))
        members = [rank for rank in range(len(self._pages)) if not masked >> rank & 1]
        turn_s = time.monotonic() + _TURN_S * members.index(self._rank)
        while (newest := decisions.read().newest()) is None or newest[0] < epoch:
            if time.monotonic() < turn_s:
                time.sleep(_POLL_S)
                continue
            before = self._decided(epoch - 1)
            of_hosts = list(before.incarnations)
            for rank in members:
                of_hosts[hosts.host_of[rank]] = int(self._pages[rank][_INCARNATION])
            wanted = Decision(masked, tuple(of_hosts))
            decided = hosts.decide(epoch, wanted, before, min(_VOTE_S, 2 * self._deadline_s))
            if decided is None:
                raise self._cut_off(hosts, epoch)
        own = decisions.read().decided(epoch)
        return newest if own is None else (epoch, own)

    def _decided(self, epoch: int) -> Decision:
        """Returns who takes part in an epoch that this host knows."""
        decided = self._decisions.read().decided(epoch) if epoch else self._decisions.begin
        assert decided is not None, f"epoch {epoch} is decided"
        return decided

    def _knows_before(self, epoch: int) -> bool:
        """Returns whether this host knows who takes part in the epoch before, who decide about this one."""
        if self._hosts is None or epoch == 1 or self._decisions.read().decided(epoch - 1) is not None:
            return True
        self._hosts.catch_up()
        return self._decisions.read().decided(epoch - 1) is not None

    def _cut_off(self, hosts: "OtherHosts", epoch: int) -> PeerError:
        """Withdraws this rank's proposal, which nobody may go on with, and returns the error."""
        self.is_apart = True
        self._returns_s = time.monotonic() + _SETTLE_S
        self._suspects.clear()
        self._propose(self.epoch, _mask(self.masked))
        why = hosts.why_down()
        text = f"{self.named(self._rank)} does not reach the hosts of most ranks{f' ({why})' if why else ''}"
        return PeerError(f"{text}; it waits until it does: look at the network between", self._rank, "regroup", epoch)

    def _enter(self, epoch: int, decided: Decision) -> list[int]:
        """Begins an epoch that was decided; returns its ranks. Raises PeerError when this one is not among them."""
        self._suspects.clear()
        members = [rank for rank in range(len(self._pages)) if not decided.masked >> rank & 1]
        if self._rank not in members:
            self._begin(epoch, self.others, is_masked=True)
            raise self._masked_by("by the others", "regroup", epoch)
        if self._hosts is not None:
            self._hosts.leave_epoch(epoch, decided.masked)  # ranks that this one has not proposed to mask, too
        self._begin(epoch, [rank for rank in members if rank != self._rank], is_masked=False)
        return members

    def _begin(self, epoch: int, others: list[int], is_masked: bool) -> None:
        self.epoch, self.others, self.is_masked, self.is_apart = epoch, others, is_masked, False
        self._begin_epoch(epoch, others)

    def _propose(self, epoch: int, masked: int) -> None:
        if self._hosts is not None:
            self._hosts.leave_epoch(epoch, masked)
        self._own[_MASK] = masked
        self._own[_PROPOSED] = epoch
        self._show()

    def _show(self) -> None:
        """Shows this rank's page to the other hosts."""
        if self._hosts is not None:
            self._shown_s = time.monotonic()
            self._hosts.show_page()

    def _show_now_and_then(self) -> None:
        if time.monotonic() - self._shown_s > max(_LEAST_SHOW_S, self._deadline_s / 16):
            self._show()

    def _show_life(self) -> None:
        """Shows a sign of life to the other hosts, and which ranks of this host are dead."""
        assert self._hosts is not None
        self._own[_DEAD] = _mask(rank for rank in self._hosts.neighbours if not self._lives(rank))
        self._hosts.show_page()

    def _broken(self) -> dict[int, str]:
        """Returns the ranks that take part whose connection has ended in this epoch, and why."""
        if self._hosts is None:
            return {}
        return {rank: why for rank, why in self._hosts.broken().items() if rank in self.others}

    def _proposal(self, rank: int) -> tuple[int, int]:
        """Returns a rank's proposed epoch, and the ranks that it masks in it."""
        page = self._pages[rank]
        while True:
            proposed, masked = int(page[_PROPOSED]), int(page[_MASK])
            if proposed == page[_PROPOSED]:
                return proposed, masked

    def _is_dead(self, rank: int) -> bool:
        """Returns whether the process of a rank is known to be dead: only its own host can tell, or its launcher."""
        hosts = self._hosts
        if hosts is None or rank in hosts.neighbours:
            return not self._lives(rank)
        told = any(
            int(page[_DEAD]) >> rank & 1
            for page, host in zip(self._pages, hosts.host_of, strict=True)
            if host == hosts.host_of[rank]
        )
        # One that gives signs of life is another process in its place.
        return (told or hosts.is_said_dead(rank)) and self._heartbeat.silent_s(rank) > 0

    def _is_silent(self, rank: int) -> bool:
        return self.suspect_after_s is not None and self._heartbeat.silent_s(rank) > self.suspect_after_s

    def _note_waits(self, missing: list[int]) -> None:
        """Counts up while this rank waits, and notes who else does. Counts, since hosts have no clock in common."""
        self._waited_s = now_s = time.monotonic()
        self._own[_WAITS] += 1
        for rank in missing:
            count = int(self._pages[rank][_WAITS])
            if self._seen_waits.get(rank, (-1, 0.0))[0] != count:
                self._seen_waits[rank] = count, now_s
        if self._hosts is not None:
            self._show_now_and_then()

    def _is_waiting(self, rank: int) -> bool:
        # A rank that hangs shows no sign for a whole deadline; on a busy machine a healthy one may pause briefly.
        recent_s = max(_WAITING_NOW_S, self._deadline_s / 4)
        return time.monotonic() - self._seen_waits[rank][1] < recent_s

    def _own_pause_s(self, waited_s: float) -> float:
        """Returns for how long of this wait this process was suspended; no peer is late for that."""
        now_s = time.monotonic()
        gap_s, self._checked_s = now_s - self._checked_s, now_s
        if gap_s > waited_s:
            self._paused_s = 0.0  # the first check of this wait
        elif gap_s > _PAUSE_S:
            self._paused_s += gap_s
        return self._paused_s

    def _voided(self, by: int, masked: int, phase: str, sequence: int) -> PeerError:
        if masked >> self._rank & 1:
            return self._masked_by(f"by {self.named(by)}", phase, sequence)
        new = [rank for rank in self.others if masked >> rank & 1]
        whom = f"it misses {self.named(new[0])}" if new else "it goes on with another group"
        return PeerError(
            f"{self.named(by)} voided the step in {phase} {sequence}: {whom}", new[0] if new else -1, phase, sequence
        )

    def _masked_by(self, whose: str, phase: str, sequence: int) -> PeerError:
        text = f"rank {self._rank} came too late and was masked {whose}; it must rejoin, or be started again"
        return PeerError(text, self._rank, phase, sequence)


class Heartbeat:
    """The signs of life of one rank, and what it sees of those of the others.

    Each rank counts up in its own page, from a thread: while the rank computes, reads or waits, its thread counts on.
    Only a process that is stopped, or whose machine hangs, does not. Silence is counted in beats of the rank that
    listens, so time in which that rank itself was stopped counts for nobody.
    """

    def __init__(self, rank: int, pages: Sequence[Int64Array], show: Callable[[], None] | None = None):
        """pages: of all ranks;  show: called after each sign of life of this one; None: the others see it at once"""
        self._rank, self._show = rank, show
        self._beats = [page[_BEAT : _BEAT + 1] for page in pages]
        self._seen = [0] * len(pages)
        self._silent = [0] * len(pages)
        self._started = False

    def start(self) -> None:
        """Starts the thread, once. It ends when nobody refers to this object any more."""
        if not self._started:
            self._started = True
            threading.Thread(target=_beat, args=(weakref.ref(self),), name="heartbeat", daemon=True).start()

    def silent_s(self, rank: int) -> float:
        """Returns for how long a rank has given no sign of life; 0 before its first one."""
        has_beaten = int(self._beats[rank][0]) != self._seen[rank]  # since this rank looked
        return 0.0 if has_beaten else self._silent[rank] * BEAT_S

    def beat(self) -> None:
        """Gives a sign of life, and looks for those of the others."""
        self._beats[self._rank][0] += 1
        for rank, beats in enumerate(self._beats):
            count = int(beats[0])
            self._silent[rank] = self._silent[rank] + 1 if count == self._seen[rank] and count else 0
            self._seen[rank] = count
        if self._show is not None:
            self._show()


def _beat(reference: "weakref.ref[Heartbeat]") -> None:
    while True:
        heartbeat = reference()
        if heartbeat is None:
            return
        heartbeat.beat()
        del heartbeat
        time.sleep(BEAT_S)


def _mask(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in set(ranks))
