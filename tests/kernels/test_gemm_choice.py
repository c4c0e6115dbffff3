"""The library of a grouped GEMM comes from the table, and only if it is installed."""

from moe_serve.kernels import gemm_choice
from moe_serve.kernels.gemm_choice import choose_library
from moe_serve.kernels.gemm_tiles import bf16_tile, fp8_tile

TABLE = ((90, "packed", 64, "torch"), (90, "packed", float("inf"), "triton"), (90, "slab", 64, "deep_gemm"))


def test_the_first_row_that_fits_wins(monkeypatch) -> None:
    monkeypatch.setattr(gemm_choice, "find_spec", lambda name: object())
    assert choose_library("packed", 20, 90, TABLE) == "torch"
    assert choose_library("packed", 65, 90, TABLE) == "triton"
    assert choose_library("slab", 20, 90, TABLE) == "deep_gemm"
    assert choose_library("slab", 20, 80, TABLE) == "triton"  # another GPU: nothing measured


def test_what_is_not_installed_is_not_chosen(monkeypatch) -> None:
    monkeypatch.setattr(gemm_choice, "find_spec", lambda name: None if name in ("deep_gemm", "triton") else object())
    assert choose_library("slab", 20, 90, TABLE) == "torch"


def test_tiles_fit_the_smallest_shared_memory_and_are_one_in_batch_invariant() -> None:
    for pick, value_bytes in ((bf16_tile, 2), (fp8_tile, 1)):
        tiles = [pick(rows) for rows in (0, 1, 16, 17, 64, 65, 4096)]
        for tile in tiles:
            assert (tile.block_m + tile.block_n) * tile.block_k * value_bytes * tile.num_stages <= 163 * 1024
        assert len({pick(rows, invariant=True) for rows in (0, 20, 4096)}) == 1
