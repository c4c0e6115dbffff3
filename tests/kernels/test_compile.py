"""Every kernel compiles for the GPUs we name, without one, and stays within their registers and shared memory."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # what one program may have
MAX_REGISTERS = 255  # of a thread; the hardware's limit, at which values start to spill
# A few bytes of addressing; a spilled block is hundreds. On sm_80 latents in float32, for tests, keep eight values.
MAX_STACK_BYTES = {80: 32, 90: 16, 100: 16}

ANY_GPU = ["norms", "rope_write", "row_factors", "pack_rows", "gpt_oss_experts", "packed_gemm_few_rows",
           "packed_gemm_some_rows", "packed_gemm_many_rows", "slab_gemm", "gated_gemm", "mxfp4_gemm", "silu_mul",
           "weighted_sum", "topk_gate", "replica_split", "sampling", "low_latency", "low_latency_many_tokens",
           "attend_gqa", "attend_indexed", "attend_expanded"]  # fmt: skip
MORE = ["low_latency_top16", "attend_latent", "attend_sinks", "attend_wide", "attend_float32", "attend_float32_latent",
        "attend_int8", "replica_split_wide"]  # fmt: skip
# sm_89 and later have e4m3.
WITH_E4M3 = ["quantize", "pack_rows_fp8", "packed_gemm_fp8", "gated_gemm_fp8", "rope_write_8_bits"]
MORE_WITH_E4M3 = ["dense_gemm_fp8", "packed_gemm_fp8_by_channel", "slab_gemm_fp8", "attend_fp8", "low_latency_fp8"]
USES_MATRIX_UNITS = {"grouped_gemm_kernel", "attend_kernel", "expand_kernel", "index_scores_kernel"}
WITHOUT_MATRIX_UNITS = {"attend_float32", "attend_float32_latent"}  # in full precision
MOVES_16_BYTES = {"dispatch_send_kernel", "combine_send_kernel", "dispatch_receive_kernel", "attend_kernel",
                  "expand_kernel", "norm_kernel", "rope_write_kernel", "mla_rope_write_kernel", "multiply_rows_kernel",
                  "pack_rows_kernel"}  # fmt: skip

CALLS_IN_ONE_THREAD = ("nvshmemx_signal_op",)  # what Triton would call in every thread of a program
CALLS_IN_ALL_THREADS = ("nvshmemx_putmem_signal_block",)
# In place of NVSHMEM's device library: functions that stay calls in the kernel's text.
STAND_IN = """
target triple = "nvptx64-nvidia-cuda"
define i32 @nvshmemx_signal_op(i64 %at, i64 %value, i32 %how, i32 %pe) noinline {
  %flag = inttoptr i64 %at to ptr
  store volatile i64 %value, ptr %flag, align 8
  ret i32 %pe
}
define i32 @nvshmemx_putmem_signal_block(i64 %to, i64 %from, i64 %size, i64 %at, i64 %value, i32 %how, i32 %pe)
  noinline {
  %flag = inttoptr i64 %at to ptr
  store volatile i64 %value, ptr %flag, align 8
  ret i32 %pe
}
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: nothing to compile"
)


