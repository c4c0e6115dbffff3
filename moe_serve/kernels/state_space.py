"""The recurrence of Mamba-2's state-space layers (arXiv:2405.21060), behind a causal convolution.

Each head of a request has a matrix S, [state_width, head_width], that its tokens change one after the other:

    S = decay * S + k (step * v);  out = q S + skip * v

v, k and q (x, B and C in the paper) are convolved columns of the token, of which the heads of a group share k and q.
step = softplus(the token's number for the head + step_bias), decay = exp(-exp(A_log) * step). Tokens are computed one
by one, in float32: nothing depends on how a sequence is cut into chunks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import MambaShape
from moe_serve.kernels.sequence_states import SequenceStates, rows_with_states


@dataclass(frozen=True, eq=False)
class StateSpaceWeights:
    """What heads have beside their projections, [heads] float32. decay: -exp(A_log)"""

    shape: MambaShape
    decay: Tensor
    step_bias: Tensor
    skip: Tensor


def state_space_reference(
    mixed: Tensor, steps: Tensor, weights: StateSpaceWeights, states: Tensor, sequences: SequenceStates
) -> Tensor:
    """Returns what the heads make of convolved rows, [T, heads * head_width]; zeros behind the last sequence.

    mixed:  [T, conv.channels]: the values of all heads, then keys and then queries of all groups
    steps:  [T, heads]
    states: by slot, float32, [slots, heads, tiles, state_width, 32]
    """
    shape = weights.shape
    wide, wide_steps = mixed.float(), steps.float()
    out = mixed.new_zeros(mixed.shape[0], shape.heads, shape.head_width)
    for row, (state,) in rows_with_states(sequences, [states]):
        out[row] = _token(wide[row], wide_steps[row], weights, state).to(mixed.dtype)
    return out.flatten(1)


def _token(row: Tensor, steps: Tensor, weights: StateSpaceWeights, state: Tensor) -> Tensor:
    """Returns what one row gives, [heads, head_width]; the state goes on by a token."""
    shape = weights.shape
    shared = shape.groups * shape.state_width
    v, k, q = torch.split(row, [shape.inner, shared, shared])
    v = v.view(shape.heads, shape.head_width)
    k, q = (each.view(shape.groups, -1).repeat_interleave(shape.heads // shape.groups, 0) for each in (k, q))
    step = functional.softplus(steps + weights.step_bias)
    decay = (weights.decay * step).exp()
    matrix = state.transpose(1, 2).flatten(2)[..., : shape.head_width] * decay[:, None, None]
    matrix = matrix + k[:, :, None] * (v * step[:, None])[:, None]
    padded = functional.pad(matrix, (0, state.shape[1] * state.shape[3] - shape.head_width))
    state.copy_(padded.view(shape.heads, shape.state_width, -1, state.shape[3]).transpose(1, 2))
    return (matrix * q[:, :, None]).sum(1) + weights.skip[:, None] * v
