"""A decoder from token ids to logits, layer after layer, over whichever operations the machine has.

There is no early return: a rank without tokens goes through every MoE layer, because all ranks must take part in its
collectives.

Shape words: T = rows of the batch (padded), H = hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.ep.moe_layer import MoeLayer, Turns
from moe_serve.kernels.cpu.operations import AnyLinear, AnyMlp, AnyTable
from moe_serve.kernels.part_clock import ATTENTION, GATE, MLP, VOCABULARY
from moe_serve.kernels.rows import LayerNorm
from moe_serve.models.decoder.gqa import GqaLayer
from moe_serve.models.decoder.mla import MlaLayer
from moe_serve.models.decoder.step import SharedExpert, Step

AnyNorm = Tensor | LayerNorm  # the weight of an RMS norm, or a layer norm


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer's weights; it has either `moe` or `mlp`.

    shared: the shared expert, where the MoE layer leaves it to the operations
    """

    input_norm: AnyNorm
    attention: GqaLayer | MlaLayer
    post_norm: AnyNorm
    moe: MoeLayer | None
    mlp: AnyMlp | None
    shared: SharedExpert | None


@dataclass(frozen=True)
class StackFactors:
    """Factors on embeddings, on what sublayers add to the residual, and on the rows that are projected to logits."""

    embedding: float
    residual: float
    logits: float


@dataclass(frozen=True, eq=False)
class DecoderStack:
    """Embedding, all layers, the norm behind them, and the projection to logits.

    factors: as in ModelSpec
    """

    embed: AnyTable
    layers: Sequence[DecoderLayer]
    norm: AnyNorm
    eps: float
    head: AnyLinear
    factors: StackFactors

    def __call__(self, do: Step) -> Turns[Tensor]:
        """Returns the rows that the head projects to logits, [T, H]."""
        do.begin(VOCABULARY)
        x: Tensor = do.gather("residual", self.embed, do.ids)  # the residual, which is changed in place
        if self.factors.embedding != 1:
            do.scale_(x, self.factors.embedding)
        delta = None  # what the last sublayer adds to the residual
        for layer in self.layers:
            if do.has_rows:
                do.begin(ATTENTION)
                delta = layer.attention(self._normed(x, delta, layer.input_norm, do), do)
            do.begin(MLP if layer.moe is None else GATE)
            normed = self._normed(x, delta, layer.post_norm, do)
            if layer.moe is None:
                delta = do.mlp(layer.mlp, normed)
            else:
                delta = yield from do.moe(layer.moe, layer.shared, normed)
        do.begin(VOCABULARY)
        last = self._normed(x, delta, self.norm, do)
        if self.factors.logits != 1:
            do.scale_(last, self.factors.logits)
        return last

    def _normed(self, x: Tensor, delta: Tensor | None, weight: AnyNorm, do: Step) -> Tensor:
        if isinstance(weight, LayerNorm):
            return do.layer_norm(x, delta, weight, self.eps)
        if delta is None:
            return do.rms_norm(x, weight, self.eps)
        return do.add_rms_norm(x, delta, weight, self.eps, self.factors.residual)


@dataclass(frozen=True)
class StepInputs:
    """One step.

    num_chunks: of the MoE layers, as MoeLayer takes them;  overlap: the batch runs in halves that take turns
    has_padding: rows without a cache slot are padding, which only the device knows of; the host counts them as real
    """

    batch: ForwardBatch
    cache: KvCache
    num_chunks: int
    overlap: bool
    has_padding: bool = False


class StackRunner(Protocol):
    """Runs a decoder for a step."""

    def __call__(self, step: StepInputs) -> Tensor:
        """Returns the logits of the step's logit rows, [num_logit_rows, vocab_size] float32."""
        ...

    def logits_of(self, rows: range) -> Tensor:
        """Returns the logits of other rows of the step that ran last, [len(rows), vocab_size] float32.

        Only after a step whose batch has prompt rows.
        """
        ...
