"""Runs a decoder for a step: by torch at once, or by the compiled CPU kernels, recorded once and run for every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.attention_dp.attention import Attention, AttentionShape, HeadProjections, IndexedRows, StepPlan
from moe_serve.attention_dp.batch import KEPT_SIZES, ForwardBatch, is_small
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.ep.moe_layer import Kept, MoeLayer, Turns, take_turns
from moe_serve.kernels.causal_conv import ConvWeights, causal_conv_reference
from moe_serve.kernels.compressed_attention import (
    CompressedRows,
    CompressedWeights,
    PagedRows,
    compressed_attention_reference,
)
from moe_serve.kernels.cpu.attention import AttendRows
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.linear import PackedLinear, RowTable
from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.cpu.tape import RecordedRun, RowInputs
from moe_serve.kernels.delta_rule import DeltaWeights, delta_rule_reference
from moe_serve.kernels.forms import AttendShape, Seen
from moe_serve.kernels.linear import Linear
from moe_serve.kernels.numerics import COMPILED, Numerics
from moe_serve.kernels.part_clock import MLP, PartClock
from moe_serve.kernels.selective_space import SelectiveRows, SelectiveWeights, selective_space_reference
from moe_serve.kernels.sequence_states import SequenceStates
from moe_serve.kernels.state_space import StateSpaceWeights, state_space_reference
from moe_serve.models.decoder.gqa import RopeTable
from moe_serve.models.decoder.stack import AnyStack, StepInputs
from moe_serve.models.decoder.step import IndexRows, SharedExpert, Step

SMALLEST = 64  # rows that a recording is for; doubled as larger steps come


@dataclass
class TorchRunner:
    """StackRunner by torch: on GPUs, and on CPUs without the compiled kernels."""

    stack: AnyStack
    rope: RopeTable
    attentions: Mapping[AttentionShape, Attention]
    numerics: Numerics
    clock: PartClock
    _rows: Tensor | None = None  # of the last step

    @torch.inference_mode()
    def __call__(self, step: StepInputs, logits: Tensor | None = None) -> Tensor:
        """logits: where they are written, [num_logit_rows, vocab_size] float32; None: new memory"""
        self._rows = None
        batches = step.batch.halves(self.numerics) if step.overlap else (step.batch,)
        moe = self.stack.moe
        counting = moe if moe is not None and moe.needs_counts else None
        steps = [
            TorchStep(
                replace(step, batch=batch),
                self.attentions,
                self.rope,
                self.clock,
                None if counting is None else counting.new_load(),
            )
            for batch in batches
        ]
        rows = _together(take_turns([self.stack(each) for each in steps]), batches)
        self._rows = rows if logits is None else None  # those of a graph lie in memory that others share
        return _project(self.stack.head, rows.index_select(0, step.batch.logit_rows), self.numerics, logits)

    @torch.inference_mode()
    def logits_of(self, rows: range) -> Tensor:
        return _project(self.stack.head, self.rows[rows.start : rows.stop], self.numerics)

    @property
    def rows(self) -> Tensor:
        assert self._rows is not None, "no step has run"
        return self._rows


class TorchStep(Step):
    """The rows of one batch, and operations done at once."""

    def __init__(
        self,
        step: StepInputs,
        attentions: Mapping[AttentionShape, Attention],
        rope: RopeTable,
        clock: PartClock,
        load: Tensor | None = None,
    ):
        """load: where the MoE layers count the experts of these rows, if replicas are chosen by it"""
        batch, scales = step.batch, rope.query_scales
        self.ids, self.slots, self.cache = batch.input_ids, batch.slot_mapping, step.cache
        self.turns = rope(batch.positions)
        self.query_scales = None if scales is None else scales.index_select(0, batch.positions)
        self.has_rows = batch.num_tokens > 0
        self._step = step
        self._attentions = attentions
        self._clock = clock
        # By shape, window and chunk, as layers ask
        self._plans: dict[tuple[AttentionShape, int | None, int | None], StepPlan] = {}
        self._load = load

    def hidden(self, width: int) -> Tensor:
        rows, batch = self._step.hidden, self._step.batch
        assert rows is not None, "only a step that predicts has hidden rows"
        return functional.pad(rows, (0, 0, 0, batch.num_padded - len(rows)))

    @property
    def expanded_rows(self) -> range:
        return self._plan(self._only_shape).expanded_rows if self.has_rows else range(0)

    def begin(self, part: int) -> None:
        self._clock.turn(part)

    def attend(self, q: Tensor, shape: AttentionShape, layer: int, seen: Seen = Seen()) -> Tensor:
        assert self.has_rows, "nothing to attend"
        return self._attentions[shape](q, self.cache, layer, self._plan(shape, seen), seen.sinks)

    @property
    def _only_shape(self) -> AttentionShape:
        """The shape of all layers, where they attend latents."""
        [shape] = self._attentions
        return shape

    @cached_property
    def _sequences(self) -> SequenceStates:
        batch = self._step.batch
        assert batch.state_slots is not None, "the batch was built for a model without states"
        return SequenceStates(batch.query_starts, batch.state_slots)

    def _plan(self, shape: AttentionShape, seen: Seen = Seen()) -> StepPlan:
        key = shape, seen.window, seen.chunk
        if key not in self._plans:
            self._plans[key] = self._attentions[shape].plan(self._step.batch, seen.window, seen.chunk)
        return self._plans[key]

    def attend_indexed(self, q: Tensor, layer: int, index: IndexRows) -> Tensor:
        rows = IndexedRows(index.q, index.weights, index.layer, index.shape.topk)
        return self._attentions[self._only_shape].attend_indexed(q, self.cache, layer, rows, self._step.batch)

    def attend_expanded(self, q: Tensor, layer: int, heads: HeadProjections, out: Tensor) -> None:
        shape = self._only_shape
        self._attentions[shape].attend_expanded(q, self.cache, layer, self._plan(shape), heads, out)

    def delta_rule_of(
        self, rows: Tensor, apart: tuple[Tensor, Tensor] | None, weights: DeltaWeights, layer: int
    ) -> Tensor:
        return delta_rule_reference(rows, apart, weights, self.cache.states_of(layer), self._sequences)

    def convolve(self, rows: Tensor, weights: ConvWeights, layer: int) -> Tensor:
        return causal_conv_reference(rows, weights, self.cache.states_of(layer)[0], self._sequences)

    def state_space_of(self, mixed: Tensor, steps: Tensor, weights: StateSpaceWeights, layer: int) -> Tensor:
        states = self.cache.states_of(layer)[-1]
        return state_space_reference(mixed, steps, weights, states, self._sequences)

    def selective_space_of(self, rows: SelectiveRows, weights: SelectiveWeights, layer: int) -> Tensor:
        return selective_space_reference(rows, weights, self.cache.states_of(layer)[-1], self._sequences)

    def compressed_attention(self, rows: CompressedRows, weights: CompressedWeights, layer: int) -> Tensor:
        batch = self._step.batch
        tables = batch.host_query_lens, batch.block_tables, batch.block_size
        paged = PagedRows(batch.positions, batch.slot_mapping, *tables)
        return compressed_attention_reference(rows, weights, self.cache.layer(layer), paged)

    def moe(self, layer: MoeLayer, shared: SharedExpert | None, x: Tensor) -> Turns[Tensor]:
        assert shared is None, "the MoE layer computes its shared expert itself, while rows travel"
        step = self._step
        cached_at = self.slots if step.has_padding else None
        return layer(x, step.batch.num_tokens, step.num_chunks, cached_at, self._load, _kept(self, layer), self.ids)


def _kept(step: Step, layer: MoeLayer) -> Kept | None:
    """Returns what is kept of a step's rows beside keys and values; None: nothing."""
    cache = step.cache
    ids = cache.expert_ids(*layer.ids_shape) if cache.keeps_experts else None
    changed = cache.changed_choices if cache.keeps_changed else None
    return None if ids is None and changed is None else Kept(step.slots, ids, changed)


