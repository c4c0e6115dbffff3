"""One copy of a model's weights, packed for the compiled CPU kernels, in a file that all ranks of a host map.

    head     4096 bytes: where the table is, and its hash; written last, so a file that was not finished has none
    experts  of each layer by name, [num_logical, ...], as in a slot (ep/expert_form.py); none where ranks keep theirs
    dense    vectors and scales as they are loaded, then packed weights in the order in which a decoder is built
    table    JSON: what the weights were made from, each tensor's dtype, shape and place, and sums over the bytes before

The file lies on a disk or in memory. A rank that maps it never writes to it, and builds its decoder from matrices on
meta: their shapes alone say which packed weight is whose.
"""

import contextlib
import json
import math
import mmap
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from moe_serve.ep.expert_form import SlotForm
from moe_serve.ep.expert_transfer import Checksum
from moe_serve.errors import ModelError

HEAD_BYTES = 4096
_HEAD = struct.Struct("<24sqq32s")  # mark, place and size of the table, its hash
_MARK = b"moe_serve weights, 2".ljust(24, b"\0")
_PAGE = 4096
_SUMMED, _PIECE = 64 << 20, 1 << 20  # bytes of one sum, and of what of it is read at a time

Experts = dict[int, dict[str, Tensor]]  # of each model layer, by name: [num_logical, ...]


@dataclass(frozen=True)
class Place:
    """A tensor in the file. at: where its bytes begin"""

    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def end(self) -> int:
        return self.at + math.prod(self.shape) * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype), self.dtype
        return dtype

    def view(self, data: Tensor) -> Tensor:
        """Returns the tensor. data: the mapped file, uint8"""
        return data[self.at : self.end].view(self._dtype).view(self.shape)


