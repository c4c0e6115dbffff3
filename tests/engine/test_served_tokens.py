"""What an engine serves greedily is what transformers computes: chunks, preemption, one rank, two and four."""

from pathlib import Path

import pytest
import torch

from moe_serve.attention_dp.request import SamplingParams
from tests.engine.offline import prompts_with_shared_beginnings, serve, submits_of
from tests.models.families import logits_behind, make_oracle, save
from tests.tolerance import GREEDY_GAP

PRESSED = [
    "cache.num_blocks=40", "cache.block_size=4", "cache.prefix_cache=true", "engine.max_batch_tokens=24",
    "engine.max_running_requests=8",
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "num_ranks"), [("gpt_oss", 1), ("gpt_oss", 2), ("deepseek_v4", 2), ("deepseek_v4", 4)]
)
def test_served_tokens_are_those_of_transformers(family: str, num_ranks: int, tmp_path: Path) -> None:
    model = make_oracle(family)
    folder = save(model, tmp_path / "model")
    prompts = prompts_with_shared_beginnings(8 * num_ranks, 256, max_len=60)
    params = SamplingParams(max_new_tokens=16, temperature=0, ignore_eos=True)
    served = serve(num_ranks, submits_of(prompts, params), [f"model.path={folder}", *PRESSED])
    assert served.stats["num_preempted"] > 0, "the cache was not small enough to preempt anybody"
    compared = 0
    for index, prompt in enumerate(prompts):
        tokens = served.tokens[str(index)]
        assert len(tokens) == 16
        top, best = logits_behind(model, prompt, tokens).topk(2)
        tied = (top[:, 0] - top[:, 1] < GREEDY_GAP).nonzero()
        clear = int(tied[0]) if len(tied) else 16  # behind a tie either continuation is right
        assert torch.equal(torch.tensor(tokens[:clear]), best[:clear, 0]), index
        compared += clear
    assert compared > 0.7 * 16 * len(prompts), "too many ties: take another seed"
