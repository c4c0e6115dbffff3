"""The tokens of one rank in one step, as the tensors that the decoder takes.

Rows are tokens, ordered by the length of their chunk: decodes (length 1) first, long prefill chunks last, then padding.
Decode steps follow each other with batches of a few sizes, so `BatchBuilder` keeps the memory of the last ones, and
what in it is the same for all of a size.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from moe_serve.attention_dp.block_tables import BlockTables
from moe_serve.kernels.numerics import Numerics

if TYPE_CHECKING:
    from moe_serve.attention_dp.request import Request
    from moe_serve.attention_dp.scheduler import ScheduledChunk


class PromptRows(NamedTuple):
    """Rows of a chunk that tell log probabilities of prompt tokens.

    chunk:    its index among the chunks of the batch;  rows: of the batch
    position: of the first of these rows in its sequence; it tells about the token behind it
    """

    chunk: int
    position: int
    rows: range


class ForwardBatch(NamedTuple):
    """One forward pass. Tensors on the compute device, int64 or as said; T_pad = num_tokens, padded as Numerics says.

    input_ids:    [T_pad], 0 in padding rows
    positions:    [T_pad], position of the token in its sequence; 0 in padding rows
    slot_mapping: [T_pad], cache slot = block * block_size + offset; -1 in padding rows
    seq_lens:     [num_seqs], tokens in the cache after this step
    logit_rows:   [num_seqs + number of drafts], the row of the last known token of each chunk: of those that sample, in
                  the order of `chunks`, then of the others; then the rows of drafts
    query_starts: [num_seqs + 1] int32, first row of each sequence, then num_tokens
    block_tables: [num_seqs, width] int32, blocks of each sequence in order; beyond its end any blocks of the cache
    num_tokens:   real rows;  num_decodes: leading sequences with one row
    num_seqs:     of the tensors; a padded step of decodes has sequences behind its own, of which the host has no sizes
    prompt_rows:  the rows whose logits are wanted, too, but too many to be computed at once
    state_slots:  [num_seqs, 4 or more], as SequenceStates takes them; None: the model keeps no state of a request
    host_*:       sizes as Python ints, so that no code waits for the device to learn one
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    logit_rows: Tensor
    query_starts: Tensor
    block_tables: Tensor
    block_size: int
    num_tokens: int
    num_decodes: int
    host_seq_lens: tuple[int, ...]
    host_query_lens: tuple[int, ...]
    prompt_rows: tuple[PromptRows, ...] = ()
    state_slots: Tensor | None = None

    @property
    def num_padded(self) -> int:
        """Returns T_pad."""
        return self.input_ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @classmethod
    def empty(cls, device: torch.device | str, numerics: Numerics, block_size: int = 1) -> "ForwardBatch":
        """Returns the batch of a rank that has nothing to run. It still goes through every layer."""
        return cls.build((), BlockTables(block_size), device, numerics)

    @classmethod
    def build(
        cls, chunks: "Sequence[ScheduledChunk]", tables: BlockTables, device: torch.device | str, numerics: Numerics
    ) -> "ForwardBatch":
        """Returns the batch of these chunks, as BatchBuilder does, in memory of its own."""
        return BatchBuilder(tables, device, numerics).build(chunks)

    def halves(self, numerics: Numerics) -> tuple["ForwardBatch", "ForwardBatch"]:
        """Returns the first half of the rows, and the others, as batches without logit rows.

        A sequence may have rows in both; then the second half needs keys that the first one caches.
        """
        middle = (self.num_tokens + 1) // 2
        return self._part(0, middle, numerics), self._part(middle, self.num_tokens, numerics)

    def _part(self, first: int, end: int, numerics: Numerics) -> "ForwardBatch":
        """Returns the rows from first up to end, as a batch without logit rows."""
        ends = list(accumulate(self.host_query_lens))
        seqs = range(bisect_right(ends, first), bisect_left(ends, end) + 1) if end > first else range(0)
        missing = [max(ends[seq] - end, 0) for seq in seqs]  # of each sequence, rows behind this part
        starts = [max(ends[seq] - self.host_query_lens[seq], first) for seq in seqs]
        of_seqs, num_padding = slice(seqs.start, seqs.stop), numerics.padded(end - first) - (end - first)
        rows = (
            functional.pad(tensor[first:end], (0, num_padding), value=value)
            for tensor, value in ((self.input_ids, 0), (self.positions, 0), (self.slot_mapping, -1))
        )
        input_ids, positions, slot_mapping = rows
        seq_lens = self.seq_lens[of_seqs]
        if missing and missing[-1]:
            seq_lens = torch.cat((seq_lens[:-1], seq_lens[-1:] - missing[-1]))
        skipped = [start - (ends[seq] - self.host_query_lens[seq]) for seq, start in zip(seqs, starts, strict=True)]
        return ForwardBatch(
            input_ids,
            positions,
            slot_mapping,
            seq_lens,
            logit_rows=self.logit_rows[:0],
            query_starts=(self.query_starts[seqs.start : seqs.stop + 1] - first).clamp(0, end - first),
            block_tables=self.block_tables[of_seqs],
            block_size=self.block_size,
            num_tokens=end - first,
            num_decodes=max(min(seqs.stop, self.num_decodes) - seqs.start, 0),
            host_seq_lens=tuple(self.host_seq_lens[seq] - behind for seq, behind in zip(seqs, missing, strict=True)),
            host_query_lens=tuple(
                ends[seq] - behind - start for seq, behind, start in zip(seqs, missing, starts, strict=True)
            ),
            state_slots=None if self.state_slots is None else _behind(self.state_slots[of_seqs], skipped),
        )


