"""Trains a layer for multi-token prediction behind a finished model, which stays as it is.

The layer learns what the model itself says of the token behind the next one (its whole distribution, not the text):
a draft is right when it is what the model draws.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_training.model import DemoModel, PredictionLayer, SparseMoe
from demo_training.text import Corpus
from demo_training.training import TrainSettings, held_out_windows, learning_rate, random_batch

NUM_REPORTS = 10


@dataclass(frozen=True)
class PredictionReport:
    """loss: nats per token above those of the model's own distribution;  agreement: by domain, where it was measured"""

    step: int
    loss: float
    agreement: dict[str, float] | None


def train_prediction(
    model: DemoModel, corpus: Corpus, settings: TrainSettings, on_step: Callable[[PredictionReport], None]
) -> PredictionLayer:
    """Returns the trained layer. The model's weights do not change."""
    torch.manual_seed(settings.seed)
    model.requires_grad_(requires_grad=False)
    layer = PredictionLayer(model)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)
    report_every = -(-settings.steps // NUM_REPORTS)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        predicted, wanted = _both(model, layer, random_batch(corpus, settings, step))
        loss = F.kl_div(predicted.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        _balance(layer, settings.bias_rate)
        is_report = (step + 1) % report_every == 0 or step + 1 == settings.steps
        on_step(
            PredictionReport(step + 1, loss.item(), agreement(model, layer, corpus, settings) if is_report else None)
        )
    return layer.eval()


@torch.no_grad()
def agreement(model: DemoModel, layer: PredictionLayer, corpus: Corpus, settings: TrainSettings) -> dict[str, float]:
    """Returns by domain how often the layer's best token is the model's, on held-out text."""
    found = {}
    for name, ids in corpus.validation.items():
        same = [
            (predicted.argmax(-1) == wanted.argmax(-1)).float().mean().item()
            for window in held_out_windows(ids, settings.seq, 6)
            for predicted, wanted in [_both(model, layer, window[None])]
        ]
        found[name] = sum(same) / len(same)
    return found


def _both(model: DemoModel, layer: PredictionLayer, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits of the layer, and of the model, of the same tokens: [rows, vocab] each. ids: [batch, seq + 1]"""
    with torch.no_grad():
        hidden = model.hidden(ids)
        wanted = F.linear(hidden[:, 1:], model.embed_tokens.weight)
    predicted = layer(model, hidden[:, :-1], ids[:, 1:])
    return predicted.flatten(0, 1), wanted.flatten(0, 1)


@torch.no_grad()
def _balance(layer: PredictionLayer, rate: float) -> None:
    moe = layer.layer.mlp
    assert isinstance(moe, SparseMoe)
    load = moe.load.float()
    moe.bias += 0.1 * rate * torch.sign(load.mean() - load)
