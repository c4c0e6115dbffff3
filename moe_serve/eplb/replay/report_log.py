"""What an engine's balancedness log lines say, as a small table."""

from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.eplb.files.balance_log import read_balance_log

_NEEDS = (
    "A log says how balanced the ranks are, not which experts are busy. To replay balancers, record expert counts: "
    "SGLang --expert-distribution-recorder-mode stat, then /dump_expert_distribution_record; TensorRT-LLM "
    "EXPERT_STATISTIC_PATH; moe_serve writes a trace itself."
)


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
