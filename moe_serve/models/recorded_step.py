"""The operations of a decoder, recorded once for the compiled CPU kernels and run for every step."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moe_serve.attention_dp.attention import AttentionShape
from moe_serve.attention_dp.attention_plan import Chunk
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.kernels.cpu.attention import AttendRows, AttendShape
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.linear import PackedHeads
from moe_serve.kernels.cpu.recorder import RecordedRun, Recorder
from moe_serve.kernels.rope import MlaWidths
from moe_serve.models.stack import DecoderStack, StepInputs
from moe_serve.models.weight_forms import PackedMlp

SMALLEST = 64  # rows that a recording is for; doubled as larger steps come


class RecordedRunner:
    """StackRunner by the compiled kernels: a step is a run of what was recorded for steps of its size or larger."""

    def __init__(self, stack: DecoderStack, shape: AttentionShape):
        self._stack = stack
        layout = shape.layout
        latent = layout.value_width if layout.kind == "mla" else None
        self._shape = AttendShape(layout.num_heads, shape.group, layout.width, shape.scale, latent)
        self._recording: Recording | None = None

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        batch, num_rows = step.batch, step.batch.num_tokens
        recording = self._recording
        if recording is None or recording.recorder.capacity < num_rows or recording.cache is not step.cache:
            recording = self._recording = self._record(max(num_rows, 1), step.cache)
        recording.x[:num_rows].copy_(x)  # widens what is stored in bfloat16
        attend = None
        if num_rows:
            starts = torch.tensor([0, *accumulate(batch.host_query_lens)], dtype=torch.int32)
            tables = batch.block_tables.to(torch.int32)
            attend = AttendRows(self._shape, batch.positions, starts, tables, batch.block_size)
        run = RecordedRun(num_rows, attend, batch.slot_mapping, step.turns, step.num_chunks, step.overlap)
        recording.recorder.run(run)
        return recording.out[:num_rows]

    def _record(self, num_rows: int, cache: KvCache) -> "Recording":
        """Returns the layers, recorded for steps of at least num_rows rows over this cache."""
        self._recording = None  # frees its buffers before there are new ones
        recorder = Recorder(cpu_library(), max(SMALLEST, 1 << (num_rows - 1).bit_length()))
        x = recorder.buffer("residual", self._stack.norm.shape[0])
        return Recording(recorder, cache, x, self._stack(x, RecordedStep(recorder, cache, self._shape)))


@dataclass(frozen=True, eq=False)
class Recording:
    """x: where a step's rows are written;  out: where its results are; both [capacity, H]"""

    recorder: Recorder
    cache: KvCache
    x: Tensor
    out: Tensor


class RecordedStep:
    """Operations on the rows of any batch up to the recorder's capacity; see operations.py."""

    has_rows = True
    long_chunks: tuple[Chunk, ...] = ()

    def __init__(self, recorder: Recorder, cache: KvCache, shape: AttendShape):
        self._recorder = recorder
        self._cache = cache
        self._shape = shape
        self.rms_norm = recorder.rms_norm
        self.add_rms_norm = recorder.add_rms_norm
        self.linear = recorder.linear

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

    def rope_write(self, qkv: Tensor, norm: Tensor | None, eps: float, layer: int, heads: tuple[int, int]) -> None:
        self._recorder.rope_write(qkv, norm, eps, self._cache.layer(layer), *heads)

    def mla_rope_write(self, q: Tensor, row: Tensor, norm: Tensor, eps: float, layer: int, widths: MlaWidths) -> None:
        self._recorder.mla_rope_write(q, row, norm, eps, self._cache.layer(layer), widths)

    def attend(self, q: Tensor, layer: int) -> Tensor:
        return self._recorder.attend(q, self._cache.layer(layer), self._shape)

    def cached_rows(self, layer: int, chunk: Chunk) -> Tensor:
        raise AssertionError("the kernels attend long chunks as any other")

    def moe(self, layer: MoeLayer, shared: PackedMlp | None, x: Tensor) -> Tensor:
        out = layer.record(self._recorder, x)
        if shared is not None:
            self._recorder.add(out, self.mlp(shared, x))
        return out

    def mlp(self, weights: PackedMlp, x: Tensor) -> Tensor:
        return self._recorder.mlp(x, weights.experts)
