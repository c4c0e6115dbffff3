"""llama.cpp as a contestant: reads prompts as JSON lines, answers with seconds and tokens. Runs in its own environment.

arguments: model folder or GGUF file, dtype, number of cores. A folder's safetensors file becomes a GGUF file with the
same numbers. A line {"ids": ..., "file": ...} asks for log probabilities, which go into a file of numpy.
"""

import ctypes
import json
import struct
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import gguf
import llama_cpp as lib
import numpy as np

_KINDS = {"F32": np.float32, "BF16": np.uint16}
_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_MAX_SEQS, _MAX_TOKENS = 16, 1024  # of each


def main() -> None:
    model_path, cores = Path(sys.argv[1]), int(sys.argv[3])
    path = write_gguf(model_path) if model_path.is_dir() else model_path
    lib.llama_backend_init()
    lib.llama_log_set(_quiet, ctypes.c_void_p(0))
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp does not read {path}")
    params = lib.llama_context_default_params()
    params.n_ctx = _MAX_SEQS * _MAX_TOKENS
    params.n_batch = params.n_ubatch = 2048
    params.n_seq_max = _MAX_SEQS
    params.n_threads = params.n_threads_batch = cores
    context = lib.llama_init_from_model(model, params)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    built_for = lib.llama_print_system_info().decode()
    print(json.dumps({"version": f"llama-cpp-python {version('llama-cpp-python')} ({built_for.strip()})"}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        if "ids" in task:
            np.save(task["file"], log_probabilities(context, vocab, task["ids"]))
            print(json.dumps({"done": True}), flush=True)
            continue
        started_s = time.perf_counter()
        tokens = generate(context, vocab, task["prompts"], task["num_output"])
        print(json.dumps({"seconds": time.perf_counter() - started_s, "tokens": tokens}), flush=True)


@lib.llama_log_callback
def _quiet(level: int, text: bytes, data: object) -> None:
    if level == _ERROR:
        print(text.decode(), end="", file=sys.stderr)


def generate(context: object, vocab: int, prompts: list[list[int]], num_output: int) -> list[list[int]]:
    """Returns greedy tokens of all prompts, decoded as one batch."""
    rows = [(token, at, seq, at == len(p) - 1) for seq, p in enumerate(prompts) for at, token in enumerate(p)]
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(num_output):
        decode(context, rows)
        for i, (_, _, seq, wanted) in enumerate(rows):
            if wanted:
                outputs[seq].append(int(logits_at(context, i, vocab).argmax()))
        rows = [
            (output[-1], len(p) + step, seq, True) for seq, (p, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
    return outputs


def log_probabilities(context: object, vocab: int, ids: list[int]) -> np.ndarray:
    """Returns those of every token behind each of ids but the last, [len(ids) - 1, vocab] float32."""
    decode(context, [(token, at, 0, True) for at, token in enumerate(ids[:-1])])
    logits = np.stack([logits_at(context, i, vocab).astype(np.float64) for i in range(len(ids) - 1)])
    logits -= logits.max(1, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


def decode(context: object, rows: list[tuple[int, int, int, bool]]) -> None:
    """Runs one batch. rows: token, position, sequence, whether its logits are wanted"""
    batch = lib.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (token, at, seq, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, at, 1, seq
        batch.logits[i] = wanted
    assert lib.llama_decode(context, batch) == 0
    lib.llama_batch_free(batch)


def logits_at(context: object, row: int, vocab: int) -> np.ndarray:
    return np.ctypeslib.as_array(lib.llama_get_logits_ith(context, row), (vocab,))


def write_gguf(folder: Path) -> Path:
    """Returns a GGUF file of the Qwen3-MoE model in `folder`, with its numbers as they are stored."""
    config = json.loads((folder / "config.json").read_text())
    tensors = dict(read_safetensors(folder / "model.safetensors"))
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        ours = f"model.layers.{layer}."
        names |= {ours + theirs: f"blk.{layer}.{name}" for theirs, name in parts.items()}
        for part in ("gate", "up", "down"):
            each = [tensors.pop(f"{ours}mlp.experts.{e}.{part}_proj.weight") for e in range(config["num_experts"])]
            _add(writer, f"blk.{layer}.ffn_{part}_exps.weight", np.stack(each))
    for source, name in names.items():
        _add(writer, name + ".weight", tensors.pop(source + ".weight"))
    assert not tensors, f"tensors without a place: {sorted(tensors)[:4]}"
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
    is_bf16 = values.dtype == np.uint16
    if is_bf16 and (values.ndim == 1 or "gate_inp" in name):  # llama.cpp wants norms and gates in float32
        values, is_bf16 = (values.astype(np.uint32) << 16).view(np.float32), False
    if is_bf16:
        writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, values)


def read_safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and arrays, bfloat16 as uint16."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            yield name, np.frombuffer(data[start:end], _KINDS[entry["dtype"]]).reshape(entry["shape"])


if __name__ == "__main__":
    main()
