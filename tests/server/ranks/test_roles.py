"""Prefill and decode ranks apart: where a request begins, and that it ends with the same tokens whatever is lost."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from prometheus_client import generate_latest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.attention_dp.request_router import why_local
from moe_serve.config import load_config
from moe_serve.engine.protocol.messages import Apart, Members
from moe_serve.errors import ConfigError
from moe_serve.links.folder import OwnFolder
from moe_serve.links.link import Link
from moe_serve.server.api.native import result
from moe_serve.server.observe.dashboard import Seen, handover_json, page_data
from moe_serve.server.observe.metrics import make_registry
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.open_request import Changes, OpenRequest, RequestSpec, UnavailableError
from tests.server.fake_worker import FakeWorker
from tests.server.served import fake_config, in_event_loop

LONG, SHORT = list(range(10, 50)), [10, 11]


@pytest.mark.parametrize(
    ("num_uncached", "prefill_wait", "local_wait", "num_decoding", "why"),
    [
        (255, 0, 0, 8, "short"),
        (256, 0, 0, 8, None),
        (2048, 0, 0, 0, None),
        (2048, 1, 0, 0, "prefill_busy"),  # nobody decodes here, so nobody is held up by it
        (2048, 4096, 0, 2, None),
        (2048, 4097, 0, 2, "prefill_busy"),
        (2048, 4097, 1, 2, None),
    ],
)
def test_a_prefill_rank_computes_what_is_long_while_its_queue_costs_less(
    num_uncached: int, prefill_wait: int, local_wait: int, num_decoding: int, why: str | None
):
    assert why_local(num_uncached, 256, prefill_wait, local_wait, num_decoding) == why


@dataclass
class RoleWorker(FakeWorker):
    of: Link | None = None

    def link(self) -> Link:
        assert self.of is not None
        return self.of


@dataclass
class Roles:
    bridge: Bridge
    decode: list[FakeWorker]
    prefill: list[FakeWorker]
    of_prefill: list[asyncio.Task[None]]

    def submit(self, prompt: list[int], seed: int = 5, **params: int) -> OpenRequest:
        spec = RequestSpec(prompt, SamplingParams(**{"max_new_tokens": 6} | params), seed)
        return self.bridge.submit([spec], Changes())[0]

    async def output(self, request: OpenRequest) -> list[int]:
        while not request.is_done:
            await asyncio.sleep(0.005)
        assert request.failure is None, request.failure
        return list(request.matcher.output_ids)

    async def run(self, prompt: list[int], **params: int) -> list[int]:
        return await self.output(self.submit(prompt, **params))


def facts_of(weights: str) -> list[tuple[str, str, str]]:
    return [("the weights", weights, "")]


@contextlib.asynccontextmanager
async def roles(
    num_prefill: int = 1, num_decode: int = 1, computes: str = "x", settings: Sequence[str] = (), **fields: object
) -> AsyncIterator[Roles]:
    own = f"parallel.num_prefill_ranks={num_prefill}", "parallel.prefill_from_tokens=8"
    config = fake_config(num_decode, *own, *settings)
    with OwnFolder() as folder:
        (folder / "prefill").mkdir(mode=0o700)
        link = Link(folder=folder)
        bridge = Bridge(config, None, None, link)
        await bridge.start()
        decode = [RoleWorker(r, num_decode, 0, 1, of=link, computes=facts_of("x")) for r in range(num_decode)]
        info = {"on_lost_rank": "mask", "handover_pages": 100}
        fields |= {"computes": facts_of(computes)}
        prefill = [
            RoleWorker(r, num_prefill, 0, 2, of=link.of_prefill(), info=info, **fields)  # type: ignore[arg-type]
            for r in range(num_prefill)
        ]
        tasks = [asyncio.create_task(worker.run()) for worker in [*decode, *prefill]]
        try:
            await bridge.wait_until_ready()
            assert bridge.prefill is not None
            await bridge.prefill.wait_until_ready()
            yield Roles(bridge, list(decode), list(prefill), tasks[num_decode:])
        finally:
            await bridge.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


TOKENS = [7, 8, 9, 10, 11, 12]


@in_event_loop
async def test_a_long_prompt_begins_on_a_prefill_rank_and_goes_on_where_ranks_decode():
    async with roles() as served:
        assert await served.run(LONG) == TOKENS
        (first,), (then,) = served.prefill[0].submitted, served.decode[0].submitted
        assert (first.params.max_new_tokens, first.output_ids) == (1, [])
        assert (then.params.max_new_tokens, then.output_ids, then.prompt_ids) == (6, TOKENS[:1], LONG)
        assert then.attempt > first.attempt
        (expected,) = served.decode[0].expected
        assert (expected.request_id, expected.prompt_ids) == (first.request_id, LONG)
        assert then.handover is not None
        assert (expected.handover.attempt, served.decode[0].aborted) == (then.handover.attempt, [])
        assert dict(served.bridge.book.routes) == {"prefill": 1}
        assert await served.run(SHORT) == TOKENS
        assert dict(served.bridge.book.routes) == {"prefill": 1, "short": 1}
        assert len(served.prefill[0].submitted) == 1
        assert served.bridge.describe()["prefill"]["state"] == "ready"


@in_event_loop
async def test_one_token_comes_from_the_prefill_rank_alone():
    async with roles() as served:
        assert await served.run(LONG, max_new_tokens=1) == TOKENS[:1]
        assert served.decode[0].submitted == []


@in_event_loop
async def test_an_abort_reaches_the_rank_that_has_the_request():
    async with roles() as served:
        served.prefill[0].go.clear()
        request = served.submit(LONG)
        while not served.prefill[0].submitted:
            await asyncio.sleep(0.005)
        served.bridge.book.abort(request)
        while not (served.prefill[0].aborted and served.decode[0].aborted):  # which takes its pages already
            await asyncio.sleep(0.005)
        assert len(served.bridge.book) == served.bridge.book.num_at_prefill() == 0


@in_event_loop
async def test_requests_go_to_the_decode_ranks_that_expect_them_which_share_them():
    async with roles(num_prefill=4, num_decode=2) as served:
        for worker in served.prefill:
            worker.go.clear()
        prompts = [[number, *LONG] for number in range(60, 64)]
        requests = [served.submit(prompt) for prompt in prompts]
        while len(served.decode[0].expected) + len(served.decode[1].expected) < 4:
            await asyncio.sleep(0.005)
        for worker in served.prefill:
            worker.go.set()
        assert [await served.output(request) for request in requests] == [TOKENS] * 4
        for worker in served.decode:
            assert {each.request_id for each in worker.expected} == {each.request_id for each in worker.submitted}
            assert (len(worker.submitted), worker.aborted) == (2, [])
        assert [served.bridge.book._capacity._router.load(rank) for rank in (0, 1)] == [0, 0]


@pytest.mark.parametrize("num_prefill", [1, 2])
def test_requests_of_lost_prefill_ranks_end_with_the_same_tokens(num_prefill: int):
    @in_event_loop
    async def check() -> None:
        async with roles(num_prefill) as served:
            group = served.bridge.prefill
            assert group is not None
            for worker in served.prefill:
                worker.go.clear()
            requests = [served.submit(LONG) for _ in range(4)]
            while not all(worker.submitted for worker in served.prefill):
                await asyncio.sleep(0.005)
            for rank, task in enumerate(served.of_prefill):
                task.cancel()
                group.report_loss(f"rank {rank} was killed", rank)
            group.report_loss("all ranks are lost")
            assert [await served.output(request) for request in requests] == [TOKENS] * 4
            assert served.bridge.problem() is None, "the decode ranks serve on"
            assert await served.run(LONG) == TOKENS
            assert served.bridge.book.routes["no_prefill_rank"] == 1

    check()


@pytest.mark.parametrize("computes", [True, False])
def test_a_prefill_rank_without_signs_of_life_is_left_unless_it_computes(computes: bool):
    """A request took 8.9 s, and was computed twice, when a long chunk kept its rank from showing life for 3 s."""

    @in_event_loop
    async def check() -> None:
        async with roles() as served:
            group, (worker,) = served.bridge.prefill, served.prefill
            assert group is not None
            worker.go.clear()
            request = served.submit(LONG)
            while not worker.submitted:
                await asyncio.sleep(0.005)
            (view,) = group.workers
            view.pulse_s = time.monotonic() - 100
            if not computes:
                view.pid = int(stopped.pid)
            group._look_at_ranks(time.monotonic())  # what it has used so far may be from long ago
            view.pulse_s -= 1
            sum(range(100_000))  # the fake rank's process is this one
            group._look_at_ranks(time.monotonic())
            assert (request.rank == 1) == computes
            worker.go.set()
            assert await served.output(request) == TOKENS
            assert len(served.prefill[0].submitted) == 1

    with subprocess.Popen(["sleep", "600"]) as stopped:
        try:
            check()
        finally:
            stopped.kill()


@in_event_loop
async def test_prefill_ranks_that_do_not_reach_the_hosts_of_most_leave_their_requests_until_they_regroup():
    """A request hung where they had dropped it."""
    async with roles(num_prefill=2) as served:
        group = served.bridge.prefill
        assert group is not None
        for worker in served.prefill:
            worker.go.clear()
        request = served.submit(LONG)
        while not any(worker.submitted for worker in served.prefill):
            await asyncio.sleep(0.005)
        (view,) = [view for view in group.workers if view.rank == 1]
        group._take(view.identity, Apart(1, 2, 0, "rank 0 is not reached"))
        assert await served.output(request) == TOKENS
        assert await served.run(LONG) == TOKENS
        for worker in served.prefill:
            worker.go.set()
        assert dict(served.bridge.book.routes) == {"prefill": 1, "no_prefill_rank": 1}
        group._take(view.identity, Members(1, 2, 1, [0, 1], "rank 0 is back"))
        prompts = [[number, *LONG] for number in (60, 61)]
        assert [await served.run(prompt) for prompt in prompts] == [TOKENS] * 2
        assert served.bridge.book.routes["prefill"] == 3
        assert all(worker.submitted for worker in served.prefill)


@in_event_loop
async def test_without_decode_ranks_nothing_is_served_and_the_reason_names_them():
    async with roles() as served:
        served.prefill[0].go.clear()
        request = served.submit(LONG)
        served.bridge.report_loss("rank 0 was killed", 0)
        while not request.is_done:
            await asyncio.sleep(0.005)
        why = "decode rank 0 is missing: rank 0 was killed"
        assert (str(request.failure), served.bridge.problem()) == (why, why)
        with pytest.raises(UnavailableError, match="decode rank 0 is missing"):
            served.submit(SHORT)


@in_event_loop
async def test_decode_ranks_that_do_not_reach_the_hosts_of_most_are_named_as_missing():
    async with roles(num_decode=2) as served:
        (view,) = [view for view in served.bridge.workers if view.rank == 1]
        served.bridge._take(view.identity, Apart(1, 1, 0, "rank 0 is not reached"))
        why = "decode rank 0 and decode rank 1 are missing: rank 0 is not reached"
        assert served.bridge.problem() == why
        with pytest.raises(UnavailableError, match=why):
            served.submit(LONG)


@in_event_loop
async def test_prefill_ranks_that_compute_something_else_get_no_request():
    async with roles(computes="another model") as served:
        assert await served.run(LONG) == TOKENS
        assert served.prefill[0].submitted == []
        assert dict(served.bridge.book.routes) == {"no_prefill_rank": 1}
        assert "other values than the decode ranks" in served.bridge.describe()["prefill"]["state"]


MEET = "launcher.dist_init_addr=h:5"
THREE_HOSTS = ["launcher.nnodes=3", MEET]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["parallel.role=prefill"], "--prefill-ranks P --decode-ranks D"),
        (
            [*THREE_HOSTS, "parallel.num_ranks=3"],
            r"parallel.num_ranks is 3 on 2 hosts \(launcher.nnodes - prefill_nnodes",
        ),
        ([*THREE_HOSTS, "parallel.num_ranks=3", "launcher.prefill_nnodes=2"], "num_prefill_ranks is 1 on 2 hosts"),
        ([*THREE_HOSTS, "launcher.prefill_nnodes=3"], "no host is left for the ranks that decode; lower it to 2"),
        (["launcher.prefill_nnodes=2"], "there is one host; set launcher.prefill_nnodes: 1"),
        (["launcher.nnodes=2", MEET, "server.worker_port=65534"], "name one from 1 to 65533"),
        (["launcher.nnodes=2", MEET, "launcher.front_ends=every_host"], "set .*first_host"),
        (["parallel.device=cuda"], "prefill ranks are on CPUs"),
        (["eplb.record_path=x.jsonl"], "both write"),
        (["parallel.handover_gb=0"], "no page of a prompt could reach a decode rank; give it some GB"),
    ],
)
def test_settings_that_roles_do_not_fit_are_refused_with_the_fix(settings: list[str], words: str):
    ranks = [] if "role" in settings[0] else ["parallel.num_prefill_ranks=1"]
    with pytest.raises(ConfigError, match=words):
        load_config(overrides=[*ranks, *settings])


@pytest.mark.parametrize(
    ("nnodes", "prefill_nnodes", "num_ranks", "num_prefill", "nodes"),
    [
        (1, 1, 3, 2, ([0], [0])),
        (2, 1, 3, 2, ([0], [1])),
        (3, 1, 4, 3, ([0, 1], [2])),
        (3, 2, 5, 4, ([0], [1, 2])),
        (4, 2, 2, 6, ([0, 1], [2, 3])),
    ],
)
def test_each_role_has_its_ranks_on_hosts_of_its_own(
    nnodes: int, prefill_nnodes: int, num_ranks: int, num_prefill: int, nodes: tuple[list[int], list[int]]
):
    """Decode ranks on the first ones, as many on each."""
    numbers = [f"parallel.num_ranks={num_ranks}", f"parallel.num_prefill_ranks={num_prefill}"]
    hosts = [f"launcher.nnodes={nnodes}", f"launcher.prefill_nnodes={prefill_nnodes}", MEET]
    for node_rank in range(nnodes):
        config = load_config(overrides=[*hosts, *numbers, f"launcher.node_rank={node_rank}"])
        for role, number, of_role in zip(("decode", "prefill"), (num_ranks, num_prefill), nodes, strict=True):
            own = config.of_role(role)
            assert (list(own.nodes), own.parallel.num_ranks) == (of_role, number)
            assert own.ranks_per_host == number // len(of_role)
            assert load_config(overrides=own.changed()) == own, "as its ranks read it"
            if nnodes > 1:
                assert (config.of_this_host() == own) == (node_rank in of_role)
        assert config.of_role("decode").of_role("prefill") == config.of_role("prefill"), "as front ends have it"


ON_HOSTS = ("launcher.nnodes=3", MEET, "server.worker_port=30001")


@in_event_loop
async def test_pages_go_to_the_host_whose_decode_rank_expects_the_request():
    async with roles(2, 4, settings=ON_HOSTS) as served:
        prompts = [[number, *LONG] for number in range(60, 68)]
        for prompt in prompts:
            assert await served.run(prompt) == TOKENS
        then = {each.request_id: (rank, each) for rank, worker in enumerate(served.decode) for each in worker.submitted}
        first = [each for worker in served.prefill for each in worker.submitted]
        assert len(first) == len(then) == 8
        for each in first:
            rank, submit = then[each.request_id]
            assert (each.hand_over_to, submit.handover.why_short) == (rank // 2, "")
        assert {each.hand_over_to for each in first} == {0, 1}


@pytest.mark.parametrize("is_host_lost", [False, True])
def test_a_request_whose_decode_rank_is_lost_goes_where_its_pages_are_or_does_not_wait_for_them(is_host_lost: bool):
    @in_event_loop
    async def check() -> None:
        async with roles(1, 4, settings=ON_HOSTS) as served:
            served.prefill[0].go.clear()
            request = served.submit(LONG)
            while not any(worker.expected for worker in served.decode):
                await asyncio.sleep(0.005)
            (expects,) = [worker.rank for worker in served.decode if worker.expected]
            host = expects // 2
            for rank in (2 * host, 2 * host + 1) if is_host_lost else (expects,):
                served.bridge.book.suspect(rank)
            served.prefill[0].go.set()
            assert await served.output(request) == TOKENS
            ((rank, then),) = [(worker.rank, each) for worker in served.decode for each in worker.submitted]
            assert rank // 2 == (1 - host if is_host_lost else host)
            assert then.handover.why_short == ("elsewhere" if is_host_lost else "")

    check()


@in_event_loop
async def test_ranks_of_both_roles_are_seen_with_what_they_report():
    async with roles(num_prefill=2) as served:
        assert await served.run(LONG) == TOKENS
        for worker in (*served.decode, *served.prefill):
            worker.load(3)
        bridge = served.bridge
        assert bridge.prefill is not None
        prefill = bridge.prefill.workers
        while any(view.status is None for view in (*bridge.workers, *prefill)):
            await asyncio.sleep(0.005)
        text = generate_latest(make_registry(bridge)).decode()
        shown = handover_json(bridge.book.stats, bridge.book.routes)
        assert (shown["num"], shown["routes"]) == (1, {"prefill": 1})
        assert min(shown["parts_ms"].values()) >= 0
        for part in ("waiting", "decode_rank"):
            assert f'moe_serve_handover_seconds_count{{part="{part}"}} 1.0' in text
        for rank in ("0", "prefill 0", "prefill 1"):
            assert f'moe_serve_rank_requests_running{{rank="{rank}"}} 3.0' in text
            assert f'moe_serve_rank_serving{{rank="{rank}"}} 1.0' in text
        page = page_data(bridge.workers, bridge.balance, {}, "x", Seen(), 0.0, prefill)
        assert [(rank["rank"], rank["running"]) for rank in page["ranks"]] == [
            (0, 3), ("prefill 0", 3), ("prefill 1", 3),
        ]  # fmt: skip
        request = served.submit(LONG[::-1])
        await served.output(request)
        assert result(request, "rid")["meta_info"]["route"] == "prefill"
