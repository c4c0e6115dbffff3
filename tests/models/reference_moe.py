"""A plain MoE layer for one rank whose products are sums along one token's row, to test the decoder without ep/."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.ep.moe_layer import ExpertParallel, MoeWeights, Turns
from moe_serve.kernels.activation import clamped_swiglu_reference
from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.cpu.tape import RecordedRun

VECTORS = 32  # float32 values that torch takes at once with AVX-512: two vectors


def record_call(recorder: Recorder, layer: Callable[[Tensor, int, int, Tensor], Turns[Tensor]], x: Tensor) -> Tensor:
    """Records a call of a MoE layer between kernels. x: [T, H] -> [T, H]"""
    out = recorder.buffer("moe_out", x.shape[1])

    def call(step: RecordedRun) -> Turns[None]:
        num_rows = step.rows.num_rows
        ids = (ctypes.c_int64 * num_rows).from_address(step.rows.ids) if num_rows else ()
        out[:num_rows] = yield from layer(x[:num_rows], num_rows, step.num_chunks, torch.tensor(ids, dtype=torch.int64))

    recorder.call_python(call)
    return out


class ReferenceMoe:
    """Its result cannot depend on the batch: no sum runs over tokens; experts are added in top-k order in float32."""

    needs_counts = False

    def __init__(self, parallel: ExpertParallel, layer_row: int, weights: MoeWeights):
        self.router, self.gate, self.bias = parallel.router, weights.gate, weights.correction_bias
        self.experts, self.shared, self.logit_bias = weights.experts, weights.shared, weights.logit_bias
        self.latent, self.chosen = weights.latent, weights.chosen

    def __call__(self, x: Tensor, num_tokens: int, num_chunks: int, *others: Any) -> Turns[Tensor]:
        yield
        out = torch.zeros_like(x)
        out = out if self.shared is None else self.shared(x)(out)
        rows = x[:num_tokens]
        routes = self._route(rows, None if self.chosen is None else self.chosen[others[-1][:num_tokens]])
        rows = rows if self.latent is None else self.latent[0](rows)
        total = torch.zeros_like(rows, dtype=torch.float32)
        for expert, weight in zip(*(each.unbind(1) for each in routes), strict=True):
            row = rows * weight[:, None] if self.router.scales_input else rows
            own = expert >= self.router.num_logical  # gives back what it takes
            expert = expert.clamp(max=self.router.num_logical - 1)
            middle = self._activate(self._project("gate_up", expert, row))
            result = torch.where(own[:, None], row, self._project("down", expert, middle)).float()
            total += result if self.router.scales_input else weight[:, None] * result
        total = total if self.latent is None else self.latent[1](total.to(x.dtype)).float()
        out[:num_tokens] = (out[:num_tokens].float() + total).to(x.dtype)
        return out

    def record(self, recorder: Recorder, x: Tensor, _: None) -> Tensor:
        return record_call(recorder, self, x)

    def _project(self, name: str, expert: Tensor, x: Tensor) -> Tensor:
        """x: [T, k], expert: [T] -> [T, n]"""
        y, bias = each_alone(x, self.experts.matrix(name)[expert]), self.experts.bias(name)
        return y if bias is None else y + bias[expert].to(y.dtype)

    def _activate(self, gate_up: Tensor) -> Tensor:
        activation = self.experts.activation
        if activation.kind == "clamped_swiglu":
            return clamped_swiglu_reference(gate_up, activation)
        if activation.kind == "clamped_silu":
            gate, up = gate_up.chunk(2, -1)
            return functional.silu(gate.clamp(max=activation.limit)) * up.clamp(-activation.limit, activation.limit)
        if activation.kind == "relu2":
            return functional.relu(gate_up).square()
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    def _route(self, x: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        """x: [T, H], chosen: [T, K] or None -> ids, weights [T, K]"""
        router = self.router
        logits = each_alone(x.float(), self.gate.float())
        logits = logits if self.logit_bias is None else logits + self.logit_bias
        scores = logits.softmax(-1) if router.scoring == "softmax" else in_whole_vectors(torch.sigmoid, logits)
        if router.scoring == "sqrt_softplus":
            scores = in_whole_vectors(lambda values: functional.softplus(values).sqrt(), logits)
        if router.scoring == "sparsemixer":
            return self._sparsemix(logits)
        by = logits if router.scoring == "sigmoid_of_chosen" else scores
        choice = by if self.bias is None else by + self.bias
        if router.num_groups > 1:
            groups = choice.unflatten(1, (router.num_groups, -1))
            of_group = groups.amax(-1) if router.group_score == "best" else groups.topk(2, -1).values.sum(-1)
            best = of_group.topk(router.topk_groups).indices
            allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, True)
            choice = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        ids = choice.topk(router.topk).indices if chosen is None else chosen
        weights = scores.gather(1, ids)
        if router.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + router.norm_eps).clamp(min=router.norm_min)
        return ids, weights * router.scaling

    def _sparsemix(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        left, ids, weights = logits.clone(), [], []
        for _ in range(2):
            best = left.amax(-1, keepdim=True)
            near = (best - left) / torch.maximum(logits.abs(), best) <= 2 * self.router.jitter
            ids.append(left.argmax(-1))
            weights.append(1 / in_whole_vectors(torch.exp, left - best).where(near, 0).sum(-1))
            left.scatter_(1, ids[-1][:, None], -torch.inf)
        return torch.stack(ids, 1), torch.stack(weights, 1)


def each_alone(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiplies without a GEMM, whose sums may differ with the number of rows. x: [T, k], matrix: [T or 1, n, k]"""
    return (x[:, None].float() * matrix.float()).sum(-1).to(x.dtype)


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies an elementwise function to x [T, n]. Torch gives what does not fill its vectors other bits."""
    return function(functional.pad(x, (0, -x.shape[1] % VECTORS)))[:, : x.shape[1]]
