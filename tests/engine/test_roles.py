"""Prefill and decode ranks give the tokens of one rank that does both, of every kind of cache, while experts move.

Engines without a front end: files in a folder play its part. Request i is computed by prefill rank i % P, and goes on
at decode rank i // P % D, so that pages go from each to each.
"""

import os
import random
import socket
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from moe_serve.attention_dp.page_channel import COUNTERS, PageSender
from moe_serve.attention_dp.page_ring import PageFiles
from moe_serve.attention_dp.request import Handover, SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.mailbox import Inbound
from moe_serve.engine.protocol.messages import Expect, Message, Shutdown, Submit, Tokens
from moe_serve.engine.step.exchange import make_exchange
from tests.engine.moving import DYNAMIC, move_in_every_step
from tests.engine.offline import OTHER_FAMILIES, TINY, Prepare, serve, tiny_model
from tests.engine.queue_mailbox import QueueMailbox
from tests.engine.test_live_balancing import count_activations
from tests.engine.test_speculation import VERIFIES, drafts_of
from tests.ranks import run_ranks

LAUNCH = 77  # of the prefill ranks
BLOCK = 8
SMALL = [
    "model.load_format=dummy", f"cache.block_size={BLOCK}", "cache.memory_gib=0.05", "engine.max_batch_tokens=24",
    "engine.max_running_requests=5", "engine.heartbeat_s=0.02", "engine.suspect_after_s=240", "parallel.device=cpu",
    "parallel.threads_per_rank=1",
]  # fmt: skip


def requests(number: int) -> list[Submit]:
    """Returns requests, every second one sampled, some with prompts that fill their blocks, or none."""
    draw = random.Random(0)
    submits = []
    for index in range(number):
        length = (3, BLOCK, 5 * BLOCK, *[draw.randrange(1, 120) for _ in range(number)])[index]
        params = SamplingParams(max_new_tokens=6, temperature=0.8 * (index % 2), ignore_eos=True)
        submits.append(Submit(str(index), 0, [draw.randrange(3, 200) for _ in range(length)], params, seed=index))
    return submits


@dataclass
class Ways:
    """How many ranks there are of each role, and where each request goes."""

    num_prefill: int
    num_decode: int

    def prefill_rank(self, submit: Submit) -> int:
        return int(submit.request_id) % self.num_prefill

    def decode_rank(self, submit: Submit) -> int:
        return int(submit.request_id) // self.num_prefill % self.num_decode


class RoleMailbox(QueueMailbox):
    """Gives a rank its requests, and writes a file for each that has ended there, with its tokens."""

    def __init__(self, role: str, rank: int, ways: Ways, submits: list[Submit], folder: Path):
        super().__init__(end_when_idle=False)
        self._role, self._folder, self._submits, self._ways = role, folder, submits, ways
        self._output: dict[str, list[int]] = {}
        self._expected: list[Submit] = []
        if role == "prefill":
            for each in submits:
                if ways.prefill_rank(each) == rank:
                    self.put(
                        msgspec.structs.replace(each, params=replace(each.params, max_new_tokens=1), hand_over_from=0)
                    )
            return
        self._expected = [each for each in submits if ways.decode_rank(each) == rank]
        for each in self._expected:
            self.put(Expect(each.request_id, each.prompt_ids, each.salt, self._handover(each)))

    def _handover(self, submit: Submit) -> Handover:
        return Handover(self._ways.prefill_rank(submit), LAUNCH, 0)

    def send(self, message: Message) -> None:
        for event in message.events if isinstance(message, Tokens) else ():
            assert event.finish != "error", event.message
            output = self._output.setdefault(event.request_id, [])
            output += event.token_ids
            if event.finish is not None:
                written = self._folder / f"{self._role} {event.request_id}"
                written.with_suffix(".part").write_text(" ".join(map(str, output)))
                written.with_suffix(".part").rename(written)

    def poll(self, timeout_s: float) -> list[Inbound]:
        for each in list(self._expected):
            begun = self._folder / f"prefill {each.request_id}"
            if begun.exists():
                self._expected.remove(each)
                first = [int(begun.read_text())]
                self.put(msgspec.structs.replace(each, attempt=1, output_ids=first, handover=self._handover(each)))
        if timeout_s > 0 and all((self._folder / f"{self._role} {each.request_id}").exists() for each in self._submits):
            return [Shutdown()]
        return super().poll(timeout_s)


def run_role(
    rank: int,
    group: EpGroup,
    ways: Ways,
    submits: list[Submit],
    overrides: list[str],
    folder: Path,
    prepare: Prepare | None,
) -> tuple[int, dict[str, int], int]:
    """Runs one rank; returns how many rounds of moves it has activated, what became of pages, and pages of a state."""
    numbers = range(ways.num_prefill), range(ways.num_prefill, group.num_ranks)
    groups = [dist.new_group(list(each)) for each in numbers]
    role = "prefill" if rank < ways.num_prefill else "decode"
    own = rank - numbers[role == "decode"][0]
    counts = [f"parallel.num_ranks={ways.num_decode}", f"parallel.num_prefill_ranks={ways.num_prefill}"]
    config = load_config(overrides=[*overrides, *counts]).of_role(role)  # type: ignore[arg-type]
    joined = EpGroup(own, config.parallel.num_ranks, torch.device("cpu"), groups[role == "decode"])
    files = [os.open(folder / f"pages {number}", os.O_RDWR) for number in range(ways.num_prefill)]
    mailbox = RoleMailbox(role, own, ways, submits, folder)
    exchange = make_exchange(config.engine.exchange, joined.process_group, True, 60.0)
    page_files = PageFiles(files if role == "decode" else [files[own]])
    engine = build_engine(config, joined, exchange, mailbox, LAUNCH, page_files=page_files)
    if prepare is not None:
        prepare(engine)
    engine.run()
    blocks = engine.scheduler.blocks
    engine.scheduler.check()
    assert (blocks.num_free, blocks.expected) == (blocks.num_blocks, [])
    engine.close()
    for each in files:
        os.close(each)
    dist.destroy_process_group(groups[role == "decode"])
    counters = {} if blocks.receiver is None else blocks.receiver.counters
    return getattr(engine.counters, "num_activations", 0), counters, engine.served.cache.num_state_pages


