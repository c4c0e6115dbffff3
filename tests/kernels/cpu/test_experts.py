import itertools

import pytest
import torch

from moe_serve.kernels.cpu.experts import PackedExperts, packed_ffn
from moe_serve.kernels.cpu.packed import gate_up_size, pack, pack_gate_up, packed_size
from tests.tolerance import FLOAT32, relative_error

ROWS = (0, 1, 70, 7, 3)


def packed_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
    slots, hidden, width = down.shape
    packed = PackedExperts(
        gate_up.new_empty(slots, gate_up_size(width, hidden)), down.new_empty(slots, packed_size(hidden, width)),
        hidden, width,
    )  # fmt: skip
    for slot in range(slots):
        pack_gate_up(gate_up[slot], packed.gate_up[slot])
        pack(down[slot], packed.down[slot])
    return packed


def reference(x: torch.Tensor, slot_of_row: list[int], gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, slot in zip(x.double(), slot_of_row, strict=True):
        gate, up = (gate_up[slot].double() @ row).chunk(2)
        rows.append(down[slot].double() @ (torch.nn.functional.silu(gate) * up))
    return torch.stack(rows)


@pytest.mark.parametrize("slab_rows", (0, 70))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_experts_match_their_reference(dtype, slab_rows, library):
    counts = torch.tensor(ROWS)
    slot_of_row = torch.repeat_interleave(counts).tolist()
    places = [slot * slab_rows + nth for slot, rows in enumerate(ROWS) for nth in range(rows)]
    for hidden, width, threads in itertools.product((40, 513), (16, 33, 100), (1, 2)):
        library.set_threads(threads)
        gate_up = (torch.randn(len(ROWS), 2 * width, hidden) / hidden**0.5).to(dtype)
        down = (torch.randn(len(ROWS), hidden, width) / width**0.5).to(dtype)
        rows = torch.randn(len(places), hidden)
        wanted = reference(rows, slot_of_row, gate_up, down)
        if slab_rows:
            x = torch.full((len(ROWS) * slab_rows, hidden), float("nan"))
            x[places] = rows
            got = packed_ffn(x, counts, packed_experts(gate_up, down), slab_rows=slab_rows)[places]
        else:
            got = packed_ffn(rows, counts, packed_experts(gate_up, down))
        assert relative_error(got, wanted) < FLOAT32, (hidden, width)
