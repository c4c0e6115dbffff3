"""The operations of a decoder by torch, done at once: on GPUs, and on CPUs without the compiled kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.attention_dp.attention import PagedAttention, attend_indexed
from moe_serve.attention_dp.attention_plan import AttentionPlan, Chunk
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.kernels.indexed_attention import index_write
from moe_serve.kernels.linear import HeadLinear, Linear
from moe_serve.kernels.norm import LayerNorm, add_rms_norm, layer_norm, rms_norm, rms_norm_
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.part_clock import PartClock
from moe_serve.kernels.rope import MlaWidths, mla_rope_write, rope_write
from moe_serve.kernels.rows import clip_, multiply_rows_, scale_
from moe_serve.models.layers import RopeTable
from moe_serve.models.operations import IndexRows, SharedExpert
from moe_serve.models.stack import DecoderStack, StepInputs
from moe_serve.models.weight_forms import GatedMlp


@dataclass
class TorchRunner:
    """StackRunner by torch."""

    stack: DecoderStack
    rope: RopeTable
    attention: PagedAttention
    numerics: Numerics
    clock: PartClock
    _rows: Tensor | None = None  # of the last step, where more logits of it are wanted

    @torch.inference_mode()
    def __call__(self, step: StepInputs) -> Tensor:
        self._rows = None
        positions, table = step.batch.positions, self.rope.query_scales
        scales = None if table is None else table.index_select(0, positions)
        do = TorchStep(step, self.attention, {}, self.rope(positions), scales, self.numerics, self.clock)
        rows = self.stack(do)
        self._rows = rows if step.batch.prompt_rows else None
        return do.logits(self.stack.head, rows)

    @torch.inference_mode()
    def logits_of(self, rows: range) -> Tensor:
        assert self._rows is not None, "the last batch had no prompt rows"
        return _project(self.stack.head, self._rows[rows.start : rows.stop], self.numerics)


@dataclass(frozen=True)
class TorchStep:
    """Operations on the rows of one batch; see operations.py.

    plans: what to attend, by window and chunk, filled as layers ask
    turns: [T, rotated width / 2] complex64, of each row's position
    query_scales: [T, 1] float32, likewise; None: no layer asks for them
    """

    step: StepInputs
    attention: PagedAttention
    plans: dict[tuple[int | None, int | None], AttentionPlan]
    turns: Tensor
    query_scales: Tensor | None
    numerics: Numerics
    clock: PartClock

    @property
    def has_rows(self) -> bool:
        return self.step.batch.num_tokens > 0

    @property
    def long_chunks(self) -> tuple[Chunk, ...]:
        return self._plan(None, None).long_chunks if self.has_rows else ()

    def begin(self, part: int) -> None:
        self.clock.turn(part)

    def embed(self, table: Tensor) -> Tensor:
        return functional.embedding(self.step.batch.input_ids, table)

    def logits(self, weight: Linear, x: Tensor) -> Tensor:
        return _project(weight, x.index_select(0, self.step.batch.logit_rows), self.numerics)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        rms_norm_(x, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        return add_rms_norm(x, delta, weight, eps, factor)

    def scale_(self, x: Tensor, factor: float) -> None:
        scale_(x, factor)

    def clip_(self, x: Tensor, limit: float) -> None:
        clip_(x, limit)

    def layer_norm(self, x: Tensor, delta: Tensor | None, norm: LayerNorm, eps: float) -> Tensor:
        return layer_norm(x, delta, norm, eps)

    def linear(self, name: str, weight: Linear, x: Tensor) -> Tensor:
        return weight(x)

    def absorb(self, weight: HeadLinear, q: Tensor, nope: int) -> Tensor:
        return torch.cat((weight(q[..., :nope]), q[..., nope:]), dim=-1)

    def expand(self, weight: HeadLinear, latents: Tensor) -> Tensor:
        return weight(latents)

    def scale_queries_(self, q: Tensor) -> None:
        assert self.query_scales is not None
        multiply_rows_(q, self.query_scales)

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
        turns = self.turns if rotates else self.turns[:, :0]
        cached = self.step.cache.layer(layer)
        rope_write(qkv, norm, eps, turns, self.step.batch.slot_mapping, cached, *heads, norm_last)

    def mla_rope_write(self, q: Tensor, row: Tensor, norm: Tensor, eps: float, layer: int, widths: MlaWidths) -> None:
        slots, cached = self.step.batch.slot_mapping, self.step.cache.layer(layer)
        mla_rope_write(q, row, norm, eps, self.turns, slots, cached, widths)

    def attend(
        self,
        q: Tensor,
        layer: int,
        window: int | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        assert self.has_rows, "nothing to attend"
        return self.attention(q, self.step.cache, layer, self._plan(window, chunk), sinks)

    def _plan(self, window: int | None, chunk: int | None) -> AttentionPlan:
        key = window, chunk
        if key not in self.plans:
            self.plans[key] = self.attention.plan(self.step.batch, window, chunk)
        return self.plans[key]

    def attend_indexed(self, q: Tensor, layer: int, index: IndexRows) -> Tensor:
        batch, cached, keys = self.step.batch, self.step.cache.layer(layer), self.step.cache.layer(index.layer)
        index_write(index.q, index.k, self.turns, batch.slot_mapping, keys)
        rows = index.q, index.weights, index.shape.topk
        return attend_indexed(q, rows, batch, (cached, keys), self.attention.layout.value_width, self.attention.scale)

    def cached_rows(self, layer: int, chunk: Chunk) -> Tensor:
        return self.step.cache.gather(layer, chunk.rows, 1)[0][0, 0]

    def moe(self, layer: MoeLayer, shared: SharedExpert | None, x: Tensor) -> Tensor:
        assert shared is None, "the MoE layer computes its shared expert itself, while rows travel"
        return layer(x, self.step.batch.num_tokens, self.step.num_chunks, self.step.overlap)

    def mlp(self, weights: GatedMlp, x: Tensor) -> Tensor:
        return weights(x)


def _project(weight: Linear, rows: Tensor, numerics: Numerics) -> Tensor:
    """Returns the logits of rows [n, H], [n, vocab_size] float32."""
    num_rows = rows.shape[0]
    padding = numerics.padded(num_rows) - num_rows
    return weight(functional.pad(rows, (0, 0, 0, padding)) if padding else rows)[:num_rows].float()
