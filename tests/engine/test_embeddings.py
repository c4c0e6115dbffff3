"""Embeddings: the row of a prompt's last token that is projected to logits, however the prompt was computed."""

from pathlib import Path

import numpy as np
import torch

import moe_serve
from moe_serve.attention_dp.request import SamplingParams
from tests.engine.offline import prompts_with_shared_beginnings, serve, submits_of
from tests.engine.test_identity import BY_TORCH, PLAIN, WAYS
from tests.tolerance import LOGITS, relative_error

ASKS = SamplingParams(max_new_tokens=1, temperature=0, return_embedding=True)


def test_an_embedding_is_the_last_row_of_the_model_in_any_chunks_batch_and_ranks() -> None:
    from transformers import AutoModelForCausalLM

    prompts = [[7], *prompts_with_shared_beginnings(15, 2048, max_len=60)]
    submits = submits_of(prompts, ASKS)
    expected = serve(1, submits, PLAIN).embeddings
    model = AutoModelForCausalLM.from_pretrained(Path(moe_serve.__file__).parent / "demo_model", dtype=torch.float32)
    for index, ids in enumerate(prompts):
        with torch.no_grad():
            row = model.eval().model(torch.tensor([ids])).last_hidden_state[0, -1]
        assert relative_error(torch.from_numpy(np.frombuffer(expected[str(index)], "<f4").copy()), row) < LOGITS
    num_ranks, overrides, stagger = WAYS["preempted, cached prefixes, chunks, all at once"]
    assert serve(num_ranks, submits, [*PLAIN, *overrides], stagger).embeddings == expected
    by_torch = serve(1, submits, [*PLAIN, *BY_TORCH]).embeddings
    in_chunks = ["engine.max_batch_tokens=24", "engine.max_running_requests=16"]
    assert serve(2, submits, [*PLAIN, *BY_TORCH, *in_chunks], 1).embeddings == by_torch
