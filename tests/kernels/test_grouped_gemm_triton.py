"""Grouped GEMM in Triton: packed rows and masked slabs, bf16 and FP8 with block scales."""

import pytest
import torch

from tests.kernels.conftest import RunCheck
from tests.kernels.data import randn, relative_error

ROWS = [[0, 0, 0], [1, 0, 7], [4, 4, 4], [16, 0, 0], [5, 33, 17]]
BF16_LIMIT = 4e-3  # one rounding of the result to bf16
FLOAT32_LIMIT = 1e-5  # another order of the same float32 sums


def expected_rows(x: torch.Tensor, weight: torch.Tensor, rows: list[int]) -> torch.Tensor:
    pieces = zip(x.float().cpu().split(rows), weight.float().cpu(), strict=True)
    return torch.cat([piece @ w.T for piece, w in pieces])


def check_packed(device: str, rows: list[int], n: int, k: int, small: bool) -> None:
    from moe_serve.kernels.triton.grouped_gemm import GemmTile, grouped_gemm_triton

    x, weight = randn(device, sum(rows), k), randn(device, len(rows), n, k, seed=1)
    tile = GemmTile(16, 16, 16, num_warps=4, num_stages=2, group_m=2) if small else None
    y = grouped_gemm_triton(x, weight, torch.tensor(rows), tile=tile)
    assert y.dtype == x.dtype
    expected = expected_rows(x, weight, rows)
    assert relative_error(y, expected) < BF16_LIMIT
    bias = randn(device, len(rows), n, dtype=torch.float32, seed=2)
    y = grouped_gemm_triton(x.float(), weight.float(), torch.tensor(rows), tile=tile, bias=bias)
    expected += bias.cpu().repeat_interleave(torch.tensor(rows), dim=0)
    assert relative_error(y, expected) < FLOAT32_LIMIT


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_packed_rows_meet_their_own_expert(on_device: RunCheck, rows: list[int]) -> None:
    on_device(check_packed, rows, 40, 24, True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[0, 1, 300, 4096], [20] * 32, [3, 0, 3]], ids=str)
