"""From how many tokens on overlapped rounds pay, and how many."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overlap import break_even_tokens

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "overlap.json"


def layer_s(num_tokens: int, rounds: int, token_s: float, round_s: float, way_s: float) -> float:
    """Returns the time of a layer whose experts take longer than its rows: round_s + token_s a token, per round."""
    ends_s = 2 * way_s * num_tokens / rounds
    return ends_s + rounds * round_s + num_tokens * token_s


@given(st.floats(1e-6, 1e-2), st.floats(1e5, 1e10), st.integers(64, 1 << 17))
def test_two_half_batches_pay_from_the_break_even_on(round_s: float, bytes_per_s: float, bytes_per_token: int) -> None:
    tokens = break_even_tokens(round_s, bytes_per_token, bytes_per_s)
    way_s = bytes_per_token / 2 / bytes_per_s
    slow = 10 * way_s  # experts take longer than rows
    for size in (tokens, tokens + 1, 10 * tokens):
        assert layer_s(size, 2, slow, round_s, way_s) <= layer_s(size, 1, slow, round_s, way_s) * (1 + 1e-9)
    if tokens > 2:
        size = tokens - 1
        assert layer_s(size, 2, slow, round_s, way_s) >= layer_s(size, 1, slow, round_s, way_s) * (1 - 1e-9)


def test_by_hand() -> None:
    # 8 KiB a token and way at 1 GB/s, 1 ms for a cut: 16 KiB x T / 1e9 / 2 = 1 ms at 122.07 tokens.
    assert break_even_tokens(1e-3, 2 * 8192, 1e9) == 123
    assert break_even_tokens(0.0, 16384, 1e9) == 2, "one token cannot be cut"


def test_the_committed_measurement_agrees() -> None:
    rows = json.loads(TABLE.read_text())["break_even"]
    behind_links = [row for row in rows if row["predicted T"] != ""]
    assert len(behind_links) == 3
    for row in behind_links:
        assert 2 / 3 < row["predicted T"] / row["measured T"] < 3 / 2, row
