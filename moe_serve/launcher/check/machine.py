"""The part of `moe-serve check` on this machine: cores, memory, GPUs, libraries, ports."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from moe_serve.config import ServeConfig
from moe_serve.errors import LaunchError, PortError
from moe_serve.launcher.check.report import Line, Report, bytes_in_words
from moe_serve.server.edge.ports import open_port


def describe_machine(report: Report, config: ServeConfig, device: str) -> None:
    """Adds what this machine has, and what it lacks for the configuration. Expects the memory of a rank in the report.

    device: "cpu" or "cuda"
    """
    num_ranks = config.parallel.num_ranks
    cores = len(os.sched_getaffinity(0))
    available = _available_bytes()
    report.machine.append(Line("CPU", f"{cores} cores, {bytes_in_words(available)} available"))
    if device == "cpu" and report.memory_bytes * num_ranks > available:
        report.problems.append(
            f"{num_ranks} ranks need {bytes_in_words(report.memory_bytes * num_ranks)} together but "
            f"{bytes_in_words(available)} of memory are available here; lower cache.memory_gib, or use fewer ranks or "
            "more machines"
        )
    if device == "cpu" and num_ranks > cores:
        report.machine.append(Line("", f"{num_ranks} ranks on {cores} cores", "they will wait for each other"))
    _describe_gpus(report, config, device)
    _describe_libraries(report, device)
    server = config.server
    _describe_port(report, "HTTP", server.host, server.port, "server.port")
    _describe_port(report, "ranks", server.worker_host, server.worker_port, "server.worker_port")


def _available_bytes() -> int:
    """Returns the bytes of memory that processes can still take on this machine."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _describe_gpus(report: Report, config: ServeConfig, device: str) -> None:
    if not torch.cuda.is_available():
        report.machine.append(Line("GPU", "none", f"torch {torch.__version__} sees no CUDA device"))
        if device == "cuda":
            report.problems.append(
                "parallel.device is cuda but torch sees no GPU here; set parallel.device: cpu, or run check where "
                "one is"
            )
        return
    num_gpus = torch.cuda.device_count()
    size = torch.cuda.get_device_properties(0).total_memory
    report.machine.append(Line("GPU", f"{num_gpus} x {torch.cuda.get_device_name(0)}", bytes_in_words(size)))
    if device != "cuda":
        return
    if report.memory_bytes > size:
        report.problems.append(
            f"a rank needs {bytes_in_words(report.memory_bytes)} but a GPU here has {bytes_in_words(size)}; lower "
            "cache.memory_gib or engine.max_batch_tokens, or spread the experts over more ranks"
        )
    if config.parallel.num_ranks > num_gpus:
        report.machine.append(
            Line("", f"{config.parallel.num_ranks} ranks", "more than the GPUs here: start them on several machines")
        )


def _describe_libraries(report: Report, device: str) -> None:
    for module, purpose, needed in (
        ("triton", "GPU kernels: pip install 'moe-serve[gpu]'", device == "cuda"),
        ("mpi4py", "mpirun: pip install 'moe-serve[mpi]'", False),
        ("nvshmem", "low latency between GPUs: pip install nvshmem4py-cu13", False),
    ):
        found = find_spec(module) is not None
        report.machine.append(Line(module, "installed" if found else "not installed", "" if found else purpose))
        if needed and not found:
            report.problems.append(f"{module} is not installed; {purpose}")
    # The wheel installs mpirun next to this Python, which need not be on the path.
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    report.machine.append(Line("mpirun", mpirun or "not found", "only for a start by MPI"))


def _describe_port(report: Report, purpose: str, host: str, port: int, setting: str) -> None:
    name, address = f"port for {purpose}", f"{host}:{port}"
    try:
        open_port(host, port, which=setting).close()
    except PortError as error:
        report.machine.append(Line(name, address, "cannot be opened here"))
        report.problems.append(str(error))
    except LaunchError:
        report.machine.append(Line(name, address, "cannot be opened here"))
        report.machine.append(Line("", "", f"{host} belongs to another machine: the front end must run there"))
    else:
        report.machine.append(Line(name, address, "free" if port else "any free one"))