KEPT_SIZES = 32  # of small steps: with drafts they take turns with others, and four requests have 33 sizes
_MOST_KEPT_ROWS, _MOST_KEPT_BLOCKS = 64, 1 << 16  # of a small step; of its tables, which take 8 MiB in all at most


def is_small(num_padded: int, num_seqs: int, table_width: int) -> bool:
    """Returns whether the memory of steps of a size is kept beside that of others. Arguments: shapes of ForwardBatch"""
    return num_padded <= _MOST_KEPT_ROWS and num_seqs * table_width <= _MOST_KEPT_BLOCKS


class BatchBuilder:
    """Builds the batches of a rank, one after the other.

    With pads_decodes, steps of decodes alone are padded to the number of rows of `bucket_of`, and lie in tensors of
    their own for each, so that a graph captured for one serves all steps up to it.
    """

    def __init__(self, tables: BlockTables, device: torch.device | str, numerics: Numerics, pads_decodes: bool = False):
        self._pads_decodes = pads_decodes
        self._kept: dict[_Sizes, _Memory] = {}  # the one that was used last at the end
        self._tables = tables
        self._device = torch.device(device)
        self._on_host = self._device.type == "cpu"
        self._numerics = numerics
        self._memory = _Memory(_Sizes(0, 0, 0, 0, decodes_only=False))

    def build(self, chunks: "Sequence[ScheduledChunk]") -> ForwardBatch:
        """Returns the batch that computes these chunks, whose requests hold the blocks in the tables.

        On CPU it is valid until the next one is built. Sequences are ordered by their number of new tokens. A chunk
        that does not sample has a logit row too: that row reads every key and value of the chunk, so its logits show
        whether they are finite.
        """
        has_states = bool(chunks) and chunks[0].request.state_slot >= 0
        if all(chunk.length == 1 and chunk.samples for chunk in chunks):
            return self._build_decodes(chunks, has_states)
        lens, num_drafts = [chunk.length for chunk in chunks], sum(len(chunk.drafts) for chunk in chunks)
        most_copies = max(1, *(len(chunk.drafts) for chunk in chunks)) if has_states else 0
        order = sorted(range(len(lens)), key=lens.__getitem__)
        ordered = [chunks[i] for i in order]
        lens.sort()
        ends = list(accumulate(lens))
        num_tokens, num_decodes = sum(lens), bisect_right(lens, 1)
        host = self._memory_for(num_tokens, len(lens), num_drafts, most_copies=most_copies).host
        host.input_ids[:num_tokens] = _token_ids(ordered)
        self._place_rows(ordered, num_decodes)
        host.input_ids[num_tokens:] = host.positions[num_tokens:] = 0
        host.slot_mapping[num_tokens:] = -1
        seq_lens = [chunk.start + chunk.length for chunk in ordered]
        host.seq_lens[:] = seq_lens
        host.query_starts[1:] = ends
        host.logit_rows[:] = _logit_rows(chunks, order, ends)
        self._copy_tables([chunk.request for chunk in ordered])
        batch = self._in_memory(num_tokens, num_decodes, seq_lens, lens)
        if has_states:
            batch = batch._replace(state_slots=self._place_states(ordered))
        wanted = _prompt_rows(chunks, order, ends)
        return batch._replace(prompt_rows=wanted) if wanted else batch

    def _build_decodes(self, chunks: "Sequence[ScheduledChunk]", has_states: bool) -> ForwardBatch:
        """Returns the batch of chunks of one token each, which all sample, as in most steps."""
        requests, starts = [chunk.request for chunk in chunks], [chunk.start for chunk in chunks]
        token_ids = [
            request.output_ids[start - len(request.prompt_ids)]
            if start >= len(request.prompt_ids)
            else request.prompt_ids[start]
            for request, start in zip(requests, starts, strict=True)
        ]
        batch = self.build_rows(requests, starts, token_ids, has_states)
        return batch._replace(state_slots=self._place_states(chunks)) if has_states else batch

    def build_rows(
        self,
        requests: "Sequence[Request]",
        positions_of: Sequence[int],
        token_ids: Sequence[int],
        has_states: bool = False,
    ) -> ForwardBatch:
        """Returns the batch of one row of each request, at a position in a block that it holds, with this token."""
        num_rows, block_size = len(requests), self._tables.block_size
        bucket = bucket_of(num_rows) if self._pads_decodes else num_rows
        memory = self._memory_for(bucket, bucket, decodes_only=True, most_copies=int(has_states))
        host = memory.host
        if num_rows < bucket:  # padding sequences have one token, in a block that somebody owns
            host.input_ids[num_rows:] = host.positions[num_rows:] = 0
            host.slot_mapping[num_rows:] = -1
            host.block_tables[num_rows:] = 0
            host.seq_lens[num_rows:] = 1
        self._copy_tables(requests)
        host.input_ids[:num_rows] = token_ids
        positions = host.positions[:num_rows]
        positions[:] = positions_of
        block_index, offset = np.divmod(positions, block_size)
        host.slot_mapping[:num_rows] = (
            host.block_tables[memory.seqs[:num_rows], block_index] * np.int64(block_size) + offset
        )
        np.add(positions, 1, host.seq_lens[:num_rows])
        batch = self._in_memory(num_rows, num_rows, host.seq_lens[:num_rows].tolist(), [1] * num_rows)
        return batch if num_rows == bucket else batch._replace(logit_rows=batch.logit_rows[:num_rows])

    def _memory_for(
        self, num_tokens: int, num_seqs: int, num_drafts: int = 0, decodes_only: bool = False, most_copies: int = 0
    ) -> "_Memory":
        num_padded, width = self._numerics.padded(num_tokens), self._tables.rows.shape[1]
        sizes = _Sizes(num_padded, num_seqs, num_seqs + num_drafts, width, decodes_only, most_copies)
        if self._memory.sizes == sizes:
            return self._memory
        if self._memory.sizes.table_width != width:
            self._kept.clear()
        memory = self._kept.pop(sizes, None)
        is_new = memory is None
        if memory is None:
            memory = _Memory(sizes, pinned=self._device.type == "cuda")
        if (self._pads_decodes and decodes_only) or is_small(num_padded, num_seqs, width):
            self._kept[sizes] = memory
        if is_new:
            others = [each for each in self._kept if not (self._pads_decodes and each.decodes_only)]
            if len(others) > KEPT_SIZES:
                del self._kept[others[0]]
        self._memory = memory
        return memory

    def _copy_tables(self, requests: "Sequence[Request]") -> None:
        """Writes the block tables of these requests, as far as they are not the ones that the memory holds.

        A row of a long context has thousands of blocks, and a step of decodes changes few rows.
        """
        tables, memory = self._tables, self._memory
        rows = np.array([request.table_row for request in requests], np.int64)
        (changed,) = (
            (rows != memory.table_rows[: len(rows)]) | (tables.changed_at[rows] > memory.num_changes)
        ).nonzero()
        if 2 * len(changed) > len(rows):
            tables.rows.take(rows, 0, memory.host.block_tables[: len(rows)], "clip")
        else:
            for seq in changed.tolist():
                num_blocks = len(requests[seq].block_ids)
                memory.host.block_tables[seq, :num_blocks] = tables.rows[rows[seq], :num_blocks]
        memory.table_rows[: len(rows)], memory.table_rows[len(rows) :] = rows, -1
        memory.num_changes = tables.num_changes

    def _in_memory(self, num_tokens: int, num_decodes: int, seq_lens: list[int], query_lens: list[int]) -> ForwardBatch:
        """Returns the batch of these tensors."""
        memory = self._memory
        tensors = memory.tensors if self._on_host else memory.tensors_on(self._device)
        sizes = num_tokens, num_decodes, tuple(seq_lens), tuple(query_lens)
        return ForwardBatch(*tensors, self._tables.block_size, *sizes)

    def _place_states(self, chunks: "Sequence[ScheduledChunk]") -> Tensor:
        """Writes where the sequences of these chunks, in order, find their states."""
        slots = self._memory.state_slots
        assert slots is not None, "memory for a model without states"
        width = slots.shape[1]
        rows = [chunk.request.state_row(chunk.start, chunk.length) for chunk in chunks]
        slots.numpy()[:] = [(*row, *[0] * (width - len(row))) for row in rows]
        return slots

    def _place_rows(self, chunks: "Sequence[ScheduledChunk]", num_decodes: int) -> None:
        """Writes positions and cache slots of the rows of these chunks, of which the first ones have one row each."""
        block_size, host = self._tables.block_size, self._memory.host
        decodes = chunks[:num_decodes]
        host.positions[:num_decodes] = [chunk.start for chunk in decodes]
        host.slot_mapping[:num_decodes] = [
            request.block_ids[start // block_size] * block_size + start % block_size for request, start, *_ in decodes
        ]
        row = num_decodes
        for request, start, length, *_ in chunks[num_decodes:]:
            rows = slice(row, row + length)
            row += length
            host.positions[rows] = position = np.arange(start, start + length)
            blocks = self._tables.rows[request.table_row, position // block_size].astype(np.int64)
            host.slot_mapping[rows] = blocks * block_size + position % block_size


def first_rows(chunks: "Sequence[ScheduledChunk]") -> list[int]:
    """Returns the first row of each chunk in the batch that BatchBuilder.build makes of them."""
    starts, row = [0] * len(chunks), 0
    for index in sorted(range(len(chunks)), key=lambda index: chunks[index].length):
        starts[index] = row
        row += chunks[index].length
    return starts


def bucket_of(num_rows: int) -> int:
    """Returns the rows to which a step of so many decodes is padded: few sizes, of at most 15 rows more."""
    return 1 << (num_rows - 1).bit_length() if 0 < num_rows <= 16 else -(-num_rows // 16) * 16


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # in the order of ForwardBatch


class _Sizes(NamedTuple):
    """decodes_only: each sequence has one row, which samples
    most_copies: of the state of a sequence, that rows of a step may keep; 0: the model keeps no states
    """

    num_padded: int
    num_seqs: int
    num_logits: int
    table_width: int
    decodes_only: bool
    most_copies: int = 0


class _Arrays(NamedTuple):
    """The arrays from which a batch's tensors are made; shapes as there."""

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    block_tables: NDArray[np.int32]


class _Memory:
    """The arrays of a batch in one block: the latency of a transfer to an accelerator costs more than the bytes.

    host, tensors: where a batch is written, as arrays and as tensors in the order of ForwardBatch
    seqs:          0, 1, ... for each sequence
    table_rows:    which rows of the tables it holds, [num_seqs] int64, -1 = none
    num_changes:   how many changes of the tables it has seen
    """

    def __init__(self, sizes: _Sizes, pinned: bool = False):
        """pinned: for copies to a GPU that the host does not wait for"""
        self.sizes = sizes
        self._on_device: tuple[Tensor, _Tensors] | None = None
        num_padded, num_seqs, num_logits, width, decodes_only, most_copies = sizes
        self.state_slots = torch.zeros(num_seqs, 3 + most_copies, dtype=torch.int64) if most_copies else None
        self._int64_parts, self._end = _slices(num_padded, num_padded, num_padded, num_seqs, num_logits)
        self._int32_parts, num_int32 = _slices(num_seqs + 1, num_seqs * width)
        self._block = torch.zeros(self._end + (num_int32 + 1) // 2, dtype=torch.int64, pin_memory=pinned)
        self.tensors = self._parts(self._block)
        self.host = _Arrays(*[part.numpy() for part in self.tensors])
        self.seqs = np.arange(num_seqs)
        self.table_rows: NDArray[np.int64] = np.full(num_seqs, -1, np.int64)
        self.num_changes = 0
        if decodes_only:
            self.host.slot_mapping[num_seqs:] = -1
            self.host.logit_rows[:] = self.seqs
            self.host.query_starts[:] = np.arange(num_seqs + 1)

    def tensors_on(self, device: torch.device) -> _Tensors:
        """Returns the arrays as tensors on a device, whose addresses stay: one copy brings all of them there.

        The host may write the arrays again once the tokens of this step are known.
        """
        if self._on_device is None:
            block = torch.empty_like(self._block, device=device)
            self._on_device = block, self._parts(block)
        block, tensors = self._on_device
        block.copy_(self._block, non_blocking=True)
        return tensors

    def _parts(self, block: Tensor) -> _Tensors:
        input_ids, positions, slot_mapping, seq_lens, logit_rows = [block[part] for part in self._int64_parts]
        query_starts, flat_tables = [block[self._end :].view(torch.int32)[part] for part in self._int32_parts]
        block_tables = flat_tables.view(self.sizes.num_seqs, self.sizes.table_width)
        return input_ids, positions, slot_mapping, seq_lens, logit_rows, query_starts, block_tables


def _behind(slots: Tensor, skipped: Sequence[int]) -> Tensor:
    """Returns slots of states for the same sequences without their first rows, which have run before.

    skipped: how many rows of each. A copy that they have kept is not kept again.
    """
    slots = slots.clone()
    for row, number in zip(slots, skipped, strict=True):
        if number:
            after = int(row[2])
            row[0] = row[1]
            if after > 0:
                row[2] = max(after - number, 0)
                continue
            num_left = max(-after - number, 0)  # of copies after each row
            row[2] = -num_left
            row[3 : 3 + num_left] = row[3 + number : 3 + number + num_left].clone()
    return slots


def _token_ids(chunks: "Sequence[ScheduledChunk]") -> list[int]:
    token_ids: list[int] = []
    for request, start, length, _, drafts in chunks:
        token_ids += request.token_ids(start, start + length)
        token_ids += drafts
    return token_ids


def _logit_rows(chunks: "Sequence[ScheduledChunk]", order: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Returns the row of the last known token of each chunk: of those that sample, then of the others; then the rows
    of drafts.

    order: of which chunk each sequence is;  ends: first row behind each sequence
    """
    last_rows = [0] * len(order)
    for index, end in zip(order, ends, strict=True):
        last_rows[index] = end - 1 - len(chunks[index].drafts)
    by_chunk = list(zip(last_rows, chunks, strict=True))
    sampled = [row for row, chunk in by_chunk if chunk.samples]
    others = [row for row, chunk in by_chunk if not chunk.samples]
    return sampled + others + [row + 1 + i for row, chunk in by_chunk for i in range(len(chunk.drafts))]


def _prompt_rows(
    chunks: "Sequence[ScheduledChunk]", order: Sequence[int], ends: Sequence[int]
) -> tuple[PromptRows, ...]:
    """Returns the rows of each chunk that tell log probabilities of prompt tokens. Arguments as of _logit_rows"""
    found = []
    for index, end in zip(order, ends, strict=True):
        request, start, length, *_ = chunks[index]
        if positions := request.prompt_rows(start, start + length):
            first = end - length + positions.start - start
            found.append(PromptRows(index, positions.start, range(first, first + len(positions))))
    return tuple(found)


def _slices(*sizes: int) -> tuple[list[slice], int]:
    """Returns slices of these sizes, one after the other, and where the last one ends."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)], ends[-1]
