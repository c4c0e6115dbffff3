"""One MoE layer of one rank: gate, count, choose replicas, dispatch, experts, combine.

Here the placement of experts meets the transport that carries rows. A batch larger than the transport's capacity runs
in rounds, the same number on every rank; a rank without tokens runs them with none. `rounds.py` says in which order
rounds advance.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_serve.dispatch.base import AnyAllToAll
from moe_serve.ep.expert_ffn import expert_ffn
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.gate import CompiledGate, Gate
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.pass_recorder import PassRecorder
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.ep.rounds import SHARED, Round, advance, in_turn, overlapped
from moe_serve.ep.routing import RouterSpec, Routing
from moe_serve.kernels.cpu.recorder import RecordedRun, Recorder
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.part_clock import COMBINE, DISPATCH, EXPERTS, GATE, MLP, PartClock
from moe_serve.kernels.rows import multiply_rows


@dataclass(frozen=True)
class ExpertParallel:
    """What all MoE layers of a rank share.

    recorder:            None: no load is recorded
    max_tokens_per_rank: rows of one round of dispatch and combine
    passes:              None: clients cannot record passes
    clock:               is told which part of the step runs
    """

    rank: int
    router: RouterSpec
    all_to_all: AnyAllToAll
    replica_map: ReplicaMap
    recorder: LoadRecorder | None
    max_tokens_per_rank: int
    numerics: Numerics
    passes: PassRecorder | None = None
    clock: PartClock = field(default_factory=PartClock)


@dataclass(frozen=True)
class MoeWeights:
    """One layer's weights on this rank.

    gate:    [E, H];  correction_bias: [E] float32, or None
    experts: of this rank's slots
    shared:  the shared expert, [T, H] -> [T, H]; None: there is none
    logit_bias: [E] float32 of the gate's logits, or None
    """

    gate: Tensor
    correction_bias: Tensor | None
    experts: ExpertStore
    shared: Callable[[Tensor], Tensor] | None = None
    logit_bias: Tensor | None = None


def record_call(recorder: Recorder, layer: Callable[[Tensor, int, int, bool], Tensor], x: Tensor) -> Tensor:
    """Records a call of a MoE layer between kernels. x: [T, H] -> [T, H]"""
    out = recorder.buffer("moe_out", x.shape[1])

    def call(step: RecordedRun) -> None:
        num_rows = step.rows.num_rows
        out[:num_rows] = layer(x[:num_rows], num_rows, step.num_chunks, step.overlap)

    recorder.call_python(call)
    return out


class MoeLayer:
    """y = sum over a token's experts of weight x expert(x), plus the shared expert."""

    def __init__(self, parallel: ExpertParallel, layer_row: int, weights: MoeWeights):
        """layer_row: this layer's row of placement and load record"""
        self._parallel = parallel
        self._layer_row = layer_row
        router, logit_bias = (parallel.router, weights.gate, weights.correction_bias), weights.logit_bias
        self._compiled_gate = CompiledGate(*router, logit_bias) if parallel.numerics.compiled else None
        self._gate: Callable[[Tensor], Routing] = self._compiled_gate or Gate(*router, parallel.numerics, logit_bias)
        self._replicas = parallel.replica_map.layer(layer_row)
        self._shared = weights.shared
        self.experts = weights.experts

    def __call__(self, x: Tensor, num_tokens: int, num_chunks: int, overlap: bool = False) -> Tensor:
        """Returns the layer's output for the real rows; rows beyond them hold zeros plus the shared expert.

        x: [T_pad, H] compute dtype;  num_tokens: real rows, the first ones
        num_chunks: rounds, over which the rows are spread evenly;  overlap: experts of a round compute while rows of
        others travel; both equal on all ranks
        """
        parallel = self._parallel
        capacity = parallel.max_tokens_per_rank
        assert num_chunks >= 1, "every rank runs at least one round"
        assert num_tokens <= num_chunks * capacity, f"{num_tokens} tokens in {num_chunks} rounds of {capacity}"
        rounds = [self._round(rows) for rows in x[:num_tokens].tensor_split(num_chunks)]
        parts, shared = [], None
        for number in self._order(num_chunks, overlap):
            if number == SHARED:
                parallel.clock.turn(MLP)
                shared = None if self._shared is None else self._shared(x)
            elif (result := advance(rounds[number])) is not None:
                parts.append(result)
        if num_tokens < x.shape[0]:
            parts.append(x.new_zeros(x.shape[0] - num_tokens, x.shape[1]))
        routed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return routed if shared is None else routed.add_(shared)

    def record(self, recorder: Recorder, x: Tensor) -> Tensor:
        """Records the layer for rows x, [T, H] -> [T, H], without the shared expert.

        Where every row stays on this rank the layer is kernels. Where rows travel, the gate is kernels, and so are the
        slots where no expert has replicas. While clients may record passes, the layer is called between kernels.
        """
        parallel, gate = self._parallel, self._compiled_gate
        if gate is None or parallel.passes is not None:
            return record_call(recorder, self, x)
        ids, weights = gate.record(recorder, x, self._load_row())
        if parallel.router.scales_input:
            x = recorder.multiply_rows(x, weights, recorder.buffer("scaled_rows", x.shape[1]))
            weights = torch.ones(recorder.capacity, 1)
        counts = None
        if self._replicas.needs_counts:
            counts = recorder.count(ids, parallel.router.num_logical)
        else:
            ids = recorder.look_up(self._replicas.first_slot, ids)
            if parallel.all_to_all.is_local:
                return recorder.experts(x, ids, weights, self.experts.packed)
        out = recorder.buffer("moe_out", x.shape[1])

        def call(step: RecordedRun) -> None:
            rows = [rows[: step.rows.num_rows] for rows in (x, ids, weights, out)]
            self._run_rounds(rows, counts if step.rows.num_rows else None, step)

        recorder.call_python(call)
        return out

    def _run_rounds(self, rows: list[Tensor], counts: Tensor | None, step: RecordedRun) -> None:
        """Runs rows that the gate has seen.

        rows:   [T, H]; logical ids or slots [T, topk], as `needs_counts` says; weights [T, topk]; where sums go [T, H]
        counts: [E] of all ids, or None
        """
        self._parallel.clock.turn(DISPATCH)
        if step.num_chunks == 1:
            x, ids, weights, out = rows
            all_to_all, replicas = self._parallel.all_to_all, self._replicas
            if not replicas.needs_counts and all_to_all.travel(x, ids, weights, self.experts.packed, out):
                return
            parts = [(self._routed_round(x, ids, weights, counts), out)]
        else:
            cut = zip(*[each.tensor_split(step.num_chunks) for each in rows], strict=True)
            parts = [(self._routed_round(x, ids, weights, None), out) for x, ids, weights, out in cut]
        for number in self._order(step.num_chunks, step.overlap):
            if number != SHARED and (result := advance(parts[number][0])) is not None:
                parts[number][1].copy_(result)

    def _order(self, num_chunks: int, overlap: bool) -> tuple[int, ...]:
        """Returns the order in which rounds advance."""
        return overlapped(num_chunks, self._parallel.all_to_all.live_handles) if overlap else in_turn(num_chunks)

    def _load_row(self) -> Tensor:
        """Returns where the gate's kernel counts the load, [E] int64."""
        if self._parallel.recorder is None:
            return torch.zeros(self._parallel.router.num_logical, dtype=torch.int64)
        return self._parallel.recorder.row(self._layer_row)

    def _round(self, x: Tensor) -> Round:
        """Runs rows [T, H] from the gate to their sums [T, H]. At each yield another round may advance."""
        all_to_all, replicas = self._parallel.all_to_all, self._replicas
        clock = self._parallel.clock
        clock.turn(GATE)
        routing = self._gate(x)
        weights = routing.topk_weights
        if self._parallel.router.scales_input:
            x, weights = multiply_rows(x, weights), torch.ones_like(weights)
        load = self._count(routing)
        clock.turn(DISPATCH)
        pending_counts = all_to_all.exchange_counts(load) if load is not None and replicas.needs_counts else None
        yield
        clock.turn(DISPATCH)
        if pending_counts is None:
            slots, slot_counts = replicas.only_slots(routing.topk_ids), None
        else:
            slots, slot_counts = replicas.split(routing.topk_ids, pending_counts.wait(), self._parallel.rank)
        if (passes := self._parallel.passes) is not None and passes.is_on:
            passes.add(self._layer_row, slots)
        return (yield from self._travel(x, slots, slot_counts, weights))

    def _routed_round(self, x: Tensor, ids: Tensor, weights: Tensor, counts: Tensor | None) -> Round:
        """Runs rows as `_round`, after the gate, which has recorded the load. ids, counts: as in _run_rounds"""
        all_to_all, replicas = self._parallel.all_to_all, self._replicas
        if not replicas.needs_counts:
            yield
            return (yield from self._travel(x, ids, None, weights))
        self._parallel.clock.turn(DISPATCH)
        pending_counts = all_to_all.exchange_counts(replicas.count(ids) if counts is None else counts)
        yield
        self._parallel.clock.turn(DISPATCH)
        slots, slot_counts = replicas.split(ids, pending_counts.wait(), self._parallel.rank)
        return (yield from self._travel(x, slots, slot_counts, weights))

    def _travel(self, x: Tensor, slots: Tensor, slot_counts: Tensor | None, weights: Tensor) -> Round:
        """Sends rows to their slots, and adds up what comes back."""
        all_to_all, clock = self._parallel.all_to_all, self._parallel.clock
        clock.turn(DISPATCH)
        pending_rows = all_to_all.dispatch(x, slots, slot_counts, weights)
        yield
        clock.turn(DISPATCH)
        arrived = pending_rows.wait()
        yield
        clock.turn(EXPERTS)
        results = expert_ffn(arrived.rows, self.experts, self._parallel.numerics, arrived.out)
        yield
        clock.turn(COMBINE)
        pending_results = all_to_all.combine(results, weights, arrived.handle)
        yield
        clock.turn(COMBINE)
        return pending_results.wait()

    def _count(self, routing: Routing) -> Tensor | None:
        """Records which experts the tokens ask for. Returns the counts [E], or None where nobody has counted yet."""
        recorder, load = self._parallel.recorder, routing.load
        if load is None and self._replicas.needs_counts:
            load = self._replicas.count(routing.topk_ids)
        if recorder is None:
            return load
        if load is None:
            recorder.add(self._layer_row, routing.topk_ids, routing.topk_ids.shape[0])
        else:
            recorder.add_counts(self._layer_row, load)
        return load
