"""Expert slots keep their contents and their addresses; and the FFN over them."""

import pytest
import torch

from moe_serve.dispatch.base import MaskedRows, PackedRows
from moe_serve.ep.expert_store import ExpertStore, expert_ffn
from moe_serve.kernels.numerics import FAST, Numerics
from tests.tolerance import FLOAT32, relative_error


def draw_experts(slots: int, hidden: int, width: int) -> dict[str, torch.Tensor]:
    return {
        "gate_up": torch.randn(slots, 2 * width, hidden) / hidden**0.5,
        "down": torch.randn(slots, hidden, width) / width**0.5,
    }


def stored(experts: dict[str, torch.Tensor]) -> ExpertStore:
    return ExpertStore({name: tensor.clone() for name, tensor in experts.items()})


def ffn_reference(x: torch.Tensor, experts: dict[str, torch.Tensor], slot: int) -> torch.Tensor:
    gate, up = (x.double() @ experts["gate_up"][slot].double().T).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ experts["down"][slot].double().T


@pytest.mark.parametrize("slots, hidden, width", [(3, 16, 24), (1, 7, 5), (0, 8, 8)])
def test_matrices_hold_what_was_loaded_inside_the_same_memory(slots: int, hidden: int, width: int) -> None:
    experts = draw_experts(slots, hidden, width)
    given = {name: tensor.clone() for name, tensor in experts.items()}
    store = ExpertStore(given)
    assert store.names == ("gate_up", "down")
    for name, tensor in experts.items():
        assert torch.equal(store.matrix(name), tensor)
        assert store.matrix(name).data_ptr() == given[name].data_ptr()
    assert store.slot_bytes == 4 * 3 * hidden * width


def test_an_expert_moves_between_stores_and_addresses_stay() -> None:
    source, target = draw_experts(2, 12, 8), draw_experts(3, 12, 8)
    here, there = stored(source), stored(target)
    staging = there.staging(1)
    before = [there.matrix(name).data_ptr() for name in there.names]
    for name, tensor in here.slot(1).items():
        assert tensor.is_contiguous(), "it is sent as it lies in memory"
        staging.slot(0)[name].copy_(tensor)
    there.write_slot(2, staging.slot(0))
    for name in source:
        assert torch.equal(there.matrix(name)[2], source[name][1])
        assert torch.equal(there.matrix(name)[:2], target[name][:2])
    assert [there.matrix(name).data_ptr() for name in there.names] == before


@pytest.mark.parametrize("numerics", [FAST, Numerics(row_tile=4)], ids=["fast", "invariant"])
@pytest.mark.parametrize("rows", [[0, 0, 0], [1, 0, 7], [4, 4, 4], [0, 0, 60]], ids=str)
def test_packed_and_masked_rows_give_each_row_its_experts_output(numerics: Numerics, rows: list[int]) -> None:
    torch.manual_seed(0)
    experts = draw_experts(3, 24, 20)
    store, counts = stored(experts), torch.tensor(rows)
    x = torch.randn(sum(rows), 24)
    expected = torch.cat([ffn_reference(part, experts, s) for s, part in enumerate(torch.split(x, rows))])
    packed = expert_ffn(PackedRows(x, counts), store, numerics)
    assert relative_error(packed, expected) < FLOAT32

    slab = torch.full((3, max(rows) + 2, 24), float("nan"))
    filled = torch.arange(slab.shape[1]) < counts[:, None]
    slab[filled] = x
    masked = expert_ffn(MaskedRows(slab, counts), store, numerics)
    assert masked.shape == slab.shape
    assert relative_error(masked[filled], expected) < FLOAT32
    if numerics.invariant:
        assert torch.equal(masked[filled], packed), "both layouts give the same bits"


@pytest.mark.parametrize("hidden, width", [(64, 48), (24, 7), (130, 33)])
def test_in_batch_invariant_an_experts_output_is_bitwise_the_rows_own(hidden: int, width: int) -> None:
    torch.manual_seed(0)
    store = stored(draw_experts(2, hidden, width))
    numerics = Numerics(row_tile=4)
    x = torch.randn(40, hidden)
    whole = expert_ffn(PackedRows(x, torch.tensor([23, 17])), store, numerics)
    for start, length in ((0, 1), (22, 1), (5, 4), (1, 13)):
        part = PackedRows(x[start : start + length], torch.tensor([length, 0]))
        assert torch.equal(expert_ffn(part, store, numerics), whole[start : start + length])
