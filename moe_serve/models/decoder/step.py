"""A step as the layers of a decoder see it: operations on its rows, its cache, attention and the MoE layer.

Shape words: T = rows of the step (padded; when recorded, as many as a step may have), H = hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from moe_serve.attention_dp.attention import AttentionShape, HeadProjections
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.ep.moe_layer import MoeLayer, Turns
from moe_serve.kernels.causal_conv import ConvWeights
from moe_serve.kernels.compressed_attention import CompressedRows, CompressedWeights
from moe_serve.kernels.cpu.operations import AnyLinear, AnyMlp, Operations
from moe_serve.kernels.delta_rule import DeltaWeights
from moe_serve.kernels.forms import Seen
from moe_serve.kernels.indexed_attention import IndexerShape
from moe_serve.kernels.rows import multiply_by_sigmoid_
from moe_serve.kernels.selective_space import SelectiveRows, SelectiveWeights
from moe_serve.kernels.state_space import StateSpaceWeights
from moe_serve.models.decoder.weight_forms import Fp8Mlp, GatedMlp


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """An MLP that every token goes through.

    gate: x [T, H] -> [T, 1]; the rows of the MLP are multiplied by its sigmoid; None: by nothing
    """

    mlp: AnyMlp
    gate: AnyLinear | None

    def __call__(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Computes rows x [T, H], and returns what adds them to others [T, H], which are used up.

        A GPU leaves the last product to the sum: cuBLAS adds to what is there without another launch.
        """
        logits = None if self.gate is None else self.gate(x)
        if x.is_cuda:
            assert isinstance(self.mlp, GatedMlp | Fp8Mlp)
            mlp: Any = self.mlp  # each adds what its own `middle` gives
            return partial(mlp.add_down_, mlp.middle(x, logits))
        rows: Tensor = self.mlp(x)
        return (rows if logits is None else multiply_by_sigmoid_(rows, logits)).add_


@dataclass(frozen=True, eq=False)
class IndexRows:
    """The queries, keys and weights that an indexer computes for a step's rows.

    q: [T, heads, width];  k: [T, width];  weights: [T, heads];  layer: of the cache, that holds its keys
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    layer: int
    shape: IndexerShape


class Step(Operations, ABC):
    """The rows of a step and what can be done with them: at once by torch, or recorded (runners.py).

    ids, slots: [T] int64, of tokens, and where their keys and values go in the cache
    turns:      [T, rotated width / 2] complex64, of each row's position, by each of the model's rotations
    query_scales: [T, 1] float32, likewise; None: no layer asks for them
    has_rows:   whether attention has anything to do. MoE layers run in any case: all ranks take part
    """

    ids: Tensor
    slots: Tensor
    turns: tuple[Tensor, ...]
    query_scales: Tensor | None
    cache: KvCache
    has_rows: bool

    @abstractmethod
    def hidden(self, width: int) -> Tensor:
        """Returns the rows of the layers before one that predicts, [T, width]."""

    @property
    @abstractmethod
    def expanded_rows(self) -> range:
        """Rows that `attend` leaves to `attend_expanded`, behind all other rows."""

    @abstractmethod
    def begin(self, part: int) -> None:
        """Begins a part of the step, one of part_clock.PARTS; MoE layers begin theirs themselves."""

    @abstractmethod
    def attend(self, q: Tensor, shape: AttentionShape, layer: int, seen: Seen = Seen()) -> Tensor:
        """Returns the attention of the rows, [T, heads, group, Dv]; zeros for padding rows and expanded_rows.

        q:      [T, heads, group, D]. The keys and values of these rows are already in the cache.
        shape:  of the layer, one of the model's
        """

    @abstractmethod
    def attend_indexed(self, q: Tensor, layer: int, index: IndexRows) -> Tensor:
        """Returns what `attend` returns, over the cached keys that an indexer chooses for each row."""

    @abstractmethod
    def attend_expanded(self, q: Tensor, layer: int, heads: HeadProjections, out: Tensor) -> None:
        """Fills expanded_rows of `out` [T, heads, Dv] with attention over keys and values made of cached latents.

        q: [T, heads, nope + rope]. The latents of these rows are already in the cache.
        """

    @abstractmethod
    def delta_rule_of(
        self, rows: Tensor, apart: tuple[Tensor, Tensor] | None, weights: DeltaWeights, layer: int
    ) -> Tensor:
        """Returns what linear attention makes of projected rows; the sequences' states go on by them.

        [T, row_width] -> [T, value_heads * value_width].  apart: as of delta_rule.py;  layer: of the cache's states
        """

    @abstractmethod
    def convolve(self, rows: Tensor, weights: ConvWeights, layer: int) -> Tensor:
        """Returns what a causal convolution makes of rows, [T, width] -> [T, channels]; states go on likewise."""

    @abstractmethod
    def state_space_of(self, mixed: Tensor, steps: Tensor, weights: StateSpaceWeights, layer: int) -> Tensor:
        """Returns what state-space heads make of convolved rows and their steps; states go on likewise."""

    @abstractmethod
    def selective_space_of(self, rows: SelectiveRows, weights: SelectiveWeights, layer: int) -> Tensor:
        """Returns what channels of a state space make of rows, [T, inner]; states go on likewise."""

    @abstractmethod
    def compressed_attention(self, rows: CompressedRows, weights: CompressedWeights, layer: int) -> Tensor:
        """Returns what rows attend in a window and of entries, [T, heads, width], once they are in the cache."""

    @abstractmethod
    def moe(self, layer: MoeLayer, shared: SharedExpert | None, x: Tensor) -> Turns[Tensor]:
        """Returns the MoE layer's rows, plus those of the shared expert if given: [T, H] -> [T, H]."""
