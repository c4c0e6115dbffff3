"""Pages that are handed over arrive whole and right, or a decode rank computes them, to the same tokens.

In `play` the values that a model would cache are a hash of all tokens up to theirs, and the next token is a hash of all
cached values that it would attend to. So one wrong byte in one page shows as a wrong token. A model with states goes on
from all bytes of a slot, too.
"""

import mmap
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import pytest
import torch

from moe_serve.attention_dp import page_channel, page_record, request_blocks
from moe_serve.attention_dp.kv_cache import KvCache, KvLayout
from moe_serve.attention_dp.page_channel import RECORD_BYTES, PageCopier, PageReceiver, PageSender, heads_of
from moe_serve.attention_dp.page_record import HEAD
from moe_serve.attention_dp.request import Handover, Request, SamplingParams
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Scheduler
from moe_serve.attention_dp.state_slots import StateSlots
from moe_serve.errors import ConfigError

LAYOUTS = [KvLayout.gqa(1, 2), KvLayout.mla(3, 2)]
LAUNCH = 77


@contextmanager
def memory(size: int) -> Iterator[int]:
    descriptor = os.memfd_create("pages")
    os.ftruncate(descriptor, size)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def cache_of(num_blocks: int, layouts: list[KvLayout] = LAYOUTS, block_size: int = 4, fill: int = 0) -> KvCache:
    cache = KvCache(layouts, num_blocks, block_size, torch.float32, "cpu")
    for block in range(num_blocks if fill else 0):
        draw = torch.Generator().manual_seed(fill + block)
        cache.write_page(block, torch.randint(0, 256, (cache.page_bytes,), dtype=torch.uint8, generator=draw))
    return cache


def request_of(name: str, num_pages: int, attempt: int = 0) -> Request:
    request = Request(name, attempt, list(range(4 * num_pages)), [1], SamplingParams(), seed=0)
    request.block_keys = [bytes([number]) * 32 for number in range(num_pages)]
    request.block_ids = list(range(num_pages))
    return request


def test_the_checksum_is_crc32c():
    copier = PageCopier(cache_of(1), page_record.library())
    if page_record.library() is None:
        pytest.skip("no C compiler")
    none = np.empty((1, 0), dtype=np.uint8)
    copier._part_bytes[:] = 0
    assert copier.copy(np.frombuffer(b"123456789", np.uint8).reshape(1, 9), none, [0], into_pool=False) == [0xE3069283]


@pytest.mark.parametrize(("compiled", "near"), [(True, 1024), (False, 1024), (True, 2)])
@pytest.mark.parametrize("layouts", [LAYOUTS, [KvLayout.gqa(1, 1)], [KvLayout.mla(7, 1)] * 3], ids=len)
def test_pages_come_whole_around_the_end_of_the_memory(
    layouts: list[KvLayout], compiled: bool, near: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page_channel, "_NEAR", near)
    if not compiled:
        monkeypatch.setattr(page_channel, "library", lambda: None)
    ours, theirs = cache_of(5, layouts, fill=1), cache_of(9, layouts)
    with memory(mmap.PAGESIZE + 7 * (RECORD_BYTES + ours.page_bytes)) as descriptor:
        sender, receiver = PageSender(descriptor, ours, LAUNCH), PageReceiver([descriptor], theirs)
        assert sender.num_slots == 7
        for attempt in range(4):
            request = request_of("a", 5, attempt)
            sender.send(request, 0, 2)
            sender.send(request, 2, 5)
            blocks = [8, 3, 0, 6, 4]
            assert receiver.take(request, Handover(0, LAUNCH, attempt), 1, blocks[1:]) == 4
            assert receiver.take(request, Handover(0, LAUNCH, attempt), 0, blocks[:1]) == 1
            assert all(torch.equal(ours.read_page(page), theirs.read_page(blocks[page])) for page in range(5))
        assert receiver.counters == dict.fromkeys(page_channel.COUNTERS, 0) | {"from_prefill": 20}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"rank": 0}, None),
        ({"launch_id": LAUNCH + 1}, "evicted"),
        ({"attempt": 4}, "evicted"),
        ({"attempt": 4, "why_short": "peer_lost"}, "peer_lost"),
        ({"attempt": 4, "why_short": "late"}, "late"),
    ],
)
def test_nothing_is_taken_that_was_not_asked_for(asked: dict[str, int], reason: str | None):
    cache = cache_of(6, fill=1)
    with memory(20_000) as descriptor:
        sender, receiver = PageSender(descriptor, cache, LAUNCH), PageReceiver([descriptor], cache)
        sender.send(request_of("a", 2, attempt=3), 0, 2)
        got = receiver.take(request_of("a", 2), replace(Handover(0, LAUNCH, 3), **asked), 0, [4, 5])
        assert got == (0 if reason else 2)
        assert {name for name, number in receiver.counters.items() if number} == {reason or "from_prefill"}
        assert receiver.take(request_of("b", 2), Handover(0, LAUNCH, 3), 0, [4, 5]) == 0


