"""The recurrence of state-space layers of Mamba's first version (arXiv:2312.00752), behind a causal convolution.

Each channel of a request has a vector s, [state_width], that its tokens change one after the other:

    s = exp(decay * step) * s + k (step * v);  out = (q s + skip * v) * silu(gate)

v is the channel's convolved column of the token; k and q (B and C in the paper) are shared by all channels. step =
softplus(the token's number for the channel + step_bias), decay = -exp(A_log), a number of each channel and row of the
state. Tokens are computed one by one, in float32: nothing depends on how a sequence is cut into chunks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import DELTA_TILE, SelectiveShape
from moe_serve.kernels.sequence_states import SequenceStates, rows_with_states


@dataclass(frozen=True, eq=False)
class SelectiveWeights:
    """What channels have beside their projections, float32.

    decay: [tiles, state_width, 32], as states lie, 0 behind the last channel;  step_bias, skip: [inner]
    """

    shape: SelectiveShape
    decay: Tensor
    step_bias: Tensor
    skip: Tensor


@dataclass(frozen=True, eq=False)
class SelectiveRows:
    """What a step's rows give to the channels.

    v, steps, gates: [T, inner];  shared: [T, 2 * state_width], keys, then queries
    """

    v: Tensor
    steps: Tensor
    shared: Tensor
    gates: Tensor


def in_tiles(channels: Tensor) -> Tensor:
    """Returns numbers of channels, [inner, state_width], in tiles of columns, [tiles, state_width, 32]."""
    inner, width = channels.shape
    padded = functional.pad(channels, (0, 0, 0, -inner % DELTA_TILE))
    return padded.view(-1, DELTA_TILE, width).transpose(1, 2).contiguous()


def selective_space_reference(
    rows: SelectiveRows, weights: SelectiveWeights, states: Tensor, sequences: SequenceStates
) -> Tensor:
    """Returns what the channels make of convolved rows, [T, inner]; zeros behind the last sequence.

    states: by slot, float32, [slots, tiles, state_width, 32]
    """
    out = torch.zeros_like(rows.v)
    v, steps, shared, gates = (each.float() for each in (rows.v, rows.steps, rows.shared, rows.gates))
    for row, (state,) in rows_with_states(sequences, [states]):
        given = _token(v[row], steps[row], shared[row], weights, state)
        out[row] = (given * functional.silu(gates[row])).to(out.dtype)
    return out


def _token(v: Tensor, steps: Tensor, shared: Tensor, weights: SelectiveWeights, state: Tensor) -> Tensor:
    """Returns what one row gives, [inner]; the state goes on by a token."""
    k, q = shared.chunk(2)
    pad = (0, -weights.shape.inner % DELTA_TILE)
    step = functional.pad(functional.softplus(steps + weights.step_bias), pad).view(-1, 1, DELTA_TILE)
    values = functional.pad(v, pad).view(-1, 1, DELTA_TILE) * step
    state.copy_(state * (weights.decay * step).exp() + k[:, None] * values)
    given = (state * q[:, None]).sum(1).flatten()[: weights.shape.inner]
    return given + weights.skip * v
