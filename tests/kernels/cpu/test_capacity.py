"""What exceeds the capacity of an expert: hand-worked cases and properties, of the plain function and the kernel."""

import itertools

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.capacity import ChangedChoices, ExpertCapacity, limit_experts
from moe_serve.kernels.cpu.operations import Recorder, recorded_once
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.topk_gate import scores_and_choice, topk_gate_reference
from tests.tolerance import FLOAT32, relative_error

ROUTERS = {
    "mixtral": RouterSpec(8, 2),
    "qwen3": RouterSpec(128, 8),
    "all experts": RouterSpec(5, 5, norm_topk=False),
    "deepseek-v3": RouterSpec(64, 8, "sigmoid", True, 2.5, num_groups=8, topk_groups=4, has_bias=True, norm_eps=1e-20),
    "ernie-4.5": RouterSpec(64, 6, "softmax", has_bias=True, norm_min=1e-12),
    "llama-4": RouterSpec(16, 1, "sigmoid_of_chosen", False),
}
DROP, NEXT = ExpertCapacity(1.0, moves=False), ExpertCapacity(1.0, moves=True)


def routed(spec: RouterSpec, num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Returns logits of uneven popularity, the bias, and what the gate makes of them."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, spec.num_logical, generator=draw)
    logits += 1.5 * torch.randn(spec.num_logical, generator=draw)
    bias = torch.randn(spec.num_logical, generator=draw) if spec.has_bias else None
    load = torch.zeros(spec.num_logical, dtype=torch.int64)
    return logits, bias, *topk_gate_reference(logits, bias, spec, load)


def both(spec: RouterSpec, capacity: ExpertCapacity, *routing: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns ids, weights, and the numbers of moved and dropped choices: by the plain function, by the kernel."""
    logits, bias, ids, weights = routing
    plain, compiled = (ids.clone(), weights.clone()), (ids.clone(), weights.clone())
    changed = limit_experts(logits, bias, spec, *plain, capacity).sum(0)
    totals = torch.zeros(2, dtype=torch.int64)
    recorded_once(len(ids), lambda do: do.limit_experts(logits, bias, spec, *compiled, capacity, totals))
    return [(*plain, changed), (*compiled, totals)]


def test_an_expert_keeps_the_highest_weights_and_the_others_are_dropped() -> None:
    spec = RouterSpec(4, 1, norm_topk=False)  # 4 rows: an expert takes one
    ids, weights = torch.tensor([[2], [2], [0], [2]]), torch.tensor([[0.5], [0.7], [0.9], [0.7]])
    for found, kept, changed in both(spec, DROP, torch.zeros(4, 4), None, ids, weights):
        assert found.tolist() == [[-1], [2], [0], [-1]], "of equal weights the first row stays"
        assert kept.tolist() == [[0], [pytest.approx(0.7)], [pytest.approx(0.9)], [0]]
        assert changed.tolist() == [0, 2]


def test_a_choice_moves_to_the_best_expert_with_room_that_is_not_the_tokens_own() -> None:
    spec = RouterSpec(4, 2, norm_topk=False)
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [3.0, 4.0, 1.0, 2.0]])  # one row of 2 x 2 / 4 each: 0 and 1 are over
    load = torch.zeros(4, dtype=torch.int64)
    ids, weights = topk_gate_reference(logits, None, spec, load)
    for found, kept, changed in both(spec, NEXT, logits, None, ids, weights):
        assert found.tolist() == [[0, 2], [1, 3]]
        assert changed.tolist() == [2, 0]
        assert torch.allclose(kept, torch.softmax(logits, -1).gather(1, found))


@pytest.mark.parametrize("capacity", [DROP, NEXT, ExpertCapacity(1.3, False), ExpertCapacity(1.3, True)], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_no_expert_has_more_than_its_capacity_and_both_functions_agree(name: str, capacity: ExpertCapacity) -> None:
    spec = ROUTERS[name]
    for num_rows, seed in itertools.product((0, 1, 2, 7, 100), range(2)):
        logits, bias, ids, weights = routed(spec, num_rows, seed)
        (plain_ids, plain, changed), (found_ids, found, totals) = both(spec, capacity, logits, bias, ids, weights)
        assert torch.equal(plain_ids, found_ids)
        assert relative_error(found, plain) < FLOAT32
        assert torch.equal(changed, totals)
        used = torch.bincount(found_ids[found_ids >= 0], minlength=spec.num_logical)
        assert int(used.max()) <= capacity.rows(*ids.shape, spec.num_logical)
        assert int(totals.sum()) == int((plain_ids != ids).sum())
        rows = found_ids.sort(-1).values
        assert not ((rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)).any(), "an expert has a token once"
        stays = found_ids == ids
        assert torch.equal(found[stays], weights[stays])
        if num_rows:
            open_to = scores_and_choice(logits, bias, spec)[1] > -torch.inf
            assert open_to.gather(1, found_ids.clamp(min=0))[found_ids >= 0].all(), "in the groups of the token"


@pytest.mark.parametrize("capacity", [DROP, NEXT], ids=str)
def test_all_rows_to_one_expert_leave_it_its_share(capacity: ExpertCapacity) -> None:
    spec = RouterSpec(8, 2)
    logits = torch.zeros(32, 8)
    logits[:, 3], logits[:, 5] = 9.0, 8.0
    ids, weights = topk_gate_reference(logits, None, spec, torch.zeros(8, dtype=torch.int64))
    for found, kept, changed in both(spec, capacity, logits, None, ids, weights):
        used = torch.bincount(found[found >= 0], minlength=8).tolist()
        assert used == ([8] * 8 if capacity.moves else [0, 0, 0, 8, 0, 8, 0, 0])
        assert changed.tolist() == ([48, 0] if capacity.moves else [0, 48])
        assert (kept[found < 0] == 0).all()


def test_rows_that_are_not_finite_change_no_other_and_are_the_first_to_go() -> None:
    spec = RouterSpec(4, 1, norm_topk=False)
    logits = torch.zeros(4, 4)
    logits[:, 2] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    logits[3] = torch.nan
    ids, weights = torch.full((4, 1), 2), torch.softmax(logits, -1)[:, 2:3]
    for found, _, changed in both(spec, ExpertCapacity(3.0, True), logits, None, ids, weights):
        assert found[:3].flatten().tolist() == [2, 2, 2]
        assert found[3].item() == 0
        assert changed.tolist() == [1, 0]


def test_the_changed_choices_of_a_token_are_added_over_layers_at_its_slot_of_the_cache() -> None:
    spec = RouterSpec(8, 2)
    logits, bias, ids, weights = routed(spec, 20)
    slots = torch.arange(20).flip(0) * 3
    slots[5] = -1
    wanted = limit_experts(logits, bias, spec, ids.clone(), weights.clone(), NEXT).sum(1)
    assert wanted[5], "the row without a slot has something to count"
    for compiled in (False, True):
        kept = torch.full((60, 8), 7, dtype=torch.int16)[:, 0]
        for is_first in (True, False):
            changed = ChangedChoices(kept, slots, is_first)
            mine, totals = (ids.clone(), weights.clone()), torch.zeros(2, dtype=torch.int64)
            if compiled:

                def record(do: Recorder, mine=mine, totals=totals, changed=changed) -> None:
                    do.limit_experts(logits, bias, spec, *mine, NEXT, totals, changed)

                recorded_once(20, record)
            else:
                changed.keep(limit_experts(logits, bias, spec, *mine, NEXT).sum(1))
        is_real = slots >= 0
        assert torch.equal(kept[slots[is_real]].long(), 2 * wanted[is_real])
        others = torch.ones(60, dtype=torch.bool)
        others[slots[is_real]] = False
        assert (kept[others] == 7).all()
