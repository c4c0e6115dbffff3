"""Pages outside the pool come up whole and right, or not at all."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp import pages, request_blocks
from moe_serve.attention_dp.host_pages import PAGE_AT, HostPages, slot_bytes
from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.attention_dp.page_channel import PageCopier
from moe_serve.attention_dp.page_record import (
    DamagedPage,
    PageForm,
    checksum_of,
    decode_page,
    encode_header,
    library,
)
from moe_serve.attention_dp.pages import PageFolder, PageTiers, open_folder
from moe_serve.attention_dp.prefix_cache import state_keys
from moe_serve.attention_dp.request import Request
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Scheduler
from moe_serve.attention_dp.state_slots import StateSlots
from moe_serve.errors import ConfigError
from tests.attention_dp.steps import make_request, next_token, run_step

PAGE = bytes(range(200))
FORM = PageForm(2, 4, 200)
KEYS = [bytes([number]) * 32 for number in range(8)]


def record_of(key: bytes = KEYS[0]) -> bytes:
    return encode_header(key, FORM, memoryview(PAGE)) + PAGE


def until(holds: Callable[[], bool]) -> None:
    late_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < late_s, "the thread of pages did not get there"
        time.sleep(0.001)


def small_cache(dtype: torch.dtype = torch.float32, num_blocks: int = 6) -> KvCache:
    cache = KvCache([KvLayout.gqa(2, 4), KvLayout.mla(8, 4)], num_blocks, 4, dtype, "cpu")
    for block in range(num_blocks):
        cache.write_page(block, torch.full((cache.page_bytes,), block + 1, dtype=torch.uint8))
    return cache


def in_memory(cache: KvCache, num_bytes: int = 1 << 20, descriptor: int | None = None) -> HostPages:
    return HostPages(descriptor, num_bytes, cache.page_form)


@settings(max_examples=100, deadline=None)
@given(bit=st.integers(0, 8 * len(record_of()) - 1))
def test_any_flipped_bit_is_seen(bit: int) -> None:
    record = bytearray(record_of())
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedPage):
        decode_page(memoryview(record), KEYS[0], FORM)


@pytest.mark.parametrize("size", [0, 1, 40, len(record_of()) - 1])
def test_a_record_that_is_cut_off_is_refused(size: int) -> None:
    assert bytes(decode_page(memoryview(record_of()), KEYS[0], FORM)) == PAGE
    with pytest.raises(DamagedPage):
        decode_page(memoryview(record_of()[:size]), KEYS[0], FORM)


@pytest.mark.parametrize(
    "asked",
    [(KEYS[1], FORM), *((KEYS[0], PageForm(*each)) for each in ((3, 4, 200), (2, 8, 200), (2, 4, 199)))],
)
def test_a_page_with_another_key_or_form_is_refused(asked: tuple[bytes, PageForm]) -> None:
    with pytest.raises(DamagedPage, match="version"):
        decode_page(memoryview(record_of()), *asked)


def test_the_checksum_is_the_same_of_a_page_that_is_copied_and_of_one_that_lies_still() -> None:
    cache = small_cache()
    copier, page = PageCopier(cache, library()), cache.read_page(2)
    head, copied = b"h" * 9, np.empty((1, cache.page_bytes), dtype=np.uint8)
    (found,) = copier.copy(np.frombuffer(head, np.uint8).reshape(1, 9), copied, [2], into_pool=False)
    assert found == checksum_of(head, page.numpy().data)
    assert bytes(copied[0]) == bytes(page.numpy())


def test_a_damaged_file_is_removed_and_a_foreign_one_never_read(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, b"model", 1 << 20)
    folder.write(KEYS[0], FORM, memoryview(PAGE))
    assert bytes(folder.read(KEYS[0], FORM) or b"") == PAGE
    assert PageFolder(tmp_path, b"other weights", 1 << 20).read(KEYS[0], FORM) is None
    file = next(folder.folder.glob("*.page"))
    file.rename(file.with_name(KEYS[1].hex() + ".page"))
    with pytest.raises(DamagedPage):
        folder.read(KEYS[1], FORM)
    assert not list(folder.folder.iterdir())
    file.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        folder.read(KEYS[0], FORM)


def test_the_oldest_files_make_room_those_of_other_models_too(tmp_path: Path) -> None:
    size = len(record_of())
    other = PageFolder(tmp_path, b"other", 10 * size)
    other.write(KEYS[7], FORM, memoryview(PAGE))
    os.utime(next(other.folder.iterdir()), ns=(0, 0))
    folder = PageFolder(tmp_path, b"model", 4 * size)
    for number, key in enumerate(KEYS[:5]):
        folder.write(key, FORM, memoryview(PAGE))
        file = folder.folder / f"{key.hex()}.page"
        if file.exists():
            os.utime(file, ns=(0, 1000 + number))
    kept = [key for key in KEYS if folder.has(key)]
    assert kept == KEYS[5 - len(kept) : 5]
    assert 2 <= len(kept) <= 4
    assert not other.has(KEYS[7])


def test_a_folder_that_cannot_be_used_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache\.path .* cannot be written"):
        PageFolder(tmp_path / "file" / "in", b"model", 1)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        PageFolder(shared, b"model", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("where", ["host", "disk", "a new process"])
def test_pages_come_up_as_they_went_down(dtype: torch.dtype, where: str, tmp_path: Path) -> None:
    cache = small_cache(dtype)
    folder = None if where == "host" else PageFolder(tmp_path, b"model", 1 << 20)
    tiers = PageTiers(cache, in_memory(cache) if where == "host" else None, folder)
    for block in range(3):
        tiers.keep(KEYS[block], block)
    until(lambda: tiers.counters["down"] == 3)
    if where == "a new process":
        tiers.close()
        tiers = PageTiers(cache, None, PageFolder(tmp_path, b"model", 1 << 20))
    fetch = tiers.fetch([*KEYS[:3], KEYS[6], KEYS[1]])  # ends at the first that is missing
    until(lambda: fetch.done)
    assert tiers.take(fetch, [3, 4]) == 2
    assert tiers.is_coming(fetch)
    assert tiers.take(fetch, [5]) == 1
    assert not tiers.is_coming(fetch)
    for block in range(3):
        assert torch.equal(cache.read_page(block + 3), cache.read_page(block))
        assert cache.read_page(block).eq(block + 1).all()
    tiers.close()


@pytest.mark.parametrize("has_room", [True, False])
def test_a_block_that_is_written_before_the_thread_has_copied_it(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes down as it was, if there is room for it meanwhile, and never as it is written."""
    cache = small_cache()
    monkeypatch.setattr("moe_serve.attention_dp.pages._COPIED_BYTES", 1 << 20 if has_room else 0)
    tiers = PageTiers(cache, in_memory(cache), None)
    read, before = cache.read_page, cache.read_page(0)

    def read_while_it_is_written(block: int) -> torch.Tensor:
        monkeypatch.setattr(cache, "read_page", read)
        tiers.written([block])
        cache.write_page(block, torch.full((cache.page_bytes,), 99, dtype=torch.uint8))
        return read(block)

    monkeypatch.setattr(cache, "read_page", read_while_it_is_written)
    tiers.keep(KEYS[0], 0)
    until(lambda: tiers.counters["down" if has_room else "evicted"] == 1)
    fetch = tiers.fetch([KEYS[0]])
    until(lambda: fetch.done)
    assert len(fetch.pages) == has_room
    assert tiers.counters["down"] == has_room
    assert all(torch.equal(page, before) for page in fetch.pages)
    tiers.close()


