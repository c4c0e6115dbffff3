"""Dense projections y = x W^T + b, with the weight prepared once for the machine it runs on.

On CPU the weight is kept in oneDNN's blocked layout where that op exists: few rows then run near the speed of memory
(measured 1.3 to 2.3 x over F.linear for 4 to 64 rows). The op belongs to torch's compiler, not to its public interface:
where it is absent, or the dtype or size gains nothing, F.linear runs. Both compute the same function.

In batch_invariant a tile of Numerics.row_tile rows defines the result. Many libraries give the same bits for larger
tiles, because the order in which they accumulate one output element does not depend on the number of rows; others do
not. So each kernel and shape is tried with random numbers: another order of accumulation would show in some of the many
thousand elements. Row counts that pass run in one call; others are cut into tiles.

On GPUs that have e4m3 a weight may stay in the FP8 of its checkpoint (Fp8Linear).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import BlockScaled
from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.quantised import quantize

# Of narrower outputs some BLAS kernels give a row other bits by its place in a tile; of 1, 5 to 7 and 9 to 11 here.
_NARROWEST_INVARIANT = 16
SMALLEST_PACKED = 1 << 16  # weight elements; below this the call costs more than the layout saves


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rows, k], weight: [n, k], bias: [n] -> [rows, n]"""
    return functional.linear(x, weight, bias)


