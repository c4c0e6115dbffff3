"""Weights of four and eight bits in groups: their values, their quantisation, and their products in plain torch."""

import numpy as np
import pytest
import torch

from moe_serve.kernels.forms import GROUPS, INT4, GroupForm
from moe_serve.kernels.group_quantised import (
    SCALE_DTYPES,
    GroupQuantised,
    GroupRows,
    group_product_reference,
    quantise_activations,
    quantise_groups_reference,
    rows_of,
    shapes_alone,
    stack,
)
from tests.tolerance import relative_error

FORMS = (
    INT4,
    GroupForm(4, 128, "bfloat16", None),
    GroupForm(4, 64, "float32", 8),
    GroupForm(4, 32, "float16", 0, has_minimum=True),  # GGUF's Q4_1
    GroupForm(4, 32, "two_levels", 0, has_minimum=True),  # Q4_K
    GroupForm(6, 32, "two_levels", 0, has_minimum=True),  # Q5_K
    GroupForm(6, 16, "two_levels", 32),  # Q6_K
    GroupForm(8, 128, "float16", 128),
    GroupForm(8, 32, "bfloat16", None),
)


def random_groups(form: GroupForm, n: int, k: int) -> GroupQuantised:
    """Returns random codes and scales, of values of about 1 / sqrt(k)."""
    groups, supers, dtype = form.num_groups(k), -(-k // 256), SCALE_DTYPES[form.scale]
    step = k**-0.5 / 2 ** (form.bits - 2)

    def scales() -> torch.Tensor:
        if form.is_two_level:
            return torch.randint(1, 64, (n, groups)).to(torch.int8)
        return ((torch.rand(n, groups) + 0.5) * step).to(dtype)

    def halves() -> torch.Tensor:
        return ((torch.rand(n, supers) + 0.5) * step / 40).half()

    minimum = None
    if form.has_minimum:
        minimum = torch.randint(0, 64, (n, groups), dtype=torch.uint8) if form.is_two_level else scales()
    return GroupQuantised(
        form,
        torch.randint(0, 1 << form.bits, (n, k), dtype=torch.uint8),
        scales(),
        torch.randint(0, 1 << form.bits, (n, groups), dtype=torch.uint8) if form.zero is None else None,
        minimum,
        halves() if form.is_two_level else None,
        halves() if form.is_two_level and form.has_minimum else None,
    )


def test_rows_are_taken_within_their_parts():
    parts = [random_groups(form, 3, 300) for form in (INT4, INT4, FORMS[3])]
    weight, order = GroupRows.of(parts), torch.tensor([4, 0, 5, 1, 3, 2, 8, 6, 7])
    assert [len(part.codes) for part in weight.parts] == [6, 3]
    assert weight.shape == (9, 300)
    values = torch.cat([part.values() for part in parts])
    assert torch.equal(torch.cat([part.values() for part in weight.take(order).parts]), values[order])
    alone = shapes_alone(FORMS[3], 3, 300)
    assert {name: getattr(alone, name).shape for name in ("codes", "scale")} == {
        name: getattr(parts[2], name).shape for name in ("codes", "scale")
    }


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_are_scale_times_code_less_zero_less_minimum(form):
    for n, k in ((1, 16), (3, 300), (2, 256)):
        weight = random_groups(form, n, k)
        values = weight.values()
        for row in range(n):
            for column in {0, 15, k // 2, k - 1}:
                group, block = column // form.group, column // 256
                scale, minimum = weight.scale[row, group].double(), 0.0
                if weight.super_scale is not None:
                    scale = scale * weight.super_scale[row, block].double()
                zero = form.zero if weight.zero is None else int(weight.zero[row, group])
                if weight.minimum is not None:
                    minimum = weight.minimum[row, group].double()
                    if weight.super_minimum is not None:
                        minimum = minimum * weight.super_minimum[row, block].double()
                wanted = scale * (int(weight.codes[row, column]) - zero) - minimum
                assert values[row, column] == wanted.float()


def test_quantised_weights_keep_zeros_and_what_is_exact_and_are_near_the_others():
    weight = torch.randn(40, 300)
    weight[3] = 0
    weight[5, 32:64] = torch.arange(32) % 16 - 8
    for form in (each for each in FORMS if each.zero is not None and not (each.is_two_level or each.has_minimum)):
        got = quantise_groups_reference(weight, form)
        values = got.values()
        assert not values[3].any()
        assert relative_error(values, weight) < (0.11 if form.bits == 4 else 0.007)
        if form.group == 32:
            assert torch.equal(values[5, 32:64], weight[5, 32:64])
        again = quantise_groups_reference(values, form)
        assert (again.values() - values).norm() <= (values - weight).norm()


def test_activations_are_within_half_a_step_and_a_row_of_zeros_stays():
    x = torch.randn(6, 300) * torch.tensor([1e-20, 1e20, 1.0, 3.0, 0.0, 1e-33])[:, None]
    for shared in (128, 32):
        q, scale = quantise_activations(x, shared)
        scales = scale.repeat_interleave(shared, 1)[:, :300]
        assert ((q.float() * scales - x).abs() <= 0.501 * scales).logical_or(x.abs() < 1e-30).all()
        assert not q[4:].any()
        assert int(q.abs().max()) == 127


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_with_int8_activations_are_near_those_with_float_ones(form):
    weight, x = random_groups(form, 33, 300), torch.randn(5, 300)
    wanted = group_product_reference(x, weight)
    assert relative_error(wanted, x @ weight.values().T) < 1e-6
    assert relative_error(group_product_reference(x, weight, "int8"), wanted) < (0.009 if form.bits == 8 else 0.015)
    assert group_product_reference(x[:0], weight, "int8").shape == (0, 33)


def test_rows_of_a_stack_are_those_of_its_parts():
    for form in FORMS:
        parts = [random_groups(form, n, 80) for n in (3, 2)]
        assert torch.equal(stack(parts).values(), torch.cat([part.values() for part in parts]))


def test_a_packed_row_of_32_weights_and_a_scale_takes_four_and_a_half_bits_each():
    assert INT4.row_bytes(2048) * 8 / 2048 == 4.5
    assert GroupForm(4, 32, "two_levels", 0, True).row_bytes(2048) * 8 / 2048 == 4.75
    assert GroupForm(4, 128, "float16", None).row_bytes(2048) * 8 / 2048 == 4 + 24 / 128
    assert set(GROUPS) == {16, 32, 64, 128}


def test_rows_of_a_shape_alone_are_the_shape_of_the_rows() -> None:
    for shape, dtype in (((6,), torch.float32), ((6, 4), torch.bfloat16), ((6, 2, 3), torch.uint8)):
        real, order = torch.zeros(shape, dtype=dtype), torch.tensor([5, 0, 3])
        found = rows_of(real.to("meta"), order.to("meta"))
        assert (found.shape, found.dtype, found.is_meta) == (real[order].shape, dtype, True)
        assert torch.equal(rows_of(torch.arange(6), order), order)


def test_activations_are_rounded_as_numpy_rounds_them() -> None:
    """The inverse of a scale is rounded once; a number over a tensor is not in torch, which moved halfway cases."""
    x = torch.randn(60_000, 128, generator=torch.Generator().manual_seed(0))
    q, _ = quantise_activations(x)
    inverse = np.float32(127) / np.abs(x.numpy()).max(axis=1, keepdims=True)
    assert np.array_equal(q.numpy(), np.rint(x.numpy() * inverse).astype(np.int8))
