"""Our .npz trace: `counts` [T, L, E] int64 and, where recorded, more arrays with one row per record; `meta` is JSON.

Members: counts; first_step, num_steps [T] int64; phase [T] text; step_time_s [T] float64 (NaN = none);
num_forwards, placement_version [T] int64 (-1 = none); decodes [T, 8] int64, as DecodeCounts.numbers (all -1 = none);
activations [T, L, E]; by_source [T, L, R, E]; per_step [T, S, L, E]; phy2log [T, L, P] with num_ranks in meta. Only
`counts` is required, so a plain np.savez(counts=...) is a trace.
Read row by row from the zip, and written through temporary files beside the target, so neither holds the whole trace.
"""

import json
import math
import os
import tempfile
import tokenize
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from moe_serve.eplb.files.trace_jsonl import OPTIONAL_FIELDS, TraceMeta
from moe_serve.eplb.files.untrusted import ZIP_ERRORS, ByteProgress, check_table_size, counted, naming, zip_names
from moe_serve.eplb.load import NUM_DECODE_COUNTS, DecodeCounts, LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.errors import TraceError

_COPY = 1 << 18
_MAX_ROW_BYTES = 1 << 30  # 1 GiB: the largest part of one record, per_step of 8,000 steps x 58 layers x 256 experts
_FIELDS = (
    "counts", "first_step", "num_steps", "phase", "step_time_s", "num_forwards", "placement_version", "phy2log",
    "decodes",
)  # fmt: skip
_NO_DECODES = np.full(NUM_DECODE_COUNTS, -1, dtype=np.int64)


def is_trace_npz(path: Path) -> bool:
    """Returns whether a zip holds `counts.npy`."""
    names = zip_names(path)
    return path.suffix == ".npz" if names is None else "counts.npy" in names  # a cut-off one: let the reader say so


def read_npz(path: Path, progress: ByteProgress | None = None) -> LoadTrace:
    """Returns the trace in an .npz file, read one record at a time."""
    with _archive(path) as archive:
        counts = _Rows(archive, "counts", path)
        if len(counts.shape) != 3 or not all(counts.shape[1:]):
            raise TraceError(f"{path}, key counts: shape {list(counts.shape)}, expected [records, layers, experts]")
        num_records, num_layers, num_experts = counts.shape
        check_table_size(num_layers, num_experts, f"{path}, key counts")
        content = _meta(archive, path)
    described = {"num_logical": num_experts, "moe_layer_ids": list(range(num_layers)), **content}
    meta = TraceMeta.from_json(described, f"{path}, key meta")
    if (len(meta.moe_layer_ids), meta.num_logical) != (num_layers, num_experts):
        raise TraceError(
            f"{path}, key counts: {num_layers} layers x {num_experts} experts, expected "
            f"{len(meta.moe_layer_ids)} x {meta.num_logical} (as meta says)"
        )
    num_ranks = content.get("num_ranks") or 0
    if type(num_ranks) is not int or num_ranks < 0:
        raise TraceError(f"{path}, key meta.num_ranks: expected a number of ranks, found {num_ranks!r:.60}")
    opener = _Reader(path, meta, num_ranks, progress)
    return LoadTrace(
        opener, meta.num_logical, meta.moe_layer_ids, meta.topk, meta.model_id, f"{path} (npz)", int(num_records)
    )


