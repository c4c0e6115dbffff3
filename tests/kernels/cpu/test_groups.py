"""Weights of four and eight bits in groups by the compiled kernels, with activations in float and in int8.

With float activations the bits are those of the weight's values in float32. With int8 activations all instruction sets
have the same bits, plain C without fused multiply-add among them.
"""

import itertools
from hashlib import blake2b

import pytest
import torch
from torch import Tensor

from moe_serve.c_library import INSTRUCTION_SETS, processor_features
from moe_serve.kernels.cpu import digest
from moe_serve.kernels.cpu.experts import GroupedExperts, PackedExperts, packed_ffn
from moe_serve.kernels.cpu.library import build_cpu_library
from moe_serve.kernels.cpu.linear import PackedLinear
from moe_serve.kernels.cpu.packed import (
    gate_up_size,
    group_packed_size,
    pack,
    pack_gate_up,
    pack_groups,
    pack_groups_gate_up,
    packed_size,
    padded,
)
from moe_serve.kernels.forms import INT4, RELU2, SILU, Activation, GroupForm
from moe_serve.kernels.group_quantised import (
    GroupQuantised,
    group_product_reference,
    quantise_groups,
    quantise_groups_reference,
)
from tests.kernels.test_group_quantised import FORMS, random_groups
from tests.tolerance import relative_error

KEPT_DIGEST = "46246e42a192bd97"
CLAMPED = Activation("clamped_swiglu", alpha=1.702, limit=1.2)  # low enough to be met
SIZES = ((1, 1), (33, 300), (96, 128), (70, 392))  # n, k


def linear(weight: GroupQuantised, activations: str) -> PackedLinear:
    return PackedLinear.of_groups(weight, None, activations)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_of_floats_have_the_bits_of_the_values_in_float32(form, library, avx2, use):
    for build, (n, k) in itertools.product((library, avx2), SIZES):
        use(build)
        weight = random_groups(form, n, k)
        groups, wide = linear(weight, "float"), PackedLinear(weight.values())
        for rows in (0, 1, 3, 7, 40):
            x = torch.randn(rows, k)
            assert torch.equal(groups(x), wide(x)), (build.vectors, n, k, rows)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_of_integers_match_their_reference(form, library):
    for n, k in SIZES:
        weight, x = random_groups(form, n, k), torch.randn(13, k)
        bias = torch.randn(n)
        got = PackedLinear.of_groups(weight, bias, "int8")(x) - bias
        assert relative_error(got, group_product_reference(x, weight, "int8")) < 1e-5, (n, k)


def builds(library, avx2) -> list:
    """Returns the kernels for every instruction set that differs, those of `library` first."""
    wanted = ["plain"]
    if {*INSTRUCTION_SETS["avx512"].features} <= {*processor_features().split()}:
        wanted.append("avx512")  # without VNNI
    return [library, avx2, *(build_cpu_library(INSTRUCTION_SETS[name].flags) for name in wanted)]


@pytest.mark.slow  # builds the kernels twice more
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_of_integers_have_the_same_bits_with_every_instruction_set(form, library, avx2, use):
    for n, k in SIZES:
        weight, x = random_groups(form, n, k), torch.randn(19, k)
        results = []
        for build in builds(library, avx2):
            use(build)
            results.append(linear(weight, "int8")(x))
        assert all(torch.equal(result, results[0]) for result in results[1:]), (n, k)


def test_products_of_integers_have_the_digest_of_every_processor_so_far(library):
    """Those with AVX2, with AVX-512, with VNNI beside it, and plain C."""
    found, x = blake2b(digest_size=8), digest._numbers(19, digest.HIDDEN, seed=7)
    for form in FORMS:
        found.update(linear(digest._drawn_groups(form), "int8")(x).numpy().tobytes())
    assert found.hexdigest() == KEPT_DIGEST


def test_products_of_integers_have_the_bits_of_avx512_with_avx2(library, avx2, use):
    for form in FORMS:
        weight, x = random_groups(form, 70, 392), torch.randn(19, 392)
        wanted = linear(weight, "int8")(x)
        use(avx2)
        assert torch.equal(linear(weight, "int8")(x), wanted), form
        use(library)


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_the_bits_of_a_row_depend_on_that_row_only(activations, library):
    for form in FORMS:
        projection, x = linear(random_groups(form, 70, 300), activations), torch.randn(200, 300)
        alone = torch.cat([projection(row[None]) for row in x])
        for rows, threads in itertools.product((2, 6, 7, 13, 200), (1, 2)):
            library.set_threads(threads)
            assert torch.equal(projection(x[:rows]), alone[:rows]), (form, rows, threads)


