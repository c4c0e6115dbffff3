"""Runs SPIN over a model, with the constants that the model shares with the code."""

import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

MODELS = Path(__file__).parent
needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None,
    reason="SPIN checks the models of protocols: apt-get install --no-install-recommends spin gcc",
)


@dataclass(frozen=True)
class Search:
    """What SPIN has found.

    error: its first line about one, "" = none;  states: different ones that it has seen
    cpu_s: of SPIN, the compiler and the search
    """

    error: str
    states: int
    cpu_s: float


def search(
    model: str, folder: Path, defined: Mapping[str, object], optimised: str = "-O1", may_stand: bool = False
) -> Search:
    """Looks at all states of a model, up to the first error.

    optimised: -O0 for a short search, since C takes longer;  may_stand: it is no error that nothing can go on
    """
    lines = [f"#define {name} {value}" for name, value in defined.items()]
    text = (MODELS / model).read_text(encoding="utf-8")
    (folder / model).write_text("\n".join([*lines, text]), encoding="utf-8")
    said, began = "", _cpu_s_of_children()
    for command in (
        ["spin", "-a", model],
        ["gcc", "-w", optimised, "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=4096", "-DMEMLIM=2000", "-o", "pan", "pan.c"],
        ["./pan", "-m1000000", "-w22", *(["-E"] if may_stand else [])],
    ):
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        said = done.stdout
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert "Search not completed" not in said or "errors: 0" not in said, said
    error = re.search(r"^pan:\d+: (.*)", said, re.MULTILINE)
    states = re.search(r"(\d+) states, stored", said)
    assert states is not None, said
    return Search(error[1] if error else "", int(states[1]), _cpu_s_of_children() - began)


def _cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
