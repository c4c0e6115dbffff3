"""Log probabilities of a fake rank: of token t, of rank 1, -t / 8; the others of the likeliest are the next ids."""

from array import array

from moe_serve.engine.protocol.messages import LogprobBlock, Submit


def output_block(submit: Submit, start: int, token_ids: list[int]) -> LogprobBlock | None:
    """Returns the block of output tokens from `start` on; None where nobody asks."""
    asked = submit.params.logprobs
    return None if asked is None else _block(submit, start, token_ids, asked)


def prompt_block(submit: Submit, start: int) -> LogprobBlock | None:
    """Returns the block of what is left of the prompt, with the first output token."""
    params, known = submit.params, submit.num_prompt_logprobs
    if params.prompt_logprobs is None or start:
        return None
    return _block(submit, known, submit.prompt_ids[params.prompt_logprobs_start + 1 + known :], params.prompt_logprobs)


def _block(submit: Submit, start: int, token_ids: list[int], num_top: int) -> LogprobBlock:
    tops = [token + i for token in token_ids for i in range(num_top)]
    numbers = [each for token in token_ids for each in (token, *submit.params.logprob_token_ids)]
    return LogprobBlock(
        start,
        array("i", [1] * len(token_ids)).tobytes(),
        array("f", [-token / 8 for token in numbers]).tobytes(),
        array("i", tops).tobytes(),
        array("f", [-token / 8 for token in tops]).tobytes(),
    )
