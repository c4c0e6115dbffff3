"""A plain MoE layer for one rank that routes and runs every token on its own, to test the decoder without ep/."""

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.ep.moe_layer import ExpertParallel, MoeWeights, record_call
from moe_serve.kernels.cpu.recorder import Recorder


class ReferenceMoe:
    """Its result cannot depend on the batch: each token is computed alone, experts added in top-k order in float32."""

    def __init__(self, parallel: ExpertParallel, layer_row: int, weights: MoeWeights):
        self.router, self.gate, self.bias = parallel.router, weights.gate, weights.correction_bias
        self.experts, self.shared = weights.experts, weights.shared

    def __call__(self, x: Tensor, num_tokens: int, num_chunks: int, overlap: bool = False) -> Tensor:
        out = self.shared(x) if self.shared is not None else torch.zeros_like(x)
        for t in range(num_tokens):
            ids, weights = self._route(x[t])
            total = torch.zeros_like(x[t], dtype=torch.float32)
            for expert, weight in zip(ids.tolist(), weights, strict=True):
                gate, up = functional.linear(x[t], self.experts.matrix("gate_up")[expert]).chunk(2)
                total += (
                    weight * functional.linear(functional.silu(gate) * up, self.experts.matrix("down")[expert]).float()
                )
            out[t] = (out[t].float() + total).to(x.dtype)
        return out

    def record(self, recorder: Recorder, x: Tensor) -> Tensor:
        return record_call(recorder, self, x)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        router = self.router
        logits = functional.linear(x.float(), self.gate.float())
        scores = logits.softmax(-1) if router.scoring == "softmax" else logits.sigmoid()
        choice = scores if self.bias is None else scores + self.bias
        if router.num_groups > 1:
            groups = choice.view(router.num_groups, -1)
            best = groups.topk(2, -1).values.sum(-1).topk(router.topk_groups).indices
            allowed = torch.zeros(router.num_groups, dtype=torch.bool).index_fill_(0, best, True)
            choice = groups.masked_fill(~allowed[:, None], -torch.inf).flatten()
        ids = choice.topk(router.topk).indices
        weights = scores[ids]
        if router.norm_topk:
            weights = weights / (weights.sum() + router.norm_eps)
        return ids, weights * router.scaling
