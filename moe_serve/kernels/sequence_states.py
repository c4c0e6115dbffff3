"""Where the layers of a step find the states of its sequences, and leave them: in slots of each layer's pools."""

import ctypes

import torch
from torch import Tensor

NO_SLOT = -1


class SequenceStates:
    """The slots of a step's sequences. Serves all layers of the step.

    query_starts: [num_seqs + 1] int32, first row of each sequence;  on the CPU
    slots:        [num_seqs, 4] int64: the slot that a state is read from, -1 = it is zero; the slot that it is written
                  to; after how many of its rows a copy is kept, and in which slot. No copy: 0
    address:      of the block of int64 that sequences.h describes
    """

    def __init__(self, query_starts: Tensor, slots: Tensor):
        num_seqs = slots.shape[0]
        assert query_starts.dtype == torch.int32 and query_starts.shape == (num_seqs + 1,), "starts of each sequence"  # noqa: PT018
        assert slots.dtype == torch.int64 and slots.is_contiguous(), f"slots of {slots.dtype}"  # noqa: PT018
        self.query_starts, self.slots = query_starts, slots
        self._facts = (ctypes.c_int64 * 3)(num_seqs, query_starts.data_ptr(), slots.data_ptr())
        self.address = ctypes.addressof(self._facts)
