"""Draws one token for each row of logits, in torch: the same as the compiled kernels (kernels/cpu/sampling.py,
kernels/triton/sampling.py).

A token is a pure function of its own row: logits, parameters, seed and output index. Gumbel noise is added to the
logits over the temperature, and the largest sum wins; equal sums go to the lowest id.

A token's noise is a pure function of (seed, output index, token id): philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) gives a uniform number, which becomes Gumbel noise. Noise and weights are made of
integers and float64 additions, multiplications and divisions, each rounded by itself, and every operation that changes
a logit is one float32 operation. So every device and the kernel give the same tokens; a library's log and exp differ in
their last bits.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# How one token's logit changes; the kernel reads this as a C struct. In vLLM's order (v1/sample/sampler.py): + bias;
# / repetition where the logit is above 0, x repetition where it is not; - frequency; - presence.
EDIT = np.dtype([("token", "i8"), ("bias", "f4"), ("repetition", "f4"), ("frequency", "f4"), ("presence", "f4")])
NO_EDITS = np.zeros(0, EDIT)
NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Changes of one row's logits. Token ids are below the size of the vocabulary.

    edits:  [num_edits] EDIT, at most one for each token
    banned: [num_banned] int64, ids that may not be drawn
    mask:   [ceil(vocab / 32)] int32; token i may be drawn where bit i % 32 of word i // 32 is set. None = all tokens
    """

    edits: NDArray[np.void] = field(default_factory=lambda: NO_EDITS)
    banned: NDArray[np.int64] = field(default_factory=lambda: NO_IDS)
    mask: NDArray[np.int32] | None = None


def change_logits(logits: Tensor, changes: Sequence[LogitChanges | None]) -> None:
    """Makes the changes of each row in place. logits: [num_rows, vocab] float32"""
    changed = [(row, each) for row, each in enumerate(changes) if each is not None]
    _edit(logits, [(row, each.edits) for row, each in changed if each.edits.size])
    for row, each in changed:
        if each.banned.size:
            logits[row, torch.from_numpy(each.banned).to(logits.device)] = -torch.inf
        if each.mask is not None:
            allowed = np.unpackbits(each.mask.view(np.uint8), count=logits.shape[1], bitorder="little")
            logits[row].masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)


def _edit(logits: Tensor, edits: Sequence[tuple[int, NDArray[np.void]]]) -> None:
    if not edits:
        return
    rows = np.repeat([row for row, _ in edits], [len(each) for _, each in edits])
    every = np.concatenate([each for _, each in edits])
    at = torch.from_numpy(np.stack([rows, every["token"]])).to(logits.device)
    names = ("bias", "repetition", "frequency", "presence")
    numbers = torch.from_numpy(np.stack([every[name] for name in names])).to(logits.device)
    bias, repetition, frequency, presence = numbers
    values = logits[at[0], at[1]] + bias
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[at[0], at[1]] = values - frequency - presence


