"""Facts about a machine with a GPU, as one JSON object: what is there, and what each part of benchmarks.gpu would lack.

python -m benchmarks.gpu_environment
"""

import importlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from typing import Any

PACKAGES = (
    "torch", "triton", "numpy", "pytest", "hypothesis", "nvshmem4py-cu13", "nvidia-nvshmem-cu13", "nvidia-nccl-cu13",
    "pydantic", "pyzmq", "msgspec", "tokenizers", "safetensors", "fastapi",
)  # fmt: skip
SERVING = ("moe_serve.launcher.llm", "moe_serve.engine.build", "moe_serve.server.app")
QUERIED = "driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,mig.mode.current"


def facts() -> dict[str, Any]:
    """Returns the facts. lacks: need of a part -> why it is not met"""
    lacks: dict[str, str] = {}
    gpus: list[dict[str, Any]] = []
    try:
        import torch

        gpus = _gpus(torch)
        if not gpus:
            lacks["cuda"] = _no_gpu(torch)
    except ImportError as error:
        lacks["cuda"] = f"torch cannot be imported: {error}"
    for need, look in _LOOKS.items():
        if (why := look()) is not None:
            lacks[need] = why
    if "cuda" not in lacks and (why := _nvshmem_lacks()) is not None:
        lacks["nvshmem"] = why
    if len(gpus) < 2:
        lacks["gpus"] = f"{len(gpus)} of at least two GPUs"
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": gpus,
        "nvidia_smi": _output("nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader"),
        "links": _output("nvidia-smi", "topo", "-m"),
        "shared_memory_gb": round(shutil.disk_usage("/dev/shm").free / 1e9, 1),
        "lacks": lacks,
    }


def _gpus(torch: Any) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": one.name,
                "capability": f"sm_{one.major}{one.minor}",
                "memory_gb": round(one.total_memory / 1e9, 1),
                "multiprocessors": one.multi_processor_count,
            }
        )
    return found


def _no_gpu(torch: Any) -> str:
    if torch.version.cuda is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    return f"no CUDA device: torch {torch.__version__} for CUDA {torch.version.cuda} finds none"


def _nvshmem_lacks() -> str | None:
    import torch

    from moe_serve.dispatch.gpu.facts import NVSHMEM_LACKS, nvshmem_lacks

    return NVSHMEM_LACKS[nvshmem_lacks(torch.cuda.get_device_capability(0))] or None


def _imports(module: str, what: str) -> str | None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{what}: {error}"
    return None


def _serving_lacks() -> str | None:
    for module in SERVING:
        if (why := _imports(module, "a server cannot be started")) is not None:
            return why
    return None


def _compiler_lacks() -> str | None:
    names = [os.environ.get("CC", ""), "gcc", "clang", "cc"]
    found = next((name for name in names if name and shutil.which(name)), None)
    return None if found else "Triton builds its launchers with a C compiler; none of $CC, gcc, clang, cc is here"


def _sanitizer_lacks() -> str | None:
    return None if shutil.which("compute-sanitizer") else "compute-sanitizer, of the CUDA toolkit, is not in $PATH"


_LOOKS: dict[str, Callable[[], str | None]] = {
    "triton": lambda: _imports("triton", "triton cannot be imported"),
    "compiler": _compiler_lacks,
    "pytest": lambda: _imports("pytest", "tests are not run; put pytest and hypothesis into a folder of $PYTHONPATH"),
    "hypothesis": lambda: _imports("hypothesis", "tests are not run"),
    "serving": _serving_lacks,
    "sanitizer": _sanitizer_lacks,
}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    print(json.dumps(facts(), indent=1))
