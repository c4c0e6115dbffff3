"""Who takes part: late and dead peers are reported, survivors agree on a mask, a late rank comes back after a fence.

A wait that ends without its peer voids the step: nothing is sampled from it. Every survivor then calls `regroup` (the
engine learns in its next exchange that a step was voided), all agree on who is out, and the next epoch begins with new
numbers; the step is run again with a placement that needs no rank that is out. Whatever a rank that is out still writes
lies in its own lanes with stamps of an old epoch, and nobody looks there. It comes back by `rejoin`, when the others
regroup with it; a process that died is replaced by a new one, in new segments.

Each rank owns a page of words that all others may read: the epoch it proposes, whom it leaves out of that, when it was
last seen waiting, and whether it would like to come back. Sets of ranks are bit masks. Within an epoch a proposal only
grows, and a rank leaves `regroup` when all that it has not left out propose the same: so all leave with the same set.
"""

import time
from collections.abc import Iterable

from moe_serve.dispatch.channel import Peers
from moe_serve.dispatch.inbox import Int64Array, owner_words
from moe_serve.dispatch.symmetric import SymmetricMemory
from moe_serve.errors import PeerError

MAX_RANKS = 62  # bits of a mask
_PROPOSED, _LEFT_OUT, _WAITING_NS, _WANTS_BACK = range(4)
_WAITING_NOW_S = 0.03  # a rank that was seen waiting so recently is held up by somebody else
_POLL_S = 0.0002


class Membership:
    """The group as one rank sees it."""

    def __init__(self, memory: SymmetricMemory, deadline_s: float):
        assert memory.num_ranks <= MAX_RANKS, f"more than {MAX_RANKS} ranks on one host"
        self._memory = memory
        self._rank = memory.rank
        self._deadline_s = deadline_s
        self._pages: list[Int64Array] = [owner_words(memory.region(rank)) for rank in range(memory.num_ranks)]
        self._own = self._pages[self._rank]
        self.peers: Peers

    def check(self, missing: list[int], phase: str, sequence: int, waited_s: float) -> None:
        """Raises PeerError when waiting for these ranks is in vain; called now and then by a rank that waits."""
        self._own[_WAITING_NS] = time.monotonic_ns()
        for rank in self.peers.others:
            proposed, left_out = self._proposal(rank)
            if proposed > self.peers.epoch:
                raise self._voided(rank, left_out, phase, sequence)
        for rank in missing:
            if not self._memory.lives(rank):
                raise PeerError(f"rank {rank} died before {phase} {sequence}", rank, phase, sequence)
        if waited_s <= self._deadline_s:
            return
        # A peer that is itself waiting is not the one to blame, unless nobody else turns up in as much time again.
        stuck = [rank for rank in missing if not self._is_waiting(rank)]
        if stuck or waited_s > 2 * self._deadline_s:
            rank = (stuck or missing)[0]
            raise PeerError(
                f"rank {rank} did not arrive in {phase} {sequence} within {self._deadline_s:g} s; if its steps are "
                "really that slow, raise dispatch.deadline_s",
                rank,
                phase,
                sequence,
            )

    def regroup(self, suspects: Iterable[int] = (), joining: Iterable[int] = ()) -> list[int]:
        """Agrees with all that are left on who takes part from here on, and begins a new epoch; returns its ranks.

        suspects: ranks known to be late or dead;  joining: ranks outside that wait in `rejoin`, the same on all ranks
        Raises PeerError when the others have left this rank out.
        """
        members = {self._rank, *self.peers.others, *joining}
        everybody = set(range(self._memory.num_ranks))
        return self._agree(self.peers.epoch + 1, _mask((everybody - members) | (set(suspects) - {self._rank})))

    def rejoin(self, timeout_s: float) -> list[int]:
        """Comes back after having been left out: waits for the others to regroup with this rank; returns the ranks.

        Raises PeerError when they do not do so in time.
        """
        self._own[_WANTS_BACK] = 1
        deadline_s = time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline_s:
                for rank in range(self._memory.num_ranks):
                    proposed, left_out = self._proposal(rank)
                    if rank != self._rank and proposed > self.peers.epoch and not left_out >> self._rank & 1:
                        return self._agree(proposed, left_out)
                time.sleep(_POLL_S)
        finally:
            self._own[_WANTS_BACK] = 0
        raise PeerError(
            f"rank {self._rank} was left out and not taken back within {timeout_s:g} s; start it anew",
            self._rank,
            "rejoin",
            self.peers.epoch,
        )

    def wanting_back(self) -> list[int]:
        """Returns the ranks outside that wait in `rejoin`."""
        inside = {self._rank, *self.peers.others}
        return [rank for rank, page in enumerate(self._pages) if rank not in inside and page[_WANTS_BACK]]

    def _agree(self, epoch: int, left_out: int) -> list[int]:
        self._propose(epoch, left_out)
        deadline_s = time.monotonic() + 2 * self._deadline_s  # the others see that the step is void only when they wait
        while True:
            waiting_for = []
            for rank in range(self._memory.num_ranks):
                if rank == self._rank or left_out >> rank & 1:
                    continue
                proposed, theirs = self._proposal(rank)
                if proposed >= epoch and theirs >> self._rank & 1:
                    raise self._voided(rank, theirs, "regroup", epoch)
                if proposed == epoch and theirs & ~left_out:
                    left_out |= theirs
                    self._propose(epoch, left_out)
                if proposed != epoch or theirs != left_out:
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
        members = [rank for rank in range(self._memory.num_ranks) if not left_out >> rank & 1]
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
        return (time.monotonic_ns() - int(self._pages[rank][_WAITING_NS])) * 1e-9 < _WAITING_NOW_S

    def _voided(self, by: int, left_out: int, phase: str, sequence: int) -> PeerError:
        if left_out >> self._rank & 1:
            text = f"rank {self._rank} came too late and was left out by rank {by}; rejoin, or start it anew"
            return PeerError(text, self._rank, phase, sequence)
        new = [rank for rank in self.peers.others if left_out >> rank & 1]
        missing = new[0] if new else by
        return PeerError(
            f"rank {by} voided the step in {phase} {sequence}: it misses rank {missing}", missing, phase, sequence
        )


def _mask(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in set(ranks))
