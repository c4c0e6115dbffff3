"""Keys and values in 8 bits: a little other logits, by the same rules as all others."""

from pathlib import Path

import pytest
import torch

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.kernels.numerics import COMPILED, FAST, Numerics
from moe_serve.kernels.quantised import CACHED_DTYPES
from tests.engine.offline import prompts_with_shared_beginnings, serve, submits_of
from tests.engine.test_identity import same
from tests.models.families import Oracle
from tests.models.runner import Runner, load_decoder

DTYPES = pytest.mark.parametrize("dtype", CACHED_DTYPES, ids=str)
# int8 and e4m3 round a number by up to 1/254 and 1/16 of the largest of its head and of itself.
FAMILIES = ["qwen3_moe", "gpt_oss", "llama4_text", "mimo_v2_flash", "deepseek_v3", "deepseek_v3-odd"]
SHIFTED, TWINS = 0.1, 0.01  # of most positions: in a few, another expert is chosen


def shift(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the median over positions of the largest change of a logit over the largest logit."""
    return float(((got - wanted).abs().amax(1) / wanted.abs().amax(1)).median())


def logits(
    folder: Path, numerics: Numerics, dtype: torch.dtype | None, chunk: int | None = None, beside: int = 0
) -> torch.Tensor:
    """Returns the logits of one prompt, computed chunk by chunk, and of greedy tokens behind it."""
    runner = Runner(load_decoder(folder, numerics), numerics, cache_dtype=dtype)
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 256, (90,), generator=draw).tolist()
    others = [runner.request(f"other {i}", ids[i : i + 20]) for i in range(beside)]
    mine = runner.request("mine", ids)
    runner.prefill([*others, mine], chunk)
    return runner.stacked(mine)


@DTYPES
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_neighbours_change_no_bit(name: str, dtype: torch.dtype, oracle: Oracle) -> None:
    folder = oracle(name)[1]
    whole = logits(folder, COMPILED, dtype)
    assert torch.equal(logits(folder, COMPILED, dtype, chunk=17, beside=2), whole)
    assert torch.equal(logits(folder, COMPILED, dtype, chunk=1), whole)
    exact = logits(folder, COMPILED, None)
    assert 1e-5 < shift(whole, exact) < SHIFTED


@DTYPES
@pytest.mark.parametrize("name", FAMILIES)
def test_plain_torch_computes_what_the_kernels_do(name: str, dtype: torch.dtype, oracle: Oracle) -> None:
    folder = oracle(name)[1]
    kernels = logits(folder, COMPILED, dtype)
    # Sums in another order may round to the next number of 8 bits.
    assert shift(logits(folder, FAST, dtype), kernels) < TWINS
    assert shift(logits(folder, FAST, dtype, chunk=40), kernels) < TWINS


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_served_tokens_depend_on_the_request_alone(dtype: str) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    submits = submits_of(prompts_with_shared_beginnings(8, 2048, max_len=40), params)
    eight_bits = f"cache.dtype={dtype}"
    alone = serve(1, submits, [eight_bits, "cache.prefix_cache=false", "engine.max_running_requests=1"])
    ways = ["engine.max_batch_tokens=24", "engine.max_running_requests=8"]
    same(serve(2, submits, [eight_bits, *ways], stagger=2), alone)
    with pytest.raises(AssertionError, match="requests differ"):
        same(serve(1, submits), alone)
