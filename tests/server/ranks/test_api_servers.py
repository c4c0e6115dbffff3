"""Two front ends with the same ranks, in one process: each serves, and what an admin asks of one is done by both."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.protocol.messages import Answer, Fatal, ForFrontEnds, RecordCommand
from moe_serve.links.folder import OwnFolder
from moe_serve.links.link import Link
from moe_serve.server.edge.client_limits import ClientTable
from moe_serve.server.observe.metrics import AdmissionMetrics
from moe_serve.server.ranks import calls
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.ranks.calls import ApiServers
from moe_serve.server.ranks.request_book import RequestBook
from moe_serve.server.requests.admission import Degradation
from moe_serve.server.requests.open_request import Changes, OpenRequest, RequestSpec, UnavailableError
from tests.clock import Clock
from tests.server.fake_worker import LinkedWorker
from tests.server.served import end_without_a_word, fake_config, in_event_loop, until


@dataclass
class System:
    folder: Path
    bridges: list[Bridge]
    workers: list[LinkedWorker]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start_ranks(self, launch_id: int) -> None:
        self.workers = [LinkedWorker(rank, 2, 0, launch_id, num_front_ends=2, folder=self.folder) for rank in range(2)]
        for worker in self.workers:
            worker.restarts_left = 1
        self.tasks += [asyncio.create_task(worker.run()) for worker in self.workers]

    async def start_new_ranks(self) -> None:
        """All ranks are lost and started again."""
        self.workers[0].say(Fatal(0, 5, "lost", 1))
        await until(lambda: all(bridge.workers.loss for bridge in self.bridges))
        for worker in self.workers:
            worker.was_shut_down = True
        await asyncio.wait(self.tasks, timeout=60)
        self.start_ranks(6)
        await until(lambda: not any(bridge.problem() for bridge in self.bridges))

    async def start_anew(self, number: int) -> None:
        """A front end ends without a word, and is started again."""
        self.end(number)
        self.bridges[number] = await self.start(number)
        await self.bridges[number].wait_until_ready()

    def end(self, number: int) -> None:
        """A front end ends without a word."""
        end_without_a_word(self.bridges[number])

    def stop_reading(self, number: int) -> None:
        """A front end is connected, and takes nothing of what others tell it."""
        self.bridges[number].api_servers.take = lambda message, answer_by: None  # type: ignore[method-assign]

    async def start(self, number: int) -> Bridge:
        config = fake_config(2, "server.api_workers=2")
        bridge = Bridge(config, None, None, Link(folder=self.folder, worker=number))
        await bridge.start()
        return bridge

    def submit(self, number: int, rid: str | None = None, tokens: int = 200) -> OpenRequest:
        params = SamplingParams(max_new_tokens=tokens)
        return self.bridges[number].submit([RequestSpec([7], params, seed=number, rid=rid)], Changes())[0]

    @property
    def num_running(self) -> int:
        return sum(len(worker.running) for worker in self.workers)


@contextlib.asynccontextmanager
async def two_front_ends() -> AsyncIterator[System]:
    """Two front ends and two ranks, ready."""
    with OwnFolder() as folder:
        system = System(folder, [], [])
        for number in range(2):
            system.bridges.append(await system.start(number))
        system.start_ranks(5)
        tasks = system.tasks
        try:
            for bridge in system.bridges:
                await bridge.wait_until_ready()
            yield system
        finally:
            await asyncio.gather(*(bridge.close() for bridge in system.bridges))
            await asyncio.wait(tasks, timeout=60)
            ended = [task.done() for task in tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    assert all(ended), "ranks end once both front ends have ended"


@in_event_loop
async def test_each_front_end_gets_the_tokens_of_its_own_requests():
    async with two_front_ends() as system:
        requests = [system.submit(number, tokens=5) for number in (0, 1, 0, 1)]
        await until(lambda: all(request.is_done for request in requests))
        assert [list(request.matcher.output_ids) for request in requests[:2]] == [[2, 3, 4, 5, 6], [3, 4, 5, 6, 7]]
        assert len({request.request_id for request in requests}) == 4
        for bridge in system.bridges:
            assert bridge.book.counters["num_finished"] == 2


@in_event_loop
async def test_what_a_late_rank_still_tells_a_front_end_that_starts_anew_is_not_done():
    """A rank that was masked while a pause ended never heard of the end; one that was stopped has old messages."""
    async with two_front_ends() as system:
        told: list[ForFrontEnds] = []
        for worker in system.workers:
            worker.pass_on = told.append
        for what, call in (
            ("pause", system.bridges[0].api_servers.pause(abort=False)),
            ("resume", system.bridges[0].api_servers.resume()),
        ):
            unanswered = asyncio.ensure_future(call)
            await until(lambda what=what: any(each.what == what for each in told))
            unanswered.cancel()
        pause, resume = (next(each for each in told if each.what == what) for what in ("pause", "resume"))
        new = system.bridges[1].api_servers
        for known in (resume, pause, resume):
            new.take(known, 0)
        assert not system.bridges[1].book.is_held
        slow(system)
        request = system.submit(1)
        new.take(ForFrontEnds(0, pause.call_id - 10**12, "abort"), 0)
        assert not request.is_done
        new.take(ForFrontEnds(0, resume.call_id + 1, "abort"), 0)
        assert request.is_done


def test_calls_of_hosts_whose_clocks_differ_are_done_in_their_order(monkeypatch: pytest.MonkeyPatch):
    books = [RequestBook(fake_config(1), None, lambda rank, message: None) for _ in range(2)]
    servers = [ApiServers(number, 2, 1, lambda rank, message: None, list, books[number]) for number in range(2)]
    told: list[ForFrontEnds] = []
    clock = Clock(monkeypatch, 0.0, calls)
    for number, clock.now_s in ((1, 86_400), (0, 5), (0, 6), (1, 86_407)):  # by the clock of its host
        asked, is_held = servers[number], books[number].is_held
        with pytest.raises(UnavailableError, match="since no rank serves that would tell"):
            asyncio.run(asked.resume() if is_held else asked.pause(abort=False))
        assert asked._newest is not None
        told.append(asked._newest)
        servers[1 - number].take(told[-1], 0)
        assert books[0].is_held == books[1].is_held != is_held
    assert [call.call_id for call in told] == sorted({call.call_id for call in told})
    cut_short: list[str | None] = []
    monkeypatch.setattr(books[1], "cut_short_all", cut_short.append)
    for number in range(2):
        servers[1].take(ForFrontEnds(number, 7, "abort", str(number)), 0)
    assert cut_short == ["0"], "only for its own host does it know that a call is old"


def slow(system: System) -> None:
    for worker in system.workers:
        worker.round_s = 0.02


@pytest.mark.parametrize("abort", [False, True], ids=["retract", "abort"])
@in_event_loop
async def test_a_pause_at_one_front_end_is_one_at_both(abort: bool):
    async with two_front_ends() as system:
        slow(system)
        requests = [system.submit(0), system.submit(1)]
        await until(lambda: all(request.num_output for request in requests))
        await system.bridges[1].api_servers.pause(abort=abort)
        await until(lambda: system.num_running == 0)
        assert [request.is_done for request in requests] == [abort, abort]
        later = system.submit(0, tokens=3)
        await asyncio.sleep(0.1)
        assert not later.num_output
        await system.bridges[0].api_servers.resume()
        await until(lambda: later.is_done)


@in_event_loop
async def test_a_request_is_aborted_through_either_front_end():
    async with two_front_ends() as system:
        slow(system)
        mine, other = system.submit(0, rid="mine"), system.submit(0, rid="other")
        await until(lambda: bool(mine.num_output))
        await system.bridges[1].api_servers.cut_short("mine")
        assert (mine.is_done, other.is_done) == (True, False)
        await system.bridges[1].api_servers.cut_short(None)
        assert other.is_done


@in_event_loop
async def test_while_no_rank_serves_the_front_end_that_was_asked_says_at_once_that_it_is_alone():
    with OwnFolder() as folder:
        system = System(folder, [], [])
        bridge = await system.start(0)
        with pytest.raises(UnavailableError, match="at front end 0 of 2 alone, since no rank serves"):
            await asyncio.wait_for(bridge.api_servers.pause(abort=False), 1.0)
        assert bridge.book.is_held
        await bridge.close()


@in_event_loop
async def test_commands_are_answered_to_the_front_end_that_asked():
    async with two_front_ends() as system:
        answers: Callable[[int], Answer] = lambda call_id: Answer(0, 5, call_id, True, str(call_id))  # noqa: E731
        system.workers[0].answer = answers
        first, second = await asyncio.gather(*(bridge.command(RecordCommand(0, "start")) for bridge in system.bridges))
        asked = {command.call_id for command in system.workers[0].commands}
        assert {int(first.text), int(second.text)} == asked
        assert len(asked) == 2


@in_event_loop
async def test_a_front_end_that_dies_takes_only_its_own_requests_with_it_and_its_successor_knows_of_a_pause():
    async with two_front_ends() as system:
        slow(system)
        kept, lost = system.submit(0, tokens=30), system.submit(1)
        await until(lambda: bool(kept.num_output and lost.num_output))
        system.end(1)
        await until(lambda: system.num_running == 1)
        await asyncio.wait_for(system.bridges[0].api_servers.pause(abort=False), 2.0)  # of those that live
        system.bridges[1] = await system.start(1)
        await system.bridges[1].wait_until_ready()
        assert system.bridges[1].book.is_held, "before it may send a request"
        new = system.submit(1, tokens=3)
        await system.bridges[1].api_servers.resume()
        await until(lambda: kept.is_done and new.is_done)
        assert list(kept.matcher.output_ids) == [2 + i for i in range(30)]


@in_event_loop
async def test_a_front_end_that_dies_while_it_is_asked_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "_ASK_AGAIN_S", 0.05)
    async with two_front_ends() as system:
        system.stop_reading(1)
        pause = asyncio.create_task(system.bridges[0].api_servers.pause(abort=False))
        await asyncio.sleep(0.15)
        assert not pause.done(), "it lives, and has not done it"
        system.end(1)
        await asyncio.wait_for(pause, 2.0)
        await system.start_anew(1)
        assert system.bridges[1].book.is_held


@in_event_loop
async def test_a_front_end_that_lives_but_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "_DEADLINE_S", 0.2)
    async with two_front_ends() as system:
        system.stop_reading(1)
        with pytest.raises(UnavailableError, match=r"front end 1 of 2 is connected .* did not confirm within 0\.2 s"):
            await system.bridges[0].api_servers.pause(abort=False)
        assert system.bridges[0].book.is_held


@in_event_loop
async def test_a_rank_that_does_not_pass_it_on_is_not_waited_for_where_another_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "_DEADLINE_S", 0.2)
    async with two_front_ends() as system:
        system.workers[0].pass_on = lambda message: None
        await asyncio.wait_for(system.bridges[0].api_servers.pause(abort=False), 2.0)
        assert system.bridges[1].book.is_held
        system.end(1)
        await asyncio.sleep(0.05)
        with pytest.raises(UnavailableError, match=r"rank 0 did not say within 0\.2 s which front ends it reaches"):
            await system.bridges[0].api_servers.resume()
        await system.start_anew(1)


@pytest.mark.parametrize("number", [0, 1], ids=["that was asked", "that was told"])
@in_event_loop
async def test_a_front_end_that_starts_after_new_ranks_knows_of_a_pause(number: int):
    async with two_front_ends() as system:
        await system.bridges[0].api_servers.pause(abort=False)
        await system.start_new_ranks()
        await system.start_anew(number)
        await until(lambda: system.bridges[number].book.is_held)
        await system.bridges[number].api_servers.resume()
        assert not any(bridge.book.is_held for bridge in system.bridges)


@in_event_loop
async def test_what_new_ranks_tell_again_is_not_done_again():
    async with two_front_ends() as system:
        await system.bridges[1].api_servers.pause(abort=True)
        waiting = system.submit(0, tokens=3)
        await system.start_new_ranks()
        await asyncio.sleep(0.1)
        assert not waiting.is_done
        await system.bridges[0].api_servers.resume()
        await until(lambda: waiting.is_done)
        assert list(waiting.matcher.output_ids) == [2, 3, 4]


@in_event_loop
async def test_what_each_front_end_counts_says_which_it_is():
    async with two_front_ends() as system:
        text = [
            [str(sample.labels) for family in AdmissionMetrics(bridge, ClientTable(), Degradation(())).collect()
             for sample in family.samples]
            for bridge in system.bridges
        ]  # fmt: skip
        for number in (0, 1):
            assert text[number]
            assert all(f"'front_end': '{number}'" in labels for labels in text[number])
            assert system.bridges[number].describe()["front_end"] == {"number": number, "of": 2}
