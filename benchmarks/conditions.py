"""What every benchmark prints beside its numbers, and how it keeps them: a table for people and JSON for machines."""

import argparse
import json
import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moe_serve.c_library import INSTRUCTION_SETS, ISA, instruction_set, processor_flags
from moe_serve.errors import ConfigError

RESULTS = Path(__file__).parent / "results"


def add_isa(parser: argparse.ArgumentParser) -> None:
    """Adds --isa: what C code of this process and its children is built for, so that one machine shows several."""
    names = "|".join(INSTRUCTION_SETS)
    parser.add_argument("--isa", type=_use_isa, metavar=names, help="of C code; default: all that the processor has")


def _use_isa(name: str) -> str:
    os.environ[ISA] = name
    try:
        processor_flags()
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def conditions(*packages: str) -> dict[str, Any]:
    """Returns the machine, its load and the versions that a number was measured with."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    versions = {}
    for name in ("torch", "numpy", *packages):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "isa": instruction_set(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "versions": versions,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows of equal keys as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def save(
    name: str,
    title: str,
    rows: list[dict[str, Any]],
    facts: dict[str, Any],
    notes: str = "",
    per_cpu: bool = False,
    folder: Path = RESULTS,
) -> str:
    """Writes NAME.md and NAME.json into the folder, and returns the text of the former.

    per_cpu: the name ends with that of the CPU, so that tables of other machines stay beside it
    With --isa every name ends with that.
    """
    folder.mkdir(exist_ok=True)
    name = saved_as(name, facts, per_cpu)
    versions = ", ".join(f"{key} {value}" for key, value in facts["versions"].items())
    where = (
        f"{facts['date']} UTC, {facts['cores']} cores of {facts['cpu']} ({facts['isa']}), load average "
        f"{facts['load_average'][0]} at the start, Python {facts['python']}, {versions}."
    )
    text = f"# {title}\n\n{where}\n\n{table(rows)}\n" + (f"\n{notes.strip()}\n" if notes else "")
    (folder / f"{name}.md").write_text(text)
    record = {"title": title, "conditions": facts, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return text


def saved_as(name: str, facts: dict[str, Any], per_cpu: bool) -> str:
    """Returns the name under which `save` keeps a table."""
    if per_cpu:
        name += "_" + re.sub(r"[^a-z0-9.]+", "_", facts["cpu"].replace("(R)", "").lower()).strip("_")
    return f"{name}_{facts['isa']}" if ISA in os.environ else name


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
