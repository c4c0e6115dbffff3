"""Calls of OpenAI's routes have the sampling parameters that the model recommends, unless they name their own."""

import json
from pathlib import Path

import pytest

from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.config import load_config, model_dir
from moe_serve.errors import ModelError
from moe_serve.launcher.llm import params_of_each
from moe_serve.server.api.params import model_defaults
from tests.server.api.calls import CHAT, COMPLETIONS, HI, post
from tests.server.served import fake_config, in_event_loop, serving

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.0, "pad_token_id": 0}


def folder_with(tmp_path: Path, recommended: object) -> Path:
    """The demo model with this generation_config.json."""
    for file in model_dir(load_config().model).iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    return tmp_path


def of_model(params: SamplingParams) -> tuple[float, int, float]:
    return params.temperature, params.top_k, params.top_p


@in_event_loop
async def test_a_call_has_the_models_defaults_but_for_the_fields_that_it_sets(tmp_path):
    async with serving(1, f"model.path={folder_with(tmp_path, QWEN)}") as served:
        seen = served.workers[0].submitted
        for path, fields in (
            (COMPLETIONS, {"prompt": "a"}),
            (CHAT, {"messages": HI}),
            ("/v1/responses", {"input": "a"}),
        ):
            assert (await post(served, path, **fields, temperature=None)).status_code == 200
            assert of_model(seen[-1].params) == (0.6, 20, 0.95)
            assert (await post(served, path, **fields, temperature=0, top_p=1)).status_code == 200
            assert of_model(seen[-1].params) == (0, 20, 1)
        assert (await served.client.post("/v1/responses", json={"input": "a"})).json()["temperature"] == 0.6
        assert (await served.generate(text="a")).status_code == 200
        assert of_model(seen[-1].params) == (1, -1, 1)  # /generate has SGLang's


@in_event_loop
async def test_openais_defaults_are_there_for_the_asking(tmp_path):
    async with serving(1, f"model.path={folder_with(tmp_path, QWEN)}", "server.sampling_defaults=openai") as served:
        assert (await post(served, CHAT, messages=HI)).status_code == 200
        assert of_model(served.workers[0].submitted[-1].params) == (1, -1, 1)


def test_llm_without_params_has_them_too(tmp_path):
    default = SamplingParams(**model_defaults(fake_config(1, f"model.path={folder_with(tmp_path, QWEN)}")))
    assert of_model(default) == (0.6, 20, 0.95)
    own = SamplingParams()
    assert params_of_each(["a", "b"], None, default) == [default, default]
    assert params_of_each(["a"], own, default) == [own]


@pytest.mark.parametrize(
    ("recommended", "words"),
    [
        ({"temperature": "hot"}, 'temperature is "hot"'),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ([], "holds a list"),
    ],
)
def test_a_wrong_recommendation_is_named_at_start(tmp_path, recommended, words):
    config = fake_config(1, f"model.path={folder_with(tmp_path, recommended)}")
    with pytest.raises(ModelError, match=rf"generation_config.json: {words}.*server.sampling_defaults: openai"):
        model_defaults(config)


def test_what_is_usual_or_no_sampling_parameter_changes_nothing(tmp_path):
    usual = {"temperature": 1.0, "top_k": 0, "top_p": None, "max_new_tokens": 5, "eos_token_id": 1}
    assert model_defaults(fake_config(1, f"model.path={folder_with(tmp_path, usual)}")) == {}
