"""Dense projections y = x W^T + b, with the weight prepared once for the machine it runs on.

On CPU the weight is kept in oneDNN's blocked layout where that op exists: few rows then run near the speed of memory
(measured 1.3 to 2.3 x over F.linear for 4 to 64 rows). The op belongs to torch's compiler, not to its public interface:
where it is absent, or the dtype or size gains nothing, F.linear runs. Both compute the same function.
"""

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.numerics import Numerics
from moe_serve.kernels.row_tiles import cut, proven_tiles

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

    def _multiply(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return functional.linear(x, self._weight, self._bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


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
        self._width = weight.shape[2]
        self.weight = functional.pad(weight, (0, _missing(self._width, numerics)))
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
            return self._multiply(x)[..., : self._width]
        parts = [self._multiply(x[start:end]) for start, end in cut(x.shape[0], self._tiles)]
        return torch.cat(parts)[..., : self._width]

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


def _missing(width: int, numerics: Numerics) -> int:
    """Returns how many columns of zeros an output of this width needs, so that batch_invariant holds for it."""
    return 0 if numerics.row_tile is None else max(0, _NARROWEST_INVARIANT - width)
