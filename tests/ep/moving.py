"""Ranks that move tiny experts whose bytes say which expert of which layer they are, for the tests of the mover."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.shm.memory import Mappings, ShmMemory
from moe_serve.ep.expert_carrier_shm import ShmCarrier, region_bytes
from moe_serve.ep.expert_form import ExpertForm, SlotForm
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.expert_transfer import ExpertCarrier, NoCarrier
from moe_serve.ep.weight_mover import MoveSettings, WeightMover
from moe_serve.eplb.migration.moves import MigrationRound
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.forms import INT4, GroupForm
from tests.dispatch.shm.regions import map_anonymous

LARGER = GroupForm(8, 16, "two_levels", 32)
BUSY_S = 1e-9  # a step so short that every turn carries one piece
Forms = tuple[ExpertForm, torch.dtype, bool, bool]  # the last two: packed for the compiled CPU kernels, with biases
FORMS: tuple[Forms, ...] = (
    ("dense", torch.float32, False, False),
    ("dense", torch.bfloat16, False, False),
    ("fp8", torch.bfloat16, False, False),
    ("int8", torch.float32, False, False),
    ("dense", torch.bfloat16, True, True),
    ("fp8", torch.float32, True, False),
    ("mxfp4", torch.float32, True, True),
    ("int4", torch.float32, True, False),
    ("groups", torch.float32, True, True),
)


@lru_cache(maxsize=4096)
def expert_bytes(layer: int, expert: int, size: int) -> Tensor:
    """Returns the bytes of an expert in its slot, a function of (layer, expert)."""
    return torch.from_numpy(np.random.default_rng([layer, expert]).integers(0, 256, size, dtype=np.uint8))


def raw(store: ExpertStore, slot: int) -> Tensor:
    """Returns a copy of all bytes of a slot, in order."""
    return torch.cat([tensor.view(-1).view(torch.uint8) for tensor in store.slot(slot).values()])


def fill(store: ExpertStore, slot: int, layer: int, expert: int) -> None:
    """Writes the bytes of an expert into a slot."""
    left = expert_bytes(layer, expert, store.slot_bytes)
    for tensor in store.slot(slot).values():
        flat = tensor.view(-1).view(torch.uint8)
        flat.copy_(left[: len(flat)])
        left = left[len(flat) :]


def make_stores(placement: Placement, rank: int, form: Forms, hidden: int, width: int) -> list[ExpertStore]:
    """Returns the stores of a rank, filled as a placement says."""
    slots = placement.slots_per_rank
    stores = []
    for layer, row in enumerate(placement.physical_to_logical.tolist()):
        groups = (INT4, LARGER) if layer % 2 else (INT4, INT4)  # layers of different sizes
        stored = groups if form[0] == "groups" else None
        kept = SlotForm(form[0], hidden, width, form[1], form[2], has_bias=form[3], stored_groups=stored)
        tensors = {name: torch.zeros(slots, *shape, dtype=dtype) for name, (shape, dtype) in kept.tensors.items()}
        store = ExpertStore(tensors, kept)
        for slot, expert in enumerate(row[rank * slots :][:slots]):
            if expert >= 0:
                fill(store, slot, layer, expert)
        stores.append(store)
    return stores


def check_slots(stores: Sequence[ExpertStore], rank: int, placement: Placement) -> None:
    """Asserts that every slot of a rank holds the bytes of the expert that the placement names."""
    slots = placement.slots_per_rank
    for layer, store in enumerate(stores):
        for slot, expert in enumerate(placement.physical_to_logical[layer, rank * slots :][:slots].tolist()):
            if expert >= 0:
                right = torch.equal(raw(store, slot), expert_bytes(layer, expert, store.slot_bytes))
                assert right, f"slot {slot} of layer {layer} on rank {rank} does not hold expert {expert}"


class VirtualRanks:
    """The movers of all ranks in one thread, over anonymous shared memory; every call to one of them is explicit."""

    def __init__(
        self,
        placement: Placement,
        form: Forms = FORMS[0],
        hidden: int = 2,
        width: int = 1,
        settings: MoveSettings = MoveSettings(),
        piece_bytes: int = 8,
    ):
        ranks = range(placement.num_ranks)
        self.placement = placement
        self.stores = [make_stores(placement, rank, form, hidden, width) for rank in ranks]
        self.slot_bytes = max(store.slot_bytes for store in self.stores[0])
        self.shared = map_anonymous(len(ranks), region_bytes(self.slot_bytes, settings.staging_slots))
        self.movers = [
            WeightMover(
                self.stores[rank],
                rank,
                shm_carrier(self.shared, rank, self.slot_bytes, settings.staging_slots, piece_bytes),
                settings,
            )
            for rank in ranks
        ]
        self.addresses = self._addresses()

    @property
    def all_staged(self) -> bool:
        return all(mover.staged for mover in self.movers)

    def start(self, migration_round: MigrationRound) -> None:
        for mover in self.movers:
            mover.start(migration_round, self.placement.version + 1)

    def advance(self, rng: np.random.Generator, num_turns: int | None = None) -> int:
        """Gives turns to ranks at random until all have staged, or num_turns; returns how many it gave."""
        turns = 0
        while turns < 10_000 if num_turns is None else turns < num_turns:
            if num_turns is None and self.all_staged:
                return turns
            self.movers[int(rng.integers(len(self.movers)))].advance(BUSY_S)
            turns += 1
        assert num_turns is not None, f"not staged after {turns} turns: {[mover.fault for mover in self.movers]}"
        return turns

    def activate(self, after: Placement) -> None:
        """after: the placement that the round leads to"""
        for mover in self.movers:
            mover.activate(after.version)
        self.placement = after

    def cancel(self) -> None:
        for mover in self.movers:
            mover.cancel()

    def check(self) -> None:
        """Asserts that all slots hold what the placement says, at the addresses that they had."""
        for rank, stores in enumerate(self.stores):
            check_slots(stores, rank, self.placement)
        assert self._addresses() == self.addresses

    def _addresses(self) -> list[int]:
        return [store.slot(0)[name].data_ptr() for stores in self.stores for store in stores for name in store.names]


def shm_carrier(
    shared: Mappings, rank: int, slot_bytes: int, staging_slots: int, piece_bytes: int = 8
) -> ExpertCarrier:
    if len(shared) == 1:
        return NoCarrier()
    memory = ShmMemory(rank, shared, watch_processes=False)
    return ShmCarrier(memory, slot_bytes, staging_slots, piece_bytes)


def random_placement(
    rng: np.random.Generator, num_layers: int, num_logical: int, num_ranks: int, slots_per_rank: int, version: int = 0
) -> Placement:
    """Returns experts in any slots, some of them empty, some with several replicas, also on one rank."""
    rows = []
    for _ in range(num_layers):
        extra = rng.integers(-1, num_logical, num_ranks * slots_per_rank - num_logical)
        rows.append(rng.permutation(np.concatenate([np.arange(num_logical), extra])))
    return Placement(np.array(rows), num_logical, num_ranks, version=version)
