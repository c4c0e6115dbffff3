"""One MoE layer of one rank: gate, count, choose replicas, dispatch, experts, combine.

Here the placement of experts meets the transport that carries rows. The gate sees all rows of a step at once, by torch
(`__call__`) or as compiled kernels that are recorded once (`record`). Rows then go to their experts and back in one of
three forms, chosen once for all layers of a rank (`ExpertParallel.form`). The general one are rounds: a batch larger
than the transport's capacity is cut into the same number of rounds on every rank, one after the other; a rank without
tokens runs them with none.

Behind slow links the rows of a step run through the decoder in two halves, each a generator: at a yield something of it
is on its way, and the other half goes on (`take_turns`). So under the rows and results of one half the other one's
attention, gate and experts compute:

    computes      [attention a][attention b][experts a][experts b][attention a][attention b] . . .
    on the wire                [rows a     ][rows b    ][results a][results b ][rows a     ]

When a generator yields depends on the step plan alone, so all ranks make the same calls in the same order. At most two
calls of a kind are in flight, and two handles alive. Results have the same bits as those of one batch wherever what is
computed for a row does not depend on the rows beside it, since halves are never added up.

Shape words: T = rows, H = hidden, K = topk, E = num_logical.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from moe_serve.dispatch.base import AnyAllToAll, Dispatched, Pending
from moe_serve.ep.expert_store import ExpertStore, expert_ffn
from moe_serve.ep.fused import FusedMoe, make_fused
from moe_serve.ep.gate import CapacityLimit, CompiledGate, Gate
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.pass_recorder import PassRecorder
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.errors import PeerError
from moe_serve.kernels.capacity import ChangedChoices
from moe_serve.kernels.cpu.operations import AnyLinear, Recorder
from moe_serve.kernels.cpu.tape import RecordedRun
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.packed_memory import OWN_MEMORY, PackedMemory
from moe_serve.kernels.part_clock import COMBINE, DISPATCH, EXPERTS, GATE, MLP, PartClock
from moe_serve.kernels.rows import add_gated_, multiply_rows
from moe_serve.kernels.topk_gate import take_identity_

Form = Literal["rounds", "local", "fused"]
T = TypeVar("T")
Turns = Generator[None, None, T]  # of a half; it returns T
AddTo = Callable[[Tensor], Tensor]  # adds rows to its argument, which is used up


@dataclass(frozen=True)
class ExpertParallel:
    """The parts that all MoE layers of a rank share.

    recorder:            None: nobody counts the load
    max_tokens_per_rank: rows of one round of dispatch and combine
    passes:              None: clients cannot record passes
    limit:               of the rows that an expert takes; None: an expert takes all
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
    limit: CapacityLimit | None = None
    clock: PartClock = field(default_factory=PartClock)

    def ones(self, num_rows: int) -> Tensor:
        """Returns [num_rows, 1] float32 ones: the weights of results whose input was scaled."""
        return self._ones[:num_rows] if num_rows <= len(self._ones) else self._ones.new_ones(num_rows, 1)

    @cached_property
    def _ones(self) -> Tensor:
        return torch.ones(self.max_tokens_per_rank, 1, device=self.replica_map.device)

    @cached_property
    def form(self) -> Form:
        """The way of rows to their experts and back.

        "rounds": replicas, dispatch, experts and combine one after the other: serves every layer
        "local":  compiled kernels pack, compute and add rows that all stay on this rank
        "fused":  a step of one round does dispatch, experts and combine in one call into C; other steps, and halves,
                  run in rounds
        The last two need the compiled kernels and nobody who records passes, "local" also no replicas to choose.
        """
        can = self.all_to_all.capabilities
        if not self.numerics.compiled or self.passes is not None:
            return "rounds"
        if can.keeps_rows and not self.replica_map.has_replicas:
            return "local"
        return "fused" if can.fuses else "rounds"

    @cached_property
    def fused(self) -> FusedMoe | None:
        """The call of form "fused"; None in other forms."""
        return make_fused(self.all_to_all, self.clock) if self.form == "fused" else None


@dataclass(frozen=True)
class MoeWeights:
    """One layer's weights on this rank.

    gate:    [E, H];  correction_bias: [E] float32, or None
    experts: of this rank's slots
    shared:  the shared expert: computes rows [T, H], and returns what adds them to others in place; None: there is none
    logit_bias: [E] float32 of the gate's logits, or None
    memory:  of the gate's weight, where it is packed
    latent:  projections of the rows that go to experts, and of their sums; None: experts take rows as they are
    chosen:  [tokens, K] int64, the experts of each token id, for which the gate gives weights; None: the gate chooses
    """

    gate: Tensor
    correction_bias: Tensor | None
    experts: ExpertStore
    shared: Callable[[Tensor], AddTo] | None = None
    logit_bias: Tensor | None = None
    memory: PackedMemory = OWN_MEMORY
    latent: tuple[AnyLinear, AnyLinear] | None = None
    chosen: Tensor | None = None


