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

from moe_serve.attention_dp.page_channel import RECORD_BYTES
from moe_serve.attention_dp.page_record import HEAD

_AT_ONCE = 20  # records or files that one fault damages


class Memory:
    """The memory of the prefill ranks, as a foreign process sees it."""

    def __init__(self, launcher: int, page_bytes: int):
        """launcher: its process, which has the memory open"""
        self._page_bytes = page_bytes
        self._maps = []
        for link in Path(f"/proc/{launcher}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "moe_serve_pages" in os.readlink(link):
                    with open(link, "r+b") as opened:
                        self._maps.append(np.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=np.uint8))

    def damage(self, kind: str, draw: random.Random) -> bool:
        """Does one kind of damage to records that are in use; returns whether there were any."""
        memory = draw.choice(self._maps)
        num_slots = (memory.nbytes - mmap.PAGESIZE) // (RECORD_BYTES + self._page_bytes)
        records = memory[: num_slots * RECORD_BYTES].reshape(-1, RECORD_BYTES)
        first = -(-(records.nbytes + 16) // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = memory[first : first + num_slots * self._page_bytes].reshape(-1, self._page_bytes)
        used = np.flatnonzero(records[:, 8:16].any(axis=1)).tolist()
        for slot in draw.sample(used, min(len(used), _AT_ONCE)):
            match kind:
                case "flipped bit":
                    row = draw.choice((records[slot, : HEAD.size + 4], pages[slot]))
                    row[draw.randrange(len(row))] ^= 1 << draw.randrange(8)
                case "torn page":
                    half = self._page_bytes // 2
                    pages[slot, half:] = pages[(slot + 1) % num_slots, half:]
                case "record twice":
                    other = draw.randrange(num_slots)
                    records[other], pages[other] = records[slot], pages[slot]
                case "foreign key":
                    records[slot, HEAD.size - 32 : HEAD.size] = np.frombuffer(draw.randbytes(32), dtype=np.uint8)
                case "foreign page":
                    pages[slot] = pages[draw.choice(used)]
                case "records away":
                    records[slot] = 0
                case _:
                    raise ValueError(kind)
        return bool(used)


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
