"""Reads and writes load traces: every engine's format is recognised by content, ours is written by suffix.

One file per format lies beside this one; here is only the choice. Readers and writers stream, so a trace may be larger
than memory.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moe_serve.eplb.files import trace_csv, trace_jsonl, trace_npz
from moe_serve.eplb.files.balance_log import is_balance_log
from moe_serve.eplb.files.fold import without_details
from moe_serve.eplb.files.json_text import BYTE_ORDER_MARK, MAX_JSON_BYTES, UTF16_MARKS, parse_json, read_json
from moe_serve.eplb.files.jsonl_writer import write_jsonl
from moe_serve.eplb.files.megatron import is_router_line, read_megatron
from moe_serve.eplb.files.named import is_named_counts, read_named
from moe_serve.eplb.files.sglang_dump import read_sglang, stat_trace
from moe_serve.eplb.files.tensorrt import is_statistics_folder, read_tensorrt
from moe_serve.eplb.files.torch_file import MAX_TORCH_BYTES, is_torch_file
from moe_serve.eplb.files.trace_meta import ByteProgress
from moe_serve.eplb.files.trace_npy import NPY_MAGIC, read_npy
from moe_serve.eplb.files.vllm import is_dump, read_dumps, read_history
from moe_serve.eplb.load import LoadTrace
from moe_serve.errors import TraceError

EXAMPLE_TRACES = ("demo", "demo_unbalanced")


def read_trace(
    path: str | Path,
    *,
    progress: ByteProgress | None = None,
    num_logical: int | None = None,
    max_torch_bytes: int = MAX_TORCH_BYTES,
) -> LoadTrace:
    """Returns the load trace in a file or folder, recognised by content; records are read while it is iterated.

    Ours (.npz, .jsonl, .csv), .npy counts, SGLang recorder dumps, TensorRT-LLM statistics, vLLM dumps and ADRS history,
    Megatron router traces, counts by name; or "example:demo", "example:demo_unbalanced", which are part of the package.
    progress: called with (done, total) while records are read.
    num_logical: experts per layer, for formats that do not say it (Megatron).
    Raises TraceError with file, line or key, what was expected and what was found.
    """
    if str(path).startswith("example:"):
        return replace(read_trace(_example(str(path)), progress=progress), source=str(path))
    path = Path(path)
    if os.path.isdir(path):  # not Path.is_dir, which raises on a name that is too long
        return _read_folder(path, progress, max_torch_bytes)
    if not os.path.isfile(path):
        raise TraceError(
            f"load trace {path} does not exist, or is no file that can be read; give a file, a folder of dumps, or "
            f"example:demo"
        )
    with path.open("rb") as file:
        head = file.read(1 << 16).removeprefix(BYTE_ORDER_MARK)
    if not head.strip():
        raise TraceError(f"{path} is empty; expected a load trace")
    if is_torch_file(path):
        return read_sglang([path], progress, max_torch_bytes)
    if head[:2] == b"PK":
        if not trace_npz.is_trace_npz(path):
            raise TraceError(f"{path}: a zip without counts.npy; expected an .npz trace or a .pt dump")
        return trace_npz.read_npz(path, progress)
    if head.startswith(NPY_MAGIC):
        return read_npy(path, progress)
    if trace_csv.is_trace_csv(head):
        return trace_csv.read_csv(path, progress)
    if is_balance_log(path):
        raise TraceError(
            f"{path} is an engine's log: it says how balanced the ranks are, not which experts are busy, so it cannot "
            f"be replayed; record expert counts (SGLang: /start_expert_distribution_record) and give that dump"
        )
    if head.startswith(UTF16_MARKS):
        raise TraceError(f"{path} is UTF-16 text; save it as UTF-8")
    if head.lstrip()[:1] in (b"{", b"["):
        return _read_json_trace(path, head, progress, num_logical)
    if head[:1] == b"\x80":
        raise TraceError(f"{path} is a Python pickle, which can carry code, and is refused; write it as .npz or JSON")
    raise TraceError(
        f"{path}: not a load trace; expected ours (.npz, .jsonl, .csv), .npy counts, an SGLang .pt dump, TensorRT-LLM "
        f"statistics, vLLM or ADRS JSON, or a Megatron router trace; found {head[:24]!r}"
    )


def write_trace(
    trace: LoadTrace, path: str | Path, progress: Callable[[int], None] | None = None, counts_only: bool = False
) -> int:
    """Writes a trace as .npz, .jsonl or .csv, by suffix, and returns the number of records.

    progress: called with the number of records written so far.
    counts_only: leave out the optional fields of the records (needed for .csv, which holds nothing else).
    """
    path = Path(path)
    source = without_details(trace) if counts_only else trace
    match path.suffix:
        case ".npz":
            return trace_npz.write_npz(source, path, progress)
        case ".jsonl":
            return write_jsonl(source, path, progress)
        case ".csv":
            return trace_csv.write_csv(source, path, progress)
    raise TraceError(f"trace file {path} has the suffix {path.suffix!r}; use .npz, .jsonl or .csv")


def _read_folder(path: Path, progress: ByteProgress | None, max_torch_bytes: int) -> LoadTrace:
    if is_statistics_folder(path):
        return read_tensorrt(path, progress)
    dumps = sorted(file for file in path.glob("*.pt") if file.is_file())
    if dumps:
        return read_sglang(dumps, progress, max_torch_bytes)
    objects = sorted(file for file in [*path.glob("*.json"), *path.glob("*.jsonl")] if file.is_file())
    if objects:
        return read_dumps(objects, progress)
    raise TraceError(
        f"folder {path}: no dumps in it; expected meta_info.json with rank*.safetensors (TensorRT-LLM), *.pt (SGLang) "
        f"or *.json (vLLM)"
    )


def _read_json_trace(path: Path, head: bytes, progress: ByteProgress | None, num_logical: int | None) -> LoadTrace:
    if b'"load_history"' in head:
        return read_history(path, progress)
    with path.open("rb") as file:
        line = file.readline(MAX_JSON_BYTES).removeprefix(BYTE_ORDER_MARK)
        lines = bool(file.read(1 << 12).strip())
    try:
        content = parse_json(line, str(path))
    except TraceError:  # spread over lines, or cut off
        lines = False
        try:
            content = read_json(path, TraceError, "a load trace, or .jsonl with one window per line")
        except TraceError:
            if trace_jsonl.looks_like_ours(line):
                return trace_jsonl.read_jsonl(path, progress)
            raise
    if trace_jsonl.is_trace_line(content):
        return trace_jsonl.read_jsonl(path, progress)
    if is_router_line(content):
        return read_megatron(path, progress, num_logical)
    if is_dump(content) or (isinstance(content, list) and content and is_dump(content[0])):
        return read_dumps([path], progress)
    if not lines and isinstance(content, dict):
        if "logical_count" in content:
            return stat_trace(content["logical_count"], path, progress)
        if content.keys() & {"physical_to_logical_map", "layer_list"}:
            raise TraceError(f"{path} is a placement, not a load trace; give it as --current, or convert it")
        if is_named_counts(content):
            return read_named(path)
    found = f"keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else type(content).__name__
    raise TraceError(
        f"{path}: JSON, but no load trace; expected 'tokens', 'window' and 'counts', 'load_history', 'logical_count', "
        f"'logical_expert_load' or 'top_indices', found {found}"
    )


def _example(name: str) -> Path:
    wanted = name.removeprefix("example:")
    if wanted not in EXAMPLE_TRACES:
        known = ", ".join(f"example:{known}" for known in EXAMPLE_TRACES)
        raise TraceError(f"{name} is not an example trace; use one of {known}")
    return Path(__file__).parent / "example_traces" / f"{wanted}.jsonl"