def test_a_page_that_is_kept_again_while_it_is_copied_is_not_read_from_its_block_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = small_cache()
    host = in_memory(cache)
    read, before, after = cache.read_page, cache.read_page(0), cache.read_page(1)
    went_down: list[torch.Tensor] = []
    copying, kept_again, leaving, written = (threading.Event() for _ in range(4))

    def read_slowly(block: int) -> torch.Tensor:
        page = read(block)
        copying.set()
        assert kept_again.wait(60)
        return page

    def leave_slowly(key: bytes, page: torch.Tensor) -> None:
        went_down.append(page.clone())
        leaving.set()
        assert written.wait(60)

    monkeypatch.setattr(cache, "read_page", read_slowly)
    monkeypatch.setattr(host, "has", lambda key: False)  # as where others have made it leave at once
    monkeypatch.setattr(host, "write", leave_slowly)
    tiers = PageTiers(cache, host, None)
    tiers.keep(KEYS[0], 0)
    assert copying.wait(60)
    tiers.keep(KEYS[0], 0)
    kept_again.set()
    assert leaving.wait(60)
    tiers.written([0])
    cache.write_page(0, after)
    written.set()
    tiers.close()
    assert went_down
    assert all(torch.equal(page, before) for page in went_down)


def test_a_full_disk_switches_the_tier_off_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = PageFolder(tmp_path, b"model", 1 << 20)

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder, "write", full)
    tiers = PageTiers(small_cache(), None, folder)
    for block in range(4):
        tiers.keep(KEYS[block], block)
    until(lambda: bool(caplog.records))
    fetch = tiers.fetch(KEYS[:2])
    until(lambda: fetch.done)
    tiers.close()
    assert len([line for line in caplog.messages if "No space left" in line]) == 1


