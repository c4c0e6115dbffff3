"""How many choices of a request's gates the capacity of experts has changed, over its tokens and MoE layers.

The number of a token lies beside its keys and values in the KV cache, so a prefix that is reused, moved or handed over
brings its own.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # front ends load no torch
    from moe_serve.attention_dp.kv_cache import KvCache
    from moe_serve.attention_dp.request import Request


class ChangedCounts:
    """The numbers that a rank keeps beside its cache."""

    def __init__(self, cache: "KvCache"):
        self._counts = cache.changed_choices.numpy()
        self._block_size = cache.block_size

    def of(self, request: "Request") -> int:
        """Returns the sum over a request's computed tokens, each as first computed. It still holds its blocks."""
        first, end = request.num_changes_counted, request.num_known - 1  # the newest token has no row yet
        positions = np.arange(first, end)
        blocks = np.asarray(request.block_ids, dtype=np.int64)[positions // self._block_size]
        found = self._counts[blocks * self._block_size + positions % self._block_size]
        request.num_changes_counted = end
        request.num_changed += int(found.sum())
        return request.num_changed