def test_any_flipped_bit_is_seen():
    ours, theirs = cache_of(1, fill=1), cache_of(1)
    with memory(mmap.PAGESIZE + RECORD_BYTES + ours.page_bytes) as descriptor:
        sender, receiver = PageSender(descriptor, ours, LAUNCH), PageReceiver([descriptor], theirs)
        request, handover = request_of("a", 1), Handover(0, LAUNCH, 0)
        sender.send(request, 0, 1)
        page = range(mmap.PAGESIZE, mmap.PAGESIZE + ours.page_bytes)
        with mmap.mmap(descriptor, 0) as shared:
            for at in [*range(HEAD.size + 4), *page]:
                for bit in (1, 128):
                    shared[at] ^= bit
                    assert receiver.take(request, handover, 0, [0]) == 0, f"byte {at}"
                    shared[at] ^= bit
        assert receiver.take(request, handover, 0, [0]) == 1


def test_memory_that_holds_no_page_is_refused_with_the_setting():
    cache = cache_of(1)
    with memory(mmap.PAGESIZE + RECORD_BYTES) as descriptor, pytest.raises(ConfigError, match="handover_gb"):
        PageSender(descriptor, cache, LAUNCH)


# ---- faults

WORD = 8  # bytes of a cached token of `Rank`: one layer of one float64 in the place of two float32
PROMPT, OUTPUT, NUM_BLOCKS = 30, 6, 64
STATE_BYTES = 4 * (3 + 2 * 4 + 4)  # almost two pages, between which no part of a state ends


