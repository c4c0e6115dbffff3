"""Who takes part: ranks that are late or dead are reported, the others agree on a mask, a late rank rejoins.

A wait that ends without its peer voids the step: nothing is sampled from it. Every remaining rank then calls `regroup`
(a rank that waits anywhere sees within milliseconds that a step was voided). All agree on the ranks to mask, the next
epoch begins with new numbers, and the step runs again with a placement that needs no masked rank. What a masked rank
still writes lies in its own slices with flags of an old epoch, and nobody reads it. It rejoins when the others regroup
with it. A process that died is replaced by a new one, in new segments.

Each rank owns a page of words that all others may read: the epoch that it proposes, the ranks that it masks in it, when
it was last seen waiting, and whether it wants to rejoin. Sets of ranks are bit masks.

Proposing: a rank that misses a peer proposes the next epoch without it. A proposal only grows, by what others propose
and by ranks that stay away for two deadlines. A rank goes on when all that it has not masked propose the same.
Agreeing: the first record that is appended to `decisions` defines the epoch, also for ranks that proposed something
else. So two ranks that give each other up at the same moment do not both go on.
Not hanging: each wait is for ranks that are not masked, and those are masked in time; a rank that finds the epoch
decided waits for nobody. A masked rank finds that in `decisions` whenever it comes.
"""

import time
from collections.abc import Iterable

from moe_serve.dispatch.capabilities import TRANSPORTS
from moe_serve.dispatch.shm.channel import Peers
from moe_serve.dispatch.shm.memory import ShmMemory
from moe_serve.dispatch.shm.region import Int64Array, owner_words
from moe_serve.errors import PeerError

_PROPOSED, _LEFT_OUT, _WAITING_NS, _WANTS_BACK = range(4)
_WAITING_NOW_S = 0.03  # a rank that was seen waiting so recently is held up by another one
_PAUSE_S = 0.5  # a waiting process checks every few milliseconds; after such a gap it was suspended
_POLL_S = 0.0002