@dataclass(frozen=True)
class _Reader:
    path: Path
    meta: TraceMeta
    num_ranks: int
    progress: ByteProgress | None

    def __call__(self) -> Iterator[LoadRecord]:
        with _archive(self.path) as archive:
            present = {name[:-4] for name in archive.namelist() if name.endswith(".npy")}
            rows = {name: _Rows(archive, name, self.path) for name in sorted(present & {*_FIELDS, *OPTIONAL_FIELDS})}
            total = len(rows["counts"])
            for name, member in rows.items():
                if len(member) != total:
                    raise TraceError(f"{self.path}, key {name}: {len(member)} records, expected {total} (as counts)")
            placement: Placement | None = None
            step = 0
            for index in counted(range(total), total, self.progress):
                row = {name: member.next(index) for name, member in rows.items()}
                if "phy2log" in row and self.num_ranks:
                    placement = self._placement(row["phy2log"], placement, index)
                decodes = self._decodes(row["decodes"], index) if "decodes" in row else None
                with naming(f"{self.path}, record {index}"):
                    num_steps = int(row.get("num_steps", 1))
                    version = int(row.get("placement_version", -1))
                    time_s, forwards = float(row.get("step_time_s", math.nan)), int(row.get("num_forwards", -1))
                    record = LoadRecord(
                        first_step=int(row.get("first_step", step)),
                        num_steps=num_steps,
                        phase=str(row.get("phase", "mixed")),
                        tokens=row["counts"],
                        model_id=self.meta.model_id,
                        placement_version=None if version < 0 else version,
                        placement=placement,
                        step_time_s=None if math.isnan(time_s) else time_s,
                        num_forwards=None if forwards < 0 else forwards,
                        decodes=decodes,
                        **{name: row[name] for name in OPTIONAL_FIELDS if name in row},
                    )
                yield record
                step += num_steps

    def _decodes(self, numbers: np.ndarray, index: int) -> DecodeCounts | None:
        with naming(f"{self.path}, key decodes[{index}]"):
            numbers = np.atleast_1d(numbers)
            return None if np.array_equal(numbers, _NO_DECODES) else DecodeCounts.of(numbers.tolist())

    def _placement(self, table: np.ndarray, last: Placement | None, index: int) -> Placement:
        if last is not None and np.array_equal(table, last.physical_to_logical):
            return last
        with naming(f"{self.path}, key phy2log[{index}]"):
            return Placement(table, self.meta.num_logical, self.num_ranks, self.meta.moe_layer_ids)


