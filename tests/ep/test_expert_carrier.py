"""The contract of all carriers of experts, on real processes; and whole moves over each of them."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.ep.expert_carrier_collective import CollectiveCarrier
from moe_serve.ep.expert_carrier_shm import ShmCarrier
from moe_serve.ep.expert_transfer import (
    ExpertCarrier,
    IncomingExpert,
    NoCarrier,
    OutgoingExpert,
    Transfers,
    pieces_of,
)
from moe_serve.ep.weight_mover import MoveFault, MoveSettings, WeightMover, make_carrier
from moe_serve.eplb.migration.moves import MigrationRound, RoundLimits, SlotMove, apply_round
from moe_serve.eplb.migration.plan import plan_migration
from moe_serve.eplb.placement import Placement
from moe_serve.errors import CapacityError
from moe_serve.topology import Topology
from tests.dispatch.hosts.pretended import on_hosts
from tests.ep.moving import BUSY_S, FORMS, check_slots, make_stores, random_placement
from tests.ranks import run_ranks

SIZES = {"weight": 100, "scale": 7, "bias": 0}  # bytes of the tensors of an expert, in pieces of 24 bytes
SLOT_BYTES = sum(SIZES.values())
GUARD_S = 30.0
Edges = list[tuple[int, int]]  # source rank, destination rank of each expert

carriers = pytest.mark.parametrize("kind", ["shm", "hosts", "collective"])


def make(kind: str, group: EpGroup, slot_bytes: int = SLOT_BYTES, staging_slots: int = 2) -> ExpertCarrier:
    """Returns the carrier that ranks of one host, or of several, get, with pieces as small as the experts here.

    kind: "hosts": of several with a link
    """
    if kind == "hosts":
        group = on_hosts(group, (0, 0, 1))
    carrier = make_carrier(replace(group, num_nodes=1 if kind == "shm" else 2), slot_bytes, staging_slots)
    assert isinstance(carrier, CollectiveCarrier if kind == "collective" else ShmCarrier)
    carrier.piece_bytes = max(24, slot_bytes // 8)
    return carrier


def agree(group: EpGroup, done: bool) -> bool:
    """Returns whether all ranks are done."""
    flag = torch.tensor([int(done)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group.process_group)
    return bool(flag)


def expert_of(number: int, edge: int) -> dict[str, Tensor]:
    """Returns an expert that says in which round it travels and from where to where."""
    rng = torch.Generator().manual_seed(1000 * number + edge)
    return {name: torch.randint(0, 256, (n,), dtype=torch.uint8, generator=rng) for name, n in SIZES.items()}


class Round:
    """One rank's part of a round with an expert along each edge."""

    def __init__(self, rank: int, carrier: ExpertCarrier, number: int, edges: Edges):
        self.carrier = carrier
        cut = lambda expert: pieces_of(expert, carrier.piece_bytes)  # noqa: E731
        self.outgoing = [
            OutgoingExpert(dst, cut(expert_of(number, edge))) for edge, (src, dst) in enumerate(edges) if src == rank
        ]
        self.staged, self.wanted, self.incoming = [], [], []
        for edge, (src, dst) in enumerate(edges):
            if dst == rank:
                index = [e for e, (source, _) in enumerate(edges) if source == src].index(edge)
                self.staged.append({name: torch.zeros(n, dtype=torch.uint8) for name, n in SIZES.items()})
                self.wanted.append(expert_of(number, edge))
                self.incoming.append(IncomingExpert(0, src, index, cut(self.staged[-1])))
        num_pieces = len(cut(expert_of(0, 0))) if edges else 0
        carrier.start(Transfers(1 + number, num_pieces, self.outgoing, self.incoming))

    def finish(self, group: EpGroup) -> list[bool | None]:
        """Carries until all ranks have everything; returns whether each expert came as it was sent."""
        deadline = time.monotonic() + GUARD_S
        done = False
        while not agree(group, done):
            assert time.monotonic() < deadline, "the experts did not arrive"
            self.carrier.carry(1)
            done = all(expert.is_right() is not None for expert in self.incoming)
        self.carrier.end()
        return [expert.is_right() for expert in self.incoming]

    def check(self, group: EpGroup) -> None:
        assert all(self.finish(group))
        for staged, wanted in zip(self.staged, self.wanted, strict=True):
            assert all(torch.equal(staged[name], wanted[name]) for name in SIZES)


