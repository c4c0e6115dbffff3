"""Attention to a window and entries of groups in the compiled kernels: that of the plain form, whatever the batch."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.compressed_attention import (
    CompressedRows,
    CompressedWeights,
    EntryWeights,
    PagedRows,
    compressed_attention_reference,
)
from moe_serve.kernels.cpu.attention import AttendRows
from moe_serve.kernels.cpu.operations import recorded_once
from moe_serve.kernels.forms import AttendShape, CompressedShape
from tests.tolerance import FLOAT32, relative_error

COMMON = {"scale": 0.2, "eps": 1e-6}
# heads, width, rotated, window, tokens of a group, overlaps; the indexer
SHAPES = {
    "window": CompressedShape(3, 20, 8, 7, 0, False, 0, 0, 0, **COMMON),
    "groups": CompressedShape(3, 37, 6, 5, 9, False, 0, 0, 0, **COMMON),
    "indexed": CompressedShape(4, 24, 8, 10, 3, True, 5, 18, 4, **COMMON),
    "indexed groups of one": CompressedShape(1, 6, 2, 1, 1, True, 3, 70, 2, **COMMON),
}
BLOCK, LENGTH = 8, 60  # no group of several ends with a block
SEQUENCES = 3


class Scene:
    """Three sequences of 60 tokens, whose rows are all drawn, and an empty cache."""

    def __init__(self, shape: CompressedShape):
        draw = torch.Generator().manual_seed(5)

        def some(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw)

        index, size = shape.index_width, (SEQUENCES, LENGTH)
        self.shape = shape
        self.rows = {"q": some(*size, shape.heads, shape.width), "rows": some(*size, shape.row_width)}
        if shape.index_heads:
            self.rows |= {"index_q": some(*size, shape.index_heads, index), "weights": some(*size, shape.index_heads)}
        entries = EntryWeights(some(shape.width), some(shape.every, shape.parts * shape.width)) if shape.every else None
        indexed = EntryWeights(some(index), some(shape.every, 2 * index)) if index else None
        angles = torch.arange(LENGTH)[:, None] * torch.tensor([0.7**i for i in range(shape.rotated // 2)])
        turns = torch.complex(angles.cos(), angles.sin())
        self.weights = CompressedWeights(shape, some(shape.width), some(shape.heads), entries, indexed, turns)
        num_blocks = -(-LENGTH // BLOCK)
        self.tables = torch.randperm(SEQUENCES * num_blocks, generator=draw).view(SEQUENCES, num_blocks).int()
        self.cache = torch.full((SEQUENCES * num_blocks * BLOCK, 1, shape.row_width), torch.nan)

    def run(self, chunks: list[tuple[int, int, int]], plain: bool = False) -> list[Tensor]:
        """Returns what the rows of chunks (sequence, first position, end) attend."""
        parts = [torch.cat([self.rows[name][seq, a:b] for seq, a, b in chunks]) for name in self.rows]
        wide = torch.cat((parts[1], torch.zeros(len(parts[1]), 3)), 1)  # as in a fused projection
        rows = CompressedRows(parts[0], wide[:, : self.shape.row_width], *(parts[2:] or (None, None)))
        positions = torch.cat([torch.arange(a, b) for _, a, b in chunks])
        lengths = [b - a for _, a, b in chunks]
        tables = self.tables[[seq for seq, _, _ in chunks]]
        slots = torch.cat(
            [table[torch.arange(a, b) // BLOCK].long() * BLOCK + torch.arange(a, b) % BLOCK
             for table, (_, a, b) in zip(tables, chunks, strict=True)]
        )  # fmt: skip
        if plain:
            paged = PagedRows(positions, slots, lengths, tables, BLOCK)
            out = compressed_attention_reference(rows, self.weights, self.cache, paged)
        else:
            starts = torch.tensor([0, *lengths]).cumsum(0).int()
            step = AttendRows([AttendShape(1, 1, 1, 1.0)], positions, starts, tables, BLOCK)
            out = recorded_once(
                len(slots), lambda do: do.attend_compressed(rows, self.weights, self.cache, slots), step.address
            )
        return list(out.split(lengths))


WHOLE = [(seq, 0, LENGTH) for seq in range(SEQUENCES)]


@pytest.mark.parametrize("name", SHAPES)
def test_attends_what_the_plain_form_attends_and_leaves_the_same_cache(name, library):
    scenes = [Scene(SHAPES[name]) for _ in "12"]
    found, wanted = scenes[0].run(WHOLE), scenes[1].run(WHOLE, plain=True)
    assert all(relative_error(one, other) < FLOAT32 for one, other in zip(found, wanted, strict=True))
    one, other = (scene.cache.nan_to_num() for scene in scenes)
    assert relative_error(one, other) < FLOAT32


@pytest.mark.parametrize("name", SHAPES)
def test_a_rows_bits_do_not_depend_on_chunks_neighbours_or_threads(name, library, avx2, use):
    whole = Scene(SHAPES[name])
    wanted = whole.run(WHOLE)
    cuts = (0, 1, 2, 5, 8, 9, 17, 27, 28, 54, LENGTH)
    for threads in (1, 2):
        library.set_threads(threads)
        other = Scene(SHAPES[name])
        found = [[] for _ in WHOLE]
        for number, (start, end) in enumerate(itertools.pairwise(cuts)):
            chunks = [(seq, start, end) for seq in range(SEQUENCES)]
            chunks = chunks[number % 3 :] + chunks[: number % 3]
            for (seq, _, _), rows in zip(chunks, other.run(chunks), strict=True):
                found[seq].append(rows)
        assert all(torch.equal(torch.cat(rows), each) for rows, each in zip(found, wanted, strict=True))
        assert torch.equal(other.cache.nan_to_num(), whole.cache.nan_to_num())
    use(avx2)
    narrow = Scene(SHAPES[name])
    assert all(map(torch.equal, narrow.run(WHOLE), wanted))


def test_tokens_that_are_computed_again_leave_the_entries_of_their_groups(library):
    scene = Scene(SHAPES["indexed"])
    scene.run(WHOLE)
    before = scene.cache.clone()
    again = scene.run([(1, 29, 31)])[0]  # the last of a group, and the first of the next
    assert torch.equal(scene.cache.nan_to_num(), before.nan_to_num())
    assert torch.equal(again, Scene(SHAPES["indexed"]).run(WHOLE)[1][29:31])


def test_a_draft_that_was_wrong_leaves_nothing_behind(library):
    scene, right = Scene(SHAPES["indexed"]), Scene(SHAPES["indexed"])
    scene.run([(0, 0, 29)])
    rows = {name: part.clone() for name, part in scene.rows.items()}
    for name, part in scene.rows.items():
        scene.rows[name] = part.clone()
        scene.rows[name][0, 29:32] += 1
    scene.run([(0, 29, 32)])  # ends a group, and begins another
    scene.rows = rows
    assert torch.equal(scene.run([(0, 29, 40)])[0], right.run([(0, 0, 40)])[0][29:])


def test_larger_groups_than_the_kernels_take_are_refused(library):
    shape = replace(SHAPES["groups"], every=513)
    scene = Scene(shape)
    with pytest.raises(AssertionError, match="groups of 513 tokens, at most 512"):
        scene.run([(0, 0, 3)])
