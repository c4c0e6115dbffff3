"""Prefixes that left the pool, or the process, come back with the bits that they had; with other weights none does."""

import contextlib
import random
import socket
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.engine import Engine
from tests.attention_dp.test_page_stream import cut, pump
from tests.dispatch.hosts.pretended import on_hosts
from tests.engine.offline import (
    Prepare,
    ScriptedMailbox,
    Served,
    prompts_with_shared_beginnings,
    serve,
    submits_of,
    tiny_model,
)

# fmt: off
SMALL = [
    "model.load_format=dummy", "cache.num_blocks=40", "cache.block_size=4", "engine.max_batch_tokens=24",
    "engine.max_running_requests=3",
]
# fmt: on


def served(num_ranks: int, *overrides: str) -> Served:
    prompts = prompts_with_shared_beginnings(16, 200, max_len=100)
    params = SamplingParams(max_new_tokens=4, temperature=0.7, ignore_eos=True)
    return serve(num_ranks, submits_of(prompts, params), [*SMALL, *overrides], prepare=read_all)


def read_all(engine: Engine) -> None:
    """Has files read though they may take longer than computing their pages, as with models this small."""
    if engine.scheduler.blocks.tiers is not None:
        engine.scheduler.blocks.tiers._is_worth_reading = lambda folder, key: True  # type: ignore[method-assign]


@pytest.mark.parametrize("model, num_ranks", [("deepseek_v3", 1), ("qwen2_moe", 2)])
def test_tokens_do_not_notice_tiers_nor_a_restart(model: str, num_ranks: int, tmp_path: Path) -> None:
    own = f"model.path={tiny_model(tmp_path, model)}"
    pages = tmp_path / "pages"
    files = [own, f"cache.path={pages}", "cache.disk_gb=0.1"]
    plain = served(num_ranks, own)
    first = served(num_ranks, "cache.host_gb=0.01", *files)
    again = served(num_ranks, *files)
    other = served(num_ranks, *files, "model.seed=7")
    assert first.tokens == again.tokens == plain.tokens
    assert first.digests == again.digests == plain.digests
    cached = [run.stats["num_cached_prompt_tokens"] for run in (plain, first, again, other)]
    assert max(cached[:2]) < cached[2], "a restart finds the pages of the run before"
    assert other.tokens != plain.tokens
    assert cached[3] < cached[2], "pages of other weights are not found"
    assert len(list(pages.glob("*/"))) == 2
    assert not list(pages.glob("*/*.[0-9]*")), "no unfinished file is left"


def on_two_hosts(group: EpGroup) -> EpGroup:
    return on_hosts(group, [0, 1])


class NoRests(dict[int, object]):
    """So that a rank that failed is asked again at once."""

    def __setitem__(self, rank: int, rest: object) -> None:
        pass


def ask_later(engine: Engine) -> None:
    """Has rank 1 begin when rank 0 has computed all, and ask it for pages though computing takes less time."""
    tiers, mailbox = engine.scheduler.blocks.tiers, engine.mailbox
    assert tiers is not None
    assert isinstance(mailbox, ScriptedMailbox)
    tiers._of_network.is_worth_it = lambda *given: True  # type: ignore[method-assign]
    if engine.rank == 1:
        mailbox.script = [(1 << 40, message) for _, message in mailbox.script]


def ask_later_over_a_bad_network(engine: Engine) -> None:
    """The same, with answers that are flipped, repeated or cut, soon, on each connection."""
    ask_later(engine)
    tiers, draw = engine.scheduler.blocks.tiers, random.Random(engine.rank)
    assert tiers is not None
    assert tiers._peers is not None
    dial, tiers._peers._rests = tiers._peers._dial, NoRests()  # type: ignore[assignment]

    def meddle(source: socket.socket, to: socket.socket) -> None:
        at, what = draw.randrange(6000), draw.choice(["flip", "repeat", "cut"])  # a page has 1 or 3 kB
        num_passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(draw.randrange(1, 1 << 14)):
                if num_passed <= at < num_passed + len(data):
                    where = at - num_passed
                    if what == "flip":
                        data = data[:where] + bytes([data[where] ^ 1 << draw.randrange(8)]) + data[where + 1 :]
                    elif what == "repeat":
                        data = data[:where] + data
                    else:
                        break
                num_passed += len(data)
                to.sendall(data)
        cut(source, to)

    def dial_badly(rank: int) -> socket.socket:
        there = dial(rank)
        there.settimeout(None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        for target, ends in ((pump, (far, there)), (meddle, (there, far))):
            threading.Thread(target=target, args=ends, daemon=True).start()
        return near

    tiers._peers._dial = dial_badly


@pytest.mark.parametrize(
    ("model", "prepare"),
    [
        ("deepseek_v3", ask_later_over_a_bad_network),
        pytest.param("qwen2_moe", ask_later_over_a_bad_network, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", ask_later, marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_notice_pages_of_another_host_nor_what_becomes_of_them_on_the_way(
    model: str, prepare: Prepare, tmp_path: Path
) -> None:
    prompts = [prompt for prompt in prompts_with_shared_beginnings(24, 200, max_len=100) for _ in range(2)]
    params = SamplingParams(max_new_tokens=4, temperature=0.7, ignore_eos=True)
    submits = [
        replace(each, pages_at=0 if number % 2 else None) for number, each in enumerate(submits_of(prompts, params))
    ]
    own = [f"model.path={tiny_model(tmp_path, model)}", *SMALL]
    plain = serve(2, submits, own)
    across = serve(2, submits, [*own, "cache.host_gb=0.02"], prepare=prepare, placed=on_two_hosts)
    assert across.tokens == plain.tokens
    assert across.digests == plain.digests
    assert across.stats["num_cached_prompt_tokens"] > plain.stats["num_cached_prompt_tokens"]
