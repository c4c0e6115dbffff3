"""The first hour on a GPU: one command looks at the machine, tests and measures everything, and writes one report.

    python -m benchmarks.gpu [--minutes 25] [--parts NAME ...] [--out gpu_report]

Parts run in the order of what is least certain, each in a process of its own with a limit of time; one that fails,
hangs or takes its GPU's context down ends alone. What a machine lacks leaves out a part, with the reason. The report
(report.md, report.json) is written anew after each part, so that a run that is cut off has one; with --minutes what is
left ends in time and says so, and --parts runs it later. torch, numpy and triton are enough for most parts; nothing
needs a network. Exit code 1 where a part failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LEAST_S = 15.0  # with less time left nothing is begun
END_S = 5.0  # between the request to end and the end
TAIL_LINES = 60


@dataclass(frozen=True)
class Part:
    """One process.

    command: arguments of Python; ROWS and TESTS stand for files that it writes: rows as JSON lines, or JUnit's XML
    limit_s: the longest that it may take
    needs:   facts without which it is left out, keys of `lacks` of benchmarks.gpu_environment
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    needs: tuple[str, ...] = ("cuda", "triton", "compiler")


@dataclass
class Outcome:
    """What came of a part.

    state: "passed", "failed", "out of time" (ended at its limit), "left out" (for a reason) or "not begun"
    rows:  as of gpu_timing.Row;  tests: counts by result, and the names of those that failed
    tail:  last lines of output of a part that did not pass
    """

    name: str
    state: str
    seconds: float = 0.0
    reason: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, Any] = field(default_factory=dict)
    tail: str = ""


def _measured(name: str, module: str, limit_s: float, *names: str) -> Part:
    return Part(name, ("-m", f"benchmarks.{module}", *names, "--rows", "ROWS"), limit_s)


