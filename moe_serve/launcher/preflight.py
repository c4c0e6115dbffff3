"""Looks at the files that a configuration names, before any process is started. Torch-free."""

from pathlib import Path

from moe_serve.config import ServeConfig, model_dir
from moe_serve.errors import ConfigError, ModelError


def look_for_files(config: ServeConfig) -> None:
    """Raises ModelError or ConfigError naming the first file that is missing or does not fit, and what to do."""
    from moe_serve.models.spec import read_spec

    folder = model_dir(config.model)
    if not folder.is_dir():
        raise ModelError(
            f"model.path is {config.model.path!r} but there is no such folder; give the folder of a Hugging Face "
            "model, or demo"
        )
    longest, wanted = read_spec(folder).max_position, config.model.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"model.max_model_len is {wanted} but the model knows {longest} positions; lower max_model_len"
        )
    if config.model.load_format != "dummy" and not list(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder}: there are no *.safetensors files; put the weights there, or set model.load_format: dummy"
        )
    if not config.model.skip_tokenizer and not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder}: there is no tokenizer.json; put it there, or set model.skip_tokenizer: true "
            "(--skip-tokenizer-init) and send input_ids"
        )
    location = config.eplb.init_expert_location
    if location != "trivial" and not Path(location).is_file():
        raise ConfigError(f"eplb.init_expert_location is {location!r} but there is no such file; correct the path")
