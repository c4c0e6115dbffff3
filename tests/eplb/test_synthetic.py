"""Synthetic loads: seeded, frozen, and of the kind they claim."""

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest

from moe_serve.eplb.replay.synthetic import (
    FAMILIES,
    SyntheticLoad,
    popularity,
    synthetic_trace,
)
from moe_serve.errors import ConfigError

SMALL = SyntheticLoad(num_windows=6, num_layers=3, num_logical=16, topk=2, num_groups=4, period=2,
                      tokens_per_step=100, steps_per_window=10, seed=7)  # fmt: skip


def fingerprint(load: SyntheticLoad) -> str:
    weights = np.stack(list(popularity(load)))
    return hashlib.sha256(np.round(weights, 9).tobytes()).hexdigest()[:12]


FROZEN = {
    "uniform": "70bf17bb66cb",
    "zipf": "fd1b90259433",
    "lognormal": "5a49548edfa2",
    "group": "5a4b6882a017",
    "hot": "9b1ef625c71d",
    "tiny": "70bf17bb66cb",
    "bursts": "dbb9ff610560",
    "jumps": "6b61fffb8a94",
    "swing": "603b2a39a6c1",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_is_the_same_each_time_and_adds_up(family: str) -> None:
    trace = synthetic_trace(replace(SMALL, family=family))
    first, again = list(trace), list(trace)
    assert len(first) == trace.num_records == 6
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        assert a.activations is not None
        assert ((a.activations > 0) == (a.tokens > 0)).all()
        assert (a.activations <= np.minimum(a.tokens, 10)).all()
        assert (a.tokens.sum(axis=1) == (8 if family == "tiny" else 100 * 2 * 10)).all()
    assert not np.array_equal(
        first[0].tokens, next(iter(synthetic_trace(replace(SMALL, family=family, seed=8)))).tokens
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_frozen(family: str) -> None:
    assert fingerprint(replace(SMALL, family=family)) == FROZEN[family]


def test_sources_add_up_to_the_tokens() -> None:
    for record in synthetic_trace(replace(SMALL, num_sources=4)):
        assert record.by_source is not None
        assert record.by_source.shape == (3, 4, 16)
        np.testing.assert_array_equal(record.by_source.sum(axis=1), record.tokens)


def test_lognormal_drifts_with_its_correlation() -> None:
    load = replace(SMALL, num_layers=40, num_logical=64, num_windows=30, rho=0.9)
    logs = np.log(np.stack(list(popularity(load)))).reshape(30, -1)
    logs -= logs.mean(axis=1, keepdims=True)
    step = np.mean([np.corrcoef(a, b)[0, 1] for a, b in itertools.pairwise(logs)])
    assert step == pytest.approx(0.9, abs=0.02)
    assert logs.std() == pytest.approx(0.6, abs=0.03)


def test_the_hot_expert_has_its_share_and_changes() -> None:
    windows = np.stack(list(popularity(replace(SMALL, family="hot"))))
    np.testing.assert_allclose(windows.max(axis=2), 0.3)
    assert (windows.argmax(axis=2)[0] == windows.argmax(axis=2)[1]).all()
    assert (windows.argmax(axis=2)[0] != windows.argmax(axis=2)[-1]).any()


def test_groups_are_correlated() -> None:
    load = replace(SMALL, family="group", num_layers=200, num_windows=1)
    logs = np.log(next(popularity(load))).reshape(200, 4, 4)
    assert logs.mean(axis=2).std() > 0.5  # 0.5 shared, and 0.6 / 2 from four experts; 0.3 without the shared part


def test_swing_returns_to_where_it_was() -> None:
    windows = list(popularity(replace(SMALL, family="swing")))
    np.testing.assert_array_equal(windows[0], windows[1])
    np.testing.assert_array_equal(windows[0], windows[4])
    assert not np.array_equal(windows[0], windows[2])


def test_bursts_follow_measured_profiles() -> None:
    profiles = np.ones((2, 3, 16))
    profiles[0, :, 0], profiles[1, :, 1] = 100, 100
    windows = np.stack(list(popularity(replace(SMALL, family="bursts", profiles=profiles, num_windows=60))))
    share = windows[:, :, :2] / windows[:, :, :2].sum(axis=2, keepdims=True)
    assert share.max() > 0.8
    assert share.min() < 0.2


def test_the_flipping_load_turns_when_experts_move() -> None:
    from benchmarks.balancer_loads import FlippingLoad

    load = FlippingLoad(replace(SMALL, skew=2.0))
    quiet = [load.next_window(moved=False).tokens.argmax(axis=1).tolist() for _ in range(3)]
    assert quiet[0] == quiet[1] == quiet[2]
    assert load.next_window(moved=True).tokens.argmax(axis=1).tolist() != quiet[0]


def test_static_instances_are_frozen() -> None:
    from benchmarks.balancer_loads import static_load

    table = static_load("lognormal", 2, 8, seed=0)
    assert table.sum(axis=1).tolist() == [1_000_000, 1_000_000]
    assert table[0].tolist() == STATIC


STATIC = [128512, 149245, 100502, 219618, 72371, 103468, 44801, 181483]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"family": "other"}, "use one of uniform"),
        ({"rho": 1.5}, "rho is 1.5"),
        ({"topk": 17}, "topk is 17 but there are 16 experts"),
        ({"family": "group", "num_groups": 5}, "num_groups is 5"),
        ({"num_windows": 0}, "num_windows is 0"),
        ({"profiles": np.ones((2, 3, 4))}, r"profiles has shape \[2, 3, 4\]"),
    ],
)
def test_what_cannot_be_drawn_says_why(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(SMALL, **changes)  # type: ignore[arg-type]
