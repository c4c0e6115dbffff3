"""Ranks whose kernels or weights differ do not start, and each of them says which ranks and what to do."""

import pytest
import torch

from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.model.agreement import RankFacts, check_agreement, disagreement
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu.digest import kernel_digest
from moe_serve.kernels.cpu.library import find_cpu_library
from tests.ranks import run_ranks

WIDE = RankFacts("compiled kernels (avx512)", "0123456789abcdef", "dense bfloat16, packed")
NARROW = RankFacts("compiled kernels (avx2)", "0123456789abcdef", "dense bfloat16, packed")
PLAIN = RankFacts("compiled kernels (plain)", "fedcba9876543210", "dense bfloat16, packed")
TORCH = RankFacts("torch", "", "dense float32")


def test_ranks_with_the_same_bits_and_weights_agree() -> None:
    assert disagreement([WIDE, NARROW, WIDE]) is None
    assert disagreement([TORCH, TORCH]) is None


def test_other_bits_are_named_with_their_ranks_and_the_fix() -> None:
    message = disagreement([WIDE, PLAIN, NARROW, PLAIN])
    assert message is not None
    assert "rank 0: compiled kernels (avx512) 0123456789abcdef" in message
    assert "ranks 1, 3: compiled kernels (plain) fedcba9876543210" in message
    assert "set engine.cpu_kernels: no_amx, else install the same C compiler on all machines" in message


def test_other_forms_of_weights_are_named_with_their_ranks_and_the_fix() -> None:
    message = disagreement([WIDE, TORCH, WIDE])
    assert message is not None
    assert "ranks 0, 2: dense bfloat16, packed; rank 1: dense float32" in message
    assert "engine.cpu_kernels: torch" in message


def check_ranks(rank: int, group: EpGroup) -> str:
    check_agreement(NARROW if rank else WIDE, group)
    with pytest.raises(ConfigError) as caught:
        check_agreement(TORCH if rank else WIDE, group)
    return str(caught.value)


def test_every_rank_hears_of_a_disagreement() -> None:
    first, second = run_ranks(2, check_ranks)
    assert first == second
    assert "rank 1: dense float32" in first


@pytest.mark.skipif(find_cpu_library() is None, reason="needs a C compiler")
def test_the_digest_is_the_same_in_every_process_and_with_any_threads() -> None:
    library = find_cpu_library()
    assert library is not None
    digest = kernel_digest()
    library.set_threads(2)
    try:
        assert kernel_digest() == digest
    finally:
        library.set_threads(1)
    assert set(run_ranks(2, digest_of_rank)) == {digest}


def digest_of_rank(rank: int, group: EpGroup) -> str:
    torch.manual_seed(rank)
    return kernel_digest()