def _tested(name: str, limit_s: float, *paths: str) -> Part:
    workers = min(len(os.sched_getaffinity(0)) // 2, 8)  # each compiles its kernels
    spread = ("-n", str(workers), "--dist", "load") if workers > 1 and find_spec("xdist") else ()
    command = ("-m", "pytest", "-q", "-m", "gpu", "--maxfail", "30", *spread, "--junitxml", "TESTS", *paths)
    return Part(name, command, limit_s, ("cuda", "triton", "compiler", "pytest", "hypothesis"))


def files_of_tests() -> list[str]:
    """Returns the test files that have tests for a GPU: others may need packages that its machine lacks.

    They mark tests, or have checks that the fixture on_device runs in the interpreter and on a GPU.
    """
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.gpu" in text or "on_device:" in text:
            found.append(str(path.relative_to(ROOT)))
    return found


def parts() -> tuple[Part, ...]:
    """Returns all parts, in their order."""
    files = files_of_tests()
    kernels = [path for path in files if path.startswith("tests/kernels/")]
    dispatch = [path for path in files if path.startswith("tests/dispatch/")]
    others = [path for path in files if path not in (*kernels, *dispatch)]
    sanitized = ("--tool", "memcheck", "--error-exitcode", "9", sys.executable)
    return (
        _measured("ceilings", "gpu_kernels", 90, "ceilings"),
        _tested("kernel tests", 360, *kernels),
        _measured("attention", "gpu_attention", 150),
        _measured("sampling", "gpu_model", 90, "sampling"),
        _measured("step", "gpu_model", 150, "step"),
        _measured("graphs", "gpu_model", 150, "graphs"),
        _measured("kernels", "gpu_kernels", 240),
        _tested("dispatch tests", 240, *dispatch),
        Part("cuda_ipc", ("-m", "benchmarks.gpu_ranks", "cuda_ipc", "--rows", "ROWS"), 120),
        Part("nvshmem", ("-m", "benchmarks.gpu_ranks", "nvshmem", "--rows", "ROWS"), 120,
             ("cuda", "triton", "compiler", "nvshmem", "gpus")),
        Part("nccl", ("-m", "benchmarks.gpu_ranks", "nccl", "--rows", "ROWS"), 120),
        Part("serving", ("-m", "benchmarks.gpu_serve", "--rows", "ROWS"), 180,
             ("cuda", "triton", "compiler", "serving")),
        _measured("speed", "gpu_model", 180, "speed"),
        _tested("other tests", 240, *others),
        Part("sanitizer",
             ("-c", "import os, sys; os.execvp('compute-sanitizer', ['compute-sanitizer', *sys.argv[1:]])", *sanitized,
              "-m", "pytest", "-q", "-m", "gpu", "-p", "no:xdist", "tests/dispatch/gpu/test_kernels.py"), 420,
             ("cuda", "triton", "compiler", "pytest", "hypothesis", "sanitizer")),
    )  # fmt: skip


def look(limit_s: float = 120.0) -> dict[str, Any]:
    """Returns the facts of the machine; where looking fails or hangs, what it said as a lack of everything."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_environment"], capture_output=True, text=True, timeout=limit_s,
            cwd=ROOT, check=False,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"lacks": {"cuda": f"looking at the machine did not end within {limit_s:.0f} s"}}
    except ValueError:
        return {"lacks": {"cuda": f"looking at the machine failed: {done.stderr.strip()[-2000:]}"}}
    return found


def run(chosen: Sequence[Part], facts: Mapping[str, Any], folder: Path, minutes: float) -> list[Outcome]:
    """Runs parts one after the other, and writes the report after each. folder: of the report"""
    folder.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []
    for part in chosen:
        left = ends_at - time.monotonic() - END_S
        missing = [facts["lacks"][need] for need in part.needs if need in facts["lacks"]]
        if missing:
            outcome = Outcome(part.name, "left out", reason=missing[0])
        elif left < LEAST_S:
            outcome = Outcome(part.name, "not begun", reason=f"{minutes:g} minutes are over; run it by --parts")
        else:
            print(f"{part.name} …", flush=True)
            outcome = run_part(part, min(part.limit_s, left))
        outcomes.append(outcome)
        print(f"{part.name}: {outcome.state} {f'({outcome.reason})' if outcome.reason else ''}", flush=True)
        write_report(folder, facts, outcomes)
    return outcomes


def run_part(part: Part, limit_s: float) -> Outcome:
    """Runs one part, and ends all its processes."""
    with tempfile.TemporaryDirectory() as scratch:
        files = {"ROWS": Path(scratch, "rows.jsonl"), "TESTS": Path(scratch, "tests.xml")}
        log = Path(scratch, "log")
        command = [sys.executable, *(str(files.get(word, word)) for word in part.command)]
        began = time.monotonic()
        with log.open("wb") as output:
            # A session of its own, so that its children can be ended with it.
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
                start_new_session=True, env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
                _signal(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            finally:
                _signal(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # one that waits in the driver may not even end so
                    process.wait(END_S)
        seconds = time.monotonic() - began
        rows, tests = _rows(files["ROWS"]), _tests(files["TESTS"])
        state, reason = "passed", ""
        if code is None:
            state, reason = "out of time", f"it did not end within {limit_s:.0f} s"
            if process.returncode is None:
                reason += ", and could not be killed"
        elif code:
            state = "failed"
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            if tests.get("failed"):
                reason = f"{tests['failed']} of {tests['total']} tests failed"
        text = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "" if state == "passed" else "\n".join(text[-TAIL_LINES:])
        return Outcome(part.name, state, seconds, reason, rows, tests, tail)


def write_report(folder: Path, facts: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Writes report.json and report.md."""
    record = {"format": "moe_serve.gpu_report", "facts": facts, "parts": [asdict(outcome) for outcome in outcomes]}
    (folder / "report.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(to_markdown(facts, outcomes), encoding="utf-8")


def to_markdown(facts: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Returns the report for people: the machine, the parts, their rows, and the last output of those that failed."""
    gpus = facts.get("gpus") or []
    packages = facts.get("packages") or {}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    lines = [
        f"# {len(gpus)} x {gpus[0]['name']}" if gpus else "# No GPU",
        "",
        f"Python {facts.get('python', '?')}, {versions or 'no packages known'}; "
        f"{facts.get('nvidia_smi') or 'no driver'}.",
        "",
        *(f"- {need} is not here: {_cell(why)}" for need, why in facts["lacks"].items()),
        "",
        "| part | | s | |",
        "| --- | --- | --- | --- |",
    ]
    for one in outcomes:
        tests = f"{one.tests['passed']} tests passed, {one.tests['skipped']} skipped" if one.tests else ""
        missed = [row["name"].strip() for row in one.rows if row["met"] is False]
        goals = f"goals not met: {', '.join(missed)}" if missed else ""
        words = "; ".join(word for word in (one.reason, tests, goals) if word)
        lines.append(f"| {one.name} | {one.state} | {one.seconds:.0f} | {_cell(words)} |")
    for one in outcomes:
        if one.rows:
            lines += ["", f"## {one.name}", "", "| | | | goal | met | of the sheet | of NCCL | |", "| --- " * 8 + "|"]
            lines += [_line(row) for row in one.rows]
    for one in outcomes:
        if one.tests.get("names"):
            lines += ["", f"## Tests of {one.name} that failed", "", *(f"- `{name}`" for name in one.tests["names"])]
        if one.tail:
            lines += ["", f"## Last output of {one.name}", "", "```", one.tail.replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    met = {True: "yes", False: "**no**", None: ""}[row["met"]]
    of_sheet = f"{row['of_sheet']:.0%}" if row["of_sheet"] is not None else ""
    of_nccl = f"{row['of_nccl']:.2f} x" if row["of_nccl"] is not None else ""
    cells = (row["name"], f"{row['value']:,.1f}", row["unit"], row["goal"], met, of_sheet, of_nccl, row["conditions"])
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows that a part has written, also where it was ended in the middle of one."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def _tests(path: Path) -> dict[str, Any]:
    """Returns counts by result, and the names of those that failed; {} where pytest wrote no file."""
    if not path.exists():
        return {}
    counts: dict[str, Any] = {"total": 0, "passed": 0, "failed": 0, "skipped": 0, "names": []}
    for case in ElementTree.parse(path).iter("testcase"):
        tags = {child.tag for child in case}
        result = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        counts["total"] += 1
        counts[result] += 1
        if result == "failed":
            counts["names"].append(f"{case.get('classname')}::{case.get('name')}")
    return counts


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def main() -> None:
    known = parts()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts together (default 25)")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder of the report")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help=f"of {', '.join(part.name for part in known)}")
    arguments = parser.parse_args()
    names = arguments.parts or [part.name for part in known]
    if unknown := set(names) - {part.name for part in known}:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; use {', '.join(part.name for part in known)}")
    facts = look()
    outcomes = run([part for part in known if part.name in names], facts, arguments.out, arguments.minutes)
    print(f"wrote {arguments.out / 'report.md'}")
    sys.exit(any(outcome.state in ("failed", "out of time") for outcome in outcomes))


if __name__ == "__main__":
    main()