class Rank:
    """A rank with its scheduler and its 'model'. weights: of the model; other ones cache other values"""

    def __init__(
        self,
        weights: bytes = b"",
        sender: int | None = None,
        receivers: list[int] | None = None,
        has_states: bool = False,
        num_snapshots: int = 6,
        max_batch_tokens: int = 8,
    ):
        self.weights = weights
        shapes = [((3,), (2, 4)), ((4,),)] if has_states else []
        self.cache = KvCache(
            [KvLayout.mla(1, 1)], NUM_BLOCKS, 4, torch.float32, "cpu", states=shapes, num_states=8 + num_snapshots
        )
        self.values = self.cache.layer(0).view(torch.int64).view(-1)  # by slot
        self.sender = None if sender is None else PageSender(sender, self.cache, LAUNCH)
        self.receiver = None if receivers is None else PageReceiver(receivers, self.cache)
        states = StateSlots(8, 0, num_snapshots, 16) if has_states else None
        blocks = RequestBlocks(NUM_BLOCKS, 4, True, b"model" + weights, None, self.sender, self.receiver, states=states)
        self.scheduler = Scheduler(blocks, 8, max_batch_tokens, PROMPT + OUTPUT + 1)

    def step(self) -> dict[str, list[int]]:
        """Runs a step; returns the outputs of requests that have ended."""
        ended = {}
        proposal = self.scheduler.propose()
        for chunk in self.scheduler.commit(proposal):
            request = chunk.request
            for position in range(chunk.start, chunk.start + chunk.length):
                self.values[self._slot(request, position)] = _hash(request.token_ids(0, position + 1), self.weights)
            if request.state_slot >= 0:
                self._go_on(request, chunk.start, chunk.length)
            token = self._sample(request, chunk.start + chunk.length) if chunk.samples else None
            self.scheduler.complete(chunk, token)
            if len(request.output_ids) == request.params.max_new_tokens:
                ended[request.request_id] = request.output_ids
                self.scheduler.finish(request.request_id)
        self.scheduler.check()
        return ended

    def _go_on(self, request: Request, start: int, length: int) -> None:
        """Makes every byte of a request's state follow from all that it was, and the tokens."""
        source, to, kept_after, kept_in = request.state_row(start, length)
        state = bytes(STATE_BYTES) if source < 0 else self._state(source)
        for number in range(length):
            known = request.token_ids(start + number, start + number + 1)
            state = blake2b(state + repr(known).encode() + self.weights, digest_size=STATE_BYTES).digest()
            for slot in [to] * (number + 1 == length) + [kept_in] * (number + 1 == kept_after):
                rest = state
                for pool in self._pools():
                    part, rest = rest[: pool.shape[1]], rest[pool.shape[1] :]
                    pool[slot] = torch.frombuffer(bytearray(part), dtype=torch.uint8)

    def _pools(self) -> list[torch.Tensor]:
        pools = (pool for pools in self.cache._states for pool in pools)
        return [pool.view(len(pool), -1).view(torch.uint8) for pool in pools]

    def _state(self, slot: int) -> bytes:
        return b"".join(pool[slot].numpy().tobytes() for pool in self._pools())

    def _slot(self, request: Request, position: int) -> int:
        return request.block_ids[position // 4] * 4 + position % 4

    def _sample(self, request: Request, end: int) -> int:
        attended = [int(self.values[self._slot(request, position)]) for position in range(end)]
        state = b"" if request.state_slot < 0 else self._state(request.state_slot)
        return _hash(attended, str(request.seed).encode() + state) % 1000


def _hash(numbers: list[int], salt: bytes) -> int:
    return int.from_bytes(blake2b(repr(numbers).encode() + salt, digest_size=7).digest(), "little")


def run_alone(rank: Rank, request: Request) -> list[int]:
    rank.scheduler.add(request)
    while True:
        if ended := rank.step():
            return ended[request.request_id]


FAULTS = (
    "none",
    "flip",
    "torn",
    "double",
    "foreign",
    "other weights",
    "late",
    "killed",
    "restarted",
    "lapped",
    "aborted",
)


@dataclass
class Played:
    num_wrong: int = 0
    num_without_end: int = 0
    num_leaked: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)


def play(num_faults: int, num_prefill: int, num_decode: int, seed: int, has_states: bool = False) -> Played:
    """Hands prompts over, with one fault each, and compares the tokens with those of one rank that does all."""
    draw, played = random.Random(seed), Played()
    small = mmap.PAGESIZE + 40 * (RECORD_BYTES + 4 * WORD)
    alone = Rank(has_states=has_states)
    files = [os.memfd_create("pages") for _ in range(num_prefill)]
    try:
        for each in files:
            os.ftruncate(each, small)
        prefill = [Rank(sender=each, has_states=has_states) for each in files]
        decode = [Rank(receivers=files, has_states=has_states) for _ in range(num_decode)]
        for number in range(num_faults):
            fault = FAULTS[number % len(FAULTS)]
            played.faults[fault] += 1
            begin = draw.choice([0, 8]) * [7]  # some prompts begin alike
            prompt = begin + [draw.randrange(500) for _ in range(draw.randrange(9, PROMPT) - len(begin))]
            params = SamplingParams(max_new_tokens=OUTPUT)
            sampling_seed = draw.choice([0, number])  # greedy, or a draw of its own
            base = Request(f"r{number}", 1, prompt, [], params, sampling_seed)
            right = run_alone(alone, _again(base, f"alone {number}"))
            by = draw.randrange(len(prefill))
            ranks = draw.sample(decode, min(len(decode), draw.choice([1, 2])))
            expecting = ranks[: draw.choice([0, 1])]
            for rank in expecting:
                rank.scheduler.blocks.expect(_again(base, base.request_id), Handover(by, LAUNCH, 1))
            outputs, why = _prefill(prefill, files, base, fault, by, expecting)
            _damage(draw, prefill[by], base, fault)
            for rank in expecting[: draw.choice([0, 1])]:
                rank.step()
            goes_on = _again(base, base.request_id, attempt=2, output_ids=outputs)
            goes_on.handover = Handover(by, LAUNCH, 1, why)
            for rank in ranks:  # the second one where the first was lost before its first token
                rank.scheduler.add(goes_on)
                if rank is not ranks[-1]:
                    rank.scheduler.propose()
                    rank.scheduler.abort(goes_on.request_id)
                    goes_on = _again(goes_on, base.request_id, attempt=goes_on.attempt + 1, output_ids=list(outputs))
                    goes_on.handover = Handover(by, LAUNCH, 1, why)
            ended: dict[str, list[int]] = {}
            for _ in range(60):
                ended = ended or ranks[-1].step()
            played.num_without_end += base.request_id not in ended
            played.num_wrong += ended.get(base.request_id, right) != right
            if fault == "none" and not begin and played.num_wrong == 0:
                whole = (len(prompt) - has_states) // 4 * 4  # a state is that in front of the last token, or before it
                assert goes_on.num_handed_over == whole, "all of it came, and did not count as cached"
                assert goes_on.num_cached_prompt == 0 or ranks[0] is ranks[-1]
        ranks_of_both = [*prefill, *decode]
        played.num_leaked = sum(NUM_BLOCKS - rank.scheduler.blocks.num_free for rank in ranks_of_both)
        for rank in decode:
            assert rank.receiver is not None
            played.counters.update(rank.receiver.counters)
    finally:
        for each in files:
            os.close(each)
    return played