GRAPHS: list[Edges] = [
    [(0, 1), (1, 2), (2, 0)],
    [(0, 1), (1, 0)],
    [(0, 1), (0, 1), (1, 2), (2, 1)][:3],
    [(2, 0), (0, 2), (2, 1), (1, 0), (0, 1), (1, 2)],
    [(2, 1)],
    [],
]


def check_rounds(rank: int, group: EpGroup, kind: str) -> None:
    carrier = make(kind, group)
    for number, edges in enumerate(GRAPHS):
        Round(rank, carrier, number, edges).check(group)
    carrier.close()


@carriers
def test_experts_arrive_in_any_pattern_of_ranks(kind: str) -> None:
    run_ranks(3, check_rounds, kind)


def check_ends(rank: int, group: EpGroup, kind: str) -> None:
    carrier = make(kind, group)
    number = 0
    for turns in range(9):
        for edges in GRAPHS[:3]:
            ended = Round(rank, carrier, number, edges)
            for _ in range(turns if rank else 2 * turns):
                carrier.carry(1)
            carrier.end()
            for staged in ended.staged:
                staged["weight"].fill_(99)  # the staging slot serves something else now
            agree(group, True)
            Round(rank, carrier, number + 1, edges[::-1]).check(group)
            assert all(bool((staged["weight"] == 99).all()) for staged in ended.staged)
            number += 2
    for edges in GRAPHS[:3]:  # several are ended before anything of them could travel
        Round(rank, carrier, number, edges)
        carrier.carry(1)
        carrier.end()
        number += 1
    Round(rank, carrier, number, GRAPHS[3]).check(group)
    carrier.close()


@carriers
def test_a_round_may_end_at_any_point_and_leaves_nothing_to_the_next(kind: str) -> None:
    run_ranks(3, check_ends, kind)


def check_quarantine(rank: int, group: EpGroup) -> None:
    carrier = make("collective", group)
    edges = GRAPHS[0]
    Round(rank, carrier, 0, edges)
    if rank == 0:
        assert carrier.carry(1 << 20) > 0
        carrier.end()
        moved = Round(rank, carrier, 1, edges)
        assert carrier.carry(1 << 20) == 0, "its buffers belong to exchanges that the others have not joined"
    agree(group, True)
    if rank != 0:
        carrier.end()
        moved = Round(rank, carrier, 1, edges)
    moved.check(group)
    carrier.close()


def test_a_buffer_that_may_still_be_written_is_not_used_again() -> None:
    run_ranks(3, check_quarantine)


def check_wrong_sum(rank: int, group: EpGroup, kind: str) -> None:
    carrier = make(kind, group)
    edges = GRAPHS[3]
    moved = Round(rank, carrier, 0, edges)
    if rank == 2:
        broken = moved.outgoing[1]  # to rank 1
        broken.checksum = lambda: torch.tensor([1, 2])  # type: ignore[method-assign]
    from_rank_2 = [expert.src_rank == 2 for expert in moved.incoming]
    assert moved.finish(group) == [not (rank == 1 and broken) for broken in from_rank_2]
    carrier.close()


@carriers
def test_an_expert_whose_checksum_differs_is_told_from_the_others(kind: str) -> None:
    run_ranks(3, check_wrong_sum, kind)


def check_close(rank: int, group: EpGroup, kind: str) -> None:
    for turns in range(4):
        carrier = make(kind, group)
        Round(rank, carrier, 0, GRAPHS[0])
        for _ in range(turns * (rank + 1)):
            carrier.carry(1)
        carrier.close()
        agree(group, True)