def _place(shape: Sequence[int], dtype: torch.dtype, behind: int) -> Place:
    """Returns the next place for a tensor, on a page of its own."""
    return Place(str(dtype).removeprefix("torch."), tuple(shape), -(-behind // _PAGE) * _PAGE)


@dataclass(frozen=True)
class ExpertPlaces:
    """Where all experts lie. layers: of each model layer, by name;  end: behind them"""

    layers: Mapping[int, Mapping[str, Place]]
    end: int

    @classmethod
    def of(cls, forms: Mapping[int, SlotForm], num_logical: int) -> "ExpertPlaces":
        """Returns the places of a model's experts. forms: by layer of the model; none where ranks keep their own"""
        layers: dict[int, dict[str, Place]] = {}
        end = HEAD_BYTES
        for layer, form in forms.items():
            layers[layer] = {}
            for name, (shape, dtype) in form.tensors.items():
                layers[layer][name] = place = _place((num_logical, *shape), dtype, end)
                end = place.end
        return cls(layers, end)

    def views(self, data: Tensor) -> Experts:
        """Returns the experts. data: the mapped file"""
        return {
            layer: {name: place.view(data) for name, place in places.items()} for layer, places in self.layers.items()
        }


def map_file(descriptor: int, size: int, writable: bool = False) -> Tensor:
    """Returns the first bytes of a file, [size] uint8, mapped as long as a tensor views them; in huge pages if it can.

    Writing to what is not writable ends the process.
    """
    memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not writable
        return torch.frombuffer(memory, dtype=torch.uint8)


class WeightWriter:
    """Puts dense weights into a new file, behind its experts; a PackedMemory.

    descriptor: of a file with zeros for `size` bytes
    data:       the file as it stays mapped
    """

    def __init__(self, descriptor: int, size: int, experts: ExpertPlaces):
        self.data = map_file(descriptor, size)
        self._descriptor, self._experts, self._end = descriptor, experts, experts.end
        self._writable = map_file(descriptor, size, writable=True)
        self._vectors: dict[str, Place] = {}
        self._packed: list[Place] = []

    def add_vectors(self, vectors: Mapping[str, Tensor]) -> None:
        """Keeps dense tensors that are not packed, as they were loaded."""
        for name, tensor in vectors.items():
            self._vectors[name] = self._take(tensor.shape, tensor.dtype)
            self._vectors[name].view(self._writable).copy_(tensor)

    def pack(self, shape: Sequence[int], weight: Tensor, fill: Callable[[Tensor], object]) -> Tensor:
        place = self._take(shape, weight.dtype)
        fill(place.view(self._writable))
        self._packed.append(place)
        return place.view(self.data)

    def keep(self, rows: Tensor) -> Tensor:
        return self.pack(rows.shape, rows, lambda kept: kept.copy_(rows))

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> Place:
        place = _place(shape, dtype, self._end)
        self._end = place.end
        assert self._end <= len(self.data), f"{self._end} bytes of weights in a file for {len(self.data)}"
        return place

    @property
    def num_bytes(self) -> int:
        """The bytes that are taken."""
        return self._end

    def finish(self, key: str, with_sums: bool) -> None:
        """Writes the table and the head, once all experts are there. with_sums: of a file that outlives its makers"""
        table = {
            "key": key,
            "experts": [[layer, _rows(places)] for layer, places in self._experts.layers.items()],
            "experts_end": self._experts.end,
            "vectors": _rows(self._vectors),
            "packed": [_row(place) for place in self._packed],
            "sums": sums(self.data[: self._end]) if with_sums else [],
        }
        encoded = json.dumps(table).encode()
        os.ftruncate(self._descriptor, self._end)
        os.pwrite(self._descriptor, encoded, self._end)
        head = _HEAD.pack(_MARK, self._end, len(encoded), blake2b(encoded, digest_size=32).digest())
        os.pwrite(self._descriptor, head, 0)


class WeightReader:
    """A finished file as a rank maps it; a PackedMemory, which gives what is packed already.

    Raises ModelError where the file is not one, or is damaged.
    """

    def __init__(self, descriptor: int):
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            raise ModelError("it has no head")
        mark, self._end, table_size, digest = _HEAD.unpack(head)
        if mark != _MARK or not HEAD_BYTES <= self._end <= size - table_size or self._end + table_size != size:
            raise ModelError("it was not finished")
        encoded = os.pread(descriptor, table_size, self._end)
        if blake2b(encoded, digest_size=32).digest() != digest:
            raise ModelError("its table is damaged")
        table: dict[str, Any] = json.loads(encoded)
        self.key: str = table["key"]
        layers = {int(layer): _places(rows) for layer, rows in table["experts"]}
        self.experts = ExpertPlaces(layers, table["experts_end"])
        self._vectors = _places(table["vectors"])
        packed = [_from_row(row) for row in table["packed"]]
        self._packed: Iterator[Place] = iter(packed)
        self._sums: list[list[int]] = table["sums"]
        places = [place for layer in layers.values() for place in layer.values()]
        if any(place.end > self._end for place in (*places, *self._vectors.values(), *packed)):
            raise ModelError("its table names bytes that it has not")
        self.data = map_file(descriptor, self._end)

    def check(self) -> None:
        """Reads all bytes. Raises ModelError where they are not those that were written."""
        if sums(self.data) != self._sums:
            raise ModelError("its bytes are not those that were written")

    def vectors(self) -> dict[str, Tensor]:
        """Returns the dense tensors that are not packed, as they were loaded."""
        return {name: place.view(self.data).clone() for name, place in self._vectors.items()}

    def pack(self, shape: Sequence[int], weight: Tensor, fill: Callable[[Tensor], object]) -> Tensor:
        place = next(self._packed)
        packed = place.view(self.data)
        assert (packed.shape, packed.dtype) == (torch.Size(shape), weight.dtype), f"{place} for {weight.dtype} {shape}"
        return packed

    def keep(self, rows: Tensor) -> Tensor:
        return self.pack(rows.shape, rows, lambda kept: None)


def sums(data: Tensor) -> list[list[int]]:
    """Returns two numbers for each part of the bytes behind the head, by all cores of this process."""
    parts = [data[at : at + _SUMMED] for at in range(HEAD_BYTES, len(data), _SUMMED)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(_sum, parts))


def _sum(part: Tensor) -> list[int]:
    checksum = Checksum()
    for at in range(0, len(part), _PIECE):
        checksum.add(part[at : at + _PIECE])
    return [int(number) for number in checksum.value()]


def _row(place: Place) -> list[Any]:
    return [place.dtype, place.shape, place.at]


def _rows(places: Mapping[str, Place]) -> dict[str, list[Any]]:
    return {name: _row(place) for name, place in places.items()}


def _from_row(row: Sequence[Any]) -> Place:
    return Place(row[0], tuple(row[1]), row[2])


def _places(rows: Mapping[str, Sequence[Any]]) -> dict[str, Place]:
    return {name: _from_row(row) for name, row in rows.items()}
