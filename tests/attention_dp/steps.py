"""A scheduler played by hand: requests, steps in which a 'model' answers, and chunks as plain tuples."""

from collections.abc import Iterable, Sequence

from moe_serve.attention_dp.block_tables import BlockTables
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Proposal, ScheduledChunk, Scheduler


def make_scheduler(
    num_blocks: int = 16,
    max_running: int = 4,
    max_batch_tokens: int = 16,
    max_model_len: int = 64,
    prefix_cache: bool = True,
) -> Scheduler:
    """Returns a scheduler over blocks of 4 tokens."""
    return Scheduler(RequestBlocks(num_blocks, 4, prefix_cache), max_running, max_batch_tokens, max_model_len)


def make_request(
    request_id: str,
    num_prompt: int = 5,
    max_new_tokens: int = 4,
    output_ids: Sequence[int] = (),
    first: int = 0,
    salt: str = "",
) -> Request:
    """Returns a request whose prompt is first, first + 1, .."""
    prompt = list(range(first, first + num_prompt))
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Request(request_id, 0, prompt, list(output_ids), params, seed=0, salt=salt)


def next_token(request: Request) -> int:
    """The 'model': the next token is a pure function of the known tokens."""
    return 1000 + request.num_known


def run_step(scheduler: Scheduler, hold_prefill: bool = False) -> Proposal:
    """Runs one step in which every sampled request gets one token and finishes at its limit."""
    proposal = scheduler.propose()
    scheduler.check()
    for chunk in scheduler.commit(proposal, hold_prefill):
        scheduler.complete(chunk, next_token(chunk.request) if chunk.samples else None)
        if len(chunk.request.output_ids) == chunk.request.params.max_new_tokens:
            scheduler.finish(chunk.request.request_id)
    scheduler.check()
    return proposal


def tables_of(block_size: int, requests: Iterable[Request]) -> BlockTables:
    """Returns tables of requests whose block_ids were chosen by hand."""
    tables = BlockTables(block_size)
    for request in requests:
        blocks = request.block_ids
        tables.drop(request)
        tables.extend(request, blocks)
    return tables


def shape(chunks: tuple[ScheduledChunk, ...]) -> list[tuple[str, int, int, bool]]:
    """Returns (request id, start, length, samples) of each chunk."""
    return [(chunk.request.request_id, chunk.start, chunk.length, chunk.samples) for chunk in chunks]
