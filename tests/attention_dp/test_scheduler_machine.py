"""A hypothesis machine in the role of the engine: random arrivals, aborts, holds and stops with a simulated cache.

The simulated cache stores, per slot, the tokens that its KV depends on. A row reads every slot before it, so a block
that was shared or taken too early, written twice or left stale is seen as a wrong value, not only as a wrong count.
"""

import itertools
import random
import time
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from moe_serve.attention_dp import pages
from moe_serve.attention_dp.host_pages import HostPages, slot_bytes
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.attention_dp.page_record import PageForm
from moe_serve.attention_dp.pages import PageTiers
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Proposal, ScheduledChunk, Scheduler, most_yielding_rows
from moe_serve.attention_dp.speculation import Speculator
from moe_serve.attention_dp.state_slots import StateSlots
from moe_serve.kernels.sequence_states import copies_of

MAX_NEW_TOKENS = 6


def next_token(known: list[int]) -> int:
    """The 'model': two token values only, so that prompts often share prefixes."""
    return (3 * sum(known) + len(known)) % 2


def continuation(prompt: list[int], count: int) -> list[int]:
    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(prompt) :]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.integers(1, 4),
        max_running=st.integers(1, 4),
        spare_tokens=st.integers(0, 8),
        prefix_cache=st.booleans(),
    )
    def start(self, num_blocks, block_size, max_running, spare_tokens, prefix_cache):
        self.kv: dict[int, tuple[int, ...]] = {}  # slot -> the tokens its content was computed from
        self.seen: dict[int, tuple[int, ...]] | None = None  # the same of slots of states, where there are any
        states, tiers = self.states(max_running, block_size), self.tiers(num_blocks, block_size)
        self.blocks = RequestBlocks(num_blocks, block_size, prefix_cache, b"", tiers, states=states)
        self.scheduler = Scheduler(self.blocks, max_running, max_running + spare_tokens, 64, self.speculator())
        self.alive: dict[str, Request] = {}
        self.stop_after: dict[str, int] = {}
        self.num_added = 0
        self.num_steps_as_oldest = 0
        self.oldest: Request | None = None

    def tiers(self, num_blocks: int, block_size: int) -> PageTiers | None:
        return None

    def states(self, max_running: int, block_size: int) -> StateSlots | None:
        return None

    def speculator(self) -> Speculator | None:
        return None

    def propose(self) -> Proposal:
        """Returns a proposal behind those that only wait for pages, and checks it."""
        proposal = self.propose_with_pages()
        self.scheduler.check()
        chunks = proposal.decodes + proposal.prefills
        assert proposal.num_tokens == sum(chunk.length for chunk in chunks) <= self.scheduler.max_batch_tokens
        assert len({chunk.request.request_id for chunk in chunks}) == len(chunks)
        for request, start, length, *_ in chunks:
            assert self.scheduler.is_running(request)
            assert start == request.num_computed, f"the chunk of {request.request_id} is older than its blocks"
            assert 1 <= length <= len(request.block_ids) * self.blocks.block_size - start
        assert proposal.is_empty == (not chunks)
        assert proposal.is_empty == (not self.scheduler.has_work), "there is work, and nothing is proposed"
        return proposal

    def propose_with_pages(self) -> Proposal:
        return self.scheduler.propose()

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), data=st.data())
    def add(self, prompt, data):
        max_output = self.blocks.num_blocks * self.blocks.block_size + 1 - len(prompt)
        if max_output < 1:
            return
        max_new_tokens = data.draw(st.integers(1, min(MAX_NEW_TOKENS, max_output)))
        num_before = data.draw(st.integers(0, max_new_tokens - 1))  # resubmitted with the output of an earlier attempt
        request = Request(
            str(self.num_added), 0, prompt, continuation(prompt, num_before), SamplingParams(max_new_tokens), seed=0
        )
        self.num_added += 1
        self.scheduler.add(request)
        self.alive[request.request_id] = request
        self.stop_after[request.request_id] = data.draw(st.integers(num_before + 1, max_new_tokens))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data):
        self.abort_one(data)

    @rule(data=st.data(), hold=st.booleans())
    def step(self, data, hold):
        proposal = self.propose()
        if data.draw(st.integers(0, 9)) == 0:
            return  # the ranks agreed on not running: a proposal may be dropped
        if self.alive and data.draw(st.integers(0, 4)) == 0:
            self.abort_one(data)
        committed = self.scheduler.commit(proposal, hold)
        assert all(chunk.request.request_id in self.alive for chunk in committed)
        results = self.compute(committed)
        if self.alive and data.draw(st.integers(0, 4)) == 0:
            self.abort_one(data)
        self.complete(committed, results)
        self.watch_the_oldest(counts=not hold)

    @invariant()
    def accounting_holds(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.alive)
        if not self.alive:
            assert self.blocks.num_free == self.blocks.num_blocks, "blocks leaked"

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        tokens = sum(len(request.prompt_ids) + MAX_NEW_TOKENS for request in self.alive.values())
        limit = 10 + tokens * (1 + len(self.alive))
        for _ in range(limit):
            if not self.alive:
                break
            chunks = self.scheduler.commit(self.propose())
            self.complete(chunks, self.compute(chunks))
        assert not self.alive, f"{sorted(self.alive)} did not finish within {limit} steps"
        self.accounting_holds()

    def abort_one(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        del self.alive[request_id]

    def compute(self, chunks: tuple[ScheduledChunk, ...]) -> list[int | None]:
        """Runs the 'model': writes every row's slot, then reads all slots up to each row, then samples."""
        size = self.blocks.block_size
        for chunk in chunks:
            tokens = (*chunk.request.token_ids(0, chunk.start + chunk.num_known), *chunk.drafts)
            assert len(tokens) == chunk.start + chunk.length
            for position in range(chunk.start, chunk.start + chunk.length):
                block = chunk.request.block_ids[position // size]
                holders = [request for request in self.alive.values() if block in request.block_ids]
                assert len(holders) <= 1, f"block {block} is written while {len(holders)} requests hold it"
                self.kv[block * size + position % size] = tokens[: position + 1]
        results = []
        for chunk in chunks:
            request = chunk.request
            tokens = (*request.token_ids(0, chunk.start + chunk.num_known), *chunk.drafts)
            for position in range(chunk.start + chunk.length):
                slot = request.block_ids[position // size] * size + position % size
                assert self.kv[slot] == tokens[: position + 1], (
                    f"{request.request_id} reads a wrong value at {position}"
                )
            results.append(next_token(request.token_ids(0, request.num_known)) if chunk.samples else None)
        return results

    def complete(self, chunks, results):
        for chunk, token_id in zip(chunks, results, strict=True):
            request = chunk.request
            self.scheduler.complete(chunk, token_id)
            for draft in chunk.drafts:
                if self.ended(request) or draft != request.output_ids[-1]:
                    break
                self.scheduler.accept(request, next_token(request.token_ids(0, request.num_known)))
            else:
                self.ended(request)
        self.scheduler.check()

    def ended(self, request: Request) -> bool:
        """Checks a request that has a new token; returns whether it was the last one, or the request was aborted."""
        if request.request_id in self.alive:
            num_output = len(request.output_ids)
            assert num_output <= request.params.max_new_tokens
            assert request.output_ids == continuation(request.prompt_ids, num_output)
            if num_output < self.stop_after[request.request_id]:
                return False
            self.scheduler.finish(request.request_id)
            del self.alive[request.request_id]
        return True

    def watch_the_oldest(self, counts):
        """The oldest request ends within steps that depend on its size only, however many requests arrive."""
        oldest = min(self.alive.values(), key=lambda request: request.arrival, default=None)
        if oldest is not self.oldest:
            self.oldest, self.num_steps_as_oldest = oldest, 0
        elif oldest is not None and counts:
            self.num_steps_as_oldest += 1
            limit = len(oldest.prompt_ids) + MAX_NEW_TOKENS * (1 + self.scheduler.max_running)
            assert self.num_steps_as_oldest <= limit, f"{oldest.request_id} starves"


class TieredMachine(SchedulerMachine):
    """The same, with pages that leave the pool, and come up as slow or fast as their thread is.

    The thread works only while `settle` waits for it, so that a run that hypothesis repeats is the same again.
    """

    def tiers(self, num_blocks: int, block_size: int) -> PageTiers | None:
        cache = SimulatedCache(self.kv, block_size, self.seen)
        host = HostPages(None, 16 * slot_bytes(cache.page_bytes), cache.page_form)
        self.page_tiers = PageTiers(cast(KvCache, cache), host, None)
        self.pace = random.Random(0)
        self.page_tiers._lock.acquire()
        return self.page_tiers

    def propose_with_pages(self) -> Proposal:
        if self.pace.random() < 0.7:
            self.settle()
        while (proposal := self.scheduler.propose()).is_empty and self.scheduler.awaits_pages:
            self.settle()
        return proposal

    def complete(self, chunks, results):
        super().complete(chunks, results)
        if self.pace.random() < 0.7:
            self.settle()

    def settle(self) -> None:
        """Lets the thread do all that it can."""
        lock, late_s = self.page_tiers._lock, time.monotonic() + 60
        while True:
            lock.release()
            time.sleep(1e-5)
            lock.acquire()
            if lock._waiters:  # type: ignore[attr-defined]
                return
            assert time.monotonic() < late_s, "the thread of pages hangs"

    def teardown(self):
        super().teardown()
        if hasattr(self, "page_tiers"):
            self.page_tiers._lock.release()
            self.page_tiers.close()


class StatefulMachine(SchedulerMachine):
    """The same, of a model with states: a slot holds the tokens that its state has seen. Some steps are void.

    Some drafts are right, and the states behind the others are left.
    """

    def states(self, max_running: int, block_size: int) -> StateSlots | None:
        self.draw = random.Random(0)
        self.seen = {}
        self.num_void = 0
        num_drafts = most_yielding_rows(max_running) - max_running
        return StateSlots(max_running, num_drafts, num_snapshots=2, interval=2 * block_size)

    def speculator(self) -> Speculator | None:
        return RandomDrafts()

    def compute(self, chunks: tuple[ScheduledChunk, ...]) -> list[int | None]:
        rows = [chunk.request.state_row(chunk.start, chunk.length) for chunk in chunks]
        written = [slot for row in rows for slot in (row[1], *copies_of(row).values())]
        assert len(set(written)) == len(written), f"a state is written twice: {written}"
        for chunk, row in zip(chunks, rows, strict=True):
            source, to = row[:2]
            tokens = (*chunk.request.token_ids(0, chunk.start + chunk.num_known), *chunk.drafts)
            assert source == to or source not in written, f"state {source} is written while it is read"
            state = () if source < 0 else self.seen[source]
            assert state == tokens[: chunk.start], f"{chunk.request.request_id} reads the state of other tokens"
            self.seen[to] = tokens
            for after, kept in copies_of(row).items():
                self.seen[kept] = tokens[: chunk.start + after]
        if self.draw.random() < 0.1:
            self.num_void += 1
            self.seen.update(dict.fromkeys(written, (-1,)))
            return []
        return super().compute(chunks)

    def complete(self, chunks, results):
        if results:
            super().complete(chunks, results)

    def watch_the_oldest(self, counts):
        super().watch_the_oldest(counts and not self.num_void)  # behind a void step it begins again


class StatefulTieredMachine(StatefulMachine, TieredMachine):
    """Both: snapshots of states go down and come up with pages."""


class DraftingMachine(SchedulerMachine):
    """The same, with drafts of which some are right."""

    def speculator(self) -> Speculator | None:
        return RandomDrafts()


class RandomDrafts(Speculator):
    def __init__(self) -> None:
        super().__init__(max_drafts=5, index_bytes=1, shares_text=False, always=True)
        self._draw = random.Random(0)

    def draft(self, requests: Sequence[Request], num_rows: int) -> list[tuple[int, ...]]:
        drafts = []
        for request in requests:
            right = continuation(request.token_ids(0, request.num_known), self._draw.randint(0, 5))
            some = tuple(token ^ (self._draw.random() < 0.2) for token in right)[:num_rows]
            num_rows -= len(some)
            drafts.append(some)
        return drafts


class SimulatedCache:
    """Blocks of the simulated cache, as PageTiers moves them: a page is the number of what it holds."""

    page_bytes = 8
    layouts = ()

    def __init__(self, kv: dict[int, tuple[int, ...]], block_size: int, seen: dict[int, tuple[int, ...]] | None = None):
        self._kv, self._size, self._seen = kv, block_size, {} if seen is None else seen
        self.num_state_pages = 0 if seen is None else 2
        self.page_form = PageForm(0, block_size, self.page_bytes)
        self._pages: dict[int, list[tuple[int, ...]]] = {}
        self._numbers = itertools.count()

    def read_page(self, block: int) -> Tensor:
        number = next(self._numbers)
        self._pages[number] = [self._kv[block * self._size + offset] for offset in range(self._size)]
        return torch.tensor([number]).view(torch.uint8)

    def read_state_page(self, slot: int, index: int, page: Tensor) -> None:
        number = next(self._numbers)
        self._pages[number] = [self._seen[slot], (index,)]
        page.copy_(torch.tensor([number]).view(torch.uint8))

    def write_state_page(self, slot: int, index: int, page: Tensor) -> None:
        state, part = self._pages[int.from_bytes(page.numpy().tobytes(), "little")]
        assert part == (index,)
        assert index == 0 or self._seen[slot] == (*state, -1), "the pages are of two states"
        self._seen[slot] = state if index else (*state, -1)

    def write_page(self, block: int, page: Tensor) -> None:
        held = self._pages[int.from_bytes(page.numpy().tobytes(), "little")]
        self._kv.update({block * self._size + offset: value for offset, value in enumerate(held)})


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is late on a busy machine."""
    monkeypatch.setattr(pages, "_PATIENCE_S", 600.0)


LIMITS = {"stateful_step_count": 40, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
SchedulerMachine.TestCase.settings = settings(max_examples=70, **LIMITS)
StatefulMachine.TestCase.settings = settings(max_examples=70, **LIMITS)
TieredMachine.TestCase.settings = settings(max_examples=50, **LIMITS)
StatefulTieredMachine.TestCase.settings = settings(max_examples=50, **LIMITS)
DraftingMachine.TestCase.settings = settings(max_examples=50, **LIMITS)
TestSchedulerMachine = SchedulerMachine.TestCase
TestStatefulMachine = StatefulMachine.TestCase
TestTieredMachine = TieredMachine.TestCase
TestStatefulTieredMachine = StatefulTieredMachine.TestCase
TestDraftingMachine = DraftingMachine.TestCase


def test_two_equal_prompts_in_a_full_cache_preempt_nobody_once_one_has_published_what_both_begin_with() -> None:
    machine = SchedulerMachine()
    machine.start(num_blocks=5, block_size=4, max_running=2, spare_tokens=6, prefix_cache=True)
    shared = [1, 0, 0, 1, 1, 1, 0, 1]
    for request_id, prompt in (("a", shared), ("b", [*shared, 0, 0, 1])):
        request = Request(request_id, 0, prompt, [], SamplingParams(MAX_NEW_TOKENS), seed=0)
        machine.scheduler.add(request)
        machine.alive[request_id], machine.stop_after[request_id] = request, MAX_NEW_TOKENS

    first = machine.scheduler.commit(machine.propose())
    assert [(chunk.request.request_id, chunk.start, chunk.length) for chunk in first] == [("a", 0, 8)]
    machine.complete(first, machine.compute(first))
    a, b = machine.alive.values()
    assert len(a.block_ids) == 2
    assert len(b.block_ids) == 3
    assert not set(a.block_ids) & set(b.block_ids)
    assert machine.blocks.num_free == 0

    second = machine.scheduler.commit(machine.propose())
    assert [(chunk.request.request_id, chunk.start, chunk.length) for chunk in second] == [("a", 8, 1), ("b", 8, 3)]
    assert b.block_ids[:2] == a.block_ids[:2]
    assert b.block_ids[2] not in a.block_ids
    machine.complete(second, machine.compute(second))
    assert (machine.scheduler.stats.num_preempted, machine.scheduler.stats.num_cached_prompt_tokens) == (0, 8)
    machine.teardown()