def _together(rows: Sequence[Tensor], batches: Sequence[ForwardBatch]) -> Tensor:
    """Returns the rows of a step in one tensor. rows: of each of its batches, [T, H] or more"""
    if len(batches) == 1:
        return rows[0]
    return torch.cat([each[: batch.num_tokens] for each, batch in zip(rows, batches, strict=True)])


def _project(weight: Linear, rows: Tensor, numerics: Numerics, out: Tensor | None = None) -> Tensor:
    """Returns the logits of rows [n, H], [n, vocab_size] float32, in `out`, if given."""
    num_rows = rows.shape[0]
    padding = numerics.padded(num_rows) - num_rows
    found = weight(functional.pad(rows, (0, 0, 0, padding)) if padding else rows)[:num_rows]
    return found.float() if out is None else out.copy_(found)


class BatchInputs:
    """The addresses of a batch for the kernels. Batches of one size are often written to the same tensors.

    is_small: whether their memory is kept beside that of others
    attend: None where the batch has no rows
    logits: where those of `logit_rows` go; none at first
    """

    def __init__(self, batch: ForwardBatch, shapes: Sequence[AttendShape]):
        self._batch = batch
        self.is_small = is_small(batch.num_padded, *batch.block_tables.shape)
        self.logit_rows = self.logits = torch.empty(0)
        self.attend: AttendRows | None = None
        if batch.num_tokens:
            tables = batch.query_starts, batch.block_tables
            self.attend = AttendRows(shapes, batch.positions, *tables, batch.block_size)
        slots = batch.state_slots
        self._sequences = None if slots is None else SequenceStates(batch.query_starts, slots)
        self.rows = RowInputs(
            num_rows=batch.num_tokens,
            ids=batch.input_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            attend=0 if self.attend is None else self.attend.address,
            sequences=0 if self._sequences is None else self._sequences.address,
        )

    def is_of(self, batch: ForwardBatch) -> bool:
        """Returns whether the batch is in the same tensors, but for its logit rows."""
        mine = self._batch
        return (
            batch.input_ids is mine.input_ids
            and batch.positions is mine.positions
            and batch.slot_mapping is mine.slot_mapping
            and batch.query_starts is mine.query_starts
            and batch.block_tables is mine.block_tables
            and batch.state_slots is mine.state_slots
            and (batch.num_tokens, batch.block_size) == (mine.num_tokens, mine.block_size)
        )

    def project(self, logit_rows: Tensor, logits: Tensor) -> None:
        """Takes logits of these rows, [num_rows] int64, into a tensor [num_rows, vocab]."""
        self.logit_rows, self.logits = logit_rows, logits
        self.rows = self.rows._replace(
            num_logits=logit_rows.shape[0], logit_rows=logit_rows.data_ptr(), logits=logits.data_ptr()
        )