def _again(request: Request, name: str, attempt: int = 1, output_ids: list[int] | None = None) -> Request:
    return Request(name, attempt, request.prompt_ids, list(output_ids or []), request.params, request.seed)


def _prefill(
    ranks: list[Rank], files: list[int], base: Request, fault: str, by: int, expecting: list[Rank]
) -> tuple[list[int], str]:
    """Computes a prompt on a prefill rank; returns its first token, and why there is none. expecting: take it early"""
    rank, has_states = ranks[by], bool(ranks[by].cache.num_state_pages)
    if fault == "other weights":
        rank = Rank(b"other", sender=files[by], has_states=has_states)
    if fault == "lapped":
        run_alone(rank, _to_prefill(_again(base, "before" + base.request_id)))
    request = _to_prefill(base)
    rank.scheduler.add(request)
    if fault in ("killed", "restarted", "late", "aborted"):
        ended = rank.step()
        for each in expecting:
            each.step()
        if fault == "restarted":
            ranks[by] = Rank(sender=files[by], has_states=has_states)
        if fault in ("killed", "aborted"):
            rank.scheduler.abort(request.request_id)
        if fault == "late":  # it goes on after its request was taken from it, and nobody listens
            while not ended:
                ended = rank.step()
        return [], "late" if fault == "late" else "peer_lost"
    while not (ended := rank.step()):
        for each in expecting:
            each.step()
    outputs = ended[base.request_id]
    if fault == "other weights":
        outputs = []  # the rank before it writes on where it was, over records of the other one
    if fault == "lapped":
        for other in range(6):
            prompt = [900 + other] * (PROMPT - 2)
            run_alone(rank, _to_prefill(Request(f"{base.request_id} {other}", 1, prompt, [], base.params, 0)))
    return outputs, ""


def _to_prefill(request: Request) -> Request:
    params = SamplingParams(max_new_tokens=1)
    sent = Request(request.request_id, request.attempt, request.prompt_ids, [], params, request.seed)
    sent.hand_over_from = 0
    return sent


def _damage(draw: random.Random, rank: Rank, base: Request, fault: str) -> None:
    """Does to the memory what a broken bit, a dying or a foreign writer would."""
    assert rank.sender is not None
    ring = rank.sender._ring
    own = page_channel.number_of(LAUNCH, base.request_id, 1)
    slots = np.flatnonzero(ring.fields["number"] == own)
    if not len(slots):
        return
    slot = int(draw.choice(slots.tolist()))
    if fault == "flip":
        at = draw.choice(["record", "page"])
        row = ring.records[slot, : HEAD.size + 4] if at == "record" else ring.pages[slot]
        row[draw.randrange(len(row))] ^= 1 << draw.randrange(8)
    elif fault == "torn":
        half = len(ring.pages[slot]) // 2
        ring.pages[slot, half:] = ring.pages[(slot + 1) % ring.num_slots, half:] ^ 1
    elif fault == "double":
        to = (slot + 5) % ring.num_slots
        ring.records[to], ring.pages[to] = ring.records[slot], ring.pages[slot]
    elif fault == "foreign":  # whole and with a right checksum, but of other tokens
        foreign = Rank(b"")
        block = 3
        foreign.values[4 * block : 4 * block + 4] = draw.randrange(1 << 40)
        head = heads_of(
            rank.sender._copier.magic, rank.cache, LAUNCH, base.request_id, 1, int(ring.fields["index"][slot]),
            [draw.randbytes(32)],
        )  # fmt: skip
        copier = PageCopier(foreign.cache, page_record.library())
        (checksum,) = copier.copy(head, ring.pages[slot : slot + 1], [block], into_pool=False)
        ring.records[slot, : HEAD.size] = head[0]
        ring.records[slot, HEAD.size : HEAD.size + 4] = np.frombuffer(int(checksum).to_bytes(4, "little"), np.uint8)


