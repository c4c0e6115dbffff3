"""GGUF files of tiny models, written by the `gguf` package as llama.cpp's converter would from a Hugging Face folder.

Names come from the package's own table. What the converter does to tensors is written here anew: it lays the experts of
a matrix together, reorders rows of queries and keys of Llama-like models (`LlamaModel.permute`), splits MLA's last
projection, takes gate and up of fused tensors apart, and leaves layers for multi-token prediction out.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_serve.models.families.registry import read_spec

TypeOf = Callable[[str], Kind]  # of a tensor, by its name in GGUF
Vocabulary = Callable[[gguf.GGUFWriter], None]
_K_TYPES = {Kind.Q4_K: (0.0004, 0.003), Kind.Q5_K: (0.0002, 0.003), Kind.Q6_K: (0.00006,)}  # their float16 factors

ARCHITECTURES: dict[str, gguf.MODEL_ARCH] = {
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
}
_REORDERED = ("mixtral", "granitemoe", "granitemoeshared")


def float32(name: str) -> Kind:
    return Kind.F32


def matrices_in(kind: Kind) -> TypeOf:
    """Returns the choice of a type for projections, embeddings and experts; the converter keeps routers in float32."""

    def choose(name: str) -> Kind:
        return kind if _is_matrix(name) and "ffn_gate_inp" not in name else Kind.F32

    return choose


def as_q4_k_m(name: str) -> Kind:
    """Returns types much as llama.cpp mixes them in Q4_K_M: larger ones where errors matter more."""
    kind = matrices_in(Kind.Q4_K)(name)
    larger = name.split(".")[-2] in ("attn_v", "output", "ffn_down_exps")
    return Kind.Q6_K if larger and kind is Kind.Q4_K else kind


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and "norm" not in name and "sinks" not in name and name != "rope_freqs.weight"


def write_gguf(
    folder: Path, path: Path, types: TypeOf = float32, vocabulary: Vocabulary | None = None, parts: int = 1
) -> Path:
    """Writes the model of a folder as a GGUF file, and into `path` without its suffix the same values in safetensors.

    parts: about how many files it is split over; their names begin with that of the path
    Returns the file, or the first one.
    """
    config = json.loads((folder / "config.json").read_text())
    predicting = tuple(
        f"model.layers.{config['num_hidden_layers'] + layer}."
        for layer in range(config.get("num_nextn_predict_layers", 0))
    )
    stored = {
        name: tensor.float()
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if not name.startswith(predicting)
    }
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=0 if parts == 1 else 40 // parts)
    _write_metadata(writer, config)
    if vocabulary is not None:
        vocabulary(writer)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    values: dict[str, Tensor] = {}
    for each in _converted(config, stored):
        rounded = []
        for piece in each.pieces:
            name = piece.name if piece.name.startswith("blk.") else names.get_name(piece.name, (".weight", ".bias"))
            assert name is not None, piece.name
            kind = types(name)
            if piece.tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:  # as the converter does where blocks do not fit
                kind = Kind.F16
            raw, of_piece = _coded(piece.tensor.contiguous().numpy(), kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
            rounded.append(torch.from_numpy(of_piece))
        values |= each.undo(*rounded)
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(read_spec(folder).rope.divisors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference = path.with_suffix("")
    reference.mkdir()
    (reference / "config.json").write_text((folder / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in values.items()}, reference / "model.safetensors")
    return path if parts == 1 else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _coded(values: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Returns what is stored, and its values in float32. Blocks of K types are random."""
    if kind in _K_TYPES:
        raw = random_blocks(kind, values.shape)
    else:
        raw = gguf.quants.quantize(values, kind)
    return raw, gguf.quants.dequantize(raw, kind).reshape(values.shape)


def random_blocks(kind: Kind, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns random bytes of a type, with float16 factors that make numbers of about 0.05."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng([seed, int(kind), *shape])
    raw = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, num_bytes), dtype=np.uint8)
    factors = generator.uniform(0.7, 1.3, (*raw.shape[:-1], len(_K_TYPES[kind]))) * _K_TYPES[kind]
    halves = factors.astype(np.float16).view(np.uint8)
    at = slice(208, 210) if kind is Kind.Q6_K else slice(0, 4)
    raw[..., at] = halves
    return raw.reshape(*shape[:-1], -1)