class Membership:
    """The group as one rank sees it."""

    def __init__(self, memory: ShmMemory, deadline_s: float):
        max_ranks = TRANSPORTS["shm"].max_ranks
        assert max_ranks is None or memory.num_ranks <= max_ranks, f"more than {max_ranks} ranks on one host"
        self._memory = memory
        self._rank = memory.rank
        self._deadline_s = deadline_s
        self._pages: list[Int64Array] = [owner_words(memory.region(rank)) for rank in range(memory.num_ranks)]
        self._own = self._pages[self._rank]
        self._suspects: set[int] = set()
        self._checked_s = self._paused_s = 0.0
        self.is_left_out = False  # the others go on without this rank, until they have taken it back
        self.peers: Peers

    @property
    def epoch(self) -> int:
        """Counts the groups; the same on all ranks that take part."""
        return self.peers.epoch

    @property
    def members(self) -> list[int]:
        """The ranks that take part, this one included, ascending."""
        return sorted([self._rank, *self.peers.others])

    @property
    def masked(self) -> list[int]:
        """The ranks that are out."""
        return [rank for rank in range(self._memory.num_ranks) if rank != self._rank and rank not in self.peers.others]

    @property
    def suspects(self) -> frozenset[int]:
        """The ranks that this one has found late or dead in this epoch."""
        return frozenset(self._suspects)

    @property
    def is_void(self) -> bool:
        """Whether this epoch is over, for this rank or for another one: all must regroup."""
        return bool(self._suspects) or any(self._proposal(rank)[0] > self.epoch for rank in self.peers.others)

    def check(
        self, missing: list[int], phase: str, sequence: int, waited_s: float, deadline_s: float | None = None
    ) -> None:
        """Raises PeerError when waiting for these ranks is in vain; called now and then by a rank that waits.

        deadline_s: of this wait; None: the usual one
        """
        deadline_s = deadline_s or self._deadline_s
        self._own[_WAITING_NS] = time.monotonic_ns()
        self.check_epoch_stands(phase, sequence)
        dead = [rank for rank in missing if not self._memory.lives(rank)]
        if dead:
            self._suspects.update(dead)
            raise PeerError(f"rank {dead[0]} died before {phase} {sequence}", dead[0], phase, sequence)
        waited_s -= self._own_pause_s(waited_s)
        if waited_s <= deadline_s or not missing:
            return
        # A peer that is itself waiting is not the one to blame, unless nobody else turns up in as much time again.
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

    def check_epoch_stands(self, phase: str, sequence: int) -> None:
        """Raises PeerError when another rank has begun to leave this epoch: what was just read of it may be newer."""
        for rank in self.peers.others:
            proposed, left_out = self._proposal(rank)
            if proposed > self.peers.epoch:
                raise self._voided(rank, left_out, phase, sequence)

    def regroup(self, suspects: Iterable[int] = (), joining: Iterable[int] = ()) -> list[int]:
        """Agrees with all that are left on who takes part from here on, and begins a new epoch; returns its ranks.

        suspects: ranks to leave out beside those that `check` found late or dead
        joining:  ranks outside that wait to come back, the same on all ranks
        Raises PeerError, naming this rank, when the others have left it out.
        """
        everybody = set(range(self._memory.num_ranks))
        members = {self._rank, *self.peers.others, *joining} - ({*suspects, *self._suspects} - {self._rank})
        return self._agree(self.epoch + 1, _mask(everybody - members))

    def ask_back(self) -> None:
        """Shows the others that this rank, which was left out, would like to come back.

        It has ended all its calls: whatever it wrote in them lies before this word in the order of its stores.
        """
        self._own[_WANTS_BACK] = 1

    def taken_back(self) -> bool:
        """Returns whether the others have regrouped with this rank; to be asked again until they have.

        Raises PeerError when no other rank lives.
        """
        others = [rank for rank in range(self._memory.num_ranks) if rank != self._rank and self._memory.lives(rank)]
        if not others:
            raise PeerError(
                f"rank {self._rank} was left out and no other rank lives; start the ranks anew",
                self._rank,
                "rejoin",
                self.epoch,
            )
        for rank in others:
            proposed, left_out = self._proposal(rank)
            if proposed > self.epoch and not left_out >> self._rank & 1:
                try:
                    self._agree(proposed, left_out)
                except PeerError:
                    return False  # some of them did not see the wish in time, and will
                self._own[_WANTS_BACK] = 0
                return True
        return False

    def wanting_back(self) -> list[int]:
        """Returns the ranks outside that would like to come back."""
        return [rank for rank in self.masked if self._pages[rank][_WANTS_BACK] and self._memory.lives(rank)]

    def _agree(self, epoch: int, left_out: int) -> list[int]:
        decisions = self._memory.decisions
        self._propose(epoch, left_out)
        deadline_s = time.monotonic() + 2 * self._deadline_s  # the others see that the step is void only when they wait
        while decisions.answer(epoch) is None:
            waiting_for = []
            for rank in range(self._memory.num_ranks):
                proposed, theirs = self._proposal(rank)
                if rank == self._rank or left_out >> rank & 1 or proposed > epoch:
                    continue
                # Somebody who leaves this rank out may have decided so: that is to be waited for, not copied.
                if proposed == epoch and not theirs >> self._rank & 1:
                    if theirs & ~left_out:
                        left_out |= theirs
                        self._propose(epoch, left_out)
                    if theirs == left_out:
                        continue
                waiting_for.append(rank)
            waiting_for = [rank for rank in waiting_for if not left_out >> rank & 1]
            if not waiting_for:
                break
            late = time.monotonic() > deadline_s
            gone = [rank for rank in waiting_for if late or not self._memory.lives(rank)]
            if gone:
                left_out |= _mask(gone)
                self._propose(epoch, left_out)
            time.sleep(_POLL_S)
        decided = decisions.answer(epoch)
        if decided is None:
            decided = decisions.decide(epoch, left_out)
        self._suspects.clear()
        if decided >> self._rank & 1:
            self.peers.epoch, self.is_left_out = epoch, True
            raise self._left_out("by the others", "regroup", epoch)
        self.is_left_out = False
        members = [rank for rank in range(self._memory.num_ranks) if not decided >> rank & 1]
        self.peers.begin_epoch(epoch, [rank for rank in members if rank != self._rank])
        return members

    def _propose(self, epoch: int, left_out: int) -> None:
        self._own[_LEFT_OUT] = left_out
        self._own[_PROPOSED] = epoch

    def _proposal(self, rank: int) -> tuple[int, int]:
        """Returns a rank's proposed epoch, and whom it leaves out of that."""
        page = self._pages[rank]
        while True:
            proposed, left_out = int(page[_PROPOSED]), int(page[_LEFT_OUT])
            if proposed == page[_PROPOSED]:
                return proposed, left_out

    def _is_waiting(self, rank: int) -> bool:
        # Who hangs has not looked for a whole deadline; on a busy machine a healthy rank may not for many milliseconds.
        recent_s = max(_WAITING_NOW_S, self._deadline_s / 4)
        return (time.monotonic_ns() - int(self._pages[rank][_WAITING_NS])) * 1e-9 < recent_s

    def _own_pause_s(self, waited_s: float) -> float:
        """Returns for how long of this wait the process itself did not run: nobody is late for that."""
        now_s = time.monotonic()
        gap_s, self._checked_s = now_s - self._checked_s, now_s
        if gap_s > waited_s:
            self._paused_s = 0.0  # the first look of this wait
        elif gap_s > _PAUSE_S:
            self._paused_s += gap_s
        return self._paused_s

    def _voided(self, by: int, left_out: int, phase: str, sequence: int) -> PeerError:
        if left_out >> self._rank & 1:
            return self._left_out(f"by rank {by}", phase, sequence)
        new = [rank for rank in self.peers.others if left_out >> rank & 1]
        whom = f"it misses rank {new[0]}" if new else "it goes on with another group"
        return PeerError(
            f"rank {by} voided the step in {phase} {sequence}: {whom}", new[0] if new else -1, phase, sequence
        )

    def _left_out(self, whose: str, phase: str, sequence: int) -> PeerError:
        text = f"rank {self._rank} came too late and was left out {whose}; rejoin, or start it anew"
        return PeerError(text, self._rank, phase, sequence)


def _mask(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in set(ranks))
