"""The forms of arithmetic that models ask for, as values. Specs and plans read them, so this imports no torch.

They describe the activation of an MLP, the attention of a layer, the choice of a gate, and the numbers of a quantised
matrix that share a scale.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moe_serve.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

Scoring = Literal["softmax", "sigmoid", "sigmoid_of_chosen", "sparsemixer", "sqrt_softplus"]
GroupScore = Literal["best_two", "best"]

LOWEST_CHOICE = -1e30  # replaces NaN in a gate's choice: below every score, and finite when two of them are added
FP8_GROUP = 128  # edge of the square FP8 blocks that the kernels take, and values of a row that share a scale
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4  # of FP8 values that share a scale
MXFP4_BLOCK = 32  # neighbours in a row of MXFP4 that share a scale
DELTA_TILE = 32  # columns of a linear-attention state that lie together, as in delta.c
GROUP_CHUNK = 128  # neighbours in a row of activations that share a scale, but beside codes of eight bits
GROUP_SUPER = 256  # neighbours in a row that share the upper level of two


@dataclass(frozen=True)
class Activation:
    """The elementwise middle of an MLP.

    silu:           silu(gate) * up
    clamped_swiglu: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up from -limit to limit
                    (gpt-oss)
    relu2:          max(up, 0) ** 2: there is no gate, and what is called gate and up is up alone (Nemotron-H)
    clamped_silu:   silu(gate) * up, with gate and up in the limits of clamped_swiglu (DeepSeek-V4)
    """

    kind: Literal["silu", "clamped_swiglu", "relu2", "clamped_silu"] = "silu"
    alpha: float = 1.0
    limit: float = math.inf

    @property
    def stacks(self) -> int:
        """Returns how many matrices of an expert's width go into it: gate and up, or up."""
        return 1 if self.kind == "relu2" else 2


SILU = Activation()
RELU2 = Activation("relu2")


@dataclass(frozen=True)
class MlaWidths:
    """The parts of a query head, [nope | rope], and of a cached row, [latent | rope]."""

    nope: int
    latent: int
    rope: int


@dataclass(frozen=True)
class AttendShape:
    """The attention of one cache layout.

    heads: key/value heads;  group: query heads of each;  width: of a key;  scale: factor on the scores
    latent: None where a slot holds the heads' keys, then their values (gqa); else it holds one row for the one
            key/value head, whose first `latent` elements are the value (mla)
    values: elements of a value in slots of heads, at its beginning; None: width
    """

    heads: int
    group: int
    width: int
    scale: float
    latent: int | None = None
    values: int | None = None

    @property
    def value_width(self) -> int:
        return self.latent or self.values or self.width

    @property
    def row_shape(self) -> tuple[int, int]:
        """Returns the shape of one cache slot."""
        return (2 * self.heads, self.width) if self.latent is None else (1, self.width)


@dataclass(frozen=True, eq=False)
class Seen:
    """The keys that a row sees of those up to its own, and scores beside theirs.

    window: the last so many;  chunk: those from the last multiple of it on;  None, None: all
    sinks:  [heads * group], for each query head a score that takes its share of the weights; None: none
    """

    window: int | None = None
    chunk: int | None = None
    sinks: "Tensor | None" = None


