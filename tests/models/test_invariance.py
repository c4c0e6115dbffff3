"""batch_invariant: a token's logits are the same bits whatever else runs, however its prompt was cut or cached.

Compiled kernels run with the real MoE layer. Where torch computes, a plain one computes every token alone: what is
tested is everything else, and the real one in test_decoder.py. That the bits are right ones, transformers says.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from moe_serve.attention_dp import attention_plan
from moe_serve.ep.moe_layer import MoeLayer
from moe_serve.kernels.numerics import COMPILED, Numerics
from tests.models.families import ANOTHERS_FORM, FAMILIES, Oracle, oracle_logits, prompt
from tests.models.reference_moe import ReferenceMoe
from tests.models.runner import BLOCK_SIZE, Runner, load_decoder
from tests.tolerance import LOGITS, relative_error


def tiled(row_tile: int) -> Numerics:
    return Numerics(row_tile=row_tile, kv_tile=32)


LENGTH = 120  # beyond YaRN's original 64 positions, and windows and chunks of 70
# One token at a time around where tiles, blocks and windows begin, and at both ends of the prompt.
DECODES = (1, 1, 1, 26, *[1] * 6, 27, *[1] * 12, 44, 1, 1)
FIRST_TILE, OTHER_TILES = 4, (8, 16)  # all that engine.row_tile takes: with 1 some BLAS calls have other bits
# By torch, variants of a family ("-" in their names) go through the same sums; tests/attention_dp/test_attention.py has
# the bits of windows, sinks, biases and odd shapes.
SLOW = {name for name in FAMILIES if "-" in name} | ANOTHERS_FORM
CASES = [pytest.param(name, COMPILED, marks=pytest.mark.slow if name in ANOTHERS_FORM else ()) for name in FAMILIES]
CASES += [pytest.param(name, tiled(FIRST_TILE), marks=pytest.mark.slow if name in SLOW else ()) for name in FAMILIES]
CASES += [
    pytest.param(name, tiled(tile), marks=() if name in ("qwen3_moe", "deepseek_v3") else pytest.mark.slow)
    for name in FAMILIES
    for tile in OTHER_TILES
]


PROMPTS = prompt(7, 37), prompt(0, LENGTH), prompt(8, 1)  # what runs together at first


@cache  # for all numerics
def by_transformers(name: str, oracle: Oracle) -> list[Tensor]:
    return [oracle_logits(oracle(name)[0], ids) for ids in PROMPTS]


@pytest.mark.parametrize(("name", "numerics"), CASES, ids=str)
def test_logits_are_the_same_bits_in_any_batch(name: str, numerics: Numerics, oracle: Oracle) -> None:
    moe_layer = MoeLayer if numerics.compiled else ReferenceMoe
    runner = Runner(load_decoder(oracle(name)[1], numerics, moe_layer=moe_layer), numerics, num_blocks=512)
    ragged = [runner.request(f"of {len(ids)}", ids) for ids in PROMPTS]
    runner.prefill(ragged)
    for request, logits in zip(ragged, by_transformers(name, oracle), strict=True):
        assert relative_error(runner.stacked(request), logits) < LOGITS
    ids, wanted = PROMPTS[1], runner.stacked(ragged[1])

    alone = runner.request("alone", ids)
    runner.prefill([alone])
    token_by_token = runner.request("token by token", ids)
    for length in DECODES:
        runner.step([(token_by_token, length)])
    chunked = runner.request("chunked", ids)
    runner.prefill([chunked], chunk=23)
    prefixed = runner.request("prefixed", ids, alone.block_ids[:5])
    runner.prefill([prefixed])

    # Other sequences before, between and after; decodes, odd chunks and padding rows in every step.
    batched = runner.request("batched", ids)
    others = [runner.request(f"other{i}", prompt(i + 1, n)) for i, n in enumerate((3, 40, 90, 131, 1))]
    lengths = iter([5, 1, 30, 1, 1, 62, 20])
    for step, length in enumerate(lengths):
        others_now = [(r, min(1 + 9 * ((i + step) % 3), r.num_known - r.num_computed)) for i, r in enumerate(others)]
        others_now = [(r, n) for r, n in others_now if n > 0]
        runner.step([*others_now[: step % 3], (batched, length), *others_now[step % 3 :]])

    for request in (alone, token_by_token, chunked, batched):
        assert torch.equal(runner.stacked(request), wanted), request.request_id
    assert torch.equal(runner.stacked(prefixed), wanted[5 * BLOCK_SIZE :])


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3-yarn"])
def test_decoding_in_groups_of_different_length_changes_no_bit(
    name: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sequences of different lengths are decoded in several groups, so rows are gathered and scattered."""
    numerics = Numerics(row_tile=4)
    runner = Runner(load_decoder(oracle(name)[1], numerics), numerics, num_blocks=512)
    lengths = (250, 3, 251, 60, 120, 7)
    alone = [runner.request(f"alone{i}", prompt(i, length)) for i, length in enumerate(lengths)]
    for request in alone:
        runner.prefill([request])
        runner.greedy([request], 3)
    monkeypatch.setattr(attention_plan, "ALWAYS_TOGETHER", 16)  # the tiny model has few positions
    together = [runner.request(f"together{i}", prompt(i, length)) for i, length in enumerate(lengths)]
    runner.prefill(together)
    runner.greedy(together, 3)
    for one, other in zip(alone, together, strict=True):
        assert one.output_ids == other.output_ids
        assert torch.equal(runner.stacked(one), runner.stacked(other))
