"""Reads what others wrote: JSON, counts, zips and torch files that may be damaged, huge or hostile.

Every mistake is one line of error that names the file and the place, memory is bounded before it is taken, and nothing
in a file is ever run. A byte order mark in front of UTF-8, as some editors write, is skipped; the depth of JSON is left
to the parsers, which stop before the stack ends. Torch is imported only when a `.pt` file is really read.
"""

import json
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import MAX_EXACT
from moe_serve.errors import MoeServeError, TraceError

MAX_JSON_BYTES = 1 << 28  # 256 MiB: JSON that is not one of the streamed kinds is parsed whole up to this size
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # what UTF-16 text begins with

T = TypeVar("T")
ByteProgress = Callable[[int, int], None]  # (bytes or records read, of them in all)


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Turns the refusal of a value into a TraceError that begins with `where`, the file and the place in it."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as problem:  # TraceError and PlacementError are ValueErrors
        raise TraceError(f"{where}: {problem}") from None


def counted(items: Iterable[T], total: int, progress: ByteProgress | None) -> Iterator[T]:
    """Yields the items, and reports each once the next one is asked for."""
    for number, item in enumerate(items, start=1):
        yield item
        if progress is not None:
            progress(number, total)


def parse_json(text: bytes, where: str, advice: str = "is the file cut off?") -> Any:
    """Returns what a line or an element says. Raises TraceError that begins with `where` and ends with `advice`."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise TraceError(f"{where}: nested too deeply; give a load trace") from None
    except UnicodeDecodeError:
        raise TraceError(f"{where}: not UTF-8 text; save the file as UTF-8") from None
    except msgspec.DecodeError as problem:
        raise TraceError(f"{where}: not JSON ({problem}); {advice}") from None


def read_json(path: Path, error: type[MoeServeError], wanted: str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Returns the content of a JSON file, read whole; a mistake in it is an `error` that names the line.

    wanted: what to give instead of a file that is something else, like "a placement file"
    """
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise error(f"{path} has more than {max_bytes >> 20} MiB, and JSON is read whole; give {wanted}")
    if text.startswith(UTF16_MARKS):
        raise error(f"{path} is UTF-16 text; save it as UTF-8")
    try:
        return json.loads(text.removeprefix(BYTE_ORDER_MARK).decode())
    except json.JSONDecodeError as problem:
        raise error(
            f"{path} line {problem.lineno} column {problem.colno}: not JSON ({problem.msg}); is the file complete, or "
            f"cut off?"
        ) from None
    except UnicodeDecodeError:
        raise error(f"{path} is not UTF-8 text; give {wanted}") from None
    except RecursionError:
        raise error(f"{path}: nested too deeply; give {wanted}") from None
    except ValueError as problem:  # a number of thousands of digits
        raise error(f"{path}: {problem}; give {wanted}") from None


def json_lines(path: Path) -> Iterator[tuple[int, int, Any]]:
    """Yields (line number, bytes read so far, content) of the lines of a file that are not blank."""
    done = 0
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_JSON_BYTES + 1):
            number += 1
            done += len(line)
            where = f"{path} line {number}"
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if len(line) > MAX_JSON_BYTES:
                raise TraceError(f"{where}: more than {MAX_JSON_BYTES >> 20} MiB; not a load record")
            if line.strip():
                cut_off = "the last line is cut off: delete it"
                yield number, done, parse_json(line, where, "is it damaged?" if line.endswith(b"\n") else cut_off)


MAX_TABLE = 1 << 25  # counts of one record and layer ids up to here: 256 MiB of int64, 3,000 layers x 10,000 experts
MAX_LAYER_ID = MAX_EXPERTS = 1 << 16


def as_array(value: Any, where: str, error: type[MoeServeError] = TraceError) -> NDArray[Any]:
    """Returns nested lists, an array or a tensor as an array, without a copy where it is one already.

    Raises `error` that begins with `where`.
    """
    try:
        return np.asarray(value)
    except ValueError:
        raise error(f"{where}: lists of different lengths; is the file mixed up?") from None
    except (TypeError, RuntimeError) as problem:  # a tensor without a numpy type, such as bf16 or a sparse one
        raise error(f"{where}: expected whole numbers ({problem})") from None


def whole_counts(value: Any, where: str, error: type[MoeServeError] = TraceError) -> NDArray[np.int64]:
    """Returns nested lists, an array or a tensor as int64 of any number of dimensions, at least -1 (no expert).

    Fractions are refused: rounding would change what was measured. Raises `error` that begins with `where`.
    """
    array = as_array(value, where, error)
    if array.dtype.kind not in "iuf" and array.size:
        raise error(f"{where}: expected whole numbers, found {value!r:.60}")
    if array.dtype.kind == "f":
        odd = array[~np.isfinite(array) | (array != np.floor(array))]
        if odd.size:
            raise error(
                f"{where}: expected whole numbers, found {odd[0]:g}; a mean is not a count: write the sum over its "
                f"steps"
            )
    if array.size and (array.min() < -1 or array.max() > MAX_EXACT):
        raise error(f"{where}: from {array.min()} to {array.max()}, expected 0 to 2^53; check for overflow")
    return np.asarray(array, dtype=np.int64)


