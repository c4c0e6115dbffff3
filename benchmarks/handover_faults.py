"""Hand-overs between processes while their memory is damaged and their ranks are killed and stopped.

    python -m benchmarks.handover_faults [--faults 2000] [--ranks 1+1,1+2,2+2] [--every 100] [--add]

Serves a tiny model by `moe-serve serve` with prefill and decode ranks of one thread each, and keeps four requests open,
greedy and sampled. One fault for each request, into the shared memory: a flipped bit, a torn page, a record twice, one
under a foreign key, all records away. Every --every requests a prefill rank is killed (it is started again), stopped
for longer than engine.suspect_after_s, or a decode rank is killed. Every output is compared with that of a system of
one rank. At the end all blocks must be free, and no request open. --add: goes on behind the requests of the table that
is there, and writes the sums of both, so that a long run may come in portions.

tests/attention_dp/test_page_channel.py has the same in one process, where writers of other weights and late ones can be
played exactly, and mutants that skip a check.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.bench_model import write_bench_model
from benchmarks.conditions import RESULTS, conditions, save, saved_as
from moe_serve.attention_dp.page_channel import RECORD_BYTES
from moe_serve.attention_dp.page_record import HEAD
from tests.launcher.running import Running, eventually

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # layers, keys and values, heads, values, bytes, tokens of a block
HANDOVER_GB = 0.002
PROCESS = ("prefill rank killed", "prefill rank stopped", "decode rank killed")


class Memory:
    """The memory of the prefill ranks, as a foreign process sees it."""

    def __init__(self, launcher: int):
        self._maps = []
        for link in Path(f"/proc/{launcher}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "moe_serve_pages" in os.readlink(link):
                    with open(link, "r+b") as opened:
                        self._maps.append(np.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=np.uint8))

    def damage(self, draw: random.Random) -> str:
        """Does one kind of damage to records that are in use; returns which."""
        kind = draw.choice(("bit", "torn page", "twice", "foreign key", "records away"))
        memory = draw.choice(self._maps)
        num_slots = (memory.nbytes - mmap.PAGESIZE) // (RECORD_BYTES + PAGE_BYTES)
        records = memory[: num_slots * RECORD_BYTES].reshape(-1, RECORD_BYTES)
        first = -(-records.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = memory[first : first + num_slots * PAGE_BYTES].reshape(-1, PAGE_BYTES)
        used = np.flatnonzero(records[:, 8:16].any(axis=1))
        for slot in draw.sample(used.tolist(), min(len(used), 20)):
            if kind == "bit":
                row = draw.choice((records[slot, : HEAD.size + 4], pages[slot]))
                row[draw.randrange(len(row))] ^= 1 << draw.randrange(8)
            elif kind == "torn page":
                pages[slot, PAGE_BYTES // 2 :] = pages[(slot + 1) % num_slots, PAGE_BYTES // 2 :]
            elif kind == "twice":
                other = draw.randrange(num_slots)
                records[other], pages[other] = records[slot], pages[slot]
            elif kind == "foreign key":
                records[slot, HEAD.size - 32 : HEAD.size] = np.frombuffer(draw.randbytes(32), dtype=np.uint8)
            else:
                records[slot] = 0
        return kind


def body_of(number: int) -> dict[str, Any]:
    """Returns a request: some prompts begin alike, every second one is sampled."""
    draw = random.Random(number)
    prompt = draw.choice(([], [9] * 64)) + draw.choices(range(3, 500), k=draw.randrange(40, 300))
    params = {"max_new_tokens": 12, "ignore_eos": True, "temperature": float(number % 2), "sampling_seed": number}
    return {"input_ids": prompt, "sampling_params": params}


def ask(client: httpx.Client, number: int) -> list[int] | None:
    """Returns the tokens of a request; None: it ended with an error, as where all decode ranks are gone for long."""
    answer = client.post("/generate", json=body_of(number))
    return list(answer.json()["output_ids"]) if answer.status_code == 200 else None


def strike(kind: str, info: dict[str, Any], draw: random.Random) -> None:
    """Kills a rank, or stops one for longer than it may be silent."""
    ranks = info["ranks"] if kind.startswith("decode") else info["prefill"]["ranks"]
    pids = [rank["pid"] for rank in ranks if rank.get("pid")]
    if not pids:
        return
    pid = draw.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if kind.endswith("killed") else signal.SIGSTOP)
        if kind.endswith("stopped"):
            time.sleep(5)
            os.kill(pid, signal.SIGCONT)


def is_idle(info: dict[str, Any]) -> bool:
    """Returns whether no request is open, and every block of every rank is free."""
    ranks = [*info["ranks"], *info["prefill"]["ranks"]]
    statuses = [rank["status"] for rank in ranks if rank.get("status")]
    are_free = [each["num_free_blocks"] == each["num_blocks"] and not each["num_running"] for each in statuses]
    return info["requests"]["open"] == 0 and bool(are_free) and all(are_free)


class Fates:
    """What became of pages, by reason, over all starts of the ranks: a rank counts from 0 again when it is started.

    Reads the metrics while it is open; ranks report once a second, so what a killed one did in its last second lacks.
    """

    def __init__(self, client: httpx.Client):
        self._client = client
        self._seen, self._before = Counter[str](), Counter[str]()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Fates":
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
        for name, number in (self._seen + self._before).items():
            found[name.split('fate="')[1].split('"')[0]] += number
        return found

    def _watch(self) -> None:
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


def play(ranks: str, numbers: range, every: int, model: Path, right: Callable[[int], list[int]]) -> dict[str, Any]:
    """Serves requests with these ranks under faults, and returns a row of the table."""
    num_prefill, num_decode = ranks.split("+")
    flags = [
        "serve", "--model", str(model), "--skip-tokenizer-init", "--prefill-ranks", num_prefill,
        "--decode-ranks", num_decode, "--port", "0", "--device", "cpu", "--set=parallel.threads_per_rank=1",
        "--set=parallel.prefill_from_tokens=1", f"--set=parallel.handover_gb={HANDOVER_GB}",
        "--set=launcher.max_restarts=1000",
    ]  # fmt: skip
    draw, faults, lock = random.Random(f"{ranks} {numbers[0]}"), Counter[str](), threading.Lock()

    def note(kind: str) -> None:
        with lock:
            faults[kind] += 1

    with Running("moe_serve", flags) as running, running.client(timeout_s=300) as client:

        def info() -> dict[str, Any]:
            found: dict[str, Any] = client.get("/server_info").json()
            return found

        memory = Memory(running.process.pid)

        def one(number: int) -> str:
            if number % every == every - 1:
                kind = PROCESS[number // every % len(PROCESS)]
                strike(kind, info(), draw)
                note(kind)
            damaging = threading.Timer(0.02, lambda: note(memory.damage(draw)))
            damaging.start()
            try:
                got = ask(client, number)
            except httpx.TimeoutException:
                return "no end"
            finally:
                damaging.join()
            return "5xx" if got is None else "right" if got == right(number) else "wrong"

        with Fates(client) as watched:
            with ThreadPoolExecutor(4) as pool:
                ended = list(pool.map(one, numbers))
            are_free = eventually(lambda: is_idle(info()), 60)
        fates = watched.totals()
    return {
        "prefill + decode ranks": ranks,
        "requests": len(numbers),
        "faults": sum(faults.values()),
        "wrong outputs": ended.count("wrong"),
        "answered 5xx": ended.count("5xx"),
        "streams without an end": ended.count("no end"),
        "all blocks free": are_free,
        "pages handed over": fates["from_prefill"],
        "recomputed, by reason": _in_words(Counter({name: n for name, n in fates.items() if name != "from_prefill"})),
        "kinds": _in_words(faults),
    }


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items()) if number)


def _sum(one: Any, other: Any) -> Any:
    """Returns the sum of two cells: of numbers, of counts in words; True only if both are."""
    if isinstance(one, bool):
        return one and other
    if not isinstance(one, str):
        return one + other
    counts = Counter[str]()
    for part in filter(None, [*one.split(", "), *other.split(", ")]):
        name, _, number = part.rpartition(" ")
        counts[name] += int(number)
    return _in_words(counts)


def added(before: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the sums of two of the same ranks."""
    return {name: row[name] if name.startswith("prefill +") else _sum(before[name], row[name]) for name in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--ranks", default="1+1,1+2,2+2")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--add", action="store_true")
    args = parser.parse_args()
    facts, ways = conditions(), args.ranks.split(",")
    name = "handover_faults"
    kept = RESULTS / f"{saved_as(name, facts, per_cpu=True)}.json"
    known = {row["prefill + decode ranks"]: row for row in json.loads(kept.read_text())["rows"]} if args.add else {}
    firsts = {ranks: known[ranks]["requests"] if ranks in known else 0 for ranks in ways}
    numbers = {ranks: range(first, first + args.faults // len(ways)) for ranks, first in firsts.items()}
    with tempfile.TemporaryDirectory() as scratch:
        model = write_bench_model(Path(scratch), max_position_embeddings=1024, **SIZES)
        alone = ["serve", "--model", str(model), "--skip-tokenizer-init", "--ep", "1", "--port", "0", "--device", "cpu"]
        with Running("moe_serve", alone) as running, running.client(timeout_s=300) as client:
            outputs = {number: ask(client, number) or [] for number in sorted(set().union(*numbers.values()))}
        for ranks in ways:
            row = play(ranks, numbers[ranks], args.every, model, outputs.__getitem__)
            known[ranks] = added(known[ranks], row) if ranks in known else row
    notes = (
        "Requests that were open when the only decode rank was killed wait until it is started again; those that come "
        "meanwhile get 503. Without an end: within 300 s. Pages and reasons are of all starts of the ranks, but "
        "for the last second of a rank that was killed."
    )
    print(save(name, "Hand-overs under faults", list(known.values()), facts, notes, per_cpu=True))


if __name__ == "__main__":
    main()
