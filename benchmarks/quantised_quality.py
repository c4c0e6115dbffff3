"""How far weights of fewer bits move a model's log probabilities, against the same model with its own numbers.

    python -m benchmarks.quantised_quality [--tokens 500]

The demo model reads Python source and documentation of the standard library, and tiny random models of a few families
(tests/models/families.py) random ids, in one piece. Experts are quantised at load, or all matrices are those of a GGUF
file, in which attention, embeddings and the head keep their codes, too. `shift` is the mean of |log p - log p'| of the
tokens that follow, `KL` the mean divergence of the distributions in nats, `other first` the share of positions whose
likeliest token is another one. The demo model was trained, so its shift says something of real models; random ones
have flat distributions, and show that nothing is wrong with a family. Takes a minute.
"""

import argparse
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import add_isa, conditions, save
from moe_serve.config import load_config, model_dir
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_served_model
from moe_serve.models.tokenizer import Tokenizer
from tests.models import families
from tests.models.gguf_checkpoint import Kind, matrices_in, write_gguf
from tests.models.runner import Runner

FORMS = {
    "int8, float activations": ["model.expert_weights=int8"],
    "int4, float activations": ["model.expert_weights=int4", "model.activations=float"],
    "int4, int8 activations": ["model.expert_weights=int4"],
}
FILES = {Kind.Q8_0: "Q8_0", Kind.Q4_0: "Q4_0"}  # of GGUF, all matrices
ACTIVATIONS = ("float", "int8")
FAMILIES = ("qwen3_moe", "deepseek_v2", "mixtral", "olmoe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_isa(parser)
    parser.add_argument("--tokens", type=int, default=500, help="of each text")
    args = parser.parse_args()
    facts = conditions("transformers")
    with tempfile.TemporaryDirectory() as folder:
        files = forms_of_files(Path(folder))
        rows = [row for text, ids in demo_texts(args.tokens) for row in compared(f"demo, {text}", [], ids, files)]
        for name in FAMILIES:
            families.save(families.make_oracle(name), Path(folder) / name)
            ids = torch.randint(3, 256, (200,), generator=torch.Generator().manual_seed(0)).tolist()
            rows += compared(f"tiny {name}", [f"model.path={Path(folder) / name}", "model.skip_tokenizer=true"], ids)
    print(save("quantised_quality", "Log probabilities with weights of fewer bits", rows, facts))


def demo_texts(num_tokens: int) -> list[tuple[str, list[int]]]:
    tokenizer = Tokenizer.from_folder(model_dir(load_config().model))
    documented = [argparse, *filter(callable, vars(Path).values())]
    texts = {
        "Python code": inspect.getsource(json.decoder),
        "Python documentation": "\n".join(inspect.getdoc(each) or "" for each in documented),
    }
    return [(name, tokenizer.encode(text)[:num_tokens]) for name, text in texts.items()]


def forms_of_files(folder: Path) -> dict[str, list[str]]:
    """Writes the demo model as GGUF files. Returns the overrides that serve them, by what they are."""
    demo, forms = model_dir(load_config().model), {}
    for kind, name in FILES.items():
        file = write_gguf(demo, folder / f"{name}.gguf", matrices_in(kind))
        for each in ACTIVATIONS:
            settings = [f"model.path={file}", "model.skip_tokenizer=true", f"model.activations={each}"]
            forms[f"all in {name}, {each} activations"] = settings
    return forms


def compared(
    model: str, overrides: list[str], ids: list[int], more_forms: dict[str, list[str]] | None = None
) -> list[dict[str, Any]]:
    """Returns a row for each of FORMS, and of more_forms. overrides: of the model"""
    wanted, following = log_probabilities([*overrides, "model.expert_weights=dense"], ids), torch.tensor(ids[1:])
    loss = -wanted[torch.arange(len(following)), following].mean()
    rows = []
    for form, more in (FORMS | (more_forms or {})).items():
        got = log_probabilities([*overrides, *more], ids)
        at = torch.arange(len(following)), following
        row = {
            "model": model, "weights": form, "tokens": len(following), "loss": float(loss),
            "loss with these": float(-got[at].mean()), "shift": float((got[at] - wanted[at]).abs().mean()),
            "KL": float((wanted.exp() * (wanted - got)).sum(1).mean()),
            "other first": f"{float((got.argmax(1) != wanted.argmax(1)).float().mean()):.1%}",
        }  # fmt: skip
        print(*row.values(), sep=" | ", flush=True)
        rows.append(row)
    return rows


def log_probabilities(overrides: list[str], ids: list[int]) -> Tensor:
    """Returns those of every token behind each but the last, [len(ids) - 1, vocab] float32."""
    config = load_config(overrides=["cache.memory_gib=0.05", "parallel.device=cpu", *overrides])
    served = build_served_model(config, EpGroup(0, 1, torch.device("cpu")))
    runner = Runner(served.decoder, served.numerics)
    request = runner.request("only", ids)
    runner.prefill([request])
    return runner.stacked(request)[:-1].log_softmax(1)


if __name__ == "__main__":
    main()
