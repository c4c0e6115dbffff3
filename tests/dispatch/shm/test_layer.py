"""Whole MoE layers over shared memory have the bits of one rank, with packed rows and with masked slabs."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import AnyAllToAll, EpGroup, TransportRequest
from moe_serve.dispatch.capabilities import Rows
from moe_serve.dispatch.make import make_all_to_all
from tests.ep import test_moe_layer as layers
from tests.ranks import run_ranks


def over_shared_memory(rank: int, group: EpGroup, case: layers.Case, rows: Rows) -> Tensor:
    def make(group: EpGroup, request: TransportRequest) -> AnyAllToAll:
        return make_all_to_all(group, replace(request, backend="shm", rows=rows))

    with mock.patch.object(layers, "make_all_to_all", make):
        out, _, _ = layers.run_layers(rank, group, case)
    return out


@pytest.mark.parametrize("rows", ["packed", "masked"])
@pytest.mark.parametrize("name", [name for name in layers.SAME_BITS if not name.startswith("one rank")])
def test_bits_do_not_depend_on_the_transport(name: str, rows: Rows) -> None:
    case = layers.SAME_BITS[name]
    parts = run_ranks(case.placement.num_ranks, over_shared_memory, case, rows)
    assert torch.equal(torch.cat(parts), layers.serve(layers.BASE)[0])
