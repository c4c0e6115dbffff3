"""Our decoder against transformers in float32."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_serve.attention_dp.attention_plan import first_expanded
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.kernels.numerics import COMPILED, FAST
from moe_serve.kernels.topk_gate import topk_gate_reference
from moe_serve.models.decoder.mla import expand_from
from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import MlaSpec
from tests.models.families import (
    ANOTHERS_FORM,
    FAMILIES,
    LIGHTNING,
    Oracle,
    logits_behind,
    make_random,
    oracle_logits,
    save,
    spec_of,
)
from tests.models.reference_moe import ReferenceMoe
from tests.models.runner import BLOCK_SIZE, Runner, load_decoder
from tests.tolerance import FLOAT32, GREEDY_GAP, LOGITS, relative_error

LENGTHS = (37, 5, 150, 1)  # 150: beyond YaRN's original 64 positions
NUM_GREEDY = 16


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in LENGTHS]


# Numerics whose bits do not depend on cuts are compared with transformers in test_invariance.py. A family that is
# another's form is read in another way, and computed alike: here it meets the compiled kernels.
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_in_one_piece_in_chunks_and_behind_a_cached_prefix(name: str, oracle: Oracle) -> None:
    numerics = COMPILED if name in ANOTHERS_FORM else FAST
    model, folder = oracle(name)
    moe_layer = MoeLayer if numerics.compiled else ReferenceMoe
    runner = Runner(load_decoder(folder, numerics, moe_layer=moe_layer), numerics)
    wanted = [oracle_logits(model, ids) for ids in prompts()]
    whole = [runner.request(f"whole{i}", ids) for i, ids in enumerate(prompts())]
    runner.prefill(whole)
    assert all(relative_error(runner.stacked(r), logits) < LOGITS for r, logits in zip(whole, wanted, strict=True))
    for chunk in (16, 64):  # on either side of where MLA changes its form
        chunked = [runner.request(f"{chunk}/{i}", ids) for i, ids in enumerate(prompts())]
        runner.prefill(chunked, chunk=chunk)
        for request, logits in zip(chunked, wanted, strict=True):
            assert relative_error(runner.stacked(request), logits) < LOGITS
    num_shared = 4
    prefixed = runner.request("prefixed", prompts()[0], whole[0].block_ids[:num_shared])
    runner.prefill([prefixed])
    assert relative_error(runner.stacked(prefixed), wanted[0][num_shared * BLOCK_SIZE :]) < LOGITS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "-" in name else ()) for name in FAMILIES]
)
def test_greedy_tokens_match_on_ragged_prompts(name: str, oracle: Oracle) -> None:
    model, folder = oracle(name)
    runner = Runner(load_decoder(folder), FAST)
    requests = [runner.request(str(i), ids) for i, ids in enumerate(prompts())]
    runner.prefill(requests, chunk=32)
    runner.greedy(requests, NUM_GREEDY)
    compared = 0
    for request in requests:
        assert len(request.output_ids) == NUM_GREEDY
        top, best = logits_behind(model, request.prompt_ids, request.output_ids).topk(2)
        wanted = best[:, 0].tolist()
        tied = (top[:, 0] - top[:, 1] < GREEDY_GAP).nonzero()
        clear = int(tied[0]) if len(tied) else NUM_GREEDY  # behind a tie either continuation is right
        assert request.output_ids[:clear] == wanted[:clear]
        compared += clear
    assert compared > 0.7 * NUM_GREEDY * len(requests), "too many ties: take another seed"


def test_the_demo_model_agrees_with_transformers() -> None:
    from transformers import AutoModelForCausalLM

    import moe_serve

    folder = Path(moe_serve.__file__).parent / "demo_model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(2, 2048, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    runner = Runner(load_decoder(folder, COMPILED), COMPILED)
    request = runner.request("demo", ids)
    runner.prefill([request], chunk=120)
    assert relative_error(runner.stacked(request), oracle_logits(model, ids)) < LOGITS
    runner.greedy([request], 32)
    assert len(request.output_ids) == 32
    assert request.output_ids == logits_behind(model, ids, request.output_ids).argmax(1).tolist()


def test_minimax_rotates_as_many_columns_as_rotary_dim_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.minimax import modeling_minimax
    from transformers.models.minimax_m2 import modeling_minimax_m2

    # Which transformers rotates whole; MiniMax-M2 does it as published.
    monkeypatch.setattr(modeling_minimax, "MiniMaxRotaryEmbedding", modeling_minimax_m2.MiniMaxM2RotaryEmbedding)
    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", modeling_minimax_m2.apply_rotary_pos_emb)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    keys = LIGHTNING | {"head_dim": 44, "rope_parameters": rope | {"partial_rotary_factor": 30.1 / 44}}
    model = make_random("minimax", keys)
    wanted = [oracle_logits(model, ids) for ids in prompts()]
    model.config.rope_parameters, model.config.rotary_dim = rope, 30
    runner = Runner(load_decoder(save(model, tmp_path), COMPILED), COMPILED)
    requests = [runner.request(str(i), ids) for i, ids in enumerate(prompts())]
    runner.prefill(requests, chunk=64)
    for request, logits in zip(requests, wanted, strict=True):
        assert relative_error(runner.stacked(request), logits) < LOGITS


def test_the_experts_of_axk2_s_other_groups_win_over_negative_scores(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter

    spec, config = spec_of("axk2-groups-bias", tmp_path).router, AutoConfig.from_pretrained(tmp_path)
    assert (spec.num_logical, spec.num_groups, spec.topk_groups) == (8, 4, 2)
    config.num_experts_per_tok = 4  # all of the other groups, whose scores are equal
    theirs = AXK2TopkRouter(config)
    generator, bias = torch.Generator().manual_seed(7), theirs.e_score_correction_bias
    with torch.no_grad():
        theirs.weight.normal_(generator=generator)
        bias.uniform_(-1.5, -1, generator=generator)
        logits, weights, ids = theirs(0.2 * torch.randn(50, 64, generator=generator))
        found, weighed = topk_gate_reference(logits, bias, replace(spec, topk=4), torch.zeros(8, dtype=torch.int64))
    dense = torch.zeros(2, 50, 8).scatter_(2, torch.stack((ids, found)), torch.stack((weights, weighed)))
    assert relative_error(dense[1], dense[0]) < FLOAT32


def test_the_form_of_latent_attention_follows_the_number_of_multiplications(oracle: Oracle) -> None:
    attention = read_spec(oracle("deepseek_v3-yarn")[1]).attention
    assert isinstance(attention, MlaSpec)
    border = expand_from(attention)
    assert border == 48
    between = attention.kv_lora_rank * (attention.nope_dim + attention.value_dim)  # latents and heads, for one token

    def absorbed(rows: int, pairs: float) -> float:
        return rows * between + pairs * (2 * attention.kv_lora_rank + attention.rope_dim)

    def expanded(rows: int, before: int, pairs: float) -> float:
        return (rows + before) * between + pairs * (attention.query_dim + attention.value_dim)

    for rows in (2, 10, border // 2, border - 1, border, 200):
        for before in (0, 1, 10, 100, 10_000):
            pairs = rows * (before + rows / 2)
            batch: Any = SimpleNamespace(host_query_lens=(rows,), host_seq_lens=(before + rows,), num_decodes=0)
            is_expanded = first_expanded(batch, border) == 0
            assert is_expanded == (expanded(rows, before, pairs) <= absorbed(rows, pairs)), (rows, before)
