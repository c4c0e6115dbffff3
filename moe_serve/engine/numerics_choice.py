"""Chooses the class of numerics in which a rank computes (docs/numerics.md), and says why."""

from dataclasses import dataclass

import torch

from moe_serve.config import ServeConfig
from moe_serve.errors import ConfigError
from moe_serve.kernels.cpu.library import CpuLibrary, find_cpu_library
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
        return NumericsChoice(COMPILED, library, kernels, f"float32 on a machine with a C compiler: {library.compiler}")
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
    return library, "" if library is not None else "there are no compiled CPU kernels, see the log"


def _of_setting(config: ServeConfig) -> Numerics:
    """Returns how torch and Triton cut reductions under this configuration."""
    if config.engine.numerics == "fast":
        return FAST
    return Numerics(row_tile=config.engine.row_tile)