RANKS = [(1, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    "num_faults", [44, pytest.param(700, marks=pytest.mark.slow)], ids=lambda number: f"{number} faults"
)
@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: f"{ranks[0]}+{ranks[1]}")
@pytest.mark.parametrize("has_states", [False, True], ids=["", "with states"])
def test_no_fault_changes_a_token_or_keeps_a_block(ranks: tuple[int, int], num_faults: int, has_states: bool):
    played = play(num_faults, *ranks, seed=ranks[0] + 2 * ranks[1], has_states=has_states)
    assert (played.num_wrong, played.num_leaked, played.num_without_end) == (0, 0, 0)
    assert set(played.faults) == set(FAULTS)
    assert min(played.counters[name] for name in ("from_prefill", "checksum", "version", "peer_lost", "evicted")) > 0


@pytest.mark.parametrize("has_states", [False, True], ids=["", "with states"])
def test_without_the_check_of_what_was_asked_for_tokens_are_wrong(has_states: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_channel, "are_what_was_asked", lambda heads, asked: np.ones(len(heads), dtype=bool))
    assert play(60, 1, 1, seed=1, has_states=has_states).num_wrong > 0


@pytest.mark.parametrize("has_states", [False, True], ids=["", "with states"])
def test_without_the_checksum_tokens_are_wrong(has_states: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_channel, "are_right", lambda given, computed: np.ones(len(given), dtype=bool))
    assert play(60, 1, 1, seed=1, has_states=has_states).num_wrong > 0


def early(num_free: int = NUM_BLOCKS, has_states: bool = False) -> tuple[Rank, Rank, Request, Handover]:
    """Returns a prefill rank with a prompt of 28 tokens, and a decode rank with free blocks that expects it."""
    descriptor = os.memfd_create("pages")
    os.ftruncate(descriptor, mmap.PAGESIZE + 40 * (RECORD_BYTES + 4 * WORD))
    prefill = Rank(sender=descriptor, has_states=has_states)
    decode = Rank(receivers=[descriptor], has_states=has_states)
    os.close(descriptor)
    base = Request("r", 1, list(range(28)), [], SamplingParams(max_new_tokens=OUTPUT), 3)
    handover = Handover(0, LAUNCH, 1)
    blocks = decode.scheduler.blocks
    blocks._allocate(NUM_BLOCKS - num_free)
    blocks.expect(_again(base, "r"), handover)
    prefill.scheduler.add(_to_prefill(base))
    return prefill, decode, base, handover


def test_pages_come_while_the_prompt_is_computed_and_only_those_of_the_last_chunk_after_it():
    prefill, decode, base, handover = early()
    assert decode.receiver is not None
    blocks, receiver, taken = decode.scheduler.blocks, decode.receiver, []
    outputs: list[int] = []
    while not outputs:  # chunks of 8 tokens, 2 pages
        outputs = prefill.step().get("r", [])
        if not outputs:
            assert decode.step() == {}
            taken.append(receiver.counters["from_prefill"])
    assert taken == [2, 4, 6]
    goes_on = _again(base, "r", attempt=2, output_ids=outputs)
    goes_on.handover = handover
    decode.scheduler.add(goes_on)
    while not (ended := decode.step()):
        pass
    assert ended["r"] == run_alone(Rank(), _again(base, "alone"))
    assert receiver.counters == dict.fromkeys(page_channel.COUNTERS, 0) | {"from_prefill": 7}
    assert (goes_on.num_handed_over, goes_on.num_cached_prompt) == (28, 0)
    assert (blocks.expected, blocks.num_free) == ([], NUM_BLOCKS)