@pytest.mark.parametrize("call", ["mkdir", "write_bytes"])
def test_a_rank_that_starts_beside_a_full_disk_goes_without_files_and_says_so_in_one_line(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, call, full)
        assert open_folder(tmp_path, b"model", 1 << 20) is None
    assert [line.partition(";")[0] for line in caplog.messages] == [f"cache.path {tmp_path}: No space left on device"]
    assert open_folder(tmp_path, b"model", 1 << 20) is not None


def test_a_disk_that_cannot_lock_is_refused_as_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", fail)
        with pytest.raises(ConfigError, match=r"cannot be written \(No locks available\); name a folder that can"):
            open_folder(tmp_path, b"model", 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before, "nothing stays open"


def test_a_disk_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PageFolder(tmp_path, b"model", 1 << 20)
    monkeypatch.setattr(folder, "read", lambda *given: time.sleep(0.3))
    monkeypatch.setattr("moe_serve.attention_dp.pages._PATIENCE_S", 0.05)
    tiers = PageTiers(small_cache(), None, folder)
    fetch = tiers.fetch(KEYS[:2])
    assert tiers.is_coming(fetch)
    time.sleep(0.06)
    assert not tiers.is_coming(fetch)
    assert tiers.counters["late"] == 1
    tiers.close()


class OneRank:
    """The scheduler of a rank over some tiers. Slots hold, once they are computed, what their positions say."""

    def __init__(self, cache: KvCache, tiers: PageTiers):
        self.cache, self.tiers = cache, tiers
        self.scheduler = Scheduler(RequestBlocks(8, 4, True, b"", tiers), 2, 16, 64)
        self.computed: dict[str, int] = {}

    def run(self, name: str, first: int, num_new: int = 2, until_output: int = 2) -> None:
        """Runs a request whose prompt begins with the id `first`, until it has some of its output."""
        request = make_request(name, num_prompt=21, max_new_tokens=num_new, first=first)
        self.scheduler.add(request)
        self.go_on(request, first, until_output)

    def go_on(self, request: Request, first: int, until_output: int) -> None:
        """Runs steps; finishes the request where it has all its output."""
        scheduler, cache = self.scheduler, self.cache
        late_s = time.monotonic() + 60
        while len(request.output_ids) < until_output:
            assert time.monotonic() < late_s
            proposal = scheduler.propose()
            assert proposal.is_empty <= scheduler.awaits_pages
            for chunk in scheduler.commit(proposal):
                name = request.request_id
                self.computed[name] = self.computed.get(name, 0) + chunk.length
                for at in range(chunk.start, chunk.start + chunk.length):
                    slot = request.block_ids[at // 4] * 4 + at % 4
                    for layer in range(2):
                        cache.layer(layer)[slot] = first + at
                for at in range(chunk.start + chunk.length):
                    slot = request.block_ids[at // 4] * 4 + at % 4
                    assert cache.layer(1)[slot].eq(first + at).all(), f"position {at} has other values"
                scheduler.complete(chunk, next_token(request) if chunk.samples else None)
                if len(request.output_ids) == request.params.max_new_tokens:
                    scheduler.finish(name)
            scheduler.check()


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_prefix_that_left_the_pool_is_not_computed_again(where: str, tmp_path: Path) -> None:
    cache = small_cache(num_blocks=8)
    folder = PageFolder(tmp_path, b"", 1 << 20) if where == "disk" else None
    tiers = PageTiers(cache, in_memory(cache) if where == "host" else None, folder)
    rank = OneRank(cache, tiers)
    rank.run("long ago", 0)
    until(lambda: tiers.counters["down"] == 5)
    rank.run("between", 100)
    rank.run("between, too", 200)
    rank.run("again", 0)
    assert rank.computed == {"long ago": 22, "between": 22, "between, too": 22, "again": 2}
    assert rank.scheduler.stats.num_cached_prompt_tokens == 20
    rank.scheduler.blocks.flush()
    rank.run("after a flush", 0)
    assert rank.computed["after a flush"] == 22
    tiers.close()


def test_a_rank_takes_what_a_sibling_has_computed_while_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create("pages")
    os.ftruncate(descriptor, 1 << 20)
    ranks = []
    for pid in (1, 2):
        cache = small_cache(num_blocks=8)
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda pid=pid: pid)
            ranks.append(OneRank(cache, PageTiers(cache, in_memory(cache, descriptor=descriptor), None)))
    os.close(descriptor)
    one, other = ranks
    one.run("begins", 0, num_new=8, until_output=1)
    until(lambda: one.tiers.counters["down"] == 5)
    assert one.scheduler.num_running == 1
    other.run("the same prompt", 0)
    assert other.computed == {"the same prompt": 2}
    assert (other.tiers.counters["from_sibling"], other.tiers.counters["from_host"]) == (5, 0)
    other.scheduler.blocks.flush()
    other.run("after a flush", 0)
    assert other.computed["after a flush"] == 22
    for each in ranks:
        each.tiers.close()


def test_values_that_are_not_finite_reach_no_sibling() -> None:
    """A request whose first token cannot be drawn has published blocks, which nobody may take."""
    cache = small_cache(num_blocks=8)
    tiers = PageTiers(cache, in_memory(cache), None)
    scheduler = Scheduler(RequestBlocks(8, 4, True, b"", tiers), 2, 16, 64)
    request = make_request("broken", num_prompt=21, max_new_tokens=2)
    scheduler.add(request)
    until(lambda: not scheduler.propose().is_empty)
    (chunk,) = scheduler.commit(scheduler.propose())
    assert not chunk.samples
    scheduler.complete(chunk)
    scheduler.commit(scheduler.propose())
    scheduler.discard("broken")
    tiers.close()
    assert request.block_keys
    assert not any(tiers._find(key)[0] is not None for key in request.block_keys)


def test_writers_of_few_slots_never_make_a_reader_take_a_wrong_page() -> None:
    """Pages of all keys compete for 8 slots of one set, written by some threads and read by others."""
    cache = small_cache()
    descriptor = os.memfd_create("pages")
    size = 8 * slot_bytes(cache.page_bytes)
    os.ftruncate(descriptor, size)
    keys = [bytes([number]) * 32 for number in range(24)]
    pages = [torch.full((cache.page_bytes,), number, dtype=torch.uint8) for number in range(24)]
    stop, found, wrong = threading.Event(), [0], []

    def write(seed: int) -> None:
        host, draw = in_memory(cache, size, descriptor), random.Random(seed)
        while not stop.is_set():
            number = draw.randrange(24)
            host.write(keys[number], pages[number])

    def read(seed: int) -> None:
        host, draw = in_memory(cache, size, descriptor), random.Random(seed)
        while not stop.is_set():
            number = draw.randrange(24)
            try:
                page = host.read(keys[number])
            except DamagedPage:
                continue
            if page is not None:
                found[0] += 1
                if not torch.equal(page.data, pages[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed, work in enumerate((write, write, read, read))]
    for thread in threads:
        thread.start()
    until(lambda: found[0] >= 300 or bool(wrong))
    stop.set()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    assert not wrong


@pytest.mark.parametrize("where", ["host", "disk"])
def test_pages_come_up_to_the_last_block_behind_which_there_is_a_state(where: str, tmp_path: Path) -> None:
    cache = KvCache([KvLayout.gqa(1, 2)], 8, 4, torch.float32, "cpu", states=[((40,), (3, 5))], num_states=4)
    assert cache.num_state_pages == 4, "of 64 bytes each, for 220"
    for pool in cache.states_of(0):
        pool += torch.arange(4).view(-1, *[1] * (pool.dim() - 1)) + torch.rand(pool.shape)
    for block in range(4):
        cache.write_page(block, torch.full((cache.page_bytes,), block + 1, dtype=torch.uint8))
    host = in_memory(cache) if where == "host" else None
    folder = PageFolder(tmp_path, b"model", 1 << 20) if where == "disk" else None
    tiers = PageTiers(cache, host, folder)
    for block in range(4):
        tiers.keep(KEYS[block], block)
    copied = [tiers.keep_state(KEYS[1], 2), tiers.keep_state(KEYS[3], 3)]
    assert copied == [4 * 64] * 2
    until(lambda: tiers.counters["down"] == 4 + 8)
    assert tiers.keep_state(KEYS[3], 3) == 0, "it is there"

    def bring(number: int, slot: int) -> int:
        fetch = tiers.fetch(KEYS[:number])
        until(lambda: fetch.done)
        num_blocks = fetch.num_blocks
        assert num_blocks is not None
        assert tiers.take(fetch, range(4, 4 + num_blocks)) == num_blocks
        assert tiers.take_state(fetch, slot, 0, 99) == (4 if num_blocks else 0)
        assert all(torch.equal(cache.read_page(4 + block), cache.read_page(block)) for block in range(num_blocks))
        return num_blocks

    def forget(key: bytes) -> None:
        if host is not None:
            host._words[host._find(key) // 8] = 0
        if folder is not None:
            folder._file(key).unlink()

    assert bring(4, 0) == 4
    assert all(torch.equal(pool[0], pool[3]) for pool in cache.states_of(0))
    assert bring(3, 1) == 2
    assert all(torch.equal(pool[1], pool[2]) for pool in cache.states_of(0))
    forget(state_keys(KEYS[3], range(4))[2])
    assert bring(4, 0) == 2, "a part of the state is gone"
    forget(KEYS[1])
    assert bring(4, 0) == 0, "there is a state, but the keys and values in front of it are gone"
    tiers.close()


def test_states_of_many_pages_stay_whole_in_memory_with_room_for_them() -> None:
    """As many as of Qwen3-Next. Pages of blocks lie in the same sets."""
    form, num_pages = PageForm(1, 1, 8), 201
    for room, num_written, num_whole in ((2, 1, 1), (10, 20, 7)):
        host = HostPages(None, room * (1 + num_pages) * slot_bytes(8), form)
        keys = [blake2b(bytes([number]), digest_size=32).digest() for number in range(num_written)]
        for key in keys:
            for each in (key, *state_keys(key, range(num_pages))):
                host.write(each, torch.zeros(8, dtype=torch.uint8))
        whole = [all(host._find(each) >= 0 for each in state_keys(key, range(num_pages))) for key in keys]
        assert all(whole[-num_whole:])


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("damaged", [None, 0, 2])
def test_a_state_with_a_damaged_page_is_not_taken_and_its_slot_is_free_again(
    damaged: int | None, where: str, tmp_path: Path
) -> None:
    cache = KvCache([KvLayout.gqa(1, 2)], 8, 4, torch.float32, "cpu", states=[((40,), (3, 5))], num_states=4)
    host = in_memory(cache) if where == "host" else None
    folder = PageFolder(tmp_path, b"model", 1 << 20) if where == "disk" else None
    tiers, states = PageTiers(cache, host, folder), StateSlots(2, 0, num_snapshots=2, interval=64)
    blocks = RequestBlocks(8, 4, tiers=tiers, states=states)
    scheduler = Scheduler(blocks, 2, 16, 64)

    def run(name: str) -> Request:
        request = make_request(name, num_prompt=11, max_new_tokens=1)
        scheduler.add(request)
        late_s = time.monotonic() + 60
        while scheduler.has_work:
            assert time.monotonic() < late_s
            run_step(scheduler)
        return request

    key = run("first").block_keys[1]
    until(lambda: tiers.counters["down"] == 2 + 4)
    assert blocks._cache is not None
    blocks._cache.clear()
    states.clear()
    if damaged is not None:
        of_page = state_keys(key, range(4))[damaged]
        if host is not None:
            host._bytes[host._find(of_page) + PAGE_AT] ^= 1
        if folder is not None:
            page = bytearray(folder._file(of_page).read_bytes())
            page[-1] ^= 1
            folder._file(of_page).write_bytes(page)
    again = run("again")
    assert again.num_cached_prompt == (8 if damaged is None else 0)
    assert tiers.counters["checksum"] == (damaged is not None)
    assert not states._filled
    tiers.close()


def test_a_large_state_comes_in_a_bounded_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_blocks, "_BYTES_UP", 1)
    cache = KvCache([KvLayout.gqa(1, 2)], 8, 4, torch.float32, "cpu", states=[((990,),)], num_states=4)
    assert cache.num_state_pages == 62
    tiers, states = PageTiers(cache, in_memory(cache), None), StateSlots(2, 0, num_snapshots=2, interval=64)
    blocks = RequestBlocks(8, 4, tiers=tiers, states=states)
    scheduler = Scheduler(blocks, 2, 16, 64)
    scheduler.add(make_request("first", num_prompt=11, max_new_tokens=1))
    while scheduler.has_work:
        run_step(scheduler)
    until(lambda: tiers.counters["down"] == 2 + 62)
    assert blocks._cache is not None
    blocks._cache.clear()
    states.clear()
    scheduler.add(make_request("again", num_prompt=11, max_new_tokens=1))
    assert scheduler.propose().is_empty
    until(lambda: blocks._fetches["again"].num_read == 2 + 62)
    num_steps = 1
    while scheduler.propose().is_empty and num_steps < 99:
        num_steps += 1
    assert num_steps <= 17, "and with the first of them the pages of blocks"
    tiers.close()


def test_a_long_prefix_without_a_state_is_seen_at_one_page_of_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KvCache([KvLayout.gqa(1, 2)], 8, 4, torch.float32, "cpu", states=[((40,), (3, 5))], num_states=4)
    num_hashed = 0

    def counted(key: bytes, numbers: range) -> list[bytes]:
        nonlocal num_hashed
        num_hashed += len(numbers)
        return state_keys(key, numbers)

    tiers = PageTiers(cache, in_memory(cache), None)
    for block in range(6):
        tiers.keep(KEYS[block], block)
    tiers.keep_state(KEYS[0], 2)
    until(lambda: tiers.counters["down"] == 6 + 4)
    monkeypatch.setattr(pages, "state_keys", counted)
    fetch = tiers.fetch(KEYS[:6])
    until(lambda: fetch.done)
    assert (fetch.num_blocks, num_hashed) == (1, 5 + 4 + 4), "of five blocks; of the first one to look, and to read"
    tiers.close()


@pytest.mark.parametrize("at", ["page", "key", "half written"])
def test_a_page_in_memory_that_was_damaged_or_half_written_is_not_taken(at: str) -> None:
    cache = small_cache()
    host = in_memory(cache, 8 * slot_bytes(cache.page_bytes))
    page = cache.read_page(2)
    host.write(KEYS[1], page)
    assert torch.equal(host.read(KEYS[1]).data, page)  # type: ignore[union-attr]
    (slot,) = (each for each in host._slots(KEYS[1]) if host._words[each // 8])
    if at == "half written":  # by a rank that was killed
        host._words[slot // 8] = 0
        assert host.read(KEYS[1]) is None
    else:
        host._bytes[slot + (128 + 17 if at == "page" else 128 - 56 + 8 + 20)] ^= 1
        with pytest.raises(DamagedPage):
            host.read(KEYS[1])
    assert not host.has(KEYS[1])
    host.write(KEYS[1], page)
    assert torch.equal(host.read(KEYS[1]).data, page)  # type: ignore[union-attr]


def test_the_page_used_longest_ago_makes_room_in_memory() -> None:
    cache = small_cache()
    host = in_memory(cache, 8 * slot_bytes(cache.page_bytes))
    keys = [bytes([number]) * 32 for number in range(9)]
    for number, key in enumerate(keys[:8]):
        host.write(key, cache.read_page(number % 6))
    assert host.has(keys[0])
    host.write(keys[8], cache.read_page(0))
    assert [host.has(key) for key in keys] == [True, False, *[True] * 7]


def test_folders_that_share_a_path_keep_one_quota_together(tmp_path: Path) -> None:
    """Two ranks or launches, of one model or two: neither knows what the other writes."""
    size = len(record_of())
    folders = [PageFolder(tmp_path, model, 10 * size) for model in (b"model", b"model", b"other")]
    for number in range(60):
        folders[number % 3].write(bytes([number]) * 32, FORM, memoryview(PAGE))
        assert len(list(tmp_path.glob("*/*.page"))) <= 10
    last = bytes([57]) * 32
    assert bytes(folders[1].read(last, FORM) or b"") == PAGE, "one finds what another has written"
    assert folders[2].read(last, FORM) is None, "but not of another model"
    for file in tmp_path.glob("*/*.page"):
        file.unlink()
    assert int.from_bytes((tmp_path / "used").read_bytes(), "little") > 0
    PageFolder(tmp_path, b"model", 10 * size)
    assert int.from_bytes((tmp_path / "used").read_bytes(), "little") == 0, "a start counts what is there"


def test_files_that_take_longer_than_computing_are_left_out(tmp_path: Path) -> None:
    cache = small_cache()
    tiers = PageTiers(cache, None, PageFolder(tmp_path, b"model", 1 << 20))
    for block in range(3):
        tiers.keep(KEYS[block], block)
    until(lambda: tiers.counters["down"] == 3)
    tiers.computing_s = 0.0
    for number in range(3):
        fetch = tiers.fetch(KEYS[:1])
        until(lambda fetch=fetch: fetch.done)
        assert len(fetch.pages) == (number == 0), "the first tells how long it takes"
    assert tiers.counters["slow"] == 2
    tiers.computing_s = 60.0
    fetch = tiers.fetch(KEYS[:3])
    until(lambda: fetch.done)
    assert len(fetch.pages) == 3
    tiers.close()


def test_a_tier_without_room_for_one_page_is_refused() -> None:
    cache = small_cache()
    with pytest.raises(ConfigError, match=r"raise cache\.host_gb, or leave it out"):
        in_memory(cache, slot_bytes(cache.page_bytes) - 1)
