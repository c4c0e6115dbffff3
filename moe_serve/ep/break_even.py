"""When overlap pays, and in how many rounds: arithmetic on what was measured, without torch and without a clock.

One batch takes  dispatch + experts + combine.  Cut in n equal rounds, all but the first dispatch and the last combine
hide under experts, so n rounds save (1 - 1/n) of both transfers. Each further round costs round_s: its calls, and the
expert weights that are read once more. (Where a transfer takes longer than a round's experts, they hide under it, and
more is won.)
"""

import math


def break_even_tokens(round_s: float, bytes_per_token: float, bytes_per_s: float) -> int:
    """Returns from how many tokens of a rank two half-batches are faster than one batch.

    round_s:         what a cut costs: time of a layer in two rounds minus in one, both without a link to wait for
    bytes_per_token: what a token sends in dispatch and combine together
    bytes_per_s:     of the link that a rank sends on
    Half of both transfers is saved, so it is where (tokens x bytes_per_token / bytes_per_s) / 2 = round_s.
    """
    return max(2, math.ceil(2 * round_s * bytes_per_s / bytes_per_token))


def num_rounds(num_tokens: int, from_tokens: int) -> int:
    """Returns the best number of rounds for a batch where two begin to pay at from_tokens; 1 below.

    The n-th round saves 1/(n-1) - 1/n of both transfers. Two save a half, which is worth one round at from_tokens; so
    the n-th pays where num_tokens / (n (n - 1)) >= from_tokens / 2.
    """
    return (1 + math.isqrt(1 + 8 * num_tokens // from_tokens)) // 2
