"""Prefixes that left the pool, or the process, come back with the bits that they had; with other weights none does."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.engine import Engine
from tests.engine.bad_network import ask_later, ask_later_over_a_bad_network, on_two_hosts
from tests.engine.offline import (
    Prepare,
    Served,
    prompts_with_shared_beginnings,
    serve,
    submits_of,
    tiny_model,
)

# fmt: off
SMALL = [
    "model.load_format=dummy", "cache.num_blocks=40", "cache.block_size=4", "engine.max_batch_tokens=24",
    "engine.max_running_requests=3",
]
# fmt: on


def served(num_ranks: int, *overrides: str) -> Served:
    prompts = prompts_with_shared_beginnings(16, 200, max_len=100)
    params = SamplingParams(max_new_tokens=4, temperature=0.7, ignore_eos=True)
    return serve(num_ranks, submits_of(prompts, params), [*SMALL, *overrides], prepare=read_all)


def read_all(engine: Engine) -> None:
    """Has files read though they may take longer than computing their pages, as with models this small."""
    if engine.scheduler.blocks.tiers is not None:
        engine.scheduler.blocks.tiers._is_worth_reading = lambda *asked: True  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "model, num_ranks",
    [
        ("deepseek_v3", 1),
        ("deepseek_v4", 2),
        ("qwen3_next", 1),
        pytest.param("mimo_v2_flash", 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_notice_tiers_nor_a_restart(model: str, num_ranks: int, tmp_path: Path) -> None:
    own = f"model.path={tiny_model(tmp_path, model)}"
    pages = tmp_path / "pages"
    files = [own, f"cache.path={pages}", "cache.disk_gb=0.1"]
    plain = served(num_ranks, own)
    first = served(num_ranks, "cache.host_gb=0.01", *files)
    again = served(num_ranks, *files)
    other = served(num_ranks, *files, "model.seed=7")
    assert first.tokens == again.tokens == plain.tokens
    assert first.digests == again.digests == plain.digests
    cached = [run.stats["num_cached_prompt_tokens"] for run in (plain, first, again, other)]
    assert max(cached[:2]) < cached[2], "a restart finds the pages of the run before"
    assert other.tokens != plain.tokens
    assert cached[3] < cached[2], "pages of other weights are not found"
    assert len(list(pages.glob("*/"))) == 2
    assert not list(pages.glob("*/*.[0-9]*")), "no unfinished file is left"


@pytest.mark.parametrize(
    ("model", "prepare"),
    [
        ("deepseek_v3", ask_later_over_a_bad_network),
        pytest.param("qwen2_moe", ask_later_over_a_bad_network, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", ask_later, marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_notice_pages_of_another_host_nor_what_becomes_of_them_on_the_way(
    model: str, prepare: Prepare, tmp_path: Path
) -> None:
    prompts = [prompt for prompt in prompts_with_shared_beginnings(24, 200, max_len=100) for _ in range(2)]
    params = SamplingParams(max_new_tokens=4, temperature=0.7, ignore_eos=True)
    submits = [
        replace(each, pages_at=0 if number % 2 else None) for number, each in enumerate(submits_of(prompts, params))
    ]
    own = [f"model.path={tiny_model(tmp_path, model)}", *SMALL]
    plain = serve(2, submits, own)
    across = serve(2, submits, [*own, "cache.host_gb=0.02"], prepare=prepare, placed=on_two_hosts)
    assert across.tokens == plain.tokens
    assert across.digests == plain.digests
    assert across.pages["from_other_host"] > 0
    if prepare is ask_later_over_a_bad_network:
        assert all(across.pages[reason] > 0 for reason in ("checksum", "version", "peer_lost")), across.pages