def check_table_size(num_layers: int, num_experts: int, where: str, error: type[MoeServeError] = TraceError) -> None:
    """Refuses layers x experts that no model has, before memory is taken for them."""
    if num_layers * num_experts > MAX_TABLE or num_experts > MAX_EXPERTS:
        raise error(
            f"{where}: {num_layers} layers x {num_experts} experts, expected at most {MAX_EXPERTS} experts and "
            f"{MAX_TABLE} counts a record; is an id in it damaged?"
        )


def check_layer_ids(ids: Iterable[Any], where: str, error: type[MoeServeError] = TraceError) -> None:
    """Refuses what are no ids of layers of a model: other things than numbers, below 0, or beyond any model."""
    for layer in ids:
        if type(layer) is not int or not 0 <= layer < MAX_LAYER_ID:
            raise error(f"{where}: expected layer ids from 0 to {MAX_LAYER_ID - 1}, found {layer!r:.60}")


# A damaged directory, a damaged or encrypted member, a compression that Python does not know, sizes that are not true.
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, RuntimeError,
    LookupError, OverflowError,
)  # fmt: skip


def zip_names(path: Path) -> list[str] | None:
    """Returns the names of a zip's members; None = the directory at its end is missing or damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except ZIP_ERRORS:
        return None


MAX_TORCH_BYTES = 1 << 30  # 1 GiB: what a `.pt` may weigh before it has to be converted first


def is_torch_file(path: Path) -> bool:
    """Returns whether a file is one that `torch.save` wrote, by content: a zip with a data.pkl, or the older format."""
    with path.open("rb") as file:
        head = file.read(16)
    if head[:4] == b"PK\x03\x04":
        names = zip_names(path)
        if names is None:
            return path.suffix in (".pt", ".pth", ".bin")
        return any(name.endswith("/data.pkl") or name == "data.pkl" for name in names)
    # The older format begins with its magic number as protocol 2: PROTO 2, LONG1 of 10 bytes.
    return head[:4] == b"\x80\x02\x8a\x0a"


def load_torch_file(
    path: Path, error: type[MoeServeError], max_bytes: int = MAX_TORCH_BYTES
) -> Any:  # tensors in plain containers
    """Returns the content of a `.pt` file: tensors on the CPU in dicts, lists and numbers.

    Raises `error`: too large, truncated, torch not installed, or a file that carries code.
    """
    size = max(path.stat().st_size, _unpacked_bytes(path))
    if size > max_bytes:
        raise error(
            f"{path} has {size / 2**30:.2f} GiB and a .pt is read whole, up to {max_bytes / 2**30:.2f} GiB; "
            f"convert it once on a machine with that much memory: "
            f"moe-serve convert {path} {path.with_suffix('.npz').name} --max-pt-gib {-(-size // 2**30)}"
        )
    try:
        import torch
    except ImportError:
        raise error(
            f"{path} is a torch file and torch is not installed here; install torch, or convert it where torch is: "
            f"moe-serve convert {path} {path.with_suffix('.npz').name}"
        ) from None
    # The name of an exception, nothing more: what weights_only=True raises when a file asks for a call.
    from pickle import UnpicklingError

    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except UnpicklingError as problem:
        reason = str(problem)
        if "GLOBAL" in reason or "Unsupported" in reason or "allowed global" in reason:
            wanted = next((word.rstrip(".,") for word in reason.split() if "." in word and word[0].isalpha()), "a call")
            raise error(
                f"{path} carries code (it asks for {wanted}) and is refused; only tensors in dicts, lists and numbers "
                f"are read; write the dump again with the engine's own recorder"
            ) from None
        raise error(f"{path} is not a complete torch file ({_first_line(reason)}); copy or dump it again") from None
    except (*ZIP_ERRORS, TypeError, AttributeError, AssertionError, RecursionError, MemoryError) as problem:
        raise error(
            f"{path} is not a complete torch file ({_first_line(str(problem))}); copy or dump it again"
        ) from None
    _refuse_stretched(content, path, error)
    return content


def _refuse_stretched(content: Any, path: Path, error: type[MoeServeError]) -> None:
    """Refuses tensors that repeat few stored values over a large shape: they would unfold in memory."""
    left, seen = [content], set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif hasattr(value, "untyped_storage") and str(value.layout) == "torch.strided":
            claimed, held = value.numel() * value.element_size(), value.untyped_storage().nbytes()
            if claimed > held:
                raise error(
                    f"{path}: a tensor of shape {list(value.shape)} claims {claimed} bytes and holds {held}; save it "
                    f"with .contiguous()"
                )


def _unpacked_bytes(path: Path) -> int:
    """Returns what the members of a zip weigh unpacked; 0 for the older format. torch.save does not compress."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(member.file_size for member in archive.infolist())
    except ZIP_ERRORS:
        return 0


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:160] if text.strip() else "nothing readable"
