"""Every declared operation on its examples: by its plain function, and by its kernel."""

import itertools

import pytest
import torch
from torch import Tensor

from moe_serve.kernels.cpu.linear import RowTable
from moe_serve.kernels.cpu.operations import EXAMPLE_ROWS, AnyOperation, declared_operations, recorded_once
from tests.tolerance import FLOAT32, relative_error

DECLARED = dict(declared_operations())
# The argument that plain functions write over, and kernels leave as it is.
USED_UP = {"mla_rope_write": 1, "index_write": 1}


def examples(declared: AnyOperation) -> list[tuple[object, ...]]:
    seeds = itertools.count()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(next(seeds)))

    return list(declared.examples(draw))


def test_every_operation_but_the_mlp_whose_kernel_is_that_of_experts_has_examples(library):
    assert [name for name, declared in DECLARED.items() if not examples(declared)] == ["mlp"]


@pytest.mark.parametrize("name", DECLARED)
def test_the_kernel_computes_what_the_plain_function_does(name, library):
    declared = DECLARED[name]
    for mine, theirs in zip(examples(declared), examples(declared), strict=True):
        got = recorded_once(EXAMPLE_ROWS, lambda do, mine=mine: declared.record(do, *mine))
        wanted = declared.plain(*(each.data if isinstance(each, RowTable) else each for each in theirs))
        arguments = [pair for at, pair in enumerate(zip(mine, theirs, strict=True)) if at != USED_UP.get(name)]
        pairs = [(got, wanted), *arguments]
        compared = [(one, other) for one, other in pairs if isinstance(one, Tensor) and not one.is_complex()]
        assert compared
        for one, other in compared:
            assert relative_error(one, other) < FLOAT32
