"""Compiles the kernels of a launch for a GPU that is not present, and reports the resources they would use.

The real wrapper runs with tensors of device "meta"; where it would start a kernel, the kernel is compiled for the
target instead: the same tile, specialisation and options as in production. One process per target, because Triton
has one active target.

    python -m tests.kernels.compile_worker 90 packed_gemm_many_rows ...     -> JSON lines {launch, kernel, figures}

--ptx FOLDER: writes each kernel's text there, as KERNEL.ptx
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from tests.kernels import launches

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class AbsentGpu(DriverBase):
    """The part of a driver that compiling needs."""

    def __init__(self, capability: int):
        self._capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_active_torch_device(self) -> Any:
        raise RuntimeError("there is no GPU here")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("there is no GPU here")


def figures(kernel: Any) -> dict[str, int]:
    """Returns registers of a thread, its stack bytes (spilled values lie there), shared memory, wide accesses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        )
    # Linked device libraries bring functions of their own; the kernel is the one that was asked for.
    line = usage.stdout.partition(f"Function {kernel.metadata.name}:")[2]
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", line.partition("Function ")[0]))
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(found["REG"]),
        "stack_bytes": int(found["STACK"]) + int(found.get("LOCAL", 0)),
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "wide_loads": len(
            re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg\S*|cp\.async\.bulk\.tensor", ptx)
        ),
        "wide_stores": len(re.findall(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64", ptx)),
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", ptx)),
    }


def main() -> None:
    capability, *names = sys.argv[1:]
    folder = None
    if names[0] == "--ptx":
        _, folder, *names = names
    triton.runtime.driver.set_active(AbsentGpu(int(capability)))
    # torch defines its NVSHMEM bindings only where it finds a GPU; compiling needs none.
    torch.utils._triton.has_triton = lambda: True
    start_kernel = JITFunction.run
    compiled: list[Any] = []

    def compile_only(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        kwargs["warmup"] = True
        triton.knobs.runtime.jit_post_compile_hook = (
            None  # torch's hook loads NVSHMEM's state into the module: needs a GPU
        )
        compiled.append(start_kernel(self, *args, **kwargs))

    JITFunction.run = compile_only
    for name in names:
        compiled.clear()
        began = time.process_time()
        getattr(launches, name)(int(capability))
        for kernel in compiled:
            report = {"launch": name, "kernel": kernel.metadata.name, "cpu_s": round(time.process_time() - began, 1)}
            print(json.dumps({**report, **figures(kernel)}), flush=True)
            if folder is not None:
                Path(folder, f"{kernel.metadata.name}.ptx").write_text(kernel.asm["ptx"], encoding="ascii")


if __name__ == "__main__":
    main()
