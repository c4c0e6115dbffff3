"""Which loops of a built C library move vectors to the stack and back: sums that have not found a register."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

_FUNCTION, _INSTRUCTION = re.compile(r"^[0-9a-f]+ <([^>]+)>:"), re.compile(r"^\s+([0-9a-f]+):\s+(.*)")
_JUMP, _SPILL = re.compile(r"^j\w+\s+([0-9a-f]+)"), re.compile(r"%[xyz]mm\d+,-?(0x)?[0-9a-f]*\(%r[sb]p")


def spilling_loops(library: Path) -> dict[str, int]:
    """Returns functions with an innermost loop of multiply-adds that stores vectors on the stack, and how many.

    Skips the test where there is no objdump.
    """
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump (Debian: binutils)")
    command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    found: dict[str, int] = {}
    function, code = "", list[tuple[int, str]]()
    for line in [*subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines(), "0 <>:"]:
        if begins := _FUNCTION.match(line):
            spills = max((_spills(loop) for loop in _innermost_loops(code)), default=0)
            if spills:
                found[function] = max(found.get(function, 0), spills)
            function, code = begins[1].partition(".")[0], []
        elif instruction := _INSTRUCTION.match(line):
            code.append((int(instruction[1], 16), instruction[2]))
    return found


def _spills(loop: list[str]) -> int:
    adds = any("fmadd" in line and "ps" in line for line in loop)
    return sum(bool(_SPILL.search(line)) for line in loop) if adds else 0


def _innermost_loops(code: list[tuple[int, str]]) -> list[list[str]]:
    place = {address: i for i, (address, _) in enumerate(code)}
    jumps = [(place.get(int(jump[1], 16), i + 1), i) for i, (_, line) in enumerate(code) if (jump := _JUMP.match(line))]
    loops = [(start, end) for start, end in jumps if start <= end]
    innermost = [loop for loop in loops if not any(o != loop and loop[0] <= o[0] and o[1] <= loop[1] for o in loops)]
    return [[line for _, line in code[start : end + 1]] for start, end in innermost]
