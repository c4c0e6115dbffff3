"""When overlap pays, and in how many rounds: arithmetic on what was measured, without torch and without a clock.

One batch takes  out + experts + home.  Cut in n equal rounds, all but the first way out and the last way home hide
under experts, so n rounds save (1 - 1/n) of both ways; and each further round costs round_s: its calls, and the expert
weights that are read once more. (Where a way takes longer than the experts of a round, they hide under it instead, and
more is won.)
"""

import math


def break_even_tokens(round_s: float, bytes_per_token: float, bytes_per_s: float) -> int:
    """Returns from how many tokens of a rank two half-batches are faster than one batch.

    round_s:         what a cut costs: time of a layer in two rounds minus in one, both without a link to wait for
    bytes_per_token: what a token sends on both ways together, out and home
    bytes_per_s:     of the link that a rank sends on
    Half of both ways is won, so it is where (tokens x bytes_per_token / bytes_per_s) / 2 = round_s.
    """
    return max(2, math.ceil(2 * round_s * bytes_per_s / bytes_per_token))


def num_rounds(num_tokens: int, from_tokens: int) -> int:
    """Returns the best number of rounds for a batch where two begin to pay at from_tokens; 1 below.

    The n-th round saves 1/(n-1) - 1/n of both ways. Two save a half, which is worth one round at from_tokens; so the
    n-th pays where num_tokens / (n (n - 1)) >= from_tokens / 2.
    """
    return (1 + math.isqrt(1 + 8 * num_tokens // from_tokens)) // 2
