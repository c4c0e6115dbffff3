"""Runs the layer for multi-token prediction behind a step's forward, and hands its drafts to the speculator.

When the tokens of a step are drawn, its rows run through that layer, each with the token that now follows it: so the
layer's keys and values are in the cache for the same tokens as those of all layers. What it gives at the last row of a
request that goes on is the draft for its next step. For further drafts the layer runs on its own rows. All ranks take
part in each run, with rows or without.

Where drafts must pay (speculation.mode auto), the layer rests while they do not. What it has then not cached, its later
predictions read as whatever lies there: they are poorer, and counted as that.

A draft may be wrong without harm: verification decides. So rows of requests that have just ended, and of drafts that
were rejected, run with any token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_serve.attention_dp.batch import BatchBuilder, ForwardBatch, first_rows
from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.scheduler import Proposal, ScheduledChunk, Scheduler
from moe_serve.attention_dp.speculation import Speculator
from moe_serve.engine.model.served_model import ServedModel
from moe_serve.engine.step.plan import StepPlan


@dataclass(frozen=True)
class TokenPredictor:
    """The layer for multi-token prediction of one rank.

    batches: builds those of runs behind the first, while the step's own batch is still used
    max_tokens_per_rank: as in StepSettings
    """

    served: ServedModel
    scheduler: Scheduler
    speculator: Speculator
    batches: BatchBuilder
    max_tokens_per_rank: int

    def num_runs(self, proposal: Proposal) -> int:
        """Returns how often the layer should run for this rank, if the proposal runs."""
        if proposal.is_empty or not (proposal.prefills or self.speculator.gate.layer_runs):
            return 0
        has_prompt = any(map(_begins, proposal.prefills))
        going_on = (chunk.request for chunk in (*proposal.decodes, *proposal.prefills) if not _begins(chunk))
        num_wanted = self.speculator.num_predictions(has_prompt, going_on)
        samples = bool(proposal.decodes) or any(chunk.samples for chunk in proposal.prefills)
        return num_wanted if samples else min(1, num_wanted)

    def run(self, chunks: Sequence[ScheduledChunk], batch: ForwardBatch, plan: StepPlan) -> None:
        """Runs the layer as often as the plan says, at least once.

        chunks, batch: of the step, whose tokens are drawn and recorded; the batch's ids become those behind them
        Raises PeerError as a forward does.
        """
        served, starts = self.served, first_rows(chunks)
        input_ids, going = [0] * batch.num_padded, list[tuple[Request, int]]()
        for chunk, row in zip(chunks, starts, strict=True):
            behind = chunk.request.token_ids(chunk.start + 1, chunk.start + 1 + chunk.length)
            input_ids[row : row + len(behind)] = behind
            if chunk.samples and self.scheduler.is_running(chunk.request):
                going.append((chunk.request, row + chunk.request.num_computed - 1 - chunk.start))
        rows = torch.tensor([row for _, row in going], dtype=torch.int64, device=batch.device)
        batch.input_ids.copy_(torch.tensor(input_ids, dtype=torch.int64))
        batch = batch._replace(logit_rows=rows, prompt_rows=())
        rounds = -(-plan.max_tokens // self.max_tokens_per_rank)
        served.begin_step(plan.max_tokens, plan.split_evenly)
        logits = served.predict(batch, rounds)
        drafts = [[token] for token in logits.argmax(1).tolist()]
        asking = list(range(len(going)))  # of `going`, whose rows were the last ones
        for number in range(1, plan.num_predictions):
            kept = [row for row, index in enumerate(asking) if self._has_row(going[index][0], number)]
            asking = [asking[row] for row in kept]
            requests = [going[index][0] for index in asking]
            positions = [request.num_computed - 1 + number for request in requests]
            hidden = served.decoder.predicted_rows(batch.logit_rows)[kept]
            batch = self.batches.build_rows(requests, positions, [drafts[index][-1] for index in asking])
            logits = served.predict(batch, rounds, hidden)
            for index, token in zip(asking, logits.argmax(1).tolist(), strict=True):
                drafts[index].append(token)
        served.end_prediction()
        for (request, _), tokens in zip(going, drafts, strict=True):
            self.speculator.predict(request, tokens)

    def _has_row(self, request: Request, number: int) -> bool:
        """Returns whether a request's draft of this number has a row: drafts end with blocks, and with the context."""
        position, blocks = request.num_computed - 1 + number, self.scheduler.blocks
        return position < min(len(request.block_ids) * blocks.block_size, self.scheduler.max_model_len)


def _begins(chunk: ScheduledChunk) -> bool:
    """Returns whether a chunk is the first of its request, but for what was cached."""
    return chunk.start <= chunk.request.num_cached_prompt
