"""The operations of a decoder on the rows of a step, each declared once.

A declaration joins the plain function in torch, which says what is computed, with the compiled kernel of kernels/cpu/
that computes the same. `Operations` does things at once, by the plain functions. A `Recorder` is a tape as well: on it
the same calls record the kernels, and a step is a run of the tape. A declaration's examples are small inputs, on which
the digest of this machine's bits (digest.py) and the tests run the operation.

To add an operation: write the kernel in a .c file of kernels/cpu/ that all.c lists, the plain function, its declaration
here, and the call in the model.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args, overload

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels import indexed_attention, rope, rows, streams
from moe_serve.kernels.capacity import ChangedChoices, ExpertCapacity
from moe_serve.kernels.causal_conv import ConvWeights
from moe_serve.kernels.compressed_attention import CompressedRows, CompressedWeights, EntryWeights
from moe_serve.kernels.cpu.attention import attend_options
from moe_serve.kernels.cpu.checks import dense
from moe_serve.kernels.cpu.experts import PackedExperts
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.linear import KINDS, PackedHeads, PackedLinear, PackedParts, RowTable
from moe_serve.kernels.cpu.packed import padded
from moe_serve.kernels.cpu.rows import float_bits
from moe_serve.kernels.cpu.tape import (
    ATTEND,
    LOGIT_ROWS,
    LOGITS,
    NUM_LOGITS,
    ROWS,
    SEQUENCES,
    Input,
    RecordedRun,
    RowInputs,
    Tape,
)
from moe_serve.kernels.delta_rule import DeltaWeights, columns_of
from moe_serve.kernels.forms import AttendShape, MlaWidths, RouterSpec, Scoring, Seen, StreamShape
from moe_serve.kernels.indexed_attention import IndexerShape
from moe_serve.kernels.part_clock import COMBINE, DISPATCH, EXPERTS, PartClock
from moe_serve.kernels.rows import LayerNorm
from moe_serve.kernels.selective_space import SelectiveRows, SelectiveWeights
from moe_serve.kernels.state_space import StateSpaceWeights
from moe_serve.kernels.streams import StreamWeights
from moe_serve.kernels.topk_gate import take_identity_

P = ParamSpec("P")
R = TypeVar("R")

# Weights in the form that the plain function or the kernel reads, such as Linear or PackedLinear.
AnyTable = Any
AnyLinear = Any
AnyHeads = Any
AnyMlp = Any
MOST_EXPERTS = 2048  # these two as in gate.c
MOST_GROUPS = 64
MOST_TAPS = 16  # as in causal_conv.c
MOST_STREAMS = 8  # as in streams.c
MOST_TOGETHER = 512  # tokens of a group, as in compressed.c

Draw = Callable[..., Tensor]  # sizes -> float32 numbers from -1 to 1, others at each call
EXAMPLE_ROWS = 13
_HIDDEN, _EPS = 150, 1e-6


class Operation(Generic[P, R]):
    """A declared operation, called as a method of Operations.

    plain:    does it at once; its signature and docstring are the operation's
    record:   records the kernel's calls on a tape, and returns where results will be
    examples: small arguments of it
    """

    def __init__(
        self,
        plain: Callable[P, R],
        record: Callable[Concatenate[Tape, P], R],
        examples: Callable[[Draw], Sequence[tuple[Any, ...]]],
    ):
        self.plain = plain
        self.record = record
        self.examples = examples

    @overload
    def __get__(self, do: None, owner: type) -> "Operation[P, R]": ...

    @overload
    def __get__(self, do: "Operations", owner: type) -> Callable[P, R]: ...

    def __get__(self, do: "Operations | None", owner: type) -> "Operation[P, R] | Callable[P, R]":
        if do is None:
            return self
        return functools.partial(self.record, do) if isinstance(do, Tape) else self.plain


def operation(
    plain: Callable[P, R], examples: Callable[[Draw], Sequence[tuple[Any, ...]]]
) -> Callable[[Callable[Concatenate[Tape, P], R]], Operation[P, R]]:
    """Declares an operation; the decorated function is its `record`."""
    return lambda record: Operation(plain, record, examples)


AnyOperation = Operation[Any, Any]


def declared_operations() -> list[tuple[str, AnyOperation]]:
    """Returns every declared operation and its name, in the order of their declaration."""
    return [(name, each) for name, each in vars(Operations).items() if isinstance(each, Operation)]


def _gather(name: str, table: AnyTable, ids: Tensor) -> Tensor:
    """Returns table[ids], [rows, width]. table: of [num_rows, width];  ids: [rows] int64;  name: of the result"""
    return functional.embedding(ids, table)


def _linear(name: str, weight: AnyLinear, x: Tensor) -> Tensor:
    """x: [rows, k] -> [rows, n]. name: of the result, different for results of one layer that live together"""
    projected: Tensor = weight(x)
    return projected


def _project_streams(matrix: AnyLinear, x: Tensor) -> Tensor:
    """Returns the products of streams that weights are made of (kernels/streams.py), [rows, n] float32."""
    products: Tensor = matrix(x).float()
    return products


def _absorb(weight: AnyHeads, q: Tensor, nope: int) -> Tensor:
    """Projects the first `nope` elements of each query head into the latent space.

    q: [rows, heads, nope + rope] -> [rows, heads, latent + rope]
    """
    if q.is_cuda:  # the product is written in place: nothing is copied but the rest
        latent = weight.out_features
        out = q.new_empty(*q.shape[:2], latent + q.shape[2] - nope)
        weight.write(q[..., :nope], out[..., :latent])
        out[..., latent:] = q[..., nope:]
        return out
    return torch.cat((weight(q[..., :nope]), q[..., nope:]), dim=-1)


def _expand(weight: AnyHeads, latents: Tensor) -> Tensor:
    """latents: [rows, heads, latent] -> values [rows, heads, value_dim]"""
    if latents.is_cuda:
        out = latents.new_empty(*latents.shape[:2], weight.out_features)
        values: Tensor = weight.write(latents, out)
    else:
        values = weight(latents)
    return values


def _mlp(weights: AnyMlp, x: Tensor) -> Tensor:
    """Returns the gated MLP of x, [rows, hidden] -> [rows, hidden]."""
    out: Tensor = weights(x)
    return out


class Operations:
    """Operations on the rows of a step, at once. Rows are [rows, ...]; a result is new unless said."""

    @operation(_gather, lambda draw: [("rows", RowTable.of(draw(20, _HIDDEN)), torch.arange(EXAMPLE_ROWS))])
    def gather(tape: Tape, name: str, table: RowTable, ids: Tensor) -> Tensor:
        out = tape.buffer(name, table.width)
        _record_gather(tape, table, ids, ROWS, out)
        return out

    @operation(rows.rms_norm, lambda draw: [(draw(EXAMPLE_ROWS, _HIDDEN), draw(_HIDDEN), _EPS)])
    def rms_norm(tape: Tape, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = tape.buffer("rms_norm", x.shape[1])
        tape.call("rms_norm", x, ROWS, x.shape[1], x.stride(0), weight, float_bits(eps), out, out.stride(0))
        return out

    @operation(rows.rms_norm_, lambda draw: [(draw(EXAMPLE_ROWS, _HIDDEN)[:, 2:99], draw(97), _EPS)])
    def rms_norm_(tape: Tape, x: Tensor, weight: Tensor, eps: float) -> None:
        tape.call("rms_norm", x, ROWS, x.shape[1], x.stride(0), weight, float_bits(eps), x, x.stride(0))

    @operation(
        rows.add_rms_norm,
        lambda draw: [
            (draw(EXAMPLE_ROWS, _HIDDEN), draw(EXAMPLE_ROWS, _HIDDEN), draw(_HIDDEN), _EPS, f) for f in (1.0, 0.3)
        ],
    )
    def add_rms_norm(tape: Tape, x: Tensor, delta: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        out = tape.buffer("normed", x.shape[1])
        strides, bits = (x.stride(0), delta.stride(0)), (float_bits(eps), float_bits(factor))
        tape.call("add_rms_norm", x, delta, ROWS, x.shape[1], *strides, weight, *bits, out)
        return out

    @operation(
        rows.layer_norm,
        lambda draw: [
            (draw(EXAMPLE_ROWS, _HIDDEN), delta, LayerNorm(draw(_HIDDEN), draw(_HIDDEN)), _EPS)
            for delta in (None, draw(EXAMPLE_ROWS, _HIDDEN))
        ],
    )
    def layer_norm(tape: Tape, x: Tensor, delta: Tensor | None, norm: LayerNorm, eps: float) -> Tensor:
        out = tape.buffer("layer_norm", x.shape[1])
        added, step = (0, 0) if delta is None else (delta, delta.stride(0))
        sizes = ROWS, x.shape[1], x.stride(0), step
        tape.call("layer_norm", x, added, *sizes, norm.weight, norm.bias, float_bits(eps), out)
        return out

    @operation(rows.scale_, lambda draw: [(draw(EXAMPLE_ROWS, _HIDDEN), 0.22)])
    def scale_(tape: Tape, x: Tensor, factor: float) -> None:
        tape.call("scale_rows", x, ROWS, x.shape[1], x.stride(0), float_bits(factor))

    @operation(rows.clip_, lambda draw: [(draw(EXAMPLE_ROWS, _HIDDEN), 0.7)])
    def clip_(tape: Tape, x: Tensor, limit: float) -> None:
        tape.call("clip_rows", x, ROWS, x.shape[1], x.stride(0), float_bits(limit))

    @operation(rows.multiply_rows, lambda draw: [(draw(EXAMPLE_ROWS, _HIDDEN), draw(EXAMPLE_ROWS, 1))])
    def multiply_rows(tape: Tape, x: Tensor, factors: Tensor) -> Tensor:
        out = tape.buffer("scaled_rows", x.shape[1])
        tape.call("multiply_rows", x, ROWS, x.shape[1], x.stride(0), factors, out, out.stride(0))
        return out

    @operation(rows.multiply_rows_, lambda draw: [(draw(EXAMPLE_ROWS, _HIDDEN)[:, :70], draw(EXAMPLE_ROWS, 1))])
    def multiply_rows_(tape: Tape, x: Tensor, factors: Tensor) -> None:
        tape.call("multiply_rows", x, ROWS, x.shape[1], x.stride(0), factors, x, x.stride(0))

    @operation(
        rows.add_gated_,
        lambda draw: [(draw(EXAMPLE_ROWS, 70), draw(EXAMPLE_ROWS, 70), g) for g in (None, draw(EXAMPLE_ROWS, 1))],
    )
    def add_gated_(tape: Tape, total: Tensor, x: Tensor, gate: Tensor | None) -> None:
        if gate is None:
            tape.call("add_rows", total, x, ROWS, x.shape[1])
        else:
            tape.call("add_gated_rows", total, x, ROWS, x.shape[1], gate)

    @operation(rows.gate_, lambda draw: [(draw(EXAMPLE_ROWS, 70), draw(EXAMPLE_ROWS, 90)[:, 20:])])
    def gate_(tape: Tape, x: Tensor, logits: Tensor) -> None:
        tape.call("multiply_by_sigmoid", x, ROWS, x.shape[1], x.stride(0), logits, logits.stride(0))

    @operation(
        rows.gate_heads_,
        lambda draw: [
            (draw(EXAMPLE_ROWS, 3, 22), draw(EXAMPLE_ROWS, 9)[:, 2:5], softplus) for softplus in (False, True)
        ],
    )
    def gate_heads_(tape: Tape, x: Tensor, logits: Tensor, softplus: bool = False) -> None:
        assert x.is_contiguous(), f"heads with strides {x.stride()}"
        tape.call("gate_heads", x, ROWS, x.shape[1], x.shape[2], logits, logits.stride(0), int(softplus))

    @operation(
        rows.gated_rms_norm_,
        lambda draw: [
            (draw(EXAMPLE_ROWS, 78), draw(EXAMPLE_ROWS, 90)[:, 5:83], draw(78), _EPS, groups) for groups in (1, 3)
        ],
    )
    def gated_rms_norm_(tape: Tape, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> None:
        sizes = ROWS, x.shape[1], x.stride(0)
        tape.call("gated_rms_norm", x, *sizes, gate, gate.stride(0), groups, weight, float_bits(eps))

    @operation(_linear, lambda draw: [("y", PackedLinear(draw(70, _HIDDEN), draw(70)), draw(EXAMPLE_ROWS, _HIDDEN))])
    def linear(tape: Tape, name: str, weight: PackedLinear | PackedParts, x: Tensor) -> Tensor:
        out, column = tape.buffer(name, weight.out_features), 0
        for part in weight.parts:
            columns = out[:, column : column + part.out_features]
            tape.call("linear", part.facts, x, ROWS, x.stride(0), 0, columns, out.stride(0), 0, keep=part)
            column += part.out_features
        return out

    @operation(_absorb, lambda draw: [(PackedHeads(draw(3, 6, 11)), draw(EXAMPLE_ROWS, 3, 10), 6)])
    def absorb(tape: Tape, weight: PackedHeads, q: Tensor, nope: int) -> Tensor:
        _, heads, width = q.shape
        out = tape.buffer("latent_queries", heads, weight.out_features + width - nope)
        _record_heads(tape, weight, q[..., :nope], out[..., : weight.out_features])
        source, rest = q[..., nope:], out[..., weight.out_features :]
        tape.call("copy_heads", source, ROWS, heads, width - nope, *source.stride()[:2], rest, *rest.stride()[:2])
        return out

    @operation(_expand, lambda draw: [(PackedHeads(draw(3, 6, 11)), draw(EXAMPLE_ROWS, 3, 8)[..., 2:])])
    def expand(tape: Tape, weight: PackedHeads, latents: Tensor) -> Tensor:
        out = tape.buffer("expanded", weight.num_heads, weight.out_features)
        _record_heads(tape, weight, latents, out)
        return out

    @operation(
        rope.rope_write,
        lambda draw: [
            (draw(EXAMPLE_ROWS, 4 * 34), head_norm, _EPS, _some_turns(draw, 17), torch.arange(EXAMPLE_ROWS),
             cache, 2, 1, last, scales)
            for head_norm, last, (cache, scales) in (
                (None, False, (torch.zeros(EXAMPLE_ROWS, 2, 34), None)),
                (draw(3, 34), False, (torch.zeros(EXAMPLE_ROWS, 2, 34), None)),
                (draw(3, 34), True, (torch.zeros(EXAMPLE_ROWS, 2, 34), None)),
                (None, False, _in_8_bits(torch.int8, 2, 34, 1)),
                (None, False, _in_8_bits(torch.float8_e4m3fn, 2, 34, 1)),
            )
        ],
    )  # fmt: skip
    def rope_write(
        tape: Tape,
        qkv: Tensor,
        head_norm: Tensor | None,
        eps: float,
        turns: Tensor,
        slots: Tensor,
        cache_layer: Tensor,
        num_heads: int,
        num_kv_heads: int,
        norm_last: bool = False,
        scales: Tensor | None = None,
    ) -> None:
        norm = 0 if head_norm is None else head_norm
        facts = _facts(num_heads, num_kv_heads, cache_layer.shape[2], 2 * turns.shape[1], int(norm_last))
        at = facts, qkv, ROWS, qkv.stride(0), norm, float_bits(eps), turns, slots, cache_layer
        tape.call("rope_write", *at, _cached_form(cache_layer, scales), keep=scales)

    @operation(
        rope.mla_rope_write,
        lambda draw: [
            (draw(EXAMPLE_ROWS, 3, 16), draw(EXAMPLE_ROWS, 28), draw(22), _EPS, _some_turns(draw, 3),
             torch.arange(EXAMPLE_ROWS), cache, MlaWidths(10, 22, 6), scales)
            for cache, scales in (
                (torch.zeros(EXAMPLE_ROWS, 1, 28), None),
                _in_8_bits(torch.int8, 1, 28, 2),
                _in_8_bits(torch.float8_e4m3fn, 1, 28, 2),
            )
        ],
    )  # fmt: skip
    def mla_rope_write(
        tape: Tape,
        q: Tensor,
        row: Tensor,
        latent_norm: Tensor,
        eps: float,
        turns: Tensor,
        slots: Tensor,
        cache_layer: Tensor,
        widths: MlaWidths,
        scales: Tensor | None = None,
    ) -> None:
        at = q, q.stride(0), row, row.stride(0), ROWS
        facts = _facts(q.shape[1], widths.nope + widths.rope, widths.latent, widths.rope)
        to = turns, slots, cache_layer, _cached_form(cache_layer, scales)
        tape.call("mla_rope_write", facts, *at, latent_norm, float_bits(eps), *to, keep=scales)

    @operation(
        indexed_attention.index_write,
        lambda draw: [
            (
                draw(EXAMPLE_ROWS, 3, 40),
                draw(EXAMPLE_ROWS, 40),
                _some_turns(draw, 8),
                torch.arange(EXAMPLE_ROWS),
                torch.zeros(EXAMPLE_ROWS, 1, 40),
            )
        ],
    )
    def index_write(tape: Tape, q: Tensor, k: Tensor, turns: Tensor, slots: Tensor, cache_layer: Tensor) -> None:
        sizes = ROWS, q.stride(0), *q.shape[1:], 2 * turns.shape[1]
        tape.call("index_write", q, *sizes, k, k.stride(0), turns, slots, cache_layer)

    @operation(
        take_identity_, lambda draw: [(torch.arange(EXAMPLE_ROWS * 4).view(-1, 4) % 9, draw(EXAMPLE_ROWS, 4), 5)]
    )
    def take_identity_(tape: Tape, ids: Tensor, weights: Tensor, num_logical: int) -> Tensor:
        total = tape.buffer("identity_weights", 1)
        tape.call("take_identity", ids, weights, ROWS, ids.shape[1], num_logical, total)
        return total

    @operation(streams.spread_rows, lambda draw: [(draw(EXAMPLE_ROWS, 70), 3)])
    def spread_rows(tape: Tape, x: Tensor, streams: int) -> Tensor:
        out, width = tape.buffer("streams", streams * x.shape[1]), x.shape[1]
        tape.call("copy_heads", x, ROWS, streams, width, x.stride(0), 0, out, out.stride(0), width)
        return out

    @operation(_project_streams, lambda draw: [(PackedLinear(draw(15, _HIDDEN)), draw(EXAMPLE_ROWS, _HIDDEN))])
    def project_streams(tape: Tape, matrix: PackedLinear, x: Tensor) -> Tensor:
        out = tape.buffer("stream_weights", matrix.out_features)
        tape.call("linear", matrix.facts, x, ROWS, x.stride(0), 0, out, out.stride(0), 0, keep=matrix)
        return out

    @operation(
        streams.sum_streams,
        lambda draw: [
            (draw(EXAMPLE_ROWS, 3 * 70), 9 * draw(EXAMPLE_ROWS, weights.shape.num_weights), weights)
            for weights in (_some_streams(draw, True), _some_streams(draw, False))
        ],
    )
    def sum_streams(tape: Tape, x: Tensor, products: Tensor, weights: StreamWeights) -> Tensor:
        out = tape.buffer("stream_sum", weights.shape.width)
        at = x, ROWS, products, products.stride(0), out
        tape.call("sum_streams", _stream_facts(weights), *at, keep=weights)
        return out

    @operation(
        streams.mix_streams_,
        lambda draw: [(draw(EXAMPLE_ROWS, 3 * 70), draw(EXAMPLE_ROWS, 70), draw(EXAMPLE_ROWS, 15),
                       _some_streams(draw, True))],
    )  # fmt: skip
    def mix_streams_(tape: Tape, x: Tensor, delta: Tensor, mixing: Tensor, weights: StreamWeights) -> None:
        at = x, ROWS, mixing, mixing.stride(0), delta
        tape.call("mix_streams", _stream_facts(weights), *at, keep=weights)

    @operation(_mlp, lambda draw: [])  # the digest has experts of every kind of weight
    def mlp(tape: Tape, weights: AnyMlp, x: Tensor) -> Tensor:
        return _record_ffn(tape, "mlp", x, ctypes.addressof(tape.num_rows), weights.experts)


class Recorder(Operations, Tape):
    """The operations recorded on a tape, and those that the compiled kernels alone have. Rows are float32."""

    def project_rows(self, weight: PackedLinear, x: Tensor) -> None:
        """Records the projection of the logit rows among x [rows, hidden] to the step's logits."""
        wanted = self.buffer("logit_rows", x.shape[1])
        _record_gather(self, RowTable.of(x), LOGIT_ROWS, NUM_LOGITS, wanted)
        sizes = wanted, NUM_LOGITS, wanted.stride(0), 0, LOGITS, weight.out_features, 0
        self.call("linear", weight.facts, *sizes, keep=weight)

    def attend_rows(
        self,
        q: Tensor,
        cache: Tensor,
        shape: AttendShape,
        seen: Seen = Seen(),
        scales: Tensor | None = None,
        number: int = 0,
    ) -> Tensor:
        """Returns the attention of the step's AttendRows, [rows, heads, group, value width].

        q:      [rows, heads, group, width]; the stride of rows is free, as in a slice of a fused projection
        cache:  [slots, *shape.row_shape], one layer's keys and values, those of these rows included; float32, or int8
                or float8_e4m3fn with scales [slots, heads of a slot, 1 or 2] float32 (kernels/quantised.py)
        number: of the shape among those of the AttendRows
        """
        out = self.buffer("attended", shape.heads, shape.group, shape.value_width)
        options = *attend_options(shape, seen), _cached_form(cache, scales)
        self.call("attend", ATTEND, number, q, q.stride(0), cache, out, *options, keep=(seen.sinks, scales))
        return out

    def attend_chosen(
        self, q: Tensor, cache: Tensor, shape: AttendShape, index: tuple[Tensor, Tensor, Tensor], indexer: IndexerShape
    ) -> Tensor:
        """Returns what attend_rows returns, over the keys that an indexer chooses (kernels/indexed_attention.py).

        index: queries [rows, heads, width], weights of their heads [rows, heads], cached keys [slots, 1, width]
        """
        out = self.buffer("attended", shape.heads, shape.group, shape.value_width)
        queries, weights, keys = index
        steps = queries, queries.stride(0), weights, weights.stride(0)
        facts = _facts(indexer.heads, indexer.width, indexer.topk)
        self.call("attend_indexed", ATTEND, q, q.stride(0), cache, out, *steps, keys, facts)
        return out

    def attend_compressed(
        self, rows: CompressedRows, weights: CompressedWeights, cache: Tensor, slots: Tensor
    ) -> Tensor:
        """Returns what compressed_attention_reference does with the step's AttendRows.

        cache: [slots, 1, row_width] float32;  slots: [rows] int64, of the cache
        """
        shape, entries, index = weights.shape, weights.entries, weights.index
        assert shape.every <= MOST_TOGETHER, f"groups of {shape.every} tokens, at most {MOST_TOGETHER}"
        assert cache.dtype == torch.float32 and cache.shape[2] == shape.row_width, f"{cache.dtype} {tuple(cache.shape)}"  # noqa: PT018
        each = (weights.norm, *(part for of in (entries, index) if of is not None for part in (of.norm, of.bias)))
        assert all(dense(part, torch.float32) for part in (*each, weights.sinks))
        sizes = shape.heads, shape.width, shape.rotated, shape.window, shape.every, shape.parts
        chosen_by = shape.index_heads, shape.index_width, shape.topk
        at = *_addresses(entries), *_addresses(index)
        numbers = float_bits(shape.eps), float_bits(shape.scale)
        addresses = weights.norm.data_ptr(), *at, weights.sinks.data_ptr(), weights.turns.data_ptr()
        facts = torch.tensor([*sizes, *chosen_by, *addresses, *numbers])
        index_q, index_weights = (0 if part is None else part for part in (rows.index_q, rows.weights))
        given = rows.q, rows.rows, rows.rows.stride(0), shape.row_width, index_q, slots, cache
        self.call("write_compressed", ATTEND, facts, *given, keep=weights)
        out = self.buffer("attended", shape.heads, shape.width)
        step = 0 if rows.weights is None else rows.weights.stride(0)
        seen = rows.q, shape.row_width, index_q, index_weights, step, cache, out
        self.call("attend_compressed", ATTEND, facts, *seen, keep=weights)
        return out

    def delta_rule(
        self, x: Tensor, apart: tuple[Tensor, Tensor] | None, weights: DeltaWeights, pools: Sequence[Tensor]
    ) -> Tensor:
        """Returns what delta_rule_reference does with the step's SequenceStates; it writes rows of sequences alone."""
        shape = weights.shape
        assert (shape.rank is None) == (apart is None), "steps and gates of their own go with a rank"
        for pool, wanted in zip(pools, shape.state_shapes, strict=True):
            assert pool.is_contiguous() and tuple(pool.shape[1:]) == wanted, f"states {tuple(pool.shape)}"  # noqa: PT018
        out = self.buffer("delta_rule", shape.value_heads * shape.value_width)
        kept = columns_of(shape), weights.conv, weights.decay, weights.step_bias, weights.norm
        assert all(dense(each, torch.float32) for each in kept[1:])
        sizes = shape.key_heads, shape.value_heads, shape.key_width, shape.value_width, shape.taps
        by_channel = int(shape.rank is not None)
        numbers = float_bits(weights.eps), by_channel, float_bits(shape.bound or 0.0)
        facts = torch.tensor([*sizes, *(each.data_ptr() for each in kept), *numbers])
        steps, gates = ((0, 0), (0, 0)) if apart is None else ((each, each.stride(0)) for each in apart)
        self.call("delta_rule", facts, SEQUENCES, x, x.stride(0), *steps, *gates, *pools, out, keep=kept)
        return out

    def causal_conv(self, x: Tensor, weights: ConvWeights, states: Tensor) -> Tensor:
        """Returns what causal_conv_reference does with the step's SequenceStates; it writes rows of sequences alone."""
        shape = weights.shape
        assert states.is_contiguous() and tuple(states.shape[1:]) == shape.state_shape, f"states {tuple(states.shape)}"  # noqa: PT018
        assert shape.taps <= MOST_TAPS, f"a convolution over {shape.taps} tokens, at most {MOST_TAPS}"
        assert dense(weights.weight, torch.float32) and dense(weights.bias, torch.float32)  # noqa: PT018
        out = self.buffer("causal_conv", shape.channels)
        factors = (-1 if column is None else column for column in (shape.before, shape.after))
        sizes = shape.channels, shape.taps, shape.first, *factors, int(shape.silu)
        facts = torch.tensor([*sizes, weights.weight.data_ptr(), weights.bias.data_ptr()])
        self.call("causal_conv", facts, SEQUENCES, x, x.stride(0), states, out, keep=weights)
        return out

    def state_space(self, mixed: Tensor, steps: Tensor, weights: StateSpaceWeights, states: Tensor) -> Tensor:
        """Returns what state_space_reference does with the step's SequenceStates; it writes rows of sequences alone."""
        shape = weights.shape
        assert states.is_contiguous() and tuple(states.shape[1:]) == shape.state_shapes[1], f"{tuple(states.shape)}"  # noqa: PT018
        out = self.buffer("state_space", shape.inner)
        kept = weights.decay, weights.step_bias, weights.skip
        assert all(dense(each, torch.float32) for each in kept)
        sizes = shape.groups, shape.heads, shape.state_width, shape.head_width
        facts = torch.tensor([*sizes, *(each.data_ptr() for each in kept)])
        rows = mixed, mixed.stride(0), steps, steps.stride(0)
        self.call("state_space", facts, SEQUENCES, *rows, states, out, keep=kept)
        return out

    def selective_space(self, rows: SelectiveRows, weights: SelectiveWeights, states: Tensor) -> Tensor:
        """Returns what selective_space_reference does with the step's SequenceStates, of rows of sequences alone."""
        shape, kept = weights.shape, (weights.decay, weights.step_bias, weights.skip)
        assert states.is_contiguous() and tuple(states.shape[1:]) == shape.state_shapes[1], f"{tuple(states.shape)}"  # noqa: PT018
        assert all(dense(each, torch.float32) for each in kept)
        assert weights.decay.shape == states.shape[1:], f"decays {tuple(weights.decay.shape)}"
        out = self.buffer("selective_space", shape.inner)
        facts = torch.tensor([shape.inner, shape.state_width, *(each.data_ptr() for each in kept)])
        channels = rows.v, rows.v.stride(0), rows.steps, rows.steps.stride(0)
        others = rows.shared, rows.shared.stride(0), rows.gates, rows.gates.stride(0)
        self.call("selective_space", facts, SEQUENCES, *channels, *others, states, out, keep=kept)
        return out

    def gate(
        self,
        logits: Tensor,
        bias: Tensor | None,
        spec: RouterSpec,
        load: Tensor,
        chosen: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns ids [rows, topk] int64 and weights [rows, topk], best first, and adds every choice to load.

        The contract is that of kernels/topk_gate.py. logits: [rows, E];  bias: [E] or None;  load: [E] int64
        chosen: token ids [rows] int64, and the experts of each, [tokens, topk] int64, whose order the ids have then;
                None: the best are chosen
        """
        ids = self.buffer("topk_ids", spec.topk, dtype=torch.int64)
        weights = self.buffer("topk_weights", spec.topk)
        facts = _gate_facts(spec)
        at = facts, 0 if bias is None else bias, logits, ROWS, logits.stride(0), ids, weights, load
        self.call("gate", *at, *((0, 0) if chosen is None else chosen))
        return ids, weights

    def limit_experts(
        self,
        logits: Tensor,
        bias: Tensor | None,
        spec: RouterSpec,
        ids: Tensor,
        weights: Tensor,
        capacity: ExpertCapacity,
        totals: Tensor,
        kept: ChangedChoices | None = None,
    ) -> None:
        """Changes what exceeds the capacity of an expert, in place: kernels/capacity.py, whose arguments come first.

        totals: [2] int64, to which the choices that moved, and that were dropped, are added
        kept:   where the number of changed choices of each row is kept; None: nowhere
        """
        at = (0, 0, 0) if kept is None else (int(kept.is_first), kept.counts.data_ptr(), 2 * kept.counts.stride(0))
        factor = torch.tensor([capacity.factor], dtype=torch.float64).view(torch.int64)
        facts = torch.cat((factor, torch.tensor([int(capacity.moves), *at, totals.data_ptr()])))
        of_gate = _gate_facts(spec), 0 if bias is None else bias, logits, ROWS, logits.stride(0), ids, weights
        rivals = self.buffer("rivals", spec.topk, dtype=torch.int64)
        self.call("limit_experts", *of_gate, facts, 0 if kept is None else kept.slots, rivals, keep=(kept, totals))

    def look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        """Returns table[ids], -1 for -1. table: [n] int64, ids: [rows, topk] int64"""
        out = self.buffer("slots", ids.shape[1], dtype=torch.int64)
        self.call("look_up", table, table.shape[0], ids, ROWS, ids.shape[1], out)
        return out

    def keep_ids(self, ids: Tensor, slots: Tensor, kept: Tensor) -> None:
        """Writes ids [rows, topk] to the slots [rows] of `kept` [slots, topk], uint8 or int16; none below slot 0."""
        stride = kept.stride(0) * kept.itemsize
        self.call("keep_ids", ids, ROWS, ids.shape[1], slots, kept, stride, kept.itemsize)

    def count(self, ids: Tensor, num_experts: int) -> Tensor:
        """Returns how many of ids [rows, topk] name each expert, [num_experts] int64; kept where there are no rows."""
        out = torch.zeros(num_experts, dtype=torch.int64)
        self.call("count_ids", ids, ROWS, ids.shape[1], num_experts, out)
        return out

    def experts(self, x: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts) -> Tensor:
        """Returns the weighted sum of each row's experts. x: [rows, H], slots: [rows, topk], weights: [rows, topk]"""
        hidden, topk, num_slots = experts.hidden, slots.shape[1], experts.gate_up.shape[0]
        packed, index = self.buffer("packed", topk, hidden), self.buffer("index", topk, dtype=torch.int64)
        counts = self.buffer("counts", num_slots, dtype=torch.int64)[0]
        sizes = hidden, slots, ROWS, topk, num_slots
        self.part = DISPATCH
        self.call("pack_rows", x, x.stride(0), *sizes, packed, counts, index)
        self.part = EXPERTS
        results = _record_ffn(self, "expert", packed.view(-1, hidden), counts, experts)
        out = self.buffer("expert_sum", hidden)
        self.part = COMBINE
        self.call("weighted_sum", results, hidden, index, ROWS, topk, weights, out)
        return out


def recorded_once(num_rows: int, record: Callable[[Recorder], R], attend: int = 0, sequences: int = 0) -> R:
    """Records operations on `num_rows` rows, runs them, and returns what `record` has returned.

    attend, sequences: addresses of the AttendRows and the SequenceStates
    """
    recorder = Recorder(cpu_library(), num_rows, PartClock())
    results = record(recorder)
    recorder.run(RecordedRun(RowInputs(num_rows, attend=attend, sequences=sequences), 1, False))
    return results


def _record_gather(tape: Tape, table: RowTable, ids: Tensor | Input, num_ids: Input, out: Tensor) -> None:
    facts = table.kind, int(table.is_packed), table.num_rows, table.width
    groups = 0 if table.groups is None else table.groups
    tape.call("gather_rows", table.data, *facts, groups, ids, num_ids, out)


def _record_heads(tape: Tape, weight: PackedHeads, x: Tensor, out: Tensor) -> None:
    """Records one projection per head of x [rows, heads, k] to out [rows, heads, n], of any strides."""
    tape.call("linear", weight.facts, x, ROWS, *x.stride()[:2], out, *out.stride()[:2], keep=weight)


def _record_ffn(tape: Tape, name: str, x: Tensor, counts: Tensor | int, experts: PackedExperts) -> Tensor:
    per_row = x.shape[0] // max(tape.capacity, 1)
    middle = tape.buffer(name + "_middle", per_row * padded(experts.width))
    out = tape.buffer(name + "_out", per_row * experts.hidden)
    tape.call("expert_ffn", experts.facts, x, x.stride(0), counts, 0, middle, out, experts.hidden, keep=experts)
    return out


@functools.lru_cache
def _facts(*numbers: int) -> Tensor:
    """Returns the block of int64 that a kernel reads."""
    return torch.tensor(numbers)


@functools.lru_cache
def _gate_facts(spec: RouterSpec) -> Tensor:
    """Returns the block of int64 that gate.c reads."""
    assert spec.num_choices <= MOST_EXPERTS, f"{spec.num_choices} experts, at most {MOST_EXPERTS}"
    assert spec.num_groups <= MOST_GROUPS, f"{spec.num_groups} groups, at most {MOST_GROUPS}"
    masked = 0.0 if spec.masks_with_zero else -math.inf
    doubles = [spec.scaling, spec.norm_eps, spec.norm_min, 2 * spec.jitter, masked]
    numbers = torch.tensor(doubles, dtype=torch.float64)
    scoring, by_best = get_args(Scoring).index(spec.scoring), int(spec.group_score == "best")
    sizes = [spec.num_choices, spec.topk, scoring, int(spec.norm_topk), spec.num_groups, spec.topk_groups, by_best]
    return torch.cat((torch.tensor([*sizes, spec.num_logical]), numbers.view(torch.int64)))


def _stream_facts(weights: StreamWeights) -> Tensor:
    """Returns the block of int64 that streams.c reads. The caller keeps the weights."""
    shape, base, scale = weights.shape, weights.base, weights.scale
    assert shape.streams <= MOST_STREAMS, f"{shape.streams} streams, at most {MOST_STREAMS}"
    assert dense(base, torch.float32, shape.num_weights), f"{base.dtype} {tuple(base.shape)}"
    assert dense(scale, torch.float32, 3 if shape.mixes else 1), f"{scale.dtype} {tuple(scale.shape)}"
    sizes = shape.streams, shape.width, shape.rounds, int(shape.mixes)
    numbers = base.data_ptr(), scale.data_ptr(), float_bits(shape.eps), float_bits(shape.norm_eps)
    return torch.tensor([*sizes, *numbers])


def _addresses(entries: EntryWeights | None) -> tuple[int, int]:
    return (0, 0) if entries is None else (entries.norm.data_ptr(), entries.bias.data_ptr())


def _some_streams(draw: Draw, mixes: bool) -> StreamWeights:
    shape = StreamShape(3, 70, 4, 1e-3, _EPS, mixes)
    return StreamWeights(shape, draw(3 if mixes else 1), draw(shape.num_weights))


def _cached_form(cache: Tensor, scales: Tensor | None) -> Tensor:
    """Returns the form of one layer's cache as cached.h reads it. The caller keeps the scales."""
    at = (0, 0) if scales is None else (scales.data_ptr(), scales.stride(0))
    return _facts(KINDS.index(cache.dtype), cache.stride(0), *at)


def _in_8_bits(dtype: torch.dtype, heads: int, width: int, parts: int) -> tuple[Tensor, Tensor]:
    """Returns an empty cache for the rows of the examples, and its scales."""
    return torch.zeros(EXAMPLE_ROWS, heads, width, dtype=dtype), torch.zeros(EXAMPLE_ROWS, heads, parts)


def _some_turns(draw: Draw, pairs: int) -> Tensor:
    return torch.complex(draw(EXAMPLE_ROWS, pairs), draw(EXAMPLE_ROWS, pairs))
