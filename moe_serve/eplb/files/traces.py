"""Reads and writes load traces: every engine's format is recognised by content, ours is written by suffix.

The tables below say how each format is recognised and who reads it; the readers lie in one file per engine beside this
one. Readers and writers stream, so a trace may be larger than memory.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from moe_serve.eplb.files.balance_log import is_balance_log
from moe_serve.eplb.files.megatron import is_router_line, read_megatron
from moe_serve.eplb.files.plain_counts import (
    NPY_MAGIC,
    is_csv,
    is_named_counts,
    read_csv,
    read_named,
    read_npy,
    write_csv,
)
from moe_serve.eplb.files.sglang import read_sglang, stat_trace
from moe_serve.eplb.files.tensorrt import is_statistics_folder, read_tensorrt
from moe_serve.eplb.files.trace_jsonl import is_trace_line, looks_like_ours, read_jsonl, write_jsonl
from moe_serve.eplb.files.trace_npz import is_trace_npz, read_npz, write_npz
from moe_serve.eplb.files.untrusted import (
    BYTE_ORDER_MARK,
    MAX_JSON_BYTES,
    MAX_TORCH_BYTES,
    UTF16_MARKS,
    ByteProgress,
    is_torch_file,
    parse_json,
    read_json,
)
from moe_serve.eplb.files.vllm import is_dump, read_dumps, read_history
from moe_serve.eplb.files.windows import without_details
from moe_serve.eplb.load import LoadTrace
from moe_serve.errors import TraceError

EXAMPLE_TRACES = ("demo", "demo_unbalanced")


@dataclass(frozen=True)
class _Source:
    """A file that may be a trace, and how to read it.

    head:     its first 64 KiB, without a byte order mark
    content:  of JSON: its first line, or all of it where it is spread over lines;  whole: there are no further lines
    progress, num_logical, max_torch_bytes: of `read_trace`
    """

    path: Path
    head: bytes
    progress: ByteProgress | None
    num_logical: int | None
    max_torch_bytes: int
    content: Any = None
    whole: bool = False

    @property
    def is_json(self) -> bool:
        return self.head.lstrip()[:1] in (b"{", b"[")

    def whole_object_has(self, *keys: str) -> bool:
        """Whether the file is one JSON object with any of these keys."""
        return self.whole and isinstance(self.content, dict) and not self.content.keys().isdisjoint(keys)


class _Format(NamedTuple):
    """A kind of file. name: in words, "" = refused;  fits: whether a file is of it;  read: returns its trace"""

    name: str
    fits: Callable[[_Source], bool]
    read: Callable[[_Source], LoadTrace]


def _refuse(why: str) -> Callable[[_Source], NoReturn]:
    def read(source: _Source) -> NoReturn:
        raise TraceError(f"{source.path}{why}")

    return read


# The first that fits is taken.
FORMATS = (
    _Format(
        "ours (.npz)",
        lambda it: it.head[:2] == b"PK" and is_trace_npz(it.path),
        lambda it: read_npz(it.path, it.progress),
    ),
    _Format(
        "an SGLang .pt dump",
        lambda it: is_torch_file(it.path),
        lambda it: read_sglang([it.path], it.progress, it.max_torch_bytes),
    ),
    _Format(
        "",
        lambda it: it.head[:2] == b"PK",
        _refuse(": a zip without counts.npy; expected an .npz trace or a .pt dump"),
    ),
    _Format(".npy counts", lambda it: it.head.startswith(NPY_MAGIC), lambda it: read_npy(it.path, it.progress)),
    _Format(".csv counts", lambda it: is_csv(it.head), lambda it: read_csv(it.path, it.progress)),
    _Format(
        "",
        lambda it: is_balance_log(it.path),
        _refuse(
            " is an engine's log: it says how balanced the ranks are, not which experts are busy, so it cannot be "
            "replayed; record expert counts (SGLang: /start_expert_distribution_record) and give that dump"
        ),
    ),
    _Format("", lambda it: it.head.startswith(UTF16_MARKS), _refuse(" is UTF-16 text; save it as UTF-8")),
    _Format(
        "ADRS 'load_history'",
        lambda it: it.is_json and b'"load_history"' in it.head,
        lambda it: read_history(it.path, it.progress),
    ),
    _Format("", lambda it: it.is_json, lambda it: _read_json(it)),  # of the next table
    _Format(
        "",
        lambda it: it.head[:1] == b"\x80",
        _refuse(" is a Python pickle, which can carry code, and is refused; write it as .npz or JSON"),
    ),
)
JSON_FORMATS = (
    _Format(
        "ours (.jsonl: 'tokens', or 'window' and 'counts')",
        lambda it: is_trace_line(it.content),
        lambda it: read_jsonl(it.path, it.progress),
    ),
    _Format(
        "a Megatron router trace ('top_indices')",
        lambda it: is_router_line(it.content),
        lambda it: read_megatron(it.path, it.progress, it.num_logical),
    ),
    _Format(
        "a vLLM dump ('logical_expert_load')",
        lambda it: (
            is_dump(it.content) or (isinstance(it.content, list) and it.content != [] and is_dump(it.content[0]))
        ),
        lambda it: read_dumps([it.path], it.progress),
    ),
    _Format(
        "SGLang's counts ('logical_count')",
        lambda it: it.whole_object_has("logical_count"),
        lambda it: stat_trace(it.content["logical_count"], it.path, it.progress),
    ),
    _Format(
        "",
        lambda it: it.whole_object_has("physical_to_logical_map", "layer_list"),
        _refuse(" is a placement, not a load trace; give it as --current, or convert it"),
    ),
    _Format("counts by name", lambda it: it.whole and is_named_counts(it.content), lambda it: read_named(it.path)),
)
WRITERS = {".npz": write_npz, ".jsonl": write_jsonl, ".csv": write_csv}


def read_trace(
    path: str | Path,
    *,
    progress: ByteProgress | None = None,
    num_logical: int | None = None,
    max_torch_bytes: int = MAX_TORCH_BYTES,
) -> LoadTrace:
    """Returns the load trace in a file or folder, recognised by content; records are read while it is iterated.

    Ours (.npz, .jsonl), .csv and .npy counts, SGLang recorder dumps, TensorRT-LLM statistics, vLLM dumps and ADRS
    history, Megatron router traces, counts by name; or "example:demo", "example:demo_unbalanced", which are part of the
    package.
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
    source = _Source(path, head, progress, num_logical, max_torch_bytes)
    found = next((kind for kind in FORMATS if kind.fits(source)), None)
    if found is None:
        raise TraceError(
            f"{path}: not a load trace; expected {_names((*FORMATS, *JSON_FORMATS))}, or a folder of dumps of SGLang, "
            f"TensorRT-LLM or vLLM; found {head[:24]!r}"
        )
    return found.read(source)


