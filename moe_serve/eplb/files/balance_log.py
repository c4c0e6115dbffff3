"""Balancedness that engines print into their logs: vLLM's `EPLB step:` and SGLang's `[Expert Balancedness]` lines.

Such a line holds one number for all ranks and layers. It shows how balanced a system runs; it cannot be replayed,
because it does not say which expert was busy.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.errors import TraceError

_VLLM = re.compile(
    r"EPLB step: (-?\d{1,18}) for model (.{0,400}?): avg_tokens=(\d+\.?\d*), max_tokens=(\d+\.?\d*), "
    r"balancedness=(\d+\.?\d*)"
)
_SGLANG = re.compile(r"\[Expert Balancedness\] forward_pass_id=(\d{1,18}) current_pass_balancedness=(\d+\.?\d*)")

_MARKS = (b"EPLB step: ", b"[Expert Balancedness] ")
_OVERLAP = 32  # bytes kept between chunks: a mark is shorter
_CHUNK, _SEARCHED, _LONGEST_LINE = 1 << 20, 1 << 26, 1 << 13
_NEEDS = (
    "A log says how balanced the ranks are, not which experts are busy. To replay balancers, record expert counts: "
    "SGLang --expert-distribution-recorder-mode stat, then /dump_expert_distribution_record; TensorRT-LLM "
    "EXPERT_STATISTIC_PATH; moe_serve writes a trace itself."
)


@dataclass(frozen=True)
class BalanceSample:
    """One log line. mean_tokens, max_tokens: rank load summed over layers; None where the line does not say it."""

    step: int
    balancedness: float
    mean_tokens: float | None
    max_tokens: float | None
    model_id: str


def is_balance_log(path: Path) -> bool:
    """Returns whether a file is text, not JSON of objects, with such a line in its first 64 MiB.

    An engine prints the first one long after it started, and SGLang's lines begin with '[' as JSON may.
    """
    with path.open("rb") as file:
        chunk = file.read(_CHUNK)
        if chunk.lstrip()[:1] == b"{" or b"\0" in chunk:
            return False
        while chunk and file.tell() <= _SEARCHED:
            if any(mark in chunk for mark in _MARKS):
                return next(_samples(path), None) is not None
            rest = file.read(_CHUNK)
            chunk = rest and chunk[-_OVERLAP:] + rest
    return False


def read_balance_log(path: Path) -> Iterator[BalanceSample]:
    """Yields the samples of a log, in order. Raises TraceError when there are none."""
    found = False
    for sample in _samples(path):
        found = True
        yield sample
    if not found:
        raise TraceError(
            f"{path} has no balancedness lines; expected vLLM's 'EPLB step:' or SGLang's '[Expert Balancedness]'"
        )


def _samples(path: Path) -> Iterator[BalanceSample]:
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(_LONGEST_LINE):
            if "balancedness=" not in line:
                continue
            if match := _VLLM.search(line):
                step, model, mean, most, value = match.groups()
                yield BalanceSample(int(step), float(value), float(mean), float(most), model)
            elif match := _SGLANG.search(line):
                yield BalanceSample(int(match[1]), float(match[2]), None, None, "")


def log_to_json(path: Path) -> dict[str, Any]:
    """Returns all samples of a log and what is missing to replay it."""
    samples = [
        {"step": s.step, "balancedness": s.balancedness, "mean_tokens": s.mean_tokens, "max_tokens": s.max_tokens}
        for s in read_balance_log(path)
    ]
    return {"format": "moe_serve.balance_log", "samples": samples, "missing": _NEEDS}


def log_to_table(path: Path) -> str:
    """Returns how balanced a system ran, and what to record to do better."""
    samples = list(read_balance_log(path))
    values = np.array([sample.balancedness for sample in samples])
    models = sorted({sample.model_id for sample in samples} - {""})
    lines = [
        f"{path}: {len(samples)} samples, steps {samples[0].step} to {samples[-1].step}"
        + (f", {', '.join(models)}" if models else ""),
        f"balancedness  mean {values.mean():.4f}  median {np.median(values):.4f}  min {values.min():.4f}  "
        f"last {values[-1]:.4f}",
        f"On average the busiest rank works {1 / max(values.mean(), 1e-9) - 1:.0%} over the mean.",
        _NEEDS,
    ]
    return "\n".join(lines) + "\n"
