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

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from moe_serve.dispatch.capabilities import TRANSPORTS
from moe_serve.dispatch.votes import Decision, Log
from moe_serve.errors import PeerError

Int64Array = npt.NDArray[np.int64]
BEAT_S = 0.25
_PROPOSED, _MASK, _WAITING_NS, _WANTS_REJOIN = range(4)  # words of a page
_BEAT = 8  # the word that counts beats, on a cache line of its own: a beat disturbs no flag
_WAITING_NOW_S = 0.03  # a rank that was seen waiting so recently is held up by another one
_PAUSE_S = 0.5  # a waiting process checks every few milliseconds; after such a gap it was suspended
_POLL_S = 0.0002
_SILENT_S = 1.0  # several beats: a rank that is silent for so long does not rejoin now


class Membership:
    """The group as one rank sees it.

    epoch:     counts the groups; the same on all ranks that take part
    others:    the ranks that take part beside this one, ascending
    is_masked: the others go on without this rank, until it rejoins
    suspect_after_s: seconds without a sign of life after which a rank is suspected; None: only the deadlines count
    lend_core: entered while this rank waits, where ranks have more threads than cores; None: they have not
    """

    def __init__(
        self,
        rank: int,
        pages: Sequence[Int64Array],
        decisions: Log,
        lives: Callable[[int], bool] | None,
        deadline_s: float,
    ):
        """pages: of all ranks;  lives: whether the process of a rank lives; None: ranks are threads of one process"""
        max_ranks = TRANSPORTS["shm"].max_ranks
        assert max_ranks is None or len(pages) <= max_ranks, f"more than {max_ranks} ranks on one host"
        self.epoch = 0
        self.others = [other for other in range(len(pages)) if other != rank]
        self.is_masked = False
        self.suspect_after_s: float | None = None
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
        self._heartbeat = Heartbeat(rank, pages)
        self._waiting: tuple[list[int], str, int] = ([], "", 0)
        self._checked_s = self._paused_s = 0.0

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
        return bool(self._suspects) or any(self._proposal(rank)[0] > self.epoch for rank in self.others)

    def check(
        self, missing: list[int], phase: str, sequence: int, waited_s: float, deadline_s: float | None = None
    ) -> None:
        """Raises PeerError when waiting for these ranks is useless; called every few milliseconds by a waiting rank.

        deadline_s: of this wait; None: the usual one
        """
        deadline_s = deadline_s or self._deadline_s
        self._waiting = (missing, phase, sequence)
        self._own[_WAITING_NS] = time.monotonic_ns()
        self.check_epoch_stands(phase, sequence)
        dead = [rank for rank in missing if not self._lives(rank)]
        if dead:
            self._suspects.update(dead)
            raise PeerError(f"rank {dead[0]} died before {phase} {sequence}", dead[0], phase, sequence)
        silent = [rank for rank in missing if self._is_silent(rank)]
        if silent:
            self._suspects.update(silent)
            raise PeerError(
                f"rank {silent[0]} gave no sign of life for {self.suspect_after_s:g} s before {phase} {sequence}: its "
                "process is stopped, or its machine hangs",
                silent[0],
                phase,
                sequence,
            )
        waited_s -= self._own_pause_s(waited_s)
        if waited_s <= deadline_s or not missing:
            return
        # A peer that is itself waiting is not to blame, unless no other one is found within a second deadline.
        stuck = [rank for rank in missing if not self._is_waiting(rank)]
        if stuck or waited_s > 2 * deadline_s:
            late = stuck or missing[:1]
            self._suspects.update(late)
            raise PeerError(
                f"rank {late[0]} did not arrive in {phase} {sequence} within {deadline_s:g} s; if its steps are "
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
        if not missing or (time.monotonic_ns() - int(self._own[_WAITING_NS])) * 1e-9 > _PAUSE_S:
            return ""
        silent_s = max(map(self._heartbeat.silent_s, missing))
        state = f"without a sign of life for {silent_s:.1f} s" if silent_s > 1 else "which is alive"
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"{phase} {sequence} waits for {who}, {state}"

    def check_epoch_stands(self, phase: str, sequence: int) -> None:
        """Raises PeerError when another rank has begun to leave this epoch, so that data just read may be newer."""
        for rank in self.others:
            proposed, masked = self._proposal(rank)
            if proposed > self.epoch:
                raise self._voided(rank, masked, phase, sequence)

    def regroup(self, suspects: Iterable[int] = (), joining: Iterable[int] = ()) -> list[int]:
        """Agrees with all remaining ranks on who takes part, and begins a new epoch; returns its ranks.

        suspects: ranks to mask beside those that `check` found late or dead
        joining:  masked ranks that wait to rejoin, the same on all ranks
        Raises PeerError, naming this rank, when the others have masked it.
        """
        all_ranks = set(range(len(self._pages)))
        members = {self._rank, *self.others, *joining} - ({*suspects, *self._suspects} - {self._rank})
        return self._agree(self.epoch + 1, _mask(all_ranks - members))

    def begin_masked(self) -> None:
        """Begins as a masked rank, in the place of a process that died: what that one proposed last counts no more.

        Raises PeerError where the others have not masked it.
        """
        epoch, (masked, _) = self._decisions.read().newest() or (0, self._decisions.begin)
        if not masked >> self._rank & 1:
            text = f"rank {self._rank} is started anew, but the others have not masked the one before"
            raise PeerError(text, self._rank, "start", epoch)
        self._own[_WANTS_REJOIN] = 0
        self._propose(epoch, masked)
        self._begin(epoch, self.others, is_masked=True)

    def ask_to_rejoin(self, is_new: bool = False) -> None:
        """Shows the others that this rank, which was masked, wants to rejoin. is_new: as a new process

        It has ended all its calls: whatever it wrote in them lies before this word in the order of its stores.
        """
        self._own[_WANTS_REJOIN] = 2 if is_new else 1

    def try_rejoin(self) -> bool:
        """Returns whether the others have regrouped with this rank; to be called again until they have.

        Raises PeerError when no other rank lives.
        """
        others = [rank for rank in range(len(self._pages)) if rank != self._rank and self._lives(rank)]
        if not others:
            raise PeerError(
                f"rank {self._rank} was masked and no other rank lives; start the ranks again",
                self._rank,
                "rejoin",
                self.epoch,
            )
        for rank in others:
            proposed, masked = self._proposal(rank)
            if proposed > self.epoch and not masked >> self._rank & 1:
                try:
                    self._agree(proposed, masked)
                except PeerError:
                    return False  # some of them have not seen the request yet
                self._own[_WANTS_REJOIN] = 0
                return True
        return False

    def waiting_to_rejoin(self) -> list[int]:
        """Returns the masked ranks that want to rejoin."""
        asking = [rank for rank in self.masked if self._pages[rank][_WANTS_REJOIN] and self._lives(rank)]
        # A new process in the place of one that died while it asked is not there yet.
        return [rank for rank in asking if self._heartbeat.silent_s(rank) < _SILENT_S]

    def is_new(self, rank: int) -> bool:
        """Returns whether a rank that waits to rejoin is a new process, in the place of one that died."""
        return int(self._pages[rank][_WANTS_REJOIN]) == 2

    def _agree(self, epoch: int, masked: int) -> list[int]:
        decisions = self._decisions
        self._propose(epoch, masked)
        deadline_s = time.monotonic() + 2 * self._deadline_s  # a rank sees that the step is void only once it waits
        while decisions.read().decided(epoch) is None:
            waiting_for = []
            for rank in range(len(self._pages)):
                proposed, theirs = self._proposal(rank)
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
            gone = [rank for rank in waiting_for if late or self._is_silent(rank) or not self._lives(rank)]
            if gone:
                masked |= _mask(gone)
                self._propose(epoch, masked)
            time.sleep(_POLL_S)
        decided, _ = decisions.decide(epoch, Decision(masked, (0,)))
        self._suspects.clear()
        if decided >> self._rank & 1:
            self._begin(epoch, self.others, is_masked=True)
            raise self._masked_by("by the others", "regroup", epoch)
        members = [rank for rank in range(len(self._pages)) if not decided >> rank & 1]
        self._begin(epoch, [rank for rank in members if rank != self._rank], is_masked=False)
        return members

    def _begin(self, epoch: int, others: list[int], is_masked: bool) -> None:
        self.epoch, self.others, self.is_masked = epoch, others, is_masked
        self._begin_epoch(epoch, others)

    def _propose(self, epoch: int, masked: int) -> None:
        self._own[_MASK] = masked
        self._own[_PROPOSED] = epoch

    def _proposal(self, rank: int) -> tuple[int, int]:
        """Returns a rank's proposed epoch, and the ranks that it masks in it."""
        page = self._pages[rank]
        while True:
            proposed, masked = int(page[_PROPOSED]), int(page[_MASK])
            if proposed == page[_PROPOSED]:
                return proposed, masked

    def _is_silent(self, rank: int) -> bool:
        return self.suspect_after_s is not None and self._heartbeat.silent_s(rank) > self.suspect_after_s

    def _is_waiting(self, rank: int) -> bool:
        # A rank that hangs shows no sign for a whole deadline; on a busy machine a healthy one may pause briefly.
        recent_s = max(_WAITING_NOW_S, self._deadline_s / 4)
        return (time.monotonic_ns() - int(self._pages[rank][_WAITING_NS])) * 1e-9 < recent_s

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
            return self._masked_by(f"by rank {by}", phase, sequence)
        new = [rank for rank in self.others if masked >> rank & 1]
        whom = f"it misses rank {new[0]}" if new else "it goes on with another group"
        return PeerError(
            f"rank {by} voided the step in {phase} {sequence}: {whom}", new[0] if new else -1, phase, sequence
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

    def __init__(self, rank: int, pages: Sequence[Int64Array]):
        """pages: of all ranks"""
        self._rank = rank
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
        return self._silent[rank] * BEAT_S

    def beat(self) -> None:
        """Gives a sign of life, and looks for those of the others."""
        self._beats[self._rank][0] += 1
        for rank, beats in enumerate(self._beats):
            count = int(beats[0])
            self._silent[rank] = self._silent[rank] + 1 if count == self._seen[rank] and count else 0
            self._seen[rank] = count


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
