"""The gate: chooses the experts of each token and their weights, for every router that a RouterSpec describes.

All in float32, with the formulas of the reference implementations (transformers' Mixtral, Qwen3-MoE, DeepSeek-V3,
gpt-oss). Everything after the logits, the count of the load included, is one operation (kernels/topk_gate.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.capacity import ChangedChoices, ExpertCapacity, limit_experts
from moe_serve.kernels.cpu.linear import PackedLinear
from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.forms import RouterSpec
from moe_serve.kernels.grouped_gemm import grouped_gemm
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.packed_memory import PackedMemory
from moe_serve.kernels.topk_gate import topk_gate


class Chosen(NamedTuple):
    """What a gate chose for rows. ids: [T, topk] int64;  weights: [T, topk] float32;  logits: [T, E] float32"""

    ids: Tensor
    weights: Tensor
    logits: Tensor


class CapacityLimit:
    """The capacity of experts that all gates of a rank keep, and how many choices it has changed.

    totals: [2] int64, choices that moved and that were dropped, since the start, those of voided steps too
    """

    def __init__(self, capacity: ExpertCapacity):
        self.capacity = capacity
        self.totals = torch.zeros(2, dtype=torch.int64)


class Gate:
    """The router of one layer. In batch_invariant a token's routing depends on that token only."""

    def __init__(
        self,
        spec: RouterSpec,
        weight: Tensor,
        bias: Tensor | None = None,
        numerics: Numerics = FAST,
        logit_bias: Tensor | None = None,
    ):
        """weight: [E, H];  bias: [E] correction bias, where spec.has_bias;  logit_bias: [E], where has_logit_bias"""
        _check_biases(spec, bias, logit_bias)
        self._spec = spec
        self._logit_bias = None if logit_bias is None else logit_bias.float()
        self._narrow = weight.t() if weight.is_cuda and weight.dtype == torch.bfloat16 else None  # as stored, [H, E]
        if self._narrow is None or numerics.invariant:
            self._weight = weight.float().t().contiguous().t()  # k-major, as row_gemm needs it
        self._bias = None if bias is None else bias.float()
        self._numerics = numerics

    @property
    def num_logical(self) -> int:
        return self._spec.num_logical

    def __call__(
        self,
        x: Tensor,
        load: Tensor,
        slots: Tensor | None = None,
        cached_at: Tensor | None = None,
        step_load: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Chosen:
        """Returns the experts of rows, and adds every choice to load, [E] int64.

        x: [T, H] compute dtype; T may be 0;  slots, cached_at, step_load, chosen: as topk_gate takes
        """
        logits = self._logits(x).contiguous()
        beside = slots, cached_at, step_load, chosen
        return Chosen(*topk_gate(logits, self._bias, self._spec, load, *beside), logits)

    def limit(self, chosen: Chosen, limit: CapacityLimit, kept: ChangedChoices | None) -> None:
        """Changes logical ids and weights where they exceed the capacity. kept: where the changes are counted"""
        ids, weights, logits = chosen
        changed = limit_experts(logits, self._bias, self._spec, ids, weights, limit.capacity)
        limit.totals += changed.sum(0)
        if kept is not None:
            kept.keep(changed.sum(1))

    def _logits(self, x: Tensor) -> Tensor:
        """Returns the logits of rows x, [T, E] float32."""
        if self._narrow is not None and not self._numerics.invariant:
            # Products of bfloat16 are exact in float32, in which they are added: nothing is rounded on the way.
            if self._logit_bias is None:
                return torch.mm(x, self._narrow, out_dtype=torch.float32)
            return torch.addmm(self._logit_bias, x, self._narrow, out_dtype=torch.float32)
        x = x.float()
        if self._numerics.invariant:
            num_rows = torch.full((1,), x.shape[0], dtype=torch.int64)
            logits = grouped_gemm(x, self._weight[None], num_rows, self._numerics)
            return logits if self._logit_bias is None else logits + self._logit_bias
        return functional.linear(x, self._weight, self._logit_bias)


class CompiledGate:
    """The router of one layer by the compiled CPU kernels."""

    def __init__(
        self, spec: RouterSpec, weight: Tensor, bias: Tensor | None, logit_bias: Tensor | None, memory: PackedMemory
    ):
        """weight: [E, H] float32 or bfloat16;  biases: as in Gate;  memory: of the packed weight"""
        _check_biases(spec, bias, logit_bias)
        self._spec = spec
        self._logits = PackedLinear(weight, logit_bias, memory=memory)
        self._bias = None if bias is None else bias.float()

    def record(self, recorder: Recorder, x: Tensor, load: Tensor, chosen: Tensor | None = None) -> Chosen:
        """Records the router of rows x [T, H]. load: [E] int64, choices are added to it

        chosen: [tokens, topk] int64, the experts of each token id; None: the best are chosen
        """
        logits = recorder.linear("router_logits", self._logits, x)
        by_id = None if chosen is None else (recorder.ids, chosen)
        return Chosen(*recorder.gate(logits, self._bias, self._spec, load, by_id), logits)

    def record_limit(
        self, recorder: Recorder, chosen: Chosen, limit: CapacityLimit, kept: ChangedChoices | None
    ) -> None:
        """Records what `Gate.limit` does."""
        ids, weights, logits = chosen
        capacity = limit.capacity, limit.totals, kept
        recorder.limit_experts(logits, self._bias, self._spec, ids, weights, *capacity)


def _check_biases(spec: RouterSpec, bias: Tensor | None, logit_bias: Tensor | None) -> None:
    assert spec.has_bias == (bias is not None), "a correction bias goes with RouterSpec.has_bias"
    assert spec.has_logit_bias == (logit_bias is not None), "a bias of the logits goes with RouterSpec.has_logit_bias"
