"""Weights of four, six or eight bits in groups (forms.GroupForm): read, written, and their products in plain torch.

A product with float activations is one of the weights' values. With int8 activations a row is quantised first, one
scale for every 128 values, or for every group beside codes of eight bits; integer products are added exactly within a
group of weights, and what the groups give is added in order of k, in float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from moe_serve.kernels.forms import GROUP_CHUNK, GROUP_SUPER, GroupForm

Activations = Literal["float", "int8"]

SCALE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "two_levels": torch.int8,
}
LARGEST_ACTIVATION = 127  # of both signs
SMALLEST_AMAX = 2.0**-100  # of activations that share a scale; smaller ones count as zero


@dataclass(frozen=True)
class GroupQuantised:
    """A weight [n, k].

    codes:   [n, k] uint8, below 2 ** bits
    scale:   [n, groups] of the form's dtype, int8 in two levels
    zero:    [n, groups] uint8, where the form has no common one; else None
    minimum: where the form has minimums, [n, groups] of the scales' dtype, in two levels uint8; else None
    super_scale, super_minimum: in two levels [n, ceil(k / 256)] float16, factors on scale and minimum; else None
    """

    form: GroupForm
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    minimum: Tensor | None = None
    super_scale: Tensor | None = None
    super_minimum: Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        wanted = _wanted(self.form, n, k)
        for name in _TENSORS:
            tensor: Tensor | None = getattr(self, name)
            found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            assert found == wanted.get(name), f"{name} of {self.form}: {found}, expected {wanted.get(name)}"

    def wide_scale(self) -> Tensor:
        """Returns the scale of each group, [n, groups] float32; the product of two levels is exact."""
        return _times(self.scale.float(), self.super_scale, self.form.group)

    def wide_minimum(self) -> Tensor | None:
        """Returns what each group subtracts, [n, groups] float32; None: nothing."""
        return None if self.minimum is None else _times(self.minimum.float(), self.super_minimum, self.form.group)

    def centred(self) -> Tensor:
        """Returns code - zero, [n, k] int32."""
        codes, form = self.codes.int(), self.form
        if self.zero is None:
            assert form.zero is not None
            return codes - form.zero
        return codes - self._of_values(self.zero.int())

    def values(self) -> Tensor:
        """Returns the weight [n, k] in float32, rounded once where scale times code has 24 bits or less."""
        values, minimum = self.centred().float() * self._of_values(self.wide_scale()), self.wide_minimum()
        return values if minimum is None else values - self._of_values(minimum)

    def _of_values(self, of_groups: Tensor) -> Tensor:
        """Returns a number of each value, [n, k], out of one of each group."""
        return of_groups.repeat_interleave(self.form.group, 1)[:, : self.codes.shape[1]]


_TENSORS = ("codes", "scale", "zero", "minimum", "super_scale", "super_minimum")


def _wanted(form: GroupForm, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and dtype of each tensor that a weight [n, k] of this form has."""
    of_groups, of_supers = (n, form.num_groups(k)), (n, -(-k // GROUP_SUPER))
    scales, two = SCALE_DTYPES[form.scale], form.is_two_level
    tensors = {
        "codes": (True, (n, k), torch.uint8),
        "scale": (True, of_groups, scales),
        "zero": (form.zero is None, of_groups, torch.uint8),
        "minimum": (form.has_minimum, of_groups, torch.uint8 if two else scales),
        "super_scale": (two, of_supers, torch.float16),
        "super_minimum": (two and form.has_minimum, of_supers, torch.float16),
    }
    return {name: (shape, dtype) for name, (present, shape, dtype) in tensors.items() if present}


def _times(of_groups: Tensor, of_supers: Tensor | None, group: int) -> Tensor:
    if of_supers is None:
        return of_groups
    return of_groups * of_supers.float().repeat_interleave(GROUP_SUPER // group, 1)[:, : of_groups.shape[1]]


def stack(parts: Sequence[GroupQuantised]) -> GroupQuantised:
    """Returns the rows of weights of one form, one weight below the other."""

    def rows(name: str) -> Tensor | None:
        present = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
        return torch.cat(present) if present else None

    return _of_tensors(parts[0].form, {name: rows(name) for name in _TENSORS})


def _of_tensors(form: GroupForm, tensors: Mapping[str, Tensor | None]) -> GroupQuantised:
    return GroupQuantised(form, **{name: tensor for name, tensor in tensors.items() if tensor is not None})


def shapes_alone(form: GroupForm, n: int, k: int) -> GroupQuantised:
    """Returns a weight [n, k] on meta."""
    wanted = _wanted(form, n, k)
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in wanted.items()}
    return _of_tensors(form, tensors)


@dataclass(frozen=True)
class GroupRows:
    """A weight [n, k] whose rows lie in weights [n_i, k] one below the other, each in a form of its own."""

    parts: tuple[GroupQuantised, ...]

    @classmethod
    def of(cls, parts: Sequence[GroupQuantised]) -> "GroupRows":
        """Returns them, neighbours of one form as one part."""
        return cls(tuple(stack(list(alike)) for _, alike in groupby(parts, lambda part: part.form)))

    @property
    def whole(self) -> GroupQuantised:
        """The weight where all its rows have one form."""
        (only,) = self.parts
        return only

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(len(part.codes) for part in self.parts), self.parts[0].codes.shape[1]))

    @property
    def device(self) -> torch.device:
        return self.parts[0].codes.device

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, order: Tensor) -> "GroupRows":
        """Returns the rows in another order, which leaves each in its part. order: [n] int64"""
        taken, first = [], 0
        for part in self.parts:
            rows = order[first : first + len(part.codes)] - first
            first += len(part.codes)
            tensors = {name: getattr(part, name) for name in _TENSORS}
            found = {name: None if t is None else rows_of(t, rows) for name, t in tensors.items()}
            taken.append(_of_tensors(part.form, found))
        return GroupRows(tuple(taken))


