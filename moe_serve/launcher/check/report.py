"""What `moe-serve check` finds: facts with their reasons, sizes, and problems."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from moe_serve.errors import MoeServeError
from moe_serve.launcher.check.transport import TransportReport


@dataclass(frozen=True)
class Line:
    """One fact: its name, its value, and the reason or the setting behind it."""

    name: str
    value: str
    why: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs for something. why: how many of what"""

    name: str
    num_bytes: int
    why: str


@dataclass
class Report:
    """The findings about a configuration. problems: why it cannot run here; each says what to do."""

    model: list[Line] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    choices: list[Line] = field(default_factory=list)
    machine: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    transport: TransportReport | None = None  # known with the model

    @property
    def memory_bytes(self) -> int:
        """Bytes of one rank, all together."""
        return sum(memory.num_bytes for memory in self.memory)

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """Turns a MoeServeError into a problem of the report, which then goes on with its next part."""
        try:
            yield
        except MoeServeError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))


def count_in_words(number: int) -> str:
    """Returns a count with three digits and its unit: 6.01 M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def bytes_in_words(number: int) -> str:
    """Returns a size with its binary unit: 1.50 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"
