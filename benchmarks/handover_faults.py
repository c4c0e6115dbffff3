"""Hand-overs between processes while memory, files, disk, ranks and cables fail: outputs, blocks and streams behind it.

    python -m benchmarks.handover_faults [--ranks 1+1,1+2,2+2] [--faults "flipped bit=120,cut link=6"] [--add]

Serves a tiny model by `moe-serve serve` with prefill and decode ranks of one thread each, and keeps four requests open,
greedy and sampled. Each kind of fault is played by itself, so many times, and has its row: what does damage to memory
or files comes once for each request, while it runs; ranks are killed and stopped, disks filled and cables cut one after
the other, each once all ranks serve again. Every output is compared with that of a system of one rank. Behind each kind
no request may be open, and no block held. Not every strike meets a reader: what readers counted is in the table, too.

`files of other weights` plays a prefill rank with other weights, too. Faults of files are played on a disk of 16 MB, a
tmpfs, which needs root; `cut link` has each role on a host of its own, two network namespaces: root and `ip netns`.

`bad network between hosts` has engines of two ranks that pretend to be on different hosts and take each other's pages
by a relay that flips, repeats and cuts (tests/engine/bad_network.py); of its strikes those are counted that were met.

--add: goes on behind the requests of the table that is there, and writes the sums of both, so that a long run may come
in portions.

tests/attention_dp/test_page_channel.py has the same in one process, where late writers and those of other weights can
be played exactly, and mutants that skip a check.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from benchmarks.bench_model import write_bench_model
from benchmarks.conditions import RESULTS, conditions, save, saved_as
from benchmarks.fault_pages import Fates, Memory, damage_files
from moe_serve.attention_dp.page_record import PageForm
from moe_serve.attention_dp.request import SamplingParams
from tests.engine.bad_network import ask_later_over_a_bad_network, on_two_hosts
from tests.engine.offline import prompts_with_shared_beginnings, submits_of, tiny_model
from tests.engine.offline import serve as serve_offline
from tests.launcher.hosts import Host, make_hosts, set_cable
from tests.launcher.running import Running, eventually

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
PAGE = PageForm(layers=2, tokens=16, num_bytes=2 * 2 * 2 * 16 * 4 * 16)  # … × keys and values, heads, values, bytes
NUM_OPEN = 4
ANSWER_S = 300.0  # a request that takes longer has no end
WHOLE_S = 240.0  # for all ranks to serve again
_DISK_MB, _QUOTA_GB = 16, 0.004  # of which some prompts' pages fit
_NUM_PROMPTS, _PROMPT_TOKENS = 24, 300  # of the faults of files: together larger than a cache, each comes again
_NUM_CACHE_BLOCKS = 96
_STOPPED_S, _CUT_S = 5.0, (6.0, 0.5)  # engine.suspect_after_s lies between
_HOST_GB = 0.008
_OFFLINE = (
    "model.load_format=dummy", "cache.num_blocks=40", "cache.block_size=4", "engine.max_batch_tokens=24",
    "engine.max_running_requests=3",
)  # fmt: skip
_KINDS = 100_000  # numbers of requests of one kind of fault

# fmt: off
MEMORY = (
    "flipped bit", "torn page", "record twice", "foreign key", "foreign page", "foreign page and key", "late record",
    "record away",
)
HOST = (
    "flipped bit in memory of a host", "torn page in memory of a host", "another page in memory of a host"
)
# fmt: on
PROCESS = ("prefill rank killed", "decode rank killed", "prefill rank stopped", "decode rank stopped")
FILES = ("flipped bit in a file", "torn file", "truncated file", "another page's file")
DISK, LINK, WEIGHTS, OLD_FILES = "full disk", "cut link", "prefill rank with other weights", "files of other weights"
NETWORK = "bad network between hosts"
KINDS = (*MEMORY, *HOST, NETWORK, *PROCESS, *FILES, DISK, LINK, WEIGHTS, OLD_FILES)
# What a reader counts that met such a fault. A record that is away or of before is not found.
_DAMAGE, _ABSENCE = ("checksum", "version"), ("late", "peer_lost")
MET_AS = {
    **dict.fromkeys((*MEMORY, *HOST, *FILES, OLD_FILES, WEIGHTS), _DAMAGE), NETWORK: (*_DAMAGE, "peer_lost"),
    **dict.fromkeys(("late record", "record away"), (*_DAMAGE, "evicted")),
    **dict.fromkeys((*PROCESS, LINK, DISK), _ABSENCE),
}  # fmt: skip
NUM_FAULTS = {
    **dict.fromkeys(MEMORY, 80), **dict.fromkeys(HOST, 40), **dict.fromkeys(PROCESS, 12), **dict.fromkeys(FILES, 40),
    DISK: 3, LINK: 8, OLD_FILES: 40, NETWORK: 100,
}  # fmt: skip


@dataclass
class System:
    """A system with roles. launcher: its process;  num_ranks: prefill ranks, decode ranks;  path: cache.path"""

    client: httpx.Client
    running: Running
    num_ranks: tuple[int, int]
    model: Path
    path: Path | None = None
    hosts: Sequence[Host] = ()

    def network(self) -> contextlib.AbstractContextManager[Any]:
        """Lets the calling thread make connections where the front end is."""
        return self.hosts[0].network() if self.hosts else contextlib.nullcontext()

    def info(self) -> dict[str, Any]:
        """Returns /server_info."""
        found: dict[str, Any] = self.client.get("/server_info", timeout=60).json()
        return found

    def is_whole(self) -> bool:
        """Returns whether all ranks serve."""
        info = self.info()
        groups = (info["prefill"], info)
        serving = [sum(rank["phase"] == "ready" for rank in group["ranks"]) for group in groups]
        return all(group["state"] == "ready" for group in groups) and tuple(serving) == self.num_ranks

    def wait_until_whole(self) -> None:
        """Waits until all ranks serve. Fails with what the system has said where they do not."""
        assert eventually(self.is_whole, WHOLE_S), f"{self.info()['state']}:\n{self.running.output[-6000:]}"

    def num_held(self) -> int:
        """Returns how many blocks are held when no request is open, once no more are let go."""
        held = [0]

        def is_idle() -> bool:
            info = self.info()
            groups = [group for group in (info, info["prefill"]) if group["state"] == "ready"]
            ranks = [rank for group in groups for rank in group["ranks"] if rank["phase"] == "ready"]
            statuses = [rank["status"] for rank in ranks if rank["status"]]
            held[0] = sum(each["num_blocks"] - each["num_free_blocks"] for each in statuses)
            return info["requests"]["open"] == 0 and len(statuses) >= self.num_ranks[1] and not held[0]

        eventually(is_idle, 60)
        return held[0]

    def signal(self, role: str, draw: random.Random, *numbers: signal.Signals) -> None:
        """Sends signals to a rank of a role, each of them _STOPPED_S after the one before."""
        info = self.info()
        pid = draw.choice((info["prefill"] if role == "prefill" else info)["ranks"])["pid"]
        for at, number in enumerate(numbers):
            time.sleep(_STOPPED_S if at else 0)
            with contextlib.suppress(ProcessLookupError):  # one that was stopped may be replaced by now
                os.kill(pid, number)


def strike(kind: str, number: int, system: System, draw: random.Random) -> None:
    """Does a fault that concerns ranks, the disk or the cable, and returns when that is over. number: of its kind"""
    role, _, what = kind.partition(" rank ")
    if what == "killed":
        system.signal(role, draw, signal.SIGKILL)
    elif what == "stopped":
        system.signal(role, draw, signal.SIGSTOP, signal.SIGCONT)
    elif kind == DISK:
        _fill_disk(system, draw)
    elif kind == LINK:
        set_cable(system.hosts[1], "down")
        time.sleep(_CUT_S[number % len(_CUT_S)])
        set_cable(system.hosts[1], "up")
    else:
        raise ValueError(kind)


def _fill_disk(system: System, draw: random.Random) -> None:
    """Fills the disk while ranks write, starts a rank of each role while it is full, and again with room."""
    assert system.path is not None
    filler = system.path / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as opened:
        while opened.write(bytes(4096)):  # ends within _DISK_MB
            pass
    system.running.wait_for("No space left on device", WHOLE_S)
    for has_room in (False, True):
        if has_room:
            filler.unlink()
        for role in ("prefill", "decode"):
            system.signal(role, draw, signal.SIGKILL)
            system.wait_until_whole()


@dataclass
class Played:
    """outputs: by number of the request: tokens, or None where it was answered 5xx;  num_endless: of the others"""

    num_faults: int = 0
    num_endless: int = 0
    num_held: int = 0
    outputs: dict[int, list[int] | None] = field(default_factory=dict)
    right: dict[int, list[int]] = field(default_factory=dict)  # where they are known
    fates: Counter[str] = field(default_factory=Counter)

    @property
    def answered(self) -> dict[int, list[int]]:
        """The outputs of requests that were not answered 5xx."""
        return {number: output for number, output in self.outputs.items() if output is not None}


def play(kind: str, num_faults: int, first: int, system: System) -> Played:
    """Keeps requests open, from this number on, until so many faults of a kind have been done."""
    draw, played, lock = random.Random(f"{kind} {first}"), Played(), threading.Lock()
    numbers, is_over = itertools.count(first), threading.Event()
    memory = Memory(system.running.process.pid, PAGE, int(_HOST_GB * 1e9)) if kind in (*MEMORY, *HOST) else None
    is_damage, striking = kind in (*MEMORY, *HOST, *FILES), threading.Lock()

    def damage() -> None:
        with striking:
            if memory is not None:
                played.num_faults += memory.damage(kind, draw) if kind in MEMORY else memory.damage_kept(kind, draw)
            else:
                assert system.path is not None
                played.num_faults += damage_files(system.path, kind, draw)

    def ask_one(number: int) -> None:
        damaging = threading.Timer(0.0 if kind in MEMORY else 0.02, damage)
        if is_damage:
            damaging.start()
        try:
            output = ask(system.client, number)
            with lock:
                played.outputs[number] = output
            if output is None:
                time.sleep(0.2)  # where no rank serves, an answer comes at once
        except httpx.TimeoutException:
            with lock:
                played.num_endless += 1
        if is_damage:
            damaging.join()

    def ask_on() -> None:
        with system.network():
            while not (is_over.is_set() or (is_damage and played.num_faults >= num_faults)):
                with lock:
                    number = next(numbers)
                ask_one(number)

    with Fates(system.client, system.network) as watched, ThreadPoolExecutor(NUM_OPEN) as pool:
        asking = [pool.submit(ask_on) for _ in range(NUM_OPEN)]
        if not is_damage:
            try:
                for number in range(num_faults):
                    system.wait_until_whole()
                    time.sleep(draw.uniform(0.1, 0.5))
                    strike(kind, number, system, draw)
                    played.num_faults += 1
                system.wait_until_whole()
            finally:
                is_over.set()
        for each in asking:
            each.result()
    played.fates, played.num_held = watched.totals(), system.num_held()
    return played


def play_other_weights(num_ranks: tuple[int, int], first: int, num_files: int, scratch: Path) -> dict[str, Played]:
    """Starts a prefill rank again whose weights are others now, then all ranks with these, beside the first files."""
    path, model, found = scratch / "pages", scratch / "served", {}
    shutil.copytree(scratch / "model", model, dirs_exist_ok=True)
    for kind in (WEIGHTS, OLD_FILES):
        begin = first + KINDS.index(kind) * _KINDS
        with serve(num_ranks, model, path) as system:
            draw, played = random.Random(first), Played(num_faults=1 if kind == WEIGHTS else num_files)
            with Fates(system.client, system.network) as watched:
                for number in range(begin, begin + _NUM_PROMPTS + num_files):
                    if kind == WEIGHTS and number == begin + _NUM_PROMPTS:
                        for file in (scratch / "other").glob("*.safetensors"):
                            shutil.copy(file, model / file.name)
                        system.signal("prefill", draw, signal.SIGKILL)
                        system.running.wait_for("prefill.*(not started again|rejoined)", WHOLE_S)
                    played.outputs[number] = ask(system.client, number)
            played.fates, played.num_held = watched.totals(), system.num_held()
            found[kind] = played
    return found


def play_bad_network(num_faults: int, first: int, scratch: Path) -> Played:
    """Has a rank take pages of another host over a bad network until so many of its questions failed."""
    played, params = Played(), SamplingParams(max_new_tokens=4, temperature=0.7, ignore_eos=True)
    for seed in itertools.count(first):
        if played.num_faults >= num_faults:
            return played
        prompts = [each for each in prompts_with_shared_beginnings(24, 200, 100, seed) for _ in range(2)]
        submits = [  # rank 1 has those with odd numbers
            replace(each, pages_at=0 if number % 2 else None) for number, each in enumerate(submits_of(prompts, params))
        ]
        family = ("deepseek_v3", "qwen2_moe")[seed % 2]
        settings = [f"model.path={tiny_model(scratch, family)}", *_OFFLINE]
        prepare = partial(ask_later_over_a_bad_network, seed=seed)
        across = serve_offline(2, submits, [*settings, "cache.host_gb=0.02"], prepare=prepare, placed=on_two_hosts)
        right = serve_offline(2, submits, settings).tokens
        for number, submit in enumerate(submits):
            played.outputs[seed * _KINDS + number] = across.tokens[submit.request_id]
            played.right[seed * _KINDS + number] = right[submit.request_id]
        played.fates += across.pages
        played.num_faults = num_met(NETWORK, played.fates)
    raise AssertionError("unreachable")


def body_of(number: int) -> dict[str, Any]:
    """Returns a request: some prompts begin alike, every second one is sampled; of faults of files, some are equal."""
    draw = random.Random(number)
    prompt = draw.choice(([], [9] * 64)) + draw.choices(range(3, 500), k=draw.randrange(40, 300))
    if KINDS[number // _KINDS % len(KINDS)] in (*HOST, *FILES, DISK, WEIGHTS, OLD_FILES):
        prompt = random.Random(number % _NUM_PROMPTS).choices(range(3, 500), k=_PROMPT_TOKENS)
    params = {"max_new_tokens": 12, "ignore_eos": True, "temperature": float(number % 2), "sampling_seed": number}
    return {"input_ids": prompt, "sampling_params": params}


def ask(client: httpx.Client, number: int) -> list[int] | None:
    """Returns the tokens of a request; None: it ended with an error, as where all decode ranks are gone."""
    answer = client.post("/generate", json=body_of(number))
    assert answer.status_code == 200 or answer.status_code >= 500, answer.text
    return list(answer.json()["output_ids"]) if answer.status_code == 200 else None


@contextlib.contextmanager
def serve(
    num_ranks: tuple[int, int],
    model: Path,
    path: Path | None = None,
    are_apart: bool = False,
    keeps_in_memory: bool = False,
) -> Iterator[System]:
    """Yields a system. path: cache.path;  are_apart: each role is on a host of its own
    keeps_in_memory: pages, as cache.host_gb says
    """
    settings: dict[str, Any] = {
        "parallel.threads_per_rank": 1, "parallel.prefill_from_tokens": 1, "parallel.handover_gb": 0.002,
        "launcher.max_restarts": 1000,
    }  # fmt: skip
    if path is not None:
        settings |= {"cache.num_blocks": _NUM_CACHE_BLOCKS, "cache.path": path, "cache.disk_gb": _QUOTA_GB}
    if keeps_in_memory:
        settings |= {"cache.num_blocks": _NUM_CACHE_BLOCKS, "cache.host_gb": _HOST_GB}
    words = ["serve", "--model", str(model), "--skip-tokenizer-init", "--port", "0", "--device", "cpu"]
    words += [f"--prefill-ranks={num_ranks[0]}", f"--decode-ranks={num_ranks[1]}"]
    words += [f"--set={name}={value}" for name, value in settings.items()]
    if not are_apart:
        with Running("moe_serve", words) as running, running.client(WHOLE_S, ANSWER_S) as client:
            yield System(client, running, num_ranks, model, path)
        return
    os.environ["MOE_SERVE_TOKEN"] = secrets.token_hex(32)
    with make_hosts(2) as hosts:
        words += ["--nnodes", "2", "--dist-init-addr", f"{hosts[0].address}:20000", "--node-rank"]
        first, second = (host.start("moe_serve", *words, str(rank)) for rank, host in enumerate(hosts))
        with first, second, hosts[0].network(), first.client(WHOLE_S, ANSWER_S) as client:
            yield System(client, first, num_ranks, model, path, hosts)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Yields a folder that is a disk of _DISK_MB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m,mode=0700", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def play_all(num_ranks: tuple[int, int], counts: Mapping[str, int], firsts: Mapping[str, int], scratch: Path) -> Any:
    """Plays so many faults of each kind; returns what has come of them, by kind. firsts: numbers of requests"""
    found: dict[str, Played] = {}
    model = scratch / "model"

    def run(kinds: Sequence[str], **where: Any) -> None:
        asked = [kind for kind in kinds if counts.get(kind)]
        if not asked:
            return
        with serve(num_ranks, model, **where) as system:
            for kind in asked:
                found[kind] = play(kind, counts[kind], firsts[kind], system)

    run((*MEMORY, *PROCESS))
    run(HOST, keeps_in_memory=True)
    run([LINK], are_apart=True)
    if any(counts.get(kind) for kind in (*FILES, DISK)):
        with small_disk(scratch / f"disk {num_ranks}") as disk:
            run((*FILES, DISK), path=disk)
    if num_files := counts.get(OLD_FILES):
        with tempfile.TemporaryDirectory(dir=scratch) as own:
            for name in ("model", "other"):
                (Path(own) / name).symlink_to(scratch / name)
            found |= play_other_weights(num_ranks, firsts[OLD_FILES] % _KINDS, num_files, Path(own))
    return found


def right_outputs(model: Path, numbers: Sequence[int]) -> dict[int, list[int]]:
    """Returns the outputs of a system of one rank."""
    if not numbers:
        return {}
    alone = ["serve", "--model", str(model), "--skip-tokenizer-init", "--ep", "1", "--port", "0", "--device", "cpu"]
    with (
        Running("moe_serve", alone) as running,
        running.client(WHOLE_S, ANSWER_S) as client,
        ThreadPoolExecutor(NUM_OPEN) as pool,
    ):
        outputs = pool.map(lambda number: ask(client, number) or [], numbers)
        return dict(zip(numbers, outputs, strict=True))


def row_of(kind: str, ranks: str, played: Played, right: Mapping[int, list[int]]) -> dict[str, Any]:
    """Returns a row of the table."""
    return {
        "fault": kind,
        "prefill + decode ranks": ranks,
        "strikes": played.num_faults,
        "met by readers": num_met(kind, played.fates),
        "requests": len(played.outputs) + played.num_endless,
        "wrong outputs": sum(output != right[number] for number, output in played.answered.items()),
        "leaked blocks": played.num_held,
        "streams without an end": played.num_endless,
        "answered 5xx": len(played.outputs) - len(played.answered),
        "pages, by what became of them": _in_words(played.fates),
    }


def num_met(kind: str, fates: Counter[str]) -> int:
    """Returns how often readers met faults of a kind. fates: what became of pages"""
    return sum(fates[name] for name in MET_AS[kind])


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items()) if number)


def _sum(one: Any, other: Any) -> Any:
    """Returns the sum of two cells: of numbers, or of counts in words."""
    if not isinstance(one, str):
        return one + other
    counts = Counter[str]()
    for part in filter(None, [*one.split(", "), *other.split(", ")]):
        name, _, number = part.rpartition(" ")
        counts[name] += int(number)
    return _in_words(counts)


def added(before: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the sums of two of the same kind and ranks."""
    names = ("fault", "prefill + decode ranks")
    return {name: row[name] if name in names else _sum(before[name], row[name]) for name in row}


