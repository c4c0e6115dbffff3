"""The sampling parameters that a model recommends, in its generation_config.json, for calls that leave them out.

As in SGLang (`--sampling-defaults model`) and vLLM (`--generation-config auto`) they hold for OpenAI's routes and for
`LLM` without parameters. `/generate` has SGLang's defaults.
"""

from typing import Any

from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.config import ServeConfig, model_dir
from moe_serve.errors import ModelError, RequestError
from moe_serve.models.model_files import read_json
from moe_serve.server.api.sampling_fields import SGLANG_NAMES, take_sampling_params
from moe_serve.server.edge.json_fields import Fields

_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_FIX = "correct it, or set server.sampling_defaults: openai"


def model_defaults(config: ServeConfig) -> dict[str, Any]:
    """Returns the fields of SamplingParams that the model recommends, by name; {} where it or the settings name none.

    Raises ModelError for a file that cannot be read, or a value that no request could have.
    """
    path = model_dir(config.model) / "generation_config.json"
    if config.server.sampling_defaults == "openai" or not path.exists():
        return {}
    content = read_json(path, _FIX)
    named = {name: content[name] for name in _NAMES if content.get(name) is not None}
    try:
        params = take_sampling_params(Fields(named, "", {}, {}), SGLANG_NAMES).params
    except RequestError as error:
        raise ModelError(f"{path}: {error}; {_FIX}") from None
    usual = SamplingParams()
    return {name: value for name in named if (value := getattr(params, name)) != getattr(usual, name)}
