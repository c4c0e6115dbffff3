"""What every transport is held to: scenarios that all ranks can compute, their brute-force truth, how to run them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_serve.dispatch.base import AnyAllToAll, BufferLimits, EpGroup, PackedRows, TransportRequest
from moe_serve.dispatch.capabilities import Combine
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.dispatch.shm.transport import make_shm
from moe_serve.dispatch.wire import make_wire
from moe_serve.kernels.rows import weighted_sum_reference
from tests.dispatch.hosts.pretended import on_hosts
from tests.ranks import run_ranks

TRANSPORTS = ("collective", "shm", "shm_plain", "hosts")


@dataclass(frozen=True)
class Scenario:
    """One step of all ranks. Everything is drawn from the seed, so that each rank knows what all others send.

    tokens: of each rank
    gate:   "random", "one_slot" (everything to the last slot), "skewed", "masked" (many -1), "none"
    """

    tokens: tuple[int, ...]
    topk: int
    slots_per_rank: int
    hidden: int
    seed: int = 0
    gate: str = "random"
    wire: str = "auto"
    dtype: torch.dtype = torch.float32

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.slots_per_rank

    def request(self, backend: str, spare_tokens: int = 0, **changes: Any) -> TransportRequest:
        """Returns what a transport for this scenario is made for. spare_tokens: beside those of the scenario"""
        limits = BufferLimits(max(self.tokens) + spare_tokens, self.hidden, self.topk, self.slots_per_rank)
        return replace(TransportRequest(backend, limits, self.dtype, self.wire, deadline_s=20), **changes)

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns hidden [T, H], physical ids [T, K], weights [T, K] of a rank."""
        draw = torch.Generator().manual_seed(1000 * self.seed + rank)
        num_tokens = self.tokens[rank]
        hidden = torch.randn(num_tokens, self.hidden, generator=draw).to(self.dtype)
        # With few slots a token's ids repeat: the same slot twice sends the row twice.
        ids = torch.randint(0, self.num_slots, (num_tokens, self.topk), generator=draw)
        if self.gate == "one_slot":
            ids = torch.full_like(ids, self.num_slots - 1)
        elif self.gate == "skewed":
            ids = (torch.rand(ids.shape, generator=draw) ** 4 * self.num_slots).long()
        elif self.gate == "masked":
            ids = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.5, -1)
        elif self.gate == "none":
            ids = torch.full_like(ids, -1)
        weights = torch.randn(num_tokens, self.topk, generator=draw).abs()
        return hidden, ids, weights.masked_fill(ids < 0, float("nan"))  # the weight of a -1 is never read

    def slot_counts(self) -> Tensor:
        """Returns rows of every rank for every slot [R, P]."""
        counts = torch.zeros(self.num_ranks, self.num_slots, dtype=torch.int64)
        for rank in range(self.num_ranks):
            ids = self.inputs(rank)[1]
            counts[rank] = torch.bincount(ids[ids >= 0], minlength=self.num_slots)
        return counts

    def placed(self, rank: int) -> list[tuple[int, int, int]]:
        """Returns (slot, source rank, token) of every row that this rank receives, in the placed order."""
        rows = []
        for slot in range(rank * self.slots_per_rank, (rank + 1) * self.slots_per_rank):
            for source in range(self.num_ranks):
                ids = self.inputs(source)[1]
                rows += [(slot, source, token) for token, k in (ids == slot).nonzero().tolist()]
        return rows

    def expected_rows(self, rank: int) -> Tensor:
        """Returns the rows that arrive at a rank, each after one trip through the codec."""
        codec = make_wire(self.wire, self.dtype).dispatch
        sent = [codec.decode(codec.encode(self.inputs(r)[0]), self.hidden) for r in range(self.num_ranks)]
        rows = [sent[source][token] for _, source, token in self.placed(rank)]
        return torch.stack(rows) if rows else torch.empty(0, self.hidden, dtype=self.dtype)

    def expert_out(self, x: Tensor, slots: Tensor) -> Tensor:
        """Returns what the experts make of rows: something that depends on the slot. slots: [N] of each row."""
        return (x.float() * (1 + slots[:, None].float() / 7)).to(self.dtype)

    def expected_rank_sums(self, rank: int) -> Tensor:
        """Returns what returns where each rank adds up its own experts' results of a token first."""
        wire = make_wire(self.wire, self.dtype)
        hidden, ids, weights = self.inputs(rank)
        arrived = wire.dispatch.decode(wire.dispatch.encode(hidden), self.hidden)
        out = self.expert_out(arrived.repeat_interleave(self.topk, 0), ids.clamp(min=0).flatten())
        index = torch.arange(ids.numel()).view(ids.shape)
        total = torch.zeros(hidden.shape)
        for source in range(self.num_ranks):
            here = (ids >= 0) & (ids // self.slots_per_rank == source)
            sums = weighted_sum_reference(out, index.masked_fill(~here, -1), weights)
            home = wire.combine.decode(wire.combine.encode(sums), self.hidden)
            total = torch.where(here.any(1)[:, None], total + home.float(), total)
        return total.to(self.dtype)

    def expected_combined(self, rank: int) -> Tensor:
        """Returns what returns: rows through both codecs, added in top-k order with fused float32 steps."""
        wire = make_wire(self.wire, self.dtype)
        hidden, ids, weights = self.inputs(rank)
        arrived = wire.dispatch.decode(wire.dispatch.encode(hidden), self.hidden)
        flat = ids.clamp(min=0).flatten()
        out = self.expert_out(arrived.repeat_interleave(self.topk, 0), flat)
        home = wire.combine.decode(wire.combine.encode(out), self.hidden)
        index = torch.arange(flat.numel()).view(ids.shape).masked_fill(ids < 0, -1)
        return weighted_sum_reference(home, index, weights)


MakeTransport = Callable[..., AnyAllToAll]  # (scenario, combine)


def run_check(
    transport: str, num_ranks: int, check: Callable[..., Any], *args: Any, timeout_s: float = 60
) -> list[Any]:
    """Returns [check(rank, make, *args) of every rank]; make(scenario) gives this rank's end of a new transport."""
    return run_ranks(num_ranks, on_process, transport, check, *args, timeout_s=timeout_s)


def on_process(rank: int, group: EpGroup, transport: str, check: Callable[..., Any], *args: Any) -> Any:
    if transport == "hosts":
        group = on_hosts(group, [other % 2 for other in range(group.num_ranks)])

    def make(scenario: Scenario, combine: Combine = "ordered") -> AnyAllToAll:
        # Spare tokens for the other scenarios of the same test.
        request = scenario.request(transport, 8, compiled=transport != "shm_plain", combine=combine)
        # The factory refuses shared memory for one rank, which the contract holds for too.
        return make_shm(group, request) if transport != "collective" else make_all_to_all(group, request)

    return check(rank, make, *args)


def slots_of_rows(rows: PackedRows, rank: int) -> Tensor:
    """Returns the physical id of each row."""
    slots_per_rank = rows.rows_per_slot.shape[0]
    return torch.arange(slots_per_rank).repeat_interleave(rows.rows_per_slot) + rank * slots_per_rank


def check_scenario(
    rank: int, make: MakeTransport, scenario: Scenario, with_counts: bool = False
) -> tuple[Tensor, Tensor]:
    """Holds one dispatch and one combine against brute force; returns what arrived and what came home."""
    transport = make(scenario)
    hidden, ids, weights = scenario.inputs(rank)
    untouched = hidden.clone()
    counts = scenario.slot_counts()
    first = rank * scenario.slots_per_rank
    arrived = transport.dispatch(hidden, ids, counts if with_counts else None).wait()
    assert isinstance(arrived.rows, PackedRows)
    mine = counts[:, first : first + scenario.slots_per_rank].sum(0)
    assert torch.equal(arrived.rows.rows_per_slot, mine), "rows_per_slot is the count over all ranks"
    assert arrived.rows.rows_per_slot.device.type == "cpu"
    assert torch.equal(arrived.rows.x, scenario.expected_rows(rank)), "rows arrive bitwise, in the placed order"
    assert arrived.rows.x.dtype == scenario.dtype
    assert torch.equal(hidden, untouched), "dispatch does not write into its input"

    out = scenario.expert_out(arrived.rows.x, slots_of_rows(arrived.rows, rank))
    combined = transport.combine(out, weights, arrived.handle).wait()
    assert combined.dtype == scenario.dtype
    assert torch.equal(combined, scenario.expected_combined(rank)), "combine adds in top-k order, bit for bit"
    return arrived.rows.x, combined
