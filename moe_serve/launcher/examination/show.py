"""Prints what an examination has found to stdout: the verdict, then tables for people; or JSON for programs."""

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from moe_serve.config import ServeConfig
from moe_serve.launcher.examination.configuration import Report, bytes_in_words, examine
from moe_serve.launcher.examination.pairs import Pair
from moe_serve.launcher.examination.ranks import Diagnosis

_FILE_WIDTH = 400  # a file has no width, and wrapped cells are hard to search
_MOST_PAIRS = 64  # rows; of more pairs, the slowest are shown


def print_check(config: ServeConfig) -> int:
    """Examines a configuration and prints the report; returns the exit code: 0, or 1 when it cannot run here."""
    report = examine(config)
    console = _console()
    for problem in report.problems:
        console.print(f"cannot run: {problem}", style="red", soft_wrap=True)
    if not report.problems:
        console.print("this configuration can run here", style="green")
    for title, rows in _check_tables(report):
        table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
    return 1 if report.problems else 0


def _check_tables(report: Report) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yields the title and the rows of each table."""
    yield "model", [(line.name, line.value, line.why) for line in report.model]
    if report.memory:
        rows = [(memory.name, bytes_in_words(memory.num_bytes), memory.why) for memory in report.memory]
        yield "memory of one rank", [*rows, ("together", bytes_in_words(report.memory_bytes), "")]
    yield "choices", [(line.name, line.value, line.why) for line in report.choices]
    yield "this machine", [(line.name, line.value, line.why) for line in report.machine]


def to_json(diagnosis: Diagnosis) -> str:
    """Returns the diagnosis as one JSON object: ok, findings, ranks, pairs."""
    data = {"ok": diagnosis.can_serve} | msgspec.to_builtins(diagnosis)
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode()


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Prints what is wrong and how to fix it, then tables of ranks and pairs."""
    console = _console()
    for finding in diagnosis.findings:
        style = "red" if finding.level == "problem" else "yellow"
        console.print(f"{finding.level}: {finding.text}", style=style, soft_wrap=True)
        console.print(f"    fix: {finding.fix}", soft_wrap=True)
    if diagnosis.can_serve:
        console.print("these ranks can serve together", style="green")
    for title, head, rows in _doctor_tables(diagnosis):
        console.print()
        console.print(title, style="italic")
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in head:
            table.add_column(name)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _doctor_tables(diagnosis: Diagnosis) -> Iterator[tuple[str, Sequence[str], list[Sequence[str]]]]:
    head = ("rank", "host", "interface", "device", "cores", "memory", "/dev/shm", "files", "memlock")
    rows: list[Sequence[str]] = [
        (
            str(each.rank),
            each.host,
            f"{each.interface} {each.address}",
            each.device,
            str(each.cores),
            bytes_in_words(each.memory_bytes),
            bytes_in_words(each.shm_bytes),
            str(each.files),
            "any" if each.memlock < 0 else bytes_in_words(each.memlock),
        )
        for each in diagnosis.ranks
    ]
    yield "ranks", head, rows
    first = diagnosis.ranks[0]
    versions = [*first.packages.items(), ("kernels", first.kernels)]
    yield "versions (rank 0)", ("package", "version"), [list(item) for item in versions]
    yield "environment (rank 0)", ("variable", "value"), [list(item) for item in first.environ.items()]
    if diagnosis.pairs:
        yield _pairs_title(diagnosis.pairs), ("from", "to", "latency", "bandwidth", "clock"), _pair_rows(diagnosis)


def _pairs_title(pairs: Sequence[Pair]) -> str:
    good = [pair for pair in pairs if not pair.error]
    if not good:
        return f"{len(pairs)} pairs"
    latency, speed = median(pair.latency_us for pair in good), median(pair.mbytes_per_s for pair in good)
    return f"{len(pairs)} pairs over TCP: median {latency:.0f} µs, {speed:.0f} MB/s"


def _pair_rows(diagnosis: Diagnosis) -> list[Sequence[str]]:
    slowest_first = sorted(diagnosis.pairs, key=lambda pair: (not pair.error, -pair.latency_us))
    return [
        (str(pair.source), str(pair.target), pair.error, "", "")
        if pair.error
        else (
            str(pair.source),
            str(pair.target),
            f"{pair.latency_us:.0f} µs",
            f"{pair.mbytes_per_s:.0f} MB/s",
            f"{pair.clock_s * 1e3:+.1f} ms",
        )
        for pair in slowest_first[:_MOST_PAIRS]
    ]


def _console() -> Console:
    # No markup and no emoji: paths, model names and messages may hold brackets and colons.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console