def _write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    heads, family = config["num_attention_heads"], config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    is_mla = "kv_lora_rank" in config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("intermediate_size_mlp", config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if is_mla else config.get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    experts = next(config[name] for name in _NUMBERS_OF_EXPERTS if config.get(name))
    writer.add_expert_count(experts)
    writer.add_expert_used_count(next(config[name] for name in _NUMBERS_CHOSEN if config.get(name)))
    if config.get("head_dim") and not is_mla and "granite" not in family:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if config.get("n_group") is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1"):
        if family == "glm4_moe" or config.get("scoring_func") == "sigmoid":  # else the file does not say
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config["norm_topk_prob"]:
            writer.add_expert_weights_norm(True)
    match family:
        case "mixtral":
            writer.add_vocab_size(config["vocab_size"])
            writer.add_rope_dimension_count(head_dim)
        case "qwen2_moe":
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        case "qwen3_moe":
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        case "granitemoe" | "granitemoeshared":
            writer.add_attention_scale(config["attention_multiplier"])
            writer.add_embedding_scale(config["embedding_multiplier"])
            writer.add_residual_scale(config["residual_multiplier"])
            writer.add_logit_scale(config["logits_scaling"])
            if config.get("shared_intermediate_size"):
                writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        case "deepseek_v2" | "deepseek_v3":
            if config["q_lora_rank"] is not None:
                writer.add_q_lora_rank(config["q_lora_rank"])
            writer.add_kv_lora_rank(config["kv_lora_rank"])
            writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
            writer.add_value_length(config["kv_lora_rank"])
            writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
            writer.add_value_length_mla(config["v_head_dim"])
            writer.add_rope_dimension_count(config["qk_rope_head_dim"])
            if "mscale_all_dim" in rope:
                writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        case "glm4_moe":
            writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 0.5)))
        case "gpt_oss":
            writer.add_sliding_window(config["sliding_window"])
            writer.add_expert_feed_forward_length(config["intermediate_size"])
        case "llama4_text":
            writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
            writer.add_expert_feed_forward_length(config["intermediate_size"])
        case "minimax_m2":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_feed_forward_length(config["intermediate_size"])
            writer.add_rope_dimension_count(config["rotary_dim"])
        case "hunyuan_v1_moe":
            writer.add_expert_feed_forward_length(config["intermediate_size"])
            writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        case "ernie4_5_moe":
            writer.add_interleave_moe_layer_step(config.get("moe_layer_interval", 1))
            writer.add_leading_dense_block_count(config["moe_layer_start_index"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
            writer.add_expert_shared_count(config["moe_num_shared_experts"])


_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUMBERS_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")

Undo = Callable[..., dict[str, Tensor]]


@dataclass
class _Piece:
    """name: in the package's table;  tensor: as the converter writes it"""

    name: str
    tensor: Tensor


@dataclass
class _Converted:
    """The tensors that the converter makes of one or more of a folder's. undo: of theirs, in order, to the folder's"""

    pieces: list[_Piece]
    undo: Undo


def _converted(config: dict[str, Any], stored: dict[str, Tensor]) -> Iterator[_Converted]:
    experts: dict[str, dict[int, str]] = {}
    for name, tensor in stored.items():
        behind = name.split(".experts.")[-1].split(".")
        if ".experts." in name and behind[0].isdigit():
            merged = name.replace(f".experts.{behind[0]}.", ".experts.")
            experts.setdefault(merged, {})[int(behind[0])] = name
        else:
            yield _converted_alone(config, name, tensor)
    for merged, names in experts.items():
        together = torch.stack([stored[names[expert]] for expert in range(len(names))])
        yield _Converted([_Piece(merged, together)], lambda rows, names=names: {names[e]: rows[e] for e in names})


def _converted_alone(config: dict[str, Any], name: str, tensor: Tensor) -> _Converted:
    family = config["model_type"]
    if family in _REORDERED and name.split(".")[-2] in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        piece = _Piece(name, pairs_side_by_side(tensor, heads))
        return _Converted([piece], lambda rows: {name: pairs_half_a_head_apart(rows, heads)})
    if name.endswith("shared_expert_gate.weight"):
        return _Converted([_Piece(name, tensor[0])], lambda row: {name: row[None]})
    if name.endswith("e_score_correction_bias"):
        piece = _Piece(name.replace("correction_bias", "correction.bias"), tensor.flatten())
        return _Converted([piece], lambda row: {name: row.view(tensor.shape)})
    if name.endswith("sinks"):
        return _Converted([_Piece(name + ".weight", tensor)], lambda row: {name: row})
    if name.endswith("kv_b_proj.weight"):
        heads = config["num_attention_heads"]
        keys, values = tensor.view(heads, -1, tensor.shape[1]).split(
            [config["qk_nope_head_dim"], config["v_head_dim"]], 1
        )
        pieces = [_Piece(name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)),
                  _Piece(name.replace("kv_b_proj", "v_b_proj"), values)]  # fmt: skip
        return _Converted(
            pieces, lambda keys, values: {name: torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)}
        )
    if "input_linear" in name:  # Granite: gate above up, of all experts or of the shared one
        gate, up = tensor.chunk(2, -2)
        pieces = [_Piece(_granite_name(name, linear), half) for linear, half in (("gate", gate), ("up", up))]
        return _Converted(pieces, lambda gate, up: {name: torch.cat((gate, up), -2)})
    if name.endswith("experts.gate_up_proj"):
        columns = tensor.transpose(1, 2)
        halves = (columns[:, ::2], columns[:, 1::2]) if family == "gpt_oss" else columns.chunk(2, 1)
        pieces = [_Piece(name.replace("gate_up_proj", f"{linear}_proj.weight"), half)
                  for linear, half in zip(("gate", "up"), halves, strict=True)]  # fmt: skip
        join = torch.stack if family == "gpt_oss" else torch.cat
        dim = 2 if family == "gpt_oss" else 1

        def fused(gate: Tensor, up: Tensor) -> dict[str, Tensor]:
            both = join((gate, up), dim).reshape(columns.shape)
            return {name: both.transpose(1, 2)}

        return _Converted(pieces, fused)
    if name.endswith("experts.gate_up_proj_bias"):
        pieces = [_Piece(name.replace("gate_up_proj_bias", f"{linear}_proj.bias"), tensor[:, at::2])
                  for at, linear in enumerate(("gate", "up"))]  # fmt: skip
        return _Converted(pieces, lambda gate, up: {name: torch.stack((gate, up), 2).flatten(1)})
    if name.endswith("experts.down_proj_bias"):
        return _Converted([_Piece(name.replace("_bias", ".bias"), tensor)], lambda rows: {name: rows})
    if name.endswith("experts.down_proj"):
        return _Converted([_Piece(name + ".weight", tensor.transpose(1, 2))], lambda rows: {name: rows.transpose(1, 2)})
    return _Converted([_Piece(name, tensor)], lambda rows: {name: rows})


