"""The whole layer on one and several ranks: right, exact in its counts, and the same bits wherever experts live."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.capabilities import Combine
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.gate import Gate
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import AddTo, ExpertParallel, MoeLayer, MoeWeights, Turns, take_turns
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.placement import Placement
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.topology import Topology
from tests.ep.received import count_received
from tests.ranks import run_ranks
from tests.tolerance import FLOAT32, relative_error

HIDDEN, WIDTH, LAYERS = 32, 24, 2
SPEC = RouterSpec(7, 3, "softmax", norm_topk=True)  # 7 experts: no number of ranks but 1 and 7 divides them
INVARIANT = Numerics(row_tile=4)


@dataclass(frozen=True)
class Case:
    """tokens: all tokens, dealt to ranks in runs as equal as can be; capacity: rows of one round
    halves: whether the rows run in two halves that take turns
    """

    placement: Placement
    num_tokens: int = 40
    numerics: Numerics = INVARIANT
    capacity: int = 1024
    shared: bool = False
    wire: str = "auto"
    only_rank: int | None = None  # all tokens on this rank
    split: Literal["even", "nearest", "exact"] = "even"
    nodes: Topology | None = None  # None: all ranks on one node
    halves: bool = False
    backend: str = "collective"  # of several ranks
    combine: Combine = "ordered"

    def share(self, rank: int) -> slice:
        if self.only_rank is not None:
            return slice(0, self.num_tokens if rank == self.only_rank else 0)
        edges = np.linspace(0, self.num_tokens, self.placement.num_ranks + 1).astype(int)
        return slice(int(edges[rank]), int(edges[rank + 1]))


def weights(layer_row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gate [E, H], gate_up [E, 2 I, H] and down [E, H, I] of a layer, all experts."""
    draw = torch.Generator().manual_seed(layer_row)
    gate = torch.randn(SPEC.num_logical, HIDDEN, generator=draw)
    gate[0] += 0.3  # expert 0 is hot
    gate_up = torch.randn(SPEC.num_logical, 2 * WIDTH, HIDDEN, generator=draw) / HIDDEN**0.5
    return gate, gate_up, torch.randn(SPEC.num_logical, HIDDEN, WIDTH, generator=draw) / WIDTH**0.5


def tokens(num_tokens: int) -> Tensor:
    return torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(99))[:num_tokens] + 0.2


def double(x: Tensor) -> AddTo:
    return (2 * x).add_


def build(group: EpGroup, case: Case) -> tuple[list[MoeLayer], LoadRecorder]:
    placement = case.placement
    backend = case.backend if group.process_group is not None else "local"
    slots = placement.slots_per_rank
    limits = BufferLimits(case.capacity, HIDDEN, SPEC.topk, slots)
    request = TransportRequest(backend, limits, torch.float32, case.wire, combine=case.combine)
    recorder = LoadRecorder(LAYERS, SPEC.num_logical, group)
    parallel = ExpertParallel(
        rank=group.rank,
        router=SPEC,
        all_to_all=make_all_to_all(group, request),
        replica_map=ReplicaMap(placement, split=case.split, topology=case.nodes),
        recorder=recorder,
        max_tokens_per_rank=case.capacity,
        numerics=case.numerics,
    )
    layers = []
    for row in range(LAYERS):
        gate, gate_up, down = weights(row)
        here = placement.physical_to_logical[row, group.rank * slots : (group.rank + 1) * slots]
        experts = {
            name: torch.stack([full[e] if e >= 0 else torch.zeros_like(full[0]) for e in here])
            for name, full in (("gate_up", gate_up), ("down", down))
        }
        shared = double if case.shared else None
        layers.append(MoeLayer(parallel, row, MoeWeights(gate, None, ExpertStore(experts), shared)))
    return layers, recorder


