"""Layer normalisation in the compiled kernel, against its reference, and its bits in any batch."""

import itertools

import pytest
import torch

from moe_serve.kernels.rows import LayerNorm, layer_norm_reference
from tests.kernels.cpu.test_rows import noted
from tests.kernels.cpu.test_updates import at_once
from tests.tolerance import FLOAT32, relative_error

WIDTHS = (1, 7, 16, 50, 64, 70, 1031)
EPS = 1e-5


@pytest.mark.parametrize("threads", (1, 2))
def test_matches_the_reference_and_adds_in_place(threads, library):
    library.set_threads(threads)
    for num_rows, width in itertools.product((0, 1, 3, 300), WIDTHS):
        norm = LayerNorm(torch.randn(width), torch.randn(width))
        x, delta = (torch.randn(num_rows, width + 4)[:, :width] + 3 for _ in range(2))
        for run in (noted, at_once):
            for added in (None, delta):
                rows = x.clone()
                total = rows if added is None else rows + added
                wanted = layer_norm_reference(total.double(), norm, EPS).float()
                got = run("layer_norm", rows, added, norm, EPS)
                assert relative_error(got, wanted) < FLOAT32, width
                assert torch.equal(rows, total)


def test_a_rows_bits_do_not_depend_on_the_batch_threads_or_register_width(library, avx2, use):
    norm = LayerNorm(torch.randn(300), torch.randn(300))
    x = torch.randn(100, 300)
    whole = noted("layer_norm", x, None, norm, EPS)
    alone = torch.cat([noted("layer_norm", row[None], None, norm, EPS) for row in x])
    library.set_threads(2)
    threaded = noted("layer_norm", x, None, norm, EPS)
    library.set_threads(1)
    use(avx2)
    narrow = noted("layer_norm", x, None, norm, EPS)
    use(library)
    for other in (alone, threaded, narrow):
        assert torch.equal(other, whole)
