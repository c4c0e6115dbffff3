"""Log probabilities that an engine gives against transformers: log_softmax of its logits in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_serve.attention_dp.request import SamplingParams
from tests.engine.offline import serve, submits_of
from tests.engine.scored import collected
from tests.models.families import FAMILIES, oracle_logits
from tests.tolerance import GREEDY_GAP, LOGITS

IDS = (7, 255)
PARAMS = SamplingParams(
    max_new_tokens=6, ignore_eos=True, logprobs=4, prompt_logprobs=4, logprob_token_ids=IDS, temperature=0.7, top_k=40
)
DEFAULT = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in FAMILIES]
)
def test_they_are_those_of_transformers(name: str, oracle: Callable[[str], tuple[Any, Path]]) -> None:
    model, folder = oracle(name)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 256, (length,), generator=draw).tolist() for length in (90, 1, 2, 33)]
    overrides = [f"model.path={folder}", "engine.max_batch_tokens=32", "engine.max_running_requests=8"]
    served = serve(1, submits_of(prompts, PARAMS), overrides)
    for index, prompt in enumerate(prompts):
        tokens = served.tokens[str(index)]
        text = prompt + tokens
        truth = oracle_logits(model, text).double().log_softmax(dim=-1)[:-1]
        entries = collected(PARAMS, 4, served.prompt_logprobs.get(str(index), []))
        entries += collected(PARAMS, 4, served.logprobs[str(index)])
        assert len(entries) == len(text) - 1
        for row, token, (logprob, rank, top, of_ids) in zip(truth, text[1:], entries, strict=True):
            scale = float(row.abs().max())
            assert abs(logprob - row[token]) < LOGITS * scale
            near = (row > row[token] - GREEDY_GAP).sum(), (row > row[token] + GREEDY_GAP).sum()
            assert near[1] < rank <= near[0]
            wanted = row.topk(4).values
            assert all(abs(got - want) < LOGITS * scale for (_, got), want in zip(top, wanted, strict=True))
            assert all(abs(got - row[token_id]) < LOGITS * scale for token_id, got in top)
            assert all(abs(got - row[token_id]) < LOGITS * scale for token_id, got in zip(IDS, of_ids, strict=True))
