"""Pages outside the pool come up whole and right, or not at all."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.attention_dp.pages import DamagedPage, PageFolder, PageTiers, decode_page, encode_header
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Scheduler
from moe_serve.errors import ConfigError
from tests.attention_dp.steps import make_request, next_token

PAGE = bytes(range(200))
KEYS = [bytes([number]) * 32 for number in range(8)]


def record_of(key: bytes = KEYS[0]) -> bytes:
    return encode_header(key, 2, memoryview(PAGE)) + PAGE


def until(holds: Callable[[], bool]) -> None:
    late_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < late_s, "the thread of pages did not get there"
        time.sleep(0.001)


def small_cache(dtype: torch.dtype = torch.float32, num_blocks: int = 6) -> KvCache:
    cache = KvCache([KvLayout.gqa(2, 4), KvLayout.mla(8, 4)], num_blocks, 4, dtype, "cpu")
    for block in range(num_blocks):
        cache.write_page(block, torch.full((cache.page_bytes,), block + 1, dtype=torch.uint8))
    return cache


@settings(max_examples=100, deadline=None)
@given(bit=st.integers(0, 8 * len(record_of()) - 1))
def test_any_flipped_bit_is_seen(bit: int) -> None:
    record = bytearray(record_of())
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedPage):
        decode_page(memoryview(record), KEYS[0], 2, len(PAGE))


@pytest.mark.parametrize("size", [0, 1, 40, len(record_of()) - 1])
def test_a_record_that_is_cut_off_is_refused(size: int) -> None:
    assert bytes(decode_page(memoryview(record_of()), KEYS[0], 2, len(PAGE))) == PAGE
    with pytest.raises(DamagedPage):
        decode_page(memoryview(record_of()[:size]), KEYS[0], 2, len(PAGE))


@pytest.mark.parametrize("asked", [(KEYS[1], 2, 200), (KEYS[0], 3, 200), (KEYS[0], 2, 199)])
def test_a_page_with_another_key_or_form_is_refused(asked: tuple[bytes, int, int]) -> None:
    with pytest.raises(DamagedPage, match="version"):
        decode_page(memoryview(record_of()), *asked)


def test_a_damaged_file_is_removed_and_a_foreign_one_never_read(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, b"model", 1 << 20)
    folder.write(KEYS[0], 2, memoryview(PAGE))
    assert bytes(folder.read(KEYS[0], 2, len(PAGE)) or b"") == PAGE
    assert PageFolder(tmp_path, b"other weights", 1 << 20).read(KEYS[0], 2, len(PAGE)) is None
    file = next(folder.folder.glob("*.page"))
    file.rename(file.with_name(KEYS[1].hex() + ".page"))
    with pytest.raises(DamagedPage):
        folder.read(KEYS[1], 2, len(PAGE))
    assert not list(folder.folder.iterdir())
    file.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        folder.read(KEYS[0], 2, len(PAGE))


def test_the_oldest_files_make_room_those_of_other_models_too(tmp_path: Path) -> None:
    size = len(record_of())
    other = PageFolder(tmp_path, b"other", 10 * size)
    other.write(KEYS[7], 2, memoryview(PAGE))
    os.utime(next(other.folder.iterdir()), ns=(0, 0))
    folder = PageFolder(tmp_path, b"model", 4 * size)
    for number, key in enumerate(KEYS[:5]):
        folder.write(key, 2, memoryview(PAGE))
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
    tiers = PageTiers(cache, 1 << 20 if where == "host" else 0, folder)
    for block in range(3):
        tiers.keep(KEYS[block], block)
    until(lambda: tiers.counters["down"] == 3)
    if where == "a new process":
        tiers.close()
        tiers = PageTiers(cache, 0, PageFolder(tmp_path, b"model", 1 << 20))
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
    tiers = PageTiers(cache, 1 << 20, None)
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


def test_a_full_disk_switches_the_tier_off_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = PageFolder(tmp_path, b"model", 1 << 20)

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder, "write", full)
    tiers = PageTiers(small_cache(), 0, folder)
    for block in range(4):
        tiers.keep(KEYS[block], block)
    until(lambda: bool(caplog.records))
    fetch = tiers.fetch(KEYS[:2])
    until(lambda: fetch.done)
    tiers.close()
    assert len([line for line in caplog.messages if "No space left" in line]) == 1


def test_a_disk_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PageFolder(tmp_path, b"model", 1 << 20)
    monkeypatch.setattr(folder, "read", lambda *given: time.sleep(0.3))
    monkeypatch.setattr("moe_serve.attention_dp.pages._PATIENCE_S", 0.05)
    tiers = PageTiers(small_cache(), 0, folder)
    fetch = tiers.fetch(KEYS[:2])
    assert tiers.is_coming(fetch)
    time.sleep(0.06)
    assert not tiers.is_coming(fetch)
    assert tiers.counters["late"] == 1
    tiers.close()


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_prefix_that_left_the_pool_is_not_computed_again(where: str, tmp_path: Path) -> None:
    cache = small_cache(num_blocks=8)
    folder = PageFolder(tmp_path, b"", 1 << 20) if where == "disk" else None
    tiers = PageTiers(cache, 1 << 20 if where == "host" else 0, folder)
    scheduler = Scheduler(RequestBlocks(8, 4, True, b"", tiers), 2, 16, 64)
    computed: dict[str, int] = {}

    def run(name: str, first: int) -> None:
        """Runs a request whose slots hold, once they are computed, what their positions say."""
        request = make_request(name, num_prompt=21, max_new_tokens=2, first=first)
        scheduler.add(request)
        late_s = time.monotonic() + 10
        while scheduler.has_work:
            assert time.monotonic() < late_s
            proposal = scheduler.propose()
            assert proposal.is_empty <= scheduler.awaits_pages
            for chunk in scheduler.commit(proposal):
                computed[name] = computed.get(name, 0) + chunk.length
                for at in range(chunk.start, chunk.start + chunk.length):
                    slot = request.block_ids[at // 4] * 4 + at % 4
                    for layer in range(2):
                        cache.layer(layer)[slot] = first + at
                for at in range(chunk.start + chunk.length):
                    slot = request.block_ids[at // 4] * 4 + at % 4
                    assert cache.layer(1)[slot].eq(first + at).all(), f"position {at} has other values"
                scheduler.complete(chunk, next_token(request) if chunk.samples else None)
                if len(request.output_ids) == 2:
                    scheduler.finish(name)
            scheduler.check()

    run("long ago", 0)
    until(lambda: tiers.counters["down"] == 5)
    run("between", 100)
    run("between, too", 200)
    run("again", 0)
    assert computed == {"long ago": 22, "between": 22, "between, too": 22, "again": 2}
    assert scheduler.stats.num_cached_prompt_tokens == 20
    scheduler.blocks.flush()
    run("after a flush", 0)
    assert computed["after a flush"] == 22
    tiers.close()
