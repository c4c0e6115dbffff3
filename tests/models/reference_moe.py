"""A plain MoE layer for one rank that routes and runs every token on its own, to test the decoder without ep/."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.ep.moe_layer import ExpertParallel, MoeWeights, Turns
from moe_serve.kernels.activation import clamped_swiglu_reference
from moe_serve.kernels.cpu.operations import Recorder
from moe_serve.kernels.cpu.tape import RecordedRun


def record_call(recorder: Recorder, layer: Callable[[Tensor, int, int], Turns[Tensor]], x: Tensor) -> Tensor:
    """Records a call of a MoE layer between kernels. x: [T, H] -> [T, H]"""
    out = recorder.buffer("moe_out", x.shape[1])

    def call(step: RecordedRun) -> Turns[None]:
        num_rows = step.rows.num_rows
        out[:num_rows] = yield from layer(x[:num_rows], num_rows, step.num_chunks)

    recorder.call_python(call)
    return out


class ReferenceMoe:
    """Its result cannot depend on the batch: each token is computed alone, experts added in top-k order in float32."""

    needs_counts = False

    def __init__(self, parallel: ExpertParallel, layer_row: int, weights: MoeWeights):
        self.router, self.gate, self.bias = parallel.router, weights.gate, weights.correction_bias
        self.experts, self.shared, self.logit_bias = weights.experts, weights.shared, weights.logit_bias

    def __call__(self, x: Tensor, num_tokens: int, num_chunks: int, *_: None) -> Turns[Tensor]:
        yield
        out = torch.zeros_like(x)
        out = out if self.shared is None else self.shared(x)(out)
        for t in range(num_tokens):
            ids, weights = self._route(x[t])
            total = torch.zeros_like(x[t], dtype=torch.float32)
            for expert, weight in zip(ids.tolist(), weights, strict=True):
                row = x[t] * weight if self.router.scales_input else x[t]
                weight = 1.0 if self.router.scales_input else weight
                middle = self._activate(self._project("gate_up", expert, row))
                total += weight * self._project("down", expert, middle).float()
            out[t] = (out[t].float() + total).to(x.dtype)
        return out

    def record(self, recorder: Recorder, x: Tensor) -> Tensor:
        return record_call(recorder, self, x)

    def _project(self, name: str, expert: int, x: Tensor) -> Tensor:
        y, bias = functional.linear(x, self.experts.matrix(name)[expert]), self.experts.bias(name)
        return y if bias is None else y + bias[expert].to(y.dtype)

    def _activate(self, gate_up: Tensor) -> Tensor:
        activation = self.experts.activation
        if activation.kind == "clamped_swiglu":
            return clamped_swiglu_reference(gate_up, activation)
        gate, up = gate_up.chunk(2)
        return functional.silu(gate) * up

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        router = self.router
        logits = functional.linear(x.float(), self.gate.float(), self.logit_bias)
        scores = logits.softmax(-1) if router.scoring == "softmax" else logits.sigmoid()
        if router.scoring == "sparsemixer":
            return self._sparsemix(logits)
        if router.scoring == "sigmoid_of_chosen":
            return logits.topk(router.topk).indices, logits.topk(router.topk).values.sigmoid()
        choice = scores if self.bias is None else scores + self.bias
        if router.num_groups > 1:
            groups = choice.view(router.num_groups, -1)
            of_group = groups.amax(-1) if router.group_score == "best" else groups.topk(2, -1).values.sum(-1)
            best = of_group.topk(router.topk_groups).indices
            allowed = torch.zeros(router.num_groups, dtype=torch.bool).index_fill_(0, best, True)
            choice = groups.masked_fill(~allowed[:, None], -torch.inf).flatten()
        ids = choice.topk(router.topk).indices
        weights = scores[ids]
        if router.norm_topk:
            weights = weights / (weights.sum() + router.norm_eps).clamp(min=router.norm_min)
        return ids, weights * router.scaling

    def _sparsemix(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        left, ids, weights = logits.clone(), [], []
        for _ in range(2):
            best = left.max()
            near = (best - left) / torch.maximum(logits.abs(), best) <= 2 * self.router.jitter
            ids.append(int(left.argmax()))
            weights.append(1 / (left[near] - best).exp().sum())
            left[ids[-1]] = -torch.inf
        return torch.tensor(ids), torch.stack(weights)
