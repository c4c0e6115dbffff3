"""A small fixed computation by every kernel whose rounding could differ between machines, as one hash.

Ranks with equal hashes compute the same bits. They may use AVX-512, AVX2 or NEON; without fused multiply-adds, or with
a compiler that rounds elsewhere, the hash is another one.
"""

import hashlib

import torch
from torch import Tensor

from moe_serve.kernels.cpu.attention import AttendRows, AttendShape, attend
from moe_serve.kernels.cpu.experts import PackedExperts, packed_ffn
from moe_serve.kernels.cpu.gate import gate
from moe_serve.kernels.cpu.linear import PackedLinear
from moe_serve.kernels.cpu.packed import gate_up_size, pack, pack_gate_up, packed_size
from moe_serve.kernels.cpu.rows import rms_norm
from moe_serve.kernels.gate_shape import GateShape

_HIDDEN, _WIDTH, _ROWS = 75, 43, 9  # no multiples of a vector's width


def kernel_digest() -> str:
    """Returns the hash, 16 hexadecimal digits."""
    x = _numbers(_ROWS, _HIDDEN)
    normed = rms_norm(x, _numbers(_HIDDEN), 1e-6)
    logits = PackedLinear(_numbers(24, _HIDDEN))(normed)
    _, weights = gate(logits, None, GateShape(3, "softmax", True, 1.0), torch.zeros(24, dtype=torch.int64))
    _, sigmoids = gate(logits, None, GateShape(3, "sigmoid", True, 2.5), torch.zeros(24, dtype=torch.int64))
    # Tables of rotations are computed by torch on each rank.
    angles = torch.arange(64) * 0.37
    outputs = (normed, logits, weights, sigmoids, _experts(normed), _attention(), angles.cos(), angles.sin())
    digest = hashlib.blake2b(digest_size=8)
    for output in outputs:
        digest.update(output.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _experts(x: Tensor) -> Tensor:
    gate_up = torch.empty(1, gate_up_size(_WIDTH, _HIDDEN))
    down = torch.empty(1, packed_size(_HIDDEN, _WIDTH))
    pack_gate_up(_numbers(2 * _WIDTH, _HIDDEN), gate_up[0])
    pack(_numbers(_HIDDEN, _WIDTH), down[0])
    return packed_ffn(x, torch.tensor([len(x)]), PackedExperts(gate_up, down, _HIDDEN, _WIDTH))


def _attention() -> Tensor:
    """Returns the attention of three rows over 130 keys, more than two tiles."""
    shape = AttendShape(2, 3, 20, 0.2)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    rows = AttendRows(shape, torch.arange(127, 130), starts, torch.arange(9, dtype=torch.int32)[None], 16)
    return attend(_numbers(3, 2, 3, 20), _numbers(144, *shape.row_shape), rows)


def _numbers(*shape: int) -> Tensor:
    """Returns float32 numbers in [-1, 1) that whole-number arithmetic gives, so that every machine has the same."""
    size = torch.Size(shape).numel()
    return ((torch.arange(size) * 2654435761 + 12345) % 2**20 / 2**19 - 1).float().view(shape)
