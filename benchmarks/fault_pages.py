"""What can be done to pages on their way between ranks and in tiers, for benchmarks/handover_faults.py."""

import contextlib
import mmap
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from moe_serve.attention_dp.host_pages import PAGE_AT, slot_bytes
from moe_serve.attention_dp.page_record import HEAD, HEADER_BYTES, KEY_AT, PageForm, checksum_of
from moe_serve.attention_dp.page_ring import PageRing
from moe_serve.attention_dp.prefix_cache import KEY_BYTES

_AT_ONCE = 20  # records or files that one fault damages
_NEW_S = 0.5  # for which a fault waits for the pages that it damages


class Memory:
    """Memory of pages, as a foreign process sees it: that of prefill ranks, and what the ranks of a host keep."""

    def __init__(self, launcher: int, form: PageForm, host_bytes: int):
        """launcher: its process, which has the memory open;  host_bytes: of `cache.host_gb`"""
        self._form = form
        self._rings = []
        self._slots = np.zeros((0, slot_bytes(form.num_bytes)), dtype=np.uint8)
        self._late: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] = []  # records and pages of before
        for link in Path(f"/proc/{launcher}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "moe_serve_pages" not in os.readlink(link):
                    continue
                with open(link, "r+b") as opened:
                    if (size := os.fstat(opened.fileno()).st_size) == host_bytes:
                        kept = np.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=np.uint8)
                        width = self._slots.shape[1]
                        self._slots = kept[: size // width * width].reshape(-1, width)
                    else:
                        self._rings.append(PageRing(opened.fileno(), form.num_bytes, writes=True))

    def damage(self, kind: str, draw: random.Random) -> bool:
        """Does one kind of damage to pages that are handed over; returns whether there were any within _NEW_S.

        It comes as soon as they are written, since their readers are not far behind.
        """
        before, until_s = [ring.fields.copy() for ring in self._rings], time.monotonic() + _NEW_S
        while time.monotonic() < until_s:
            for ring, seen in zip(self._rings, before, strict=True):
                now = ring.fields.copy()
                new = np.flatnonzero((now != seen) & (now["number"] != 0))[:_AT_ONCE].tolist()
                if new:
                    self._strike(kind, ring, new, draw)
                    return True
            time.sleep(0.0002)
        return False

    def _strike(self, kind: str, ring: PageRing, new: list[int], draw: random.Random) -> None:
        """Damages these slots."""
        late, self._late = self._late, [(ring.records[slot].copy(), ring.pages[slot].copy()) for slot in new]
        for at, slot in enumerate(new):
            record, page = ring.records[slot], ring.pages[slot]
            other = draw.choice([each for each in range(ring.num_slots) if each != slot])
            match kind:
                case "flipped bit":
                    row = draw.choice((record[: HEAD.size + 4], page))
                    row[draw.randrange(len(row))] ^= 1 << draw.randrange(8)
                case "torn page":
                    half = len(page) // 2
                    page[half:] = ring.pages[other, half:]
                case "record twice":
                    ring.records[other], ring.pages[other] = record, page
                case "foreign page":  # the key that is asked for, not the checksum
                    page[:] = ring.pages[other]
                case "foreign key":  # the checksum of what lies there, not the key
                    record[KEY_AT : HEAD.size] = np.frombuffer(draw.randbytes(KEY_BYTES), dtype=np.uint8)
                    _sum_anew(record, page)
                case "foreign page and key":
                    record[KEY_AT : HEAD.size] = ring.records[other, KEY_AT : HEAD.size]
                    page[:] = ring.pages[other]
                    _sum_anew(record, page)
                case "late record":
                    if late:
                        record[:], page[:] = late[at % len(late)]
                case "record away":
                    record[:] = 0
                case _:
                    raise ValueError(kind)

    def damage_kept(self, kind: str, draw: random.Random) -> bool:
        """Does one kind of damage to pages that the ranks of a host keep; returns whether there were any."""
        rows = self._slots[:, PAGE_AT - HEADER_BYTES : PAGE_AT + self._form.num_bytes]
        used = np.flatnonzero(self._slots[:, :8].any(axis=1)).tolist()
        for slot in draw.sample(used, min(len(used), _AT_ONCE)):
            row, other = rows[slot], rows[draw.choice(used)]
            match kind:
                case "flipped bit in memory of a host":
                    row[draw.randrange(len(row))] ^= 1 << draw.randrange(8)
                case "torn page in memory of a host":
                    half = len(row) // 2
                    row[half:] = other[half:]
                case "another page in memory of a host":  # where the key that is asked for seems to be
                    begins_with = row[KEY_AT : KEY_AT + 8].copy()
                    row[:] = other
                    row[KEY_AT : KEY_AT + 8] = begins_with
                    _sum_anew(row[:HEADER_BYTES], row[HEADER_BYTES:])
                case _:
                    raise ValueError(kind)
        return bool(used)


def _sum_anew(record: npt.NDArray[np.uint8], page: npt.NDArray[np.uint8]) -> None:
    """Writes the right checksum of a record and its page."""
    number = checksum_of(record[: HEAD.size].tobytes(), page.data)
    record[HEAD.size : HEAD.size + 4] = np.frombuffer(number.to_bytes(4, "little"), dtype=np.uint8)


def damage_files(path: Path, kind: str, draw: random.Random) -> bool:
    """Does one kind of damage to files of pages; returns whether there were any. path: cache.path"""
    files = sorted(path.glob("*/*.page"))
    for file in draw.sample(files, min(len(files), _AT_ONCE)):
        with contextlib.suppress(FileNotFoundError):  # a rank has removed it meanwhile
            size = file.stat().st_size
            match kind:
                case "truncated file":
                    os.truncate(file, draw.randrange(size) if size else 0)
                case "torn file":
                    other = draw.choice(files).read_bytes()
                    with open(file, "r+b") as opened:
                        opened.seek(size // 2)
                        opened.write(other[size // 2 :])
                case "flipped bit in a file":
                    with open(file, "r+b") as opened:
                        opened.seek(at := draw.randrange(max(1, size)))
                        byte = opened.read(1) or b"\0"
                        opened.seek(at)
                        opened.write(bytes([byte[0] ^ 1 << draw.randrange(8)]))
                case "another page's file":
                    other = draw.choice(files).read_bytes()
                    file.write_bytes(other)
                case _:
                    raise ValueError(kind)
    return bool(files)


class Fates:
    """What became of pages, by reason, over all starts of the ranks: a rank counts from 0 again when it is started.

    Reads the metrics while it is open; ranks report once a second, so what a killed one did in its last second lacks.
    """

    def __init__(self, client: httpx.Client, network: Callable[[], AbstractContextManager[Any]]):
        """network: where connections are made"""
        self._client, self._network = client, network
        self._seen, self._before = Counter[str](), Counter[str]()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Fates":
        self._look()
        self._before.subtract(self._seen)  # what was before does not count
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        time.sleep(1.5)  # the last report of each rank
        self._look()

    def totals(self) -> Counter[str]:
        """Returns how many pages had each fate."""
        found = Counter[str]()
        for name in self._seen:
            found[name.split('fate="')[1].split('"')[0]] += self._seen[name] + self._before[name]
        return +found

    def _watch(self) -> None:
        with self._network():
            while not self._closing.wait(0.3):
                with contextlib.suppress(httpx.HTTPError):
                    self._look()

    def _look(self) -> None:
        for line in self._client.get("/metrics").text.splitlines():
            if line.startswith("moe_serve_rank_cache_pages_total{"):
                name, value = line.rsplit(" ", 1)
                if float(value) < self._seen[name]:
                    self._before[name] += self._seen[name]
                self._seen[name] = int(float(value))
