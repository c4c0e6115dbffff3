"""Structured output: masks of 151,000 words, compiling, and hostile schemas.

    python -m benchmarks.structured_output masks --text FOLDER [--note TEXT]

"masks" trains a byte-level BPE on the .py files of a folder, such as a site-packages, and compares llguidance with
xgrammar, where the latter is installed, on the same schemas and outputs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import conditions, save
from moe_serve.attention_dp.constraint import Constraint
from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.structured.grammar import Matcher
from moe_serve.structured.vocabulary import Vocabulary

WORDS = 151_000
EOS = 0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}  # fmt: skip
PERSONS = [
    {"name": f"Jean Valjean number {i}", "age": 30 + i, "tags": ["one of them", f"two \"quoted\" {i}"] * (1 + i % 3),
     "address": {"street": f"Rue de la Paix {i}", "zip": "75002"}}
    for i in range(20)
]  # fmt: skip
OUTPUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "object of 4 fields": (PERSON, [json.dumps(person) for person in PERSONS]),
    "any object": ({"type": "object"}, [json.dumps(person) for person in PERSONS]),
    "enum of 1,000": (
        {"enum": [f"value number {i}" for i in range(1000)]}, [f'"value number {i * 7}"' for i in range(50)]
    ),
}  # fmt: skip
HOSTILE = {
    "integer, multiple of 9,999,991": {"type": "integer", "multipleOf": 9_999_991},
    "9 x 6 alternatives multiplied": {
        "allOf": [{"anyOf": [{"properties": {f"k{i}_{j}": {}}} for j in range(6)]} for i in range(9)]
    },
    "repeats of repeats": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "18,000 values": {"enum": [f"value {i}" for i in range(18_000)]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["masks", "one"])
    parser.add_argument("--text", type=Path, help="folder of .py files")
    parser.add_argument("--note", default="", help="what else to say of the machine")
    parser.add_argument("--one", default="", help="of the benchmark itself: library and schema to compile")
    parser.add_argument("--tokenizer", default="")
    args = parser.parse_args()
    match args.what:
        case "masks":
            _masks(args.text, args.note)
        case "one":
            _one(args.tokenizer, *args.one.split(":", 1))


class _Ours:
    """llguidance, as this package calls it."""

    name = "llguidance"

    def __init__(self, backend: Any):
        self._vocabulary = Vocabulary(Tokenizer(backend).token_bytes(WORDS), [EOS])

    def compile(self, schema: Any) -> Any:
        return Matcher.compiled(Constraint("json_schema", json.dumps(schema)), self._vocabulary)

    def begin(self, compiled: Any) -> tuple[Callable[[], Any], Callable[[int], Any]]:
        matcher = compiled.copy()
        return matcher.mask, lambda token: matcher.advance([token])


class _Theirs:
    """xgrammar, one thread, without its cache of compiled grammars."""

    name = "xgrammar"

    def __init__(self, backend: Any):
        import xgrammar

        self._xgrammar = xgrammar
        words = [backend.id_to_token(token) for token in range(WORDS)]
        info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.BYTE_LEVEL, vocab_size=WORDS, stop_token_ids=[EOS])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, WORDS)

    def compile(self, schema: Any) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema))

    def begin(self, compiled: Any) -> tuple[Callable[[], Any], Callable[[int], Any]]:
        matcher = self._xgrammar.GrammarMatcher(compiled)
        return lambda: matcher.fill_next_token_bitmask(self._mask), matcher.accept_token


def _masks(text: Path, note: str) -> None:
    facts = conditions("llguidance", "xgrammar", "tokenizers")
    backend = _trained(text)
    libraries: list[Any] = [_Ours(backend)]
    if facts["versions"]["xgrammar"] != "not installed":
        libraries.append(_Theirs(backend))
    rows = [_mask_row(library, name, backend) for name in OUTPUTS for library in libraries]
    with tempfile.TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        rows += [_hostile_row(library.name, name, folder) for name in HOSTILE for library in libraries]
    notes = (
        f"A byte-level BPE of {WORDS:,} words. Time of one mask, of the token's own step and of compiling, one thread; "
        "20 to 50 outputs each. Hostile schemas: compiled in a process of their own, given up after 10 s. "
        f"Load average at the end: {os.getloadavg()[0]:.2f}. {note}"
    )
    print(save("structured_output_masks", "Masks of JSON schemas at 151,000 words", rows, facts, notes, per_cpu=True))


def _trained(text: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    paths = sorted(text.rglob("*.py"))
    sizes = np.cumsum([path.stat().st_size for path in paths])
    files = [str(path) for path, size in zip(paths, sizes, strict=True) if size < 80e6]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, show_progress=False, special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train(files, trainer)
    return backend


def _mask_row(library: Any, name: str, backend: Any) -> dict[str, Any]:
    schema, outputs = OUTPUTS[name]
    compiling, masks, steps = [], [], []
    for _ in range(5):
        begin_s = time.perf_counter()
        compiled = library.compile(schema)
        compiling.append(time.perf_counter() - begin_s)
    for output in outputs:
        mask, step = library.begin(compiled)
        for token in backend.encode(output).ids:
            begin_s = time.perf_counter()
            mask()
            masked_s = time.perf_counter()
            step(token)
            masks.append(masked_s - begin_s)
            steps.append(time.perf_counter() - masked_s)
    return {
        "schema": name,
        "library": library.name,
        "compile, ms": f"{1e3 * statistics.median(compiling):.1f}",
        "mask p50, ms": f"{1e3 * np.quantile(masks, 0.5):.3f}",
        "p90": f"{1e3 * np.quantile(masks, 0.9):.3f}",
        "p99": f"{1e3 * np.quantile(masks, 0.99):.3f}",
        "step p50, ms": f"{1e3 * statistics.median(steps):.4f}",
        "result": f"{len(masks)} masks",
    }


def _hostile_row(library: str, name: str, folder: str) -> dict[str, Any]:
    module = [sys.executable, "-m", "benchmarks.structured_output", "one", "--tokenizer", folder, "--one"]
    try:
        found = subprocess.run([*module, f"{library}:{name}"], capture_output=True, text=True, timeout=30)
        lines = found.stdout.splitlines()
        result = lines[-1] if lines else "given up"
    except subprocess.TimeoutExpired:
        result = "given up"
    took, _, result = result.partition("|") if "|" in result else ("> 10000", "", result)
    return {
        "schema": name, "library": library, "compile, ms": took, "mask p50, ms": "", "p90": "", "p99": "",
        "step p50, ms": "", "result": result,
    }  # fmt: skip


def _one(folder: str, library: str, name: str) -> None:
    """Compiles one schema in this process."""
    import signal

    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(f"{folder}/tokenizer.json")
    made: Any = _Ours(backend) if library == "llguidance" else _Theirs(backend)
    signal.alarm(10)
    begin_s = time.perf_counter()
    try:
        made.begin(made.compile(HOSTILE[name]))[0]()
        result = "served"
    except Exception as error:
        result = "refused" if isinstance(error, RequestError) else type(error).__name__
    took = 1e3 * (time.perf_counter() - begin_s)
    print(f"{took:.0f}|{result}")


if __name__ == "__main__":
    main()
