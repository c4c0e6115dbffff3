"""Regions by CUDA IPC: handles as bytes, what the driver is asked, and the whole transport between real processes.

The driver is a double whose GPU memory is a file that ranks map; kernels run in Triton's interpreter. On GPUs the last
test runs the same with CUDA's own driver; that has not been done yet.
"""

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import EpGroup, MaskedRows
from moe_serve.dispatch.gpu.symmetric import HANDLE_BYTES, CudaDriver
from moe_serve.errors import CapacityError, ConfigError, PeerError
from tests.dispatch.contract import Scenario
from tests.kernels.conftest import RunCheck
from tests.ranks import close_pools, run_ranks


class FakeCuda:
    """libcuda as far as it is called: addresses are numbers, a handle is the address it stands for."""

    def __init__(self, codes: dict[str, int] | None = None):
        self.codes = codes or {}
        self.calls: list[tuple[object, ...]] = []

    def cuMemAlloc_v2(self, address, size) -> int:
        address._obj.value = 0x7000_0000_1000
        self.calls.append(("alloc", size.value))
        return self.codes.get("alloc", 0)

    def cuMemsetD8_v2(self, address, value, size) -> int:
        self.calls.append(("clear", address.value, value.value, size.value))
        return 0

    def cuCtxSynchronize(self) -> int:
        self.calls.append(("wait",))
        return 0

    def cuIpcGetMemHandle(self, handle, address) -> int:
        ctypes.memmove(ctypes.addressof(handle._obj), b"\0H" + address.value.to_bytes(8), 10)
        return self.codes.get("handle", 0)

    def cuIpcOpenMemHandle_v2(self, address, handle, flags) -> int:
        address._obj.value = int.from_bytes(bytes(handle)[2:10]) + 0x1000
        self.calls.append(("open", flags.value))
        return self.codes.get("open", 0)


GPU = torch.device("cuda", 1)


def test_memory_is_cleared_before_its_handle_is_given_away() -> None:
    cuda = FakeCuda()
    driver = CudaDriver(GPU, cuda)
    address = driver.allocate(4096)
    handle = driver.handle_of(address)
    assert cuda.calls == [("alloc", 4096), ("clear", address, 0, 4096), ("wait",)]
    assert len(handle) == HANDLE_BYTES
    assert handle[:2] == b"\0H", "zero bytes are bytes like others"
    assert driver.open(handle) == address + 0x1000
    assert cuda.calls[-1] == ("open", 1), "with access to the other GPU"


def test_what_the_driver_refuses_is_said_with_what_to_do() -> None:
    with pytest.raises(CapacityError, match=r"take 3\.00 GiB, which cuda:1 has not free; lower dispatch.max_tokens"):
        CudaDriver(GPU, FakeCuda({"alloc": 2})).allocate(3 << 30)
    with pytest.raises(ConfigError, match=r"cuIpcOpenMemHandle failed on cuda:1 with CUDA error 201; .*on one host"):
        CudaDriver(GPU, FakeCuda({"open": 201})).open(bytes(HANDLE_BYTES))


@dataclass
class SharedFiles:
    """A CudaDriver whose memory is a file for each rank; a handle is its name."""

    folder: str
    rank: int

    def __post_init__(self) -> None:
        self.mappings: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> int:
        path = Path(self.folder, f"region{self.rank}")
        path.write_bytes(bytes(num_bytes))
        return self._map(path)

    def handle_of(self, address: int) -> bytes:
        return f"region{self.rank}".encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        return self._map(Path(self.folder, handle.rstrip(b"\0").decode()))

    def _map(self, path: Path) -> int:
        with path.open("r+b") as file:
            self.mappings.append(mmap.mmap(file.fileno(), 0))
        return ctypes.addressof(ctypes.c_char.from_buffer(self.mappings[-1]))


@dataclass(frozen=True)
class Distinct(Scenario):
    """A token names a slot once, as slabs want it."""

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        hidden, ids, weights = super().inputs(rank)
        spread = (ids[:, :1].clamp(min=0) + torch.arange(self.topk)) % self.num_slots
        return hidden, torch.where(ids < 0, -1, spread), weights


ONE = Distinct(tokens=(3, 2), topk=2, slots_per_rank=2, hidden=40, dtype=torch.bfloat16)


def make_transport(group: EpGroup, one: Scenario, folder: str, deadline_s: float):
    """The maker itself, with facts of GPUs that are not here and memory that is no GPU's."""
    from moe_serve.dispatch.gpu import symmetric, transport
    from moe_serve.dispatch.gpu.facts import GpuFacts

    facts = [GpuFacts(host=1, capability=(9, 0), free_bytes=1 << 30)] * group.num_ranks
    request = one.request("cuda_ipc", deadline_s=deadline_s)
    with (
        mock.patch.object(symmetric, "CudaDriver", return_value=SharedFiles(folder, group.rank)),
        mock.patch.object(transport, "gather_facts", return_value=facts),
    ):
        return transport.make_gpu_slabs(group, request, "cuda_ipc")


