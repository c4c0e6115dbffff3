"""Attention over the paged cache by compiled kernels, for decode rows and chunks of a prefill alike.

The contract is that of attention_dp/attention.py (`attention_reference`). A row's bits depend on its own query and on
the keys that it sees: chunks, other sequences and threads change nothing, and no other key is read. Working memory is
at most about 0.6 MiB per thread, whatever the lengths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_serve.kernels.cpu.checks import dense
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.cpu.rows import float_bits
from moe_serve.kernels.forms import AttendShape, Seen


class AttendRows:
    """The rows of one step: which sequence, position and blocks each has. Serves all layers of the step.

    address: of the blocks of int64 that attention.c reads, one of each shape of the layers
    """

    def __init__(
        self,
        shapes: Sequence[AttendShape],
        positions: Tensor,
        query_starts: Tensor,
        block_tables: Tensor,
        block_size: int,
    ):
        """Checks the rows, and cuts them into pieces for the threads.

        shapes:       of the layers, each once
        positions:    [T] int64, not falling within a sequence; a row sees keys up to its own
        query_starts: [num_seqs + 1] int32, first row of each sequence; T at the end
        block_tables: [num_seqs, blocks] int32, of any row stride
        """
        num_seqs, table_width = block_tables.shape
        assert dense(positions, torch.int64), f"positions of {positions.dtype}"
        assert dense(query_starts, torch.int32, num_seqs + 1), f"{query_starts.dtype} {tuple(query_starts.shape)}"
        assert block_tables.dtype == torch.int32, f"block tables of {block_tables.dtype}"
        assert table_width < 2 or block_tables.stride(1) == 1, f"block tables with strides {block_tables.stride()}"
        self.num_rows = positions.shape[0]
        pieces = torch.empty(len(shapes), num_seqs + 1, dtype=torch.int64)
        self._kept = (positions, query_starts, block_tables, pieces)  # the facts hold their addresses
        facts = []
        for shape, of_shape in zip(shapes, pieces, strict=True):
            assert shape.latent is None or shape.heads == 1, f"{shape.heads} key/value heads share a latent"
            value_at = shape.heads * shape.width if shape.latent is None else 0
            slot_heads, width = shape.row_shape
            facts.append([
                num_seqs, self.num_rows, shape.heads, shape.group, width, shape.value_width,
                value_at, width, slot_heads * width, block_size, block_tables.stride(0), table_width,
                *(tensor.data_ptr() for tensor in (*self._kept[:3], of_shape)), float_bits(shape.scale),
            ])  # fmt: skip
        self._facts = torch.tensor(facts)
        self.address = self._facts.data_ptr()
        self._each = [of_shape.data_ptr() for of_shape in self._facts]
        self.plan()

    def plan(self) -> None:
        """Cuts the rows into pieces anew, after positions, starts and tables were changed in place."""
        for address in self._each:
            if cpu_library().call.attend_plan(address) < 0:
                num_seqs, table_width = self._kept[2].shape
                raise IndexError(f"rows or positions lie outside of {num_seqs} block tables of {table_width} blocks")


def attend_options(shape: AttendShape, seen: Seen) -> tuple[int, int, int]:
    """Returns window, sinks and chunk as attention.c takes them. The caller keeps the sinks, which are float32."""
    window, sinks, chunk = seen.window, seen.sinks, seen.chunk
    assert chunk is None or (chunk > 0 and window is None), f"chunks of {chunk} keys and a window of {window}"
    assert window is None or window > 0, f"a window of {window} keys"
    assert sinks is None or dense(sinks, torch.float32, shape.heads * shape.group), f"sinks {tuple(sinks.shape)}"
    return window or 0, 0 if sinks is None else sinks.data_ptr(), chunk or 0