def test_largest_codes_and_activations_do_not_overflow(library, avx2, use):
    """All products of a group have one sign, and are as large as can be."""
    for form in FORMS:
        weight = random_groups(form, 64, 256)
        for code in (0, (1 << form.bits) - 1):
            weight.codes.fill_(code)
            for build in (library, avx2):
                use(build)
                x = torch.full((7, 256), -1.0)
                got = linear(weight, "int8")(x)
                assert relative_error(got, group_product_reference(x, weight)) < 1e-5, (form, code, build.vectors)
        use(library)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_say_so_and_leave_others_alone(bad, library):
    projection, x = linear(random_groups(INT4, 40, 300), "int8"), torch.randn(9, 300)
    wanted = projection(x)
    x[4, 130] = bad
    got = projection(x)
    assert not got[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(got[others], wanted[others])


def test_weights_are_rounded_as_by_the_reference_and_equally_with_avx2(library, avx2, use):
    for form in (INT4, GroupForm(4, 128, "float16", 8), GroupForm(8, 16, "float16", 128)):
        weight = torch.randn(40, 300) * torch.tensor([1.0, 1e-6, 1e4, 1e-9]).repeat(10)[:, None]
        weight[3], weight[5, 32:64] = 0, torch.arange(32) % 16 - 8
        got, wanted = quantise_groups(weight, form), quantise_groups_reference(weight, form)
        assert (got.scale == wanted.scale).float().mean() > 0.99, "steps of equal errors alone may differ"
        for row in range(40):
            errors = [(each.values()[row] - weight[row]).norm() for each in (got, wanted)]
            assert errors[0] <= errors[1] * 1.0001, (form, row)
        library.set_threads(2)
        again = quantise_groups(weight, form)
        library.set_threads(1)
        use(avx2)
        for other in (again, quantise_groups(weight, form)):
            assert torch.equal(other.codes, got.codes)
            assert torch.equal(other.scale, got.scale)
        use(library)
        assert quantise_groups(weight[:0], form).codes.shape == (0, 300)


def grouped_experts(
    forms: tuple[GroupForm, GroupForm], sizes: tuple[int, int, int], activations: str, activation: Activation
) -> tuple[PackedExperts, PackedExperts, list[tuple[GroupQuantised, GroupQuantised]]]:
    """Returns experts in groups, the same in float32, and their weights. sizes: slots, hidden, width"""
    (slots, hidden, width), stacks = sizes, activation.stacks
    rows = stacks * width
    weights = [(random_groups(forms[0], rows, hidden), random_groups(forms[1], hidden, width)) for _ in range(slots)]
    biases = torch.randn(slots, rows), torch.randn(slots, hidden)
    gate_up = torch.empty(slots, group_packed_size(stacks * padded(width), hidden, forms[0]), dtype=torch.uint8)
    down = torch.empty(slots, group_packed_size(hidden, width, forms[1]), dtype=torch.uint8)
    wide_gate_up = torch.empty(slots, gate_up_size(width, hidden, stacks))
    wide_down = torch.empty(slots, packed_size(hidden, width))
    for slot, (above, below) in enumerate(weights):
        pack_groups_gate_up(above, gate_up[slot], stacks)
        pack_groups(below, down[slot])
        pack_gate_up(above.values(), wide_gate_up[slot], stacks)
        pack(below.values(), wide_down[slot])
    groups = GroupedExperts(*forms, activations)
    return (
        PackedExperts(gate_up, down, hidden, width, None, None, *biases, activation, groups),
        PackedExperts(wide_gate_up, wide_down, hidden, width, None, None, *biases, activation),
        weights,
    )


MIXED = ((INT4, INT4), (FORMS[4], FORMS[6]), (FORMS[1], FORMS[7]))


@pytest.mark.parametrize("activation", [SILU, CLAMPED, RELU2], ids=["silu", "clamped", "relu2"])
def test_experts_with_float_activations_have_the_bits_of_their_values(activation, library, avx2, use):
    counts = torch.tensor([0, 1, 23, 7, 3])
    for forms, (hidden, width) in itertools.product(MIXED, ((40, 16), (512, 33), (130, 200))):
        packed, wide, _ = grouped_experts(forms, (5, hidden, width), "float", activation)
        x = torch.randn(int(counts.sum()), hidden)
        for build, threads in itertools.product((library, avx2), (1, 2)):
            use(build)
            build.set_threads(threads)
            assert torch.equal(packed_ffn(x, counts, packed), packed_ffn(x, counts, wide)), (forms, hidden, width)
            build.set_threads(1)


def reference_ffn(x: Tensor, counts: Tensor, experts: PackedExperts, weights: list) -> Tensor:
    results, slots = [], torch.repeat_interleave(counts).tolist()
    for row, slot in zip(x, slots, strict=True):
        both = group_product_reference(row[None], weights[slot][0], "int8") + experts.gate_up_bias[slot]
        gate, up = both.chunk(2, dim=1)
        middle = torch.nn.functional.silu(gate) * up
        results.append(group_product_reference(middle, weights[slot][1], "int8") + experts.down_bias[slot])
    return torch.cat(results)


def test_experts_with_int8_activations_match_their_reference_alone_in_slabs_and_with_any_threads(library, avx2, use):
    counts = torch.tensor([0, 1, 23, 7, 3])
    for forms, (hidden, width) in itertools.product(MIXED, ((40, 16), (512, 33), (130, 200))):
        packed, _, weights = grouped_experts(forms, (5, hidden, width), "int8", SILU)
        x = torch.randn(int(counts.sum()), hidden)
        got = packed_ffn(x, counts, packed)
        assert relative_error(got, reference_ffn(x, counts, packed, weights)) < 3e-3, (forms, hidden, width)
        for build, threads in itertools.product((library, avx2), (1, 2)):
            use(build)
            build.set_threads(threads)
            assert torch.equal(packed_ffn(x, counts, packed), got), (build.vectors, threads)
            build.set_threads(1)
        use(library)
        starts = (counts.cumsum(0) - counts).tolist()
        alone = [packed_ffn(x[at : at + 1], torch.eye(5, dtype=torch.int64)[slot], packed) for slot, at in
                 ((1, starts[1]), (2, starts[2] + 9), (4, starts[4] + 2))]  # fmt: skip
        assert torch.equal(torch.cat(alone), got[[starts[1], starts[2] + 9, starts[4] + 2]])
        slabs, filled = torch.randn(5, 25, hidden), torch.arange(25) < counts[:, None]
        slabs[filled] = x
        results = packed_ffn(slabs.flatten(0, 1), counts, packed, slab_rows=25).view(5, 25, hidden)
        assert torch.equal(results[filled], got)
        assert packed_ffn(x[:0], 0 * counts, packed).shape == (0, hidden)
