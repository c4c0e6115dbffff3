"""The gate's choice by compiled kernels; the contract is that of kernels/topk_gate.py."""

import functools
from typing import get_args

import torch
from torch import Tensor

from moe_serve.kernels.cpu.checks import dense, rows
from moe_serve.kernels.cpu.library import cpu_library
from moe_serve.kernels.forms import GateShape, Scoring

MOST_EXPERTS = 2048  # these two as in gate.c
MOST_GROUPS = 64


def gate(logits: Tensor, bias: Tensor | None, shape: GateShape, load: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (ids [T, topk] int64, weights [T, topk] float32), best first, and adds every choice to load.

    logits: [T, E] float32, of any row stride;  bias: [E] float32 or None;  load: [E] int64
    """
    num_tokens, num_experts = logits.shape
    assert rows(logits), f"{logits.dtype}, strides {logits.stride()}"
    assert dense(load, torch.int64, num_experts), f"load {load.dtype} {tuple(load.shape)}"
    assert bias is None or dense(bias, torch.float32, num_experts), f"bias of {num_experts} experts"
    ids = torch.empty(num_tokens, shape.topk, dtype=torch.int64)
    weights = torch.empty(num_tokens, shape.topk)
    facts = gate_facts(shape, num_experts)
    cpu_library().call.gate(
        facts.data_ptr(), 0 if bias is None else bias.data_ptr(), logits.data_ptr(), num_tokens,
        logits.stride(0), ids.data_ptr(), weights.data_ptr(), load.data_ptr(),
    )  # fmt: skip
    return ids, weights


@functools.lru_cache
def gate_facts(shape: GateShape, num_experts: int) -> Tensor:
    """Returns the block of int64 that gate.c reads."""
    assert shape.topk <= num_experts <= MOST_EXPERTS, f"{shape.topk} of {num_experts} experts, at most {MOST_EXPERTS}"
    assert shape.num_groups <= MOST_GROUPS, f"{shape.num_groups} groups, at most {MOST_GROUPS}"
    assert num_experts % shape.num_groups == 0, f"{num_experts} experts in {shape.num_groups} groups"
    doubles = [shape.scaling, shape.norm_eps, shape.norm_min, 2 * shape.jitter]
    numbers = torch.tensor(doubles, dtype=torch.float64)
    scoring, by_best = get_args(Scoring).index(shape.scoring), int(shape.group_score == "best")
    sizes = [num_experts, shape.topk, scoring, int(shape.norm_topk), shape.num_groups, shape.topk_groups, by_best]
    return torch.cat((torch.tensor(sizes), numbers.view(torch.int64)))
