"""A list of kernel calls that is written once and run many times, as one call into the library.

A call through ctypes and the tensors around it cost more than a small kernel. Arguments are addresses of buffers that
stay, and numbers; what changes from run to run is an `Input`, a place among the numbers that a run is given.
"""

import ctypes
from dataclasses import dataclass

from moe_serve.kernels.cpu.library import CpuLibrary
from moe_serve.kernels.part_clock import PartClock

MOST_ARGUMENTS = 12  # as in calls.c


@dataclass(frozen=True)
class Input:
    """An argument that changes from run to run: its place among the inputs."""

    place: int


class Program:
    """Kernel calls in order. Buffers whose addresses it holds must live as long as it is run."""

    def __init__(self, library: CpuLibrary, clock: PartClock):
        self._call = library.call
        self._clock = clock
        self._names: list[str] = []
        self._words: list[int] = []
        self._block: ctypes.Array[ctypes.c_int64] | None = None  # the words, for the library

    def add(self, part: int, kernel: str, *arguments: int | Input) -> None:
        """Adds a call of a function of the library. Its arguments are int64, and its result is below 0 on failure.

        part: of the step, of part_clock.PARTS
        """
        assert len(arguments) <= MOST_ARGUMENTS, f"{kernel} takes {len(arguments)} arguments"
        address = ctypes.cast(getattr(self._call, kernel), ctypes.c_void_p).value
        assert address is not None
        changing, words = 0, [0] * MOST_ARGUMENTS
        for index, argument in enumerate(arguments):
            if isinstance(argument, Input):
                changing |= 1 << index
                words[index] = argument.place
            else:
                words[index] = argument
        self._names.append(kernel)
        self._words += [address, changing, part, *words]
        self._block = None

    def run(self, inputs: "ctypes.Array[ctypes.c_int64]") -> None:
        """Makes the calls. inputs: a number for each place. Raises RuntimeError naming the kernel that failed."""
        if self._block is None:
            self._block = (ctypes.c_int64 * len(self._words))(*self._words)
        num_calls = len(self._names)
        inputs_at = ctypes.addressof(inputs)
        num_made = self._call.run_calls(ctypes.addressof(self._block), num_calls, inputs_at, self._clock.address)
        if num_made < num_calls:
            raise RuntimeError(f"call {num_made} of {num_calls} failed: {self._names[num_made]}")
