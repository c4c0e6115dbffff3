"""Chooses the class of numerics in which a rank computes (docs/numerics.md), and says why."""

from dataclasses import dataclass

import torch

from moe_serve.c_library import processor_features
from moe_serve.config import ServeConfig
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu.library import AMX, CpuLibrary, find_cpu_library
from moe_serve.kernels.numerics import COMPILED, FAST, Numerics


@dataclass(frozen=True)
class NumericsChoice:
    """What computes on a rank.

    numerics: for the forward;  library: the compiled CPU kernels, None where torch or Triton computes
    kernels:  what computes, in words;  why: and why nothing else does
    """

    numerics: Numerics
    library: CpuLibrary | None
    kernels: str
    why: str

    @property
    def name(self) -> str:
        """The class as engine.numerics names it: batch_invariant or fast."""
        return "batch_invariant" if self.numerics.invariant else "fast"


def choose_numerics(config: ServeConfig, device: torch.device, dtype: torch.dtype) -> NumericsChoice:
    """Returns what computes on this device in this compute dtype. Builds the compiled kernels where they are chosen.

    Raises ConfigError for more than one thread per rank in batch_invariant where torch computes on CPU.
    """
    if device.type != "cpu":
        return NumericsChoice(_of_setting(config), None, "Triton", f"for {device.type}")
    library, why_not = _find_library(config, dtype)
    if library is not None:
        kernels = f"compiled for this CPU ({library.form})"
        why = f"float32 on a machine with a C compiler: {library.compiler}{_why_no_amx(config, library)}"
        return NumericsChoice(COMPILED, library, kernels, why)
    threads = config.parallel.threads_per_rank
    if config.engine.numerics == "batch_invariant" and threads not in (None, 1):
        raise ConfigError(
            f"parallel.threads_per_rank is {threads} but engine.numerics batch_invariant by plain torch holds for one "
            f"thread per rank only, and torch computes here: {why_not}; set parallel.threads_per_rank: 1 and use more "
            "ranks, or serve with the compiled CPU kernels"
        )
    return NumericsChoice(_of_setting(config), None, "plain torch", why_not)


def _find_library(config: ServeConfig, dtype: torch.dtype) -> tuple[CpuLibrary | None, str]:
    """Returns the compiled kernels, or None and the reason."""
    if config.engine.cpu_kernels == "torch":
        return None, "engine.cpu_kernels is torch"
    if dtype != torch.float32:
        return None, f"compute in {str(dtype).removeprefix('torch.')} is not for the compiled CPU kernels"
    library = find_cpu_library()
    if library is None:
        return None, "there are no compiled CPU kernels, see the log"
    library.use_amx(config.engine.cpu_kernels == "auto")
    return library, ""


def _why_no_amx(config: ServeConfig, library: CpuLibrary) -> str:
    """Returns why products with bfloat16 weights go without the AMX that the CPU has; "" where they do not."""
    if library.form == AMX or "amx_bf16" not in processor_features():
        return ""
    if config.engine.cpu_kernels == "no_amx":
        return "; without AMX: engine.cpu_kernels is no_amx"
    return f"; without AMX, which takes gcc 11 or clang 12 and Linux 5.16: {library.compiler} or this system is older"


def _of_setting(config: ServeConfig) -> Numerics:
    """Returns how torch and Triton cut reductions under this configuration."""
    if config.engine.numerics == "fast":
        return FAST
    return Numerics(row_tile=config.engine.row_tile)
