"""The gate: chooses the experts of each token and their weights, for every router that a RouterSpec describes.

All in float32, with the formulas of the reference implementations (transformers' Mixtral, Qwen3-MoE, DeepSeek-V3,
gpt-oss).
On CUDA, and with the compiled CPU kernels, everything after the logits is one kernel, which also counts the load.
"""

from dataclasses import fields

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.ep.routing import RouterSpec, Routing
from moe_serve.kernels.cpu.linear import PackedLinear
from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.forms import GateShape
from moe_serve.kernels.grouped_gemm import grouped_gemm
from moe_serve.kernels.numerics import FAST, Numerics
from moe_serve.kernels.topk_gate import CHOSEN_BY_LOGITS, score_groups, sparsemixer_weights, topk_gate

WHOLE_VECTORS = 64  # rows; 64 rows of any width fill whole vector registers on every CPU


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
        self._weight = weight.float().t().contiguous().t()  # k-major, as row_gemm needs it
        self._bias = None if bias is None else bias.float()
        self._numerics = numerics

    def __call__(self, x: Tensor) -> Routing:
        """x: [T, H] compute dtype -> Routing of T tokens; T may be 0"""
        x = x.float()
        if self._numerics.invariant:
            num_rows = torch.full((1,), x.shape[0], dtype=torch.int64)
            logits = grouped_gemm(x, self._weight[None], num_rows, self._numerics)
            logits = logits if self._logit_bias is None else logits + self._logit_bias
        else:
            logits = functional.linear(x, self._weight, self._logit_bias)
        return (route_and_count if x.is_cuda else route)(logits, self._spec, self._bias)


class CompiledGate:
    """The router of one layer by the compiled CPU kernels, which also count the load. Ties go to the lowest expert."""

    def __init__(self, spec: RouterSpec, weight: Tensor, bias: Tensor | None = None, logit_bias: Tensor | None = None):
        """weight: [E, H] float32 or bfloat16;  biases: as in Gate"""
        _check_biases(spec, bias, logit_bias)
        self._shape = _gate_shape(spec)
        self._logits = PackedLinear(weight, logit_bias)
        self._bias = None if bias is None else bias.float()

    def record(self, recorder: Recorder, x: Tensor, load: Tensor) -> tuple[Tensor, Tensor]:
        """Records the router: ids and weights [T, topk] of rows x [T, H]. load: [E] int64, choices are added to it"""
        return recorder.gate(recorder.linear("router_logits", self._logits, x), self._bias, self._shape, load)


def route_and_count(logits: Tensor, spec: RouterSpec, bias: Tensor | None = None) -> Routing:
    """Returns the Routing of `route`, with the load. Ties go to the lowest expert; `route` leaves them open."""
    shape = _gate_shape(spec)
    # Filled on the device: copying a number from the host would wait for the stream.
    num_tokens = torch.full((1,), logits.shape[0], dtype=torch.int64, device=logits.device)
    load = torch.zeros(spec.num_logical, dtype=torch.int64, device=logits.device)
    ids, weights = topk_gate(logits.contiguous(), bias, num_tokens, shape, load)
    return Routing(ids, weights, load)


def route(logits: Tensor, spec: RouterSpec, bias: Tensor | None = None) -> Routing:
    """Returns the experts and weights of each token. logits: [T, E] float32;  bias: [E] float32 or None."""
    if spec.scoring == "sparsemixer":
        scores = logits
    else:
        scores = torch.softmax(logits, dim=-1) if spec.scoring == "softmax" else _sigmoid_by_row(logits)
    choice = logits if spec.scoring in CHOSEN_BY_LOGITS else scores
    choice = choice if bias is None else choice + bias
    if spec.num_groups > 1:
        choice = _only_best_groups(choice, spec)
    if choice is scores:
        weights, ids = scores.topk(spec.topk, dim=-1)
    else:
        ids = choice.topk(spec.topk, dim=-1).indices
        weights = scores.gather(1, ids)  # bias and mask affect the choice only, not the weight
    if spec.scoring == "sparsemixer":
        weights = sparsemixer_weights(logits, ids, spec.jitter)
    if spec.norm_topk:
        total = weights.sum(dim=-1, keepdim=True)
        total = total + spec.norm_eps if spec.norm_eps else total
        weights = weights / (total.clamp(min=spec.norm_min) if spec.norm_min else total)
    if spec.scaling != 1.0:
        weights = weights * spec.scaling
    return Routing(ids, weights)


def _check_biases(spec: RouterSpec, bias: Tensor | None, logit_bias: Tensor | None) -> None:
    assert spec.has_bias == (bias is not None), "a correction bias goes with RouterSpec.has_bias"
    assert spec.has_logit_bias == (logit_bias is not None), "a bias of the logits goes with RouterSpec.has_logit_bias"


def _gate_shape(spec: RouterSpec) -> GateShape:
    return GateShape(**{field.name: getattr(spec, field.name) for field in fields(GateShape)})


def _only_best_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """Returns choice with -inf outside each token's best groups."""
    num_tokens, num_logical = choice.shape
    grouped = choice.view(num_tokens, spec.num_groups, num_logical // spec.num_groups)
    group_scores = score_groups(grouped, spec.group_score)
    best = group_scores.topk(spec.topk_groups, dim=-1, sorted=False).indices
    masked = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(masked[:, :, None], float("-inf")).view(num_tokens, num_logical)


def _sigmoid_by_row(logits: Tensor) -> Tensor:
    """Returns sigmoid(logits). A row's bits do not depend on its position: no row falls in the loop's ragged end,
    which uses other instructions."""
    num_tokens, num_logical = logits.shape
    if logits.device.type != "cpu" or num_tokens * num_logical % WHOLE_VECTORS == 0:
        return logits.sigmoid()
    return functional.pad(logits, (0, 0, 0, -num_tokens % WHOLE_VECTORS)).sigmoid_()[:num_tokens]
