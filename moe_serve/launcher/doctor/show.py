"""Prints a diagnosis: tables for people, JSON for programs."""

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from moe_serve.launcher.check.report import bytes_in_words
from moe_serve.launcher.doctor.pairs import Pair
from moe_serve.launcher.doctor.run import Diagnosis

_FILE_WIDTH = 400  # a file has no width, and wrapped cells are hard to search
_MOST_PAIRS = 64  # rows; of more pairs, the slowest are shown


def to_json(diagnosis: Diagnosis) -> str:
    """Returns the diagnosis as one JSON object: ok, findings, ranks, pairs."""
    data = {"ok": diagnosis.can_serve} | msgspec.to_builtins(diagnosis)
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode()


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Prints what is wrong and how to fix it, then tables of ranks and pairs."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    for finding in diagnosis.findings:
        style = "red" if finding.level == "problem" else "yellow"
        console.print(f"{finding.level}: {finding.text}", style=style, soft_wrap=True)
        console.print(f"    fix: {finding.fix}", soft_wrap=True)
    if diagnosis.can_serve:
        console.print("these ranks can serve together", style="green")
    for title, head, rows in _tables(diagnosis):
        console.print()
        console.print(title, style="italic")
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in head:
            table.add_column(name)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _tables(diagnosis: Diagnosis) -> Iterator[tuple[str, Sequence[str], list[Sequence[str]]]]:
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
