"""The display of a start goes on where its lines cannot be written."""

import io
import json
import os
import re
import threading

import pytest

from moe_serve.launcher.display import StartDisplay
from moe_serve.log import LastingLog


class FullDisk(io.StringIO):
    """A file that fails while the disk is full."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def show(display: StartDisplay) -> None:
    """All that the threads and the launcher print."""
    display.phase(0, "loading weights", 0.5)
    display.line("rank 1", "a line of a rank")
    display.note("the rank 1 was killed", style="red")


@pytest.mark.parametrize("reason", ["full disk", "reader gone"])
def test_a_launcher_whose_lines_cannot_be_written_goes_on(monkeypatch, reason):
    if reason == "full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    with open(descriptor, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with StartDisplay(2) as display:
            show(display)
            show(display)  # the reader of a pipe is missed by the second write at the latest
        stderr.flush()  # as Python does at its end, where a failure changes the exit code
        assert os.readlink(f"/proc/self/fd/{stderr.fileno()}") == os.devnull


def test_a_launcher_whose_lines_nobody_reads_goes_on(monkeypatch):
    monkeypatch.setattr("moe_serve.log._PATIENCE_S", 0.05)
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as taken, open(writer, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        display = StartDisplay(2)
        printing = threading.Thread(target=lambda: [display.line("rank 0", "é" * 5000) for _ in range(20)], daemon=True)
        printing.start()
        printing.join(20)
        goes_on = not printing.is_alive()
        lines = taken.read(1 << 17).decode(errors="replace").splitlines()
        display.note("somebody reads again")
        lines += taken.read(1 << 17).decode().splitlines()
        assert goes_on
    assert re.fullmatch(r"\d+ lines before this one could not be written \(nobody read them\)", lines[-2])
    assert lines[-1] == "somebody reads again"
    assert 0 < len(lines) < 20


def test_a_log_says_how_many_lines_were_lost_once_there_is_room_again(monkeypatch):
    disk = FullDisk()
    monkeypatch.setattr("sys.stderr", disk)
    display = StartDisplay(2)
    show(display)
    disk.is_full = False
    display.note("the disk has room again")
    expected = "3 lines before this one could not be written (No space left on device)\nthe disk has room again\n"
    assert disk.getvalue() == expected


def test_every_line_is_an_object_where_the_log_is_json(monkeypatch):
    stderr = FullDisk()
    stderr.is_full = False
    monkeypatch.setattr("sys.stderr", stderr)
    own = '{"time": 1.5, "level": "info", "process": "rank 0", "message": "own"}'
    with StartDisplay(2, form="json") as display:
        display.heading("moe-serve; settings:\n  server.port: 1", style="dim")
        display.line("rank 0", own)
        display.line("rank 1", "a library's [own] line")
        display.phase(0, "loading weights", 0.5)
        stderr.is_full = True
        display.note("lost")
        stderr.is_full = False
        display.note("rank 1 was killed", style="red")
    lines = [json.loads(line) for line in stderr.getvalue().splitlines()]
    assert lines[1] == json.loads(own)
    assert [(line["process"], line["level"]) for line in lines] == [
        ("launcher", "info"), ("rank 0", "info"), ("rank 1", "info"), ("launcher", "info"), ("launcher", "warning"),
        ("launcher", "error"),
    ]  # fmt: skip
    assert lines[2]["message"] == "a library's [own] line"
    assert lines[4]["message"].startswith("1 line before this one could not be written")


def test_a_log_is_a_terminal_where_the_stream_below_is():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert LastingLog(Terminal()).isatty()
    assert not LastingLog(io.StringIO()).isatty()