@pytest.mark.parametrize("end", ["aborted", "another request needs its blocks", "no block is free"])
def test_a_prompt_that_is_expected_keeps_no_block_from_those_that_need_it(end: str):
    num_free = 0 if end == "no block is free" else 10
    num_free -= end == "another request needs its blocks"
    prefill, decode, base, _ = early(num_free)
    blocks = decode.scheduler.blocks
    prefill.step()
    blocks.take_early(beside_decodes=True)
    assert blocks.num_free == max(0, num_free - 2)
    if end == "another request needs its blocks":
        decode.scheduler.add(Request("other", 1, list(range(100, 130)), [], base.params, 0))
        while not decode.scheduler.propose().prefills:
            pass
        assert (blocks.num_free, blocks.expected) == (1, [])
    else:
        decode.scheduler.abort("r")
        assert (blocks.num_free, blocks.expected) == (num_free, [])


def test_a_damaged_page_is_not_taken_early_and_looked_at_a_few_times():
    prefill, decode, base, handover = early()
    assert prefill.sender is not None
    assert decode.receiver is not None
    blocks, ring = decode.scheduler.blocks, prefill.sender._ring
    while not prefill.step():
        pass
    ring.pages[2, 0] ^= 1
    for _ in range(10):
        ring.num_sent += 1
        blocks.take_early(beside_decodes=False)
    assert decode.receiver.counters["from_prefill"] == 2
    assert next(iter(blocks._coming.values())).num_damaged == 3
    assert blocks.num_free == NUM_BLOCKS - 2
    goes_on = _again(base, "r", attempt=2)
    goes_on.handover = handover
    decode.scheduler.add(goes_on)
    while not (ended := decode.step()):
        pass
    assert ended["r"] == run_alone(Rank(), _again(base, "alone"))
    assert decode.receiver.counters["checksum"] == 1


def go_on(prefill: Rank, decode: Rank, base: Request, handover: Handover) -> Request:
    """Computes a prompt on one rank and the rest on the other; returns the request there, which has ended right."""
    outputs: list[int] = []
    while not outputs:
        outputs = prefill.step().get("r", [])
    goes_on = _again(base, "r", attempt=2, output_ids=outputs)
    goes_on.handover = handover
    decode.scheduler.add(goes_on)
    for _ in range(20):
        if ended := decode.step():
            assert ended["r"] == run_alone(Rank(has_states=True), _again(base, "alone"))
            return goes_on
    raise AssertionError("it has not ended")


def test_a_state_comes_with_pages_that_came_before_it_and_serves_later_prompts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_blocks, "_BYTES_UP", 4 * WORD)  # a page in each step
    prefill, decode, base, handover = early(has_states=True)
    assert decode.receiver is not None
    prefill.step()
    decode.step()
    assert decode.receiver.counters["from_prefill"] == 2, "of the first chunk"
    goes_on = go_on(prefill, decode, base, handover)
    assert decode.receiver.counters == dict.fromkeys(page_channel.COUNTERS, 0) | {"from_prefill": 6 + 2}
    assert (goes_on.num_handed_over, goes_on.num_cached_prompt) == (24, 0), "up to the block of the last token"
    later = _again(base, "later")
    assert run_alone(decode, later) == run_alone(Rank(has_states=True), _again(base, "alone"))
    assert later.num_cached_prompt == 24


@pytest.mark.parametrize("missing", ["there", "here", "damaged"])
def test_without_the_state_the_prompt_is_computed_again_at_once(missing: str, monkeypatch: pytest.MonkeyPatch):
    prefill, decode, base, handover = early(has_states=True)
    assert prefill.sender is not None
    assert decode.receiver is not None
    sender, receiver, states = prefill.sender, decode.receiver, decode.scheduler.blocks.states
    receiver._wait_s, sender._ring.connected[0] = 600.0, 1  # as between hosts, where a request waits for pages
    reason = "no_snapshot"
    if missing == "there":
        send = sender.send_state
        monkeypatch.setattr(sender, "send_state", lambda request, key, slot: send(request, key, None))
    elif missing == "here":
        assert states is not None
        monkeypatch.setattr(states, "begin_filling", lambda: -1)
        monkeypatch.setattr(states, "is_slot_coming", lambda request: False)
    else:
        reason, send = "checksum", sender.send_state

        def damaged(request: Request, key: bytes, slot: int | None) -> None:
            send(request, key, slot)
            sender._ring.pages[sender._next - 1, 0] ^= 1

        monkeypatch.setattr(sender, "send_state", damaged)
    goes_on = go_on(prefill, decode, base, handover)
    counters = receiver.counters | {"from_prefill": 0}
    assert counters == dict.fromkeys(page_channel.COUNTERS, 0) | {reason: 1}
    assert goes_on.num_handed_over == 0