def rows_of(tensor: Tensor, order: Tensor) -> Tensor:
    """Returns rows of a tensor, [n, ...]. order: [n] int64"""
    if tensor.is_meta:  # whose rows torch would only look up with sympy, for whose import a rank takes 50 MiB
        return tensor.new_empty(len(order), *tensor.shape[1:])
    return tensor[order]


# ---- quantising

# Of the step that the largest value of a group needs; as many as group_quantise.c tries.
_SHARES = 0.74 + 0.02 * torch.arange(16)


def quantise_groups_reference(weight: Tensor, form: GroupForm) -> GroupQuantised:
    """Returns weight [n, k] in a form of one level with a common zero, without minimums.

    Each group takes the scale, of a few below and above what its largest value needs, that gives the smallest sum of
    squared errors. The largest value by size gets the end of the codes that reaches farther from zero.
    """
    assert form.zero, f"{form} has more than scales"
    assert not form.is_two_level, f"{form} has more than scales"
    assert not form.has_minimum, f"{form} has more than scales"
    (n, k), dtype = weight.shape, SCALE_DTYPES[form.scale]
    groups = functional.pad(weight.float(), (0, -k % form.group)).view(n, -1, form.group)
    low, high = -form.zero, (1 << form.bits) - 1 - form.zero
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best_scale, best_error = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for share in _SHARES:
        scale = (largest * share / low).to(dtype).float()
        error = (_rounded(groups, scale, low, high) * scale - groups).square().sum(2, keepdim=True)
        better = error < best_error
        best_scale, best_error = torch.where(better, scale, best_scale), torch.where(better, error, best_error)
    codes = (_rounded(groups, best_scale, low, high) + form.zero).to(torch.uint8).flatten(1)[:, :k].contiguous()
    return GroupQuantised(form, codes, best_scale.squeeze(2).to(dtype))


