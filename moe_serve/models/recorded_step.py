"""The operations of a decoder, recorded once for the compiled CPU kernels and run for every step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.attention_dp.attention import AttentionShape
from moe_serve.attention_dp.attention_plan import Chunk
from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.kernels.cpu.attention import AttendRows, AttendShape
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.linear import PackedHeads, PackedLinear, RowTable
from moe_serve.kernels.cpu.recorder import IDS, POSITIONS, RecordedRun, Recorder, RowInputs
from moe_serve.kernels.part_clock import MLP, PartClock
from moe_serve.kernels.rope import MlaWidths
from moe_serve.models.layers import RopeTable
from moe_serve.models.operations import IndexRows, SharedExpert
from moe_serve.models.stack import DecoderStack, StepInputs
from moe_serve.models.weight_forms import PackedMlp

SMALLEST = 64  # rows that a recording is for; doubled as larger steps come


class RecordedRunner:
    """StackRunner by the compiled kernels: a step is a run of what was recorded for steps of its size or larger.

    Logits of a step hold until the next one whose batch is in the same tensors.
    """

    def __init__(self, stack: DecoderStack, rope: RopeTable, shape: AttentionShape, vocab_size: int, clock: PartClock):
        self._stack = stack
        self._clock = clock
        self._rope = rope
        self._vocab_size = vocab_size
        layout = shape.layout
        latent = layout.value_width if layout.kind == "mla" else None
        self._shape = AttendShape(layout.num_heads, shape.group, layout.width, shape.scale, latent)
        self._recording: Recording | None = None
        self._inputs: StepRows | None = None

    def __call__(self, step: StepInputs) -> Tensor:
        batch, num_rows = step.batch, step.batch.num_tokens
        recording = self._recording
        if recording is None or recording.recorder.capacity < num_rows or recording.cache is not step.cache:
            recording = self._recording = self._record(max(num_rows, 1), step.cache)
        inputs = self._inputs
        if inputs is None or not inputs.is_of(batch):
            inputs = self._inputs = StepRows(batch, self._shape, self._vocab_size)
        elif inputs.attend is not None:
            inputs.attend.plan()
        recording.recorder.run(RecordedRun(inputs.rows, step.num_chunks, step.overlap))
        return inputs.logits

    def logits_of(self, rows: range) -> Tensor:
        assert self._recording is not None, "no step has run"
        logits: Tensor = self._stack.head(self._recording.rows[rows.start : rows.stop])
        return logits

    def _record(self, num_rows: int, cache: KvCache) -> "Recording":
        """Returns the layers, recorded for steps of at least num_rows rows over this cache."""
        self._recording = None  # frees its buffers before there are new ones
        recorder = Recorder(cpu_library(), max(SMALLEST, 1 << (num_rows - 1).bit_length()), self._clock)
        step = RecordedStep(recorder, cache, self._rope, self._shape)
        rows = self._stack(step)
        step.logits(self._stack.head, rows)
        return Recording(recorder, cache, rows)


class StepRows:
    """Where the kernels find a batch. Batches of one size are often written to the same tensors.

    attend: None where the batch has no rows;  logits: where they go
    """

    def __init__(self, batch: ForwardBatch, shape: AttendShape, vocab_size: int):
        self._batch = batch
        self.logits = torch.empty(batch.logit_rows.shape[0], vocab_size)
        self.attend: AttendRows | None = None
        if batch.num_tokens:
            tables = batch.query_starts, batch.block_tables
            self.attend = AttendRows(shape, batch.positions, *tables, batch.block_size)
        self.rows = RowInputs(
            num_rows=batch.num_tokens,
            ids=batch.input_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            attend=0 if self.attend is None else self.attend.address,
            num_logits=self.logits.shape[0],
            logit_rows=batch.logit_rows.data_ptr(),
            logits=self.logits.data_ptr(),
        )

    def is_of(self, batch: ForwardBatch) -> bool:
        """Returns whether the batch is in the same tensors."""
        mine = self._batch
        return (
            batch.input_ids is mine.input_ids
            and batch.positions is mine.positions
            and batch.slot_mapping is mine.slot_mapping
            and batch.logit_rows is mine.logit_rows
            and batch.query_starts is mine.query_starts
            and batch.block_tables is mine.block_tables
            and (batch.num_tokens, batch.block_size) == (mine.num_tokens, mine.block_size)
        )


@dataclass(frozen=True, eq=False)
class Recording:
    """The layers as recorded, over one cache. rows: [capacity, H], what the head projects, until the next step"""

    recorder: Recorder
    cache: KvCache
    rows: Tensor


class RecordedStep:
    """Operations on the rows of any batch up to the recorder's capacity; see operations.py."""

    has_rows = True
    long_chunks: tuple[Chunk, ...] = ()

    def __init__(self, recorder: Recorder, cache: KvCache, rope: RopeTable, shape: AttendShape):
        self._recorder = recorder
        self._cache = cache
        self._shape = shape
        self.rms_norm = recorder.rms_norm
        self.rms_norm_ = recorder.rms_norm_
        self.add_rms_norm = recorder.add_rms_norm
        self.scale_ = recorder.scale_
        self.clip_ = recorder.clip_
        self.layer_norm = recorder.layer_norm
        self.linear = recorder.linear
        self._turns = recorder.gather("turns", RowTable.of(torch.view_as_real(rope.table).flatten(1)), POSITIONS)
        scales = rope.query_scales
        self._query_scales = None if scales is None else recorder.gather("scales", RowTable.of(scales), POSITIONS)

    def begin(self, part: int) -> None:
        self._recorder.part = part

    def embed(self, table: RowTable) -> Tensor:
        return self._recorder.gather("residual", table, IDS)

    def logits(self, weight: PackedLinear, x: Tensor) -> Tensor:
        return self._recorder.logits(weight, x)

    def absorb(self, weight: PackedHeads, q: Tensor, nope: int) -> Tensor:
        _, heads, width = q.shape
        latent = self._shape.width - (width - nope)
        out = self._recorder.buffer("latent_queries", heads, self._shape.width)
        self._recorder.heads(weight, q[..., :nope], out[..., :latent])
        self._recorder.copy_heads(q[..., nope:], out[..., latent:])
        return out

    def expand(self, weight: PackedHeads, latents: Tensor) -> Tensor:
        out = self._recorder.buffer("expanded", weight.num_heads, weight.out_features)
        return self._recorder.heads(weight, latents, out)

    def scale_queries_(self, q: Tensor) -> None:
        assert self._query_scales is not None
        self._recorder.multiply_rows(q, self._query_scales, q)

    def rope_write(
        self,
        qkv: Tensor,
        norm: Tensor | None,
        eps: float,
        layer: int,
        heads: tuple[int, int],
        rotates: bool,
        norm_last: bool,
    ) -> None:
        turns = self._turns if rotates else self._turns[:, :0]
        self._recorder.rope_write(qkv, norm, eps, turns, self._cache.layer(layer), heads, norm_last)

    def mla_rope_write(self, q: Tensor, row: Tensor, norm: Tensor, eps: float, layer: int, widths: MlaWidths) -> None:
        self._recorder.mla_rope_write(q, row, norm, eps, self._turns, self._cache.layer(layer), widths)

    def attend(
        self,
        q: Tensor,
        layer: int,
        window: int | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        return self._recorder.attend(q, self._cache.layer(layer), self._shape, window, sinks, chunk)

    def attend_indexed(self, q: Tensor, layer: int, index: IndexRows) -> Tensor:
        keys = self._cache.layer(index.layer)
        self._recorder.index_write(index.q, index.k, self._turns, keys)
        found = index.q, index.weights, keys
        return self._recorder.attend_indexed(q, self._cache.layer(layer), self._shape, found, index.shape)

    def cached_rows(self, layer: int, chunk: Chunk) -> Tensor:
        raise AssertionError("the kernels attend long chunks as any other")

    def moe(self, layer: MoeLayer, shared: SharedExpert | None, x: Tensor) -> Tensor:
        out = layer.record(self._recorder, x)
        if shared is not None:
            self.begin(MLP)
            rows = self.mlp(shared.mlp, x)
            gate = None if shared.gate is None else self.linear("shared_gate", shared.gate, x)
            self._recorder.add(out, rows, gate)
        return out

    def mlp(self, weights: PackedMlp, x: Tensor) -> Tensor:
        return self._recorder.mlp(x, weights.experts)
