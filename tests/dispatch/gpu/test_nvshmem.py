"""What of the NVSHMEM regions can be checked without a GPU: the bootstrap, and errors that say what to install."""

import enum
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from moe_serve.dispatch.base import BufferLimits, EpGroup
from moe_serve.dispatch.gpu import symmetric
from moe_serve.dispatch.gpu.facts import device_library
from moe_serve.dispatch.gpu.region import gpu_region
from moe_serve.dispatch.gpu.symmetric import OWN_HEAP_BYTES, exchange_unique_id, nvshmem_regions, start_nvshmem
from moe_serve.errors import ConfigError
from tests.ranks import run_ranks

V3 = BufferLimits(max_tokens_per_rank=128, hidden=7168, topk=8, slots_per_rank=36)
Status = enum.IntEnum("Status", {"NOT_INITIALIZED": 0, "IS_BOOTSTRAPPED": 1, "IS_INITIALIZED": 2, "INVALID": 32767})


class Library:
    """nvshmem.core as far as starting goes. Its unique id is a numpy record, as in nvshmem4py 0.4.1."""

    InitStatus = Status

    def __init__(self, rank: int = 0, place: tuple[int, int] | None = None):
        self._rank, self._place = rank, place
        self.starts: list[dict[str, object]] = []

    def get_version(self) -> None: ...

    def init_status(self) -> int:
        return Status.NOT_INITIALIZED if self._place is None else Status.IS_INITIALIZED

    def my_pe(self) -> int:
        assert self._place is not None
        return self._place[0]

    def n_pes(self) -> int:
        assert self._place is not None
        return self._place[1]

    def get_unique_id(self, empty: bool = False) -> SimpleNamespace:
        fill = 0 if empty else 7 + self._rank
        return SimpleNamespace(_data=np.full(1, fill, dtype=[("version", "i4"), ("internal", "u1", 124)]))

    def init(self, **how: object) -> None:
        self.starts.append(how)
        self._place = (how["rank"], how["nranks"])  # type: ignore[assignment]


def start(library: Library, group: EpGroup) -> None:
    device = SimpleNamespace(set_current=lambda: None)
    modules = {"nvshmem.core": library, "cuda.core": SimpleNamespace(Device=lambda index: device)}
    with mock.patch.object(symmetric, "import_module", modules.__getitem__):
        start_nvshmem(group, 1 << 30)


def check_bootstrap(rank: int, group: EpGroup) -> bytes:
    library = Library(rank)
    uid = exchange_unique_id(library, group)
    with mock.patch.dict(os.environ, clear=False):
        os.environ.pop("NVSHMEM_SYMMETRIC_SIZE", None)
        start(library, group)
        assert os.environ["NVSHMEM_SYMMETRIC_SIZE"] == str((1 << 30) + OWN_HEAP_BYTES)
    (how,) = library.starts
    assert (how["rank"], how["nranks"], how["initializer_method"]) == (rank, group.num_ranks, "uid")
    assert how["uid"]._data.tobytes() == uid._data.tobytes()  # type: ignore[attr-defined]
    start(library, group)
    assert len(library.starts) == 1, "once per process"
    return bytes(uid._data.tobytes())


def test_all_ranks_start_once_with_the_unique_id_of_rank_0() -> None:
    uids = run_ranks(3, check_bootstrap)
    assert set(uids) == {np.full(1, 7, dtype=[("version", "i4"), ("internal", "u1", 124)]).tobytes()}


def check_started_elsewhere(rank: int, group: EpGroup) -> None:
    start(Library(rank, place=(rank, 2)), group)  # an MPI program has started it: nothing to do
    with pytest.raises(ConfigError, match=r"runs here already, as rank 5 of 8, and dispatch needs it as rank . of 2"):
        start(Library(rank, place=(5, 8)), group)


def test_a_library_that_runs_is_used_if_it_runs_for_the_same_ranks() -> None:
    run_ranks(2, check_started_elsewhere)


def test_a_region_that_does_not_stage_is_refused() -> None:
    region = gpu_region(2, V3, torch.bfloat16, "auto", stages=False)
    with pytest.raises(ConfigError, match="stages=True"):
        nvshmem_regions(region, EpGroup(0, 2, torch.device("cpu")))


class NvshmemInvalid(Exception):
    """nvshmem4py's error."""


def test_a_heap_that_another_library_started_is_refused_in_words() -> None:
    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
        raise NvshmemInvalid("NVSHMEM Library is not initialized")

    core = SimpleNamespace(tensor=tensor, NvshmemInvalid=NvshmemInvalid)
    region = gpu_region(2, V3, torch.bfloat16, "auto", stages=True)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.multiple(symmetric, nvshmem_launchers=lambda capability: {}, start_nvshmem=lambda *arguments: None),
        mock.patch.object(symmetric, "_library", return_value=core),
        pytest.raises(ConfigError, match=r"another library has started it; start it by nvshmem.core.init"),
    ):
        nvshmem_regions(region, EpGroup(0, 2, torch.device("cpu")))


@pytest.mark.parametrize(
    "capability, found", [((9, 0), "sm_90"), ((8, 6), "sm_80"), ((10, 3), "sm_100"), ((12, 0), None)]
)
def test_the_device_library_is_that_of_the_gpu_or_of_its_generation(
    capability: tuple[int, int], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(arch: str) -> str:
        if arch not in ("80", "90", "100"):
            raise NvshmemInvalid(f"Tried: libnvshmem_device_sm_{arch}.bc")
        return f"sm_{arch}"

    core = SimpleNamespace(find_device_bitcode_library=find, NvshmemInvalid=NvshmemInvalid)
    monkeypatch.delenv("NVSHMEM_LIB_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "nvshmem.core", core)
    assert device_library(capability) == found


def test_a_folder_that_is_named_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_LIB_DIR", str(tmp_path))
    assert device_library((9, 0)) is None
    (tmp_path / "libnvshmem_device.bc").touch()
    assert device_library((9, 0)) == str(tmp_path / "libnvshmem_device.bc")


def test_without_nvshmem4py_the_error_says_what_to_install() -> None:
    with (
        mock.patch.dict("sys.modules", {"nvshmem": None, "nvshmem.core": None}),
        pytest.raises(ConfigError, match=r"pip install nvshmem4py-cu13, or set dispatch.backend: collective"),
    ):
        start_nvshmem(EpGroup(0, 2, torch.device("cuda", 0)), 0)


def test_deepseek_v3_regions_fit_in_the_memory_that_deepep_states() -> None:
    region = gpu_region(8, V3, torch.bfloat16, "fp8", stages=False)
    assert region.row_bytes == 7168 + 4 * 56 + 48  # values, scales, header of 1 + 8 numbers
    assert region.region_bytes < 0.7e9