def test_packed_rows_of_production_width(rows: list[int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check_packed("cuda", rows, 4096, 7168, False)
    check_packed("cuda", rows, 100, 130, False)  # no multiple of any tile, rows not 16-byte aligned


def check_slab(device: str, counts: list[int], capacity: int, n: int, k: int) -> None:
    from moe_serve.kernels.triton.grouped_gemm import GemmTile, grouped_gemm_triton

    slots = len(counts)
    x, weight = randn(device, slots, capacity, k), randn(device, slots, n, k, seed=1)
    for slot, count in enumerate(counts):
        x[slot, count:] = torch.nan  # never read
    y = grouped_gemm_triton(x, weight, torch.tensor(counts, device=device), tile=GemmTile(16, 16, 16, 4, 2))
    for slot, count in enumerate(counts):
        expected = x[slot, :count].float().cpu() @ weight[slot].float().cpu().T
        assert relative_error(y[slot, :count], expected) < BF16_LIMIT


@pytest.mark.parametrize("counts", [[0, 0], [1, 8], [8, 0], [5, 3]], ids=str)
def test_slabs_use_their_first_rows_only(on_device: RunCheck, counts: list[int]) -> None:
    on_device(check_slab, counts, 8, 24, 40)


def check_fp8(device: str, rows: list[int], n: int, k: int, parts: int, small: bool, by_channel: bool = False) -> None:
    from moe_serve.kernels.forms import BlockScaled
    from moe_serve.kernels.quantised import dequantize_reference, dequantize_weight, quantize_reference, quantize_weight
    from moe_serve.kernels.triton.grouped_gemm import GemmTile, grouped_gemm_fp8_triton

    x, scale = quantize_reference(randn("cpu", sum(rows), k))
    # The parts differ in size, so that a block's scale in the other part would show.
    drawn = randn("cpu", len(rows), n, k, seed=1) * torch.arange(1, parts + 1).repeat_interleave(n // parts)[:, None]
    weight = quantize_weight(drawn, parts, by_channel)
    tile = GemmTile(16, 32, 128, 4, 2) if small else None
    q, q_scale = x.to(device), scale.to(device)
    moved = BlockScaled(weight.q.to(device), weight.scale.to(device), parts)
    y = grouped_gemm_fp8_triton(q, q_scale, moved, torch.tensor(rows), tile=tile)
    expected = expected_rows(dequantize_reference(x, scale, torch.float32), dequantize_weight(weight), rows)
    assert relative_error(y, expected) < BF16_LIMIT

    capacity = max(rows) + 1  # the same rows in slabs
    slab = torch.zeros(len(rows), capacity, k, dtype=torch.uint8, device=device)
    slab_scale = torch.full((len(rows), capacity, scale.shape[1]), torch.nan, device=device)
    for slot, (values, s) in enumerate(zip(q.view(torch.uint8).split(rows), q_scale.split(rows), strict=True)):
        slab[slot, : len(values)], slab_scale[slot, : len(values)] = values, s
    counts = torch.tensor(rows, device=device)
    out = grouped_gemm_fp8_triton(slab.view(torch.float8_e4m3fn), slab_scale, moved, counts, torch.float32, tile=tile)
    assert out.dtype == torch.float32
    filled = torch.cat([out[slot, :count] for slot, count in enumerate(rows)])
    assert relative_error(filled, expected) < FLOAT32_LIMIT


@pytest.mark.parametrize(
    "rows, n, k, parts", [([1, 0, 7], 40, 130, 1), ([16, 3], 200, 256, 1), ([2, 5], 272, 130, 2)], ids=str
)
def test_fp8_block_scales_reach_their_blocks(on_device: RunCheck, rows: list[int], n: int, k: int, parts: int) -> None:
    on_device(check_fp8, rows, n, k, parts, True)


@pytest.mark.parametrize("rows, n, k, parts", [([1, 0, 7], 40, 130, 1), ([2, 5], 272, 130, 2)], ids=str)
def test_fp8_scales_of_channels_reach_their_channels(
    on_device: RunCheck, rows: list[int], n: int, k: int, parts: int
) -> None:
    on_device(check_fp8, rows, n, k, parts, True, True)


@pytest.mark.gpu
def test_fp8_of_production_width() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check_fp8("cuda", [0, 1, 300, 1024], 2048, 7168, 1, False)
    check_fp8("cuda", [5, 300], 1408, 2048, 2, False)
    check_fp8("cuda", [5, 300], 1408, 2048, 2, False, True)


def check_invariance(device: str) -> None:
    from moe_serve.kernels.numerics import Numerics
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton

    x, weight = randn(device, 70, 64), randn(device, 1, 40, 64, seed=1)
    alone = grouped_gemm_triton(x[66:67], weight, torch.tensor([1]), Numerics(row_tile=8))
    among = grouped_gemm_triton(x, weight, torch.tensor([70]), Numerics(row_tile=8))
    assert torch.equal(alone[0], among[66])


def test_in_batch_invariant_a_row_does_not_depend_on_its_neighbours(on_device: RunCheck) -> None:
    on_device(check_invariance)


def check_invariance_fp8(device: str) -> None:
    from moe_serve.kernels.forms import BlockScaled
    from moe_serve.kernels.numerics import Numerics
    from moe_serve.kernels.quantised import quantize_reference, quantize_weight
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_fp8_triton

    x, scale = (part.to(device) for part in quantize_reference(randn("cpu", 70, 200)))
    weight = quantize_weight(randn("cpu", 1, 40, 200, seed=1))
    weight = BlockScaled(weight.q.to(device), weight.scale.to(device))
    tiled = (torch.float32, Numerics(row_tile=8))
    alone = grouped_gemm_fp8_triton(x[66:67], scale[66:67], weight, torch.tensor([1]), *tiled)
    among = grouped_gemm_fp8_triton(x, scale, weight, torch.tensor([70]), *tiled)
    assert torch.equal(alone[0], among[66])


def test_in_batch_invariant_an_fp8_row_does_not_depend_on_its_neighbours(on_device: RunCheck) -> None:
    on_device(check_invariance_fp8)


def check_fp8_expert(device: str, rows: list[int], hidden: int, width: int) -> None:
    """The steps of ep/expert_store.py on a GPU, packed and in slabs, against those on a CPU."""
    from moe_serve.dispatch.base import PackedRows
    from moe_serve.ep.expert_store import ExpertStore, expert_ffn
    from moe_serve.kernels.forms import BlockScaled
    from moe_serve.kernels.quantised import quantize_weight
    from moe_serve.kernels.triton.grouped_gemm import gated_gemm_fp8_triton, grouped_gemm_fp8_triton
    from moe_serve.kernels.triton.quantize import quantize_triton

    slots = len(rows)
    gate_up = quantize_weight(randn("cpu", slots, 2 * width, hidden) / hidden**0.5, 2)
    down = quantize_weight(randn("cpu", slots, hidden, width, seed=1) / width**0.5)
    counts, x = torch.tensor(rows), randn("cpu", sum(rows), hidden, seed=2)
    up_on, down_on = (BlockScaled(w.q.to(device), w.scale.to(device), w.parts) for w in (gate_up, down))
    between = gated_gemm_fp8_triton(*quantize_triton(x.to(device)), up_on, counts)
    packed = grouped_gemm_fp8_triton(*between, down_on, counts)

    slab = torch.full((slots, max(rows) + 1, hidden), torch.nan, dtype=x.dtype, device=device)
    filled = torch.arange(slab.shape[1]) < counts[:, None]
    slab[filled.to(device)] = x.to(device)
    on_device = counts.to(device)
    between = gated_gemm_fp8_triton(*quantize_triton(slab, on_device), up_on, on_device)
    masked = grouped_gemm_fp8_triton(*between, down_on, on_device)

    own = {"gate_up": gate_up.q, "gate_up_scale": gate_up.scale, "down": down.q, "down_scale": down.scale}
    expected = expert_ffn(PackedRows(x, counts), ExpertStore(own))
    # bf16 between the steps is rounded a bit earlier or later, and then to another step of e4m3.
    assert relative_error(packed, expected) < 2e-2
    assert relative_error(masked[filled.to(device)], expected) < 2e-2


@pytest.mark.parametrize("rows", [[1, 0, 7], [5, 3, 0]], ids=str)
def test_an_fp8_expert_computes_what_it_does_on_a_cpu(on_device: RunCheck, rows: list[int]) -> None:
    on_device(check_fp8_expert, rows, 136, 72)


def test_a_wide_fp8_expert_has_a_scale_for_each_128_of_what_lies_between(on_device: RunCheck) -> None:
    on_device(check_fp8_expert, [2, 17], 136, 200)


def check_fp8_projection(device: str, num_rows: int, n: int, k: int, by_channel: bool) -> None:
    """A dense projection whose weight stays in FP8, against its numbers in float32: with a bias, and added to rows."""
    from moe_serve.kernels.linear import Fp8Linear
    from moe_serve.kernels.numerics import FAST
    from moe_serve.kernels.quantised import dequantize_reference, dequantize_weight, quantize, quantize_weight

    weight = quantize_weight(randn("cpu", 1, n, k, seed=1), by_channel=by_channel)
    q, scale = weight.q[0].to(device), weight.scale[0].to(device)
    bias = randn("cpu", n, seed=2)
    x = randn("cpu", num_rows, k + 3)[:, :k]  # a slice of wider rows, as a latent is
    rows = [part.to(device) for part in quantize(x)]
    expected = dequantize_reference(*(part.cpu() for part in rows), torch.float32) @ dequantize_weight(weight)[0].T
    got = Fp8Linear(q, scale, bias.to(device), FAST)(x.to(device))
    assert (got.dtype, got.shape) == (x.dtype, (num_rows, n))
    assert relative_error(got, expected + bias.float()) < BF16_LIMIT
    total = randn(device, num_rows, n, seed=3)
    before = total.float().cpu()
    assert Fp8Linear(q, scale, None, FAST).of_quantised((rows[0], rows[1]), x.dtype, total) is total
    assert relative_error(total, before + expected) < BF16_LIMIT


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("num_rows, n, k", [(0, 40, 130), (1, 200, 256), (19, 72, 130)])
def test_a_projection_of_an_fp8_checkpoint_is_its_numbers_in_float32(
    on_device: RunCheck, num_rows: int, n: int, k: int, by_channel: bool
) -> None:
    on_device(check_fp8_projection, num_rows, n, k, by_channel)


def check_fp8_mlp(device: str, num_rows: int, hidden: int, width: int, by_channel: bool) -> None:
    """A shared expert whose weights stay in FP8, against those of an FP8 expert on a CPU."""
    from moe_serve.dispatch.base import PackedRows
    from moe_serve.ep.expert_store import ExpertStore, expert_ffn
    from moe_serve.kernels.linear import Fp8Linear
    from moe_serve.kernels.numerics import FAST
    from moe_serve.kernels.quantised import quantize_weight
    from moe_serve.models.decoder.weight_forms import Fp8Mlp

    gate_up = quantize_weight(randn("cpu", 1, 2 * width, hidden) / hidden**0.5, 2, by_channel)
    down = quantize_weight(randn("cpu", 1, hidden, width, seed=1) / width**0.5, by_channel=by_channel)
    x = randn("cpu", num_rows, hidden, seed=2)
    own = {"gate_up": gate_up.q, "gate_up_scale": gate_up.scale, "down": down.q, "down_scale": down.scale}
    own = {name: each.clone() for name, each in own.items()}  # which a store keeps in another order
    expected = expert_ffn(PackedRows(x, torch.tensor([num_rows])), ExpertStore(own))
    first, last = (
        Fp8Linear(each.q[0].to(device), each.scale[0].to(device), None, FAST, each.parts) for each in (gate_up, down)
    )
    mlp = Fp8Mlp(first, last, FAST)
    x = x.to(device)
    assert relative_error(mlp(x), expected) < 2e-2  # as in check_fp8_expert
    total = mlp.add_down_(mlp.middle(x, None), torch.zeros_like(x))
    assert relative_error(total, expected) < 2e-2
    logits = torch.zeros(num_rows, 1, dtype=x.dtype, device=device)  # half of each row
    total = mlp.add_down_(mlp.middle(x, logits), torch.zeros_like(x))
    assert relative_error(2 * total, expected) < 3e-2


@pytest.mark.parametrize("by_channel", [False, True])
def test_an_fp8_shared_expert_computes_what_an_expert_does(on_device: RunCheck, by_channel: bool) -> None:
    on_device(check_fp8_mlp, 18, 136, 200, by_channel)


def check_gated(device: str, rows: list[int], width: int, k: int, clamped: bool) -> None:
    from moe_serve.kernels.activation import clamped_swiglu_reference, silu_mul_reference
    from moe_serve.kernels.forms import SILU, Activation
    from moe_serve.kernels.triton.grouped_gemm import GemmTile, grouped_gemm_triton

    activation = Activation("clamped_swiglu", 1.702, 0.7) if clamped else SILU
    x, weight = randn(device, sum(rows), k), randn(device, len(rows), 2 * width, k, seed=1)
    bias = randn(device, len(rows), 2 * width, dtype=torch.float32, seed=2)
    product = expected_rows(x, weight, rows) + bias.cpu().repeat_interleave(torch.tensor(rows), dim=0)
    wanted = clamped_swiglu_reference(product, activation) if clamped else silu_mul_reference(product)
    tile = GemmTile(16, 32, 16, num_warps=4, num_stages=2, group_m=2)
    got = grouped_gemm_triton(x, weight, torch.tensor(rows), tile=tile, bias=bias, activation=activation)
    assert (got.dtype, got.shape) == (x.dtype, (sum(rows), width))
    assert relative_error(got, wanted) < BF16_LIMIT
    slab = torch.full((len(rows), max(rows) + 1, k), torch.nan, dtype=x.dtype, device=device)
    filled = torch.arange(slab.shape[1]) < torch.tensor(rows)[:, None]
    slab[filled.to(device)] = x
    counts = torch.tensor(rows, device=device)
    got = grouped_gemm_triton(slab, weight, counts, tile=tile, bias=bias, activation=activation)
    assert relative_error(got[filled.to(device)], wanted) < BF16_LIMIT


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("rows, width, k", [([0, 0], 16, 16), ([1, 0, 7], 40, 24), ([18, 3], 16, 40)], ids=str)
def test_a_first_product_ends_with_its_activation(
    on_device: RunCheck, rows: list[int], width: int, k: int, clamped: bool
) -> None:
    on_device(check_gated, rows, width, k, clamped)


def check_mxfp4(device: str, rows: list[int], width: int, hidden: int, dtype_name: str) -> None:
    """An expert of gpt-oss as stored, against its numbers in float32."""
    from moe_serve.kernels.activation import clamped_swiglu_reference
    from moe_serve.kernels.forms import Activation, Mxfp4
    from moe_serve.kernels.quantised import dequantise_mxfp4, quantise_mxfp4
    from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_triton

    dtype, counts, groups = getattr(torch, dtype_name), torch.tensor(rows), len(rows)
    wide, stored, biases = [], [], []
    for seed, (n, k) in enumerate(((2 * width, hidden), (hidden, width))):
        drawn = randn("cpu", groups, n, k, dtype=torch.float32, seed=seed)
        drawn[:, :, : k // 2] *= 64  # scales that differ
        blocks, scales = zip(*(quantise_mxfp4(each / k**0.5) for each in drawn), strict=True)
        wide.append(torch.stack([dequantise_mxfp4(*pair).float() for pair in zip(blocks, scales, strict=True)]))
        stored.append(Mxfp4(torch.stack(blocks).flatten(-2).to(device), torch.stack(scales).to(device)))
        biases.append(randn("cpu", groups, n, dtype=torch.float32, seed=seed + 5))
    activation = Activation("clamped_swiglu", 1.702, 7.0)
    x = randn("cpu", sum(rows), hidden, dtype=dtype, seed=9)
    product = expected_rows(x, wide[0], rows) + biases[0].repeat_interleave(counts, dim=0)
    wanted = clamped_swiglu_reference(product, activation)
    bias = [each.to(device) for each in biases]
    between = grouped_gemm_triton(x.to(device), stored[0], counts, bias=bias[0], activation=activation)
    assert between.dtype == dtype
    assert relative_error(between, wanted) < BF16_LIMIT
    wanted = expected_rows(between, wide[1], rows) + biases[1].repeat_interleave(counts, dim=0)
    assert relative_error(grouped_gemm_triton(between, stored[1], counts, bias=bias[1]), wanted) < BF16_LIMIT


@pytest.mark.parametrize(
    "rows, width, hidden, dtype",
    [([0, 0], 32, 32, "bfloat16"), ([1, 0, 7], 32, 96, "bfloat16"), ([17, 2], 96, 160, "bfloat16"),
     ([3], 64, 32, "float16")],
    ids=str,
)  # fmt: skip
def test_mxfp4_experts_are_multiplied_as_they_are_stored(
    on_device: RunCheck, rows: list[int], width: int, hidden: int, dtype: str
) -> None:
    on_device(check_mxfp4, rows, width, hidden, dtype)


@pytest.mark.gpu
def test_mxfp4_of_production_width() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check_mxfp4("cuda", [5, 0, 300], 2880, 2880, "bfloat16")
    check_gated("cuda", [5, 0, 300], 2048, 7168, False)
    check_fp8_expert("cuda", [5, 0, 300], 7168, 2048)
    check_fp8_mlp("cuda", 300, 7168, 2048, False)
    for num_rows in (3, 40, 300):  # a tile each
        check_fp8_projection("cuda", num_rows, 2112, 7168, False)


def check_tiles(device: str) -> None:
    from moe_serve.kernels.triton.grouped_gemm import bf16_tile, fp8_tile, mxfp4_tile

    for pick, value_bytes in ((bf16_tile, 2), (fp8_tile, 1), (mxfp4_tile, 2)):
        tiles = [pick(rows) for rows in (0, 1, 16, 17, 64, 65, 4096)]
        for tile in tiles:
            assert (tile.block_m + tile.block_n) * tile.block_k * value_bytes * tile.num_stages <= 163 * 1024
        assert len({pick(rows, invariant=True) for rows in (0, 20, 4096)}) == 1


def test_tiles_fit_the_smallest_shared_memory_and_are_one_in_batch_invariant(interpreter: RunCheck) -> None:
    interpreter(check_tiles)
