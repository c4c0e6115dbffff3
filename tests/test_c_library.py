"""Small C helpers: which compiler builds them, when they are built again, and by whom."""

import importlib.util
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moe_serve import c_library
from moe_serve.c_library import find_compiler, load_c_library, processor_flags
from moe_serve.errors import ConfigError
from moe_serve.process_facts import has_ended

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
def test_a_helper_is_built_again_when_a_header_of_another_folder_has_changed(tmp_path):
    source, header = tmp_path / "sources" / "whole.c", tmp_path / "others" / "number.h"
    for path, text in (
        (source, '#include "../others/number.h"\nlong long number(void) { return NUMBER; }\n'),
        (header, ""),
    ):
        path.parent.mkdir()
        path.write_text(text)
    for number in (1, 2):
        header.write_text(f"#define NUMBER {number}\n")
        assert load_c_library(source, {"number": 0}, folder=tmp_path / "built")[0].number() == number


def test_a_compiler_that_takes_too_long_leaves_no_process(tmp_path, monkeypatch):
    wrapper, child = tmp_path / "bin" / "cc", tmp_path / "child"
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\nsleep 100 &\necho $! > {child}\nwait\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    monkeypatch.setattr(c_library, "_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError, match=r"0\.5 seconds"):
        load_c_library(write_sources(tmp_path / "sources", 1), {"number": 0}, folder=tmp_path / "built")
    orphan, deadline = int(child.read_text()), time.monotonic() + 30
    while not has_ended(orphan) and time.monotonic() < deadline:  # its signal is sent; that it has died takes a moment
        time.sleep(0.01)
    assert has_ended(orphan)


@pytest.mark.parametrize(
    ("script", "said"),
    [("echo bad flag >&2; exit 1", "bad flag"), ("kill -9 $$", "it said nothing and ended with status -9")],
    ids=["words", "none"],
)
def test_what_a_compiler_says_that_fails_is_told_or_else_its_status(tmp_path, monkeypatch, script, said):
    wrapper = tmp_path / "cc"
    wrapper.write_text(f"#!/bin/sh\n{script}\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match=rf"whole\.c: {said};"):
        load_c_library(write_sources(tmp_path / "sources", 1), {"number": 0}, folder=tmp_path / "built")


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


needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names parts of an x86-64")


@needs_x86
def test_a_processor_is_used_whole_or_in_the_part_that_is_named(monkeypatch):
    monkeypatch.delenv(c_library.ISA, raising=False)
    assert processor_flags() == ("-march=native",)
    features = " ".join(c_library.INSTRUCTION_SETS["amx"].features)
    monkeypatch.setattr(c_library, "processor_features", lambda: f"flags : {features}")
    for name, chosen in c_library.INSTRUCTION_SETS.items():
        monkeypatch.setenv(c_library.ISA, name)
        assert processor_flags() == chosen.flags


@needs_x86
def test_what_the_processor_lacks_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(c_library, "processor_features", lambda: "flags : fpu avx2 fma f16c bmi2 avx512f")
    for name, said in (
        ("avx512", "lacks avx512bw, avx512cd, avx512dq, avx512vl"),
        ("amx", "amx_tile, amx_bf16"),
        ("avx1024", "it names a part of an x86_64: avx2, avx512, amx, plain"),
        ("", "leave it out"),
    ):
        monkeypatch.setenv(c_library.ISA, name)
        with pytest.raises(ConfigError, match=said):
            processor_flags()


@needs_x86
@needs_compiler
def test_a_child_process_builds_for_the_part_that_its_parent_names():
    source = "from moe_serve.kernels.cpu.library import find_cpu_library; print(find_cpu_library().vectors)"
    if not {*c_library.INSTRUCTION_SETS["avx2"].features} <= {*c_library.processor_features().split()}:
        pytest.skip("needs AVX2")
    command = [sys.executable, "-c", source]
    environment = os.environ | {c_library.ISA: "avx2"}
    assert subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout == "avx2\n"
    environment[c_library.ISA] = "avx3"
    failed = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert "MOE_SERVE_ISA is 'avx3'" in failed.stderr, "it does not fall back to torch"
