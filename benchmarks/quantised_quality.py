"""How far weights of fewer bits move a model's log probabilities, against the same model with its own numbers.

    python -m benchmarks.quantised_quality [--tokens 500] [--llama ENV/bin/python]

--llama: the Python of an environment with llama-cpp-python, built on this machine, and gguf, which reads the same files

The demo model reads Python source and documentation of the standard library; tiny random models of a few families
(tests/models/families.py) read several texts of random ids. Each text goes in one piece. Experts are quantised at load,
or all matrices are those of a GGUF file, in which attention, embeddings and the head keep their codes, too. `shift` is
the mean of |log p - log p'| of the tokens that follow, `KL` the mean divergence of the distributions in nats, `other
first` the share of positions whose likeliest token is another one. The demo model was trained, so its shift says
something of real models; random ones have flat distributions, and show that nothing is wrong with a family. A few
positions, where a near-tie of the gate goes to another expert, make much of a random model's shift: one text says
little. Takes minutes.
"""

import argparse
import contextlib
import inspect
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import add_isa, conditions, save
from benchmarks.decode_contestants import Contestant
from moe_serve.config import load_config, model_dir
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_served_model
from moe_serve.models.tokenizer import Tokenizer
from tests.models import families
from tests.models.gguf_checkpoint import Kind, matrices_in, no_words, write_gguf
from tests.models.runner import Runner

FORMS = {
    "int8, float activations": ["model.expert_weights=int8"],
    "int4, float activations": ["model.expert_weights=int4", "model.activations=float"],
    "int4, int8 activations": ["model.expert_weights=int4"],
}
FILES = {Kind.Q8_0: "Q8_0", Kind.Q4_0: "Q4_0"}  # of GGUF, all matrices
ACTIVATIONS = ("float", "int8")
NUM_RANDOM = 8  # texts of random ids
FAMILIES = ("qwen3_moe", "deepseek_v2", "mixtral", "olmoe")
IN_GGUF = ("qwen3_moe", "mixtral", "olmoe")  # that file has no biases of latents, which the tiny deepseek_v2 has
# llama.cpp reads deepseek2 without a query rank, as in the demo model, with 26 or 27 layers only.
READ_BY_LLAMA = ("qwen3_moe", "mixtral")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--tokens", type=int, default=500, help="of each text")
    parser.add_argument("--llama", type=Path)
    args = parser.parse_args()
    facts = conditions("transformers")
    with tempfile.TemporaryDirectory() as folder:
        forms = FORMS | forms_of_files(write_files(model_dir(load_config().model), Path(folder)))
        rows = [row for text, ids in demo_texts(args.tokens) for row in compared(f"demo, {text}", [], [ids], forms, [])]
        for name in FAMILIES:
            model = Path(folder) / name
            families.save(families.make_oracle(name), model)
            texts = [random_ids(seed) for seed in range(NUM_RANDOM)]
            files = write_files(model, model) if name in IN_GGUF else {}
            with files_read_by(args.llama if name in READ_BY_LLAMA else None, files) as theirs:
                overrides = [f"model.path={model}", "model.skip_tokenizer=true"]
                rows += compared(f"tiny {name}", overrides, texts, FORMS | forms_of_files(files), theirs)
            for each in theirs:
                facts["versions"][each.name] = each.version
    print(save("quantised_quality", "Log probabilities with weights of fewer bits", rows, facts))


def random_ids(seed: int) -> list[int]:
    ids: list[int] = torch.randint(3, 256, (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def demo_texts(num_tokens: int) -> list[tuple[str, list[int]]]:
    tokenizer = Tokenizer.from_folder(model_dir(load_config().model))
    documented = [argparse, *filter(callable, vars(Path).values())]
    texts = {
        "Python code": inspect.getsource(json.decoder),
        "Python documentation": "\n".join(inspect.getdoc(each) or "" for each in documented),
    }
    return [(name, tokenizer.encode(text)[:num_tokens]) for name, text in texts.items()]


def write_files(model: Path, folder: Path) -> dict[str, Path]:
    """Writes GGUF files of a model without its words. Returns them by their types."""
    config = json.loads((model / "config.json").read_text())
    words = no_words(None if config["model_type"] == "mixtral" else config["vocab_size"])
    return {name: write_gguf(model, folder / f"{name}.gguf", matrices_in(kind), words) for kind, name in FILES.items()}


def forms_of_files(files: dict[str, Path]) -> dict[str, list[str]]:
    """Returns the overrides that serve files, by what they are."""
    return {
        f"all in {name}, {each} activations": [
            f"model.path={file}", "model.skip_tokenizer=true", f"model.activations={each}",
        ]
        for name, file in files.items()
        for each in ACTIVATIONS
    }  # fmt: skip


@contextlib.contextmanager
def files_read_by(llama: Path | None, files: dict[str, Path]) -> Iterator[list[Contestant]]:
    """Yields llama.cpp with each of the files, in their order; none of them without a path to its Python."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Contestant("llama.cpp", llama, file, name)) for name, file in files.items() if llama]


def compared(
    model: str, overrides: list[str], texts: list[list[int]], forms: dict[str, list[str]], theirs: list[Contestant]
) -> list[dict[str, Any]]:
    """Returns a row for each of the forms, and of llama.cpp with FILES. overrides: of the model"""
    wanted = log_probabilities([*overrides, "model.expert_weights=dense"], texts)
    found = {form: log_probabilities([*overrides, *more], texts) for form, more in forms.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name, each in zip(FILES.values(), theirs, strict=False):
            read = [torch.from_numpy(each.log_probabilities(ids, Path(folder) / "found.npy")) for ids in texts]
            found[f"all in {name}, {each.name}"] = torch.cat(read)
    following = torch.cat([torch.tensor(ids[1:]) for ids in texts])
    at = torch.arange(len(following)), following
    loss = -wanted[at].mean()
    rows = []
    for form, got in found.items():
        row = {
            "model": model, "weights": form, "tokens": len(following), "loss": float(loss),
            "loss with these": float(-got[at].mean()), "shift": float((got[at] - wanted[at]).abs().mean()),
            "KL": float((wanted.exp() * (wanted - got)).sum(1).mean()),
            "other first": f"{float((got.argmax(1) != wanted.argmax(1)).float().mean()):.1%}",
        }  # fmt: skip
        print(*row.values(), sep=" | ", flush=True)
        rows.append(row)
    return rows


def log_probabilities(overrides: list[str], texts: list[list[int]]) -> Tensor:
    """Returns those of every token behind each but the last of a text, [sum of len(ids) - 1, vocab] float32."""
    config = load_config(overrides=["cache.memory_gib=0.05", "parallel.device=cpu", *overrides])
    served = build_served_model(config, EpGroup(0, 1, torch.device("cpu")))
    runner, found = Runner(served.decoder, served.numerics), []
    for number, ids in enumerate(texts):
        request = runner.request(str(number), ids)
        runner.prefill([request])
        found.append(runner.stacked(request)[:-1].log_softmax(1))
    return torch.cat(found)


if __name__ == "__main__":
    main()
