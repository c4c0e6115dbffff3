"""A machine without a C compiler serves by plain torch, and says so in one line."""

import logging
from pathlib import Path
from typing import Any
from unittest import mock

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_engine
from moe_serve.engine.protocol.messages import Submit, Tokens
from moe_serve.engine.step.exchange import make_exchange
from moe_serve.kernels.cpu.library import find_cpu_library
from tests.engine.queue_mailbox import QueueMailbox
from tests.ranks import run_ranks


class Heard(logging.Handler):
    """Keeps log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def serve_demo(group: EpGroup, *overrides: str) -> tuple[list[int], dict[str, Any]]:
    """Returns the tokens of a prompt to the demo model, and what the rank says of itself."""
    params = SamplingParams(max_new_tokens=5, temperature=0, ignore_eos=True)
    mailbox = QueueMailbox([Submit("a", 0, list(range(3, 14)), params, seed=0)])
    config = load_config(overrides=["cache.num_blocks=8", "parallel.device=cpu", *overrides])
    engine = build_engine(config, group, make_exchange("auto", group.process_group, True, 60.0), mailbox)
    engine.run()
    events = [event for message in mailbox.sent if isinstance(message, Tokens) for event in message.events]
    return [token for event in events for token in event.token_ids], engine.served.info


def check_without_compiler(rank: int, group: EpGroup, empty: str) -> tuple[object, ...]:
    heard, logger = Heard(), logging.getLogger("moe_serve")
    find_cpu_library.cache_clear()
    logger.addHandler(heard)
    try:
        with mock.patch.dict("os.environ", {"PATH": empty, "XDG_CACHE_HOME": empty}):
            served = serve_demo(group)
    finally:
        logger.removeHandler(heard)
        find_cpu_library.cache_clear()
    return *served, serve_demo(group, "engine.cpu_kernels=torch")[0], heard.lines


def test_without_a_compiler_the_demo_model_is_served_by_torch_and_one_line_says_so(tmp_path: Path) -> None:
    tokens, info, by_torch, lines = run_ranks(1, check_without_compiler, str(tmp_path))[0]
    assert tokens == by_torch
    assert len(tokens) == 5
    assert (info["numerics"], info["dtype"]) == ("fast", "float32")
    assert (info["kernels"], info["kernels_why"]) == ("plain torch", "there are no compiled CPU kernels, see the log")
    (said,) = [line for line in lines if "no C compiler" in line]
    assert "slower" in said
    assert "pip install ziglang" in said
