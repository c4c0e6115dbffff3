"""Launches of every kernel at production sizes, with tensors that have shapes but no memory: for compiling only.

Each function is one launch (or a few that belong together) of DeepSeek-V3's shape; capability is 80, 90 or 100.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_serve.kernels.forms import AttendShape, BlockScaled, Seen

if TYPE_CHECKING:
    from moe_serve.kernels.triton.attention import PagedRows

HIDDEN, INTERMEDIATE, TOKENS, TOPK, EXPERTS = 7168, 2048, 128, 8, 36
FP8 = torch.float8_e4m3fn


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def quantize(capability: int) -> None:
    from moe_serve.kernels.triton.quantize import dequantize_triton, quantize_triton

    quantize_triton(some(TOKENS, HIDDEN))
    quantize_triton(some(EXPERTS, 1024, HIDDEN), some(EXPERTS, dtype=torch.int64))
    dequantize_triton(some(TOKENS, HIDDEN, dtype=FP8), some(TOKENS, HIDDEN // 128, dtype=torch.float32), torch.bfloat16)


def packed_gemm_few_rows(capability: int) -> None:
    _packed_gemm(capability, 8)


def packed_gemm_some_rows(capability: int) -> None:
    _packed_gemm(capability, 64)


def packed_gemm_many_rows(capability: int) -> None:
    _packed_gemm(capability, 4096)


def _packed_gemm(capability: int, rows: int) -> None:
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton

    counts = some(8, dtype=torch.int64)
    grouped_gemm_triton(some(8 * rows, HIDDEN), some(8, 4096, HIDDEN), counts, described=capability >= 90)


def slab_gemm(capability: int) -> None:
    from moe_serve.kernels.forms import SILU
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton

    counts, weight = some(EXPERTS, dtype=torch.int64), some(EXPERTS, 4096, HIDDEN)
    for activation in (None, SILU):
        grouped_gemm_triton(
            some(EXPERTS, 1024, HIDDEN), weight, counts, described=capability >= 90, activation=activation
        )


def gated_gemm(capability: int) -> None:
    from moe_serve.kernels.forms import SILU
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton

    for rows in (64, 4096):
        counts, x = some(8, dtype=torch.int64), some(8 * rows, HIDDEN)
        grouped_gemm_triton(x, some(8, 4096, HIDDEN), counts, described=capability >= 90, activation=SILU)


def mxfp4_gemm(capability: int) -> None:
    from moe_serve.kernels.forms import Activation, Mxfp4
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton

    clamped, dtype = Activation("clamped_swiglu", 1.702, 7.0), torch.uint8
    for rows in (8, 512):
        x, counts = some(32 * rows, 2880), some(32, dtype=torch.int64)
        for n, activation in ((5760, clamped), (2880, None)):
            weight = Mxfp4(some(32, n, 1440, dtype=dtype), some(32, n, 90, dtype=dtype))
            bias = some(32, n, dtype=torch.float32)
            grouped_gemm_triton(x, weight, counts, described=capability >= 90, bias=bias, activation=activation)


def fp8_experts(slots: int, by_channel: bool = False) -> BlockScaled:
    shape = (2 * INTERMEDIATE,) if by_channel else (32, HIDDEN // 128)
    scales = some(slots, *shape, dtype=torch.float32)
    return BlockScaled(some(slots, 2 * INTERMEDIATE, HIDDEN, dtype=FP8), scales, parts=2)


def packed_gemm_fp8(capability: int, by_channel: bool = False) -> None:
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_fp8_triton

    for rows in (8, 64, 4096):
        x, scale = some(8 * rows, HIDDEN, dtype=FP8), some(8 * rows, HIDDEN // 128, dtype=torch.float32)
        counts = some(8, dtype=torch.int64)
        grouped_gemm_fp8_triton(x, scale, fp8_experts(8, by_channel), counts, described=capability >= 90)


def packed_gemm_fp8_by_channel(capability: int) -> None:
    packed_gemm_fp8(capability, by_channel=True)


def slab_gemm_fp8(capability: int) -> None:
    from moe_serve.kernels.triton.grouped_gemm import gated_gemm_fp8_triton, grouped_gemm_fp8_triton

    x, scale = some(EXPERTS, 1024, HIDDEN, dtype=FP8), some(EXPERTS, 1024, HIDDEN // 128, dtype=torch.float32)
    counts = some(EXPERTS, dtype=torch.int64)
    for product in (grouped_gemm_fp8_triton, gated_gemm_fp8_triton):
        product(x, scale, fp8_experts(EXPERTS), counts, described=capability >= 90)


def gated_gemm_fp8(capability: int) -> None:
    from moe_serve.kernels.triton.grouped_gemm import gated_gemm_fp8_triton

    x, scale = some(8 * 64, HIDDEN, dtype=FP8), some(8 * 64, HIDDEN // 128, dtype=torch.float32)
    for by_channel in (False, True):
        weight, counts = fp8_experts(8, by_channel), some(8, dtype=torch.int64)
        gated_gemm_fp8_triton(x, scale, weight, counts, described=capability >= 90)


def dense_gemm_fp8(capability: int) -> None:
    from moe_serve.kernels.triton.grouped_gemm import gated_gemm_fp8_triton, grouped_gemm_fp8_triton

    described, weight = capability >= 90, fp8_experts(1)
    for rows in (8, 64, 4096):
        x, scale = some(rows, HIDDEN, dtype=FP8), some(rows, HIDDEN // 128, dtype=torch.float32)
        grouped_gemm_fp8_triton(x, scale, weight, None, described=described)
        out = some(rows, 2 * INTERMEDIATE)
        grouped_gemm_fp8_triton(x, scale, weight, None, described=described, out=out, adds=True)
        gated_gemm_fp8_triton(x, scale, weight, None, described=described)


def silu_mul(capability: int) -> None:
    from moe_serve.kernels.triton.silu_mul import silu_mul_triton

    silu_mul_triton(some(4096, 2 * INTERMEDIATE))


def low_latency(capability: int, fp8: bool = False, nvshmem: bool = False, topk: int = TOPK) -> None:
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks
    from moe_serve.dispatch.gpu.region import Region
    from moe_serve.dispatch.gpu.symmetric import SymmetricRegions

    # More ranks than experts of a token: blocks over either have another shape.
    region = Region(32, EXPERTS, TOKENS, HIDDEN, topk, 1 if fp8 else 2, 2, stages=nvshmem, num_queues=1)
    peers = some(32, dtype=torch.int64)
    launchers = nvshmem_launchers(capability) if nvshmem else None
    own = some(1, region.region_bytes, dtype=torch.uint8)
    regions = SymmetricRegions(region, peers, 0, 1, own, nvshmem, launchers, own)
    ranks = SlabRanks(regions, torch.bfloat16)
    sent = ranks.dispatch_send(some(1, TOKENS, HIDDEN), some(1, TOKENS, topk, dtype=torch.int64))
    ranks.combine_send(sent, ranks.dispatch_receive(sent).x)
    if nvshmem:  # results that experts have written where they are sent from
        assert ranks.staged[0] is not None
        ranks.combine_send(sent, ranks.staged[0])
    ranks.combine_receive(sent, some(1, TOKENS, topk, dtype=torch.float32))


def low_latency_many_tokens(capability: int) -> None:
    """Sends more tokens than one program looks through, as a prefill does over CUDA IPC."""
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks
    from moe_serve.dispatch.gpu.region import Region
    from moe_serve.dispatch.gpu.symmetric import SymmetricRegions

    region = Region(8, EXPERTS, 4096, HIDDEN, TOPK, 2, 2, num_queues=1)
    regions = SymmetricRegions(region, some(8, dtype=torch.int64), 0, 1, some(1, dtype=torch.uint8))
    ranks = SlabRanks(regions, torch.bfloat16)
    ranks.dispatch_send(some(1, 4096, HIDDEN), some(1, 4096, TOPK, dtype=torch.int64))


def low_latency_fp8(capability: int) -> None:
    low_latency(capability, fp8=True)


def low_latency_top16(capability: int) -> None:
    low_latency(capability, topk=16)


def replica_split(capability: int, ranks: int = 32, redundant: int = 64) -> None:
    from moe_serve.kernels.triton.replica_split import split_replicas_triton

    experts, ids = 256, some(TOKENS, TOPK, dtype=torch.int64)
    slots = experts + redundant
    sizes = {"by_expert": slots, "slot_start": experts + 2, "fixed_slot": experts, "experts": redundant}
    tables = {name: some(size, dtype=torch.int64) for name, size in sizes.items()}
    tables["replica_slot"] = some(redundant, ranks, dtype=torch.int64)
    counts, outcomes = some(ranks, experts, dtype=torch.int64), some(3, dtype=torch.int64)
    for reaches in (1, 3):
        tables |= {name: some(reaches, slots, dtype=torch.int64) for name in ("size", "turn")}
        tables |= {"uses": some(reaches, ranks, experts, dtype=torch.bool)}
        tables |= {"serves": some(reaches, ranks, slots, dtype=torch.bool)}
        split_replicas_triton(ids, counts, 0, tables, 8, None)
    split_replicas_triton(ids, counts, 0, tables, 8, outcomes)


def replica_split_wide(capability: int) -> None:
    replica_split(capability, 144, 32)


def sampling(capability: int) -> None:
    from moe_serve.kernels.triton.sampling import sample_rows_triton
    from tests.kernels.sampling_rows import rows_of

    sample_rows_triton(some(TOKENS, 151936, dtype=torch.float32), rows_of([{}] * TOKENS))


def norms(capability: int) -> None:
    from moe_serve.kernels.triton.norm import norm_triton

    for width in (2880, HIDDEN):
        for bias in (None, some(width)):
            x = some(TOKENS, width)
            norm_triton(x, x, some(width), bias, 1e-6, 1.0, some(TOKENS, width))


def rope_write_8_bits(capability: int) -> None:
    rope_write(capability, FP8)


def rope_write(capability: int, kept: torch.dtype | None = None) -> None:
    """kept: 8 bits, with scales"""
    from moe_serve.kernels.forms import MlaWidths
    from moe_serve.kernels.triton.rope import mla_rope_write_triton, rope_write_triton

    slots, complexes = some(TOKENS, dtype=torch.int64), torch.complex64
    q, k, cache, norm = some(TOKENS, 32, 128), some(TOKENS, 8, 128), some(999, 8, 128), some(36, 128)
    scales = None
    if kept is not None:
        cache, scales = some(999, 8, 128, dtype=kept), some(999, 8, 1, dtype=torch.float32)
    rope_write_triton(q, k, norm, 1e-6, some(TOKENS, 64, dtype=complexes), slots, cache, scales=scales)
    rows, turns = some(TOKENS, 576), some(TOKENS, 32, dtype=complexes)
    q, cache, widths = some(TOKENS, 128, 192), some(999, 1, 576), MlaWidths(128, 512, 64)
    if kept is not None:
        cache, scales = some(999, 1, 576, dtype=kept), some(999, 1, 2, dtype=torch.float32)
    mla_rope_write_triton(q, rows, some(512), 1e-6, turns, slots, cache, widths, scales)


def row_factors(capability: int) -> None:
    from moe_serve.kernels.triton.row_factors import multiply_rows_triton

    multiply_rows_triton(some(TOKENS, HIDDEN), some(TOKENS, 1, dtype=torch.float32), some(TOKENS, HIDDEN))


def pack_rows(capability: int, quantised: bool = False) -> None:
    from moe_serve.kernels.triton.pack_rows import pack_all_rows_triton

    pack_all_rows_triton(some(TOKENS, HIDDEN), some(TOKENS, TOPK, dtype=torch.int64), 256, quantised)


def pack_rows_fp8(capability: int) -> None:
    pack_rows(capability, quantised=True)


def gpt_oss_experts(capability: int) -> None:
    from moe_serve.kernels.forms import Activation
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton

    bias, counts = some(32, 5760, dtype=torch.float32), some(32, dtype=torch.int64)
    x, weight, activation = some(512, 2880), some(32, 5760, 2880), Activation("clamped_swiglu", 1.702, 7.0)
    grouped_gemm_triton(x, weight, counts, described=capability >= 90, bias=bias, activation=activation)


def weighted_sum(capability: int) -> None:
    from moe_serve.kernels.triton.weighted_sum import weighted_sum_triton

    index, weights = some(4096, TOPK, dtype=torch.int64), some(4096, TOPK, dtype=torch.float32)
    weighted_sum_triton(some(4096 * TOPK, HIDDEN), index, weights)


def topk_gate(capability: int) -> None:
    from moe_serve.kernels.forms import RouterSpec
    from moe_serve.kernels.triton.topk_gate import topk_gate_triton

    deepseek = RouterSpec(256, TOPK, "sigmoid", True, 2.5, num_groups=8, topk_groups=4, norm_eps=1e-20)
    phi = RouterSpec(16, 2, "sparsemixer", norm_topk=False, jitter=0.01)
    for spec, bias in ((deepseek, some(256, dtype=torch.float32)), (RouterSpec(128, TOPK), None), (phi, None)):
        experts = spec.num_logical
        logits = some(TOKENS, experts, dtype=torch.float32)
        longs = [some(size, dtype=torch.int64) for size in (experts, experts + 1, TOKENS)]
        topk_gate_triton(logits, bias, spec, *longs)


def low_latency_nvshmem(capability: int) -> None:
    low_latency(capability, nvshmem=True)


def nvshmem_launchers(capability: int) -> dict[str, object]:
    from moe_serve.dispatch.gpu import symmetric

    return symmetric.nvshmem_launchers(divmod(capability, 10))


def _attend(
    shape: AttendShape, lens: list[int], dtype: torch.dtype, limited: bool = False, kept: torch.dtype | None = None
) -> None:
    """Launches attention of sequences with so many rows each and up to 4096 keys.

    limited: by a window, with sinks;  kept: dtype of a cache in 8 bits
    """
    from moe_serve.kernels.triton.attention import attend_triton

    sinks = some(shape.heads * shape.group, dtype=torch.float32)
    q = some(sum(lens), shape.heads, shape.group, shape.width, dtype=dtype)
    out = some(sum(lens), shape.heads, shape.group, shape.value_width, dtype=dtype)
    seen = Seen(128, None, sinks) if limited else Seen()
    cache, scales = some(1024, *shape.row_shape, dtype=kept or dtype), None
    if kept is not None:
        scales = some(1024, shape.row_shape[0], 1 if shape.latent is None else 2, dtype=torch.float32)
    attend_triton(q, cache, out, shape, _paged(lens), seen, scales=scales)


def _paged(lens: list[int]) -> "PagedRows":
    from moe_serve.kernels.triton.attention import PagedRows

    starts = None if max(lens) == 1 else some(len(lens) + 1, dtype=torch.int32)
    seq_lens, tables = some(len(lens), dtype=torch.int64), some(len(lens), 512, dtype=torch.int32)
    return PagedRows(starts, seq_lens, tables, 16, sum(lens), 4096)


GQA, GPT_OSS, WIDE = AttendShape(8, 8, 128, 0.1), AttendShape(8, 8, 64, 0.1), AttendShape(4, 16, 192, 0.1)
MLA = AttendShape(1, 128, 576, 0.1, latent=512)
CHUNKS = [7, 300, 512]


def attend_gqa(capability: int) -> None:
    for lens in ([1] * TOKENS, [1], CHUNKS):
        _attend(GQA, lens, torch.bfloat16)


def attend_sinks(capability: int) -> None:
    for lens in ([1] * TOKENS, CHUNKS):
        _attend(GPT_OSS, lens, torch.float16, limited=True)


def attend_wide(capability: int) -> None:
    for lens in ([1] * TOKENS, CHUNKS):
        _attend(WIDE, lens, torch.bfloat16)


def attend_latent(capability: int) -> None:
    for lens in ([1] * TOKENS, [1], CHUNKS):
        _attend(MLA, lens, torch.bfloat16)


def attend_float32(capability: int) -> None:
    for shape in (GQA, WIDE):
        for lens in ([1] * TOKENS, CHUNKS):
            _attend(shape, lens, torch.float32)


def attend_float32_latent(capability: int) -> None:
    for lens in ([1] * TOKENS, [1], CHUNKS):
        _attend(MLA, lens, torch.float32)
    attend_expanded(capability, torch.float32)


def attend_int8(capability: int) -> None:
    _attend_8_bits(torch.int8)


def attend_fp8(capability: int) -> None:
    _attend_8_bits(FP8)


def _attend_8_bits(kept: torch.dtype) -> None:
    for shape in (GQA, MLA):
        for lens in ([1] * TOKENS, [1], CHUNKS):
            _attend(shape, lens, torch.bfloat16, kept=kept)


def attend_indexed(capability: int) -> None:
    from moe_serve.kernels.triton.indexed_attention import attend_indexed_triton

    q, out = some(sum(CHUNKS), 1, 128, 576), some(sum(CHUNKS), 1, 128, 512)
    index = some(sum(CHUNKS), 64, 128), some(sum(CHUNKS), 64), some(1024, 1, 128), 2048
    attend_indexed_triton(q, some(1024, 1, 576), out, MLA, index, _paged(CHUNKS))


def attend_expanded(capability: int, dtype: torch.dtype = torch.bfloat16) -> None:
    from moe_serve.kernels.triton.expanded_attention import ExpandedRows, attend_expanded_triton

    rows = ExpandedRows.of(_paged(CHUNKS), (4096, 512, 512))
    shapes = (sum(CHUNKS), 128, 192), (1024, 1, 576), (sum(CHUNKS), 128, 128), (128, 128, 512), (128, 512, 128)
    attend_expanded_triton(*(some(*shape, dtype=dtype) for shape in shapes), 0.1, rows)
