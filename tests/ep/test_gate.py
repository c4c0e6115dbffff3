"""Routers against the formulas written token by token."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_serve.ep.gate import Gate
from moe_serve.errors import ModelError
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.topk_gate import topk_gate
from tests.tolerance import FLOAT32, relative_error

MIXTRAL = RouterSpec(8, 2, "softmax", norm_topk=True)
QWEN3 = RouterSpec(6, 3, "softmax", norm_topk=False)
DEEPSEEK = RouterSpec(
    12, 3, "sigmoid", norm_topk=True, scaling=2.5, num_groups=4, topk_groups=2, has_bias=True, norm_eps=1e-20
)
SPECS = {
    "mixtral": MIXTRAL,
    "qwen3": QWEN3,
    "deepseek_v3": DEEPSEEK,
    "axk2": replace(DEEPSEEK, masks_with_zero=True),
    "deepseek_v2": RouterSpec(
        12, 3, "softmax", norm_topk=False, scaling=16.0, num_groups=6, topk_groups=3, group_score="best"
    ),
    "ernie4_5_moe": RouterSpec(8, 3, "softmax", norm_topk=True, has_bias=True, norm_min=0.4),
    "llama4": RouterSpec(6, 1, "sigmoid_of_chosen", norm_topk=False, scales_input=True),
    "phimoe": RouterSpec(8, 2, "sparsemixer", norm_topk=False, jitter=0.3),
}


def route(gate: Gate, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ids, weights and the load of rows x."""
    load = torch.zeros(gate.num_logical, dtype=torch.int64, device=x.device)
    ids, weights, _ = gate(x, load)
    return ids, weights, load


def route_one(logits: list[float], spec: RouterSpec, bias: list[float] | None) -> dict[int, float]:
    """Returns {expert: weight} of one token, in plain Python."""
    row = torch.tensor(logits, dtype=torch.float64)
    scores = (row.softmax(0) if spec.scoring == "softmax" else 1 / (1 + (-row).exp())).tolist()
    choice = [s + (bias[e] if bias else 0.0) for e, s in enumerate(scores)]
    if spec.scoring == "sparsemixer":
        return sparsemix_one(row.tolist(), spec.jitter)
    size = spec.num_logical // spec.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(spec.num_groups)]
    counted = 1 if spec.group_score == "best" else 2
    best = sorted(groups, key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:counted]))
    best = best[: spec.topk_groups]
    allowed = sorted(e for g in best for e in g)
    if spec.masks_with_zero:
        choice = [choice[e] if e in allowed else 0.0 for e in range(spec.num_logical)]
        allowed = list(range(spec.num_logical))
    chosen = sorted(allowed, key=lambda e: -choice[e])[: spec.topk]
    total = max(sum(scores[e] for e in chosen) + spec.norm_eps, spec.norm_min) if spec.norm_topk else 1.0
    return {e: scores[e] / total * spec.scaling for e in chosen}


def sparsemix_one(logits: list[float], jitter: float) -> dict[int, float]:
    """The best of what is left, twice; its share among those that lack at most 2 * jitter of the larger size."""
    left, weights = dict(enumerate(logits)), {}
    for _ in range(2):
        chosen = max(left, key=lambda e: left[e])
        best = left[chosen]
        near = [x for x in left.values() if (best - x) / max(abs(x), best) <= 2 * jitter]
        weights[chosen] = math.exp(best) / sum(math.exp(x) for x in near)
        del left[chosen]
    return weights


@pytest.mark.parametrize("name", SPECS)
def test_routing_follows_the_formula(name: str) -> None:
    spec = SPECS[name]
    torch.manual_seed(0)
    logits = 2 * torch.randn(50, spec.num_logical)
    # All negative on some tokens' best experts: a mask of 0 instead of -inf would let masked groups win.
    bias = torch.randn(spec.num_logical) - 1.5 if spec.has_bias else None
    load = torch.zeros(spec.num_logical, dtype=torch.int64)
    ids, weights = topk_gate(logits, bias, spec, load)
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert torch.equal(load, torch.bincount(ids.flatten(), minlength=spec.num_logical))
    for token in range(len(logits)):
        expected = route_one(logits[token].tolist(), spec, None if bias is None else bias.tolist())
        got = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert got == pytest.approx(expected, rel=1e-5)


