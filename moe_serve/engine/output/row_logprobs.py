"""Computes the log probabilities that requests ask for, from the logits of a step. logprobs.py defines them.

A row's numbers depend on its logits alone (kernels/sampling.py), so batch, rank, chunks and preemption do not change a
bit of them. Nothing is computed unless a request asks. Rows of prompts are projected to logits a tile at a time,
since a chunk of a long prompt has thousands of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.scheduler import ScheduledChunk
from moe_serve.engine.output.sampler import changes_logits
from moe_serve.engine.protocol.messages import LogprobBlock
from moe_serve.kernels.cpu.logprobs import row_logprobs
from moe_serve.kernels.sampling import RowLogprobs, WantedLogprobs, row_logprobs_reference

TILE_ELEMENTS = 2**23  # logits of prompt rows at a time: 32 MiB

ProjectRows = Callable[[range], Tensor]


def rows_at_once(vocab: int) -> int:
    """Returns how many rows of prompts are projected to logits at a time."""
    return max(1, TILE_ELEMENTS // vocab)


@dataclass(frozen=True)
class RawLogits:
    """Logits of the rows whose requests ask for log probabilities, as the model gave them. rows: which rows they are"""

    logits: Tensor
    rows: list[int]


class LogprobScorer:
    """Computes log probabilities of output and prompt tokens."""

    def __init__(self, compiled: bool):
        """compiled: by the compiled kernel, which needs logits on CPU; the numbers are the same"""
        self._score: Callable[[Tensor, WantedLogprobs], RowLogprobs] = (
            row_logprobs if compiled else row_logprobs_reference
        )

    def keep(self, logits: Tensor, requests: Sequence[Request]) -> RawLogits | None:
        """Returns the logits that are asked for, a copy where the sampler will change some; None where nobody asks.

        logits: [num_rows, vocab], row i belongs to requests[i]
        """
        rows = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
        if not rows:
            return None
        if len(rows) == len(requests) and not any(map(changes_logits, requests)):
            return RawLogits(logits, rows)
        # By numpy, which copies in this thread: torch's may wait for a core.
        return RawLogits(logits[rows] if logits.is_cuda else torch.from_numpy(logits.numpy()[rows]), rows)

    def of_tokens(
        self, raw: RawLogits | None, requests: Sequence[Request], token_ids: Sequence[int]
    ) -> dict[int, LogprobBlock]:
        """Returns the block of each row that asks and has a token, by row; each request's output is without it yet."""
        if raw is None:
            return {}
        asking = [requests[row] for row in raw.rows]
        tokens = [max(0, token_ids[row]) for row in raw.rows]  # negative: there is none, and the request fails
        counts = [request.params.logprobs or 0 for request in asking]
        wanted = _wanted(tokens, [request.params.logprob_token_ids for request in asking], counts)
        blocks = _blocks(self._score(raw.logits, wanted), wanted, [len(request.output_ids) for request in asking], 1)
        found = zip(raw.rows, blocks, strict=True)
        return {row: block for row, block in found if token_ids[row] >= 0 and block is not None}

    def of_prompts(
        self, batch: ForwardBatch, chunks: Sequence[ScheduledChunk], project: ProjectRows, vocab: int
    ) -> tuple[dict[int, LogprobBlock], set[int]]:
        """Returns the block of each chunk whose rows tell about prompt tokens, by its index among the chunks, and the
        chunks where the logits of such a row are not finite. The requests have these log probabilities then.

        project: of the step that ran this batch
        """
        found: dict[int, LogprobBlock] = {}
        not_finite: set[int] = set()
        at_once = rows_at_once(vocab)
        for index, position, rows in batch.prompt_rows:
            request = chunks[index].request
            tiles = [
                self._of_prompt(project(rows[done : done + at_once]), request, position + done)
                for done in range(0, len(rows), at_once)
            ]
            blocks = [tile for tile in tiles if tile is not None]
            if len(blocks) < len(tiles):
                not_finite.add(index)
                continue
            found[index] = joined(blocks)
            request.prompt_scored(position + len(rows))
        return found, not_finite

    def _of_prompt(self, logits: Tensor, request: Request, position: int) -> LogprobBlock | None:
        """Returns the block of rows that begin at this position of a prompt."""
        params, num_rows = request.params, logits.shape[0]
        tokens = request.prompt_ids[position + 1 : position + 1 + num_rows]
        ids = [params.logprob_token_ids] * num_rows
        wanted = _wanted(tokens, ids, [params.prompt_logprobs or 0] * num_rows)
        (block,) = _blocks(self._score(logits, wanted), wanted, [position - params.prompt_logprobs_start], num_rows)
        return block


def _wanted(tokens: Sequence[int], ids: Sequence[Sequence[int]], counts: Sequence[int]) -> WantedLogprobs:
    """Returns the numbers that each row asks for: of its token, other ids, and so many of the likeliest tokens."""
    flat = [token_id for token, others in zip(tokens, ids, strict=True) for token_id in (token, *others)]
    starts = np.cumsum([0, *(1 + len(others) for others in ids)], dtype=np.int64)
    return WantedLogprobs(starts, np.array(flat, np.int64), np.array(counts, np.int64))


def _blocks(rows: RowLogprobs, wanted: WantedLogprobs, starts: Sequence[int], length: int) -> list[LogprobBlock | None]:
    """Returns the numbers of each run of `length` rows as a block; None where a row is not finite."""
    top_starts = wanted.top_starts
    ranks, logprobs = rows.ranks.astype("<i4"), rows.logprobs.astype("<f4")
    top_ids, top = rows.top_ids.astype("<i4"), rows.top_logprobs.astype("<f4")
    blocks: list[LogprobBlock | None] = []
    for index, start in enumerate(starts):
        first, end = index * length, (index + 1) * length
        of_ids = slice(wanted.id_starts[first], wanted.id_starts[end])
        of_top = slice(top_starts[first], top_starts[end])
        is_sound = bool((rows.ranks[first:end] > 0).all())
        parts = ranks[first:end], logprobs[of_ids], top_ids[of_top], top[of_top]
        blocks.append(LogprobBlock(start, *(part.tobytes() for part in parts)) if is_sound else None)
    return blocks


def joined(blocks: Sequence[LogprobBlock]) -> LogprobBlock:
    """Returns blocks that follow each other as one."""
    fields = zip(*((block.ranks, block.logprobs, block.top_ids, block.top) for block in blocks), strict=True)
    return LogprobBlock(blocks[0].start, *map(b"".join, fields))
