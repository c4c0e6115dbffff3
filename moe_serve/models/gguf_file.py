"""Reads the header of a GGUF file, the format of llama.cpp: its metadata, and where its tensors lie.

The format is described by ggml (its page gguf.md): magic and version, key/value pairs, a list of tensors, then their
bytes behind padding. A model may be split over several files, of which the first has the metadata.

It is read here rather than by the `gguf` package, whose reader makes an array object of every string: it took 13 s and
500 MB for a vocabulary of 150,000 tokens, and each rank reads headers several times. Tests compare both. The file may
be hostile: every count and size is held against the bytes that are there before anything is made of it.
"""

import math
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moe_serve.errors import ModelError
from moe_serve.models.model_files import regular_size, shown
from moe_serve.models.stored_tensor import StoredTensor

# Types of tensors by their number in the format: name, numbers in a block of a row, bytes of a block.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    28: ("F64", 1, 8),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
_NOT_READ = {
    10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4",
}  # fmt: skip

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LARGEST_HEADER = 512 << 20  # bytes; vocabularies of 260,000 tokens take about 15 MB
_READ_AT_ONCE = 4 << 20
_MOST_DIMENSIONS = 4
_DEFAULT_ALIGNMENT, _LARGEST_ALIGNMENT = 32, 1 << 20
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_AGAIN = "download the file again"


@dataclass(frozen=True)
class GgufHeader:
    """metadata: by key; arrays are lists;  tensors: by name, of all parts"""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path, lists: Collection[str] = ()) -> GgufHeader:
    """Returns the header of a model, which may be split over several files.

    lists: keys whose lists of texts are read, such as the tokens; in place of others is the number of their texts
    Raises ModelError, naming the file, for one that is damaged, of an unknown kind, or not whole.
    """
    header, *others = (_Reader(part, lists).header() for part in gguf_files(path))
    tensors = dict(header.tensors)
    for other in others:
        for name, tensor in other.tensors.items():
            if name in tensors:
                raise ModelError(f"tensor {shown(name)[1:-1]} is in two parts of {path.name}; remove one of them")
            tensors[name] = tensor
    wanted = header.metadata.get("split.tensors.count", len(tensors))
    if others and wanted != len(tensors):
        raise ModelError(f"{path}: its parts hold {len(tensors)} tensors, and {shown(wanted)} belong to it; {_AGAIN}")
    return GgufHeader(path, header.metadata, tensors)


