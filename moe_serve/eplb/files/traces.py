"""Reads and writes load traces: every engine's format is recognised by content, ours is written by suffix.

One file per format lies beside this one; here is only the choice. Readers and writers stream, so a trace may be larger
than memory.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from moe_serve.eplb.files import trace_csv, trace_jsonl, trace_npz
from moe_serve.eplb.files.balance_log import is_balance_log
from moe_serve.eplb.files.fold import without_details
from moe_serve.eplb.files.jsonl_writer import write_jsonl
from moe_serve.eplb.files.megatron import is_router_line, read_megatron
from moe_serve.eplb.files.named import is_named_counts, read_named
from moe_serve.eplb.files.sglang_dump import read_sglang, stat_trace
from moe_serve.eplb.files.tensorrt_stats import is_statistics_folder, read_tensorrt
from moe_serve.eplb.files.torch_file import MAX_TORCH_BYTES, is_torch_file
from moe_serve.eplb.files.trace_meta import ByteProgress
from moe_serve.eplb.files.vllm import is_dump, read_dumps, read_history
from moe_serve.eplb.load import LoadTrace
from moe_serve.errors import TraceError

EXAMPLE_TRACES = ("demo", "demo_unbalanced")
_WHOLE_JSON = 1 << 28  # 256 MiB: JSON that is not one of the streamed kinds is parsed whole up to this size


def read_trace(
    path: str | Path,
    *,
    progress: ByteProgress | None = None,
    num_logical: int | None = None,
    max_torch_bytes: int = MAX_TORCH_BYTES,
) -> LoadTrace:
    """Returns the load trace in a file or folder, recognised by content; records are read while it is iterated.

    Ours (.npz, .jsonl, .csv), SGLang recorder dumps, TensorRT-LLM statistics, vLLM dumps and ADRS history, Megatron
    router traces, counts by name; or "example:demo", "example:demo_unbalanced", which are part of the package.
    progress: called with (done, total) while records are read.
    num_logical: experts per layer, for formats that do not say it (Megatron).
    Raises TraceError with file, line or key, what was expected and what was found.
    """
    if str(path).startswith("example:"):
        return replace(read_trace(_example(str(path)), progress=progress), source=str(path))
    path = Path(path)
    if path.is_dir():
        return _read_folder(path, progress, max_torch_bytes)
    if not path.is_file():
        raise TraceError(f"load trace {path} does not exist; give a file, a folder of dumps, or example:demo")
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if not head.strip():
        raise TraceError(f"{path} is empty; expected a load trace")
    if is_torch_file(path):
        return read_sglang([path], progress, max_torch_bytes)
    if head[:2] == b"PK":
        if not trace_npz.is_trace_npz(path):
            raise TraceError(f"{path}: a zip without counts.npy; expected an .npz trace or a .pt dump")
        return trace_npz.read_npz(path, progress)
    if trace_csv.is_trace_csv(head):
        return trace_csv.read_csv(path, progress)
    if head.lstrip()[:1] in (b"{", b"["):
        return _read_json_trace(path, head, progress, num_logical)
    if is_balance_log(head):
        raise TraceError(
            f"{path} is an engine's log: it says how balanced the ranks are, not which experts are busy, so it cannot "
            f"be replayed; record expert counts (SGLang: /start_expert_distribution_record) and give that dump"
        )
    if head[:1] == b"\x80":
        raise TraceError(f"{path} is a Python pickle, which can carry code, and is refused; write it as .npz or JSON")
    raise TraceError(
        f"{path}: not a load trace; expected ours (.npz, .jsonl, .csv), an SGLang .pt dump, TensorRT-LLM statistics, "
        f"vLLM or ADRS JSON, or a Megatron router trace; found {head[:24]!r}"
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
    dumps = sorted(path.glob("*.pt"))
    if dumps:
        return read_sglang(dumps, progress, max_torch_bytes)
    objects = sorted([*path.glob("*.json"), *path.glob("*.jsonl")])
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
        line = file.readline(_WHOLE_JSON)
        more = bool(file.read(1 << 12).strip())
    try:
        content = msgspec.json.decode(line)
        lines = more
    except msgspec.DecodeError:  # spread over lines, or cut off
        lines = False
        if path.stat().st_size > _WHOLE_JSON:
            raise TraceError(
                f"{path}: a JSON file of {path.stat().st_size >> 20} MiB that is neither lines nor a load_history; "
                f"write it as .jsonl, one window per line"
            ) from None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as problem:
            if trace_jsonl.looks_like_ours(line):
                return trace_jsonl.read_jsonl(path, progress)
            number = getattr(problem, "lineno", "?")
            raise TraceError(f"{path} line {number}: not JSON ({problem}); is the file cut off?") from None
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
