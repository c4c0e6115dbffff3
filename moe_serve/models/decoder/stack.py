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
from moe_serve.kernels.streams import StreamWeights
from moe_serve.models.decoder.compressed import CompressedLayer
from moe_serve.models.decoder.conv import ConvLayer
from moe_serve.models.decoder.delta import DeltaLayer
from moe_serve.models.decoder.gqa import GqaLayer
from moe_serve.models.decoder.lightning import LightningLayer
from moe_serve.models.decoder.mamba import MambaLayer
from moe_serve.models.decoder.mla import MlaLayer
from moe_serve.models.decoder.selective import SelectiveLayer
from moe_serve.models.decoder.step import SharedExpert, Step


@dataclass(frozen=True, eq=False)
class GatedNorm:
    """An RMS norm whose rows are multiplied by sigmoid(up(silu(down(row)))). weight: of the norm"""

    weight: Tensor
    down: AnyLinear
    up: AnyLinear


@dataclass(frozen=True, eq=False)
class ResidualNorm:
    """An RMS norm whose rows are the residual from there on (MiniMax-01). weight: of the norm"""

    weight: Tensor


AnyNorm = Tensor | LayerNorm | GatedNorm | ResidualNorm  # the weight of an RMS norm, or another norm
AnyStatefulLayer = DeltaLayer | ConvLayer | LightningLayer | MambaLayer | SelectiveLayer
AnyAttention = GqaLayer | MlaLayer | AnyStatefulLayer


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer's weights; it has either `moe` or `mlp`, or `attention` alone. Without `attention` it is those alone.

    With both, the rows of `mlp` are added now, and those of `moe` with those of the next layer's `mlp`.
    shared: the shared expert, where the MoE layer leaves it to the operations
    attention_out_norm, mlp_out_norm: over what attention, and MLP or experts with a shared one, add to the residual
    attention_factors, fed_factors: on the residual, and on what attention, or MLP or experts, add to it
    Norms that are None are not there.
    """

    input_norm: AnyNorm | None
    attention: AnyAttention | None
    attention_out_norm: Tensor | None
    post_norm: AnyNorm | None
    moe: MoeLayer | None
    mlp: AnyMlp | None
    shared: SharedExpert | None
    mlp_out_norm: Tensor | None
    attention_factors: tuple[float, float]
    fed_factors: tuple[float, float]


@dataclass(frozen=True)
class StackFactors:
    """Factors on embeddings, on what sublayers add to the residual, and on the rows that are projected to logits."""

    embedding: float
    residual: float
    logits: float


@dataclass(frozen=True, eq=False)
class DecoderStack:
    """Embedding, all layers, the norm behind them, and the projection to logits.

    factors, is_parallel: as in ModelSpec
    """

    embed: AnyTable
    layers: Sequence[DecoderLayer]
    norm: AnyNorm
    eps: float
    head: AnyLinear
    factors: StackFactors
    is_parallel: bool

    def __call__(self, do: Step) -> Turns[Tensor]:
        """Returns the rows that the head projects to logits, [T, H]."""
        do.begin(VOCABULARY)
        x: Tensor = do.gather("residual", self.embed, do.ids)  # the residual, which is changed in place
        if self.factors.embedding != 1:
            do.scale_(x, self.factors.embedding)
        delta = None  # what the last sublayer adds to the residual
        late: Tensor | None = None  # what the experts of a layer add with the MLP of the next one
        for layer in self.layers:
            rows = x
            if layer.attention is not None and do.has_rows:
                do.begin(ATTENTION)
                rows = self._normed(x, delta, layer.input_norm, do)
                delta = layer.attention(rows, do)
                _weigh(x, delta, layer.attention_factors, do)
                if layer.attention_out_norm is not None:
                    do.rms_norm_(delta, layer.attention_out_norm, self.eps)
                if self.is_parallel:
                    do.add_gated_(x, delta, None)
            if layer.moe is None and layer.mlp is None:
                continue
            do.begin(MLP if layer.moe is None else GATE)
            if not self.is_parallel:
                rows = self._normed(x, delta, layer.post_norm, do)
            routed: Tensor | None = None
            if layer.moe is not None:
                routed = delta = yield from do.moe(layer.moe, layer.shared, rows)
            if layer.mlp is not None:
                do.begin(MLP)
                delta = do.mlp(layer.mlp, rows)
                if late is not None:
                    do.add_gated_(delta, late, None)
                late = routed
            assert delta is not None, "the layer has an MLP or experts"
            _weigh(x, delta, layer.fed_factors, do)
            if layer.mlp_out_norm is not None:
                do.rms_norm_(delta, layer.mlp_out_norm, self.eps)
        assert late is None, "the last layer of a pair has an MLP alone"
        do.begin(VOCABULARY)
        last = self._normed(x, delta, self.norm, do)
        if self.factors.logits != 1:
            do.scale_(last, self.factors.logits)
        return last

    @property
    def moe(self) -> MoeLayer | None:
        """The first of its MoE layers."""
        return next((layer.moe for layer in self.layers if layer.moe is not None), None)

    def _normed(self, x: Tensor, delta: Tensor | None, weight: AnyNorm | None, do: Step) -> Tensor:
        """Adds `delta` to x in place, and returns x as it goes into a sublayer; without a norm that is x itself.

        So it is where the residual is what a norm gives.
        """
        if weight is None or isinstance(weight, ResidualNorm):
            assert self.factors.residual == 1, "a factor goes with another norm"
            if delta is not None:
                do.add_gated_(x, delta, None)
            if weight is not None:
                do.rms_norm_(x, weight.weight, self.eps)
            return x
        if isinstance(weight, LayerNorm):
            return do.layer_norm(x, delta, weight, self.eps)
        if isinstance(weight, GatedNorm):
            normed = self._normed(x, delta, weight.weight, do)
            middle = do.linear("norm_gate_in", weight.down, normed)
            do.gate_(middle, middle)  # silu
            do.gate_(normed, do.linear("norm_gate_out", weight.up, middle))
            return normed
        if delta is None:
            return do.rms_norm(x, weight, self.eps)
        return do.add_rms_norm(x, delta, weight, self.eps, self.factors.residual)


def _weigh(x: Tensor, delta: Tensor, factors: tuple[float, float], do: Step) -> None:
    """Multiplies the residual and what is added to it next, in place."""
    for rows, factor in zip((x, delta), factors, strict=True):
        if factor != 1:
            do.scale_(rows, factor)


@dataclass(frozen=True, eq=False)
class PredictionStack:
    """A layer for multi-token prediction: from the last hidden state of a token and the next token to the one behind.

    embed, eps:             those of the model
    embed_norm, hidden_norm: of what is joined;  join_embed, join_hidden: the halves of the projection that joins them
    norm, head:             of the layer's rows
    """

    embed: AnyTable
    embed_norm: Tensor
    hidden_norm: Tensor
    join_embed: AnyLinear
    join_hidden: AnyLinear
    layer: DecoderLayer
    norm: Tensor
    eps: float
    head: AnyLinear

    def __call__(self, do: Step) -> Turns[Tensor]:
        """Returns the rows that the head projects to logits, [T, H], of do.ids, the tokens behind those of the rows."""
        do.begin(VOCABULARY)
        embedded = do.gather("next_embedding", self.embed, do.ids)
        x: Tensor = do.linear("joined", self.join_embed, do.rms_norm(embedded, self.embed_norm, self.eps))
        hidden = do.hidden(self.hidden_norm.shape[0])
        delta: Tensor = do.linear("joined_hidden", self.join_hidden, do.rms_norm(hidden, self.hidden_norm, self.eps))
        layer = self.layer
        assert layer.moe is not None and layer.attention is not None, "a layer that predicts attends, and has experts"  # noqa: PT018
        assert isinstance(layer.input_norm, Tensor) and isinstance(layer.post_norm, Tensor)  # noqa: PT018
        do.begin(ATTENTION)
        normed = do.add_rms_norm(x, delta, layer.input_norm, self.eps)
        if do.has_rows:
            delta = layer.attention(normed, do)
            do.begin(GATE)
            normed = do.add_rms_norm(x, delta, layer.post_norm, self.eps)
        delta = yield from do.moe(layer.moe, layer.shared, normed)
        do.begin(VOCABULARY)
        return do.add_rms_norm(x, delta, self.norm, self.eps)

    @property
    def moe(self) -> MoeLayer | None:
        """Its MoE layer."""
        return self.layer.moe


@dataclass(frozen=True, eq=False)
class Streams:
    """What joins a sublayer to the streams of the residual. matrix: of all streams -> products"""

    matrix: AnyLinear
    weights: StreamWeights

    def sum(self, x: Tensor, do: Step) -> tuple[Tensor, Tensor]:
        """Returns what the sublayer takes, [T, H], and the weights of what it gives. x: [T, streams * H]"""
        products = do.project_streams(self.matrix, x)
        return do.sum_streams(x, products, self.weights), products


@dataclass(frozen=True, eq=False)
class StreamLayer:
    """One layer over a residual of several streams. shared: as in DecoderLayer"""

    attention_streams: Streams
    input_norm: Tensor
    attention: CompressedLayer
    fed_streams: Streams
    post_norm: Tensor
    moe: MoeLayer
    shared: SharedExpert | None


@dataclass(frozen=True, eq=False)
class StreamStack:
    """A DecoderStack over a residual of several streams. streams: sums them up in front of the norm"""

    embed: AnyTable
    layers: Sequence[StreamLayer]
    streams: Streams
    norm: Tensor
    eps: float
    head: AnyLinear

    def __call__(self, do: Step) -> Turns[Tensor]:
        """Returns the rows that the head projects to logits, [T, H]."""
        do.begin(VOCABULARY)
        x: Tensor = do.spread_rows(do.gather("embedded", self.embed, do.ids), self.streams.weights.shape.streams)
        for layer in self.layers:
            if do.has_rows:
                do.begin(ATTENTION)
                rows, mixing = layer.attention_streams.sum(x, do)
                delta = layer.attention(do.rms_norm(rows, layer.input_norm, self.eps), do)
                do.mix_streams_(x, delta, mixing, layer.attention_streams.weights)
            do.begin(GATE)
            rows, mixing = layer.fed_streams.sum(x, do)
            delta = yield from do.moe(layer.moe, layer.shared, do.rms_norm(rows, layer.post_norm, self.eps))
            do.mix_streams_(x, delta, mixing, layer.fed_streams.weights)
        do.begin(VOCABULARY)
        rows, _ = self.streams.sum(x, do)
        return do.rms_norm(rows, self.norm, self.eps)

    @property
    def moe(self) -> MoeLayer | None:
        """The first of its MoE layers."""
        return next((layer.moe for layer in self.layers), None)


AnyStack = DecoderStack | PredictionStack | StreamStack


@dataclass(frozen=True)
class StepInputs:
    """One step.

    num_chunks: of the MoE layers, as MoeLayer takes them;  overlap: the batch runs in halves that take turns
    has_padding: rows without a cache slot are padding, which only the device knows of; the host counts them as real
    hidden: for a PredictionStack, the rows of the batch's tokens behind the layers before it, [num_tokens, H]
    """

    batch: ForwardBatch
    cache: KvCache
    num_chunks: int
    overlap: bool
    has_padding: bool = False
    hidden: Tensor | None = None


class StackRunner(Protocol):
    """Runs a decoder, or a layer that predicts, for a step."""

    def __call__(self, step: StepInputs) -> Tensor:
        """Returns the logits of the step's logit rows, [num_logit_rows, vocab_size] float32."""
        ...

    def logits_of(self, rows: range) -> Tensor:
        """Returns the logits of other rows of the step that ran last, [len(rows), vocab_size] float32.

        Only after a step whose batch has prompt rows.
        """
        ...

    @property
    def rows(self) -> Tensor:
        """The rows of the step that ran last, as the head takes them, [num_tokens or more, H]; until the next one.

        Not of a step that a GPU has replayed from a graph.
        """
        ...
