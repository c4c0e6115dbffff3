"""Tokens per second of `LLM` against llama.cpp on the same GGUF file, both cores for either.

    python -m benchmarks.gguf_contestants --llama ENV/bin/python [--isa avx2] [--rounds 5] [--files NAME,NAME]

--llama: the Python of an environment with llama-cpp-python, built on this machine, and gguf

Files are of the bench model, and of layers of Qwen3-30B-A3B's shapes; Q4_K mixes types as llama.cpp does in Q4_K_M.
Batches of 1 and 16 generate 64 greedy tokens after 64 prompt tokens, prefill in the time; `prefill of 512` is a
prompt's time to its first token. Each side runs in a process of its own and waits while the other one is timed; a round
times each once, a ratio is the median over rounds.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench_model import CONFIG, NUM_OUTPUT, NUM_PROMPT, BenchLLM, write_bench_model
from benchmarks.conditions import add_isa, conditions, save
from benchmarks.decode_contestants import Contestant, compare
from benchmarks.real_shapes import write_model
from tests.models.gguf_checkpoint import Kind, as_q4_k_m, matrices_in, no_words, write_gguf
from tests.models.published import QWEN3_30B

TYPES = {"Q4_0": matrices_in(Kind.Q4_0), "Q4_K": as_q4_k_m, "Q8_0": matrices_in(Kind.Q8_0)}
SHAPES_OF_30B = "30B-A3B"
CASES = {
    "batch 1": (1, NUM_PROMPT, NUM_OUTPUT),
    "batch 16": (16, NUM_PROMPT, NUM_OUTPUT),
    "prefill of 512": (1, 512, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", default=f"Q4_0,Q4_K,{SHAPES_OF_30B}", help=f"of {', '.join(TYPES)}, {SHAPES_OF_30B}")
    parser.add_argument("--layers", type=int, default=3, help=f"of {SHAPES_OF_30B}")
    args = parser.parse_args()
    facts = conditions("moe-serve", "gguf")
    rows: list[dict[str, Any]] = []
    for name in args.files.split(","):
        with tempfile.TemporaryDirectory() as folder:
            file = write_file(name, Path(folder), args.layers)
            with (
                BenchLLM(file, 1, facts["cores"], max_model_len=1024) as ours,
                Contestant("llama.cpp", args.llama, file, name) as theirs,
            ):
                for case, (batch, length, num_output) in CASES.items():
                    found = compare(ours, {theirs.name: theirs}, batch, args.rounds, name, length, num_output)
                    rows += [{"file": row.pop("storage"), "case": case} | row for row in found]
                facts["versions"][theirs.name] = theirs.version
    notes = (
        f"One rank with {facts['cores']} threads, and as many of llama.cpp. Rounds are interleaved, {args.rounds} of "
        f"them. Q4_0, Q4_K and Q8_0 are files of the bench model (benchmarks/bench_model.py); {SHAPES_OF_30B} has "
        f"{args.layers} layers of Qwen3-30B-A3B, experts in Q4_0 and the rest in BF16. `same tokens`: output tokens up "
        "to the first that differs, of all; both quantise activations to int8, each in its own blocks, and random "
        "weights have near-ties."
    )
    title = "Tokens per second against llama.cpp on the same GGUF file"
    print(save("gguf_contestants", title, rows, facts, notes, per_cpu=True))


def write_file(name: str, folder: Path, layers: int) -> Path:
    """Returns a GGUF file without a tokenizer."""
    if name == SHAPES_OF_30B:
        file = folder / "shapes.gguf"
        write_model(file, QWEN3_30B | {"num_hidden_layers": layers})
        return file
    words = no_words(CONFIG["vocab_size"])
    return write_gguf(write_bench_model(folder / "model"), folder / "bench.gguf", TYPES[name], words)


if __name__ == "__main__":
    main()