@carriers
def test_ranks_close_in_the_middle_of_a_round(kind: str) -> None:
    run_ranks(3, check_close, kind)


def check_lost(rank: int, group: EpGroup) -> None:
    placement = Placement(np.arange(4)[None], 4, 2)
    stores = make_stores(placement, rank, FORMS[0], 8, 8)
    carrier = make("collective", group, stores[0].slot_bytes)
    mover = WeightMover(stores, rank, carrier, MoveSettings())
    if rank == 0:
        mover.start(MigrationRound((SlotMove(0, 1, 2, 0, 0),)), 1)
        deadline = time.monotonic() + GUARD_S
        while mover.fault is None and time.monotonic() < deadline:
            mover.advance(BUSY_S)
        assert mover.fault == MoveFault("unreadable", layer_row=0)
        mover.cancel()
        check_slots(stores, rank, placement)
        mover.start(MigrationRound((SlotMove(0, 1, 3, 0, 1),)), 1)
        mover.advance(BUSY_S)
        assert mover.fault == MoveFault("unreadable", layer_row=0), "it stays broken, and says so at once"
    mover.close()  # rank 1 goes away at once
    del mover, carrier
    agree(group, True)


def test_a_connection_that_breaks_is_a_fault_of_the_round() -> None:
    run_ranks(2, check_lost)


def test_one_rank_needs_no_carrier() -> None:
    carrier = make_carrier(EpGroup(0, 1, torch.device("cpu")), SLOT_BYTES, 1)
    assert isinstance(carrier, NoCarrier)
    carrier.start(Transfers(1, 0, [], []))
    assert carrier.carry(1 << 20) == 0
    carrier.end()
    carrier.close()


def check_too_large(rank: int, group: EpGroup) -> str:
    with pytest.raises(CapacityError) as raised:
        make_carrier(group, 1 << 50, 2)
    return str(raised.value)


def test_send_buffers_that_do_not_fit_say_which_setting_to_lower() -> None:
    text, _ = run_ranks(2, check_too_large)
    assert text.startswith("send buffers for moving experts take up to 4194304.00 GiB of /dev/shm for 2 ranks")
    assert "lower eplb.staging_slots or set eplb.mode: static" in text


def check_moves(rank: int, group: EpGroup, kind: str) -> int:
    """Moves through random placements; now and then all ranks cancel a round wherever they are."""
    num_rounds = 0
    for seed, form in enumerate(FORMS):
        rng = np.random.default_rng(seed)
        topology = Topology(1, 3)
        placement = random_placement(rng, 2, 5, 3, 3)
        stores = make_stores(placement, rank, form, 8, 5)
        settings = MoveSettings(staging_slots=2)
        carrier = make(kind, group, max(store.slot_bytes for store in stores))
        mover = WeightMover(stores, rank, carrier, settings)
        for _ in range(2):
            new = random_placement(rng, 2, 5, 3, 3, placement.version)
            for migration_round in plan_migration(placement, new, topology, RoundLimits(2), "none").rounds:
                if rng.random() < 0.2:
                    mover.start(migration_round, placement.version + 1)
                    for _ in range(int(rng.integers(8)) + rank):
                        mover.advance(BUSY_S)
                    mover.cancel()
                    break
                mover.start(migration_round, placement.version + 1)
                while not agree(group, bool(mover.staged)):
                    mover.advance(BUSY_S)
                    assert mover.fault is None
                check_slots(stores, rank, placement)
                placement = apply_round(placement, migration_round)
                mover.activate(placement.version)
                check_slots(stores, rank, placement)
                num_rounds += 1
        mover.close()
    return num_rounds


@carriers
def test_every_form_of_expert_moves_between_processes(kind: str) -> None:
    assert min(run_ranks(3, check_moves, kind)) > 10