def _rounded(groups: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return (groups * inverse).clamp_(low, high).round_()


def quantise_groups(weight: Tensor, form: GroupForm) -> GroupQuantised:
    """Same contract as the reference, for scales in float16; by the compiled kernel, where there is one."""
    from moe_serve.kernels.cpu.library import find_cpu_library

    library = find_cpu_library()
    if library is None or weight.device.type != "cpu":
        return quantise_groups_reference(weight, form)
    assert form.scale == "float16", f"scales in {form.scale}"
    assert form.zero, f"{form} has more than scales"
    weight = weight.float().contiguous()
    n, k = weight.shape
    codes, scale = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, form.num_groups(k), dtype=torch.float16)
    ends = -form.zero, (1 << form.bits) - 1 - form.zero
    addresses = _SHARES.data_ptr(), codes.data_ptr(), scale.data_ptr()
    library.call.quantise_groups(weight.data_ptr(), n, k, form.group, *ends, *addresses)
    return GroupQuantised(form, codes, scale)


# ---- products


def quantise_activations(x: Tensor, shared: int = GROUP_CHUNK) -> tuple[Tensor, Tensor]:
    """Returns rows x [rows, k] in int8, [rows, k], and their scales, [rows, ceil(k / shared)] float32.

    shared: how many neighbours have one scale
    scale = largest |x| / 127 of them; q = x * (127 / largest), rounded to the nearest, halfway to even.
    """
    rows, k = x.shape
    chunks = functional.pad(x.float(), (0, -k % shared)).view(rows, -(-k // shared), shared)
    amax = chunks.abs().amax(2, keepdim=True)
    amax = torch.where(amax < SMALLEST_AMAX, 0, amax)
    largest = torch.full_like(amax, LARGEST_ACTIVATION)  # a number over a tensor is not rounded once in torch
    inverse = torch.where(amax == 0, 0, largest / amax)
    q = (chunks * inverse).round_().to(torch.int8).flatten(1)[:, :k].contiguous()
    return q, (amax / LARGEST_ACTIVATION).squeeze(2)


def group_product_reference(x: Tensor, weight: GroupQuantised, activations: Activations = "float") -> Tensor:
    """x: [rows, k] float32, weight: [n, k] -> x W^T [rows, n] float32"""
    if activations == "float":
        return x.float() @ weight.values().T
    (n, k), form = weight.codes.shape, weight.form
    q, x_scale = quantise_activations(x, form.row_group)
    groups, per_chunk = form.num_groups(k), GROUP_CHUNK // form.group
    centred, scale, minimum = weight.centred(), weight.wide_scale(), weight.wide_minimum()
    out, of_chunk = torch.zeros(len(x), n), torch.zeros(len(x), n)
    for group in range(groups):
        columns = slice(group * form.group, (group + 1) * form.group)
        part, total = q[:, columns].double(), centred[:, columns].double()
        sums, by = part.sum(1, keepdim=True), scale[:, group]
        if form.bits == 8:  # scales of row and weight meet first
            by, sums = by * x_scale[:, group, None], (sums.float() * x_scale[:, group, None]).double()
            out = torch.addcmul(out.double(), part @ total.T, by.double()).float()
            if minimum is not None:
                out = torch.addcmul(out.double(), sums, -minimum[:, group].double()).float()
            continue
        of_chunk = torch.addcmul(of_chunk.double(), part @ total.T, by.double()).float()
        if minimum is not None:
            of_chunk = torch.addcmul(of_chunk.double(), sums, -minimum[:, group].double()).float()
        if (group + 1) % per_chunk == 0 or group + 1 == groups:
            chunk = group // per_chunk
            out = torch.addcmul(out.double(), of_chunk.double(), x_scale[:, chunk, None].double()).float()
            of_chunk = torch.zeros_like(of_chunk)
    return out