def compiled(capability: int, launches: list[str], **environment: str) -> list[dict[str, int | str]]:
    worker = [sys.executable, "-m", "tests.kernels.compile_worker", str(capability), *launches]
    where = {**os.environ, **environment}
    done = subprocess.run(worker, cwd=ROOT, capture_output=True, text=True, check=False, env=where)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "capability, launches",
    [
        pytest.param(80, ANY_GPU + MORE, marks=pytest.mark.slow),
        (90, ANY_GPU + WITH_E4M3),
        pytest.param(90, MORE + MORE_WITH_E4M3, marks=pytest.mark.slow),
        pytest.param(100, ANY_GPU + WITH_E4M3 + MORE + MORE_WITH_E4M3, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spilling(capability: int, launches: list[str]) -> None:
    reports = compiled(capability, launches)
    assert {report["launch"] for report in reports} == set(launches)
    for report in reports:
        assert report["registers"] <= MAX_REGISTERS, report
        assert report["stack_bytes"] <= MAX_STACK_BYTES[capability], report
        assert report["shared_bytes"] <= SHARED_BYTES[capability], report
        uses_them = report["kernel"] in USES_MATRIX_UNITS and report["launch"] not in WITHOUT_MATRIX_UNITS
        assert (report["matrix_instructions"] > 0) == uses_them, report
        # Rows are moved 16 bytes at a time; narrower access would halve the bandwidth of what is bound by it.
        if report["kernel"] in MOVES_16_BYTES:
            assert min(report["wide_loads"], report["wide_stores"]) > 0, report


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None,
                    reason="nvshmem4py and its device library are not installed")  # fmt: skip
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_low_latency_kernels_link_with_nvshmem(capability: int) -> None:
    kernels = {report["kernel"] for report in compiled(capability, ["low_latency_nvshmem"])}
    assert kernels == {*SENDS, *RECEIVES}


def test_one_thread_of_a_program_announces(tmp_path: Path) -> None:
    (tmp_path / "libnvshmem_device.bc").write_text(STAND_IN)
    compiled(90, ["--ptx", str(tmp_path), "low_latency_nvshmem"], NVSHMEM_LIB_DIR=str(tmp_path))
    calls = {path.stem: (calls_of(path, first=True), calls_of(path, first=False)) for path in tmp_path.glob("*.ptx")}
    alone, together = set(CALLS_IN_ONE_THREAD), set(CALLS_IN_ALL_THREADS)
    assert calls == {
        "dispatch_send_kernel": (alone | together, together),
        "combine_send_kernel": (alone | together, together),
        "dispatch_receive_kernel": (set(), set()),
        "combine_receive_kernel": (set(), set()),
    }


def calls_of(path: Path, first: bool) -> set[str]:
    """Returns which functions a thread of a kernel may call: the first thread of a program, or another one."""
    text = path.read_text(encoding="ascii")
    kernel = text[text.index(".entry") :]
    lines = [line.partition("//")[0].strip() for line in kernel[: kernel.index("\n}")].splitlines()]
    numbers = set(re.findall(r"mov\.u32\s+(%r\d+), %tid\.x;", "\n".join(lines)))
    guards = {  # predicates that hold exactly in the first thread, and those that hold in all others
        predicate: how == "eq"
        for how, predicate, number in re.findall(r"setp\.(eq|ne)\.\w+\s+(%p\d+), (%r\d+), 0;", "\n".join(lines))
        if number in numbers
    }
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\$\w+:", line)}
    seen, called, todo = set[int](), set[str](), [0]
    while todo:
        at = todo.pop()
        if at in seen or at >= len(lines):
            continue
        seen.add(at)
        line = lines[at]
        called.update(re.findall(r"call\.uni (?:\(\w+\), )?(\w+),", line))
        branch = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?bra(?:\.uni)?\s+(\$\w+);", line)
        if branch is None:
            todo += [] if line == "ret;" else [at + 1]
            continue
        negated, predicate, label = branch.groups()
        takes: set[bool] = {True} if predicate is None else {True, False}
        if predicate in guards:
            takes = {(guards[predicate] == first) != bool(negated)}
        todo += [labels[label]] * (True in takes) + [at + 1] * (False in takes)
    return called


RELEASE, ACQUIRES = "atom.global.sys.release.exch.b64", ("ld.global.sys.acquire.b64", "atom.global.sys.acquire.add.u64")
SENDS = ("dispatch_send_kernel", "combine_send_kernel")
RECEIVES = ("dispatch_receive_kernel", "combine_receive_kernel")


@pytest.mark.slow  # the text alone; the default suite compiles these kernels for their resources
@pytest.mark.parametrize("capability", [90, 100])
def test_flags_are_released_behind_their_rows_and_each_read_of_one_acquires(capability: int, tmp_path: Path) -> None:
    compiled(capability, ["--ptx", str(tmp_path), "low_latency"])
    for name in SENDS + RECEIVES:
        text = (tmp_path / f"{name}.ptx").read_text(encoding="ascii")
        assert not flag_faults(text, is_sender=name in SENDS), name
    rows = (tmp_path / "combine_send_kernel.ptx").read_text(encoding="ascii")
    flag = re.search(rf"\n[^\n]*{re.escape(RELEASE)}[^\n]*", rows)
    assert flag is not None
    mistakes = {
        "relaxed": rows.replace(RELEASE, RELEASE.replace("release", "relaxed")),
        "all threads": re.sub(rf"@%p\d+ {re.escape(RELEASE)}", RELEASE, rows),
        "before its row": re.sub(r"\n[^\n]* st\.global", flag[0] + r"\g<0>", rows.replace(flag[0], "", 1), count=1),
        "of one GPU": rows.replace(RELEASE, RELEASE.replace(".sys.", ".gpu.")),
    }
    for mistake, text in mistakes.items():
        assert text != rows, mistake
        assert text.count(".exch.") == rows.count(".exch."), mistake
        assert flag_faults(text, is_sender=True), mistake
    for name in RECEIVES:
        arrived = (tmp_path / f"{name}.ptx").read_text(encoding="ascii")
        for found in re.finditer("|".join(map(re.escape, ACQUIRES)), arrived):  # one mistake at a time
            relaxed, volatile = found[0].replace("acquire", "relaxed"), "ld.volatile.global.b64"
            for mistake in (relaxed, volatile, "ld.global.b64", found[0].replace(".sys.", ".gpu.")):
                text = arrived[: found.start()] + mistake + arrived[found.end() :]
                assert flag_faults(text, is_sender=False), (name, mistake)


def flag_faults(text: str, is_sender: bool) -> list[str]:
    """Returns where a flag is not released by chosen threads behind a barrier, or what reads one without acquire.

    A kernel that receives waits at two places, and reads flags at each before its loop and within.
    """
    faults, is_behind_barrier, num_flags = [], False, 0
    for line in text[text.index(".entry") :].splitlines():
        if "st.global" in line:
            is_behind_barrier = False
        elif "bar.sync" in line:
            is_behind_barrier = True
        elif ".exch." in line:
            num_flags += 1
            if RELEASE not in line or not line.strip().startswith("@%p") or not is_behind_barrier:
                faults.append(line)
        elif any(each in line for each in ACQUIRES):
            num_flags += 1
        elif ".volatile" in line or ".relaxed.add" in line:
            faults.append(line)
    if is_sender:
        return faults if num_flags else ["no flag is released"]
    return faults if num_flags == 4 else [f"{num_flags} reads of flags acquire", *faults]
