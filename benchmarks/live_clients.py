"""Servers and clients of benchmarks/live_balancing.py: real ranks, real front end, threads that stream tokens."""

import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.bench.domains import prompts_of
from moe_serve.config import ServeConfig, load_config
from moe_serve.launcher.llm import LLM

NUM_STREAMS = 4
NUM_EXPERTS = 32  # of the demo model
Row = dict[str, Any]


def settings(num_ranks: int, redundant: int, *overrides: str) -> ServeConfig:
    return load_config(
        overrides=[
            f"parallel.num_ranks={num_ranks}", f"eplb.num_redundant_experts={redundant}", "eplb.mode=dynamic",
            "cache.memory_gib=0.2", "engine.max_running_requests=16", *overrides,
        ]
    )  # fmt: skip


def swapped(table: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Returns a placement with a few experts in other slots in every layer. table: [layers, slots]"""
    table = table.copy()
    for row in table:
        for _ in range(4):
            a, b = draw.choice(len(row), 2, replace=False)
            row[[a, b]] = row[[b, a]]
    return table


class TokenClock:
    """Clients that stream tokens without a pause, and when each token came."""

    def __init__(self, llm: LLM):
        self.gaps: list[tuple[float, float]] = []  # (when, seconds since the token before it)
        self.failure: BaseException | None = None
        self._llm = llm
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        prompts = prompts_of("code", number)
        params = SamplingParams(max_new_tokens=100, temperature=0.8, ignore_eos=True)
        try:
            while not self._end.is_set():
                last: dict[int, float] = {}
                for index, _ in self._llm.stream(list(islice(prompts, 4)), params):
                    now_s = time.monotonic()
                    if index in last:
                        self.gaps.append((now_s, now_s - last[index]))
                    last[index] = now_s
        except BaseException as failure:
            self.failure = failure

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        if self.failure is not None:
            raise self.failure


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the ranks did not get there")
        time.sleep(0.005)
