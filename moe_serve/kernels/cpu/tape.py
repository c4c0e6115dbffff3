"""Kernel calls that are recorded once and run many times, as one call into the library.

A call through ctypes and the tensors around it cost more than a small kernel. Operations are therefore recorded once,
on buffers of as many rows as a step may have; afterwards a step of any number of rows is a run of the tape. Arguments
are addresses of buffers that stay, and numbers; what changes from run to run is an `Input`, a place among the numbers
that a run is given. Buffers are shared by layers: what one layer calls "qkv" is read by no one when the next layer
writes its own.

A step may need Python in between, such as an exchange between ranks: `call_python` cuts the program there.
"""

import ctypes
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from moe_serve.kernels.cpu.library import CpuLibrary
from moe_serve.kernels.part_clock import OTHER, PartClock

MOST_ARGUMENTS = 12  # as in calls.c


@dataclass(frozen=True)
class Input:
    """An argument that changes from run to run: its place among the inputs."""

    place: int


class RowInputs(NamedTuple):
    """The arguments that change from step to step: numbers of rows, and addresses.

    ids, positions, slots: [num_rows] int64;  attend: AttendRows.address
    logit_rows: [num_logits] int64;  logits: [num_logits, vocab_size] float32
    sequences: SequenceStates.address
    """

    num_rows: int
    ids: int = 0
    positions: int = 0
    slots: int = 0
    attend: int = 0
    num_logits: int = 0
    logit_rows: int = 0
    logits: int = 0
    sequences: int = 0


ROWS, IDS, POSITIONS, SLOTS, ATTEND, NUM_LOGITS, LOGIT_ROWS, LOGITS, SEQUENCES = map(
    Input, range(len(RowInputs._fields))
)
_Inputs = ctypes.c_int64 * len(RowInputs._fields)


@dataclass(frozen=True)
class RecordedRun:
    """One step's run.

    num_chunks: of its MoE layers, as MoeLayer takes them
    overlap:    the rows are half of a step's, and the other half goes on wherever this one yields
    """

    rows: RowInputs
    num_chunks: int
    overlap: bool


Part = Callable[[RecordedRun], Iterable[None] | None]


class Tape:
    """The calls of a step of up to `capacity` rows, and the buffers that they read and write.

    ids, positions, slots: [capacity] int64, stand for the step's own tensors, whose addresses change from run to run
    """

    def __init__(self, library: CpuLibrary, capacity: int, clock: PartClock, device: torch.device | str = "cpu"):
        """clock: is told which part of the step runs

        device: of the buffers; meta counts them (`buffer_bytes`), and what is recorded on them cannot run
        """
        self.capacity = capacity
        self.part = OTHER  # of what is recorded next
        self.num_rows = ctypes.c_int64()  # of the step that runs
        self.ids, self.positions, self.slots = (torch.empty(capacity, dtype=torch.int64, device="meta") for _ in "123")
        self._inputs = {id(self.ids): IDS, id(self.positions): POSITIONS, id(self.slots): SLOTS}
        self._library = library
        self._clock = clock
        self._device = torch.device(device)
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._kept: list[object] = []  # whose addresses the programs hold
        self._programs = [Program(library, clock)]
        self._between: list[Part] = []  # after each program but the last

    def buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the buffer of a name, [capacity, *shape]; the same one for the same name and shape."""
        key = (name, *shape, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self.capacity, *shape, dtype=dtype, device=self._device)
        return self._buffers[key]

    @property
    def buffer_bytes(self) -> int:
        """The size of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def call(self, kernel: str, *arguments: Tensor | int | Input, keep: object = None) -> None:
        """Records a call. A tensor stands for its address, and lives as long as the tape, and so does `keep`."""
        self._kept += [keep, *(argument for argument in arguments if isinstance(argument, Tensor))]
        self._programs[-1].add(self.part, kernel, *map(self._word, arguments))

    def call_python(self, function: Part) -> None:
        """Records a call of Python at this point of every step; what it yields, a run yields."""
        self._between.append(function)
        self._programs.append(Program(self._library, self._clock))

    def run(self, step: RecordedRun) -> None:
        """Runs what was recorded. Kernels are left out where the step has no rows; Python takes part in any case."""
        for _ in self.run_in_turns(step):
            pass

    def run_in_turns(self, step: RecordedRun) -> Generator[None, None, None]:
        """The same, as far as the next yield of what Python calls."""
        num_rows, inputs = step.rows.num_rows, _Inputs(*step.rows)
        assert num_rows <= self.capacity, f"{num_rows} rows, recorded for {self.capacity}"
        self.num_rows.value = num_rows
        for program, then in zip_longest(self._programs, self._between):
            if num_rows:
                program.run(inputs)
            if then is not None:
                yield from then(step) or ()

    def _word(self, argument: Tensor | int | Input) -> int | Input:
        if not isinstance(argument, Tensor):
            return argument
        if (changing := self._inputs.get(id(argument))) is not None:
            return changing
        assert not argument.is_meta or self._device.type == "meta", "a tensor without memory"
        return argument.data_ptr()


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
