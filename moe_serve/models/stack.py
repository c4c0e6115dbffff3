"""The layers of a decoder, one after the other, over whichever operations the machine has.

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
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.models.layers import GqaLayer
from moe_serve.models.mla import MlaLayer
from moe_serve.models.operations import AnyMlp, Operations


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer's weights; it has either `moe` or `mlp`.

    shared: the shared expert, where the MoE layer leaves it to the operations
    """

    input_norm: Tensor
    attention: GqaLayer | MlaLayer
    post_norm: Tensor
    moe: MoeLayer | None
    mlp: AnyMlp | None
    shared: AnyMlp | None


@dataclass(frozen=True, eq=False)
class DecoderStack:
    """All layers, and the norm behind them."""

    layers: Sequence[DecoderLayer]
    norm: Tensor
    eps: float

    def __call__(self, x: Tensor, do: Operations) -> Tensor:
        """Returns the normed rows after all layers, [T, H]. x: [T, H], the residual, which is changed in place"""
        delta = None  # what the last sublayer adds to the residual
        for layer in self.layers:
            if do.has_rows:
                delta = layer.attention(self._normed(x, delta, layer.input_norm, do), do)
            normed = self._normed(x, delta, layer.post_norm, do)
            delta = do.mlp(layer.mlp, normed) if layer.moe is None else do.moe(layer.moe, layer.shared, normed)
        return self._normed(x, delta, self.norm, do)

    def _normed(self, x: Tensor, delta: Tensor | None, weight: Tensor, do: Operations) -> Tensor:
        return do.rms_norm(x, weight, self.eps) if delta is None else do.add_rms_norm(x, delta, weight, self.eps)


@dataclass(frozen=True)
class StepInputs:
    """What one step gives to the layers beside the embedded rows.

    turns: [T, rotated width / 2] complex64, of each row's position
    num_chunks, overlap: of the MoE layers, as MoeLayer takes them
    """

    batch: ForwardBatch
    cache: KvCache
    turns: Tensor
    num_chunks: int
    overlap: bool


class StackRunner(Protocol):
    """Runs the layers for a step."""

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """Returns the normed rows after all layers, [T, H]; valid until the next step. x: [T, H], may be changed"""
        ...
