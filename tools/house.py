"""Measures the structure of moe_serve/: files, lines, who imports whom, and which files one request runs through.

    python -m tools.house               counts, from the source alone
    python -m tools.house --trace       also runs a streamed request, a live rebalance and a simulation
    python -m tools.house --names       names the files and folders behind each count

The counts read imports as text, also those inside functions. A trace notes every file of the package in which a
function is entered while the work lasts. Start-up does not count.
"""

import ast
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_serve"
CROWDED = 16  # files directly in a folder
SMALL = 120  # lines

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class House:
    """The package as it lies on disk.

    lines:     lines of each file, by its path below the package
    importers: the files that import each file. A folder's __init__.py only hands names on: it is left out on both sides
    """

    lines: dict[str, int]
    importers: dict[str, set[str]]

    def single_importers(self) -> dict[str, str]:
        """Returns the files whose only importer lies in the same folder, and that importer."""
        found = {}
        for name, users in self.importers.items():
            if len(users) == 1 and Path(user := next(iter(users))).parent == Path(name).parent:
                found[name] = user
        return found

    def mutual_folders(self) -> list[tuple[str, str]]:
        """Returns the pairs of folders that import each other."""
        arrows = {
            (str(Path(user).parent), str(Path(name).parent)) for name, users in self.importers.items() for user in users
        }
        return sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows)

    def crowded(self) -> dict[str, int]:
        """Returns the folders with more than 16 files, and how many they hold."""
        counts = Counter(str(Path(name).parent) for name in self.lines)
        return {folder: count for folder, count in counts.most_common() if count > CROWDED}


def read_house(package: Path = PACKAGE) -> House:
    """Reads the files of the package and their imports."""
    paths = sorted(package.rglob("*.py"))
    lines = {str(path.relative_to(package)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    modules = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): str(path.relative_to(package))
        for path in paths
        if path.name != "__init__.py"
    }
    importers: dict[str, set[str]] = {name: set() for name in modules.values()}
    for user in modules.values():
        for module in imported_modules(package / user):
            if module in modules and modules[module] != user:
                importers[modules[module]].add(user)
    return House(lines, importers)


def imported_modules(path: Path) -> set[str]:
    """Returns the dotted names that a file may import: `from a import b` gives both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def are_siblings(a: str, b: str) -> bool:
    """Whether neither of two folders contains the other."""
    return Path(a) not in Path(b).parents and Path(b) not in Path(a).parents


# ---- traces: which files run

# Python runs this file in every process of the traced system, since it lies on PYTHONPATH under this name.
SITE = """
import inspect, json, os, sys, threading, time
folder = os.environ["MOE_SERVE_TRACE_FOLDER"]
seen = set()

def watch(frame, event, arg):
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # bodies of modules and classes run at import
    if event == "call" and recording.is_set() and is_function:
        seen.add(frame.f_code.co_filename)

recording = threading.Event()

def follow():
    sys.setprofile(None)
    while True:
        time.sleep(0.02)
        if os.path.exists(os.path.join(folder, "recording")):
            recording.set()
        elif recording.is_set():
            recording.clear()
            write()

def write():
    path = os.path.join(folder, f"{os.getpid()}.json")
    with open(path + ".part", "w") as file:
        json.dump({"command": sys.argv, "files": sorted(seen)}, file)
    os.replace(path + ".part", path)
    seen.clear()

def start():
    threading.Thread(target=follow, daemon=True, name="trace").start()

