"""The tokens of one rank in one step, as the tensors that the decoder takes.

Rows are tokens, ordered by the length of their chunk: decodes (length 1) first, long prefill chunks last, then padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_serve.kernels.numerics import Numerics

if TYPE_CHECKING:
    from moe_serve.attention_dp.scheduler import ScheduledChunk


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass. All tensors int64 on the compute device; T_pad = num_tokens, padded as Numerics says.

    input_ids:    [T_pad], 0 in padding rows
    positions:    [T_pad], position of the token in its sequence; 0 in padding rows
    slot_mapping: [T_pad], cache slot = block * block_size + offset; -1 in padding rows
    block_tables: [num_seqs, max_blocks], blocks of each sequence in order; 0 beyond its end
    seq_lens:     [num_seqs], tokens in the cache after this step
    logit_rows:   [num_seqs], last row of each chunk: of those that sample, in the order of `chunks`, then of the others
    num_tokens:   real rows;  num_decodes: leading sequences with one row
    host_*:       sizes as Python ints, so that no code waits for the device to learn one
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    logit_rows: Tensor
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
        return cls.build((), block_size, device, numerics)

    @classmethod
    def build(
        cls, chunks: "Sequence[ScheduledChunk]", block_size: int, device: torch.device | str, numerics: Numerics
    ) -> "ForwardBatch":
        """Returns the batch that computes these chunks.

        Sequences are ordered by their number of new tokens. A chunk that does not sample has a logit row too: that row
        reads every key and value of the chunk, so its logits show whether they are finite.
        """
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].length)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[list[int]] = []
        last_rows = [0] * len(chunks)
        for index in order:
            request, start, length, _ = chunks[index]
            end = start + length
            ids += request.token_ids(start, end)
            positions += range(start, end)
            table = request.block_ids[: -(-end // block_size)]
            tables.append(table)
            slots += [table[i // block_size] * block_size + i % block_size for i in range(start, end)]
            last_rows[index] = len(ids) - 1
        num_tokens = len(ids)
        padding = numerics.padded(num_tokens) - num_tokens
        widest = max(map(len, tables), default=0)
        host_seq_lens = tuple([chunks[i].start + chunks[i].length for i in order])
        host_query_lens = tuple([chunks[i].length for i in order])
        # One transfer for all: the latency of a copy to an accelerator costs more than these bytes.
        flat = ids + [0] * padding + positions + [0] * padding + slots + [-1] * padding
        for table in tables:
            flat += table
            flat += [0] * (widest - len(table))
        flat += host_seq_lens
        for sampled in (True, False):
            flat += [row for row, chunk in zip(last_rows, chunks, strict=True) if chunk.samples == sampled]
        packed = torch.tensor(flat, dtype=torch.int64, device=device)
        num_seqs = len(order)
        sizes = [num_tokens + padding] * 3 + [num_seqs * widest, num_seqs, num_seqs]
        input_ids, position_ids, slot_mapping, blocks, seq_lens, logit_rows = packed.split_with_sizes(sizes)
        return cls(
            input_ids=input_ids,
            positions=position_ids,
            slot_mapping=slot_mapping,
            block_tables=blocks.view(num_seqs, widest),
            seq_lens=seq_lens,
            logit_rows=logit_rows,
            block_size=block_size,
            num_tokens=num_tokens,
            num_decodes=sum([length == 1 for length in host_query_lens]),
            host_seq_lens=host_seq_lens,
            host_query_lens=host_query_lens,
        )
