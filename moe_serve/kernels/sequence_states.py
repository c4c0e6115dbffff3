"""Where the layers of a step find the states of its sequences, and leave them: in slots of each layer's pools."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

NO_SLOT = -1


class SequenceStates:
    """The slots of a step's sequences. Serves all layers of the step.

    query_starts: [num_seqs + 1] int32, first row of each sequence;  on the CPU
    slots:        [num_seqs, 4 or more] int64: the slot that a state is read from, -1 = it is zero; the slot that it is
                  written to; after how many of its rows a copy is kept, and in which slot. No copy: 0. -n: a copy after
                  each of its first n rows, in as many slots
    address:      of the block of int64 that sequences.h describes
    """

    def __init__(self, query_starts: Tensor, slots: Tensor):
        num_seqs = slots.shape[0]
        assert query_starts.dtype == torch.int32 and query_starts.shape == (num_seqs + 1,), "starts of each sequence"  # noqa: PT018
        assert slots.dtype == torch.int64 and slots.is_contiguous(), f"slots of {slots.dtype}"  # noqa: PT018
        assert slots.shape[1] >= 4, f"slots of {slots.shape}"
        self.query_starts, self.slots = query_starts, slots
        self._facts = (ctypes.c_int64 * 4)(num_seqs, query_starts.data_ptr(), slots.data_ptr(), slots.shape[1])
        self.address = ctypes.addressof(self._facts)


def copies_of(slots: Sequence[int]) -> dict[int, int]:
    """Returns in which slots copies of a sequence's state are kept, by after how many of its rows."""
    after, *to = slots[2:]
    return {after: to[0]} if after > 0 else {number + 1: to[number] for number in range(-after)}
