"""A list of kernel calls that is written once and run many times, as one call into the library.

A call through ctypes and the tensors around it cost more than a small kernel. Arguments are addresses of buffers that
stay, and numbers; what changes from run to run is an `Input`, filled in before the run.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.kernels.cpu.library import CpuLibrary

WORDS = 13  # of a call: its kernel and 12 arguments, as in calls.c


@dataclass(frozen=True)
class Input:
    """An argument that changes from run to run."""

    name: str


class Program:
    """Kernel calls in order. Buffers whose addresses it holds must live as long as it is run."""

    def __init__(self, library: CpuLibrary):
        self._call = library.call
        self._names: list[str] = []
        self._words: list[int] = []
        self._uses: dict[Input, list[int]] = {}
        self._ready: NDArray[np.int64] | None = None
        self._filled: dict[Input, int] = {}

    def add(self, kernel: str, *arguments: int | Input) -> None:
        """Adds a call of a function of the library. Its arguments are int64, and its result is below 0 on failure."""
        assert self._ready is None, "a program that has run does not grow"
        assert len(arguments) < WORDS, f"{kernel} takes {len(arguments)} arguments"
        self._names.append(kernel)
        address = ctypes.cast(getattr(self._call, kernel), ctypes.c_void_p).value
        assert address is not None
        self._words.append(address)
        for argument in arguments:
            if isinstance(argument, Input):
                self._uses.setdefault(argument, []).append(len(self._words))
            self._words.append(0 if isinstance(argument, Input) else argument)
        self._words += [0] * (WORDS - 1 - len(arguments))

    def run(self, inputs: Mapping[Input, int]) -> None:
        """Makes the calls. inputs: a value for each Input that was added; more may be there

        Raises RuntimeError naming the kernel that failed.
        """
        if self._ready is None:
            self._ready = np.array(self._words, dtype=np.int64)
            self._places = {name: np.array(places) for name, places in self._uses.items()}
        for name, places in self._places.items():
            value = inputs[name]
            if self._filled.get(name) != value:
                self._ready[places] = value
                self._filled[name] = value
        num_made = self._call.run_calls(self._ready.ctypes.data, len(self._names))
        if num_made < len(self._names):
            raise RuntimeError(f"call {num_made} of {len(self._names)} failed: {self._names[num_made]}")
