"""What the logits of a step make of its requests: tokens, log probabilities, failures, and the events that tell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.scheduler import ScheduledChunk, Scheduler
from moe_serve.engine.output.row_logprobs import LogprobScorer, ProjectRows
from moe_serve.engine.output.sampler import has_finite_best
from moe_serve.engine.protocol.messages import TokenEvent
from moe_serve.engine.requests import OpenRequests
from moe_serve.kernels.part_clock import OTHER, SAMPLE, PartClock
from moe_serve.kernels.sampling import NONE_LEFT

Sample = Callable[[Tensor, list[Request]], list[int]]


@dataclass(frozen=True)
class StepEvents:
    """Ends the chunks of a step. project: the logits of more rows of the step that ran last;  clock: of its parts"""

    scheduler: Scheduler
    requests: OpenRequests
    scorer: LogprobScorer
    project: ProjectRows
    clock: PartClock

    def of(
        self, chunks: Sequence[ScheduledChunk], batch: ForwardBatch, logits: Tensor, sample: Sample
    ) -> list[TokenEvent]:
        """Returns the events of a step, whose chunks have run.

        logits: [num_chunks, vocab], of the chunks that sample, then of the others
        """
        sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
        others = [index for index, chunk in enumerate(chunks) if not chunk.samples]
        asking = [chunks[index].request for index in sampling]
        self.clock.turn(SAMPLE)
        of_prompts, not_finite = self.scorer.of_prompts(batch, chunks, self.project, logits.shape[1])
        rows = logits[: len(sampling)] if others else logits
        raw = self.scorer.keep(rows, asking)
        token_ids = sample(rows, asking)
        of_tokens = self.scorer.of_tokens(raw, asking, token_ids)
        self.clock.turn(OTHER)
        events: list[TokenEvent] = []
        for row, (index, token_id) in enumerate(zip(sampling, token_ids, strict=True)):
            chunk = chunks[index]
            if token_id < 0 or index in not_finite:
                events.append(self.requests.fail(chunk.request, none_left=token_id == NONE_LEFT))
                continue
            self.scheduler.complete(chunk, token_id)
            events.append(self.requests.extended(chunk.request, token_id, of_tokens.get(row), of_prompts.get(index)))
        if others:
            for index, is_finite in zip(others, has_finite_best(logits[len(sampling) :]), strict=True):
                chunk = chunks[index]
                if not is_finite or index in not_finite:
                    events.append(self.requests.fail(chunk.request))
                    continue
                self.scheduler.complete(chunk)
                if index in of_prompts:
                    events.append(self.requests.scored(chunk.request, of_prompts[index]))
        return events
