"""What the attention of a model is, and how many parameters it has in a layer."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class QueryTemperature:
    """Queries of layers without rotation are multiplied by 1 + scale * ln(1 + floor((position + 1) / floor_scale))."""

    floor_scale: float
    scale: float


@dataclass(frozen=True)
class GqaSpec:
    """Grouped-query attention: query head h reads key/value head h // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # RMS norm over each query and key head, before the rotation or behind it; over all query heads and over all key
    # heads, before it; or over each head of rotating layers, without weights
    qk_norm: Literal["head", "rotated_head", "projection", "unit"] | None = None
    norm_names: tuple[str, str] = ("q_norm", "k_norm")  # in the checkpoint
    qkv_bias: bool = False  # on the q, k and v projections
    out_bias: bool = False
    clip: float | None = None  # largest magnitude of queries, keys and values, behind the norm and before the rotation
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    has_sinks: bool = False  # each query head has a learned score that takes its share beside those of the keys
    window: int | None = None  # keys that a token sees in windowed layers, its own included
    windowed_layer_ids: tuple[int, ...] = ()
    chunk: int | None = None  # in chunked layers a token sees those from the last multiple of it on
    chunked_layer_ids: tuple[int, ...] = ()
    unrotated_layer_ids: tuple[int, ...] = ()
    temperature: QueryTemperature | None = None

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5) if self.scale is None else self.scale

    @property
    def norm_widths(self) -> tuple[int, int]:
        """Returns how many weights the norms of queries and of keys have."""
        if self.qk_norm in (None, "unit"):
            return 0, 0
        heads = (self.num_heads, self.num_kv_heads) if self.qk_norm == "projection" else (1, 1)
        return heads[0] * self.head_dim, heads[1] * self.head_dim

    def window_of(self, layer_id: int) -> int | None:
        """Returns how many keys a token sees in a layer, its own included; None: all up to its own."""
        return self.window if layer_id in self.windowed_layer_ids else None

    def chunk_of(self, layer_id: int) -> int | None:
        """Returns the size of the chunks that tokens of a layer see the last of; None: they see all."""
        return self.chunk if layer_id in self.chunked_layer_ids else None

    def num_parameters(self, hidden: int) -> int:
        """Returns the parameters of one layer's attention."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        matrices = hidden * (2 * q + 2 * kv)
        vectors = sum(self.norm_widths) + (q + 2 * kv if self.qkv_bias else 0)
        vectors += (hidden if self.out_bias else 0) + (self.num_heads if self.has_sinks else 0)
        return matrices + vectors


@dataclass(frozen=True)
class IndexerSpec:
    """Chooses the `topk` tokens that each token attends (DeepSeek-V3.2). num_heads, width: of its queries"""

    num_heads: int
    width: int
    topk: int


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): per token, one latent and one key."""

    num_heads: int
    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    nope_dim: int  # query/key width without rotation, per head
    rope_dim: int  # rotated width, shared by all key heads
    value_dim: int
    bias: bool  # on the two down projections and the output projection
    softmax_scale: float  # (nope_dim + rope_dim)^-0.5, times YaRN's mscale^2
    indexer: IndexerSpec | None = None

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cached row."""
        return self.kv_lora_rank + self.rope_dim

    def num_parameters(self, hidden: int) -> int:
        """Returns the parameters of one layer's attention."""
        q, rank = self.num_heads * self.query_dim, self.q_lora_rank
        first = q if rank is None else rank
        total = hidden * (first + self.latent_dim) + (0 if rank is None else rank * (q + 1))
        total += self.kv_lora_rank * (1 + self.num_heads * (self.nope_dim + self.value_dim))
        total += self.num_heads * self.value_dim * hidden
        if self.bias:
            total += (0 if rank is None else rank) + self.latent_dim + hidden
        if self.indexer is not None:
            heads, width = self.indexer.num_heads, self.indexer.width
            total += (rank or 0) * heads * width + hidden * (width + heads) + 2 * width
        return total
