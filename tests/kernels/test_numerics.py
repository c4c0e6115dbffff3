"""Claims about the class of numerics: what counts as invariant, and what is padded."""

from moe_serve.kernels.numerics import COMPILED, FAST, Numerics


def test_compiled_kernels_are_invariant_without_padding() -> None:
    tiled = Numerics(row_tile=4)
    assert [numerics.invariant for numerics in (FAST, COMPILED, tiled)] == [False, True, True]
    assert [numerics.padded(5) for numerics in (FAST, COMPILED, tiled)] == [5, 5, 8]
    assert [numerics.padded(0) for numerics in (FAST, COMPILED, tiled)] == [0, 0, 0]
