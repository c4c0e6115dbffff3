"""What is done to a row of logits before its token is drawn: edits of single tokens, banned tokens, a mask of tokens.

The torch twin of kernels/cpu/logit_changes.h. Every operation is one float32 operation on one logit, each rounded by
itself, so both give the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
