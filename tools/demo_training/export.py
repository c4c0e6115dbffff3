"""Writes a trained demo model as a Hugging Face folder, reads one back, and counts the load of its experts."""

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_training.model import EPS, ROPE_THETA, DecoderLayer, DemoModel, ModelShape, PredictionLayer, SparseMoe
from demo_training.text import BOS_ID, EOS_ID, SPECIAL_TOKENS, Corpus
from demo_training.training import held_out_windows
from moe_serve.errors import ModelError

LOAD_WINDOWS = 64  # held-out windows per domain for counting the expert load


def export(model: DemoModel, tokenizer_json: Path, out: Path) -> None:
    """Writes config.json, model.safetensors (bf16; the gate's bias float32), the tokenizer and its settings."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(_stored(_tensors(model)), out / "model.safetensors", metadata={"format": "pt"})
    _write_json(out / "config.json", _config(model.shape))
    _write_json(out / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.shape.max_position_embeddings,
    }
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    shutil.copyfile(tokenizer_json, out / "tokenizer.json")


def prediction_file(out: Path) -> Path:
    """Returns where the layer for multi-token prediction of a model lies."""
    return out / "model-prediction.safetensors"


def export_prediction(layer: PredictionLayer, model: DemoModel, out: Path) -> None:
    """Writes the layer beside the model of a folder, as a file of its own, and into its config.json.

    Its matrices keep few bits, of which the layer guesses as well: packages and git compress the file to 0.4 of it.
    """
    tensors = {name: few_bits(name, tensor) for name, tensor in prediction_tensors(layer, model).items()}
    save_file(_stored(tensors), prediction_file(out), metadata={"format": "pt"})
    _write_json(out / "config.json", _config(model.shape) | {"num_nextn_predict_layers": 1})


def prediction_tensors(layer: PredictionLayer, model: DemoModel) -> dict[str, Tensor]:
    """Returns the layer's weights under their Hugging Face names, as views into it."""
    prefix = f"model.layers.{model.shape.num_hidden_layers}."
    tensors = _layer_tensors(layer.layer, prefix)
    for name in ("enorm", "hnorm", "eh_proj"):
        tensors[f"{prefix}{name}.weight"] = getattr(layer, name).weight
    return tensors | {f"{prefix}shared_head.norm.weight": layer.norm.weight}


def few_bits(name: str, tensor: Tensor) -> Tensor:
    """Returns a matrix with one bit behind the leading one in experts, two elsewhere; another tensor as it is."""
    if tensor.dim() < 2:
        return tensor
    mantissa, exponent = torch.frexp(tensor.to(torch.bfloat16).float())  # 0.5 to 1
    scale = 4 if ".mlp.experts." in name else 8
    return torch.ldexp((mantissa * scale).round() / scale, exponent)


def load_exported(folder: Path) -> DemoModel:
    """Returns the model of a folder that export() wrote, weights in float32. Raises ModelError when it is not one."""
    try:
        config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
    except OSError as error:
        raise ModelError(f"{folder} holds no exported model ({error}); run `make_demo_model.py train` first") from None
    names = {field.name for field in fields(ModelShape)}
    model = DemoModel(ModelShape(**{name: value for name, value in config.items() if name in names}))
    # copy_ writes through the views that _tensors hands out, expert slices included.
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            if name not in stored or stored[name].shape != tensor.shape:
                raise ModelError(f"{folder}: tensor {name} is missing or mis-shaped; export the model again")
            tensor.copy_(stored[name])
    return model.eval()


@torch.no_grad()
def expert_load(model: DemoModel, corpus: Corpus, seq: int) -> dict[str, list[list[int]]]:
    """Returns, by domain, the held-out tokens that each expert got: [moe layers][experts]."""
    loads = {}
    for name, ids in corpus.validation.items():
        total = torch.zeros(len(model.moe_layers), model.shape.n_routed_experts, dtype=torch.int64)
        for window in held_out_windows(ids, seq, LOAD_WINDOWS):
            model(window[None, :-1])
            for row, layer in zip(total, model.moe_layers, strict=True):
                row += layer.load
        loads[name] = total.tolist()
    return loads


def _tensors(model: DemoModel) -> dict[str, Tensor]:
    """Returns all weights under their Hugging Face names, as views into the model."""
    tensors = {"model.embed_tokens.weight": model.embed_tokens.weight, "model.norm.weight": model.norm.weight}
    for index, layer in enumerate(model.layers):
        tensors |= _layer_tensors(layer, f"model.layers.{index}.")
    return tensors


def _layer_tensors(layer: DecoderLayer, prefix: str) -> dict[str, Tensor]:
    tensors = {}
    for name, weight in layer.named_parameters():
        if name not in ("mlp.gate_up", "mlp.down"):
            tensors[prefix + name] = weight
    if isinstance(layer.mlp, SparseMoe):
        width = layer.mlp.shape.moe_intermediate_size
        tensors[prefix + "mlp.gate.e_score_correction_bias"] = layer.mlp.bias
        for expert in range(layer.mlp.shape.n_routed_experts):
            gate_up, down = layer.mlp.gate_up[expert], layer.mlp.down[expert]
            tensors[f"{prefix}mlp.experts.{expert}.gate_proj.weight"] = gate_up[:, :width].t()
            tensors[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = gate_up[:, width:].t()
            tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = down.t()
    return tensors


def _stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors as they are written."""
    return {
        name: tensor.detach().to(torch.float32 if name.endswith("bias") else torch.bfloat16).contiguous().clone()
        for name, tensor in tensors.items()
    }


def _config(shape: ModelShape) -> dict[str, object]:
    return asdict(shape) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": shape.intermediate_size,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "q_lora_rank": None,
        "num_key_value_heads": shape.num_attention_heads,
        "rope_theta": ROPE_THETA,
        "rope_interleave": True,
        "rope_scaling": None,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "use_cache": True,
        "num_nextn_predict_layers": 0,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