# How one row's token is chosen; the kernel reads this as a C struct.
# temperature: 0 = the largest logit; top_k: -1 = all; top_p, min_p: 1.0 and 0.0 = all
SAMPLING_ROW = np.dtype(
    [
        ("temperature", "f8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("top_k", "i8"),
        ("seed", "i8"),
        ("output_index", "i8"),
    ]
)
pack_sampling_row = struct.Struct("=dddqqq").pack  # the bytes of one, in a tenth of numpy's time
NOT_FINITE = -1  # instead of a token: the largest logit is not a finite number
NONE_LEFT = -2  # instead of a token: the row's changes leave none
# Logits that are worked on at a time: tensors of 32 MiB on GPUs, tensors that fit into a cache on CPUs.
_CUDA_ELEMENTS, _CPU_ELEMENTS = 2**22, 2**18
_CPU_NOISE_ELEMENTS = 2**16
_LOG_ERROR = 1e-9  # far above that of torch.log, far below the usual distance of the two largest sums


@dataclass(frozen=True)
class SamplingRows:
    """The parameters by which the tokens of a batch are chosen.

    rows:    [num_rows] SAMPLING_ROW
    changes: of each row's logits; may be set anew between two calls; empty: of no row
    """

    rows: NDArray[np.void]
    changes: list[LogitChanges | None] = field(default_factory=list)


@torch.inference_mode()
def sample_rows_reference(logits: Tensor, sampling: SamplingRows) -> list[int]:
    """Returns the token id of each row, or NOT_FINITE or NONE_LEFT.

    logits: [num_rows, vocab] float32 on CPU; changed in place

    top_k keeps the largest logits, equal ones by id. Of these, top_p keeps the fewest whose probability among them adds
    up to top_p. Of these, min_p keeps those whose probability is at least min_p times the largest one's.
    """
    if logits.shape[0] == 0:
        return []
    sound = some_left = logits.amax(dim=1).isfinite()  # NaN if any is
    if any(sampling.changes):
        # Whatever the changes make of a row without a finite maximum, it has no token.
        changed = zip(sampling.changes, sound.tolist(), strict=True)
        change_logits(logits, [each if is_sound else None for each, is_sound in changed])
        some_left = logits.amax(dim=1).isfinite()
    if (sampling.rows["temperature"] > 0).all():
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)  # all are drawn below
    else:
        tokens = logits.argmax(dim=1)  # of equal logits the first
    at_once = max(1, _CPU_ELEMENTS // logits.shape[1])
    for chosen in _groups(sampling.rows, logits.shape[1], at_once):
        at = torch.from_numpy(chosen).to(logits.device)
        masked = logits[at].masked_fill(~some_left[at, None], 0.0)
        tokens[at] = _draw(masked, _Parameters(sampling.rows[chosen], logits))
    found: list[int] = torch.where(sound, torch.where(some_left, tokens, NONE_LEFT), NOT_FINITE).tolist()
    return found


def _groups(rows: NDArray[np.void], vocab: int, at_once: int) -> list[NDArray[np.int64]]:
    """Returns the indices of the rows that draw, those together that filter alike, `at_once` at most."""
    limited = (rows["top_k"] > 0) & (rows["top_k"] < vocab)
    kinds = np.where(limited, 2, rows["top_p"] < 1.0)
    draws = rows["temperature"] > 0
    members = [np.flatnonzero(draws & (kinds == kind)) for kind in range(3)]
    return [group[i : i + at_once] for group in members for i in range(0, len(group), at_once)]


class _Parameters:
    """The parameters of some rows as columns [num_rows, 1] on the device of the logits."""

    def __init__(self, rows: NDArray[np.void], logits: Tensor):
        with np.errstate(over="ignore", divide="ignore"):
            inverse = np.minimum(1.0 / rows["temperature"], np.finfo(np.float64).max)
        numbers = torch.from_numpy(np.stack([inverse, rows["top_p"], rows["min_p"]]))
        integers = torch.from_numpy(np.stack([rows["top_k"], rows["seed"], rows["output_index"]]))
        self.inverse_temperature, self.top_p, self.min_p = numbers.to(logits.device)[:, :, None]
        self.top_k, self.seed, self.output_index = integers.to(logits.device)[:, :, None]
        vocab = logits.shape[1]
        self.top_k = torch.where(self.top_k < 0, vocab, self.top_k)
        self.max_top_k = vocab if (rows["top_k"] < 0).any() else min(vocab, int(rows["top_k"].max()))
        self.has_min_p = bool((rows["min_p"] > 0).any())
        self.filters = self.max_top_k < vocab or bool((rows["top_p"] < 1.0).any())


def _draw(logits: Tensor, parameters: _Parameters) -> Tensor:
    """Returns the token ids, [num_rows] int64, of rows with finite maxima and temperatures above 0."""
    top = logits.amax(dim=1, keepdim=True).to(torch.float64)
    if parameters.filters:
        values, ids = likeliest(logits, parameters.max_top_k)
    else:
        values, ids = logits, torch.arange(logits.shape[1], device=logits.device)[None]
    scaled = (values.to(torch.float64) - top) * parameters.inverse_temperature
    if parameters.filters:
        remains = _in_top_k_and_top_p(scaled, parameters)
        scaled = scaled.masked_fill(~remains, -torch.inf)
        count = int(remains.sum(dim=1).max())  # the likeliest ones stand first
        scaled, ids = scaled[:, :count], ids[:, :count]
    if parameters.has_min_p:
        log_min_p = torch.where(parameters.min_p > 0, natural_log(parameters.min_p), -torch.inf)
        scaled = scaled.masked_fill(scaled < log_min_p, -torch.inf)
    return _largest_sum(scaled, ids, parameters)


def _largest_sum(scaled: Tensor, ids: Tensor, parameters: _Parameters) -> Tensor:
    """Returns the id of the largest sum of scaled logit and noise, of equal sums the lowest id.

    scaled: [num_rows, num_ids];  ids: the same, or [1, num_ids] of all rows
    """
    seed, index = parameters.seed, parameters.output_index
    width = max(1, _CPU_NOISE_ELEMENTS // scaled.shape[0])
    starts = range(0, ids.shape[1], width)
    noise = [gumbel(seed, index, ids[:, start : start + width], torch.log) for start in starts]
    ids, near = ids.expand_as(scaled), scaled + torch.cat(noise, dim=1)
    count = int((near >= near.amax(dim=1, keepdim=True) - _LOG_ERROR).count_nonzero(dim=1).max())
    if count == 1:  # as a rule
        return ids.gather(1, near.argmax(dim=1, keepdim=True))[:, 0]
    at = near.topk(count, dim=1).indices
    ids = ids.gather(1, at)
    sums = scaled.gather(1, at) + gumbel(seed, index, ids)
    lost = sums < sums.amax(dim=1, keepdim=True)
    return ids.masked_fill(lost, torch.iinfo(torch.int64).max).amin(dim=1)  # of equal sums the lowest id


def _in_top_k_and_top_p(scaled: Tensor, parameters: _Parameters) -> Tensor:
    """Returns which tokens top_k and then top_p keep, of tokens in the order of `likeliest`."""
    in_top_k = torch.arange(scaled.shape[1], device=scaled.device)[None] < parameters.top_k
    weights = token_weights(scaled).masked_fill(~in_top_k, 0)
    upto = weights.cumsum(dim=1)
    total = upto[:, -1:]
    limit = (total.to(torch.float64) * parameters.top_p).ceil().to(torch.int64).minimum(total)
    in_top_p = (upto - weights < limit) | (parameters.top_p >= 1.0)
    return torch.logical_and(in_top_k, in_top_p)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns at least the `count` largest logits of each row, largest first and equal ones by id, and their ids."""
    logits = logits + 0.0  # no negative zeros, which some sorts put behind zeros
    if count == logits.shape[1]:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    least = logits.topk(count, dim=1).values[:, -1:]
    count = int((logits >= least).sum(dim=1).max())  # equal ones included, of which topk takes any
    ids = logits.topk(count, dim=1).indices.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


Integers = NDArray[np.int64]

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LN_2 = 0.69314718055994530942
_LOG_SERIES = (  # of atanh: 2 / 3, 2 / 5, ... fitted, the last one first (fdlibm's numbers)
    1.479819860510658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)
_EXP_SERIES = (1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
_UNIT_BITS = 40  # a weight of 1 is 2**40: sums of a million tokens fit into int64


def natural_log(x: Tensor) -> Tensor:
    """Returns ln(x) of positive, normal float64 numbers; the last bit may be off, alike everywhere."""
    bits = x.view(torch.int64)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52  # x = 2**exponent * m, with m from sqrt(1/2) to sqrt(2)
    m = (bits - (exponent << 52)).view(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    return exponent.to(torch.float64) * _LN_2 + s * (_series(_LOG_SERIES, z) * z + 2.0)


def gumbel(
    seeds: Tensor, output_indices: Tensor, token_ids: Tensor, log: Callable[[Tensor], Tensor] = natural_log
) -> Tensor:
    """Returns one Gumbel(0, 1) number for each token id, float64; the tensors, int64, are broadcast.

    log: torch.log is five times as fast, but a device's own in the last bits
    """
    # By numpy, which takes two thirds of the time of torch for these operations, and less for few ids.
    bits = torch.from_numpy(_random_bits(seeds.numpy(), output_indices.numpy(), token_ids.numpy()))
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-53)
    uniform.clamp_(max=1 - 2.0**-53)  # in (0, 1), never an end: the last number of 53 bits would be rounded to 1
    return log(log(uniform).neg_()).neg_()


def _random_bits(seeds: Integers, output_indices: Integers, token_ids: Integers) -> Integers:
    """Returns 53 random bits for each token id."""
    high, low, _, _ = philox(token_ids, output_indices, (seeds & _LOW, seeds >> 32))
    high >>= 5
    high <<= 26
    low >>= 6
    high += low
    return high


def philox(
    first: Integers, second: Integers, key: tuple[Integers, Integers]
) -> tuple[Integers, Integers, Integers, Integers]:
    """Returns the four 32-bit words of philox4x32-10, as int64.

    first, second: int64, of which 32 bits are the first two counter words; the other two are zero
    key:           two of int64 below 2**32; all four are broadcast
    """
    c0: Any = (first & _LOW) + key[0] * 0
    c1: Any = second + c0 * 0
    c2, c3 = c0 * 0, c0 * 0
    k0, k1 = key
    for _ in range(10):
        c0 *= _MULTIPLIERS[0]  # products of 64 bits, the highest one as the sign
        c2 *= _MULTIPLIERS[1]
        high0, high1 = c0 >> 32, c2 >> 32
        high1 ^= c1
        high1 ^= k0
        high1 &= _LOW
        high0 ^= c3
        high0 ^= k1
        high0 &= _LOW
        c0, c1, c2, c3 = high1, c2, high0, c0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1 & _LOW, c2, c3 & _LOW


def token_weights(scaled: Tensor) -> Tensor:
    """Returns exp(scaled) in units of 2**-40, int64, for float64 numbers of at most 0; accurate to 3e-10.

    Sums of these integers are exact, so they do not depend on the order of the tokens.
    """
    s = scaled.clamp(min=-40.0)
    n = (s * (1 / _LN_2)).round()
    p = _series(_EXP_SERIES, s - n * _LN_2)
    unit = ((n.to(torch.int64) + (1023 + _UNIT_BITS)) << 52).view(torch.float64)  # 2**(n + 40)
    return (p * unit).round().to(torch.int64)


def _series(factors: tuple[float, ...], x: Tensor) -> Tensor:
    """Returns the polynomial with these factors, that of the highest power first."""
    total = x * factors[0] + factors[1]
    for factor in factors[2:]:
        total = total * x + factor
    return total


# ---- log probabilities
# A token's log probability is its logit minus the largest one, minus ln of the sum of exp over the vocabulary, in
# float64 and rounded to float32. The sum is one of integers (`sampling.token_weights`), so it is exact in any order: a
# row's numbers depend on that row only, and this twin and the kernel give the same bits. They are within 1e-6 of those
# of a softmax in float64.


@dataclass(frozen=True)
class WantedLogprobs:
    """The log probabilities to compute for each row.

    id_starts: [num_rows + 1] int64, row i wants those of ids[id_starts[i] : id_starts[i + 1]], one at least
    ids:       int64, each below the size of the vocabulary; the first of each row is the token whose rank is wanted
    num_top:   [num_rows] int64, and those of so many likeliest tokens, at most the vocabulary
    """

    id_starts: NDArray[np.int64]
    ids: NDArray[np.int64]
    num_top: NDArray[np.int64]

    @property
    def top_starts(self) -> NDArray[np.int64]:
        """[num_rows + 1] int64, where the likeliest tokens of each row begin in the answer."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.num_top, dtype=np.int64)])


class RowLogprobs(NamedTuple):
    """The log probabilities of some rows.

    ranks:        [num_rows] int64, 1 for the likeliest token; of equal ones the lowest id comes first; 0 where the
                  row's largest logit is not finite: its other numbers mean nothing
    logprobs:     [len(ids)] float32
    top_ids:      [sum of num_top] int64, likeliest first, equal ones by id
    top_logprobs: the same shape, float32
    """

    ranks: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def zeros(cls, wanted: WantedLogprobs) -> "RowLogprobs":
        """Returns memory for what is wanted."""
        ranks, top_ids = (np.zeros(size, np.int64) for size in (len(wanted.num_top), wanted.num_top.sum()))
        logprobs, top_logprobs = (np.zeros(len(ids), np.float32) for ids in (wanted.ids, top_ids))
        return cls(ranks, logprobs, top_ids, top_logprobs)


@torch.inference_mode()
def row_logprobs_reference(logits: Tensor, wanted: WantedLogprobs) -> RowLogprobs:
    """Returns the log probabilities that are wanted of each row. logits: [num_rows, vocab] float32, kept as they are"""
    num_rows, vocab = logits.shape
    top_starts, out = wanted.top_starts, RowLogprobs.zeros(wanted)
    at_once = max(1, (_CUDA_ELEMENTS if logits.is_cuda else _CPU_ELEMENTS) // vocab)
    for first in range(0, num_rows, at_once):
        _score(logits, slice(first, min(first + at_once, num_rows)), wanted, top_starts, out)
    return out


def _score(
    logits: Tensor, part: slice, wanted: WantedLogprobs, top_starts: NDArray[np.int64], out: RowLogprobs
) -> None:
    """Writes the numbers of some of the rows."""
    rows = logits[part]
    starts = wanted.id_starts[part.start : part.stop + 1]
    ids = torch.from_numpy(wanted.ids[starts[0] : starts[-1]]).to(rows.device)
    row_of_id = torch.from_numpy(np.repeat(np.arange(len(rows)), np.diff(starts))).to(rows.device)
    top = rows.amax(dim=1)
    sound = top.isfinite()
    rows, top = rows.masked_fill(~sound[:, None], 0.0), top.masked_fill(~sound, 0.0).to(torch.float64)
    total = token_weights(rows.to(torch.float64) - top[:, None]).sum(dim=1)
    log_total = natural_log(total.to(torch.float64) * 2.0**-40)

    def logprobs(values: Tensor, of_row: Tensor) -> NDArray[np.float32]:
        found = ((values.to(torch.float64) - top[of_row]) - log_total[of_row]).float().cpu()
        return found.numpy().astype(np.float32)

    out.logprobs[starts[0] : starts[-1]] = logprobs(rows[row_of_id, ids], row_of_id)
    firsts = ids[torch.from_numpy(starts[:-1] - starts[0]).to(rows.device)][:, None]
    own = rows.gather(1, firsts)
    ids_before = torch.arange(rows.shape[1], device=rows.device)[None] < firsts
    ranks = 1 + (rows > own).sum(dim=1) + ((rows == own) & ids_before).sum(dim=1)
    out.ranks[part] = ranks.masked_fill(~sound, 0).cpu().numpy()
    counts = wanted.num_top[part]
    if not counts.any():
        return
    values, order = likeliest(rows, int(counts.max()))
    row_of_top = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(rows.device)
    places = torch.from_numpy(np.concatenate([np.arange(count) for count in counts])).to(rows.device)
    at = slice(top_starts[part.start], top_starts[part.stop])
    out.top_ids[at] = order[row_of_top, places].cpu().numpy()
    out.top_logprobs[at] = logprobs(values[row_of_top, places], row_of_top)
