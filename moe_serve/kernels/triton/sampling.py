# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton twin of kernels/sampling.py: a program changes one row of logits and draws its token, without sorting it.

Parameters and changes of all rows come in one copy from the host. What top_k and top_p leave is one logit and how many
of its equals (as in kernels/cpu/cut.h), found by halving the range of keys, integers in the order of the floats; each
half reads the row once more, out of the L2 cache, and computes weights of the tokens that are still in question only.
Noise is computed in float32 first: few blocks of a row may hold the largest sum, and these alone are computed exactly.

Every operation on float64 is rounded by itself, so the launch turns fused multiply-adds off: the tokens are the plain
form's on every GPU.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.kernels.sampling import EDIT, NONE_LEFT, NOT_FINITE, SAMPLING_ROW, SamplingRows

BLOCK = 2048  # logits of a row at a time, 8 for each thread
_FACTS = 5  # of a row's changes: where its edits are, how many, where its banned ids are, how many, where its mask is
_EDIT_BYTES = tl.constexpr(EDIT.itemsize)
_ROW_BYTES = tl.constexpr(SAMPLING_ROW.itemsize)
_FACT_BYTES = tl.constexpr(8 * _FACTS)
_NOT_FINITE, _NONE_LEFT = tl.constexpr(NOT_FINITE), tl.constexpr(NONE_LEFT)

_LN_2 = tl.constexpr(0.69314718055994530942)
_PER_LN_2 = tl.constexpr(1 / 0.69314718055994530942)
_LARGEST = tl.constexpr(1.7976931348623157e308)
_NO_WEIGHT = tl.constexpr(-28.5)  # below it a token weighs less than half a unit of 2**-40
_LOWEST_KEY = tl.constexpr(-2139095041)  # of -inf
_ROUND = tl.constexpr(4503599627370496.0)  # 2**52: a number of its size has no fraction
_SMALL = tl.constexpr(1.0 / 64)


