"""Sequences in a paged cache for tests of attention: what the kernel makes of them, and what plain torch does."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_serve.attention_dp.attention import attention_reference
from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.kernels.cpu.attention import AttendRows
from moe_serve.kernels.cpu.operations import recorded_once
from moe_serve.kernels.forms import AttendShape, Seen
from moe_serve.kernels.quantised import widen_cached, write_cached

SHAPES = {
    "gqa": AttendShape(2, 4, 64, 0.125),
    "one head of odd width": AttendShape(1, 1, 7, 0.4),
    "odd group": AttendShape(3, 5, 80, 0.1),
    "wide group": AttendShape(2, 9, 128, 0.1),
    "narrow values": AttendShape(2, 3, 40, 0.15, values=20),
    "demo mla": AttendShape(1, 6, 64, 0.125, latent=48),
    "mla": AttendShape(1, 16, 576, 0.05, latent=512),
    "odd mla": AttendShape(1, 3, 37, 0.2, latent=21),
}


# name -> (shape, window, whether heads have sinks, chunk)
CASES: dict[str, tuple[AttendShape, int | None, bool, int | None]] = {
    name: (shape, None, False, None) for name, shape in SHAPES.items()
} | {
    "gqa, window 5 and sinks": (SHAPES["gqa"], 5, True, None),
    "gqa, window 1": (SHAPES["gqa"], 1, False, None),
    "odd group, window 70 and sinks": (SHAPES["odd group"], 70, True, None),
    "odd width, window 64": (SHAPES["one head of odd width"], 64, False, None),
    "wide group, sinks": (SHAPES["wide group"], None, True, None),
    "odd mla, window 33 and sinks": (SHAPES["odd mla"], 33, True, None),
    "gqa, chunks of 70": (SHAPES["gqa"], None, False, 70),
    "odd group, chunks of 1": (SHAPES["odd group"], None, False, 1),
    "wide group, chunks of 64 and sinks": (SHAPES["wide group"], None, True, 64),
}


@dataclass(frozen=True)
class Sequences:
    """Sequences whose keys and values are all in a cache with shuffled blocks. queries: [seqs] of [length, ..]"""

    shape: AttendShape
    block_size: int
    cache: Tensor
    tables: list[list[int]]
    queries: list[Tensor]
    window: int | None
    sinks: Tensor | None
    chunk: int | None
    scales: Tensor | None = None

    def batch(self, chunks: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns queries, positions, starts and block tables of a call for chunks (sequence, first position, end)."""
        widest = max((len(self.tables[seq]) for seq, _, _ in chunks), default=0)
        tables = torch.full((len(chunks), widest + 1), -1, dtype=torch.int32)[:, :widest]  # rows with a stride
        for row, (seq, _, _) in enumerate(chunks):
            tables[row, : len(self.tables[seq])] = torch.tensor(self.tables[seq], dtype=torch.int32)
        lengths = [end - first for _, first, end in chunks]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(0), *(torch.arange(first, end) for _, first, end in chunks)])
        wide = self.queries[0].new_zeros(len(positions), self.shape.heads * self.shape.group * self.shape.width + 5)
        q = wide[:, 2:-3].view(len(positions), self.shape.heads, self.shape.group, self.shape.width)
        for (seq, first, end), start in zip(chunks, starts.tolist(), strict=False):
            q[start : start + end - first] = self.queries[seq][first:end]
        return q, positions, starts, tables

    def attend(self, chunks: list[tuple[int, int, int]]) -> list[Tensor]:
        """Returns the attention of chunks, computed in one call of the compiled kernels."""
        q, positions, starts, tables = self.batch(chunks)
        rows = AttendRows([self.shape], positions, starts, tables, self.block_size)
        options = Seen(self.window, self.chunk, self.sinks), self.scales
        attended = recorded_once(len(q), lambda do: do.attend_rows(q, self.cache, self.shape, *options), rows.address)
        return list(attended.split([end - first for _, first, end in chunks]))

    def in_8_bits(self, dtype: torch.dtype) -> "tuple[Sequences, Sequences]":
        """Returns the same sequences in a cache of 8 bits, and in one that holds what is read from it."""
        layout = KvLayout.gqa(self.shape.heads, self.shape.width, self.shape.values)
        if self.shape.latent is not None:
            layout = KvLayout.mla(self.shape.latent, self.shape.width - self.shape.latent)
        kept = KvCache([layout], len(self.cache) // self.block_size, self.block_size, dtype, "cpu")
        cache, scales = kept.layer(0), kept.scales(0)
        assert scales is not None
        write_cached(cache, scales, torch.arange(len(self.cache)), self.cache, self.shape.latent)
        wide = widen_cached(cache, scales, self.shape.latent)
        return replace(self, cache=cache, scales=scales), replace(self, cache=wide)

    def slots(self, seq: int) -> Tensor:
        """Returns the slot of every position of one sequence."""
        positions = torch.arange(len(self.queries[seq]))
        blocks = torch.tensor(self.tables[seq], dtype=torch.int64)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def reference(self, seq: int, first: int, end: int, of_magnitudes: bool = False) -> Tensor:
        """Returns the attention of a chunk; of_magnitudes: over values without their signs, which no sum makes small"""
        rows = self.cache[self.slots(seq)[:end]].double().transpose(0, 1)
        keys, values = (rows, rows) if self.shape.latent is not None else rows.split(self.shape.heads)
        values = values[..., : self.shape.value_width]
        values = values.abs() if of_magnitudes else values
        queries, scale = self.queries[seq][first:end], self.shape.scale
        return attention_reference(queries, keys, values, scale, first, self.window, self.sinks, self.chunk)


def sequences(
    case: tuple[AttendShape, int | None, bool, int | None],
    lengths: list[int],
    block_size: int,
    dtype: torch.dtype = torch.float32,
) -> Sequences:
    """Returns sequences of these lengths. Blocks that belong to none of them, and the ends of blocks, are NaN."""
    shape, window, has_sinks, chunk = case
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-length // block_size) for length in lengths]
    spare = 3
    blocks = torch.randperm(sum(num_blocks) + spare, generator=generator).tolist()
    tables = [[blocks.pop() for _ in range(number)] for number in num_blocks]
    cache = torch.full(((sum(num_blocks) + spare) * block_size, *shape.row_shape), float("nan"), dtype=dtype)
    queries = [torch.randn(n, shape.heads, shape.group, shape.width, generator=generator).to(dtype) for n in lengths]
    sinks = torch.linspace(-2, 3, shape.heads * shape.group) if has_sinks else None
    made = Sequences(shape, block_size, cache, tables, queries, window, sinks, chunk)
    for seq in range(len(lengths)):
        slots = made.slots(seq)
        cache[slots] = torch.randn(len(slots), *shape.row_shape, generator=generator).to(dtype)
    return made
