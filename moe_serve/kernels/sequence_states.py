"""Where the layers of a step find the states of its sequences, and leave them: in slots of each layer's pools."""

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise

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


def rows_with_states(sequences: SequenceStates, pools: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yields every row of the sequences in order, and the states in the pools that the caller has go on by it.

    pools: by slot, [slots, ...]
    """
    for (start, end), slots in zip(pairwise(sequences.query_starts.tolist()), sequences.slots.tolist(), strict=True):
        if start == end:
            continue
        (from_slot, to_slot), copies = slots[:2], copies_of(slots)
        for pool in pools:
            pool[to_slot] = 0 if from_slot == NO_SLOT else pool[from_slot]
        for row in range(start, end):
            yield row, [pool[to_slot] for pool in pools]
            if (slot := copies.get(row + 1 - start)) is not None:
                for pool in pools:
                    pool[slot] = pool[to_slot]
