"""What of the NVSHMEM regions can be checked without a GPU: the bootstrap, and errors that say what to install."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from moe_serve.dispatch.low_latency_nvshmem import low_latency_region
from moe_serve.dispatch.symmetric_nvshmem import exchange_unique_id, nvshmem_regions
from moe_serve.errors import ConfigError


def make_library(fill: int) -> SimpleNamespace:
    def get_unique_id(empty: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            _data=np.full(1, 0 if empty else fill, dtype=[("version", "i4"), ("internal", "u1", 124)])
        )

    return SimpleNamespace(get_unique_id=get_unique_id)


def test_every_rank_gets_the_unique_id_of_rank_0_through_the_store() -> None:
    store = HashStore()
    ids = [exchange_unique_id(make_library(fill=7 + rank), rank, store) for rank in range(3)]
    assert len({uid._data.tobytes() for uid in ids}) == 1
    assert ids[2]._data["version"] == 7


def test_a_region_that_does_not_stage_is_refused() -> None:
    region = low_latency_region(2, 2, 8, 64, 2, torch.bfloat16, "auto", stages=False)
    with pytest.raises(ConfigError, match="stages=True"):
        nvshmem_regions(region, 0, torch.device("cpu"))


def test_a_wire_that_the_kernels_do_not_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp8 or the compute dtype"):
        low_latency_region(2, 2, 8, 64, 2, torch.bfloat16, "float32", stages=True)


def test_deepseek_v3_regions_fit_in_the_memory_that_deepep_states() -> None:
    region = low_latency_region(8, 36, 128, 7168, 8, torch.bfloat16, "fp8", stages=False)
    assert region.row_bytes == 7168 + 4 * 56 + 48  # values, scales, header of 1 + 8 numbers
    assert region.region_bytes < 0.7e9