def sample_rows_triton(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """Returns what sample_rows_reference does, [num_rows] int64 on the device. logits: rows may be strided"""
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        assert logits.stride(1) == 1, "logits of a row lie side by side"
        host = torch.from_numpy(pack_parameters(sampling))
        if logits.is_cuda:
            host = host.pin_memory()
        parameters = host.to(logits.device, non_blocking=True)
        sample_kernel[(num_rows,)](
            logits, parameters, tokens, num_rows, vocab, logits.stride(0), BLOCK=BLOCK, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return tokens


def pack_parameters(sampling: SamplingRows) -> NDArray[np.uint8]:
    """Returns parameters and changes of all rows as bytes: rows, _FACTS int64 of each, and what these point at."""
    num_rows = len(sampling.rows)
    facts = np.zeros((num_rows, _FACTS), np.int64)
    parts: list[NDArray[np.uint8]] = [sampling.rows.view(np.uint8), facts.view(np.uint8).reshape(-1)]
    size = sum(part.size for part in parts)
    for row, changes in enumerate(sampling.changes):
        if changes is None:
            continue
        facts[row, 1], facts[row, 3] = len(changes.edits), len(changes.banned)
        for column, array in ((0, changes.edits), (2, changes.banned), (4, changes.mask)):
            if array is None or not array.size:
                continue
            facts[row, column] = size  # never 0, so that 0 says that there is no mask
            parts.append(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
            if array.nbytes % 8:
                parts.append(np.zeros(-array.nbytes % 8, np.uint8))
            size += -(-array.nbytes // 8) * 8
    return np.concatenate(parts)


@triton.jit(do_not_specialize=["num_rows"])
def sample_kernel(logits, parameters, tokens, num_rows, vocab, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    floats = (parameters + row * _ROW_BYTES).to(tl.pointer_type(tl.float64))
    integers = (parameters + row * _ROW_BYTES).to(tl.pointer_type(tl.int64))
    temperature, top_p, min_p = tl.load(floats), tl.load(floats + 1), tl.load(floats + 2)
    top_k, seed, output_index = tl.load(integers + 3), tl.load(integers + 4), tl.load(integers + 5)
    token = tl.full((), _NOT_FINITE, tl.int64)
    top = finite_top(logits, vocab, BLOCK)
    if top > -float("inf"):
        facts = (parameters + num_rows * _ROW_BYTES + row * _FACT_BYTES).to(tl.pointer_type(tl.int64))
        if change_row(logits, parameters, facts, vocab, BLOCK):
            top = finite_top(logits, vocab, BLOCK)
        token = tl.full((), _NONE_LEFT, tl.int64)
        if top > -float("inf"):
            if temperature > 0:
                inverse = tl.minimum(1.0 / temperature, _LARGEST)
                cut, ties = find_cut(logits, vocab, top, inverse, top_k, top_p, min_p, BLOCK)
                token = draw(logits, vocab, top, inverse, cut, ties, seed, output_index, BLOCK)
            else:
                token = first_largest(logits, vocab, top, BLOCK)
    tl.store(tokens + row, token)


@triton.jit
def finite_top(logits, vocab, BLOCK: tl.constexpr):
    """Returns the largest logit; -inf where there is none, or where any is NaN or inf."""
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    unsound = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=-float("inf"))
        unsound = tl.where((x != x) | (x == float("inf")), 1, unsound)
        best = tl.where(x > best, x, best)
    return tl.where(tl.max(unsound) > 0, -float("inf"), tl.max(best))


@triton.jit
def change_row(logits, parameters, facts, vocab, BLOCK: tl.constexpr):
    """Makes the changes of a row in place, before any thread reads on; returns whether there are any."""
    edits, num_edits = parameters + tl.load(facts), tl.load(facts + 1).to(tl.int32)
    banned = (parameters + tl.load(facts + 2)).to(tl.pointer_type(tl.int64))
    num_banned = tl.load(facts + 3).to(tl.int32)
    mask_at = tl.load(facts + 4)
    for start in range(0, num_edits, 256):
        number = start + tl.arange(0, 256)
        inside = number < num_edits
        token = tl.load((edits + number * _EDIT_BYTES).to(tl.pointer_type(tl.int64)), mask=inside, other=0)
        edit = (edits + number * _EDIT_BYTES + 8).to(tl.pointer_type(tl.float32))
        x = tl.load(logits + token, mask=inside, other=0.0) + tl.load(edit, mask=inside, other=0.0)
        repetition = tl.load(edit + 1, mask=inside, other=1.0)
        x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = x - tl.load(edit + 2, mask=inside, other=0.0) - tl.load(edit + 3, mask=inside, other=0.0)
        tl.store(logits + token, x, mask=inside)
    tl.debug_barrier()
    for start in range(0, num_banned, 256):
        number = start + tl.arange(0, 256)
        token = tl.load(banned + number, mask=number < num_banned, other=0)
        tl.store(logits + token, -float("inf"), mask=number < num_banned)
    if mask_at > 0:
        words = (parameters + mask_at).to(tl.pointer_type(tl.int32))
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            word = tl.load(words + token // 32, mask=token < vocab, other=0)
            tl.store(logits + token, -float("inf"), mask=(token < vocab) & ((word >> (token % 32)) & 1 == 0))
    tl.debug_barrier()
    return num_edits + num_banned + mask_at > 0


@triton.jit
def first_largest(logits, vocab, top, BLOCK: tl.constexpr):
    """Returns the lowest id of the largest logit."""
    first = tl.full((BLOCK,), 0, tl.int64) + vocab
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=-float("inf"))
        first = tl.where((x == top) & (token < first), token, first)
    return tl.min(first)


@triton.jit
def find_cut(logits, vocab, top, inverse, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """Returns the lowest key that remains after top_k, then top_p, then min_p, and how many tokens that have it do."""
    high = key_of(top)
    cut = tl.full((), _LOWEST_KEY, tl.int64)
    ties = cut * 0 + vocab
    if (top_k > 0) & (top_k < vocab):
        above, cut = search(logits, vocab, top, inverse, top_k, cut, high, True, BLOCK)
        ties = top_k - above
    if top_p < 1.0:
        lowest = tl.maximum(cut, lowest_at_least(top, inverse, _NO_WEIGHT, high))
        total = measure(logits, vocab, top, inverse, lowest, high, False, BLOCK)
        if lowest == cut:  # of equal tokens top_k has taken the first
            equal = measure(logits, vocab, top, inverse, cut, cut, True, BLOCK)
            total -= tl.maximum(equal - ties, 0) * weight_of_key(cut, top, inverse)
        # Rounded up to a whole number, as the plain form does it.
        share = total.to(tl.float64) * top_p
        limit = share.to(tl.int64)
        limit += (limit.to(tl.float64) < share).to(tl.int64)
        limit = tl.minimum(limit, total)
        above, cut = search(logits, vocab, top, inverse, limit, lowest, high, False, BLOCK)
        weight = weight_of_key(cut, top, inverse)
        ties = (limit - above + weight - 1) // weight
    if min_p > 0:
        least = lowest_at_least(top, inverse, natural_log(min_p), high)
        if least > cut:
            cut = least
            ties = cut * 0 + vocab
    return cut, ties


@triton.jit
def search(logits, vocab, top, inverse, limit, low, high, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns (measure of the keys above the result, the highest key such that the keys from it on measure `limit`).

    Keys from `low` on do, and none is above `high`.
    """
    above = limit * 0
    while low < high:
        middle = low + (high - low + 1) // 2
        found = measure(logits, vocab, top, inverse, middle, high, COUNTS, BLOCK)
        reaches = above + found >= limit
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle - 1)
        above = tl.where(reaches, above, above + found)
    return above, low


@triton.jit
def measure(logits, vocab, top, inverse, low, high, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the weight of the tokens with keys from `low` to `high`, or how many they are."""
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=-float("inf"))
        key = key_of(x)
        inside = (key >= low) & (key <= high) & (token < vocab)
        if COUNTS:
            total += inside.to(tl.int64)
        elif tl.max(inside.to(tl.int32)) > 0:
            total += tl.where(inside, token_weights(scale(x, top, inverse)), 0)
    return tl.sum(total)


@triton.jit
def draw(logits, vocab, top, inverse, cut, ties, seed, output_index, BLOCK: tl.constexpr):
    """Returns the token with the largest sum of scaled logit and noise, of equal sums the lowest id."""
    best = tl.full((), -float("inf"), tl.float64)
    chosen = cut * 0
    num_equal = cut * 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=-float("inf"))
        key = key_of(x)
        is_equal = ((key == cut) & (token < vocab)).to(tl.int64)
        remains = (key > cut) | ((is_equal > 0) & (num_equal + tl.cumsum(is_equal, axis=0) <= ties))
        num_equal += tl.sum(is_equal)
        if tl.max(remains.to(tl.int32)) > 0:
            bits = random_bits(seed, output_index, token)
            scaled = scale(x, top, inverse)
            near = scaled.to(tl.float32) + rough_gumbel(bits)
            # The rough sum is off by less than a thousandth and two millionths of itself.
            at_most = tl.where(remains, near + 1e-3 + 2e-6 * tl.abs(near), -float("inf"))
            if tl.max(at_most).to(tl.float64) >= best:
                sums = tl.where(remains, scaled + gumbel(bits), -float("inf"))
                largest = tl.max(sums)
                first = tl.min(tl.where(remains & (sums == largest), token.to(tl.int64), vocab))
                # Blocks come in order of id: of equal sums the earlier one stays.
                chosen = tl.where(largest > best, first, chosen)
                best = tl.maximum(best, largest)
    return chosen


@triton.jit
def key_of(x):
    """Returns integers in the order of the floats, int64; both zeros are 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def logit_of(key):
    """Returns the float of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scale(x, top, inverse):
    """Returns the distance from the largest logit over the temperature, float64."""
    return (x.to(tl.float64) - top.to(tl.float64)) * inverse


@triton.jit
def lowest_at_least(top, inverse, least, high):
    """Returns the lowest key whose scaled logit is `least` or more, up to `high`, that of the largest logit."""
    low = high * 0 + _LOWEST_KEY
    while low < high:
        middle = low + (high - low) // 2
        is_enough = scale(logit_of(middle), top, inverse) >= least
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    return low


@triton.jit
def weight_of_key(key, top, inverse):
    """Returns the weight of a token."""
    return token_weights(scale(logit_of(key), top, inverse))


@triton.jit
def token_weights(scaled):
    """Returns exp(scaled) in units of 2**-40, int64, for numbers of at most 0."""
    s = tl.where(scaled > -40.0, scaled, -40.0)
    n = round_even(s * _PER_LN_2)
    r = s - n * _LN_2
    p = r * (1 / 40320) + (1 / 5040)
    p = p * r + (1 / 720)
    p = p * r + (1 / 120)
    p = p * r + (1 / 24)
    p = p * r + (1 / 6)
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    unit = ((n.to(tl.int64) + 1063) << 52).to(tl.float64, bitcast=True)  # 2**(n + 40)
    return round_even(p * unit).to(tl.int64)


@triton.jit
def round_even(x):
    """Returns x, smaller than 2**51, rounded to the nearest whole number, halfway to the even one."""
    return tl.where(x < 0, (x - _ROUND) + _ROUND, (x + _ROUND) - _ROUND)


@triton.jit
def random_bits(seed, output_index, token):
    """Returns 53 random bits for each token id, int64."""
    zero = token * 0
    high, low, _, _ = tl.philox(seed, token, output_index.to(tl.int32) + zero, zero, zero)
    return ((high.to(tl.int64) & 0xFFFFFFFF) >> 5 << 26) + ((low.to(tl.int64) & 0xFFFFFFFF) >> 6)


@triton.jit
def gumbel(bits):
    """Returns Gumbel(0, 1) of 53 random bits, float64."""
    return -natural_log(-natural_log(uniform_of(bits)))


@triton.jit
def uniform_of(bits):
    """Returns a number between 0 and 1, never an end, float64."""
    number = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2**-53
    return tl.where(bits == 9007199254740991, 0.9999999999999999, number)  # 2**53 - 1, 1 - 2**-53


@triton.jit
def rough_gumbel(bits):
    """Returns the same within 1e-4, in float32. Near 1 the logarithm follows from the distance to 1."""
    uniform = uniform_of(bits)
    rest = (1.0 - uniform).to(tl.float32)
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333333 + rest * 0.25)))
    return -tl.log(tl.where(rest < _SMALL, series, -tl.log(tl.minimum(uniform.to(tl.float32), 1.0 - _SMALL / 2))))


@triton.jit
def natural_log(x):
    """Returns ln(x) of positive, normal float64 numbers."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52  # x = 2**exponent * m, with m from sqrt(1/2) to sqrt(2)
    m = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    r = z * 1.479819860511658591e-01 + 1.531383769920937332e-01
    r = r * z + 1.818357216161805012e-01
    r = r * z + 2.222219843214978396e-01
    r = r * z + 2.857142874366239149e-01
    r = r * z + 3.999999999940941908e-01
    r = r * z + 6.666666666666735130e-01
    return exponent.to(tl.float64) * _LN_2 + s * (r * z + 2.0)
