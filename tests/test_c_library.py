"""Small C helpers: which compiler builds them, when they are built again, and by whom."""

import importlib.util
import sys
import threading
from pathlib import Path

import pytest

from moe_serve.c_library import find_compiler, load_c_library

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


def write_sources(folder: Path, number: int) -> Path:
    """Writes a helper whose function `number` returns this number, from a .c file that it includes."""
    folder.mkdir(exist_ok=True)
    (folder / "part.c").write_text(f"long long number(void) {{ return {number}; }}\n")
    source = folder / "whole.c"
    source.write_text('#include "part.c"\n')
    return source


@needs_compiler
def test_a_helper_is_built_again_when_a_file_that_it_includes_has_changed(tmp_path):
    for number in (1, 2):
        source = write_sources(tmp_path / "sources", number)
        library, _ = load_c_library(source, {"number": 0}, folder=tmp_path / "built")
        assert library.number() == number


@needs_compiler
def test_of_several_that_need_a_helper_at_once_one_builds_it(tmp_path, monkeypatch):
    compiler = find_compiler()
    assert compiler is not None
    wrapper, log = tmp_path / "bin" / "cc", tmp_path / "builds"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho built >> {log}\nexec {" ".join(compiler)} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    source, numbers = write_sources(tmp_path / "sources", 5), []

    def load() -> None:
        numbers.append(load_c_library(source, {"number": 0}, folder=tmp_path / "built")[0].number())

    loaders = [threading.Thread(target=load) for _ in range(4)]
    for loader in loaders:
        loader.start()
    for loader in loaders:
        loader.join(timeout=60)
    assert numbers == [5] * 4
    assert log.read_text().split() == ["built"]


def test_without_a_compiler_on_the_path_the_package_ziglang_is_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for found, command in ((None, None), (object(), (sys.executable, "-m", "ziglang", "cc"))):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        assert find_compiler() == command
