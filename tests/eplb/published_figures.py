"""Published measurements that the cost model is held against.

Which of them parameters may be fitted on, and which are only predicted, was written down here, and committed, before
anything was fitted. `docs/cost-model.md` tells the outcome.

Sources: DeepEP README (low-latency and normal kernels, H800 + CX7 400 Gb/s; hidden 7168, top-8, dispatch FP8, combine
BF16; low latency: 128 tokens per rank; normal: 4096 tokens per rank, top-4 groups). DeepGEMM README before its table
was removed (H800, FP8). DeepSeek open-infra-index day 6 (24 hours of serving). SGLang blog 2025-05-05 (12 x 8 H100).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LowLatency:
    """DeepEP low-latency kernels. seconds of one call."""

    num_ranks: int
    dispatch_s: float
    combine_s: float


@dataclass(frozen=True)
class Normal:
    """DeepEP normal kernels. bytes_per_s: bytes that a rank sends over the named link, all copies, divided by time."""

    num_ranks: int
    dispatch_bytes_per_s: float
    combine_bytes_per_s: float


@dataclass(frozen=True)
class GroupedGemm:
    """DeepGEMM grouped kernels: num_groups of `rows` rows each, [rows, k] x [k, n]."""

    num_groups: int
    rows: int
    n: int
    k: int
    flops: float


@dataclass(frozen=True)
class Serving:
    """Tokens per second of a node of 8 GPUs."""

    hardware: str
    num_ranks: int
    tokens_per_rank: int
    context: int
    tokens_per_s_node: float


FITTED_LOW_LATENCY = [LowLatency(16, 118e-6, 195e-6), LowLatency(32, 155e-6, 273e-6)]
HELD_OUT_LOW_LATENCY = [
    LowLatency(8, 77e-6, 114e-6),
    LowLatency(64, 173e-6, 314e-6),
    LowLatency(128, 192e-6, 369e-6),
    LowLatency(256, 194e-6, 360e-6),
]

FITTED_NORMAL = [Normal(32, 58e9, 57e9)]
HELD_OUT_NORMAL = [Normal(16, 43e9, 43e9), Normal(64, 51e9, 50e9)]

FITTED_GEMM = [GroupedGemm(4, 8192, 4096, 7168, 1346e12), GroupedGemm(4, 256, 4096, 7168, 932e12)]
HELD_OUT_GEMM = [
    GroupedGemm(8, 4096, 7168, 2048, 1214e12),
    GroupedGemm(1, 1024, 4096, 7168, 1233e12),
    GroupedGemm(4, 256, 7168, 2048, 815e12),
]

# Decode: tokens_per_rank = running requests of a GPU. DeepSeek: 14.8k tokens/s per node at 20-22 tokens/s per user are
# 88 requests per GPU. SGLang: 9 decode nodes, 256 requests per GPU, inputs of 2000 tokens.
FITTED_DECODE = [Serving("H100", 72, 256, 2000, 22.3e3)]
HELD_OUT_DECODE = [Serving("H800", 144, 88, 4989, 14.8e3)]

# Prefill, all held out. SGLang: 4 nodes, 16384 tokens per GPU and step, prompts of 2000 tokens. DeepSeek: 73.7k per
# node with 56.3 % from the cache leave 32.2k computed; a mean over a day on which nodes were not always full.
HELD_OUT_PREFILL = [Serving("H100", 32, 16384, 2000, 52.3e3), Serving("H800", 32, 16384, 4096, 32.2e3)]