os.register_at_fork(after_in_child=start)
start()
threading.setprofile(watch)
sys.setprofile(watch)
"""


@contextmanager
def traced() -> Iterator[tuple[Path, dict[str, str]]]:
    """Gives a folder and the environment in which processes trace while the file `recording` is in that folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE, encoding="utf-8")
        path = f"{folder / 'site'}{os.pathsep}{ROOT}"
        yield folder, {**os.environ, "PYTHONPATH": path, "MOE_SERVE_TRACE_FOLDER": name, "OMP_NUM_THREADS": "1"}


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Records what runs inside the `with`, in every process that is alive."""
    (folder / "recording").touch()
    time.sleep(0.2)
    try:
        yield
    finally:
        (folder / "recording").unlink()
        time.sleep(1.0)  # every process writes its files


def files_of(folder: Path) -> dict[int, set[str]]:
    """Returns the files of the package that each process ran, by process id."""
    found = {}
    for path in folder.glob("*.json"):
        names = json.loads(path.read_text(encoding="utf-8"))["files"]
        inside = {str(Path(name).relative_to(PACKAGE)) for name in names if Path(name).is_relative_to(PACKAGE)}
        if inside := {name for name in inside if not name.endswith("__init__.py")}:
            found[int(path.stem)] = inside
    return found


@contextmanager
def served(environment: dict[str, str], *options: str) -> Iterator[str]:
    """Starts `moe-serve serve` and gives its address once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moe_serve", "serve", "--port", str(port), *options]
    folder = environment["MOE_SERVE_TRACE_FOLDER"]  # where a server leaves its load trace
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, cwd=folder, stdout=null, stderr=null)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not is_ready(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"`{' '.join(command)}` did not become ready; run it to see why")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def stream(address: str, text: str, num_tokens: int) -> None:
    """Streams one answer to its end."""
    body = {"text": text, "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens}}
    call = urllib.request.Request(
        f"{address}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=120) as answer:
        answer.read()


def trace_request() -> tuple[set[str], dict[int, set[str]]]:
    """Returns the files of one streamed request of /generate: of all processes together, and of each."""
    with traced() as (folder, environment), served(environment) as address:
        stream(address, "def read(self, size=-1):", 8)  # warm: connections, caches
        with recording(folder):
            stream(address, "def write(self, data):", 8)
        processes = files_of(folder)
    return set().union(*processes.values()), processes


def trace_rebalance() -> set[str]:
    """Returns the files that ran until a server with `configs/demo-dynamic.yaml` had moved experts once."""
    config = str(ROOT / "configs" / "demo-dynamic.yaml")
    with traced() as (folder, environment), served(environment, "--config", config) as address:
        stream(address, "warm", 4)
        with recording(folder):
            deadline = time.monotonic() + 90
            while moves_of(address) == 0:
                if time.monotonic() > deadline:
                    raise SystemExit("no experts moved within 90 s: the machine is too busy for this trace")
                stream(address, "import os\n\ndef read(self, path):", 128)
        processes = files_of(folder)
    names = set().union(*processes.values())
    # Other folders carry the requests that make the load.
    rooms = ("eplb/", "ep/", "engine/balancing/", "engine/model/", "dispatch/")
    return {name for name in names if name.startswith(rooms)}


def moves_of(address: str) -> int:
    with urllib.request.urlopen(f"{address}/eplb/status", timeout=10) as answer:
        return len(json.load(answer)["moves"])


def trace_simulation() -> set[str]:
    """Returns the files of one `moe-serve simulate`."""
    with traced() as (folder, environment):
        (folder / "recording").touch()
        command = [sys.executable, "-c", f"import time; time.sleep(0.2)\n{SIMULATE}"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            time.sleep(0.1)
        return set().union(*files_of(folder).values())


SIMULATE = """
import atexit, sitecustomize, sys
atexit.register(sitecustomize.write)
sys.argv = ["moe-serve", "simulate", "--model", "DeepSeek-V3", "--hardware", "H800"]
from moe_serve.launcher.cli import main
main()
"""


# ---- report


@app.command()
def house(
    trace: Annotated[bool, typer.Option(help="also run a request, a rebalance and a simulation")] = False,
    names: Annotated[bool, typer.Option(help="name the files and folders behind each count")] = False,
) -> None:
    """Measure the structure of moe_serve/: files, lines, importers, and what one request runs through."""
    console = Console(width=160)
    found = read_house()
    single = found.single_importers()
    small = {name: user for name, user in single.items() if found.lines[name] <= SMALL}
    mutual = found.mutual_folders()
    siblings = [pair for pair in mutual if are_siblings(*pair)]
    sizes = found.lines.values()
    rows = [
        ("files / lines / median", f"{len(sizes)} / {sum(sizes):,} / {statistics.median(sizes):.0f}"),
        ("files with one importer, beside them / of these at most 120 lines", f"{len(single)} / {len(small)}"),
        ("pairs of folders that import each other / of these siblings", f"{len(mutual)} / {len(siblings)}"),
        ("folders with more than 16 files", f"{len(found.crowded())}"),
        ("README, lines", f"{len((ROOT / 'README.md').read_text(encoding='utf-8').splitlines())}"),
    ]
    lists: dict[str, list[str]] = {
        "one importer": [f"{name} ({found.lines[name]}, only {Path(user).name})" for name, user in single.items()],
        "folders that import each other": [f"{a} <-> {b}{' (siblings)' * are_siblings(a, b)}" for a, b in mutual],
        "crowded": [f"{folder} {count}" for folder, count in found.crowded().items()],
    }
    if trace:
        request, processes = trace_request()
        rebalance, simulation = trace_rebalance(), trace_simulation()
        each = ", ".join(str(len(files)) for files in processes.values())
        rows += [
            ("files that run for a streamed token (each process)", f"{len(request)} ({each})"),
            ("for a load record, until experts have moved", f"{len(rebalance)}"),
            ("for one simulate", f"{len(simulation)}"),
        ]
        lists |= {"request": sorted(request), "rebalance": sorted(rebalance), "simulate": sorted(simulation)}
    table = Table("measure", "now")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for title, entries in lists.items() if names else ():
        console.print(f"\n[bold]{title}[/bold]")
        for entry in entries:
            console.print(f"  {entry}", highlight=False)


if __name__ == "__main__":
    app()