class Linear:
    """One projection of rows of the weight's dtype. In batch_invariant a row's bits depend on that row only."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        numerics: Numerics,
        proven: dict[object, tuple[int, ...]] | None = None,
    ):
        """weight: [n, k], bias: [n] or None.

        proven: row counts proven for other weights of this shape; read and extended (a proof costs milliseconds)
        """
        self.out_features, self.in_features = weight.shape
        missing = _missing(self.out_features, numerics)
        weight = functional.pad(weight, (0, 0, 0, missing)) if missing else weight
        self._bias = functional.pad(bias, (0, missing)) if bias is not None and missing else bias
        self._packed = _pack(weight)
        self._weight = weight if self._packed is None else weight.new_empty(0)
        self._row_tile = numerics.row_tile
        self._tiles: tuple[int, ...] = ()
        if numerics.row_tile is not None:
            key = (tuple(weight.shape), weight.dtype, bias is None)
            known = {} if proven is None else proven
            if key not in known:
                known[key] = proven_tiles(self._multiply, self.in_features, numerics.row_tile, weight)
            self._tiles = known[key]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, k] -> [rows, n]; rows may be 0."""
        num_rows = x.shape[0]
        if num_rows == 0:
            return x.new_empty(0, self.out_features)
        if self._row_tile is None or num_rows in self._tiles:
            return self._multiply(x)[:, : self.out_features]
        padding = -num_rows % self._row_tile
        if padding:
            x = functional.pad(x, (0, 0, 0, padding))
        y = torch.cat([self._multiply(x[start:end]) for start, end in cut(num_rows + padding, self._tiles)])
        return y[:num_rows, : self.out_features]

    def add_to_(self, total: Tensor, x: Tensor) -> Tensor:
        """Adds the projection of x [rows, k] to total [rows, n] in place, and returns it; for weights without bias."""
        if self._row_tile is not None or self._packed is not None or self._bias is not None:
            return total.add_(self(x))
        return total.addmm_(x, self._weight.t())

    def _multiply(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return functional.linear(x, self._weight, self._bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


class Fp8Linear:
    """One projection on a GPU whose weight stays in FP8; rows are quantised for it, 128 values at a time, as for
    experts. In batch_invariant a row's bits depend on that row only.

    weight: of one group
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, numerics: Numerics, parts: int = 1):
        """weight: [n, k] float8_e4m3fn, scale: [block rows, block columns] or [n] float32, bias: [n] or None

        parts: as in BlockScaled
        """
        self.out_features, self.in_features = weight.shape
        self.weight = BlockScaled(weight[None], scale[None], parts)
        self._bias = None if bias is None else bias.float()[None]
        self._numerics = numerics

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, k] -> [rows, n]; rows may be 0."""
        return self.of_quantised(quantize(x), x.dtype)

    def of_quantised(self, rows: tuple[Tensor, Tensor], dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        """Returns the projection of rows that `quantize` gave, [rows, n] dtype; added to `total` in place, if given."""
        from moe_serve.kernels.triton.grouped_gemm import grouped_gemm_fp8_triton

        result: Tensor = grouped_gemm_fp8_triton(
            *rows, self.weight, None, dtype, self._numerics, bias=self._bias, out=total, adds=total is not None
        )
        return result


def _pack(weight: Tensor) -> Tensor | None:
    """Returns the weight in oneDNN's blocked layout, or None where F.linear is at least as good."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < SMALLEST_PACKED:
        return None
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return None
    # A hint of 16 rows gives the layout that serves 1 to 256 rows, with results that do not depend on their number.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    return packed


class HeadLinear:
    """One projection per head, y[t, h] = x[t, h] W[h]. In batch_invariant a row's bits depend on that row only."""

    def __init__(self, weight: Tensor, numerics: Numerics, proven: dict[object, tuple[int, ...]] | None = None):
        """weight: [heads, k, n];  proven: as in Linear"""
        self.out_features = weight.shape[2]
        self.weight = functional.pad(weight, (0, _missing(self.out_features, numerics)))
        self._row_tile = numerics.row_tile
        self._tiles: tuple[int, ...] = ()
        if numerics.row_tile is not None:
            heads, width, _ = self.weight.shape
            key = ("heads", tuple(weight.shape), weight.dtype)
            known = {} if proven is None else proven
            if key not in known:

                def multiply(rows: Tensor) -> Tensor:
                    return self._multiply(rows.view(-1, heads, width)).flatten(1)

                known[key] = proven_tiles(multiply, heads * width, numerics.row_tile, weight)
            self._tiles = known[key]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, heads, k] -> [rows, heads, n]; in batch_invariant the caller pads the rows to whole row tiles."""
        if self._row_tile is None or x.shape[0] in self._tiles:
            return self._multiply(x)[..., : self.out_features]
        parts = [self._multiply(x[start:end]) for start, end in cut(x.shape[0], self._tiles)]
        return torch.cat(parts)[..., : self.out_features]

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes the projection of x to out [rows, heads, n], which may be a slice of wider rows, and returns it."""
        if self._row_tile is not None:
            return out.copy_(self(x))
        torch.bmm(x.transpose(0, 1), self.weight, out=out.transpose(0, 1))
        return out

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


def _missing(width: int, numerics: Numerics) -> int:
    """Returns how many columns of zeros an output of this width needs, so that batch_invariant holds for it."""
    return 0 if numerics.row_tile is None else max(0, _NARROWEST_INVARIANT - width)


LARGEST_TILE = 128  # rows; above this a GEMM is no longer bound by streaming its weights


def proven_tiles(multiply: Callable[[Tensor], Tensor], width: int, row_tile: int, like: Tensor) -> tuple[int, ...]:
    """Returns the row counts, descending, for which `multiply` gives the bits of its `row_tile`-row calls.

    multiply: [m, width] -> [m, n], the kernel with its weight;  like: a tensor of the dtype and device of the rows
    The smallest entry is row_tile itself; all entries are multiples of it. On an accelerator only row_tile is returned:
    its libraries choose kernels by shape and load.
    """
    if like.device.type != "cpu" or row_tile >= LARGEST_TILE:
        return (row_tile,)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(LARGEST_TILE + row_tile, width, generator=generator).to(like.dtype)
    tiles = torch.cat([multiply(rows[i : i + row_tile]) for i in range(0, len(rows), row_tile)])
    proven = [row_tile]
    for size in _candidates(row_tile):
        # Twice, at different offsets: a kernel may choose its path by alignment and position.
        if all(torch.equal(multiply(rows[at : at + size]), tiles[at : at + size]) for at in (0, row_tile)):
            proven.append(size)
    return tuple(reversed(proven))


def _candidates(row_tile: int) -> list[int]:
    sizes = {row_tile * count for count in range(2, 32 // row_tile + 1)} | {32, 48, 64, 96, LARGEST_TILE}
    return sorted(size for size in sizes if size > row_tile and size % row_tile == 0)


def cut(num_rows: int, tiles: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of consecutive pieces with sizes in `tiles`; num_rows is a multiple of the smallest size."""
    start = 0
    for size in tiles:
        while num_rows - start >= size:
            yield start, start + size
            start += size
    assert start == num_rows, f"{num_rows} rows are not a multiple of the row tile {tiles[-1]}"