class RecordedRunner:
    """StackRunner by the compiled kernels: a step is a run of what was recorded for steps of its size or larger.

    Logits of a step hold until the next one.
    """

    def __init__(
        self, stack: AnyStack, rope: RopeTable, shapes: Sequence[AttentionShape], vocab_size: int, clock: PartClock
    ):
        """shapes: of the layers, each once"""
        self._stack = stack
        self._clock = clock
        self._rope = rope
        self._vocab_size = vocab_size
        self._shapes = tuple(dict.fromkeys(shape.for_kernels for shape in shapes))
        self._recorded: list[RecordedStep] = []  # for whole batches and first halves; for second halves
        self._rows: Tensor | None = None  # [capacity, H], what the head projects, until the next step
        self._inputs: dict[int, BatchInputs] = {}  # by the ids' tensor; the one that was used last at the end
        self._logits = torch.empty(0, vocab_size)

    def __call__(self, step: StepInputs) -> Tensor:
        if step.overlap:
            return self._run_halves(step)
        recorded, logit_rows = self._recorded_for(step.batch, 0, step.cache), step.batch.logit_rows
        if logit_rows.shape[0] > self._logits.shape[0]:
            self._inputs.clear()  # with all views of what is too small, which is freed
            self._logits = self._logits.new_empty(0, self._vocab_size)
            self._logits = self._logits.new_empty(logit_rows.shape[0], self._vocab_size)
        inputs = self._inputs.pop(id(step.batch.input_ids), None)
        if inputs is None or not inputs.is_of(step.batch):
            inputs = BatchInputs(step.batch, self._shapes)
            others = [key for key, each in self._inputs.items() if each.is_small == inputs.is_small]
            if len(others) >= (KEPT_SIZES if inputs.is_small else 1):
                del self._inputs[others[0]]
        elif inputs.attend is not None:
            inputs.attend.plan()
        self._inputs[id(step.batch.input_ids)] = inputs
        if inputs.logit_rows is not logit_rows:
            inputs.project(logit_rows, self._logits[: logit_rows.shape[0]])
        if step.hidden is not None:
            recorded.hidden(step.hidden.shape[1])[: len(step.hidden)] = step.hidden
        recorded.run(RecordedRun(inputs.rows, step.num_chunks, step.overlap))
        self._rows = recorded.last
        return inputs.logits

    def _run_halves(self, step: StepInputs) -> Tensor:
        halves = step.batch.halves(COMPILED)
        recorded = [self._recorded_for(half, number, step.cache) for number, half in enumerate(halves)]
        inputs = [BatchInputs(half, self._shapes) for half in halves]
        runs = [RecordedRun(each.rows, step.num_chunks, step.overlap) for each in inputs]
        take_turns([each.run_in_turns(run) for each, run in zip(recorded, runs, strict=True)])
        self._rows = _together([each.last for each in recorded], halves)
        rows = self._rows.index_select(0, step.batch.logit_rows)
        logits: Tensor = self._stack.head(rows)
        return logits

    def logits_of(self, rows: range) -> Tensor:
        logits: Tensor = self._stack.head(self.rows[rows.start : rows.stop])
        return logits

    @property
    def rows(self) -> Tensor:
        assert self._rows is not None, "no step has run"
        return self._rows

    def _recorded_for(self, batch: ForwardBatch, number: int, cache: KvCache) -> "RecordedStep":
        """Returns the recording of this number, that holds a batch."""
        if number < len(self._recorded):
            found = self._recorded[number]
            if found.capacity >= batch.num_tokens and found.cache is cache:
                return found
        del self._recorded[number:]  # frees the buffers before there are new ones
        self._rows = None
        self._recorded.append(self.record(batch.num_tokens, cache))
        return self._recorded[number]

    def record(self, num_rows: int, cache: KvCache) -> "RecordedStep":
        """Returns the layers, recorded for steps of at least num_rows rows over this cache."""
        capacity = max(SMALLEST, 1 << (max(num_rows, 1) - 1).bit_length())
        return RecordedStep(self._stack, capacity, cache, self._rope, self._shapes, self._clock)


