"""Matrices of whole numbers of four or eight bits, several in one int32: GPTQ, AWQ, and compressed-tensors.

A value is scale x (code - zero), with a scale and a zero for each group of neighbours in a row:

gptq        AutoGPTQ's and GPTQModel's `qweight` [k / p, n], p codes of 4 or 8 bits in an int32, the first in the lowest
            bits, `qzeros` [groups, n / p], one less than the zeros in version 1, `scales` [groups, n], and `g_idx` [k],
            the group of each column, which act-order scatters
awq         AutoAWQ's GEMM form: `qweight` [k, n / 8] and `qzeros` [groups, n / 8], whose int32 hold rows 0, 2, 4, 6, 1,
            3, 5, 7 of eight, `scales` [groups, n]
compressed  the "pack-quantized" of compressed-tensors: `weight_packed` [n, k / p], `weight_scale` [n, groups], and
            maybe `weight_zero_point` [n / p, groups] and `weight_g_idx` [k]

Checks need no torch: they are made before any process starts.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_serve.errors import ModelError
from moe_serve.kernels.forms import GROUP_CHUNK, GROUPS, GroupForm, GroupScale
from moe_serve.models.model_files import shown
from moe_serve.models.spec import IntegerCoding
from moe_serve.models.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from moe_serve.kernels.group_quantised import GroupQuantised

_SCALES: Mapping[str, GroupScale] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_INTEGERS = ("I32",)
_FIRST = {"gptq": "qweight", "awq": "qweight", "compressed": "weight_packed"}
_OTHERS = {
    "gptq": ("qzeros", "scales", "g_idx"),
    "awq": ("qzeros", "scales"),
    "compressed": ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight rows in an int32


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix of a checkpoint, which is named `name` where it is not packed. pieces: by the end of their names"""

    name: str
    coding: IntegerCoding
    pieces: Mapping[str, StoredTensor]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces.values())

    @property
    def tensors(self) -> Iterator[str]:
        """Yields the names of its pieces."""
        return (self._named(end) for end in self.pieces)

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        """Yields what of the pieces does not fit a matrix of this shape, by name."""
        if len(shape) != 2:
            yield f"{self.name} is packed, and {list(shape)} is no matrix"
            return
        k, coding = shape[1], self.coding
        if k % self._group(k):
            yield f"{self.name} has rows of {k}, which do not divide into groups of {coding.group}"
            return
        for end, (wanted, dtypes, needed) in self._expected(*shape).items():
            piece = self.pieces.get(end)
            if piece is None:
                if needed:
                    yield f"{self._named(end)} is missing"
            elif piece.shape != wanted or piece.dtype_name not in dtypes:
                yield (
                    f"{self._named(end)} {shown(piece.dtype_name)[1:-1]} {list(piece.shape)}, expected {dtypes[0]} "
                    f"{list(wanted)} ({coding})"
                )
            elif end.endswith("g_idx"):
                yield from self._indices_out_of_range(end, piece, k // self._group(k))

    def _expected(self, n: int, k: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...], bool]]:
        """Returns shape, dtypes and whether it must be there, of each piece."""
        groups, per_word = k // self._group(k), 32 // self.coding.bits
        packed_n, packed_k = -(-n // per_word), -(-k // per_word)
        match self.coding.method:
            case "gptq":
                return {
                    "qweight": ((packed_k, n), _INTEGERS, True),
                    "qzeros": ((groups, packed_n), _INTEGERS, True),
                    "scales": ((groups, n), tuple(_SCALES), True),
                    "g_idx": ((k,), _INTEGERS, self.coding.act_order),
                }
            case "awq":
                return {
                    "qweight": ((k, packed_n), _INTEGERS, True),
                    "qzeros": ((groups, packed_n), _INTEGERS, True),
                    "scales": ((groups, n), tuple(_SCALES), True),
                }
            case "compressed":
                return {
                    "weight_packed": ((n, packed_k), _INTEGERS, True),
                    "weight_scale": ((n, groups), tuple(_SCALES), True),
                    "weight_zero_point": ((packed_n, groups), _INTEGERS, not self.coding.symmetric),
                    "weight_shape": ((2,), ("I64", "I32"), False),
                    "weight_g_idx": ((k,), _INTEGERS, self.coding.act_order),
                }

    def _indices_out_of_range(self, end: str, piece: StoredTensor, groups: int) -> Iterator[str]:
        indices = array("i")
        with piece.path.open("rb") as file:
            file.seek(piece.start)
            indices.frombytes(file.read(piece.num_bytes))
        low, high = min(indices), max(indices)
        if low < 0 or high >= groups:
            yield f"{self._named(end)} holds the group {low if low < 0 else high} of {groups}, counted from 0"

    def _group(self, k: int) -> int:
        return self.coding.group or max(k, 1)

    def _named(self, end: str) -> str:
        return self.name.removesuffix("weight") + end

    def form(self, k: int) -> GroupForm | None:
        """Returns the form in which `groups` gives rows of k; None where the kernels have none for these groups."""
        coding, group = self.coding, self._group(k)
        kept = group if group in GROUPS else GROUP_CHUNK if group == k or group % GROUP_CHUNK == 0 else None
        if coding.act_order or kept is None:
            return None
        scales = next(piece for end, piece in self.pieces.items() if end in ("scales", "weight_scale"))
        has_zeros = coding.method != "compressed" or "weight_zero_point" in self.pieces
        return GroupForm(coding.bits, kept, _SCALES[scales.dtype_name], None if has_zeros else 1 << coding.bits - 1)

    def groups(self, k: int, read: Callable[[str], "Tensor"]) -> "GroupQuantised":
        """Returns the codes and scales of the matrix [n, k], which has a `form`. read: as `values` takes it

        Raises ModelError where columns are scattered over groups though the configuration says that none are.
        """
        import torch

        from moe_serve.kernels.group_quantised import GroupQuantised

        form = self.form(k)
        assert form is not None, f"{self.name} has no form"
        codes, scale, zero, of_column = self._read(k, read)
        if not torch.equal(of_column, torch.arange(k) // self._group(k)):
            raise ModelError(
                f"{self.name}: columns are scattered over groups, which config.json does not say (desc_act, actorder); "
                "correct it there, or set model.expert_weights: dense"
            )
        of_group = torch.arange(form.num_groups(k)) * form.group // self._group(k)
        zeros = zero[:, of_group].contiguous() if form.zero is None else None
        return GroupQuantised(form, codes[:, :k].contiguous(), scale[:, of_group].contiguous(), zeros)

    def values(self, k: int, read: Callable[[str], "Tensor"]) -> "Tensor":
        """Returns the matrix [n, k] in float32, exactly: code and scale have few bits.

        read: gives a piece by its name; the pieces have no problems
        """
        codes, scale, zero, of_column = self._read(k, read)
        return (codes[:, :k].float() - zero[:, of_column].float()) * scale.float()[:, of_column]

    def _read(self, k: int, read: Callable[[str], "Tensor"]) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
        """Returns codes [n, at least k] uint8, scales and zeros [n, groups], and the group of each column, [k]."""
        import torch

        def piece(end: str) -> "Tensor":
            return read(self._named(end))

        bits = self.coding.bits
        match self.coding.method:
            case "gptq":
                codes = _unpacked(piece("qweight").t(), bits)
                scale = piece("scales").t()
                zero = _unpacked(piece("qzeros"), bits)[:, : len(scale)].t()
                zero = zero + self.coding.zero_offset & (1 << bits) - 1
            case "awq":
                scale = piece("scales").t()
                codes, zero = (_of_awq(piece(end))[:, : len(scale)].t() for end in ("qweight", "qzeros"))
            case "compressed":
                codes, scale = _unpacked(piece("weight_packed"), bits), piece("weight_scale")
                zero = torch.full(scale.shape, 1 << bits - 1, dtype=torch.uint8)
                if "weight_zero_point" in self.pieces:
                    zero = _unpacked(piece("weight_zero_point").t(), bits)[:, : len(scale)].t()
        index = next((end for end in self.pieces if end.endswith("g_idx")), None)
        return codes, scale, zero, torch.arange(k) // self._group(k) if index is None else piece(index).long()


def packed_matrices(coding: IntegerCoding, tensors: Mapping[str, StoredTensor]) -> dict[str, PackedMatrix]:
    """Returns the matrices that are packed, by the names that they have where they are not."""
    first, others, found = "." + _FIRST[coding.method], _OTHERS[coding.method], {}
    for name, tensor in tensors.items():
        if name.endswith(first):
            base = name.removesuffix(first[1:])
            pieces = {end: tensors[base + end] for end in others if base + end in tensors}
            found[base + "weight"] = PackedMatrix(base + "weight", coding, {first[1:]: tensor, **pieces})
    return found


def _of_awq(words: "Tensor") -> "Tensor":
    """Returns the codes in rows of int32 in AWQ's order. words: [a, b] -> [a, 8 b] uint8"""
    codes = _unpacked(words, 4)
    return codes.view(len(codes), -1, 8)[:, :, _AWQ_PLACES].flatten(1)


def _unpacked(words: "Tensor", bits: int) -> "Tensor":
    """Returns the codes in rows of int32, the first in the lowest bits. words: [a, b] -> [a, b x 32 / bits] uint8"""
    import torch

    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(1)
