"""The kernels' bits on another processor, which qemu plays: NEON against AVX2."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_serve.c_library import find_compiler
from moe_serve.kernels.cpu.library import SOURCE

PROBE = Path(__file__).with_name("probe.c")
# Position-independent as the library is: then no kernel is compiled anew for the numbers that the probe gives it.
FLAGS = ("-O3", "-fPIC", "-pthread", "-w", f"-I{SOURCE.parent}", str(PROBE), "-lm")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def bits(compiler: list[str], program: Path, *runner: str) -> dict[str, str]:
    """Returns a hash of what the kernels write in each case of the probe, built by this compiler."""
    subprocess.run([*compiler, "-o", str(program), *FLAGS], check=True)
    lines = subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(line.rsplit(": ", 1) for line in lines)


def test_the_probe_calls_the_kernels_as_they_are():
    """The slow test below, which few machines run, would otherwise be out of date without anybody noticing."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([*compiler, "-fsyntax-only", "-Werror", "-Wno-psabi", f"-I{SOURCE.parent}", str(PROBE)], check=True)


@pytest.mark.slow
def test_every_kernel_has_the_same_bits_with_neon_as_with_avx2(tmp_path):
    compiler = find_compiler()
    if platform.machine() != "x86_64" or compiler is None:
        pytest.skip("needs an x86-64 and a C compiler")
    if shutil.which(CROSS_COMPILER) is None or shutil.which(EMULATOR) is None:
        pytest.skip(f"needs {CROSS_COMPILER} and {EMULATOR} (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    avx2 = bits([*compiler, "-march=haswell"], tmp_path / "avx2")
    neon = bits([CROSS_COMPILER, "-static"], tmp_path / "neon", EMULATOR)
    assert len(avx2) > 900
    assert avx2.keys() == neon.keys()
    assert {case for case in avx2 if avx2[case] != neon[case]} == set()
    unfused = bits([*compiler, "-march=x86-64"], tmp_path / "unfused")
    assert len({case for case in avx2 if avx2[case] != unfused[case]}) > 300, "the probe sees how kernels round"
