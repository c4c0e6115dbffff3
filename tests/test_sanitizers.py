"""The C helpers under the compiler's sanitizers: no access out of bounds, no undefined operation, no race of threads.

Between processes ThreadSanitizer sees nothing, so ranks are threads here. What Python stores, it does not see either.

The sanitizers of memory took 5 minutes of CPU time on Zen 3 with AVX2: one to build, the rest for 581 tests; those of
states, capacities, groups and pages of the cache have come since.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RACES = Path(__file__).parent / "races"
C_FOLDERS = [ROOT / "moe_serve" / part for part in ("kernels/cpu", "dispatch/shm", "dispatch/hosts")]
# -O1 alone leaves multiply-adds unfused, and bits are compared. Of undefined operations two are left out that the
# sanitizer of addresses sees, too: a null pointer, and an access beyond its object.
ADDRESSES = (
    "-O1 -fexpensive-optimizations -g1 -fno-omit-frame-pointer -fsanitize=address,undefined "
    "-fno-sanitize=null,object-size -fno-sanitize-recover=undefined"
)
# Every helper, with awkward sizes. Left out are most tests that build kernels once more, for other processors.
CHOSEN = [
    "tests/attention_dp/test_pages.py",
    "tests/dispatch/shm",
    "tests/dispatch/hosts/test_link.py",
    "tests/ep/test_fused.py",
    "tests/eplb/test_anew.py",
    "tests/eplb/test_fractions.py",
    "tests/eplb/test_link_edits.py",
    "tests/eplb/test_pairs.py",
    "tests/eplb/test_single_edits.py",
    "tests/eplb/test_split.py",
    *(f"tests/kernels/cpu/test_{name}.py" for name in (
        "attention", "cached", "capacity", "causal_conv", "compressed", "delta_rule", "experts", "gate", "groups",
        "indexed", "layer_norm", "linear", "logprobs", "operations", "packed", "pool", "program", "rows", "sampling",
        "selective_space", "state_space", "updates",
    )),
]  # fmt: skip
PATIENT = """
import sys
from moe_serve import c_library
c_library._TIMEOUT_S = 1800
"""
# Before the tests, so that a compiler that fails says why.
BUILD = """
from moe_serve.dispatch.shm.row_copy_native import load_library
from moe_serve.kernels.cpu.library import build_cpu_library
build_cpu_library()
library, reason = load_library()
assert library, reason
"""
RUN_TESTS = """
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
OVERRUN = """
import ctypes, sys
from moe_serve.c_library import load_c_library
room = ctypes.create_string_buffer(1024)
load_c_library(__import__("pathlib").Path(sys.argv[1]), {"fill": 2})[0].fill(ctypes.addressof(room), int(sys.argv[2]))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the sanitizers are gcc's: apt-get install gcc"),
]


@pytest.fixture
def sanitized(tmp_path: Path) -> dict[str, str]:
    """Returns an environment in which C helpers are built with the sanitizers of memory, into a cache of their own."""
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if "/" not in runtime.stdout:
        pytest.skip("gcc has no libasan")
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec gcc "$@" {ADDRESSES}\n')
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    cache.mkdir()
    return {
        **os.environ,
        "PATH": f"{compiler.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(cache),
        "LD_PRELOAD": runtime.stdout.strip(),
        "PYTHONMALLOC": "malloc",  # else small buffers of Python have no bounds that the sanitizer knows
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own are many
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TEST_PATIENCE": "10",
    }


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_helpers_stay_within_bounds_and_do_nothing_undefined(sanitized: dict[str, str]) -> None:
    built = run(sanitized, "-c", PATIENT + BUILD)
    assert built.returncode == 0, built.stderr[-4000:]
    done = run(sanitized, "-c", PATIENT + RUN_TESTS, "-q", "-x", "-p", "no:cacheprovider", "--timeout", "3600", *CHOSEN)
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-6000:]}"
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.parametrize("size, said", [(1024, ""), (1025, "heap-buffer-overflow")])
def test_a_byte_too_far_is_seen(size: int, said: str, sanitized: dict[str, str], tmp_path: Path) -> None:
    source = tmp_path / "fill.c"
    source.write_text("#include <stdint.h>\nvoid fill(char *at, int64_t size) { while (size--) *at++ = 1; }\n")
    found = run(sanitized, "-c", PATIENT + OVERRUN, str(source), str(size))
    assert said in found.stderr
    assert (found.returncode != 0) == bool(said), found.stderr[-4000:]


# Each mistake in the C code is one that the threads of a driver must show.
MISTAKES = {
    "pool": ("kernels/cpu/pool.h", "atomic_load(&pool.done) < (uint64_t)pieces", "spin < 0"),
    "flags": ("dispatch/shm/fused.h", "flag, __ATOMIC_RELEASE", "flag, __ATOMIC_RELAXED"),
    "connection": ("dispatch/hosts/link.c", "lock(&link->sending);\n    Batch *batch = new_batch(link, 2,",
                   "trylock(&link->sending);\n    Batch *batch = new_batch(link, 2,"),
}  # fmt: skip


@pytest.mark.parametrize("is_wrong", [False, True], ids=["as it is", "with a mistake"])
@pytest.mark.parametrize("driver", MISTAKES)
def test_threads_do_not_race(driver: str, is_wrong: bool, tmp_path: Path) -> None:
    folder = tmp_path / "moe_serve"
    for each in C_FOLDERS:
        shutil.copytree(
            each, folder / each.relative_to(ROOT / "moe_serve"), ignore=shutil.ignore_patterns("*.py*", "__*")
        )
    if is_wrong:
        path, right, wrong = MISTAKES[driver]
        text = (folder / path).read_text(encoding="utf-8")
        assert right in text
        (folder / path).write_text(text.replace(right, wrong), encoding="utf-8")
    includes = [f"-I{folder / each.relative_to(ROOT / 'moe_serve')}" for each in C_FOLDERS]
    flags = ["-O1", "-g1", "-march=native", "-pthread", "-fsanitize=thread"]
    command = ["gcc", *flags, *includes, "-o", str(tmp_path / driver), str(RACES / f"{driver}.c")]
    subprocess.run(command, check=True, capture_output=True)
    # Its shadow memory has fixed addresses, which the system must not give away.
    unmoved = ["setarch", "-R"] if shutil.which("setarch") else []
    options = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [*unmoved, tmp_path / driver], env=options, capture_output=True, text=True, check=False, timeout=600
    )
    said = done.stdout + done.stderr
    assert ("data race" in said or "is wrong" in said or "unlock of an unlocked mutex" in said) == is_wrong, said[
        -4000:
    ]
    assert (done.returncode != 0) == is_wrong, said[-4000:]