def kept_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the rows of a table, by kind of fault and ranks."""
    return {(row["fault"], row["prefill + decode ranks"]): row for row in json.loads(path.read_text())["rows"]}


def _counts(text: str) -> dict[str, int]:
    counts = {name: int(number) for name, _, number in (each.rpartition("=") for each in text.split(","))}
    if unknown := set(counts) - set(NUM_FAULTS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: kinds are {', '.join(NUM_FAULTS)}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=_counts, default=NUM_FAULTS, help="KIND=NUMBER,…, for each number of ranks")
    parser.add_argument("--ranks", default="1+1,1+2,2+2")
    parser.add_argument("--add", action="store_true")
    args = parser.parse_args()
    facts, name = conditions(), "handover_faults"
    kept = RESULTS / f"{saved_as(name, facts, per_cpu=True)}.json"
    known, played_now = kept_rows(kept) if args.add else {}, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for seed, other in enumerate(("model", "other")):
            write_bench_model(scratch / other, seed=seed, max_position_embeddings=1024, **SIZES)
        for ranks in args.ranks.split(","):
            before = {kind: known.get((kind, ranks), {"requests": 0})["requests"] for kind in KINDS}
            firsts = {kind: before[kind] + at * _KINDS for at, kind in enumerate(KINDS)}
            num_prefill, num_decode = map(int, ranks.split("+"))
            found = play_all((num_prefill, num_decode), args.faults, firsts, scratch)
            right: dict[int, list[int]] = {}
            for name_of, kinds in (("model", {*found} - {OLD_FILES}), ("other", {*found} & {OLD_FILES})):
                right |= right_outputs(scratch / name_of, [each for kind in kinds for each in found[kind].answered])
            for kind, played in found.items():
                played_now.append(row_of(kind, ranks, played, right))
        if num_faults := args.faults.get(NETWORK):
            ranks = "2 that do both"
            first = known.get((NETWORK, ranks), {"requests": 0})["requests"]  # another seed
            played = play_bad_network(num_faults, first, scratch)
            played_now.append(row_of(NETWORK, ranks, played, played.right))
    known = kept_rows(kept) if args.add else {}  # again: others may have been added meanwhile
    for row in played_now:
        key = row["fault"], row["prefill + decode ranks"]
        known[key] = added(known[key], row) if key in known else row
    table = sorted(known.values(), key=lambda row: (KINDS.index(row["fault"]), row["prefill + decode ranks"]))
    sums = {what: sum(row[what] for row in table) for what in list(table[0])[2:9]}
    notes = (
        f"In all {', '.join(f'{number:,} {what}' for what, number in sums.items())}. A strike damages up to 20 records "
        "or files, or is of one rank, disk or cable. Met by readers: prompts whose pages of a hand-over were found "
        "damaged (checksum), of something else (version) or missing (late, peer_lost), and such pages of tiers; for "
        "late and missing records evicted as well, some since newer pages took their place. Where that is less, no "
        "prompt needed what was struck. Pages of other weights have other names, so that nobody meets them. Requests "
        "that are open when the only decode rank is killed wait until it is started again; those that come meanwhile "
        f"get 503. Without an end: no answer within {ANSWER_S:g} s. Blocks are those held when no request is open. "
        "What a rank that was killed did in its last second is missing in the last column."
    )
    print(save(name, "Hand-overs under faults", table, facts, notes, per_cpu=True))


if __name__ == "__main__":
    main()
