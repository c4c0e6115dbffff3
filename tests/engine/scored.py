"""Log probabilities that engines have sent, collected as a front end does."""

from collections.abc import Iterable

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.output.logprobs import TokenLogprobs
from moe_serve.engine.protocol.messages import LogprobBlock

Numbers = list[tuple[float, int, list[tuple[int, float]], list[float]]]


def collected(params: SamplingParams, num_top: int | None, blocks: Iterable[LogprobBlock], first: int = 0) -> Numbers:
    """Returns (log probability, rank, likeliest tokens, those of the ids asked for) of each entry.

    first: entries that were there before
    """
    assert num_top is not None, "not asked for"
    entries = TokenLogprobs(num_top, params.logprob_token_ids)
    for block in blocks:
        assert block.start == first + len(entries), "they arrive once and in order"
        entries.add(LogprobBlock(block.start - first, block.ranks, block.logprobs, block.top_ids, block.top))
    return [
        (
            entries.logprob(i),
            entries.rank(i),
            [(each.token_id, each.logprob) for each in entries.top(i)],
            [each.logprob for each in entries.of_ids(i)],
        )
        for i in range(len(entries))
    ]
