"""The gate's choice in compiled kernels: experts, weights and counts of the reference."""

import itertools

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu.operations import recorded_once
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.topk_gate import topk_gate_reference
from tests.tolerance import FLOAT32, relative_error

ROUTERS = {
    "mixtral": RouterSpec(8, 2),
    "qwen3": RouterSpec(128, 8),
    "all experts": RouterSpec(5, 5, norm_topk=False),
    "odd": RouterSpec(37, 6, norm_topk=False, scaling=1.5),
    "demo": RouterSpec(32, 4, "sigmoid", True, 2.0, num_groups=4, topk_groups=2, norm_eps=1e-20),
    "deepseek-v3": RouterSpec(256, 8, "sigmoid", True, 2.5, num_groups=8, topk_groups=4, norm_eps=1e-20),
    "a.x-k2": RouterSpec(57, 8, "sigmoid", norm_eps=1e-20, num_groups=3, topk_groups=1, masks_with_zero=True),
    "kimi": RouterSpec(384, 8, "sigmoid", True, 2.827, norm_eps=1e-20),
    "odd groups": RouterSpec(57, 3, "softmax", True, 1.0, num_groups=3, topk_groups=2),
    "deepseek-v2": RouterSpec(160, 6, "softmax", False, 16.0, num_groups=8, topk_groups=3, group_score="best"),
    "groups of one": RouterSpec(5, 2, "softmax", False, 1.0, num_groups=5, topk_groups=3, group_score="best"),
    "ernie-4.5": RouterSpec(64, 6, "softmax", norm_min=1e-12),
    "a divisor that is often too small": RouterSpec(37, 3, "softmax", norm_min=0.3),
    "llama-4": RouterSpec(16, 1, "sigmoid_of_chosen", False),
    "phi-moe": RouterSpec(16, 2, "sparsemixer", False, jitter=0.01),
    "deepseek-v4": RouterSpec(37, 6, "sqrt_softplus", scaling=1.5, norm_eps=1e-20),
    "wide jitter": RouterSpec(37, 2, "sparsemixer", False, jitter=0.4),
}


def expected(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor, Tensor]:
    load = torch.zeros(logits.shape[1], dtype=torch.int64)
    ids, weights = topk_gate_reference(logits, bias, spec, load)
    return ids, weights, load


def run(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor, Tensor]:
    load = torch.full((logits.shape[1],), 3, dtype=torch.int64)
    ids, weights = recorded_once(len(logits), lambda do: do.gate(logits, bias, spec, load))
    return ids, weights, load - 3


@pytest.mark.parametrize("with_bias", (False, True))
@pytest.mark.parametrize("name", ROUTERS)
def test_chooses_weighs_and_counts_as_the_reference(name, with_bias, library):
    spec = ROUTERS[name]
    experts = spec.num_logical
    for num_tokens, threads in itertools.product((0, 1, 15, 100), (1, 2)):
        library.set_threads(threads)
        logits = torch.randn(num_tokens, experts + 3)[:, :experts]
        bias = torch.randn(experts) if with_bias else None
        got, wanted = run(logits, bias, spec), expected(logits, bias, spec)
        assert torch.equal(got[0], wanted[0])
        assert relative_error(got[1], wanted[1]) < FLOAT32
        assert torch.equal(got[2], wanted[2])


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_go_to_the_lowest_id(name):
    spec = ROUTERS[name]
    experts = spec.num_logical
    logits = torch.randint(-1, 2, (50, experts)).float()
    logits[7] = 0
    bias = torch.randint(0, 2, (experts,)).float()
    for choice in (None, bias):
        assert torch.equal(run(logits, choice, spec)[0], expected(logits, choice, spec)[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_row_that_is_not_finite_has_the_experts_of_the_reference_and_changes_no_other(name, value):
    spec = ROUTERS[name]
    experts = spec.num_logical
    clean = torch.randn(9, experts)
    for faulty in (slice(None), slice(3, 4), slice(0, experts, 2)):
        dirty = clean.clone()
        dirty[4, faulty] = value
        ids, weights, load = run(dirty, None, spec)
        wanted_ids, wanted, wanted_load = expected(dirty, None, spec)
        assert torch.equal(ids, wanted_ids)
        assert torch.equal(weights.isnan(), wanted.isnan())
        assert torch.equal(load, wanted_load)
        others = torch.arange(9) != 4
        assert torch.equal(weights[others], run(clean, None, spec)[1][others])


def test_experts_whose_sigmoids_are_all_one_are_chosen_by_their_logits():
    spec = RouterSpec(3, 1, "sigmoid_of_chosen", False)
    logits = torch.tensor([[40.0, 70.0, 50.0]])
    for choose in (run, expected):
        ids, weights, _ = choose(logits, None, spec)
        assert (ids.tolist(), weights.tolist()) == ([[1]], [[1.0]])


def test_a_rows_bits_do_not_depend_on_the_batch_threads_or_register_width(library, avx2, use):
    for spec in ROUTERS.values():
        logits, bias = torch.randn(100, spec.num_logical) * 3, torch.randn(spec.num_logical)
        whole = run(logits, bias, spec)
        alone = [run(row[None], bias, spec) for row in logits]
        library.set_threads(2)
        threaded = run(logits, bias, spec)
        library.set_threads(1)
        use(avx2)
        for ids, weights in ([torch.cat(part) for part in list(zip(*alone, strict=True))[:2]], threaded[:2],
                             run(logits, bias, spec)[:2]):  # fmt: skip
            assert torch.equal(ids, whole[0])
            assert torch.equal(weights, whole[1])
        use(library)


@pytest.mark.parametrize("lowest", [-80, -50, -30, -5, 0, 15, 75])
def test_roots_of_softplus_are_accurate_however_small(lowest: int) -> None:
    """Where a token's id chooses, all chosen logits may be low, and weights are divided by their sum."""
    spec, num_tokens = ROUTERS["deepseek-v4"], 60
    logits, token_ids = lowest + 5 * torch.rand(num_tokens, 37), torch.arange(num_tokens)
    table, load = torch.rand(num_tokens, 37).argsort(1)[:, : spec.topk].contiguous(), torch.zeros(37, dtype=torch.int64)
    _, weights = recorded_once(num_tokens, lambda do: do.gate(logits, None, spec, load, (token_ids, table)))
    wanted = topk_gate_reference(logits, None, spec, load, chosen=table)[1]
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0)


def test_experts_of_token_ids_are_weighed_and_counted_as_by_the_reference(library):
    spec, experts = ROUTERS["deepseek-v4"], 37
    table = torch.rand(50, experts).argsort(1)[:, : spec.topk].contiguous()
    for num_tokens in (0, 1, 15, 100):
        logits, token_ids = 9 * torch.randn(num_tokens, experts), torch.randint(50, (num_tokens,))
        loads = [torch.zeros(experts, dtype=torch.int64) for _ in "12"]
        chosen = token_ids, table
        ids, weights = recorded_once(num_tokens, lambda do: do.gate(logits, None, spec, loads[0], chosen))  # noqa: B023
        wanted = topk_gate_reference(logits, None, spec, loads[1], chosen=table[token_ids])
        assert torch.equal(ids, wanted[0])
        assert relative_error(weights, wanted[1]) < FLOAT32
        assert torch.equal(*loads)
