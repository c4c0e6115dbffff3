"""Every kernel compiles for the GPUs we name, without one, and stays within their registers and shared memory."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # what one program may have
MAX_REGISTERS = 255  # of a thread; the hardware's limit, at which values start to spill
MAX_STACK_BYTES = 16  # a few bytes of addressing; a spilled block is hundreds

ANY_GPU = ["packed_gemm_few_rows", "packed_gemm_some_rows", "packed_gemm_many_rows", "slab_gemm", "silu_mul",
           "weighted_sum", "topk_gate", "exact_split", "low_latency", "low_latency_top16"]  # fmt: skip
# sm_89 and later have e4m3.
WITH_E4M3 = [
    "quantize",
    "packed_gemm_fp8",
    "packed_gemm_fp8_by_channel",
    "slab_gemm_fp8",
    "silu_mul_quantize",
    "low_latency_fp8",
]
USES_MATRIX_UNITS = {"grouped_gemm_kernel"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed: nothing to compile"
    ),
]


def compiled(capability: int, launches: list[str]) -> list[dict[str, int | str]]:
    worker = [sys.executable, "-m", "tests.kernels.compile_worker", str(capability), *launches]
    done = subprocess.run(worker, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_spilling(capability: int) -> None:
    launches = ANY_GPU + (WITH_E4M3 if capability >= 90 else [])
    reports = compiled(capability, launches)
    assert {report["launch"] for report in reports} == set(launches)
    for report in reports:
        assert report["registers"] <= MAX_REGISTERS, report
        assert report["stack_bytes"] <= MAX_STACK_BYTES, report
        assert report["shared_bytes"] <= SHARED_BYTES[capability], report
        assert (report["matrix_instructions"] > 0) == (report["kernel"] in USES_MATRIX_UNITS), report
        # Rows are moved 16 bytes at a time; narrower access would halve the bandwidth of what is bound by it.
        if report["kernel"] in (
            "dispatch_send_kernel",
            "combine_send_kernel",
            "dispatch_receive_kernel",
        ):
            assert min(report["wide_loads"], report["wide_stores"]) > 0, report


@pytest.mark.skipif(importlib.util.find_spec("nvidia.nvshmem") is None if importlib.util.find_spec("nvidia") else True,
                    reason="nvidia-nvshmem is not installed: its device library is needed")  # fmt: skip
@pytest.mark.parametrize("capability", [90, 100])
def test_low_latency_kernels_link_with_nvshmem(capability: int) -> None:
    kernels = {report["kernel"] for report in compiled(capability, ["low_latency_nvshmem"])}
    assert kernels == {"dispatch_send_kernel", "dispatch_receive_kernel", "combine_send_kernel", "finish_kernel",
                       "combine_receive_kernel"}  # fmt: skip
