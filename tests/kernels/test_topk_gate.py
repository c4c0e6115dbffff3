"""The fused gate: choice, weights and counts, for every router, with ties to the lowest id."""

import pytest
import torch

from moe_serve.kernels.cpu.operations import recorded_once
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.topk_gate import take_identity_, topk_gate_reference
from tests.kernels.conftest import RunCheck
from tests.kernels.data import randn, relative_error

EXPERTS = 24
ROUTERS = {
    "mixtral": RouterSpec(EXPERTS, 2),
    "qwen3": RouterSpec(EXPERTS, 3, norm_topk=False),
    "deepseek-v3": RouterSpec(EXPERTS, 4, "sigmoid", True, 2.5, num_groups=4, topk_groups=2, norm_eps=1e-20),
    # In groups of no power of two.
    "a.x-k2": RouterSpec(EXPERTS, 5, "sigmoid", num_groups=3, topk_groups=1, masks_with_zero=True),
    "deepseek-v2": RouterSpec(EXPERTS, 3, "softmax", False, 16.0, num_groups=6, topk_groups=2, group_score="best"),
    "ernie-4.5": RouterSpec(EXPERTS, 6, norm_min=0.5),
    "llama-4": RouterSpec(EXPERTS, 1, "sigmoid_of_chosen", False),
    "phi-moe": RouterSpec(EXPERTS, 2, "sparsemixer", False, jitter=0.2),
}


def new_load(device: str = "cpu") -> torch.Tensor:
    return torch.full((EXPERTS,), 5, dtype=torch.int64, device=device)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_row_that_is_not_finite_has_experts_and_changes_no_other_row(name: str, value: float) -> None:
    spec = ROUTERS[name]
    logits = randn("cpu", 9, EXPERTS, dtype=torch.float32)
    clean_ids, clean_weights = topk_gate_reference(logits, None, spec, new_load())
    for faulty in (slice(None), slice(3, 4), slice(0, EXPERTS, 2)):
        dirty = logits.clone()
        dirty[4, faulty] = value
        load = new_load()
        ids, weights = topk_gate_reference(dirty, None, spec, load)
        assert len(set(ids[4].tolist())) == spec.topk
        assert 0 <= ids[4].min() <= ids[4].max() < EXPERTS
        assert (load - 5).sum() == 9 * spec.topk
        others = torch.arange(9) != 4
        assert torch.equal(ids[others], clean_ids[others])
        assert torch.equal(weights[others], clean_weights[others])


def test_choices_of_experts_that_give_back_their_input_are_not_counted_and_leave_with_their_weights() -> None:
    spec = RouterSpec(EXPERTS - 9, 6, norm_topk=False, num_identity=9)
    logits, load = randn("cpu", 13, EXPERTS, dtype=torch.float32), torch.zeros(EXPERTS - 9, dtype=torch.int64)
    ids, weights = topk_gate_reference(logits, None, spec, load)
    as_usual = topk_gate_reference(logits, None, RouterSpec(EXPERTS, 6, norm_topk=False), new_load())
    assert torch.equal(ids, as_usual[0])
    assert torch.equal(weights, as_usual[1])
    expert_ids = ids[ids < EXPERTS - 9]
    assert 0 < len(expert_ids) < ids.numel()
    assert torch.equal(load, torch.bincount(expert_ids, minlength=EXPERTS - 9))
    total = take_identity_(ids, weights, EXPERTS - 9)
    assert torch.equal(ids, as_usual[0].masked_fill(as_usual[0] >= EXPERTS - 9, -1))
    assert relative_error(total, weights.masked_fill(ids >= 0, 0).sum(1, keepdim=True)) < 1e-6
    compiled = new_load()[: EXPERTS - 9].zero_()
    found = recorded_once(13, lambda recorder: recorder.gate(logits, None, spec, compiled))
    assert torch.equal(found[0], as_usual[0])
    assert torch.equal(compiled, load)


def check_gate(device: str, name: str, rows: int, with_bias: bool, ties: bool) -> None:
    from moe_serve.kernels.triton.topk_gate import topk_gate_triton

    spec = ROUTERS[name]
    logits = randn(device, rows, EXPERTS, dtype=torch.float32)
    if ties:
        logits = logits.round()
    bias = randn(device, EXPERTS, dtype=torch.float32, seed=3).round() if with_bias else None
    load, expected_load = new_load(device), new_load()
    ids, weights = topk_gate_triton(logits, bias, spec, load)
    expected_ids, expected = topk_gate_reference(
        logits.cpu(), None if bias is None else bias.cpu(), spec, expected_load
    )
    assert torch.equal(ids.cpu(), expected_ids)
    assert torch.equal(load.cpu(), expected_load)
    assert relative_error(weights, expected) < 1e-6
    slots = torch.randperm(EXPERTS + 1)  # one more, as of a placement
    assert torch.equal(topk_gate_triton(logits, bias, spec, load, slots.to(device))[0].cpu(), slots[expected_ids])
    host = logits.cpu(), None if bias is None else bias.cpu()
    assert torch.equal(topk_gate_reference(*host, spec, load.cpu(), slots)[0], slots[expected_ids])
    cached_at = torch.arange(rows) % 3 - 1  # padding between real rows
    load, expected_load = new_load(device), new_load()
    ids, _ = topk_gate_triton(logits, bias, spec, load, slots.to(device), cached_at.to(device))
    assert torch.equal(ids.cpu(), slots[expected_ids].masked_fill(cached_at[:, None] < 0, -1))
    assert torch.equal(topk_gate_reference(*host, spec, expected_load, slots, cached_at)[0], ids.cpu())
    assert torch.equal(load.cpu(), expected_load)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_kernel_chooses_weighs_and_counts_as_the_reference(on_device: RunCheck, name: str, with_bias: bool) -> None:
    on_device(check_gate, name, 4, with_bias, False)


def check_gate_not_finite(device: str, name: str, value: float) -> None:
    from moe_serve.kernels.triton.topk_gate import topk_gate_triton

    spec = ROUTERS[name]
    logits = randn(device, 4, EXPERTS, dtype=torch.float32)
    logits[1, ::2] = value
    logits[2] = value
    load, expected_load = new_load(device), new_load()
    ids, weights = topk_gate_triton(logits, None, spec, load)
    expected_ids, expected = topk_gate_reference(logits.cpu(), None, spec, expected_load)
    assert torch.equal(ids.cpu(), expected_ids)
    assert torch.equal(load.cpu(), expected_load)
    assert torch.equal(weights.cpu().isnan(), expected.isnan())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_kernel_gives_a_row_that_is_not_finite_the_experts_of_the_reference(
    on_device: RunCheck, name: str, value: float
) -> None:
    on_device(check_gate_not_finite, name, value)


def test_ties_go_to_the_lowest_expert(on_device: RunCheck) -> None:
    on_device(check_gate, "mixtral", 4, False, True)


def test_no_row_works(on_device: RunCheck) -> None:
    on_device(check_gate, "mixtral", 0, False, False)