class _Rows:
    """The rows of one .npy member, in order."""

    def __init__(self, archive: zipfile.ZipFile, name: str, path: Path):
        self.name, self.path = name, path
        try:
            self._file: IO[bytes] = archive.open(f"{name}.npy")
            version = np.lib.format.read_magic(self._file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, fortran, self.dtype = header(self._file)
            held = archive.getinfo(f"{name}.npy").file_size - self._file.tell()
        except (*ZIP_ERRORS, SyntaxError, tokenize.TokenError, TypeError, RecursionError, MemoryError) as problem:
            raise TraceError(f"{path}, key {name}: not a numpy array ({problem}); write the trace again") from None
        if self.dtype.hasobject:
            raise TraceError(f"{path}, key {name}: holds Python objects, which can carry code, and is refused")
        if fortran and len(self.shape) > 1:
            raise TraceError(f"{path}, key {name}: in Fortran order, expected C order; save np.ascontiguousarray(...)")
        self._row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        claimed = self.dtype.itemsize * math.prod(self.shape)
        if claimed != held or min(self.shape, default=0) < 0:
            raise TraceError(
                f"{path}, key {name}: shape {list(self.shape)} of {self.dtype} is {claimed} bytes, found {held}; the "
                f"file is cut off or damaged"
            )
        if self._row_bytes > _MAX_ROW_BYTES:
            raise TraceError(
                f"{path}, key {name}: {self._row_bytes >> 20} MiB a record, and one is held in memory, up to "
                f"{_MAX_ROW_BYTES >> 20} MiB; write shorter windows, or leave {name} out"
            )

    def __len__(self) -> int:
        return int(self.shape[0]) if self.shape else 0

    def next(self, index: int) -> Any:
        """Returns the next row."""
        parts, missing = [], self._row_bytes
        try:
            while missing and (part := self._file.read(missing)):
                parts.append(part)
                missing -= len(part)
        except ZIP_ERRORS as problem:
            raise TraceError(f"{self.path}, key {self.name}, record {index}: damaged ({problem})") from None
        if missing:
            raise TraceError(
                f"{self.path}, key {self.name}, record {index}: {self._row_bytes - missing} bytes, expected "
                f"{self._row_bytes}; the file is cut off"
            )
        return np.frombuffer(b"".join(parts), self.dtype).reshape(self.shape[1:])[()]


def write_npz(trace: LoadTrace, path: Path) -> int:
    """Writes a trace, atomically; returns the number of records."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        writer = _Writer(Path(folder), path, TraceMeta.of(trace))
        for record in trace:
            writer.add(record)
        unfinished = Path(folder) / "trace.npz"
        writer.finish(unfinished)
        os.replace(unfinished, path)
    return writer.num_records


class _Writer:
    """Collects rows in one raw file per member, then zips them with headers that give their number."""

    def __init__(self, folder: Path, path: Path, meta: TraceMeta):
        self._folder, self._path, self._meta = folder, path, meta
        self._members: dict[str, tuple[IO[bytes], tuple[int, ...], np.dtype[Any]]] = {}
        self._num_ranks = 0
        self.num_records = 0

    def add(self, record: LoadRecord) -> None:
        row: dict[str, Any] = {
            "counts": record.tokens,
            "first_step": np.int64(record.first_step),
            "num_steps": np.int64(record.num_steps),
            "phase": np.array(record.phase, dtype="U8"),
            "step_time_s": np.float64(math.nan if record.step_time_s is None else record.step_time_s),
            "num_forwards": np.int64(-1 if record.num_forwards is None else record.num_forwards),
            "placement_version": np.int64(-1 if record.placement_version is None else record.placement_version),
            "decodes": _NO_DECODES if record.decodes is None else np.array(record.decodes.numbers, dtype=np.int64),
        }
        row |= {name: getattr(record, name) for name in OPTIONAL_FIELDS if getattr(record, name) is not None}
        if record.placement is not None:
            row["phy2log"] = record.placement.physical_to_logical
            self._num_ranks = record.placement.num_ranks
        if self.num_records == 0:
            for name, value in row.items():
                array = np.asarray(value)
                self._members[name] = ((self._folder / name).open("wb"), array.shape, array.dtype)
        if row.keys() != self._members.keys():
            odd = sorted(row.keys() ^ self._members.keys())
            raise TraceError(
                f"record {self.num_records} and the first differ in {', '.join(odd)}, and {self._path} needs the same "
                f"fields in all records; write a .jsonl, or leave optional fields out (--counts-only)"
            )
        for name, value in row.items():
            file, shape, dtype = self._members[name]
            array = np.ascontiguousarray(value, dtype=dtype)
            if np.shape(value) != shape:
                raise TraceError(
                    f"record {self.num_records}: {name} has shape {list(np.shape(value))}, the first {list(shape)}, "
                    f"and {self._path} needs one shape; write a .jsonl, or leave optional fields out (--counts-only)"
                )
            file.write(array.tobytes())
        self.num_records += 1

    def finish(self, target: Path) -> None:
        meta = self._meta.to_json() | ({"num_ranks": self._num_ranks} if self._num_ranks else {})
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, (file, shape, dtype) in self._members.items():
                file.close()
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(
                        member,
                        {
                            "shape": (self.num_records, *shape),
                            "fortran_order": False,
                            "descr": np.lib.format.dtype_to_descr(dtype),
                        },
                    )
                    with (self._folder / name).open("rb") as rows:
                        while chunk := rows.read(_COPY):
                            member.write(chunk)
            with archive.open("meta.npy", "w") as member:
                np.lib.format.write_array(member, np.array(json.dumps(meta)), allow_pickle=False)


def _archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except ZIP_ERRORS:
        raise TraceError(f"{path} is cut off or not an .npz (no zip directory at its end); copy it again") from None


def _meta(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    if "meta.npy" not in archive.namelist():
        return {}
    member = _Rows(archive, "meta", path)  # one value: its size is checked before it is read
    if member.shape or member.dtype.kind not in "US":
        raise TraceError(f"{path}, key meta: expected JSON text, found {member.dtype} of shape {list(member.shape)}")
    try:
        content = json.loads(member.next(0))
    except (ValueError, RecursionError) as problem:
        raise TraceError(f"{path}, key meta: expected JSON text, found something else ({problem})") from None
    if not isinstance(content, dict):
        raise TraceError(f"{path}, key meta: expected a JSON object, found {content!r:.60}")
    return content
