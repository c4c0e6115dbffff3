"""Brings the experts of migration rounds into the slots of this rank while it serves.

    start      a round begins; nothing is copied
    advance    between two steps: carries a few pieces into staging slots, and out of this rank's slots
    activate   at a step boundary, the same on all ranks: moves inside the rank, then staging slots into slots
    cancel     instead of activate: as if the round had never been

Slots change in `activate` alone, so a round that fails leaves no trace. All sources are read as they were before the
round: they do not change before all ranks have staged all experts. Addresses and shapes never change.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.expert_transfer import ExpertCarrier, IncomingExpert, OutgoingExpert, Transfers, pieces_of
from moe_serve.ep.move_budget import MoveBudget, MoveDeadline
from moe_serve.ep.rank_moves import RankMoves, moves_of_rank, round_id
from moe_serve.eplb.migration.moves import MigrationRound
from moe_serve.errors import LostConnectionError

Reason = Literal["checksum", "late", "unreadable"]


@dataclass(frozen=True)
class MoveSettings:
    """How experts move.

    staging_slots: most experts that a rank sends, or receives, in a round
    step_share:    how much longer a step may be while experts move
    deadline_s:    a round that takes longer is given up
    """

    staging_slots: int = 1
    step_share: float = 0.05
    deadline_s: float = 60.0


@dataclass(frozen=True)
class MoveFault:
    """Why this rank gives a round up.

    reason:    "checksum": an expert arrived with other bytes than were sent;  "late": it did not arrive in time;
               "unreadable": the connection to another rank broke
    layer_row: of the expert, in the placement
    """

    reason: Reason
    layer_row: int


class WeightMover:
    """Moves experts between the slots of this rank and those of others, one round at a time.

    running: version of the running round, 0 = none
    staged:  version of the round whose experts this rank has staged and checked, 0 = none
    fault:   why this rank gives the running round up; None = it does not
    """

    def __init__(self, stores: Sequence[ExpertStore], rank: int, carrier: ExpertCarrier, settings: MoveSettings):
        """stores: by row of the placement, all of equal shapes;  rank: of the placement"""
        assert len({store.shapes for store in stores}) == 1, "the layers have experts of different shapes"
        self._stores = stores
        self._rank = rank
        self._carrier = carrier
        self._settings = settings
        self._staging = stores[0].staging(settings.staging_slots)
        self._budget = MoveBudget(settings.step_share)
        self._moves: RankMoves
        self._incoming: list[IncomingExpert] = []
        self._deadline: MoveDeadline
        self.running = self.staged = 0
        self.fault: MoveFault | None = None

    def start(self, migration_round: MigrationRound, version: int) -> None:
        """Begins a round that leads to this version of the placement, > 0. Copies nothing."""
        assert version > 0, f"version {version} cannot be told from no round"
        assert not self.running, f"round {version} starts while round {self.running} runs"
        moves = moves_of_rank(migration_round, self._rank, self._stores[0].num_slots)
        room = self._settings.staging_slots
        assert max(len(moves.incoming) + moves.needs_spare, len(moves.outgoing)) <= room, (
            f"round {version} needs more than {room} staging slots on rank {self._rank}"
        )
        self._moves = moves
        self._incoming = [
            IncomingExpert(move.layer, move.src_rank, index, self._pieces(self._staging, staging_slot))
            for staging_slot, (move, index) in enumerate(moves.incoming)
        ]
        outgoing = [
            OutgoingExpert(move.dst_rank, self._pieces(self._stores[move.layer], self._local_slot(move.src_slot)))
            for move in moves.outgoing
        ]
        num_pieces = len(self._pieces(self._staging, 0)) if moves.crosses else 0
        self._carrier.start(Transfers(round_id(migration_round, version), num_pieces, outgoing, self._incoming))
        self._deadline = MoveDeadline(self._settings.deadline_s, time.monotonic())
        self.running = version
        self.staged = 0 if self._incoming else version

    def advance(self, step_s: float) -> None:
        """Carries a part of the round, if one runs, as much as fits between two steps, and checks what is complete.

        Never waits. To be called between any two steps.

        step_s: measured seconds of the last step with rows; 0 = the engine is idle
        """
        if not self.running or self.fault is not None:
            return
        started_s = time.perf_counter()
        num_bytes, is_lost = 0, False
        try:
            num_bytes = self._carrier.carry(self._budget.allowance(step_s))
        except LostConnectionError:
            is_lost = True
        if not self.staged:  # what was staged stays so: the others may have been told already
            self._check(is_lost)
        self._budget.record(num_bytes, time.perf_counter() - started_s)

    def activate(self, version: int) -> None:
        """Writes the experts of a round into the slots, at a step boundary. All ranks have staged it."""
        assert version == self.running == self.staged, f"round {version} is not staged; round {self.running} runs"
        self._carrier.end()
        self._move_inside()
        for staging_slot, (move, _) in enumerate(self._moves.incoming):
            store = self._stores[move.layer]
            store.write_slot(self._local_slot(move.dst_slot), self._staging.slot(staging_slot))
        self.running = self.staged = 0

    def cancel(self) -> None:
        """Ends the running round, if one runs, without effect on any slot."""
        self._carrier.end()
        self.running = self.staged = 0
        self.fault = None

    def close(self) -> None:
        """Gives buffers back. All ranks call it."""
        self.cancel()
        self._carrier.close()

    def _check(self, is_lost: bool) -> None:
        """Sees whether all experts have arrived as they were sent, or something went wrong."""
        is_late = self._deadline.has_passed(time.monotonic())
        rights = [expert.is_right() for expert in self._incoming]
        if False in rights:
            self.fault = MoveFault("checksum", self._incoming[rights.index(False)].layer_row)
        elif None not in rights:
            self.staged = self.running
        elif is_lost or is_late:
            self.fault = MoveFault("unreadable" if is_lost else "late", self._incoming[rights.index(None)].layer_row)

    def _move_inside(self) -> None:
        """Does the moves inside this rank. The staging slot behind the received experts is the spare one."""
        for move in self._moves.local:
            store = self._stores[move.layer]
            if move.parks:
                self._staging.write_slot(len(self._incoming), store.slot(move.dst_slot))
            source = self._staging.slot(len(self._incoming)) if move.from_spare else store.slot(move.src_slot)
            store.write_slot(move.dst_slot, source)

    def _pieces(self, store: ExpertStore, slot: int) -> list[Tensor]:
        return pieces_of(store.slot(slot), self._carrier.piece_bytes)

    def _local_slot(self, slot: int) -> int:
        """Returns a slot of this rank, counted from its first."""
        return slot - self._rank * self._stores[0].num_slots
