"""Reads a Hugging Face `config.json` into a ModelSpec, by the reader of its family.

Every file beside this one may hold READERS: model_type -> reader, and DEFAULTS: model_type -> what transformers takes
where config.json does not have a key; readers say what null means. A feature that would change the numbers and is not
implemented is refused by name, never ignored.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_serve.errors import ModelError
from moe_serve.models import families
from moe_serve.models.gguf_model import read_gguf_model
from moe_serve.models.hf_config import HfConfig
from moe_serve.models.model_files import read_json, shown
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_plan import dense_parameters

Reader = Callable[[HfConfig], ModelSpec]

# The folder may be hostile: sizes that are each possible may not be together.
_MOST_EXPERTS = 1 << 20  # over all layers; the largest models have about 25,000
_MOST_PARAMETERS = 1 << 47


def read_spec(folder: str | Path) -> ModelSpec:
    """Returns the spec of the model in a Hugging Face folder, or in a GGUF file.

    Raises ModelError when config.json cannot be read, when the architecture is not one of FAMILIES, or when the
    configuration asks for a feature that is not implemented; each message names it.
    """
    if Path(folder).is_file():
        return _of_gguf(Path(folder))
    path = Path(folder) / "config.json"
    values = read_json(path, "give a Hugging Face model folder, with config.json and *.safetensors")
    generation = path.with_name("generation_config.json")
    extra = read_json(generation, "correct or remove it") if generation.exists() else {}
    config = HfConfig(_with_defaults(_of_text(values), extra), str(path))
    if (why_not := REFUSED.get(str(values.get("model_type")).removesuffix("_text"))) is not None:
        raise config.refuse(why_not)
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        raise ModelError(
            f"{path}: model_type {shown(values.get('model_type'))} (architectures "
            f"{shown(values.get('architectures'))}) is not "
            f"supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    spec = replace(family(config), eos_token_ids=_eos_token_ids(config, HfConfig(extra, str(generation))))
    _check_total(str(path), spec)
    return spec


def _of_gguf(path: Path) -> ModelSpec:
    model = read_gguf_model(path)
    config = HfConfig(model.config, str(path))
    spec = FAMILIES[model.config["model_type"]](config)
    spec = model.as_stored(replace(spec, eos_token_ids=_eos_token_ids(config, HfConfig({}, str(path)))))
    _check_total(str(path), spec)
    return spec


def _of_text(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the configuration of the text model, which may lie inside that of one that also sees and hears."""
    model_type = str(values.get("model_type"))
    if model_type not in FAMILIES:
        return values
    thinker = values.get("thinker_config")
    outer = thinker if isinstance(thinker, Mapping) else values
    text = outer.get("text_config")
    if not isinstance(text, Mapping):
        return values
    merged = {key: value for key, value in outer.items() if not key.endswith("_config")} | dict(text)
    if model_type not in TIES_INSIDE and "tie_word_embeddings" in outer:
        merged["tie_word_embeddings"] = outer["tie_word_embeddings"]
    elif model_type not in TIES_INSIDE:
        merged.pop("tie_word_embeddings", None)
    return {**merged, "model_type": model_type}


def _with_defaults(values: Mapping[str, Any], generation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns config.json with what transformers takes where a key is not there, or rope_theta is null."""
    defaults = dict(DEFAULTS.get(str(values.get("model_type")), {}))
    size = values.get("vocab_size")
    if "eos_token_id" in generation or not isinstance(size, int) or defaults.get("eos_token_id", size) >= size:
        defaults.pop("eos_token_id", None)
    return {**defaults, **{key: value for key, value in values.items() if key != "rope_theta" or value is not None}}


def _check_total(where: str, spec: ModelSpec) -> None:
    """Raises ModelError for sizes that are each possible, but not together."""
    layers, experts = spec.num_layers, spec.num_logical
    if layers * experts > _MOST_EXPERTS:
        raise ModelError(
            f"{where}: {layers} layers of {experts} experts are {layers * experts} experts, expected "
            f"at most {_MOST_EXPERTS}; correct num_hidden_layers or the number of experts"
        )
    parameters = dense_parameters(spec) + spec.num_moe_layers * experts * spec.expert_parameters
    if parameters > _MOST_PARAMETERS:
        raise ModelError(
            f"{where}: its sizes make {parameters} parameters, expected at most {_MOST_PARAMETERS}; correct the sizes"
        )


def _eos_token_ids(config: HfConfig, generation: HfConfig) -> tuple[int, ...]:
    """Returns the ids that end a sequence: generation_config.json may name more than config.json."""
    ids: list[int] = []
    vocab_size = config.size("vocab_size")
    for source in (config, generation):
        value = source.get("eos_token_id", [])
        for item in value if isinstance(value, list) else [value]:
            if type(item) is not int or not 0 <= item < vocab_size:
                raise source.wrong("eos_token_id", value, f"ids below vocab_size {vocab_size}")
            if item not in ids:
                ids.append(item)
    return tuple(ids)


def _declared(what: str) -> Iterator[tuple[str, Any]]:
    this = __name__.rpartition(".")[2]
    for module in pkgutil.iter_modules(families.__path__):
        if module.name != this:
            found = importlib.import_module(f"{families.__name__}.{module.name}")
            yield from getattr(found, what, {}).items()


_ALIKE = (  # why models of several types are not served
    (("step3p5", "step3p7"), "activations with other limits in some layers"),
    (("nllb-moe", "switch_transformers"), "an encoder in front of the decoder"),
    (("glm5_next", "hy_v4", "qwen4_exp"), "a model of several residual streams"),
    (("inkling", "inkling_mm_model", "inkling2"), "attention by relative positions, with short convolutions,"),
    (("deepseek_ocr2", "unlimited_ocr", "aria"), "a model made to read pictures"),
)
REFUSED = {model_type: why_not for types, why_not in _ALIKE for model_type in types}
REFUSED |= {
    "jetmoe": "attention whose heads are chosen as experts are",
    "beam": "residual sums that are weighted by depth",
    "diffusion_gemma": "a model that writes blocks by diffusion, not token by token,",
    "ernie4_5_vl_moe": "a layer with experts of its own for pictures",
    "gemma4": "an MLP beside the experts of a layer, each with norms of its own,",
    "minimax_text_01": "the authors' own form of a checkpoint, which is served as converted, MiniMax-Text-01-hf,",
    "minimax_m1": "the authors' own form of a checkpoint, which is served as converted, MiniMax-M1-40k-hf or -80k-hf,",
    "minimax_m3_vl": "grouped-query attention to blocks that an indexer chooses",
    "doge": "experts of one row each, which product keys choose,",
    "dots3_note": "latent attention of other sizes in some layers, and experts of other numbers,",
    "muse_spark": "gates of the residual stream",
    "zaya": "keys and values that are convolved before attention, and a router that reads the one before it,",
    "mistral_large4": "latents and choices of an indexer that several layers share, and scales of queries by position,",
    "openai_privacy_filter": "a model that labels tokens and generates none",
}
TIES_INSIDE = ("llama4",)  # whose text model says whether its embeddings are tied, not the model around it
FAMILIES: Mapping[str, Reader] = dict(_declared("READERS"))
DEFAULTS: Mapping[str, Mapping[str, Any]] = dict(_declared("DEFAULTS"))