def check_apart(
    ways: Ways, model: list[str], folder: Path, number: int, overrides: list[str], prepare: Prepare | None = None
) -> list[int]:
    """Asserts that ranks of both roles give the tokens of one rank, from the pages of whole prompts.

    Returns how many rounds of moves each rank has activated.
    """
    submits = requests(number)
    for rank in range(ways.num_prefill):
        with (folder / f"pages {rank}").open("wb") as file:
            file.truncate(1 << 24)
    every = [*SMALL, *model, *overrides]
    parts = run_ranks(
        ways.num_prefill + ways.num_decode, run_role, ways, submits, every, folder, prepare, timeout_s=120
    )
    got = {}
    for each in submits:
        first, rest = (folder / f"{role} {each.request_id}" for role in ("prefill", "decode"))
        got[each.request_id] = [*map(int, first.read_text().split()), *map(int, rest.read_text().split())]
    alone = [each for each in every if not each.startswith(("eplb.", "dispatch.", "speculation."))]
    assert got == serve(1, submits, [*alone, "eplb.mode=off"]).tokens
    counters = {name: sum(counters[name] for _, counters, _ in parts[ways.num_prefill :]) for name in COUNTERS}
    pages = sum(len(each.prompt_ids) // BLOCK for each in submits)
    came = counters.pop("from_prefill")
    assert not any(counters.values()), counters
    if num_state_pages := parts[0][2]:  # states are those in front of the last token; pages behind them may come early
        borders = [(len(each.prompt_ids) - 1) // BLOCK for each in submits]
        of_states = num_state_pages * sum(map(bool, borders))
        assert sum(borders) + of_states <= came <= pages + of_states
    else:
        assert came == pages
    return [num_activations for num_activations, *_ in parts]


def drafts_where_it_goes_on(expected: dict[str, list[int]], engine: Engine) -> None:
    if engine.scheduler.blocks.receiver is not None:
        drafts_of(expected, engine)


# Heads of other widths in windowed layers, a latent, a latent with an indexer's keys, a sliding window, entries made of
# rows of the cache, states beside heads.
EVERY_DAY = ("mimo_v2_flash", "deepseek_v3", "deepseek_v32", "gpt_oss", "deepseek_v4", "qwen3_next")


@pytest.mark.parametrize(
    "family",
    [
        *EVERY_DAY,
        *(pytest.param(name, marks=pytest.mark.slow) for name in (*TINY, *OTHER_FAMILIES) if name not in EVERY_DAY),
    ],
)
def test_a_decode_rank_goes_on_from_the_cache_of_a_prefill_rank(family: str, tmp_path: Path) -> None:
    model = [f"model.path={tiny_model(tmp_path, family)}"]
    expected = serve(1, requests(8), [*SMALL, *model]).tokens
    check_apart(Ways(1, 1), model, tmp_path, 8, [VERIFIES], partial(drafts_where_it_goes_on, expected))


@pytest.mark.parametrize("family", ["laguna", "deepseek_v3"])
def test_a_cache_in_8_bits_is_handed_over_with_its_scales(family: str, tmp_path: Path) -> None:
    model = [f"model.path={tiny_model(tmp_path, family)}"]
    check_apart(Ways(1, 1), model, tmp_path, 6, ["cache.dtype=int8"])


def move_always(engine: Engine) -> None:
    move_in_every_step(engine)
    count_activations(engine)


def test_tokens_do_not_notice_experts_that_move_in_both_groups(tmp_path: Path) -> None:
    """Two ranks of each role, each group with its own placement: a round of moves before each of its steps."""
    model = [f"model.path={tiny_model(tmp_path, 'qwen3_moe')}", "model.weight_cache=none"]
    ways = ["eplb.num_redundant_experts=2", "dispatch.backend=low_latency", "dispatch.max_tokens_per_rank=10"]
    activations = check_apart(Ways(2, 2), model, tmp_path, 12, [*ways, *DYNAMIC], prepare=move_always)
    assert min(activations) > 5
    assert len(set(activations[:2])) == len(set(activations[2:])) == 1, "ranks of a group move together"


def _streams_pages(engine: Engine) -> None:
    """Gives a rank a stream to a host that is not there, and fails where it goes on behind the engine's end."""
    pages, close = os.memfd_create("pages"), engine.close
    os.ftruncate(pages, 1 << 20)
    blocks = engine.scheduler.blocks
    blocks.sender = PageSender(pages, engine.served.cache, LAUNCH, {"10.0.0.2:30001": _dial})
    (stream,) = blocks.sender._streams
    assert stream._thread.is_alive()

    def closed() -> None:
        close()
        assert not stream._thread.is_alive()
        os.close(pages)

    engine.close = closed  # type: ignore[method-assign]


def _dial() -> socket.socket:
    raise OSError("no route to host")


def test_an_engine_that_ends_sends_no_more_pages(tmp_path: Path) -> None:
    overrides = [*SMALL, f"model.path={tiny_model(tmp_path, 'qwen3_moe')}"]
    assert len(serve(1, requests(1), overrides, prepare=_streams_pages).tokens["0"]) == 6
