"""The operations that a decoder is written over: done at once by torch, or recorded for the compiled CPU kernels.

Shape words: T = rows of the step (padded; when recorded, as many as a step may have), H = hidden.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moe_serve.attention_dp.attention_plan import Chunk
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.kernels.indexed_attention import IndexerShape
from moe_serve.kernels.norm import LayerNorm
from moe_serve.kernels.rope import MlaWidths
from moe_serve.kernels.rows import multiply_by_sigmoid_

# Weights in the form that the operations of the same decoder read, such as Linear or PackedLinear; see weight_forms.py.
AnyTable = Any
AnyLinear = Any
AnyHeads = Any
AnyMlp = Any


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """An MLP that every token goes through.

    gate: x [T, H] -> [T, 1]; the rows of the MLP are multiplied by its sigmoid; None: by nothing
    """

    mlp: AnyMlp
    gate: AnyLinear | None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]"""
        rows: Tensor = self.mlp(x)
        return rows if self.gate is None else multiply_by_sigmoid_(rows, self.gate(x))


@dataclass(frozen=True, eq=False)
class IndexRows:
    """What an indexer makes of a step's rows.

    q: [T, heads, width];  k: [T, width];  weights: [T, heads];  layer: of the cache, that holds its keys
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    layer: int
    shape: IndexerShape


class Operations(Protocol):
    """What the layers of a decoder do with the rows of a step. All rows [T, ...]; a result is new unless said."""

    @property
    def has_rows(self) -> bool:
        """Whether attention has anything to do. MoE layers run in any case: all ranks take part."""
        ...

    @property
    def long_chunks(self) -> tuple[Chunk, ...]:
        """Chunks that `attend` leaves to the caller, behind all other rows."""
        ...

    def begin(self, part: int) -> None:
        """Begins a part of the step, one of part_clock.PARTS; MoE layers begin theirs themselves."""
        ...

    def embed(self, table: AnyTable) -> Tensor:
        """Returns the rows of the step's token ids in the compute dtype. table: of [vocab_size, H]"""
        ...

    def logits(self, weight: AnyLinear, x: Tensor) -> Tensor:
        """Projects the step's logit rows among x [T, H] -> [num_logit_rows, vocab_size] float32."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As kernels/norm.py."""
        ...

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """The same in place. x: [T, n], may be a slice of wider rows"""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        """Adds factor * delta to x in place, and returns the normed sum."""
        ...

    def scale_(self, x: Tensor, factor: float) -> None:
        """Multiplies x in place."""
        ...

    def clip_(self, x: Tensor, limit: float) -> None:
        """Brings the elements of x to between -limit and limit, in place."""
        ...

    def layer_norm(self, x: Tensor, delta: Tensor | None, norm: LayerNorm, eps: float) -> Tensor:
        """As kernels/norm.py."""
        ...

    def linear(self, name: str, weight: AnyLinear, x: Tensor) -> Tensor:
        """x: [T, k] -> [T, n]. name: of the result, different for results of one layer that live together"""
        ...

    def absorb(self, weight: AnyHeads, q: Tensor, nope: int) -> Tensor:
        """Projects the first `nope` elements of each query head into the latent space.

        q: [T, heads, nope + rope] -> [T, heads, latent + rope]
        """
        ...

    def expand(self, weight: AnyHeads, latents: Tensor) -> Tensor:
        """latents: [T, heads, latent] -> values [T, heads, value_dim]"""
        ...

    def scale_queries_(self, q: Tensor) -> None:
        """Multiplies the queries of each row [T, n], a slice of wider rows, by the scale of its position."""
        ...

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
        """As kernels/rope.py, into this layer's cache. heads: of queries, and of keys"""
        ...

    def mla_rope_write(self, q: Tensor, row: Tensor, norm: Tensor, eps: float, layer: int, widths: MlaWidths) -> None:
        """As kernels/rope.py, into this layer's cache."""
        ...

    def attend(
        self,
        q: Tensor,
        layer: int,
        window: int | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """Returns the attention of the rows, [T, heads, group, Dv]; zeros for padding rows and long chunks.

        q:      [T, heads, group, D]. The keys and values of these rows are already in the cache.
        window: keys that a row sees, its own included; None: all up to its own
        chunk:  a row sees the keys from the last multiple of it up to its own; None: from the first
        sinks:  [heads * group] float32, for each query head a score that takes its share of the weights; None: none
        """
        ...

    def attend_indexed(self, q: Tensor, layer: int, index: "IndexRows") -> Tensor:
        """As `attend`, of the keys that an indexer chooses for each row.

        Rotates the index queries and keys in place, and writes the keys into their cache, first.
        """
        ...

    def cached_rows(self, layer: int, chunk: Chunk) -> Tensor:
        """Returns what a layer has cached for the keys of a long chunk, [K, width]."""
        ...

    def moe(self, layer: MoeLayer, shared: SharedExpert | None, x: Tensor) -> Tensor:
        """Returns the MoE layer's rows, plus those of the shared expert if given: [T, H] -> [T, H]."""
        ...

    def mlp(self, weights: AnyMlp, x: Tensor) -> Tensor:
        """Returns the gated MLP of x, [T, H] -> [T, H]."""
        ...