def check_rounds(rank: int, transport, one: Scenario, device: str) -> None:
    assert transport.capabilities.bitwise
    assert "CUDA IPC" in transport.note
    for _ in range(3):  # both queues, and one of them again
        hidden, ids, weights = (part.to(device) for part in one.inputs(rank))
        transport.begin_step(hidden.shape[0])
        arrived = transport.dispatch(hidden, ids).wait()
        assert isinstance(arrived.rows, MaskedRows)
        counts = one.slot_counts().sum(0)[rank * one.slots_per_rank : (rank + 1) * one.slots_per_rank]
        assert torch.equal(arrived.rows.rows_per_slot.cpu(), counts)
        x = arrived.rows.x.cpu()
        filled = torch.cat([slab[:n] for slab, n in zip(x, counts.tolist(), strict=True)])
        assert torch.equal(filled, one.expected_rows(rank))
        slots = torch.arange(one.slots_per_rank) + rank * one.slots_per_rank
        out = one.expert_out(x.flatten(0, 1), slots[:, None].expand(x.shape[:2]).flatten()).view_as(x)
        combined = transport.combine(out.to(device), weights, arrived.handle).wait()
        assert torch.equal(combined.cpu(), one.expected_combined(rank))
        transport.end_step()
        transport.check_step()


def check_rows(rank: int, group: EpGroup, folder: str, cases: list[Scenario]) -> None:
    for number, one in enumerate(cases):
        transport = make_transport(group, one, f"{folder}/{number}", deadline_s=60)
        check_rounds(rank, transport, one, "cpu")
        gathered = transport.exchange_counts(torch.tensor([rank, 7])).wait()
        assert gathered.tolist() == [[other, 7] for other in range(group.num_ranks)]


def check_processes(device: str, *unused: object) -> None:
    cases = [ONE, replace(ONE, wire="fp8", gate="masked"), replace(ONE, tokens=(0, 3), dtype=torch.float32)]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(len(cases)):
            os.mkdir(f"{folder}/{number}")
        try:
            run_ranks(2, check_rows, folder, cases, timeout_s=120)
        finally:
            close_pools()


def test_two_processes_carry_rows_through_memory_that_they_map_from_each_other(interpreter: RunCheck) -> None:
    interpreter(check_processes)


def check_lost(rank: int, group: EpGroup, folder: str) -> str | None:
    one = Distinct(tokens=(2, 2), topk=1, slots_per_rank=1, hidden=32, dtype=torch.bfloat16)
    transport = make_transport(group, one, folder, deadline_s=0.0001)
    hidden, ids, weights = one.inputs(rank)

    def step() -> None:
        arrived = transport.dispatch(hidden, ids).wait()
        transport.combine(arrived.rows.x, weights, arrived.handle).wait()

    if rank == 1:
        time.sleep(0.5)  # as one that compiles longer: the first step is patient
        step()
        transport.end_step()
        return None  # and it never comes again
    step()
    transport.end_step()
    transport.check_step()
    step()
    transport.end_step()
    with pytest.raises(PeerError, match="rank 1 did not send its rows in round 1") as caught:  # of the other queue
        transport.check_step()
    assert (caught.value.rank, caught.value.step) == (1, 1)
    return "voided"


def check_processes_lost(device: str, *unused: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            assert run_ranks(2, check_lost, folder) == ["voided", None]
        finally:
            close_pools()


def test_the_first_step_is_patient_and_a_rank_that_never_comes_again_voids_the_step_and_is_named(
    interpreter: RunCheck,
) -> None:
    interpreter(check_processes_lost)


def on_gpu(rank: int, num_ranks: int, store: str) -> None:
    """One of several processes on GPU 0, with CUDA's own driver; handles travel over gloo."""
    import torch.distributed as dist

    from moe_serve.dispatch.make import make_all_to_all

    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    group = EpGroup(rank, num_ranks, torch.device("cuda", 0), dist.group.WORLD)
    torch.cuda.set_device(0)
    for one in (ONE, replace(ONE, hidden=7168, tokens=(64, 128), topk=8, slots_per_rank=16)):
        transport = make_all_to_all(group, one.request("cuda_ipc"))
        check_rounds(rank, transport, one, "cuda")
    dist.barrier()  # nobody leaves while a peer may still write into its region


@pytest.mark.gpu
def test_two_processes_on_one_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    code = f"from tests.dispatch.gpu.test_ipc import on_gpu; on_gpu({{}}, 2, {str(tmp_path / 'store')!r})"
    processes = [subprocess.Popen([sys.executable, "-c", code.format(rank)]) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