def write_trace(trace: LoadTrace, path: str | Path, counts_only: bool = False) -> int:
    """Writes a trace as .npz, .jsonl or .csv, by suffix, and returns the number of records.

    counts_only: leave out the optional fields of the records (needed for .csv, which holds nothing else).
    """
    path = Path(path)
    if path.suffix not in WRITERS:
        raise TraceError(f"trace file {path} has the suffix {path.suffix!r}; use .npz, .jsonl or .csv")
    return WRITERS[path.suffix](without_details(trace) if counts_only else trace, path)


def _names(formats: tuple[_Format, ...]) -> str:
    return ", ".join(kind.name for kind in formats if kind.name)


def _read_json(source: _Source) -> LoadTrace:
    path = source.path
    with path.open("rb") as file:
        line = file.readline(MAX_JSON_BYTES).removeprefix(BYTE_ORDER_MARK)
        whole = not file.read(1 << 12).strip()
    try:
        content = parse_json(line, str(path))
    except TraceError:  # spread over lines, or cut off
        whole = True
        try:
            content = read_json(path, TraceError, "a load trace, or .jsonl with one window per line")
        except TraceError:
            if looks_like_ours(line):
                return read_jsonl(path, source.progress)  # it names the line
            raise
    source = replace(source, content=content, whole=whole)
    for kind in JSON_FORMATS:
        if kind.fits(source):
            return kind.read(source)
    found = f"keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else type(content).__name__
    raise TraceError(f"{path}: JSON, but no load trace; expected {_names(JSON_FORMATS)}, found {found}")


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


def _example(name: str) -> Path:
    wanted = name.removeprefix("example:")
    if wanted not in EXAMPLE_TRACES:
        known = ", ".join(f"example:{known}" for known in EXAMPLE_TRACES)
        raise TraceError(f"{name} is not an example trace; use one of {known}")
    return Path(__file__).parent / "example_traces" / f"{wanted}.jsonl"