def test_pages_that_are_there_are_found_again_without_a_look_at_the_whole_ring(monkeypatch: pytest.MonkeyPatch):
    prefill, decode, base, handover = early()
    while not prefill.step():
        pass
    receiver = decode.receiver
    assert prefill.sender is not None
    assert receiver is not None
    receiver._wait_s, prefill.sender._ring.connected[0] = 600.0, 1
    request, looks, find = _again(base, "r"), list[int | None](), receiver._find

    def counted(rank: int, number: int, first: int, count: int, start: int, end: int | None) -> list[int]:
        looks.append(end)
        return find(rank, number, first, count, start, end)

    monkeypatch.setattr(receiver, "_find", counted)
    request.arrived_s = time.monotonic()
    decode.scheduler.blocks._extend_keys(request, 6)
    for first in (0, 3):
        assert receiver.num_there(request, handover, first, 3) == 3
        assert receiver.take(request, handover, first, [40, 41, 42]) == 3
    assert len(looks) == 4
    assert None not in looks


@pytest.mark.parametrize("num_snapshots", [0, 1, 3])
def test_the_states_of_all_prompts_of_a_step_are_handed_over(num_snapshots: int):
    """However few snapshots there are; a decode rank needs one."""
    prompts = [[number, *range(9, 9 + length)] for number, length in enumerate((4, 5, 7, 8, 9, 3))]
    bases = [Request(f"r{prompt[0]}", 1, prompt, [], SamplingParams(max_new_tokens=OUTPUT), 3) for prompt in prompts]
    with memory(mmap.PAGESIZE + 40 * (RECORD_BYTES + 4 * WORD)) as descriptor:
        prefill = Rank(sender=descriptor, has_states=True, num_snapshots=num_snapshots, max_batch_tokens=64)
        decode = Rank(receivers=[descriptor], has_states=True, num_snapshots=max(1, num_snapshots))
        for base in bases:
            prefill.scheduler.add(_to_prefill(base))
        outputs = prefill.step() | prefill.step()
        goes_on = [_again(base, base.request_id, attempt=2, output_ids=outputs[base.request_id]) for base in bases]
        for request in goes_on:
            request.handover = Handover(0, LAUNCH, 1)
            decode.scheduler.add(request)
        ended: dict[str, list[int]] = {}
        for _ in range(60):
            ended |= decode.step()
    for base in bases:
        right = run_alone(Rank(has_states=True), _again(base, "alone"))
        assert ended[base.request_id] == right
    assert [request.num_handed_over for request in goes_on] == [4, 4, 4, 8, 8, 0], "up to the last token's block"
    assert decode.receiver is not None
    num_pages = sum(request.num_handed_over // 4 + 2 for request in goes_on[:5])
    assert decode.receiver.counters == dict.fromkeys(page_channel.COUNTERS, 0) | {"from_prefill": num_pages}


def test_a_request_that_ends_before_its_state_has_come_leaves_its_slot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_blocks, "_BYTES_UP", 4 * WORD)
    prefill, decode, base, handover = early(has_states=True)
    while not (ended := prefill.step()):
        pass
    goes_on = _again(base, "r", attempt=2, output_ids=ended["r"])
    goes_on.handover = handover
    decode.scheduler.add(goes_on)
    assert decode.step() == {}
    states = decode.scheduler.blocks.states
    assert states is not None
    assert len(states._filled) == 1
    decode.scheduler.abort("r")
    decode.scheduler.check()
    assert len(states._filled) == 0
    assert decode.scheduler.blocks.num_free == NUM_BLOCKS


def test_memory_that_holds_no_state_is_refused_with_the_setting():
    cache = Rank(has_states=True).cache
    page_channel.check_room_for_state(3, cache)
    with pytest.raises(ConfigError, match=r"room for 2 pages .* take 3, .* raise parallel\.handover_gb"):
        page_channel.check_room_for_state(2, cache)
