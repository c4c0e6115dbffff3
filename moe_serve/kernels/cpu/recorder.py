"""Writes the kernels of a step to a program instead of running them.

Model code calls these operations once, on buffers of as many rows as a step may have. They note which kernel reads and
writes which buffer; afterwards a step of any number of rows is a run of the program. Buffers are shared by layers:
what one layer calls "qkv" is read by no one when the next layer writes its own.

A step may need Python in between, such as an exchange between ranks: `call_python` cuts the program there.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from moe_serve.kernels.cpu.attention import AttendShape, attend_options
from moe_serve.kernels.cpu.experts import PackedExperts
from moe_serve.kernels.cpu.gate import gate_facts
from moe_serve.kernels.cpu.indexed import indexer_facts
from moe_serve.kernels.cpu.library import CpuLibrary
from moe_serve.kernels.cpu.linear import KINDS, PackedHeads, PackedLinear, RowTable
from moe_serve.kernels.cpu.packed import padded
from moe_serve.kernels.cpu.program import Input, Program
from moe_serve.kernels.cpu.rows import float_bits, mla_facts, rope_facts
from moe_serve.kernels.forms import GateShape
from moe_serve.kernels.indexed_attention import IndexerShape
from moe_serve.kernels.norm import LayerNorm
from moe_serve.kernels.part_clock import COMBINE, DISPATCH, EXPERTS, OTHER, PartClock
from moe_serve.kernels.rope import MlaWidths


class RowInputs(NamedTuple):
    """What changes from step to step: numbers of rows, and addresses.

    ids, positions, slots: [num_rows] int64;  attend: AttendRows.address
    logit_rows: [num_logits] int64;  logits: [num_logits, vocab_size] float32
    """

    num_rows: int
    ids: int = 0
    positions: int = 0
    slots: int = 0
    attend: int = 0
    num_logits: int = 0
    logit_rows: int = 0
    logits: int = 0


ROWS, IDS, POSITIONS, SLOTS, ATTEND, NUM_LOGITS, LOGIT_ROWS, LOGITS = map(Input, range(len(RowInputs._fields)))
_Inputs = ctypes.c_int64 * len(RowInputs._fields)


@dataclass(frozen=True)
class RecordedRun:
    """One step's run.

    num_chunks, overlap: of its MoE layers, as MoeLayer takes them
    """

    rows: RowInputs
    num_chunks: int
    overlap: bool


Part = Callable[[RecordedRun], None]


class Recorder:
    """The operations of a decoder, recorded for steps of up to `capacity` rows, which are float32."""

    def __init__(self, library: CpuLibrary, capacity: int, clock: PartClock):
        """clock: is told which part of the step runs"""
        self.capacity = capacity
        self.part = OTHER  # of what is recorded next
        self._library = library
        self._clock = clock
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._num_rows = ctypes.c_int64()
        self._kept: list[object] = []  # whose addresses the program holds
        self._programs: list[Program] = [Program(library, clock)]
        self._between: list[Part] = []  # after each program but the last

    def run(self, step: RecordedRun) -> None:
        """Runs what was recorded. Kernels are left out where the step has no rows; Python takes part in any case."""
        num_rows, inputs = step.rows.num_rows, _Inputs(*step.rows)
        assert num_rows <= self.capacity, f"{num_rows} rows, recorded for {self.capacity}"
        self._num_rows.value = num_rows
        for program, then in zip_longest(self._programs, self._between):
            if num_rows:
                program.run(inputs)
            if then is not None:
                then(step)

    def buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the buffer of a name, [capacity, *shape]; the same one for the same name and shape."""
        key = (name, *shape, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self.capacity, *shape, dtype=dtype)
        return self._buffers[key]

    def call_python(self, function: Part) -> None:
        """Records a call of Python at this point of every step."""
        self._between.append(function)
        self._programs.append(Program(self._library, self._clock))

    def gather(self, name: str, table: RowTable, ids: Input) -> Tensor:
        """Returns table[ids] in float32, [rows, width]."""
        out = self.buffer(name, table.width)
        self._gather(table, ids, ROWS, out)
        return out

    def logits(self, weight: PackedLinear, x: Tensor) -> Tensor:
        """Records the projection of the logit rows among x, and returns where these rows are kept, not the logits."""
        wanted = self.buffer("logit_rows", x.shape[1])
        self._gather(RowTable.of(x), LOGIT_ROWS, NUM_LOGITS, wanted)
        self._add("linear", weight.facts, wanted, NUM_LOGITS, wanted.stride(0), 0, LOGITS, weight.out_features, 0)
        self._kept.append(weight)
        return wanted

    def _gather(self, table: RowTable, ids: Input, num_ids: Input, out: Tensor) -> None:
        facts = KINDS.index(table.data.dtype), int(table.is_packed), table.num_rows, table.width
        self._add("gather_rows", table.data, *facts, ids, num_ids, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As kernels/norm.py."""
        out = self.buffer("rms_norm", x.shape[1])
        self._add("rms_norm", x, ROWS, x.shape[1], x.stride(0), weight, float_bits(eps), out, out.stride(0))
        return out

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """The same in place. x: [rows, width], may be a slice of wider rows"""
        self._add("rms_norm", x, ROWS, x.shape[1], x.stride(0), weight, float_bits(eps), x, x.stride(0))

    def scale_(self, x: Tensor, factor: float) -> None:
        """As kernels/rows.py."""
        self._add("scale_rows", x, ROWS, x.shape[1], x.stride(0), float_bits(factor))

    def multiply_rows(self, x: Tensor, factors: Tensor, out: Tensor) -> Tensor:
        """As kernels/rows.py, into `out`, which may be x."""
        self._add("multiply_rows", x, ROWS, x.shape[1], x.stride(0), factors, out, out.stride(0))
        return out

    def clip_(self, x: Tensor, limit: float) -> None:
        """As kernels/rows.py."""
        self._add("clip_rows", x, ROWS, x.shape[1], x.stride(0), float_bits(limit))

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
        """As kernels/norm.py."""
        out = self.buffer("normed", x.shape[1])
        strides, bits = (x.stride(0), delta.stride(0)), (float_bits(eps), float_bits(factor))
        self._add("add_rms_norm", x, delta, ROWS, x.shape[1], *strides, weight, *bits, out)
        return out

    def layer_norm(self, x: Tensor, delta: Tensor | None, norm: LayerNorm, eps: float) -> Tensor:
        """As kernels/norm.py."""
        out = self.buffer("layer_norm", x.shape[1])
        added, step = (0, 0) if delta is None else (delta, delta.stride(0))
        sizes = ROWS, x.shape[1], x.stride(0), step
        self._add("layer_norm", x, added, *sizes, norm.weight, norm.bias, float_bits(eps), out)
        return out

    def linear(self, name: str, weight: PackedLinear, x: Tensor) -> Tensor:
        """Returns the projection of x [rows, k], [rows, n], in the buffer of this name."""
        out = self.buffer(name, weight.out_features)
        self._add("linear", weight.facts, x, ROWS, x.stride(0), 0, out, out.stride(0), 0)
        self._kept.append(weight)
        return out

    def heads(self, weight: PackedHeads, x: Tensor, out: Tensor) -> Tensor:
        """Writes one projection per head of x [rows, heads, k] to out [rows, heads, n], of any strides; returns out."""
        self._add("linear", weight.facts, x, ROWS, *x.stride()[:2], out, *out.stride()[:2])
        self._kept.append(weight)
        return out

    def copy_heads(self, source: Tensor, out: Tensor) -> None:
        """Copies [rows, heads, width] between any strides."""
        _, heads, width = source.shape
        self._add("copy_heads", source, ROWS, heads, width, *source.stride()[:2], out, *out.stride()[:2])

    def rope_write(
        self,
        qkv: Tensor,
        head_norm: Tensor | None,
        eps: float,
        turns: Tensor,
        cache: Tensor,
        heads: tuple[int, int],
        norm_last: bool = False,
    ) -> None:
        """As kernels/rope.py, with the step's slots. turns: [rows, rotated], cos and sin by turns"""
        norm = 0 if head_norm is None else head_norm
        facts = rope_facts(*heads, cache.shape[2], turns.shape[1], norm_last)
        self._add("rope_write", facts, qkv, ROWS, qkv.stride(0), norm, float_bits(eps), turns, SLOTS, cache)

    def mla_rope_write(
        self,
        q: Tensor,
        row: Tensor,
        latent_norm: Tensor,
        eps: float,
        turns: Tensor,
        cache: Tensor,
        widths: MlaWidths,
    ) -> None:
        """As kernels/rope.py, with the step's slots. turns: [rows, rope], cos and sin by turns"""
        rows = q, q.stride(0), row, row.stride(0), ROWS
        facts = mla_facts(q.shape[1], widths)
        self._add("mla_rope_write", facts, *rows, latent_norm, float_bits(eps), turns, SLOTS, cache)

    def attend(
        self,
        q: Tensor,
        cache: Tensor,
        shape: AttendShape,
        window: int | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """As cpu/attention.py, with the step's AttendRows. q: [rows, heads, group, width]"""
        out = self.buffer("attended", shape.heads, shape.group, shape.value_width)
        self._add("attend", ATTEND, q, q.stride(0), cache, out, *attend_options(shape, window, sinks, chunk))
        self._kept.append(sinks)
        return out

    def index_write(self, q: Tensor, k: Tensor, turns: Tensor, cache: Tensor) -> None:
        """As kernels/indexed_attention.py, with the step's slots. turns: [rows, rotated], cos and sin by turns"""
        sizes = ROWS, q.stride(0), *q.shape[1:], turns.shape[1]
        self._add("index_write", q, *sizes, k, k.stride(0), turns, SLOTS, cache)

    def attend_indexed(
        self,
        q: Tensor,
        cache: Tensor,
        shape: AttendShape,
        index: tuple[Tensor, Tensor, Tensor],
        indexer: IndexerShape,
    ) -> Tensor:
        """As cpu/indexed.py, with the step's AttendRows. index: queries, weights of their heads, cached keys"""
        out = self.buffer("attended", shape.heads, shape.group, shape.value_width)
        queries, weights, keys = index
        steps = queries, queries.stride(0), weights, weights.stride(0)
        self._add("attend_indexed", ATTEND, q, q.stride(0), cache, out, *steps, keys, indexer_facts(indexer))
        return out

    def gate(self, logits: Tensor, bias: Tensor | None, shape: GateShape, load: Tensor) -> tuple[Tensor, Tensor]:
        """As cpu/gate.py: ids [rows, topk] int64 and weights [rows, topk]."""
        ids = self.buffer("topk_ids", shape.topk, dtype=torch.int64)
        weights = self.buffer("topk_weights", shape.topk)
        facts = gate_facts(shape, logits.shape[1])
        bias_or_none = 0 if bias is None else bias
        self._add("gate", facts, bias_or_none, logits, ROWS, logits.stride(0), ids, weights, load)
        return ids, weights

    def look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        """Returns table[ids], -1 for -1. table: [n] int64, ids: [rows, topk] int64"""
        out = self.buffer("slots", ids.shape[1], dtype=torch.int64)
        self._add("look_up", table, table.shape[0], ids, ROWS, ids.shape[1], out)
        return out

    def count(self, ids: Tensor, num_experts: int) -> Tensor:
        """Returns how many of ids [rows, topk] name each expert, [num_experts] int64; kept where there are no rows."""
        out = torch.zeros(num_experts, dtype=torch.int64)
        self._add("count_ids", ids, ROWS, ids.shape[1], num_experts, out)
        return out

    def experts(self, x: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts) -> Tensor:
        """Returns the weighted sum of each row's experts. x: [rows, H], slots: [rows, topk], weights: [rows, topk]"""
        hidden, topk, num_slots = experts.hidden, slots.shape[1], experts.gate_up.shape[0]
        packed, index = self.buffer("packed", topk, hidden), self.buffer("index", topk, dtype=torch.int64)
        counts = self.buffer("counts", num_slots, dtype=torch.int64)[0]
        sizes = hidden, slots, ROWS, topk, num_slots
        self.part = DISPATCH
        self._add("pack_rows", x, x.stride(0), *sizes, packed, counts, index)
        self.part = EXPERTS
        results = self._ffn("expert", packed.view(-1, hidden), counts, experts)
        out = self.buffer("expert_sum", hidden)
        self.part = COMBINE
        self._add("weighted_sum", results, hidden, index, ROWS, topk, weights, out)
        return out

    def mlp(self, x: Tensor, weights: PackedExperts) -> Tensor:
        """Returns the gated MLP of rows [rows, H], whose weights are those of a single slot."""
        return self._ffn("mlp", x, ctypes.addressof(self._num_rows), weights)

    def add(self, total: Tensor, x: Tensor, gate: Tensor | None = None) -> None:
        """Adds x to total in place, both [rows, width] without gaps; gate: [rows, 1], x times its sigmoid is added"""
        if gate is None:
            self._add("add_rows", total, x, ROWS, x.shape[1])
        else:
            self._add("add_gated_rows", total, x, ROWS, x.shape[1], gate)

    def _ffn(self, name: str, x: Tensor, counts: Tensor | int, experts: PackedExperts) -> Tensor:
        per_row = x.shape[0] // self.capacity
        middle = self.buffer(name + "_middle", per_row * padded(experts.width))
        out = self.buffer(name + "_out", per_row * experts.hidden)
        self._add("expert_ffn", experts.facts, x, x.stride(0), counts, 0, middle, out, experts.hidden)
        self._kept.append(experts)
        return out

    def _add(self, kernel: str, *arguments: Tensor | int | Input) -> None:
        """Adds a call; a tensor stands for its address."""
        self._kept += [argument for argument in arguments if isinstance(argument, Tensor)]
        self._programs[-1].add(self.part, kernel, *(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))
