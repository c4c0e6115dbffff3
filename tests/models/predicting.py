"""Tiny models with a layer for multi-token prediction, and a plain implementation of it.

Here the layer is that of another model of one layer, whose norm and head are those of the prediction, and whose inputs
are joined as DeepSeek-V3's paper says (arXiv:2412.19437, equations 21 to 23). A test holds it to that of transformers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.families import FAMILIES, make_oracle, make_random, save

PREDICTING = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite-list", "glm_moe_dsa")


@dataclass
class PredictionOracle:
    """model: without the layer;  layer: it, as a model of its own;  extra: enorm, hnorm, eh_proj"""

    model: Any
    layer: Any
    extra: dict[str, Tensor]

    def logits(self, ids: list[int], guessed: int = 0) -> Tensor:
        """Returns what the layer predicts at each of ids but the last: the logits of the token two behind.

        guessed: how many more tokens the layer guesses behind ids, each from its own row: their logits follow
        """
        with torch.no_grad():
            hidden = self.model.model(torch.tensor([ids])).last_hidden_state[0, :-1]
            joined, tokens = self._join(ids[1:], hidden), list(ids)
            logits: Tensor = self.layer(inputs_embeds=joined[None]).logits[0]
            for _ in range(guessed):
                rows = self.layer.model(inputs_embeds=joined[None]).last_hidden_state[0, -1:]
                tokens.append(int(logits[-1].argmax()))
                joined = torch.cat((joined, self._join(tokens[-1:], rows)))
                logits = torch.cat((logits, self.layer(inputs_embeds=joined[None]).logits[0, -1:]))
        return logits

    def _join(self, ids: list[int], hidden: Tensor) -> Tensor:
        embedded = self.model.model.embed_tokens.weight[torch.tensor(ids)]
        rows = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), dim=-1)
        return rows @ self.extra["eh_proj"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return self.extra[name] * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def make_predicting(name: str, folder: Path) -> tuple[PredictionOracle, Path]:
    """Returns the oracle of a family's tiny model, and the checkpoint of both, as it would be published."""
    model_type, keys = FAMILIES[name]
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    if "mlp_layer_types" in keys:
        one["mlp_layer_types"] = ["sparse"]
    model, layer = make_oracle(name), make_random(model_type, keys | one, 7)
    tensors = load_file(save(model, folder / name) / "model.safetensors")
    of_layer = load_file(save(layer, folder / f"{name}-layer") / "model.safetensors")
    number, hidden = model.config.num_hidden_layers, model.config.hidden_size
    generator = torch.Generator().manual_seed(3)
    extra = {
        "enorm": 1 + 0.3 * torch.randn(hidden, generator=generator),
        "hnorm": 1 + 0.3 * torch.randn(hidden, generator=generator),
        "eh_proj": torch.randn(hidden, 2 * hidden, generator=generator) * hidden**-0.5,
    }
    prefix = f"model.layers.{number}."
    for source, tensor in of_layer.items():
        if source.startswith("model.layers.0."):
            tensors[source.replace("model.layers.0.", prefix)] = tensor
    tensors |= {f"{prefix}{source}.weight": tensor for source, tensor in extra.items()}
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.norm.weight"] = of_layer["model.norm.weight"]
    tensors[prefix + "shared_head.head.weight"] = of_layer["lm_head.weight"]
    save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
    path = folder / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    return PredictionOracle(model, layer, extra), folder / name