class RecordedStep(Step, Recorder):
    """The rows of any batch up to a capacity, and the layers of a decoder recorded for them.

    last: the rows that the head projects, [capacity, H]
    """

    has_rows = True
    expanded_rows = range(0)

    def __init__(
        self,
        stack: AnyStack,
        capacity: int,
        cache: KvCache,
        rope: RopeTable,
        shapes: Sequence[AttendShape],
        clock: PartClock,
    ):
        Recorder.__init__(self, cpu_library(), capacity, clock, rope.tables[0].device)
        self.cache = cache
        self._shapes = shapes
        self.turns = tuple(self._turns(f"turns{number}", table) for number, table in enumerate(rope.tables))
        scales = rope.query_scales
        self.query_scales = None if scales is None else self.gather("scales", RowTable.of(scales), self.positions)
        [self.last] = take_turns([stack(self)])
        assert isinstance(stack.head, PackedLinear), "kernels take packed weights"
        self.project_rows(stack.head, self.last)

    def _turns(self, name: str, table: Tensor) -> Tensor:
        """Records the rows' turns. name: of their buffer;  table: of all positions, or the row that is that of each"""
        if len(table) == 1:
            return table.repeat(self.capacity, 1)
        turns: Tensor = self.gather(name, RowTable.of(torch.view_as_real(table).flatten(1)), self.positions)
        return torch.view_as_complex(turns.view(self.capacity, -1, 2))

    def begin(self, part: int) -> None:
        self.part = part

    def hidden(self, width: int) -> Tensor:
        return self.buffer("hidden", width)

    def attend(self, q: Tensor, shape: AttentionShape, layer: int, seen: Seen = Seen()) -> Tensor:
        cache, scales, of_layer = self.cache.layer(layer), self.cache.scales(layer), shape.for_kernels
        number = self._shapes.index(of_layer)
        return self.attend_rows(q, cache, of_layer, seen, scales, number)

    def attend_indexed(self, q: Tensor, layer: int, index: IndexRows) -> Tensor:
        chosen = index.q, index.weights, self.cache.layer(index.layer)
        return self.attend_chosen(q, self.cache.layer(layer), self._shapes[0], chosen, index.shape)

    def attend_expanded(self, q: Tensor, layer: int, heads: HeadProjections, out: Tensor) -> None:
        raise AssertionError("the kernels attend long chunks as any other")

    def delta_rule_of(
        self, rows: Tensor, apart: tuple[Tensor, Tensor] | None, weights: DeltaWeights, layer: int
    ) -> Tensor:
        return self.delta_rule(rows, apart, weights, self.cache.states_of(layer))

    def convolve(self, rows: Tensor, weights: ConvWeights, layer: int) -> Tensor:
        return self.causal_conv(rows, weights, self.cache.states_of(layer)[0])

    def state_space_of(self, mixed: Tensor, steps: Tensor, weights: StateSpaceWeights, layer: int) -> Tensor:
        return self.state_space(mixed, steps, weights, self.cache.states_of(layer)[-1])

    def selective_space_of(self, rows: SelectiveRows, weights: SelectiveWeights, layer: int) -> Tensor:
        return self.selective_space(rows, weights, self.cache.states_of(layer)[-1])

    def compressed_attention(self, rows: CompressedRows, weights: CompressedWeights, layer: int) -> Tensor:
        return self.attend_compressed(rows, weights, self.cache.layer(layer), self.slots)

    def moe(self, layer: MoeLayer, shared: SharedExpert | None, x: Tensor) -> Turns[Tensor]:
        yield from ()  # turns are taken when it runs
        out = layer.record(self, x, _kept(self, layer))
        if shared is not None:
            self.begin(MLP)
            rows = self.mlp(shared.mlp, x)
            gate = None if shared.gate is None else self.linear("shared_gate", shared.gate, x)
            self.add_gated_(out, rows, gate)
        return out