def run_layers(rank: int, group: EpGroup, case: Case) -> tuple[Tensor, np.ndarray, Tensor]:
    """Returns this rank's rows after all layers, the recorded load, and the rows that its slots received."""
    layers, recorder = build(group, case)
    mine = tokens(case.num_tokens)[case.share(rank)]
    counted = max(len(range(*case.share(r).indices(case.num_tokens))) for r in range(group.num_ranks))
    num_chunks = max(1, -(-counted // case.capacity))

    def through_all(rows: Tensor) -> Turns[Tensor]:
        num_tokens = len(rows)
        x = torch.cat([rows, torch.full((case.numerics.padded(num_tokens) - num_tokens, HIDDEN), float("nan"))])
        for layer in layers:
            x = yield from layer(x, num_tokens, num_chunks)
            assert torch.equal(x[num_tokens:].nan_to_num(), torch.zeros_like(x[num_tokens:])), "padding is not computed"
        return x[:num_tokens]

    with count_received() as received:
        parts = take_turns([through_all(half) for half in mine.tensor_split(1 + case.halves)])
    return torch.cat(parts), recorder.take().by_source.sum(1), received.slot_rows


def serve(case: Case) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Returns all tokens' rows in order, the load record, and rows per slot [layers, P]."""
    num_ranks = case.placement.num_ranks
    if num_ranks == 1:
        parts = [run_layers(0, EpGroup(0, 1, torch.device("cpu")), case)]
    else:
        parts = run_ranks(num_ranks, run_layers, case)
    assert all(np.array_equal(load, parts[0][1]) for _, load, _ in parts), "every rank has the whole record"
    received = np.concatenate([rows.numpy() for _, _, rows in parts], axis=1)
    return torch.cat([out for out, _, _ in parts]), parts[0][1], received


def moe_reference(x: Tensor, layer_row: int, shared: bool) -> Tensor:
    gate, gate_up, down = (w.double() for w in weights(layer_row))
    load = torch.zeros(SPEC.num_logical, dtype=torch.int64)
    topk_ids, topk_weights, _ = Gate(SPEC, gate.float())(x.float(), load)
    out = torch.zeros_like(x)
    for token, (ids, scale) in enumerate(zip(topk_ids, topk_weights, strict=True)):
        for expert, weight in zip(ids.tolist(), scale.double(), strict=True):
            g, u = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weight * (down[expert] @ (g * g.sigmoid() * u))
    return out + 2 * x if shared else out


def reference(case: Case) -> Tensor:
    x = tokens(case.num_tokens).double()
    for row in range(LAYERS):
        x = moe_reference(x, row, case.shared)
    return x


def trivial(num_ranks: int, num_redundant: int = 0) -> Placement:
    return Placement.trivial(LAYERS, SPEC.num_logical, num_ranks, num_redundant)


def shuffled(num_ranks: int, num_slots: int, seed: int) -> Placement:
    """Returns experts anywhere, expert 0 in every free slot."""
    draw = np.random.default_rng(seed)
    row = np.concatenate([np.arange(SPEC.num_logical), np.zeros(num_slots - SPEC.num_logical, dtype=int)])
    return Placement(np.stack([draw.permutation(row) for _ in range(LAYERS)]), SPEC.num_logical, num_ranks)


BASE = Case(trivial(1))
SAME_BITS = {
    "one rank, redundant": replace(BASE, placement=trivial(1, 3)),
    "two ranks": replace(BASE, placement=trivial(2)),
    "two ranks, redundant": replace(BASE, placement=trivial(2, 5)),
    "three ranks": replace(BASE, placement=trivial(3, 2)),
    "four ranks, anywhere": replace(BASE, placement=shuffled(4, 12, seed=1)),
    "two ranks, anywhere": replace(BASE, placement=shuffled(2, 10, seed=2)),
    "two ranks, exact": replace(BASE, placement=trivial(2, 5), split="exact"),
    "four ranks, exact": replace(BASE, placement=shuffled(4, 12, seed=1), split="exact"),
    "four ranks, nearest": replace(BASE, placement=shuffled(4, 12, seed=1), split="nearest", nodes=Topology(2, 2)),
    "in chunks": replace(BASE, placement=trivial(2), capacity=3),
    "one rank in chunks": replace(BASE, capacity=7),
    "an idle rank": replace(BASE, placement=trivial(2, 1), only_rank=1),
    "one rank, halves overlap": replace(BASE, halves=True),
    "two ranks, halves overlap": replace(BASE, placement=trivial(2), halves=True),
    "two ranks, redundant, halves overlap": replace(BASE, placement=trivial(2, 5), halves=True),
    "two ranks, exact, halves overlap": replace(BASE, placement=trivial(2, 5), split="exact", halves=True),
    "three ranks, exact, halves of many chunks overlap": replace(
        BASE, placement=trivial(3, 2), split="exact", halves=True, capacity=3
    ),
    "an idle rank, halves overlap": replace(BASE, placement=trivial(2, 1), only_rank=1, halves=True),
}


@pytest.mark.parametrize("numerics", [FAST, INVARIANT], ids=["fast", "invariant"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_the_layer_computes_the_mixture(numerics: Numerics, num_ranks: int, shared: bool) -> None:
    case = Case(trivial(num_ranks, num_ranks - 1), numerics=numerics, shared=shared)
    out, _, _ = serve(case)
    assert relative_error(out, reference(case)) < FLOAT32


@pytest.mark.parametrize("name", SAME_BITS)
def test_in_batch_invariant_bits_do_not_depend_on_ranks_placement_or_chunks(name: str) -> None:
    assert torch.equal(serve(SAME_BITS[name])[0], serve(BASE)[0])


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 39])
def test_a_tokens_bits_do_not_depend_on_how_many_travel_with_it(num_tokens: int) -> None:
    out, _, _ = serve(replace(BASE, placement=trivial(2, 1), num_tokens=num_tokens))
    assert torch.equal(out, serve(BASE)[0][:num_tokens])


@pytest.mark.parametrize("name", SAME_BITS)
def test_recorded_load_is_real_tokens_times_topk(name: str) -> None:
    case = SAME_BITS[name]
    _, load, received = serve(case)
    assert load.sum(axis=1).tolist() == [case.num_tokens * SPEC.topk] * LAYERS
    assert np.array_equal(load, serve(BASE)[1])
    for row in range(LAYERS):
        table = case.placement.physical_to_logical[row]
        assert received[row][table < 0].sum() == 0, "empty slots receive nothing"
        served = np.bincount(table[table >= 0], received[row][table >= 0], minlength=SPEC.num_logical)
        assert np.array_equal(served, load[row]), "what was asked for is what arrived"


def test_every_replica_of_the_hot_expert_receives_rows() -> None:
    case = SAME_BITS["four ranks, anywhere"]
    _, load, received = serve(case)
    for row in range(LAYERS):
        replicas = received[row][case.placement.physical_to_logical[row] == 0]
        assert len(replicas) == 6
        assert replicas.max() - replicas.min() <= 1
        assert replicas.sum() == load[row, 0]


def test_a_second_window_starts_from_zero() -> None:
    group = EpGroup(0, 1, torch.device("cpu"))
    recorder = LoadRecorder(1, 4, group)
    recorder.row(0).add_(torch.tensor([1, 1, 0, 1]))
    assert recorder.take().by_source.tolist() == [[[1, 1, 0, 1]]]
    assert recorder.take().by_source.tolist() == [[[0, 0, 0, 0]]]


@pytest.mark.parametrize("wire, limit", [("bf16", 2e-2), ("fp8", 1e-1)])
def test_narrow_wires_cost_accuracy_but_not_identity(wire: str, limit: float) -> None:
    one, two = (serve(replace(BASE, placement=trivial(n, 1), wire=wire))[0] for n in (1, 2))
    assert torch.equal(one, two), "the row that stays goes through the codec too"
    assert 0 < relative_error(one, reference(BASE)) < limit


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("backend", ["collective", "low_latency"])
def test_sums_made_on_each_rank_give_the_same_layer_in_other_last_bits(backend: str, num_ranks: int) -> None:
    case = replace(BASE, placement=trivial(num_ranks, 3), numerics=FAST, backend=backend, combine="rank_sum")
    out, load, _ = serve(case)
    assert relative_error(out, reference(case)) < FLOAT32
    ordered, ordered_load, _ = serve(replace(case, combine="ordered"))
    assert np.array_equal(load, ordered_load)
    assert num_ranks == 1 or not torch.equal(out, ordered), "the mode was not used"
