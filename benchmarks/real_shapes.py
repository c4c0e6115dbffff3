"""Models of real size in four bits, with random weights, served on this machine: start, tokens per second, memory.

    python -m benchmarks.real_shapes [--model qwen3-30b-a3b|gpt-oss-20b] [--layers N] [--ranks 2] [--folder FOLDER]

Writes a GGUF file of the model's shapes, experts in Q4_0 (gpt-oss: MXFP4), the rest in BF16, and serves it twice by
`moe-serve serve` with one thread for each rank: first with an empty folder of packed weights (model.weight_cache), then
with what the first start has left there. Before either start the file that it needs is read once, which is timed.
Requests have 64 random tokens, and get 64; prefill is in the time. Memory is the sum of Pss over ranks once all have
answered, so what they share counts once. All layers take minutes, and twice the file on the disk.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from numpy.typing import NDArray

from benchmarks.bench_model import NUM_OUTPUT, draw_prompts
from benchmarks.conditions import conditions, save
from benchmarks.server import Server, pss
from moe_serve.config import load_config
from moe_serve.launcher.examination.check import examine
from tests.models.gguf_checkpoint import no_words
from tests.models.published import GPT_OSS_20B, QWEN3_30B

MODELS = {"qwen3-30b-a3b": QWEN3_30B, "gpt-oss-20b": GPT_OSS_20B}
_DRAWN = 1 << 22  # numbers of a dense tensor, which repeat: those of embeddings take minutes
EXPERTS_IN = {"qwen3_moe": Kind.Q4_0, "gpt_oss": Kind.MXFP4}


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file. shape: rows last but one, as torch has it"""

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def num_bytes(self) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block * block_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="where the file stays, and is found again; default: a temporary one"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    facts = conditions("moe-serve", "gguf")
    config = MODELS[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
    layers = config["num_hidden_layers"]
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        path = (args.folder or Path(temporary)) / f"{args.model}_{layers}_layers.gguf"
        if not path.exists():
            print(f"{path}: {gib(write_model(path, config))} GiB written", flush=True)
        rows = [{"file GiB": gib(path.stat().st_size)} | measure(path, temporary, args)]
    notes = (
        f"Random weights of {args.model}, {layers} layers, {args.ranks} ranks with one thread each. Tokens "
        f"per second are medians of {args.rounds} rounds. Load average at the end {os.getloadavg()[0]:.2f}."
    )
    name = f"real_shapes_{args.model}_{layers}_layers"
    print(save(name, f"{args.model}, {layers} layers, in four bits", rows, facts, notes, per_cpu=True))


def measure(path: Path, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """folder: of packed weights, empty"""
    settings = {
        "model.path": path, "model.skip_tokenizer": True, "model.max_model_len": 1024, "model.weight_cache": folder,
        "parallel.num_ranks": args.ranks, "parallel.threads_per_rank": 1, "cache.memory_gib": 0.25,
        "engine.max_batch_tokens": 512, "engine.max_running_requests": 16,
    }  # fmt: skip
    counted = examine(load_config(overrides=[f"{name}={value}" for name, value in settings.items()]))
    read_s = timed(read_whole, path)
    with Server(settings) as server:
        first_s = server.ready_s
    (packed,) = Path(folder).glob("*.weights")
    packed_read_s = timed(read_whole, packed)
    with Server(settings) as server:
        rates: dict[int, list[float]] = {1: [], 16: []}
        for seed in range(args.rounds):
            for batch, found in rates.items():
                seconds = timed(ask, server, batch, seed)
                found.append(batch * NUM_OUTPUT / seconds)
        server.answer()
        pids = server.pids().values()
        together, own = sum(map(pss, pids)), sum(pss(pid, "Pss_Anon") for pid in pids)
    return {
        "reading the file s": round(read_s, 1),
        "ready s": round(first_s, 1),
        "reading packed weights s": round(packed_read_s, 1),
        "ready again s": round(server.ready_s, 1),
        "tok/s, batch 1": round(float(np.median(rates[1])), 1),
        "batch 16": round(float(np.median(rates[16])), 1),
        "packed GiB": gib(packed.stat().st_size),
        "Pss of the ranks GiB": gib(together),
        "of it anonymous": gib(own),
        "counted by `moe-serve check` GiB": gib(counted.host_bytes(args.ranks)),
    }


def gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 2)


def timed(function: Any, *args: Any) -> float:
    """Returns the seconds that a call takes."""
    started_s = time.perf_counter()
    function(*args)
    return time.perf_counter() - started_s


def ask(server: Server, batch: int, seed: int) -> None:
    """Sends requests at once, and waits for all answers."""
    with ThreadPoolExecutor(batch) as threads:
        list(threads.map(lambda ids: server.generate(ids, NUM_OUTPUT), draw_prompts(batch, 100 * batch + seed)))


def read_whole(path: Path) -> None:
    piece = bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


# ---- the file


def write_model(path: Path, config: dict[str, Any]) -> int:
    """Writes a GGUF file with random weights; returns its bytes. config: of Qwen3-MoE or gpt-oss, as in config.json

    It grows beside its place, tensor by tensor. One that was left half-made is gone on with.
    """
    part, tensors = path.with_suffix(".part"), list(tensors_of(config))
    head = head_of(path.with_suffix(".head"), config, tensors)
    with part.open("ab+") as file:
        file.seek(0)
        if file.read(len(head)) != head:
            file.truncate(0)
            file.write(head)
        num_there, at = file.seek(0, os.SEEK_END), len(head)
        for number, each in enumerate(tensors):
            end = at + GGUFWriter.ggml_pad(each.num_bytes, gguf.GGUF_DEFAULT_ALIGNMENT)
            if end > num_there:
                file.truncate(at)
                file.write(drawn(each, np.random.default_rng(number)))
                file.truncate(end)
                file.seek(end)
            at = end
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    return at


def head_of(path: Path, config: dict[str, Any], tensors: Sequence[Tensor]) -> bytes:
    """Returns what stands before the tensors. path: of a file for that, for a moment"""
    family = config["model_type"]
    writer = GGUFWriter(path, {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}[family])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(width_of(config))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(experts_of(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_eos_token_id(2)
    no_words(config["vocab_size"])(writer)
    if family == "gpt_oss":
        scaling = config["rope_scaling"]
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    for each in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[each.kind]
        in_bytes = (*each.shape[:-1], each.shape[-1] // block * block_bytes)
        writer.add_tensor_info(each.name, in_bytes, np.dtype(np.uint8), each.num_bytes, each.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    head = path.read_bytes()
    path.unlink()
    return head.ljust(GGUFWriter.ggml_pad(len(head), gguf.GGUF_DEFAULT_ALIGNMENT), b"\0")


def experts_of(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config["num_local_experts"])


def width_of(config: dict[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def tensors_of(config: dict[str, Any]) -> Iterator[Tensor]:
    hidden, vocab, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts, width, family = experts_of(config), width_of(config), config["model_type"]
    is_gpt = family == "gpt_oss"
    yield Tensor("token_embd.weight", (vocab, hidden), Kind.BF16)
    yield Tensor("output_norm.weight", (hidden,), Kind.F32)
    yield Tensor("output.weight", (vocab, hidden), Kind.BF16)
    matrices = {
        "attn_q": (heads, hidden), "attn_k": (kv_heads, hidden), "attn_v": (kv_heads, hidden),
        "attn_output": (hidden, heads), "ffn_gate_inp": (experts, hidden), "ffn_gate_exps": (experts, width, hidden),
        "ffn_up_exps": (experts, width, hidden), "ffn_down_exps": (experts, hidden, width),
    }  # fmt: skip
    norms = {"attn_norm": hidden} | (
        {"post_attention_norm": hidden, "attn_sinks": config["num_attention_heads"]}
        if is_gpt
        else {"ffn_norm": hidden, "attn_q_norm": head, "attn_k_norm": head}
    )
    for layer in range(config["num_hidden_layers"]):
        for name, size in norms.items():
            yield Tensor(f"blk.{layer}.{name}.weight", (size,), Kind.F32)
        for name, shape in matrices.items():
            kind = Kind.F32 if name == "ffn_gate_inp" else EXPERTS_IN[family] if "exps" in name else Kind.BF16
            yield Tensor(f"blk.{layer}.{name}.weight", shape, kind)
            if is_gpt:
                yield Tensor(f"blk.{layer}.{name}.bias", shape[:-1], Kind.F32)


def drawn(tensor: Tensor, draw: np.random.Generator) -> NDArray[np.uint8]:
    """Returns the bytes of random weights, with a deviation of about one over the root of the row's length."""
    deviation = tensor.shape[-1] ** -0.5
    if "norm" in tensor.name:
        return np.ones(tensor.shape, np.float32).view(np.uint8)
    if tensor.kind in (Kind.F32, Kind.BF16):
        size = int(np.prod(tensor.shape))
        values = draw.standard_normal(min(size, _DRAWN), np.float32)
        values *= 0.02 if len(tensor.shape) == 1 or tensor.name.endswith("bias") else deviation
        words = values.view(np.uint32)
        words = words if tensor.kind is Kind.F32 else (words >> 16).astype(np.uint16)
        return np.resize(words, size).view(np.uint8)
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    raw = np.frombuffer(draw.bytes(tensor.num_bytes), np.uint8).reshape(-1, block_bytes).copy()
    if tensor.kind is Kind.Q4_0:  # codes from -8 to 7, whose deviation is 4.6
        raw[:, :2] = np.array([deviation / 4.6], np.float16).view(np.uint8)
    else:  # MXFP4: a power of two, for numbers whose deviation is 3
        raw[:, 0] = 127 + round(float(np.log2(deviation / 3)))
    return raw.reshape(-1)


if __name__ == "__main__":
    main()
