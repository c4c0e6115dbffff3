"""Prints the table "What fits where" of docs/models.md: memory that published models take on one host.

    python -m tools.what_fits

Each number is what `moe-serve check` counts for two ranks on one host with the defaults and requests of up to 4,096
tokens, out of the shapes alone. tests/test_docs.py holds the page to it.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from moe_serve.config import load_config
from moe_serve.launcher.examination.check import examine
from tests.models.published import GPT_OSS_20B, PRICED, PUBLISHED

HOSTS_GIB = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
SPARE_GIB = 1.0  # for the programs of two ranks and a front end, and the system
FORMS = {"bfloat16": "dense", "int8": "int8", "four bits": "int4"}
NUM_RANKS = 2
MODELS = {**PRICED, **{name: config for name, (config, _) in PUBLISHED.items()}, "gpt-oss-20b": GPT_OSS_20B}
IN_OTHER_FORMS = {"DeepSeek-V4-Flash": "FP8 and FP4"}  # than are read
del MODELS["Kimi-K2.5"]  # of the sizes of Kimi-K2, and published in four bits


def main() -> None:
    print("\n".join(table()))


def table() -> list[str]:
    """Returns the lines of the table, the smallest model first."""
    names = ["Model", "Published in", *(f"Experts in {form}" for form in FORMS), "Fits in four bits"]
    found = sorted((sizes(config)["four bits"], name) for name, config in MODELS.items())
    return [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}", *(line_of(name) for _, name in found)]


def line_of(model: str) -> str:
    """Returns the line of a model of MODELS."""
    config, found = MODELS[model], sizes(MODELS[model])
    stored = config.get("quantization_config", {}).get("quant_method")
    published = IN_OTHER_FORMS.get(model, stored.upper() if stored else "bfloat16")
    host = next((size for size in HOSTS_GIB if found["four bits"] + SPARE_GIB <= size), None)
    cells = [model, published, *(f"{size:.1f}" for size in found.values())]
    return f"| {' | '.join([*cells, f'{host} GiB' if host else 'several hosts'])} |"


def sizes(config: dict[str, Any]) -> dict[str, float]:
    """Returns GiB by form. config: as config.json"""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plain | {"torch_dtype": "bfloat16"}))
        return {name: gib(Path(folder), form) for name, form in FORMS.items()}


def gib(folder: Path, form: str) -> float:
    settings = [
        f"model.path={folder}", "model.load_format=dummy", "model.skip_tokenizer=true", f"model.expert_weights={form}",
        f"parallel.num_ranks={NUM_RANKS}", "model.max_model_len=4096", "parallel.device=cpu",
    ]  # fmt: skip
    return examine(load_config(overrides=settings)).host_bytes(NUM_RANKS) / 2**30


if __name__ == "__main__":
    main()