class Gated(NamedTuple):
    """Rows that the gate has seen.

    x:       [T, H]
    ids:     [T, K] int64, -1 = none: logical experts; slots where no expert has replicas
    weights: [T, K] float32
    load:    [E] int64, how many ids name each expert; None: not counted yet, or nobody needs it
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    load: Tensor | None

    def cut(self, num_rounds: int) -> "list[Gated]":
        """Returns the rows of each round, spread evenly."""
        if num_rounds == 1:
            return [self]
        parts = zip(*(rows.tensor_split(num_rounds) for rows in self[:3]), strict=True)
        return [Gated(x, ids, weights, None) for x, ids, weights in parts]


class Kept(NamedTuple):
    """What is kept of rows beside their keys and values, by slot of the KV cache.

    slots:   [T] int64, of the rows; below 0: padding
    ids:     [slots, layers, K] uint8 or int16, the experts that the gates chose; None: not kept
    changed: [slots] int16, how many of these choices the capacity of experts has changed; None: not kept
    """

    slots: Tensor
    ids: Tensor | None
    changed: Tensor | None


class MoeLayer:
    """y = sum over a token's experts of weight x expert(x), plus the shared expert."""

    def __init__(self, parallel: ExpertParallel, layer_row: int, weights: MoeWeights):
        """layer_row: this layer's row of placement and load record"""
        self._parallel = parallel
        self._layer_row = layer_row
        spec, self._chosen = parallel.router, weights.chosen
        spec = spec if weights.chosen is None else replace(spec, has_bias=False)
        router, logit_bias = (spec, weights.gate, weights.correction_bias), weights.logit_bias
        self._gate: Gate | CompiledGate
        if parallel.numerics.compiled:
            self._gate = CompiledGate(*router, logit_bias, weights.memory)
        else:
            self._gate = Gate(*router, parallel.numerics, logit_bias)
        self._replicas = parallel.replica_map.layer(layer_row)
        self._shared, self._latent = weights.shared, weights.latent
        self.experts = weights.experts

    @property
    def ids_shape(self) -> tuple[int, int, int]:
        """Returns layers, experts of a token, and experts of a layer."""
        router = self._parallel.router
        return self._parallel.replica_map.num_layers, router.topk, router.num_choices

    @property
    def needs_counts(self) -> bool:
        """Whether replicas are chosen by the counts of a step."""
        return self._replicas.needs_counts

    def new_load(self) -> Tensor:
        """Returns zeros, where the layers of a step count the experts of its rows: [layers, E] int64."""
        parallel = self._parallel
        shape = parallel.replica_map.num_layers, parallel.router.num_logical
        return torch.zeros(shape, dtype=torch.int64, device=parallel.replica_map.device)

    def __call__(
        self,
        x: Tensor,
        num_tokens: int,
        num_chunks: int,
        cached_at: Tensor | None = None,
        step_load: Tensor | None = None,
        kept: Kept | None = None,
        token_ids: Tensor | None = None,
    ) -> Turns[Tensor]:
        """Returns the layer's output for the real rows; rows beyond them hold zeros plus the shared expert.

        Without the compiled kernels; with them the layer is recorded.
        x: [T_pad, H] compute dtype;  num_tokens: real rows, the first ones
        num_chunks: rounds, over which the rows are spread evenly, equal on all ranks
        cached_at: [num_tokens] int64, below 0 in padding rows among these, which get no experts; None: there are none
        step_load: what `new_load` of any layer made for these rows, used where `needs_counts`; None: made here
        kept: what is kept of the real rows; None: nothing
        token_ids: [T_pad] int64, which a layer whose experts they choose reads
        """
        parallel, gate = self._parallel, self._gate
        assert isinstance(gate, Gate), "a layer of compiled kernels is recorded, not called"
        parallel.clock.turn(GATE)
        rows, replicas, load, by_id = x[:num_tokens], self._replicas, None, None
        if self._chosen is not None:
            assert token_ids is not None, "the layer's experts follow from the ids of tokens"
            by_id = self._chosen.index_select(0, token_ids[:num_tokens])
        if replicas.needs_counts:
            load = (self.new_load() if step_load is None else step_load)[self._layer_row]
            chosen = gate(rows, self._load_row, cached_at=cached_at, step_load=load, chosen=by_id)
            self._keep(chosen.ids, kept)
        elif self._looks_at_ids(kept):
            chosen = gate(rows, self._load_row, cached_at=cached_at, chosen=by_id)
            self._keep(chosen.ids, kept)
        else:
            chosen = gate(rows, self._load_row, replicas.first_slot, cached_at, chosen=by_id)
        ids, weights, _ = chosen
        if parallel.limit is not None:
            gate.limit(chosen, parallel.limit, self._changed(kept))
            load = None  # has counted what the gate chose
        own = take_identity_(ids, weights, parallel.router.num_logical) if parallel.router.num_identity else None
        if not replicas.needs_counts and self._looks_at_ids(kept):
            ids = replicas.first_slot[ids]  # that of -1 is the last, -1
        if parallel.router.scales_input:
            rows, weights = multiply_rows(rows, weights), parallel.ones(num_tokens)
        rows = rows if self._latent is None else self._latent[0](rows)
        parts, shared = yield from self._rounds(Gated(rows, ids, weights, load), num_chunks, x)
        if self._latent is not None:
            parts = [self._latent[1](torch.cat(parts))]
        if own is not None:
            parts = [torch.cat(parts)]
            add_gated_(parts[0], multiply_rows(x[:num_tokens], own), None)
        if num_tokens < x.shape[0]:
            parts.append(x.new_zeros(x.shape[0] - num_tokens, x.shape[1]))
        routed = parts[0] if len(parts) == 1 else torch.cat(parts)
        if shared is None:
            return routed
        parallel.clock.turn(MLP)
        return shared(routed)

    def _looks_at_ids(self, kept: Kept | None) -> bool:
        """Whether somebody reads the experts that the gate chose before they become slots."""
        parallel = self._parallel
        return kept is not None or parallel.limit is not None or parallel.router.num_identity > 0

    def _keep(self, ids: Tensor, kept: Kept | None) -> None:
        if kept is not None and kept.ids is not None:
            kept.ids[kept.slots[: len(ids)], self._layer_row] = ids.to(kept.ids.dtype)

    def _changed(self, kept: Kept | None) -> ChangedChoices | None:
        """Returns where this layer's changed choices are counted."""
        if kept is None or kept.changed is None:
            return None
        return ChangedChoices(kept.changed, kept.slots, is_first=self._layer_row == 0)

    def record(self, recorder: Recorder, x: Tensor, kept: Kept | None = None) -> Tensor:
        """Records the layer for rows x, [T, H] -> [T, H], without the shared expert. kept: as for a call

        Gate, counts, and slots where no expert has replicas, are kernels; in form "local" all of the layer is. In other
        forms Python is called between kernels.
        """
        parallel, gate, replicas = self._parallel, self._gate, self._replicas
        assert isinstance(gate, CompiledGate), "without compiled kernels a layer is called, not recorded"
        chosen = gate.record(recorder, x, self._load_row, self._chosen)
        ids, weights, _ = chosen
        if kept is not None and kept.ids is not None:
            recorder.keep_ids(ids, kept.slots, kept.ids[:, self._layer_row])
        if parallel.limit is not None:
            gate.record_limit(recorder, chosen, parallel.limit, self._changed(kept))
        own = None
        if parallel.router.num_identity:
            own = recorder.take_identity_(ids, weights, parallel.router.num_logical)
        rows = x
        if parallel.router.scales_input:
            rows = recorder.multiply_rows(x, weights)
            weights = torch.ones(recorder.capacity, 1)
        load = None
        if replicas.needs_counts:
            load = recorder.count(ids, parallel.router.num_logical)
        else:
            ids = recorder.look_up(replicas.first_slot, ids)
        if self._latent is not None:
            rows = recorder.linear("latent_in", self._latent[0], rows)
        out = self._record_routed(recorder, rows, ids, weights, load)
        if self._latent is not None:
            out = recorder.linear("latent_out", self._latent[1], out)
        if own is not None:
            recorder.add_gated_(out, recorder.multiply_rows(x, own), None)
        return out

    def _record_routed(
        self, recorder: Recorder, x: Tensor, ids: Tensor, weights: Tensor, load: Tensor | None
    ) -> Tensor:
        """Records the way of rows to their experts and back. ids: slots, where no expert has replicas"""
        parallel, replicas = self._parallel, self._replicas
        if parallel.form == "local":
            return recorder.experts(x, ids, weights, self.experts.packed)
        out = recorder.buffer("moe_out", x.shape[1])
        slots = torch.empty_like(ids) if replicas.needs_counts else ids
        fused = None
        if parallel.fused is not None:
            fused = parallel.fused.bind(x, slots, weights, self.experts.packed, out)

        def rounds(step: RecordedRun) -> Turns[None]:  # kernels count no load where there are no rows
            num_rows = step.rows.num_rows
            x_now, ids_now, weights_now, out_now = (rows[:num_rows] for rows in (x, ids, weights, out))
            gated = Gated(x_now, ids_now, weights_now, load if num_rows else None)
            parts, _ = yield from self._rounds(gated, step.num_chunks, x_now)
            torch.cat(parts, out=out_now)

        def call(step: RecordedRun) -> Iterable[None]:
            num_rows = step.rows.num_rows
            if fused is not None and step.num_chunks == 1 and not step.overlap:
                parallel.clock.turn(DISPATCH)
                try:
                    if replicas.needs_counts:
                        ids_now = ids[:num_rows]
                        counts = load if load is not None and num_rows else replicas.count(ids_now)
                        all_counts = parallel.all_to_all.exchange_counts(counts).wait()
                        slots[:num_rows] = replicas.split(ids_now, all_counts, parallel.rank)[0]
                    fused(num_rows)
                except PeerError as error:
                    error.layer_row = self._layer_row
                    raise
                return ()
            return rounds(step)

        recorder.call_python(call)
        return out

    def _rounds(self, gated: Gated, num_chunks: int, x: Tensor) -> Turns[tuple[list[Tensor], AddTo | None]]:
        """Returns the sums of each round's rows, and the shared expert's of x, computed while rows are on their way."""
        num_tokens, capacity = len(gated.x), self._parallel.max_tokens_per_rank
        assert num_chunks >= 1, "every rank runs at least one round"
        assert num_tokens <= num_chunks * capacity, f"{num_tokens} tokens in {num_chunks} rounds of {capacity}"
        parts, shared = [], None
        try:
            for number, rows in enumerate(gated.cut(num_chunks)):
                dispatched = yield from self._dispatch(rows)
                if number == 0 and self._shared is not None:
                    self._parallel.clock.turn(MLP)
                    shared = self._shared(x)
                parts.append((yield from self._compute(dispatched, rows.weights)))
        except PeerError as error:
            error.layer_row = self._layer_row
            raise
        return parts, shared

    def _dispatch(self, gated: Gated) -> Turns[Pending[Dispatched[Any]]]:
        """Sends rows to their slots."""
        parallel, replicas = self._parallel, self._replicas
        all_to_all, clock = parallel.all_to_all, parallel.clock
        x, slots, weights, load = gated
        slot_counts = None
        clock.turn(DISPATCH)
        if replicas.needs_counts:
            pending_counts = all_to_all.exchange_counts(replicas.count(slots) if load is None else load)
            yield
            clock.turn(DISPATCH)
            slots, slot_counts = replicas.split(slots, pending_counts.wait(), parallel.rank)
        if parallel.passes is not None and parallel.passes.is_on:
            parallel.passes.add(self._layer_row, slots)
        pending_rows = all_to_all.dispatch(x, slots, slot_counts, weights)
        yield
        return pending_rows

    def _compute(self, dispatched: Pending[Dispatched[Any]], weights: Tensor) -> Turns[Tensor]:
        """Returns the sums for rows that were dispatched, [T, H]."""
        parallel = self._parallel
        parallel.clock.turn(DISPATCH)
        arrived = dispatched.wait()
        parallel.clock.turn(EXPERTS)
        results = expert_ffn(arrived.rows, self.experts, parallel.numerics, arrived.out)
        parallel.clock.turn(COMBINE)
        pending_results = parallel.all_to_all.combine(results, weights, arrived.handle)
        yield
        parallel.clock.turn(COMBINE)
        return pending_results.wait()

    @cached_property
    def _load_row(self) -> Tensor:
        """Where the gate counts the load, [E] int64."""
        if self._parallel.recorder is None:
            like = self._replicas.first_slot
            return torch.zeros(self._parallel.router.num_logical, dtype=like.dtype, device=like.device)
        return self._parallel.recorder.row(self._layer_row)


def take_turns(halves: Sequence[Turns[T]]) -> list[T]:
    """Returns the results of generators, each of which runs up to its next yield in turn; all yield equally often."""
    results: list[T] = []
    while not results:
        for half in halves:
            try:
                next(half)
            except StopIteration as end:
                results.append(end.value)
    assert len(results) == len(halves), "halves of a step make the same calls"
    return results
