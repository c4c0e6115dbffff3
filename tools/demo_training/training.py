"""The training loop: AdamW, warm-up, plateau, linear decay; expert load balanced without a loss term.

Every batch is a pure function of (seed, step), so an interrupted and resumed run gives the same weights as an
uninterrupted one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from demo_training.model import DemoModel, ModelShape
from demo_training.text import Corpus
from moe_serve.errors import ConfigError

WARMUP_STEPS = 60  # a tenth of the run where that is less
PLATEAU_END = 0.6  # fraction of the run; from there the rates fall
NUM_REPORTS = 20  # validations, and saved states, of one run


@dataclass(frozen=True)
class TrainSettings:
    steps: int = 2850  # at 8 x 512 tokens: 11.7 million tokens, about an hour on two cores
    batch: int = 8  # sequences of one step
    seq: int = 512  # tokens of a sequence
    seed: int = 1
    learning_rate: float = 3e-3
    bias_rate: float = 3e-3  # how far the gate's correction bias moves in a step; 0 = experts are not balanced


@dataclass(frozen=True)
class StepReport:
    """What a progress display shows after a step."""

    step: int  # steps done
    loss: float  # nats per token, smoothed
    tokens_per_s: float
    imbalance: float  # max / mean tokens of an expert, worst layer of this step
    validation: dict[str, float] | None  # loss by domain, where it was measured after this step


def train(
    shape: ModelShape, corpus: Corpus, settings: TrainSettings, state_path: Path, resume: bool,
    on_step: Callable[[StepReport], None],
) -> DemoModel:  # fmt: skip
    """Returns the trained model; its state is kept at `state_path` about NUM_REPORTS times.

    Raises ConfigError when there is nothing to resume, the state is of another shape, or the text is too short.
    """
    for name, ids in corpus.train.items():
        if len(ids) < settings.seq + 2:
            raise ConfigError(f"domain {name} has {len(ids)} tokens, a sequence takes {settings.seq + 1}; lower --seq")
    if settings.seq > shape.max_position_embeddings:
        raise ConfigError(f"--seq is {settings.seq}, the model has {shape.max_position_embeddings} positions; lower it")
    torch.manual_seed(settings.seed)
    model = DemoModel(shape)
    optimizer = _optimizer(model, settings)
    first_step = _restore(state_path, model, optimizer) if resume else 0
    report_every = -(-settings.steps // NUM_REPORTS)
    smoothed = None
    started_s = time.monotonic()
    for step in range(first_step, settings.steps):
        loss = _train_step(model, optimizer, corpus, settings, step)
        smoothed = loss if smoothed is None else 0.97 * smoothed + 0.03 * loss
        done = step + 1
        is_report = done % report_every == 0 or done == settings.steps
        num_tokens = (done - first_step) * settings.batch * settings.seq
        on_step(
            StepReport(
                step=done,
                loss=smoothed,
                tokens_per_s=num_tokens / (time.monotonic() - started_s),
                imbalance=max((_imbalance(layer.load) for layer in model.moe_layers), default=1.0),
                validation=validate(model, corpus, settings.seq) if is_report else None,
            )
        )
        if is_report:
            _save(state_path, model, optimizer, done)
    return model.eval()


@torch.no_grad()
def validate(model: DemoModel, corpus: Corpus, seq: int, max_windows: int = 12) -> dict[str, float]:
    """Returns the loss in nats per token on held-out text, by domain."""
    losses = {}
    for name, ids in corpus.validation.items():
        found = []
        for window in held_out_windows(ids, seq, max_windows):
            found.append(F.cross_entropy(model(window[None, :-1])[0], window[1:]).item())
        losses[name] = float(np.mean(found))
    return losses


def held_out_windows(ids: np.ndarray, seq: int, max_windows: int) -> list[Tensor]:
    """Returns up to max_windows windows [seq + 1] int64, one after another; one shorter window where there is less."""
    count = min(max_windows, max(1, (len(ids) - 1) // seq))
    return [torch.from_numpy(ids[i * seq : (i + 1) * seq + 1].astype(np.int64)) for i in range(count)]


def _train_step(
    model: DemoModel, optimizer: torch.optim.Optimizer, corpus: Corpus, settings: TrainSettings, step: int
) -> float:
    progress = step / settings.steps
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, step)
    ids = random_batch(corpus, settings, step)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        # Loss-free balancing (DeepSeek-V3 report, 2.1.2): the bias of a busy expert falls, of an idle one rises.
        rate = settings.bias_rate * (1.0 if progress < PLATEAU_END else 0.1)
        for layer in model.moe_layers:
            load = layer.load.float()
            layer.bias += rate * torch.sign(load.mean() - load)
    return loss.item()


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Returns the rate of a step: warm-up, plateau, linear decay."""
    progress = step / settings.steps
    decay = 1.0 if progress < PLATEAU_END else max(0.02, (1 - progress) / (1 - PLATEAU_END))
    warmup = min(WARMUP_STEPS, max(1, settings.steps // 10))
    return settings.learning_rate * min(1.0, (step + 1) / warmup) * decay


def random_batch(corpus: Corpus, settings: TrainSettings, step: int) -> Tensor:
    """Returns [batch, seq + 1] int64: windows from anywhere, each domain as likely as the others."""
    generator = np.random.default_rng([settings.seed, step])
    domains = list(corpus.train.values())
    windows = []
    for domain in generator.integers(len(domains), size=settings.batch):
        ids = domains[domain]
        start = generator.integers(0, len(ids) - settings.seq - 1)
        windows.append(ids[start : start + settings.seq + 1].astype(np.int64))
    return torch.from_numpy(np.stack(windows))


def _optimizer(model: DemoModel, settings: TrainSettings) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)


def _imbalance(load: Tensor) -> float:
    return (load.max() / load.float().mean()).item()


def _save(path: Path, model: DemoModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, beside)
    beside.replace(path)  # an interrupt never leaves half a file


def _restore(path: Path, model: DemoModel, optimizer: torch.optim.Optimizer) -> int:
    """Returns the number of steps already done."""
    try:
        state = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there, so there is nothing to resume; train without --resume") from None
    try:
        model.load_state_dict(state["model"])
    except RuntimeError:
        raise ConfigError(f"{path} is of another shape than asked for; use its --size and --vocab") from None
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
