"""Rows changed in place by compiled kernels and by torch: multiplied, clipped, gated, normed."""

import itertools

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu.operations import Operations
from moe_serve.kernels.rows import rms_norm_reference
from tests.kernels.cpu.test_rows import EPS, WIDTHS, noted, strided
from tests.tolerance import FLOAT32, relative_error

SIZES = list(itertools.product((0, 1, 3, 300), WIDTHS))


def at_once(name: str, *arguments: object) -> Tensor:
    """Runs a declared operation by its plain function."""
    return getattr(Operations(), name)(*arguments)


@pytest.mark.parametrize("threads", (1, 2))
def test_multiplied_and_clipped_rows_have_the_bits_of_torch(threads, library):
    library.set_threads(threads)
    for num_rows, width in SIZES:
        x = strided(num_rows, width)
        for name, number in (("scale_", 0.22), ("clip_", 0.7)):
            wanted, got = x.clone(), strided(num_rows, width)
            got.copy_(x)
            at_once(name, wanted, number)
            noted(name, got, number)
            assert torch.equal(got, wanted), (num_rows, width)
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.1]])
    noted("clip_", x, 0.7)
    assert x.tolist()[0][1:] == pytest.approx([0.7, -0.7, 0.1])
    assert x[0, 0].isnan()


@pytest.mark.parametrize("run", [noted, at_once])
def test_gated_rows_match_their_definition(run, library):
    for (num_rows, width), threads in itertools.product(SIZES, (1, 2)):
        library.set_threads(threads)
        total, x, logits = torch.randn(num_rows, width), torch.randn(num_rows, width), 8 * torch.randn(num_rows, 1)
        wanted = total.double() + x.double() / (1 + torch.exp(-logits.double()))
        run("add_gated_", total, x, logits)
        assert relative_error(total, wanted) < FLOAT32
    total = torch.zeros(3, 20)
    run("add_gated_", total, torch.ones(3, 20), torch.tensor([[-1000.0], [1000.0], [0.0]]))
    assert total[:, 0].tolist() == pytest.approx([0, 1, 0.5], abs=1e-30)


@pytest.mark.parametrize("run", [noted, at_once])
def test_norms_in_place_leave_their_neighbours_and_sums_take_a_factor(run, library):
    for (num_rows, width), threads in itertools.product(SIZES, (1, 2)):
        library.set_threads(threads)
        whole, weight = torch.randn(num_rows, width + 4), torch.randn(width)
        wanted = whole.clone()
        wanted[:, 2 : 2 + width] = rms_norm_reference(whole[:, 2 : 2 + width], weight, EPS)
        run("rms_norm_", whole[:, 2 : 2 + width], weight, EPS)
        assert relative_error(whole, wanted) < FLOAT32
        assert torch.equal(whole[:, :2], wanted[:, :2])
        assert torch.equal(whole[:, 2 + width :], wanted[:, 2 + width :])
        x, delta = strided(num_rows, width), strided(num_rows, width)
        total = x + 0.22 * delta
        normed = run("add_rms_norm", x, delta, weight, EPS, 0.22)
        assert relative_error(x, total) < FLOAT32
        # Of that very sum: the norm of a single number near zero magnifies how it was rounded.
        assert relative_error(normed, rms_norm_reference(x, weight, EPS)) < FLOAT32


@pytest.mark.parametrize("width", (16, 33, 350))
@pytest.mark.parametrize("run", [noted, at_once])
def test_a_rows_bits_do_not_depend_on_the_batch_threads_or_register_width(width, run, library, avx2, use):
    def results(first: int, end: int) -> list[Tensor]:
        part = [tensor[first:end].clone() for tensor in (x, delta, logits)]
        run("add_gated_", *part)
        run("scale_", part[0], 0.22)
        run("rms_norm_", part[1], weight, EPS)
        return [*part, run("add_rms_norm", part[0], part[1], weight, EPS, 0.3)]

    x, delta, logits, weight = torch.randn(300, width), torch.randn(300, width), torch.randn(300, 1), torch.randn(width)
    whole = results(0, 300)
    library.set_threads(2)
    for first, end in ((0, 300), (0, 1), (17, 18), (64, 127), (299, 300)):
        for got, wanted in zip(results(first, end), whole, strict=True):
            assert torch.equal(got, wanted[first:end]), (first, end)
    use(avx2)
    for got, wanted in zip(results(0, 300), whole, strict=True):
        assert torch.equal(got, wanted)
