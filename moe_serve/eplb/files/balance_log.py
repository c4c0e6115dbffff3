"""Balancedness that engines print into their logs: vLLM's `EPLB step:` and SGLang's `[Expert Balancedness]` lines.

Such a line holds one number for all ranks and layers. It shows how balanced a system runs; it cannot be replayed,
because it does not say which expert was busy.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_serve.errors import TraceError

_VLLM = re.compile(
    r"EPLB step: (-?\d+) for model (.*?): avg_tokens=([\d.]+), max_tokens=([\d.]+), balancedness=([\d.]+)"
)
_SGLANG = re.compile(
    r"\[Expert Balancedness\] forward_pass_id=(\d+) current_pass_balancedness=([\d.]+).*?gpu_physical_count_sum=(\d+)"
)


@dataclass(frozen=True)
class BalanceSample:
    """One log line. mean_tokens, max_tokens: rank load summed over layers; None where the line does not say it."""

    step: int
    balancedness: float
    mean_tokens: float | None
    max_tokens: float | None
    model_id: str


def is_balance_log(head: bytes) -> bool:
    """Returns whether the beginning of a file has such a line."""
    text = head.decode("utf-8", "replace")
    return _VLLM.search(text) is not None or _SGLANG.search(text) is not None


def read_balance_log(path: Path) -> Iterator[BalanceSample]:
    """Yields the samples of a log, in order. Raises TraceError when there are none."""
    found = False
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := _VLLM.search(line):
                step, model, mean, most, value = match.groups()
                sample = BalanceSample(int(step), float(value), float(mean), float(most), model)
            elif match := _SGLANG.search(line):
                step, value, _ = match.groups()
                sample = BalanceSample(int(step), float(value), None, None, "")
            else:
                continue
            found = True
            yield sample
    if not found:
        raise TraceError(
            f"{path} has no balancedness lines; expected vLLM's 'EPLB step:' or SGLang's '[Expert Balancedness]'"
        )