def test_the_correction_bias_chooses_but_does_not_weigh() -> None:
    spec = RouterSpec(4, 1, "sigmoid", norm_topk=False, has_bias=True)
    load = torch.zeros(4, dtype=torch.int64)
    ids, weights = topk_gate(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([5.0, 0.0, 0.0, 0.0]), spec, load)
    assert ids.tolist() == [[0]]
    assert weights.item() == 0.5


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("hidden", [48, 64, 7])
def test_in_batch_invariant_a_tokens_routing_is_bitwise_its_own(name: str, hidden: int) -> None:
    spec = SPECS[name]
    torch.manual_seed(0)
    weight = torch.randn(spec.num_logical, hidden) / hidden**0.5
    gate = Gate(spec, weight, torch.randn(spec.num_logical) if spec.has_bias else None, Numerics(row_tile=4))
    x = torch.randn(37, hidden)
    whole = route(gate, x)
    for start, length in ((0, 1), (36, 1), (3, 5), (10, 16)):
        part = route(gate, x[start : start + length])
        assert torch.equal(part[0], whole[0][start : start + length])
        assert torch.equal(part[1], whole[1][start : start + length])


@pytest.mark.parametrize("name", SPECS)
def test_fast_and_invariant_route_alike_and_zero_tokens_are_routed(name: str) -> None:
    spec = SPECS[name]
    torch.manual_seed(0)
    weight, bias = torch.randn(spec.num_logical, 32), torch.randn(spec.num_logical) if spec.has_bias else None
    x = torch.randn(20, 32)
    fast, invariant = (route(Gate(spec, weight, bias, each), x) for each in (FAST, Numerics(row_tile=4)))
    assert torch.equal(fast[0], invariant[0])
    assert torch.allclose(fast[1], invariant[1], rtol=1e-5)
    for numerics in (Numerics(), Numerics(row_tile=4)):
        assert route(Gate(spec, weight, bias, numerics), x[:0])[0].shape == (0, spec.topk)


@pytest.mark.parametrize(
    "wrong, key",
    [
        ({"topk": 9}, "num_experts_per_tok"),
        ({"num_groups": 3}, "n_group"),
        ({"num_groups": 2, "topk_groups": 3}, "topk_group"),
        ({"num_groups": 4, "topk_groups": 1, "topk": 3}, "hold fewer"),
        ({"num_groups": 8, "topk_groups": 4}, "two best"),
        ({"topk": 3, "scoring": "sparsemixer"}, "num_experts_per_tok"),
        ({"scales_input": True}, "num_experts_per_tok 1"),
    ],
)
def test_an_impossible_router_is_refused_by_its_config_key(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelError, match=key):
        RouterSpec(**{"num_logical": 8, "topk": 2} | wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SPECS)
def test_the_gate_on_cuda_routes_and_counts_as_the_plain_one(name: str) -> None:
    spec = SPECS[name]
    torch.manual_seed(1)
    x, weight = torch.randn(20, 16), torch.randn(spec.num_logical, 16)
    bias = torch.randn(spec.num_logical) if spec.has_bias else None
    ids, weights, load = route(Gate(spec, weight.cuda(), None if bias is None else bias.cuda()), x.cuda())
    expected_ids, expected, expected_load = route(Gate(spec, weight, bias), x)
    assert torch.equal(ids.cpu(), expected_ids)
    assert relative_error(weights.cpu(), expected) < FLOAT32
    assert torch.equal(load.cpu(), expected_load)
