"""The torch twin of sampling, held against definitions in plain Python."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_serve.c_library import find_compiler, load_c_library, processor_flags
from moe_serve.kernels import cpu, sampling
from moe_serve.kernels.sampling import (
    gumbel,
    natural_log,
    philox,
    sample_rows_reference,
    token_weights,
)
from tests.kernels.sampling_rows import one_row, rows_of


def columns(*values: int) -> list[torch.Tensor]:
    return [torch.tensor([[value]]) for value in values]


def arrays(*values: int) -> list[NDArray[np.int64]]:
    return [np.array([[value]]) for value in values]


def noise(seed: int, output_index: int, num_ids: int) -> torch.Tensor:
    return gumbel(*columns(seed, output_index), torch.arange(num_ids)[None])[0]


def kept(logits: list[float], draws: int = 400, **parameters: float) -> set[int]:
    """The tokens that are ever drawn from a row, each with a noticeable probability."""
    row = torch.tensor(logits).expand(draws, -1)
    return set(sample_rows_reference(row.clone(), rows_of([{**parameters, "seed": i} for i in range(draws)])))


def test_philox_gives_the_published_numbers() -> None:
    # Random123's known answers for philox4x32-10.
    words = philox(*arrays(0, 0), tuple(arrays(0, 0)))
    assert [word.item() for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    words = philox(*arrays(0x243F6A88, 0x85A308D3), tuple(arrays(ones, ones)))
    assert [word.item() for word in words] == philox_by_hand([0x243F6A88, 0x85A308D3, 0, 0], [ones, ones])


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        high0, low0 = divmod(counter[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(counter[2] * 0xCD9E8D57, 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def test_the_largest_number_of_random_bits_gives_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = np.array([2**53 - 1, 2**53 - 2, 2**52 + 1, 2**52, 0])
    monkeypatch.setattr(sampling, "_random_bits", lambda *_: bits)
    one = torch.zeros(1, dtype=torch.int64)
    largest, second, *others = gumbel(one, one, one).tolist()
    assert largest == pytest.approx(-math.log(-math.log1p(-(2.0**-53))), rel=1e-12)
    assert second == pytest.approx(-math.log(-math.log1p(-(2.0**-52))), rel=1e-12)
    assert second < largest < math.inf
    rounded = [(float(each) + 0.5) * 2.0**-53 for each in bits[2:].tolist()]
    assert others == (-natural_log(-natural_log(torch.tensor(rounded, dtype=torch.float64)))).tolist()


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_noise_in_c_has_the_bits_of_torch_up_to_the_largest_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "noise.c"
    source.write_text(
        f'#include "{Path(cpu.__file__).with_name("gumbel.h")}"\n'
        "int64_t noise(int64_t high, int64_t low)\n"
        "{ double x = gumbel_of(high, low); int64_t bits; memcpy(&bits, &x, 8); return bits; }\n"
    )
    flags = *processor_flags(), "-ffp-contract=off"
    library, _ = load_c_library(source, {"noise": 2}, flags, tmp_path / "built")
    words = [(2**32 - 1, 2**32 - 1), (2**32 - 1, 2**32 - 65), (0, 0), (123456789, 987654321)]
    bits = np.array([(high >> 5 << 26) + (low >> 6) for high, low in words])
    monkeypatch.setattr(sampling, "_random_bits", lambda *_: bits)
    one = torch.zeros(1, dtype=torch.int64)
    assert [library.noise(*each) for each in words] == gumbel(one, one, one).view(torch.int64).tolist()


def test_the_logarithm_is_accurate_over_the_numbers_that_noise_needs() -> None:
    near_one = 1 - np.exp2(-np.arange(1.0, 54))
    x = np.concatenate([np.exp2(np.linspace(-55, 6, 100_000)), near_one])
    np.testing.assert_allclose(natural_log(torch.from_numpy(x)).numpy(), np.log(x), rtol=1e-15)


def test_the_weight_of_a_token_is_its_exponential_in_whole_units() -> None:
    scaled = torch.cat([torch.linspace(-45, 0, 100_000, dtype=torch.float64), torch.tensor([-math.inf, 0.0])])
    weights = token_weights(scaled)
    np.testing.assert_allclose(weights.numpy(), np.exp(scaled.numpy()) * 2.0**40, rtol=3e-10, atol=0.51)
    assert weights[-2:].tolist() == [0, 2**40]


def test_neighbouring_indices_and_ids_draw_independent_noise() -> None:
    drawn = np.stack([noise(7, index, 2000).numpy() for index in range(5)])
    assert np.abs(np.corrcoef(drawn) - np.eye(5)).max() < 0.08
    assert abs(np.corrcoef(drawn[0, :-1], drawn[0, 1:])[0, 1]) < 0.08
    assert abs(drawn.mean() - np.euler_gamma) < 0.05


def test_sampling_follows_the_softmax() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(20_000, -1)
    drawn = sample_rows_reference(logits.clone(), rows_of([{"seed": i, "output_index": i % 7} for i in range(20_000)]))
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.125, 0.125], atol=0.015)


def test_top_k_top_p_and_min_p_keep_the_likeliest() -> None:
    logits = [math.log(share) for share in (0.1, 0.4, 0.2, 0.3)]
    assert kept(logits) == {0, 1, 2, 3}
    assert kept(logits, top_k=2) == {1, 3}
    assert kept(logits, top_p=0.5) == {1, 3}, "0.4 is not enough, 0.4 + 0.3 is"
    assert kept(logits, top_p=0.39) == {1}
    assert kept(logits, top_k=3, top_p=0.75) == {1, 3}, "top_p counts what top_k left"
    assert kept(logits, min_p=0.6) == {1, 3}, "0.3 is above 0.6 x 0.4, 0.2 is not"
    assert kept(logits, top_p=0.75, min_p=0.45) == {1, 2, 3}
    assert kept([0.0] * 4, top_k=2) == kept([0.0, -0.0, -0.0, 0.0], top_p=0.5) == {0, 1}, "of equal ones the lowest ids"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.5, -1.0, -3.0, -40.0]), min_size=1, max_size=30),
    st.integers(1, 40),
    st.floats(0.01, 1.0),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.integers(0, 2**63 - 1),
)
def test_a_token_has_the_largest_sum_among_those_that_remain(
    logits: list[float], top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    scaled = torch.tensor(logits, dtype=torch.float64) - max(logits)
    weights = token_weights(scaled / 0.7).tolist()
    total, before, remain = sum(weights[token] for token in order), 0, []
    for token in order:
        if top_p == 1.0 or before < top_p * total:
            remain.append(token)
        before += weights[token]
    remain = [token for token in remain if min_p == 0 or scaled[token] / 0.7 >= math.log(min_p)]
    sums = scaled / 0.7 + noise(seed, 5, len(logits))
    row = one_row(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, output_index=5)
    assert sample_rows_reference(torch.tensor([logits]), row) == [max(remain, key=lambda token: sums[token])]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e308])
@pytest.mark.parametrize("top_p", [5e-324, 0.5, 1.0])
def test_no_temperature_ends_the_engine(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[-math.inf, 4.0, 9.0, -3.0]])
    (token,) = sample_rows_reference(logits, one_row(temperature=temperature, top_p=top_p, seed=3))
    assert token == 2 if temperature < 1 else token in (1, 2, 3)


def test_a_wide_batch_is_drawn_in_several_parts(monkeypatch) -> None:
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))
    rows = rows_of([{"seed": i, "top_k": (-1, 5)[i % 2], "top_p": (1.0, 0.9)[i // 2 % 2]} for i in range(7)])
    whole = sample_rows_reference(logits, rows)
    monkeypatch.setattr(sampling, "_CPU_ELEMENTS", 200)
    monkeypatch.setattr(sampling, "_CPU_NOISE_ELEMENTS", 32)
    assert sample_rows_reference(logits, rows) == whole