@dataclass(frozen=True)
class DeltaShape:
    """Linear attention by the gated delta rule (kernels/delta_rule.py). widths: of a head;  taps: of the convolution

    grouped: a projected row holds query, key, values and gates of one key head after the other (Qwen3-Next); else the
             queries of all heads, then keys, values, gates, strengths and steps
    rank:    each key channel has a step of its own (Kimi-Linear): a row holds queries, keys, values and strengths of
             all heads, then so many columns of which steps, and gates, are made; 0: these themselves (Ling-3.0);
             None: steps are those of heads
    bound:   decays are exp(bound * sigmoid(exp(A_log) * step)), with a step by channel; None: as in delta_rule.py
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    grouped: bool = False
    rank: int | None = None
    bound: float | None = None

    @property
    def channels(self) -> int:
        """Returns how many columns the convolution has: all queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def row_width(self) -> int:
        """Returns the columns of a projected row."""
        if self.rank is not None:
            apart = 2 * self.rank if self.rank else self.num_steps + self.value_heads * self.value_width
            return self.channels + self.value_heads + apart
        return self.channels + self.value_heads * (self.value_width + 2)

    @property
    def num_steps(self) -> int:
        """Returns how many steps a token has: of each head, or of each key channel."""
        return self.value_heads if self.rank is None else self.key_heads * self.key_width

    @property
    def state_shapes(self) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
        """Returns the shapes of a request's state: the last rows before the convolution, and each head's matrix, cut
        into tiles of columns."""
        tiles = -(-self.value_width // DELTA_TILE)
        return (self.taps - 1, self.channels), (self.value_heads, tiles, self.key_width, DELTA_TILE)


@dataclass(frozen=True)
class ConvShape:
    """A causal convolution of each column apart over the tokens of a sequence (kernels/causal_conv.py).

    channels, taps: its columns, and the tokens that each result is made of, its own included
    first:  column of a row where its input begins
    before, after: likewise of what multiplies its input and its results, elementwise; None: nothing does
    silu:   whether results go through it
    """

    channels: int
    taps: int
    first: int
    before: int | None = None
    after: int | None = None
    silu: bool = False

    @property
    def state_shape(self) -> tuple[int, int]:
        """Returns the shape of a request's state: the last rows of its input."""
        return self.taps - 1, self.channels


@dataclass(frozen=True)
class GatedConvShape:
    """A layer of LFM2: a convolution whose input and results are multiplied by other columns of the projected row.

    width: columns of each of the three;  bias: on the projections and the convolution
    """

    width: int
    taps: int
    bias: bool = False

    @property
    def row_width(self) -> int:
        """Returns the columns of a projected row: what multiplies the input, what multiplies results, the input."""
        return 3 * self.width

    @property
    def conv(self) -> ConvShape:
        return ConvShape(self.width, self.taps, 2 * self.width, before=0, after=self.width)

    @property
    def state_shapes(self) -> tuple[tuple[int, int]]:
        """Returns the shape of a request's state."""
        return (self.conv.state_shape,)


@dataclass(frozen=True)
class MambaShape:
    """A state-space layer of Mamba-2 (kernels/state_space.py).

    groups:      of heads that share their keys and queries, each of state_width columns
    head_width:  columns of a head's values
    taps:        of the convolution
    conv_bias, bias: whether the convolution has any, and the projections
    """

    groups: int
    heads: int
    state_width: int
    head_width: int
    taps: int
    conv_bias: bool
    bias: bool

    @property
    def inner(self) -> int:
        """Returns the columns of all heads."""
        return self.heads * self.head_width

    @property
    def row_width(self) -> int:
        """Returns the columns of a projected row: gates, what is convolved, and a number of each head."""
        return self.inner + self.conv.channels + self.heads

    @property
    def conv(self) -> ConvShape:
        return ConvShape(self.inner + 2 * self.groups * self.state_width, self.taps, self.inner, silu=True)

    @property
    def state_shapes(self) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
        """Returns the shapes of a request's state: the convolution's, and each head's matrix in tiles of columns."""
        tiles = -(-self.head_width // DELTA_TILE)
        return self.conv.state_shape, (self.heads, tiles, self.state_width, DELTA_TILE)


@dataclass(frozen=True)
class SelectiveShape:
    """A state-space layer of Mamba's first version (kernels/selective_space.py), as Jamba has it.

    inner:       channels, each with a state of its own
    state_width: of a channel;  rank: of what steps are projected from;  taps: of the convolution
    conv_bias, bias: whether the convolution has any, and the projections
    """

    inner: int
    state_width: int
    rank: int
    taps: int
    conv_bias: bool
    bias: bool

    @property
    def row_width(self) -> int:
        """Returns the columns of a projected row: what is convolved, and gates."""
        return 2 * self.inner

    @property
    def conv(self) -> ConvShape:
        return ConvShape(self.inner, self.taps, 0, silu=True)

    @property
    def state_shapes(self) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Returns the shapes of a request's state: the convolution's, and those of channels in tiles of columns."""
        return self.conv.state_shape, (-(-self.inner // DELTA_TILE), self.state_width, DELTA_TILE)


@dataclass(frozen=True)
class LightningShape:
    """A layer of lightning attention (MiniMax-01, arXiv:2501.08313): a state space whose decays are those of heads.

    width:      of a head's query, key and value
    num_layers: of the model, which decays depend on
    """

    heads: int
    width: int
    num_layers: int

    @property
    def inner(self) -> int:
        """Returns the columns of all heads."""
        return self.heads * self.width

    @property
    def row_width(self) -> int:
        """Returns the columns of a projected row: values, keys, queries and gates of all heads."""
        return 4 * self.inner

    def slopes(self, layer_id: int) -> list[float]:
        """Returns the slope of each head, whose state decays by exp(-slope) with every token."""
        share = 1 - layer_id / (self.num_layers - 1 + 1e-5) + 1e-5
        return [2 ** (-8 * (head + 1) / self.heads) * share for head in range(self.heads)]

    @property
    def space(self) -> MambaShape:
        """Returns it as a state space without a convolution, each head with keys and queries of its own."""
        return MambaShape(self.heads, self.heads, self.width, self.width, taps=1, conv_bias=False, bias=False)

    @property
    def state_shapes(self) -> tuple[tuple[int, int, int, int]]:
        """Returns the shape of a request's state: each head's matrix in tiles of columns."""
        return (self.space.state_shapes[1],)


@dataclass(frozen=True)
class CompressedShape:
    """Attention over a window of tokens and entries made of groups of them (kernels/compressed_attention.py).

    heads, width: of queries; a token has one key, which is its value, too
    rotated: elements at the end of a head;  window: keys that a token sees, its own included
    every:    tokens of a group; 0: there are no entries
    overlaps: an entry is made of its group and the one before it
    index_heads, index_width, topk: of the indexer that chooses the entries; 0: all are attended
    scale, eps: of the scores, and of norms
    """

    heads: int
    width: int
    rotated: int
    window: int
    every: int
    overlaps: bool
    index_heads: int
    index_width: int
    topk: int
    scale: float
    eps: float

    @property
    def parts(self) -> int:
        """Returns how many entries a token is part of."""
        return (1 + self.overlaps) * (self.every > 0)

    @property
    def index_at(self) -> int:
        """Returns where the indexer's part of a cached row begins."""
        return self.width * (1 + 2 * self.parts)

    @property
    def row_width(self) -> int:
        """Returns the columns of a cached row: a key, then what the token gives to entries and its weights, then the
        same for the indexer's entries. An entry lies where the last token of its group gave its part of it."""
        return self.index_at + 4 * self.index_width


@dataclass(frozen=True)
class StreamShape:
    """A residual of several streams (kernels/streams.py).

    rounds: of bringing the sums of rows and columns to 1;  mixes: whether streams are mixed, and not summed up alone
    eps, norm_eps: added to weights and sums, and in the norm
    """

    streams: int
    width: int
    rounds: int
    eps: float
    norm_eps: float
    mixes: bool

    @property
    def num_weights(self) -> int:
        return (2 + self.streams) * self.streams if self.mixes else self.streams


@dataclass(frozen=True)
class RouterSpec:
    """The router of a model: its gate turns logits into experts and weights.

    Mixtral:     softmax, norm_topk=True
    gpt-oss:     the same, has_logit_bias=True
    Granite-MoE, Hunyuan-A13B: as Mixtral
    Qwen3-MoE:   softmax, norm_topk = the model's norm_topk_prob
    MiniMax-M2:  sigmoid, has_bias=True, norm_topk=True
    DeepSeek-V3: sigmoid, has_bias=True, norm_topk, norm_eps=1e-20, num_groups / topk_groups, scaling
    DeepSeek-V2: softmax, norm_topk=False, num_groups / topk_groups with group_score="best", scaling
    ERNIE-4.5:   softmax, has_bias=True, norm_topk=True, norm_min
    Llama-4:     sigmoid_of_chosen, one expert, scales_input
    Kolibri:     sigmoid_of_chosen, has_bias=True
    Phi-MoE:     sparsemixer, two experts, jitter
    LongCat-Flash: softmax, has_bias=True, norm_topk=False, scaling, num_identity
    A.X-K2:      as DeepSeek-V3, masks_with_zero where there are groups
    DeepSeek-V4: sqrt_softplus, has_bias=True, norm_topk=True, norm_eps=1e-20, scaling; in some layers a token's id
                 chooses, and there is no bias

    num_logical: experts of one layer.  topk: experts of one token
    num_identity: choices behind those, each of which stands for an expert that gives back what it takes: it has no
                 weights and no slot, and is neither dispatched nor counted
    scoring:     "softmax" over all experts, or "sigmoid" of each logit; "sigmoid_of_chosen": the same, chosen by
                 logits, which differ where sigmoids are both 1; "sparsemixer" (arXiv:2409.12136): two experts by
                 logits, each weighed by a softmax over those not far below it, the first left out for the second;
                 "sqrt_softplus": the root of softplus of each logit
    norm_topk:   divide the chosen weights by (their sum + norm_eps), but at least norm_min
    scaling:     factor on the weights, after norm_topk
    num_groups, topk_groups: experts are chosen from the best topk_groups of num_groups equal groups
    masks_with_zero: experts of the other groups are not left out, but have a choice score of 0: they are better than
                 those of which the bias makes it negative
    group_score: of choice scores, the sum of a group's "best_two", or the "best"
    jitter:      of sparsemixer: an expert is far below another where it lacks more than twice this share
    scales_input: the weight multiplies what goes into the expert, not what comes out; for one expert per token
    has_bias:    a correction bias is added to the scores for the choice only, never to the weights
    has_logit_bias: the projection to logits has a bias
    """

    num_logical: int
    topk: int
    scoring: Scoring = "softmax"
    norm_topk: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    has_bias: bool = False
    norm_eps: float = 0.0
    has_logit_bias: bool = False
    norm_min: float = 0.0
    group_score: GroupScore = "best_two"
    jitter: float = 0.0
    scales_input: bool = False
    num_identity: int = 0
    masks_with_zero: bool = False

    @property
    def num_choices(self) -> int:
        """Returns how many logits a token has."""
        return self.num_logical + self.num_identity

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= self.num_choices:
            raise ModelError(
                f"top-k is {self.topk} with {self.num_choices} experts; it must be between 1 and {self.num_choices}: "
                "correct num_experts_per_tok in the model's config.json"
            )
        if self.num_groups < 1 or self.num_logical % self.num_groups:
            raise ModelError(
                f"{self.num_logical} experts do not divide into {self.num_groups} groups; "
                "correct n_group in the model's config.json"
            )
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ModelError(
                f"topk_group is {self.topk_groups} with {self.num_groups} groups; it must be between 1 and "
                f"{self.num_groups}: correct topk_group in the model's config.json"
            )
        if self.topk > self.topk_groups * (self.num_choices // self.num_groups):
            raise ModelError(
                f"top-k is {self.topk} but {self.topk_groups} groups of {self.num_logical // self.num_groups} experts "
                "hold fewer; correct n_group or topk_group in the model's config.json"
            )
        assert self.num_groups == 1 or not self.num_identity, "groups of experts that give back what they take"
        if self.num_groups > 1 and self.num_logical // self.num_groups < 2 and self.group_score == "best_two":
            raise ModelError(
                f"{self.num_groups} groups of one expert: a group's score needs its two best experts; "
                "correct n_group in the model's config.json"
            )
        if self.scoring == "sparsemixer" and self.topk != 2:
            raise ModelError(
                f"top-k is {self.topk}, but sparsemixer chooses two experts; "
                "correct num_experts_per_tok in the model's config.json"
            )
        if self.scales_input and self.topk != 1:
            raise ModelError(
                f"top-k is {self.topk} where the router scales the experts' input, which is built for one expert per "
                "token; serve a model with num_experts_per_tok 1"
            )


@dataclass(frozen=True)
class Fp8Block:
    """The rows and columns of an FP8 matrix that share a scale; the last block may be smaller. None: all of them."""

    rows: int | None
    columns: int | None

    def num_scales(self, n: int, k: int) -> tuple[int, int]:
        """Returns the rows and columns of blocks of a matrix of n x k."""
        return 1 if self.rows is None else -(-n // self.rows), 1 if self.columns is None else -(-k // self.columns)

    @property
    def by_channel(self) -> bool:
        """Whether one scale for each row of a matrix, its output channel, would mean the same."""
        return self.columns is None and self.rows in (1, None)

    @property
    def is_kept(self) -> bool:
        """Whether the kernels multiply values with these scales as they are stored."""
        return self.by_channel or self == Fp8Block(FP8_GROUP, FP8_GROUP)

    def __str__(self) -> str:
        if self.by_channel:
            return "a scale per tensor" if self.rows is None else "a scale per channel"
        return f"blocks of {self.rows} x {self.columns}"


PER_TENSOR = Fp8Block(None, None)
PER_CHANNEL = Fp8Block(1, None)


GroupScale = Literal["float32", "float16", "bfloat16", "two_levels"]
GROUPS = (16, 32, 64, 128)  # neighbours that may share a scale
_SCALE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "two_levels": 1}


@dataclass(frozen=True)
class GroupForm:
    """Weights of four, six or eight bits, of which neighbours in a row share a scale, as GPTQ, AWQ,
    compressed-tensors and GGUF have them.

        value = scale x (code - zero) - minimum

    bits:  of a code, which is not negative
    group: neighbours that share a scale; the last group of a row may be shorter
    scale: dtype of the scales; "two_levels": each is an int8 times a float16 of every 256 neighbours, as in GGUF's K
           types
    zero:  subtracted from every code; None: each group has its own
    has_minimum: whether each group has a number that is subtracted in the end: of the scales' dtype; in two levels a
           uint8 times another float16 of every 256 neighbours
    """

    bits: Literal[4, 6, 8]
    group: int
    scale: GroupScale
    zero: int | None
    has_minimum: bool = False

    def __post_init__(self) -> None:
        assert self.group in GROUPS, f"groups of {self.group}"
        assert self.zero is None or 0 <= self.zero < 1 << self.bits, f"zero {self.zero} of {self.bits} bits"

    @property
    def is_two_level(self) -> bool:
        return self.scale == "two_levels"

    @property
    def row_group(self) -> int:
        """How many neighbours of a row in int8 share a scale where it is multiplied with this form."""
        return self.group if self.bits == 8 else GROUP_CHUNK

    def num_groups(self, k: int) -> int:
        """Returns the groups of a row of k values."""
        return -(-k // self.group)

    def row_bytes(self, k: int) -> int:
        """Returns the bytes of a row of k values as it is packed (kernels/cpu/packed.py): codes to a multiple of 32."""
        num_scales = 1 + self.has_minimum
        of_group = num_scales * _SCALE_BYTES[self.scale] + (self.zero is None)
        of_chunk = 2 * num_scales if self.is_two_level else 0
        codes = -(-k // 32) * 32 * self.bits // 8
        return codes + self.num_groups(k) * of_group + -(-k // GROUP_CHUNK) * of_chunk

    def __str__(self) -> str:
        zeros = ", zero points" if self.zero is None else ", minimums" if self.has_minimum else ""
        return f"{self.bits} bits in groups of {self.group}, scales in {self.scale.replace('_', ' ')}{zeros}"


# Quantised at load: 4.5 bits a weight
INT4 = GroupForm(bits=4, group=32, scale="float16", zero=8)


def num_groups(width: int) -> int:
    """Returns the number of scales of a row of `width` values."""
    return -(-width // FP8_GROUP)


@dataclass(frozen=True)
class BlockScaled:
    """FP8 matrices with a scale for every block, or for every row.

    q:     [groups, n, k] float8_e4m3fn
    scale: [groups, parts x ceil(n / parts / 128), ceil(k / 128)] float32, or [groups, n]
    parts: equal stacks of rows, each with blocks of its own: 2 for gate above up, because the checkpoint quantised
           them apart and a width that is not a multiple of 128 would else put rows of both into one block
    """

    q: "Tensor"
    scale: "Tensor"
    parts: int = 1

    def __post_init__(self) -> None:
        groups, n, k = self.q.shape
        wanted = (groups, n) if self.by_channel else (groups, num_scale_rows(n, self.parts), num_groups(k))
        assert self.scale.shape == wanted, f"scales {tuple(self.scale.shape)} of FP8 matrices, expected {wanted}"

    @property
    def by_channel(self) -> bool:
        """Whether every row, an output channel, has one scale."""
        return self.scale.dim() == 2


def num_scale_rows(n: int, parts: int) -> int:
    """Returns the number of block rows of a matrix of n rows in `parts` stacks."""
    assert n % parts == 0, f"{n} rows are not {parts} equal stacks"
    return parts * num_groups(n // parts)


@dataclass(frozen=True)
class Mxfp4:
    """Matrices in MXFP4 (kernels/quantised.py).

    blocks: [groups, n, k / 2] uint8, two numbers in a byte, the first in its lower half
    scales: [groups, n, k / 32] uint8, the exponent of a power of two plus 127; 255 = not a number
    """

    blocks: "Tensor"
    scales: "Tensor"

    def __post_init__(self) -> None:
        groups, n, half = self.blocks.shape
        wanted = groups, n, 2 * half // MXFP4_BLOCK
        assert self.scales.shape == wanted, f"scales {tuple(self.scales.shape)} of MXFP4 matrices, expected {wanted}"
