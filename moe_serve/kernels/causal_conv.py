"""A causal convolution over the tokens of each sequence, column by column, as LFM2 and state-space layers have it.

    out[t] = bias + sum over taps of weight[tap] * x[t - (taps - 1) + tap]

x may be multiplied by other columns of the row first, and so may the results; they may go through silu between. A
request's state is the last `taps - 1` rows of x. A result is made of numbers of its column alone, in the order of the
taps: nothing depends on how a sequence is cut into chunks.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import ConvShape
from moe_serve.kernels.sequence_states import NO_SLOT, SequenceStates, copies_of


@dataclass(frozen=True, eq=False)
class ConvWeights:
    """The weights of a convolution, float32. weight: [taps, channels], the oldest token first;  bias: [channels]"""

    shape: ConvShape
    weight: Tensor
    bias: Tensor


def causal_conv_reference(rows: Tensor, weights: ConvWeights, states: Tensor, sequences: SequenceStates) -> Tensor:
    """Returns the results of rows [T, width], [T, channels]; zeros behind the last sequence.

    states: by slot, float32, [slots, taps - 1, channels]
    """
    shape = weights.shape
    wide = rows.float()
    x = wide[:, shape.first : shape.first + shape.channels]
    if shape.before is not None:
        x = x * wide[:, shape.before : shape.before + shape.channels]
    out = torch.zeros_like(x)
    starts = sequences.query_starts.tolist()
    for (start, end), slots in zip(pairwise(starts), sequences.slots.tolist(), strict=True):
        if start == end:
            continue
        from_slot, to_slot = slots[:2]
        before = torch.zeros_like(states[0]) if from_slot == NO_SLOT else states[from_slot]
        window = torch.cat((before, x[start:end]))
        mixed = weights.bias.expand(end - start, -1)
        for tap in range(shape.taps):
            mixed = mixed + window[tap : tap + end - start] * weights.weight[tap]
        out[start:end] = mixed
        states[to_slot] = window[end - start :]
        for kept_after, slot in copies_of(slots).items():
            if kept_after <= end - start:
                states[slot] = window[kept_after : kept_after + shape.taps - 1]
    if shape.silu:  # the column of zeros ends the CPU loop with every row, as in rows.gate_
        out = functional.silu(functional.pad(out, (0, 1))[:, :-1])
    if shape.after is not None:
        out = out * wide[:, shape.after : shape.after + shape.channels]
    return out.to(rows.dtype)