def _granite_name(name: str, linear: str) -> str:
    layer = name.split(".")[2]
    return f"blk.{layer}.ffn_{linear}_{'shexp' if 'shared_mlp' in name else 'exps'}.weight"


def write_bpe(tokenizer: Path, pre: str, bos: int, eos: int, template: str | None = None) -> Vocabulary:
    """Returns what writes the vocabulary of a byte-level tokenizer.json. pre: the name of its rules to split text"""
    content = json.loads(tokenizer.read_text())
    ids = dict(content["model"]["vocab"]) | {each["content"]: each["id"] for each in content["added_tokens"]}
    tokens = sorted(ids, key=lambda text: ids[text])
    special = {each["content"]: each["special"] for each in content["added_tokens"]}
    kinds = {None: gguf.TokenType.NORMAL, True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([kinds[special.get(text)] for text in tokens])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(bos)
        writer.add_eos_token_id(eos)
        if template is not None:
            writer.add_chat_template(template)

    return write


def write_pieces(pieces: list[tuple[str, float, int]], bos: int, eos: int) -> Vocabulary:
    """Returns what writes a sentencepiece vocabulary of (text, score, type)."""

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([text for text, *_ in pieces])
        writer.add_token_scores([score for _, score, _ in pieces])
        writer.add_token_types([kind for *_, kind in pieces])
        writer.add_bos_token_id(bos)
        writer.add_eos_token_id(eos)

    return write


def no_words(vocab_size: int | None) -> Vocabulary:
    """Returns what says that a file has ids only. vocab_size: None where the metadata of the family say it"""

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("none")
        if vocab_size is not None:
            writer.add_vocab_size(vocab_size)

    return write


def write_header(path: Path, vocabulary: Vocabulary, architecture: str = "qwen3moe") -> Path:
    """Writes a file with a vocabulary and one small tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    vocabulary(writer)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pairs_side_by_side(rows: Tensor, heads: int) -> Tensor:
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def pairs_half_a_head_apart(rows: Tensor, heads: int) -> Tensor:
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
