"""An open request gives the same answer however many tokens an event of its rank brings, as right drafts do."""

import random

import numpy as np
import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config, model_dir
from moe_serve.engine.protocol.messages import LogprobBlock, TokenEvent
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.requests.open_request import Changes, OpenRequest, RequestSpec

TEXT = "def read(self, size=-1):\n    return self.buffer.read(size)\n\n\ndef close(self):\n    self.buffer.close()\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(model_dir(load_config().model))


def answer(
    tokenizer: Tokenizer, params: SamplingParams, ids: list[int], sizes: list[int], starts_anew: bool
) -> list[object]:
    """Returns what a reader has of a request whose events bring so many tokens each, up to its end.

    starts_anew: another attempt repeats the last event, with all tokens before it
    """
    request = OpenRequest("r", RequestSpec([7], params, seed=1), tokenizer, [1], Changes())
    begin = 0
    for size in sizes:
        first = 0 if starts_anew and begin else begin
        part = ids[first : begin + size]
        ranks = np.arange(first, first + len(part), dtype="<i4")
        block = LogprobBlock(first, ranks.tobytes(), (-0.5 * ranks).astype("<f4").tobytes())
        request.apply(TokenEvent("r", 0, first, part, logprobs=block))
        begin += size
        if request.is_done:
            break
    assert request.output_logprobs is not None
    told = [(request.output_logprobs.rank(i), request.output_logprobs.logprob(i)) for i in range(request.num_output)]
    assert len(request.output_logprobs) == request.num_output
    matcher = request.matcher
    return [matcher.output_ids, matcher.text, matcher.finish_reason, told]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(300, stop=("self.buffer", "size)"), logprobs=0),
        SamplingParams(300, stop_regex=(r"\n\ndef \w+",), logprobs=0),
        SamplingParams(300, stop=("read",), min_new_tokens=12, no_stop_trim=True, logprobs=0),
        SamplingParams(11, logprobs=0),
    ],
    ids=["stop", "stop_regex", "min_new_tokens", "length"],
)
@pytest.mark.parametrize("starts_anew", [False, True])
def test_where_an_output_ends_does_not_depend_on_how_many_tokens_come_together(
    tokenizer: Tokenizer, params: SamplingParams, starts_anew: bool
) -> None:
    ids = tokenizer.encode(TEXT)
    expected = answer(tokenizer, params, ids, [1] * len(ids), starts_anew=False)
    assert expected[2] is not None
    assert len(ids) > len(expected[0])  # type: ignore[arg-type]
    draw = random.Random(0)
    for _ in range(10):
        sizes = [draw.randint(1, 9) for _ in ids]
        assert answer(tokenizer, params, ids, sizes, starts_anew) == expected
