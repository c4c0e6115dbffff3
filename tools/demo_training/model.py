"""A small DeepSeek-V3 for training on a CPU: MLA, a group-limited sigmoid gate with correction bias, a shared expert.

The serving model in moe_serve.models keeps caches and places experts; this one has gradients, and keeps all experts in
two tensors for one grouped GEMM. Shape words: batch, seq (tokens), hidden, heads, experts, topk.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_serve.errors import ConfigError

EPS = 1e-6
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class ModelShape:
    """Sizes, with the names of the Hugging Face configuration."""

    vocab_size: int = 2048
    hidden_size: int = 192
    num_hidden_layers: int = 5
    num_attention_heads: int = 6
    kv_lora_rank: int = 48
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 32
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    moe_intermediate_size: int = 64
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.0
    max_position_embeddings: int = 1024

    @property
    def intermediate_size(self) -> int:
        """Returns the width of dense layers: that of all experts of one token."""
        return self.num_experts_per_tok * self.moe_intermediate_size


def named_shape(size: str, vocab_size: int) -> ModelShape:
    """Returns the shape called "demo" (6 M parameters, as shipped) or "tiny" (to try the tool)."""
    match size:
        case "demo":
            return ModelShape(vocab_size=vocab_size)
        case "tiny":
            return ModelShape(
                vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=16,
                qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=8, num_experts_per_tok=2,
                n_group=2, topk_group=1, moe_intermediate_size=16,
            )  # fmt: skip
        case _:
            raise ConfigError(f"--size is {size!r}, expected demo or tiny")


class RMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies RoPE to interleaved pairs. x: [..., seq, rope]; cos, sin: [seq, rope], halves repeated."""
    x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class LatentAttention(nn.Module):
    """MLA without query compression, in its expanded form."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        query_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        heads = shape.num_attention_heads
        self.q_proj = nn.Linear(shape.hidden_size, heads * query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden_size, shape.kv_lora_rank + shape.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank)
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * shape.v_head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, seq, hidden] -> same"""
        shape = self.shape
        batch, seq, _ = x.shape
        heads, nope, rope = shape.num_attention_heads, shape.qk_nope_head_dim, shape.qk_rope_head_dim
        query = self.q_proj(x).view(batch, seq, heads, nope + rope).transpose(1, 2)
        query_nope, query_rope = query.split((nope, rope), -1)
        latent, key_rope = self.kv_a_proj_with_mqa(x).split((shape.kv_lora_rank, rope), -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, seq, heads, nope + shape.v_head_dim)
        key_nope, value = expanded.transpose(1, 2).split((nope, shape.v_head_dim), -1)
        key_rope = rotate(key_rope.view(batch, 1, seq, rope), cos, sin).expand(batch, heads, seq, rope)
        query = torch.cat((query_nope, rotate(query_rope, cos, sin)), -1)
        key = torch.cat((key_nope, key_rope), -1)
        # Values padded to the size of keys: only then does the CPU take its fused attention.
        value = F.pad(value, (0, nope + rope - shape.v_head_dim))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)[..., : shape.v_head_dim]
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, seq, heads * shape.v_head_dim))
        return projected


class GatedMlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class SparseMoe(nn.Module):
    """Routed experts and one shared expert. After a forward, `load` holds the tokens of each expert."""

    bias: Tensor  # [experts] float32; a buffer: moved by the training loop, not by gradients

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        experts, hidden, width = shape.n_routed_experts, shape.hidden_size, shape.moe_intermediate_size
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts))
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.shared_experts = GatedMlp(hidden, width)
        self.load = torch.zeros(experts, dtype=torch.int64)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, hidden] -> (expert ids [tokens, topk] int64, their weights [tokens, topk])"""
        shape = self.shape
        scores = torch.sigmoid(self.gate(x).float())
        choice = scores.detach() + self.bias
        grouped = choice.view(len(x), shape.n_group, -1)
        best_groups = grouped.topk(2, -1).values.sum(-1).topk(shape.topk_group, -1).indices
        open_groups = torch.zeros(len(x), shape.n_group, dtype=torch.bool).scatter_(1, best_groups, True)
        choice = grouped.masked_fill(~open_groups[..., None], 0.0).flatten(1)
        ids = choice.topk(shape.num_experts_per_tok, -1).indices
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * shape.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ids, weights = self.route(flat)
        chosen = ids.reshape(-1)
        self.load = torch.bincount(chosen, minlength=self.shape.n_routed_experts)
        order = chosen.argsort(stable=True)
        token = order // self.shape.num_experts_per_tok
        ends = self.load.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(flat[token], self.gate_up, offs=ends).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends) * weights.reshape(-1)[order, None]
        routed = torch.zeros_like(flat).index_add_(0, token, rows)
        shared: Tensor = self.shared_experts(flat)
        return (routed + shared).view(x.shape)


class DecoderLayer(nn.Module):
    def __init__(self, shape: ModelShape, index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size)
        self.self_attn = LatentAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)
        is_dense = index < shape.first_k_dense_replace
        self.mlp = GatedMlp(shape.hidden_size, shape.intermediate_size) if is_dense else SparseMoe(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DemoModel(nn.Module):
    """The language model; the output head is the embedding table."""

    cos: Tensor  # [positions, rope]
    sin: Tensor

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape, index) for index in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size)
        steps = torch.arange(0, shape.qk_rope_head_dim, 2).float() / shape.qk_rope_head_dim
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), ROPE_THETA**-steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Small embeddings and gates; elsewhere 0.7 / sqrt(fan-in), and less for what adds to the residual stream."""
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            fan_in = weight.shape[-1] if weight.dim() == 2 else weight.shape[1]
            is_small = "embed" in name or "gate.weight" in name
            nn.init.normal_(weight, std=0.02 if is_small else 0.7 / math.sqrt(fan_in))
            if "o_proj" in name or "down" in name:
                weight.data.mul_(1 / math.sqrt(2 * self.shape.num_hidden_layers))

    @property
    def moe_layers(self) -> list[SparseMoe]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, SparseMoe)]

    def hidden(self, ids: Tensor) -> Tensor:
        """Returns the rows that the head projects. ids: [batch, seq] int64 -> [batch, seq, hidden]"""
        x = self.embed_tokens(ids)
        seq = ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:seq], self.sin[:seq])
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, seq] int64 -> logits [batch, seq, vocab]"""
        return F.linear(self.hidden(ids), self.embed_tokens.weight)


class PredictionLayer(nn.Module):
    """A layer for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2). Embedding and head are shared.

    It begins as the model's last layer, on the mean of the rows that it joins.
    """

    def __init__(self, model: DemoModel):
        super().__init__()
        shape = model.shape
        self.enorm, self.hnorm = RMSNorm(shape.hidden_size), RMSNorm(shape.hidden_size)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        nn.init.normal_(self.eh_proj.weight, std=0.02)
        with torch.no_grad():
            self.eh_proj.weight += 0.5 * torch.eye(shape.hidden_size).repeat(1, 2)
        self.layer = DecoderLayer(shape, shape.num_hidden_layers)
        self.layer.load_state_dict(model.layers[-1].state_dict())
        self.norm = RMSNorm(shape.hidden_size)

    def forward(self, model: DemoModel, hidden: Tensor, following: Tensor) -> Tensor:
        """Returns logits [batch, seq, vocab] of the tokens behind those that follow.

        hidden: [batch, seq, hidden], of `model.hidden`;  following: [batch, seq] int64, the token behind each row
        """
        seq = following.shape[1]
        x = self.eh_proj(torch.cat((self.enorm(model.embed_tokens(following)), self.hnorm(hidden)), -1))
        x = self.layer(x, model.cos[:seq], model.sin[:seq])
        return F.linear(self.norm(x), model.embed_tokens.weight)
