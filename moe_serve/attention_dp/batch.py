"""The tokens of one rank in one step, as the tensors that the decoder takes.

Rows are tokens, ordered by the length of their chunk: decodes (length 1) first, long prefill chunks last, then padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_serve.attention_dp.block_tables import BlockTables
from moe_serve.kernels.numerics import Numerics

if TYPE_CHECKING:
    from moe_serve.attention_dp.scheduler import ScheduledChunk


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass. Tensors on the compute device, int64 or as said; T_pad = num_tokens, padded as Numerics says.

    input_ids:    [T_pad], 0 in padding rows
    positions:    [T_pad], position of the token in its sequence; 0 in padding rows
    slot_mapping: [T_pad], cache slot = block * block_size + offset; -1 in padding rows
    seq_lens:     [num_seqs], tokens in the cache after this step
    logit_rows:   [num_seqs], last row of each chunk: of those that sample, in the order of `chunks`, then of the others
    query_starts: [num_seqs + 1] int32, first row of each sequence, then num_tokens
    block_tables: [num_seqs, widest] int32, blocks of each sequence in order; beyond its end any blocks of the cache
    num_tokens:   real rows;  num_decodes: leading sequences with one row
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
        """Returns the batch that computes these chunks, whose requests hold the blocks in `tables`.

        Sequences are ordered by their number of new tokens. A chunk that does not sample has a logit row too: that row
        reads every key and value of the chunk, so its logits show whether they are finite.
        """
        chunk_lens = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        order = np.argsort(chunk_lens, kind="stable")
        lens = chunk_lens[order]
        ordered = [chunks[i] for i in order.tolist()]
        starts = np.array([chunk.start for chunk in ordered], dtype=np.int64)
        table_rows = np.array([chunk.request.table_row for chunk in ordered], dtype=np.int64)
        num_tokens, block_size = int(lens.sum()), tables.block_size
        num_seqs, num_padded = len(ordered), numerics.padded(num_tokens)
        widest = -(-int((starts + lens).max(initial=0)) // block_size)

        # One array for all, because the latency of a transfer to an accelerator costs more than the bytes.
        int64_parts, end = _slices(num_padded, num_padded, num_padded, num_seqs, num_seqs)
        int32_parts, num_int32 = _slices(num_seqs + 1, num_seqs * widest)
        packed = np.empty(end + (num_int32 + 1) // 2, dtype=np.int64)
        input_ids, positions, slot_mapping, seq_lens, logit_rows = [packed[part] for part in int64_parts]
        query_starts, block_tables = [packed[end:].view(np.int32)[part] for part in int32_parts]
        seq_lens[:] = starts + lens
        query_starts[0] = input_ids[num_tokens:] = positions[num_tokens:] = 0
        slot_mapping[num_tokens:] = -1
        np.cumsum(lens, out=query_starts[1:])
        input_ids[:num_tokens] = _token_ids(ordered)
        position = np.arange(num_tokens) + np.repeat(starts - query_starts[:-1], lens)
        positions[:num_tokens] = position
        index, offset = np.divmod(position, block_size)
        blocks = tables.rows[np.repeat(table_rows, lens), index].astype(np.int64)
        slot_mapping[:num_tokens] = blocks * block_size + offset
        last_rows = np.empty_like(lens)
        last_rows[order] = query_starts[1:] - 1
        samples = np.array([chunk.samples for chunk in chunks], dtype=bool)
        logit_rows[:] = np.concatenate((last_rows[samples], last_rows[~samples]))
        torch.index_select(  # gathers rows of a slice in half of numpy's time
            torch.from_numpy(tables.rows[:, :widest]),
            0,
            torch.from_numpy(table_rows),
            out=torch.from_numpy(block_tables).view(num_seqs, widest),
        )

        moved = torch.from_numpy(packed).to(device)
        int64 = [moved[part] for part in int64_parts]
        int32 = [moved[end:].view(torch.int32)[part] for part in int32_parts]
        return cls(
            input_ids=int64[0],
            positions=int64[1],
            slot_mapping=int64[2],
            seq_lens=int64[3],
            logit_rows=int64[4],
            query_starts=int32[0],
            block_tables=int32[1].view(num_seqs, widest),
            block_size=block_size,
            num_tokens=num_tokens,
            num_decodes=int(np.count_nonzero(lens == 1)),
            host_seq_lens=tuple(seq_lens.tolist()),
            host_query_lens=tuple(lens.tolist()),
        )


def _token_ids(chunks: "Sequence[ScheduledChunk]") -> list[int]:
    token_ids: list[int] = []
    for request, start, length, _ in chunks:
        token_ids += request.token_ids(start, start + length)
    return token_ids


def _slices(*sizes: int) -> tuple[list[slice], int]:
    """Returns slices of these sizes, one after the other, and where the last one ends."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)], ends[-1]