def gguf_files(path: Path) -> list[Path]:
    """Returns the files of a model by its first one: itself, or all parts. Raises ModelError for those missing."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    name, number, count = found[1], int(found[2]), int(found[3])
    if number != 1 or count < 1:
        raise ModelError(f"{path}: is part {number} of {count}; give the first, {name}-00001-of-{found[3]}.gguf")
    parts = [path.with_name(f"{name}-{part:05}-of-{found[3]}.gguf") for part in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.exists()]:
        raise ModelError(f"{path}: {len(missing)} of its parts are missing ({', '.join(missing[:4])}); download them")
    return parts


def header_and_size(path: Path) -> tuple[bytes, int]:
    """Returns the bytes of one file before its tensors, behind magic and version, and the size of the file."""
    reader = _Reader(path)
    reader.header()
    return bytes(reader.data[8 : reader.at]), reader.size


class _Reader:
    """Reads one file's header from its beginning. at: the place behind what has been read"""

    def __init__(self, path: Path, lists: Collection[str] = ()):
        self.path = path
        self.data = bytearray()
        self.at = 0
        self.size = 0
        self._lists = lists
        self._file: IO[bytes]

    def header(self) -> GgufHeader:
        try:
            self.size = regular_size(self.path, "give a GGUF file")
            with self.path.open("rb") as self._file:
                return self._header()
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read ({error.strerror}); give a GGUF file") from None

    def _header(self) -> GgufHeader:
        if self.size < 4 or self._take(4) != _MAGIC:
            raise ModelError(
                f"{self.path}: is not a GGUF file; give one, or the folder of a Hugging Face model (its config.json "
                "and *.safetensors)"
            )
        version = self._scalar("I")
        if version not in _VERSIONS:
            swapped = struct.unpack(">I", struct.pack("<I", version))[0] in _VERSIONS
            kind = "big-endian numbers" if swapped else f"version {version} of GGUF"
            raise ModelError(f"{self.path}: has {kind}; read are versions 2 and 3 in little-endian: convert it again")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        for count, least_bytes, what in ((num_tensors, 32, "tensors"), (num_values, 13, "key/value pairs")):
            if count * least_bytes > self.size:
                raise self._damaged(f"{count} {what} in {self.size} bytes")
        metadata = dict(self._values(num_values))
        if len(metadata) != num_values:
            raise self._damaged("a key is there twice")
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {shown(alignment)}, expected a power of two")
        found = [self._tensor(alignment) for _ in range(num_tensors)]
        self._take(min(-self.at % alignment, self.size - self.at))
        tensors = {name: self._placed(name, dtype, shape, *place) for name, dtype, shape, *place in found}
        if len(tensors) != num_tensors:
            raise self._damaged("a tensor is there twice")
        self._check_no_overlap(tensors)
        return GgufHeader(self.path, metadata, tensors)

    def _values(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            key, kind = self._string(), self._scalar("I")
            if kind == _STRING:
                yield key, self._string()
            elif kind == _ARRAY:
                yield key, self._array(key)
            elif kind in _SCALARS:
                yield key, self._scalar(_SCALARS[kind])
            else:
                raise self._damaged(f"a value of the unknown kind {kind} at {shown(key)}")

    def _array(self, key: str) -> list[Any] | int:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._strings(key, count) if key in self._lists else self._skip_strings(key, count)
        if kind not in _SCALARS:
            raise self._damaged(f"a list of the unknown kind {kind} at {shown(key)}")
        form = _SCALARS[kind]
        num_bytes = count * struct.calcsize(form)
        if num_bytes > self.size - self.at:
            raise self._damaged(f"a list of {count} numbers at {shown(key)}")
        return list(struct.unpack(f"<{count}{form}", self._take(num_bytes)))

    def _strings(self, key: str, count: int) -> list[str]:
        if count * 8 > self.size - self.at:
            raise self._damaged(f"a list of {count} texts at {shown(key)}")
        return [self._string() for _ in range(count)]

    def _skip_strings(self, key: str, count: int) -> int:
        """Passes over a list of texts: in one loop, since lists of 150,000 are passed by every rank."""
        if count * 8 > self.size - self.at:
            raise self._damaged(f"a list of {count} texts at {shown(key)}")
        at, end = self.at, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                end = self._fill(at + 8)
            at += 8 + length_at(self.data, at)[0]
            if at > end:
                end = self._fill(at)
        self.at = at
        return count

    def _tensor(self, alignment: int) -> tuple[str, str, tuple[int, ...], int, int]:
        """Returns name, type, shape, offset behind the header and number of bytes."""
        name, num_dimensions = self._string(), self._scalar("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"tensor {shown(name)} has {num_dimensions} dimensions")
        sizes = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions))
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in GGML_TYPES:
            known = f"{_NOT_READ[kind]} ({kind})" if kind in _NOT_READ else f"the unknown type {kind}"
            read = ", ".join(sorted(type_name for type_name, *_ in GGML_TYPES.values()))
            raise ModelError(
                f"{self.path}: tensor {shown(name)} is of {known}, which is not read; read are {read}: take a file "
                "quantised to one of these, such as Q4_K_M or Q8_0"
            )
        type_name, block, block_bytes = GGML_TYPES[kind]
        if not all(1 <= size < 2**40 for size in sizes) or math.prod(sizes) >= 2**50:
            raise self._damaged(f"tensor {shown(name)} of shape {list(reversed(sizes))}")
        if sizes[0] % block:
            raise self._damaged(f"tensor {shown(name)} has rows of {sizes[0]} in blocks of {block} ({type_name})")
        if offset % alignment:
            raise self._damaged(f"tensor {shown(name)} is at {offset}, which is no multiple of {alignment}")
        return name, type_name, tuple(reversed(sizes)), offset, math.prod(sizes) // block * block_bytes

    def _placed(self, name: str, dtype_name: str, shape: tuple[int, ...], offset: int, num_bytes: int) -> StoredTensor:
        start = self.at + offset
        if start + num_bytes > self.size:
            raise ModelError(
                f"{self.path}: is {self.size} bytes, tensor {shown(name)} needs {start + num_bytes}; {_AGAIN}"
            )
        return StoredTensor(self.path, dtype_name, shape, start, num_bytes)

    def _check_no_overlap(self, tensors: dict[str, StoredTensor]) -> None:
        end, last = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda each: each[1].start):
            if tensor.start < end:
                raise self._damaged(f"{shown(last)} and {shown(name)} share bytes")
            end, last = tensor.start + tensor.num_bytes, name

    def _string(self) -> str:
        length = self._scalar("Q")
        if length > self.size - self.at:
            raise self._damaged(f"a text of {length} bytes")
        return self._take(length).decode("utf-8", "replace")

    def _scalar(self, form: str) -> Any:
        data = self._take(struct.calcsize(form))
        return struct.unpack("<" + form, data)[0]

    def _take(self, num_bytes: int) -> bytes:
        end = self.at + num_bytes
        if end > len(self.data):
            self._fill(end)
        taken = bytes(self.data[self.at : end])
        self.at = end
        return taken

    def _fill(self, end: int) -> int:
        """Reads on, at least up to `end`; returns how far. Raises ModelError where the file ends before."""
        if end > self.size:
            raise ModelError(f"{self.path}: is {self.size} bytes and ends in its header; {_AGAIN}")
        if end > _LARGEST_HEADER:
            raise self._damaged(f"more than {_LARGEST_HEADER} bytes")
        self.data += self._file.read(max(end - len(self.data), _READ_AT_ONCE))
        if end > len(self.data):
            raise ModelError(f"{self.path}: became shorter while it was read; {_AGAIN}")
        return len(self.data)

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: has a damaged GGUF header ({what}); {_AGAIN}")
