"""Linear attention by the gated delta rule (arXiv:2412.06464), behind a short causal convolution.

Each value head of a request has a matrix S, [key_width, value_width], that its tokens change one after the other:

    S = decay * S;  S = S + k (beta * (v - k S));  out = q S

q, k and v are the projections of the token behind a convolution over it and the `taps - 1` tokens before it, and silu;
q and k have length 1 (q then / sqrt(key_width)), decay = exp(-exp(A_log) * softplus(step + step_bias)), beta =
sigmoid(strength). What comes out is normed by head and multiplied by silu of the token's gate. So a request's state is
S and the last `taps - 1` projections. Tokens are computed one by one, in float32: nothing depends on how a sequence is
cut into chunks.

Kimi Delta Attention (arXiv:2510.26692) has a step, and so a decay, for each row of S, and multiplies by the sigmoid of
the gate; its steps and gates are projected in two, so they come in rows of their own. Ling-3.0 bounds its decays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import DeltaShape
from moe_serve.kernels.rows import rms_norm
from moe_serve.kernels.sequence_states import SequenceStates, rows_with_states

_LENGTH_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """What a layer of the gated delta rule has beside its projections, float32.

    conv: [taps, channels], the oldest token first;  decay: -exp(A_log), [value_heads];  step_bias: [num_steps]
    norm: [value_width]
    """

    shape: DeltaShape
    conv: Tensor
    decay: Tensor
    step_bias: Tensor
    norm: Tensor
    eps: float


def columns_of(shape: DeltaShape) -> Tensor:
    """Returns where the parts of each value head begin in a projected row, [value_heads, 6] int64.

    The parts: query, key, value, gate, step, strength.
    """
    group, kw, vw = shape.value_heads // shape.key_heads, shape.key_width, shape.value_width
    head = torch.arange(shape.value_heads)
    key_head, place = head // group, head % group
    keys, values = shape.key_heads * kw, shape.value_heads * vw
    scalars = 2 * (keys + values)
    if shape.rank is not None:
        query, value = head * kw, 2 * keys + head * vw
        strength = 2 * keys + values + head
        parts = (query, query + keys, value, torch.zeros_like(head), torch.zeros_like(head), strength)
    elif shape.grouped:
        first = key_head * 2 * (kw + group * vw)
        value = first + 2 * kw + place * vw
        strength = scalars + key_head * 2 * group + place
        parts = (first, first + kw, value, value + group * vw, strength + group, strength)
    else:
        query, value, strength = key_head * kw, 2 * keys + head * vw, scalars + head
        parts = (query, query + keys, value, value + values, strength + shape.value_heads, strength)
    return torch.stack(parts, 1)


def delta_rule_reference(
    rows: Tensor,
    apart: tuple[Tensor, Tensor] | None,
    weights: DeltaWeights,
    pools: Sequence[Tensor],
    sequences: SequenceStates,
) -> Tensor:
    """Returns what the layer makes of projected rows, [T, value_heads * value_width]; zeros behind the last sequence.

    rows:  [T, row_width]
    apart: where rows do not hold them, steps [T, num_steps] and gates [T, value_heads * value_width]
    pools: states by slot, float32: before the convolution [slots, taps - 1, channels], and
           [slots, value_heads, tiles, key_width, 32]
    """
    shape = weights.shape
    wide, out = rows.float(), rows.new_zeros(rows.shape[0], shape.value_heads, shape.value_width)
    columns = columns_of(shape)
    gate_columns = columns[:, 3, None] + torch.arange(shape.value_width)
    for row, states in rows_with_states(sequences, pools):
        if apart is None:
            steps, gates = wide[row, columns[:, 4]], functional.silu(wide[row, gate_columns])
        else:
            steps, gates = (each[row].float() for each in apart)
            gates = gates.sigmoid().view(shape.value_heads, -1)
        given = _token(wide[row], steps, weights, columns, *states)
        out[row] = (given * gates).to(rows.dtype)
    return out.flatten(1)


def _token(
    row: Tensor, steps: Tensor, weights: DeltaWeights, columns: Tensor, conv_state: Tensor, state: Tensor
) -> Tensor:
    """Returns what one projected row gives without its gates, [value_heads, value_width]; states go on by a token."""
    shape = weights.shape
    query, key, value = (columns[:, part, None] for part in range(3))
    of_key, of_value = torch.arange(shape.key_width), torch.arange(shape.value_width)
    key_rows = torch.arange(shape.key_heads) * (shape.value_heads // shape.key_heads)  # one value head of each
    order = [(query[key_rows] + of_key), (key[key_rows] + of_key), (value + of_value)]
    now = row[torch.cat([each.flatten() for each in order])]
    window = torch.cat((conv_state, now[None]))
    conv_state.copy_(window[1:].clone())
    mixed = functional.silu((window * weights.conv).sum(0))
    sizes = [shape.key_heads * shape.key_width] * 2 + [shape.value_heads * shape.value_width]
    q, k, v = (part.view(-1, part.shape[0] // heads) for part, heads in zip(
        torch.split(mixed, sizes), (shape.key_heads, shape.key_heads, shape.value_heads), strict=True
    ))  # fmt: skip
    q, k = (
        (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + _LENGTH_EPS)).repeat_interleave(
            shape.value_heads // shape.key_heads, 0
        )
        for each in (q, k)
    )
    strength = row[columns[:, 5]]
    steps = (steps + weights.step_bias).view(shape.value_heads, -1)  # of each head, or of each of its key channels
    if shape.bound is None:
        decay = (weights.decay[:, None] * functional.softplus(steps)).exp()
    else:
        decay = (shape.bound * (-weights.decay[:, None] * steps).sigmoid()).exp()
    matrix = state.transpose(1, 2).flatten(2)[..., : shape.value_width] * decay[:, :, None]
    change = (v - (matrix * k[:, :, None]).sum(1)) * strength.sigmoid()[:, None]
    matrix = matrix + k[:, :, None] * change[:, None]
    padded = functional.pad(matrix, (0, state.shape[1] * state.shape[3] - shape.value_width))
    state.copy_(padded.view(shape.value_heads, shape.key_width, -1, state.shape[3]).transpose(1, 2))
    asked = (matrix * (q * shape.key_width**-0.5)[:, :, None]).sum(1)
    return rms_norm(asked, weights.norm, weights.eps)
