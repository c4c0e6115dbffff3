"""The fused gate: choice, weights and counts, for every router, with ties to the lowest id."""

import pytest
import torch

from moe_serve.ep.gate import route
from moe_serve.ep.routing import RouterSpec
from moe_serve.kernels.forms import GateShape
from moe_serve.kernels.topk_gate import topk_gate_reference
from tests.kernels.conftest import RunCheck
from tests.kernels.data import randn, relative_error

ROUTERS = {
    "mixtral": GateShape(2),
    "qwen3": GateShape(3, norm_topk=False),
    "deepseek-v3": GateShape(4, "sigmoid", True, 2.5, num_groups=4, topk_groups=2, norm_eps=1e-20),
    "groups of no power of two": GateShape(3, "sigmoid", True, 1.0, num_groups=3, topk_groups=2),
    "deepseek-v2": GateShape(3, "softmax", False, 16.0, num_groups=6, topk_groups=2, group_score="best"),
    "ernie-4.5": GateShape(6, norm_min=0.5),
    "llama-4": GateShape(1, "sigmoid_of_chosen", False),
    "phi-moe": GateShape(2, "sparsemixer", False, jitter=0.2),
}
BUILT_FOR_GPUS = [name for name in ROUTERS if name != "phi-moe"]
EXPERTS = 24


@pytest.mark.parametrize("name", ROUTERS)
def test_the_reference_is_the_gate_of_the_ep_layer(name: str) -> None:
    shape, bias = ROUTERS[name], randn("cpu", EXPERTS, dtype=torch.float32, seed=3)
    fields = {field: getattr(shape, field) for field in shape.__dataclass_fields__}
    logits = randn("cpu", 9, EXPERTS, dtype=torch.float32)
    load = torch.zeros(EXPERTS, dtype=torch.int64)
    ids, weights = topk_gate_reference(logits, bias, torch.tensor([9]), shape, load)
    expected = route(logits, RouterSpec(EXPERTS, has_bias=True, **fields), bias)
    assert torch.equal(ids.sort(1).values, expected.topk_ids.sort(1).values)
    assert relative_error(weights.sort(1).values, expected.topk_weights.sort(1).values) < 1e-6
    assert load.sum() == 9 * shape.topk


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_row_that_is_not_finite_has_experts_and_changes_no_other_row(name: str, value: float) -> None:
    shape = ROUTERS[name]
    logits = randn("cpu", 9, EXPERTS, dtype=torch.float32)
    fields = {field: getattr(shape, field) for field in shape.__dataclass_fields__}
    clean = route(logits, RouterSpec(EXPERTS, **fields))
    for faulty in (slice(None), slice(3, 4), slice(0, EXPERTS, 2)):
        dirty = logits.clone()
        dirty[4, faulty] = value
        load = torch.zeros(EXPERTS, dtype=torch.int64)
        ids, _ = topk_gate_reference(dirty, None, torch.tensor([9]), shape, load)
        routed = route(dirty, RouterSpec(EXPERTS, **fields))
        for chosen in (ids[4], routed.topk_ids[4]):
            assert len(set(chosen.tolist())) == shape.topk
            assert 0 <= chosen.min() <= chosen.max() < EXPERTS
        assert load.sum() == 9 * shape.topk
        others = torch.arange(9) != 4
        assert torch.equal(routed.topk_ids[others], clean.topk_ids[others])
        assert torch.equal(routed.topk_weights[others], clean.topk_weights[others])


def check_gate(device: str, name: str, rows: int, num_tokens: int, with_bias: bool, ties: bool) -> None:
    from moe_serve.kernels.triton.topk_gate import topk_gate_triton

    shape = ROUTERS[name]
    logits = randn(device, rows, EXPERTS, dtype=torch.float32)
    if ties:
        logits = logits.round()
    bias = randn(device, EXPERTS, dtype=torch.float32, seed=3).round() if with_bias else None
    load = torch.full((EXPERTS,), 5, dtype=torch.int64, device=device)
    ids, weights = topk_gate_triton(logits, bias, torch.tensor([num_tokens], device=device), shape, load)
    expected_load = torch.full((EXPERTS,), 5, dtype=torch.int64)
    expected_ids, expected = topk_gate_reference(
        logits.cpu(), None if bias is None else bias.cpu(), torch.tensor([num_tokens]), shape, expected_load
    )
    assert torch.equal(ids.cpu(), expected_ids)
    assert torch.equal(load.cpu(), expected_load)
    assert relative_error(weights, expected) < 1e-6
    assert (weights[num_tokens:] == 0).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", BUILT_FOR_GPUS)
def test_the_kernel_chooses_weighs_and_counts_as_the_reference(on_device: RunCheck, name: str, with_bias: bool) -> None:
    on_device(check_gate, name, 4, 3, with_bias, False)


def check_gate_not_finite(device: str, name: str, value: float) -> None:
    from moe_serve.kernels.triton.topk_gate import topk_gate_triton

    shape = ROUTERS[name]
    logits = randn(device, 4, EXPERTS, dtype=torch.float32)
    logits[1, ::2] = value
    logits[2] = value
    load, expected_load = (torch.zeros(EXPERTS, dtype=torch.int64) for _ in range(2))
    load = load.to(device)
    ids, weights = topk_gate_triton(logits, None, torch.tensor([4], device=device), shape, load)
    expected_ids, expected = topk_gate_reference(logits.cpu(), None, torch.tensor([4]), shape, expected_load)
    assert torch.equal(ids.cpu(), expected_ids)
    assert torch.equal(load.cpu(), expected_load)
    assert torch.equal(weights.cpu().isnan(), expected.isnan())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", BUILT_FOR_GPUS)
def test_the_kernel_gives_a_row_that_is_not_finite_the_experts_of_the_reference(
    on_device: RunCheck, name: str, value: float
) -> None:
    on_device(check_gate_not_finite, name, value)


def test_ties_go_to_the_lowest_expert(on_device: RunCheck) -> None:
    on_device(check_gate, "mixtral", 4, 4, False, True)


def test_no_row_and_only_padding_work(on_device: RunCheck) -> None:
    on_device(check_gate, "mixtral", 0, 0, False, False)
    on_device(check_gate, "mixtral", 2, 0, False, False)
